"""What a computer has given is counted once, whatever begins anew meanwhile."""

from __future__ import annotations

from node.owner.tally import Given, Tally


def test_each_device_counts_from_nothing_when_its_own_role_begins_anew() -> None:
    """Were their counts added up first, a card that moves to another stage would have all that the others gave in this
    visit counted once more."""
    tally = Tally()
    tally.begin_life()
    tally.count([{"tokens": 100.0, "accepted": 1.0}, {"tokens": 1000.0, "accepted": 10.0}], 2.0, "2026-01-01")
    tally.count([{"tokens": 30.0, "accepted": 0.0}, {"tokens": 1100.0, "accepted": 11.0}], 3.0, "2026-01-01")
    assert tally.visit == Given(100.0 + 30.0 + 1100.0, 1.0 + 11.0, 5.0)
    tally.begin_life()
    tally.count([{}, {"tokens": 5.0}], 0.0, "2026-01-02")
    assert tally.ever == Given(1235.0, 12.0, 5.0)
    assert tally.today("2026-01-02") == Given(5.0) and Tally.from_json(tally.to_json()).ever == tally.ever
