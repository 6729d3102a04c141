"""The owner's screen says which server gives no work, why, and for how much longer."""

from __future__ import annotations

from itertools import count

from node.machine.outbox import Outbox
from node.volunteer.allowances import AS_BEFORE, LITTLE_WORK, NO_WORK, Allowances
from protocol.base.ids import NodeId
from protocol.base.machine import Log
from protocol.messages import Allowance
from tests.node.setting import VOLUNTEER

A, B = NodeId("a" * 12), NodeId("b" * 12)


def word(leases_max: int, seconds: float, reason: str = "") -> Allowance:
    return Allowance(ledger_generation=1, leases_max=leases_max, seconds=seconds, reason=reason)


def test_a_rest_is_counted_down_and_forgotten_when_it_is_over() -> None:
    """Minutes that are left, never a rest that has ended, nor one that the server took back."""
    allowances = Allowances(Outbox(VOLUNTEER, count(1)))
    assert (allowances.sentence(), allowances.wake_at()) == ("", None)
    allowances.told(A, word(1, 0.0, "others had to finish a task"), 0.0)
    assert (allowances.sentence(), allowances.wake_at()) == ("", None), "it still gets work"
    allowances.told(A, word(0, 130.0, "it was slow"), 0.0)
    assert allowances.sentence() == "server aaaaaaaa, which gives it no work for 3 more min: it was slow"
    seen = []
    while (at := allowances.wake_at()) is not None:
        allowances.wake(at)
        seen.append((at, allowances.sentence()[44:50]))
    assert seen == [(60.0, "2 more"), (120.0, "1 more"), (130.0, "")]
    allowances.told(A, word(0, 600.0, "it was slow"), 130.0)
    allowances.told(B, word(0, 60.0, "it was slow"), 130.0)
    allowances.told(A, word(-1, 0.0), 131.0)
    assert allowances.sentence().startswith("server bbbbbbbb")
    allowances.forget(B)
    assert allowances.sentence() == ""


def test_each_word_of_a_server_is_an_event_of_its_own() -> None:
    """One line for all three read "gives less work, or more again … seconds=0", which told nobody anything."""
    out = Outbox(VOLUNTEER, count(1))
    allowances = Allowances(out)
    for said in (word(1, 0.0, "others had to finish a task"), word(0, 130.4, "it was slow"), word(-1, 0.0)):
        allowances.told(A, said, 0.0)
    told = [(effect.level, effect.event, effect.fields) for effect in out.take_effects() if isinstance(effect, Log)]
    assert told == [
        ("info", LITTLE_WORK, {"server": A, "reason": "others had to finish a task"}),
        ("warning", NO_WORK, {"server": A, "seconds": 130, "reason": "it was slow"}),
        ("info", AS_BEFORE, {"server": A}),
    ]
