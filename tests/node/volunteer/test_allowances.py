"""The owner's screen says which server gives no work, why, and for how much longer."""

from __future__ import annotations

from itertools import count

from node.machine.outbox import Outbox
from node.volunteer.allowances import Allowances
from protocol.base.ids import NodeId
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
