"""Who is audited, when a second opinion is asked for, and who is blamed."""

from __future__ import annotations

from typing import Any

import pytest

from node.server.audits import QUEUE_MAX, STRIKES_OUT, Audits, Ruling, Unit
from protocol.base.ids import NodeId, TaskId
from protocol.messages import AuditReport, Stored
from protocol.run.audits import Difference
from protocol.run.run import AuditSection
from tests.node.setting import backward, contribution, stored

A, B = NodeId("s1"), NodeId("s2")
LIAR = NodeId("v9")
UNIT_S = 10.0


class Desk:
    """Audits of a stage with two auditors, s1 and s2."""

    def __init__(self, *auditors: NodeId, **terms: Any) -> None:
        self.audits = Audits(AuditSection(**terms), lambda: b"k" * 32, lambda node: node in (A, B, ""), UNIT_S)
        self.number = 0
        for auditor in auditors or (A, B):
            self.audits.auditor_here(auditor)

    def bring(self, node: NodeId = LIAR, step: int = 3) -> bool:
        """A contribution of this member is with all shards; whether it is drawn."""
        self.number += 1
        message: Stored = stored(
            self.number, step, (backward(step, 0),), 0, contribution=contribution(self.number, node)
        )
        return self.audits.draw(message)

    def give(self, now: float = 0.0) -> list[Unit]:
        self.audits.check()
        return self.audits.give(now)

    def say(self, unit: Unit, *found: Difference, reason: str = "", now: float = 0.0) -> Ruling | None:
        assert unit.busy is not None
        report = AuditReport(
            ledger_generation=1,
            contribution=unit.contribution,
            step=unit.stored.step,
            attempt=len(unit.auditors),
            differences=found,
            reason=reason,
        )
        return self.audits.report(unit.busy, report, now)

    def judge(self, value: float, again: float | None = None, node: NodeId = LIAR) -> Ruling:
        """One contribution through both opinions."""
        assert self.bring(node)
        (unit,) = self.give()
        ruling = self.say(unit, differs(value, node))
        assert ruling is not None
        if ruling.outcome == "again":
            (unit,) = self.give()
            ruling = self.say(unit, differs(value if again is None else again, node))
            assert ruling is not None
        return ruling


def differs(value: float, node: NodeId = LIAR, claim: Any = "gradient") -> Difference:
    return Difference(claim=claim, node=node, task=TaskId(3, 0, 0, "B"), value=value)


def test_a_new_member_is_always_drawn_and_a_known_one_at_the_rate() -> None:
    """Until `first` of its contributions have passed; from then on about `rate` of them."""
    desk = Desk(first=5, rate=0.1)
    for _ in range(5):
        assert desk.audits.rate_of(LIAR) == 1.0
        assert desk.judge(0.0).outcome == "passed"
    assert desk.audits.rate_of(LIAR) == 0.1
    drawn = 0
    for _ in range(1000):
        if desk.bring():
            drawn += 1
            (unit,) = desk.give()
            desk.say(unit)
    assert 70 <= drawn <= 130


def test_the_draw_is_the_same_for_a_ledger_that_restarts_and_another_under_another_key() -> None:
    """It follows from the stage's key and the contribution's name, and from nothing that a member could choose."""

    def drawn(key: bytes) -> list[bool]:
        audits = Audits(AuditSection(first=0, rate=0.5), lambda: key, lambda node: False, UNIT_S)
        audits.auditor_here(A)
        found = []
        for number in range(64):
            found.append(audits.draw(stored(number, 3, (backward(3, 0),), 0)))
            for unit in audits.give(0.0):
                report = AuditReport(
                    ledger_generation=1, contribution=unit.contribution, step=3, attempt=1, differences=()
                )
                audits.report(A, report, 0.0)
        return found

    assert drawn(b"k" * 32) == drawn(b"k" * 32) != drawn(b"q" * 32)


