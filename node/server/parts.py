"""What a shard keeps of contributions: its part of each, and the sum of a step's."""

from __future__ import annotations

from dataclasses import dataclass

from node.machine.records import ContributionStored
from node.machine.stalls import STATE_BYTES
from protocol.base.ids import ContributionId, TaskId
from protocol.messages import Contribute

RECORDS_PER_TASK_MAX = 4
"""Parts of one node and step that are written to the disk, for each task that leaves weight gradients in the stage: a
microbatch may visit it several times. A node that does a whole step alone, one task a contribution, writes one for
each; the others are for what was doubted, overlapped, or open when a server of the stage was replaced, and was done
again. Each costs a lease besides. So no node fills memory or journal without end, and none can take another's room."""
JOURNAL_BYTES = 4 * STATE_BYTES
"""A parameter's: a snapshot is due when the parts on the disk weigh more. Then writing snapshots costs at most a
quarter of what writing parts does, and a server with 5 M parameters holds 320 MB of parts, the newest three steps', and
two snapshots (160 MB): under 1 GB. Eight contributors a step in fp64 (64 bytes) get there every step, in 4.5 bits (4.5
bytes) every 14."""


@dataclass(slots=True)
class Part:
    """This shard's part of one contribution."""

    message: Contribute
    durable: bool
    folded: bool = False
    """In the step's sum; the tensor is gone."""
    measured: bool = True
    """Whether its size is known; what comes on the grid is measured here, where the grid is, before it is written."""


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


def as_record(message: Contribute, generation: int) -> ContributionStored:
    return ContributionStored(
        ledger_generation=generation,
        step=message.step,
        contribution=message.contribution,
        version=message.version,
        tasks=message.tasks,
        losses=message.losses,
        tickets=message.tickets,
        square_norm=message.square_norm,
        tensors=message.tensors,
    )


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
