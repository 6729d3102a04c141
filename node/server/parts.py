"""What a shard keeps of contributions: its part of each, and the sum of a step's."""

from __future__ import annotations

from dataclasses import dataclass

from node.machine.records import ContributionStored
from protocol.base.ids import ContributionId, TaskId
from protocol.messages import Contribute


@dataclass(slots=True)
class Part:
    """This shard's part of one contribution."""

    message: Contribute
    durable: bool
    folded: bool = False
    """In the step's sum; the tensor is gone."""
    measured: bool = True
    """Whether its size is known; what comes on the grid is measured here, where the grid is, before it is announced."""
    measuring: bool = False


@dataclass(slots=True)
class Reduction:
    """The sum of a step's contributions, once the ledger has frozen them."""

    contributions: tuple[ContributionId, ...]
    ordered: bool = False
    square_norm: float = 0.0
    finite: bool = True
    finished: bool = False


def leases(message: Contribute) -> list[tuple[TaskId, int]]:
    """What a contribution pays for: task and fence of each lease."""
    backwards = [task for task in message.tasks if task.op == "B"]
    return [(task, ticket.fence) for task, ticket in zip(backwards, message.tickets, strict=False)]


def as_message(record: ContributionStored, shard: int) -> Contribute:
    return Contribute(
        ledger_generation=record.ledger_generation,
        contribution=record.contribution,
        step=record.step,
        version=record.version,
        tasks=record.tasks,
        losses=record.losses,
        tickets=record.tickets,
        square_norm=record.square_norm,
        shard=shard,
        tensors=record.tensors,
    )