def test_nobody_is_blamed_by_one_opinion() -> None:
    """The second opinion is another machine's; what only one of them found blames nobody."""
    desk = Desk()
    assert desk.bring()
    (unit,) = desk.give()
    ruling = desk.say(unit, differs(2.0))
    assert ruling is not None and ruling.outcome == "again" and not ruling.blames
    (second,) = desk.give()
    assert second is unit and len(set(unit.auditors)) == 2
    ruling = desk.say(second)
    assert ruling is not None and ruling.outcome == "disagreed" and not ruling.blames


def test_where_there_is_one_auditor_it_computes_twice() -> None:
    """A stage with one server has nobody else that everybody trusts."""
    desk = Desk(A)
    ruling = desk.judge(2.0)
    assert ruling.outcome == "blamed" and ruling.unit.auditors == (A, A)


def test_a_gross_difference_puts_its_member_out_at_once() -> None:
    """A flipped sign gives 2; of two opinions the milder one counts."""
    (blame,) = Desk().judge(2.0, again=1.9).blames
    assert blame.out and blame.difference.value == 1.9


def test_what_is_within_the_tolerance_passes_and_a_little_more_is_a_strike() -> None:
    """The third strike within a hundred audits puts a member out; after the second everything waits for its audit."""
    desk = Desk(tolerance=0.02)
    assert desk.judge(0.019).outcome == "passed"
    outs = []
    for count in range(STRIKES_OUT):
        assert desk.audits.waits_for(LIAR) == (count >= 2)
        (blame,) = desk.judge(0.05).blames
        outs.append(blame.out)
    assert outs == [False, False, True]


def test_strikes_of_long_ago_are_forgotten() -> None:
    """A member with two strikes and a hundred good audits since is like any other."""
    desk = Desk(first=0, rate=1.0)
    desk.judge(0.05)
    desk.judge(0.05)
    for _ in range(100):
        assert desk.judge(0.0).outcome == "passed"
    assert not desk.audits.waits_for(LIAR)
    assert not desk.judge(0.05).blames[0].out


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_difference_that_is_no_number_is_gross(value: float) -> None:
    """Comparisons with NaN are false, whichever way they are written: it must not pass by that."""
    assert Desk().judge(value).blames[0].out


def test_each_is_blamed_for_its_own_claim() -> None:
    """The output is another member's than the contribution: only the one whose claim differs is blamed."""
    desk = Desk()
    other = NodeId("v4")
    assert desk.bring()
    for _ in range(2):
        (unit,) = desk.give()
        ruling = desk.say(unit, differs(0.0), differs(1.4, other, "output"))
    assert ruling is not None and [blame.difference.node for blame in ruling.blames] == [other]


def test_a_server_is_never_audited_nor_blamed() -> None:
    """Everybody trusts it with sums."""
    desk = Desk()
    assert not desk.bring(A)
    assert desk.judge(3.0, node=NodeId("v3")).outcome == "blamed"
    assert desk.bring()
    (unit,) = desk.give()
    ruling = desk.say(unit, differs(3.0, B, "output"))
    assert ruling is not None and ruling.outcome == "passed"


def test_without_auditors_nothing_is_drawn() -> None:
    """A stage whose servers have no device goes on as before, and nothing waits."""
    desk = Desk()
    desk.audits.auditor_gone(A)
    desk.audits.auditor_gone(B)
    assert not desk.bring()


def test_what_finds_no_auditor_is_owed() -> None:
    """A full queue lets one pass, and the member's next one is drawn for sure."""
    desk = Desk(first=0, rate=0.0001)
    node = NodeId("v2")
    desk.audits._of(node).owed = True
    assert desk.bring(node) and not desk.audits._of(node).owed
    full = Desk(first=10**6)
    for _ in range(2 * QUEUE_MAX):
        assert full.bring()
    assert not full.bring() and full.audits.counts["missed"] == 1
    assert full.audits.rate_of(LIAR) == 1.0


def test_an_auditor_that_leaves_or_is_silent_costs_an_audit_and_blames_nobody() -> None:
    """What it was at goes to the other one; whoever does not answer is asked nothing for a while."""
    desk = Desk()
    assert desk.bring()
    (unit,) = desk.give()
    assert unit.busy is not None
    desk.audits.auditor_gone(unit.busy)
    (unit,) = desk.give(now=1.0)
    wake_at = desk.audits.wake_at()
    assert wake_at == 1.0 + 2 * UNIT_S
    (ruling,) = desk.audits.wake(wake_at)
    assert ruling.outcome == "missed" and not ruling.blames
    assert not desk.bring(), "nobody is left"


