"""The decider: how a step ends, also when its numbers are absurd."""

from __future__ import annotations

from itertools import count

from node.machine.outbox import Outbox
from node.machine.records import StepDecided
from node.server.context import StageContext
from node.server.decider import DeciderRole
from node.server.tickets import TicketOffice
from protocol.base.ids import NodeId
from protocol.base.machine import Persist
from protocol.messages import StageFrozen
from protocol.run.course import line
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import RunConfig

NODES = tuple(NodeId(letter * 52) for letter in "abcd")


def decider() -> tuple[DeciderRole, Outbox]:
    """The decider of a run of two stages, with step 0 open."""
    stages = tuple(
        StagePlan((ServerPlan(NODES[2 * i], "front", ()), ServerPlan(NODES[2 * i + 1], "back", ()))) for i in range(2)
    )
    out = Outbox(NODES[0], count(1))
    context = StageContext(
        node=NODES[0],
        config=RunConfig(),
        plan=Plan(1, 1, -1, stages, line(10, 2)),
        stage=0,
        shard=0,
        out=out,
        tickets=TicketOffice(1),
    )
    role = DeciderRole(context, NodeId("z" * 52))
    role.begin(0.0)
    return role, out


def test_square_norms_whose_sum_is_beyond_all_numbers_skip_the_step() -> None:
    """Each stage's is finite, so two liars may bring this about: the step is skipped, and nothing breaks."""
    role, out = decider()
    for stage in range(2):
        frozen = StageFrozen(
            ledger_generation=1, stage=stage, step=0, square_norm=1.5e308, finite=True, loss_sum=1.5e308
        )
        role.on_stage_frozen(NODES[2 * stage], frozen)
    (decision,) = [effect.record for effect in out.take_effects() if isinstance(effect, Persist)]
    assert isinstance(decision, StepDecided)
    assert decision.skipped and decision.clip_factor == 0.0
