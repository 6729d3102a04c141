"""A small run for the tests of node machines: configurations, plans, contexts, and a look into the outbox."""

from __future__ import annotations

from itertools import count
from typing import Any, TypeVar

from node.machine.outbox import Outbox
from node.server.agreement import list_digest
from node.server.context import StageContext
from node.server.tickets import KEY_BYTES, TicketOffice
from protocol.base.ids import TICKET_BYTES, ContributionId, NodeId, TaskId, TensorRef, Ticket
from protocol.base.machine import Compute, DropTensors, Effect, Persist, Send
from protocol.messages import Contribute, FrozenList, Stored
from protocol.run.course import line
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import (
    BatchSection,
    CheckpointSection,
    LimitsSection,
    ModelSection,
    RunConfig,
    StagesSection,
    WireSection,
)

T = TypeVar("T")
VOLUNTEER = NodeId("v1")
ELEMENTS = 3
TICKET = Ticket(1, bytes(TICKET_BYTES))
"""For those who do not look at it."""


def make_config(**changes: Any) -> RunConfig:
    """Two stages, two microbatches, delay 1, four steps; `changes` are fields of the sections, by their own name."""
    batch = {"microbatches": 2, "samples": 2, "delay": 1}
    limits = {"lease_s": 8.0, "snapshot_steps": 2, "linger_s": 0.25, "contribution_tasks": 4}
    stages = {"count": 2, "collocated": "when_empty"}
    checkpoint = {"every_steps": 0, "folder": "checkpoints", "buddy": "never"}
    steps = changes.pop("steps", 4)
    for section in (batch, limits, stages, checkpoint):
        section.update({key: changes.pop(key) for key in list(changes) if key in section})
    assert not changes, f"no section has {changes}"
    config = RunConfig(
        name="small",
        steps=steps,
        model=ModelSection(layers=4, hidden=8, heads=2, kv_heads=1, feed_forward=8, context=4),
        batch=BatchSection(**batch),  # type: ignore[arg-type]
        stages=StagesSection(**stages),  # type: ignore[arg-type]
        checkpoint=CheckpointSection(**checkpoint),  # type: ignore[arg-type]
        wire=WireSection(activations_up="fp32", activations_down="fp32", gradients="fp32", parameters="fp32"),
        limits=LimitsSection(**limits),  # type: ignore[arg-type]
    )
    config.validate()
    return config


def make_plan(stages: int = 2, generation: int = 1, ledgers: int = 1, restore_step: int = -1, fronts: int = 1) -> Plan:
    """Stage k has front servers f<k>, g<k>, … and one back server b<k>."""
    placed = []
    for stage in range(stages):
        servers = [ServerPlan(NodeId(f"{'fgh'[i]}{stage}"), "front", (f"f{stage}:1",)) for i in range(fronts)]
        servers.append(ServerPlan(NodeId(f"b{stage}"), "back", (f"b{stage}:1",)))
        placed.append(StagePlan(tuple(servers)))
    return Plan(generation, ledgers, restore_step, tuple(placed), line(10, stages))


def make_context(node: str, config: RunConfig | None = None, plan: Plan | None = None) -> StageContext:
    """What the roles of server `node` share."""
    plan = plan or make_plan()
    stage, shard = plan.stage_of(NodeId(node)), plan.shard_of(NodeId(node))
    assert stage is not None and shard is not None
    out = Outbox(NodeId(node), count(1000))
    tickets = TicketOffice(plan.ledger_generation)
    tickets.set_key(bytes(KEY_BYTES))
    return StageContext(NodeId(node), config or make_config(), plan, stage, shard, out, tickets)


def contribution(number: int, node: NodeId = VOLUNTEER) -> ContributionId:
    return ContributionId(node, 7, number)


def backward(step: int, microbatch: int, stage: int = 0) -> TaskId:
    return TaskId(step, microbatch, stage, "B")


def shard_tensor(key: int, elements: int = ELEMENTS) -> TensorRef:
    return TensorRef(key, (elements,), "fp32", 4 * elements)


def activation(key: int, config: RunConfig) -> TensorRef:
    shape = (config.batch.samples, config.model.context, config.model.hidden)
    return TensorRef(key, shape, "fp32", 4 * shape[0] * shape[1] * shape[2])


def part(number: int, step: int, tasks: tuple[TaskId, ...], shard: int, key: int, version: int = 0) -> Contribute:
    """One shard of a contribution."""
    return Contribute(
        ledger_generation=1,
        contribution=contribution(number),
        step=step,
        version=version,
        tasks=tasks,
        losses=tuple(1.0 for task in tasks if task.op == "L"),
        tickets=tuple(Ticket(number, TICKET.mac) for task in tasks if task.op == "B"),
        shard=shard,
        tensors=(shard_tensor(key),),
    )


def stored(number: int, step: int, tasks: tuple[TaskId, ...], shard: int, version: int = 0, **changes: Any) -> Stored:
    """A shard's word that it has its part."""
    losses = tuple(1.0 for task in tasks if task.op == "L")
    fields = {"contribution": contribution(number), "losses": losses, **changes}
    return Stored(ledger_generation=1, step=step, version=version, tasks=tasks, shard=shard, **fields)


def same_list(shard: int, step: int, contributions: tuple[ContributionId, ...]) -> FrozenList:
    """A fellow's word that it was told the same to count."""
    return FrozenList(ledger_generation=1, step=step, shard=shard, digest=list_digest(step, contributions))


class Effects:
    """The effects of one call, and what the machine said to itself, by kind."""

    def __init__(self, out: Outbox) -> None:
        self.all: list[Effect] = [*out.take_effects(), *(Send(out.node, message) for message in out.take_to_self())]

    def sent(self, kind: type[T], peer: str | None = None) -> list[T]:
        return [
            effect.message
            for effect in self.all
            if isinstance(effect, Send) and isinstance(effect.message, kind) and peer in (None, effect.peer)
        ]

    def peers(self, kind: type[Any]) -> list[str]:
        """To whom such messages go."""
        return [effect.peer for effect in self.all if isinstance(effect, Send) and isinstance(effect.message, kind)]

    def jobs(self, kind: type[T]) -> list[T]:
        return [effect.job for effect in self.all if isinstance(effect, Compute) and isinstance(effect.job, kind)]

    def records(self, kind: type[T]) -> list[T]:
        return [effect.record for effect in self.all if isinstance(effect, Persist) and isinstance(effect.record, kind)]

    @property
    def dropped(self) -> list[int]:
        return [key for effect in self.all if isinstance(effect, DropTensors) for key in effect.keys]