def test_an_auditor_that_was_late_is_asked_again_later_each_time_until_it_answers() -> None:
    """Its question may have been lost with a link, and an outside auditor never asks for work by itself."""
    desk, now, rests = Desk(A), 0.0, []
    for _ in range(4):
        assert desk.bring()
        (unit,) = desk.give(now)
        desk.audits.wake(unit.deadline)
        rested_at = desk.audits.wake_at()
        assert rested_at is not None and not desk.bring()
        rests.append(rested_at - unit.deadline)
        now = rested_at
        assert desk.audits.wake(now) == []
    assert rests == [2 * UNIT_S, 4 * UNIT_S, 8 * UNIT_S, 16 * UNIT_S]
    assert desk.bring()
    (unit,) = desk.give(now)
    assert desk.say(unit, now=now) is not None
    assert desk.bring()
    (unit,) = desk.give(now)
    desk.audits.wake(unit.deadline)
    assert desk.audits.wake_at() == unit.deadline + 2 * UNIT_S
    desk.audits.auditor_gone(A)
    assert desk.audits.wake_at() is None


def test_an_old_opinion_is_no_news() -> None:
    """One for an earlier attempt, or from whoever was not asked, changes nothing."""
    desk = Desk()
    assert desk.bring()
    (unit,) = desk.give()
    report = AuditReport(ledger_generation=1, contribution=unit.contribution, step=3, attempt=2, differences=())
    assert unit.busy is not None
    assert desk.audits.report(unit.busy, report, 0.0) is None
    assert desk.audits.report(B if unit.busy == A else A, report, 0.0) is None


def test_it_says_when_an_opinion_will_be_there() -> None:
    """By what opinions have taken for a task: what is under way, then what waits, for whoever is free first."""
    desk = Desk()
    for _ in range(5):
        assert desk.bring()
    first, second = desk.give(now=0.0)
    assert set(desk.audits.ends(1.0).values()) == {1.0}, "nothing is known before the first opinion"
    desk.say(first, now=8.0)
    desk.give(now=8.0)
    ends = desk.audits.ends(9.0)
    assert ends.pop(second.contribution) == 9.0
    assert sorted(ends.values()) == [16.0, 17.0, 24.0]


def test_who_is_unknown_is_audited_before_those_who_wait() -> None:
    """One contribution of each member that has passed no audit yet, and second opinions before all. In a run in which
    audits could not keep up, a liar's first lie waited behind what honest members had brought: 30 of its tasks counted
    until it was out, where none had to."""
    desk = Desk(A)
    honest, stranger = NodeId("v1"), NodeId("v2")
    assert desk.judge(0.0, node=honest).outcome == "passed"
    for node in (honest, honest, LIAR, LIAR, honest, stranger):
        assert desk.bring(node)
    order = []
    for _ in range(6):
        (unit,) = desk.give()
        order.append(unit.contribution.node)
        assert desk.say(unit) is not None
    assert order == [LIAR, stranger, honest, honest, LIAR, honest]
    assert not desk.audits.is_unknown(LIAR)

    desk.bring(honest)
    (unit,) = desk.give()
    for node in (NodeId("v3"), honest):
        assert desk.bring(node)
    desk.say(unit, differs(0.05, honest))
    (again,) = desk.give()
    assert again is unit, "a finding waits for nobody"
    desk.say(again, differs(0.05, honest))
    assert desk.audits.is_unknown(honest), "it has to be found right anew"


def test_when_an_opinion_will_be_there_is_told_in_the_order_in_which_they_are_given() -> None:
    desk = Desk(A)
    desk.judge(0.0, node=NodeId("v1"))
    desk.audits._task_s = 8.0
    assert desk.bring(NodeId("v1")) and desk.bring(NodeId("v1")) and desk.bring(LIAR)
    ends = {name.node: at for name, at in desk.audits.ends(0.0).items() if name.node == LIAR}
    assert ends == {LIAR: 8.0}
