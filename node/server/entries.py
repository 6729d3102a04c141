"""What a pool is made of: units of work, those who do them, and what was just given to whom."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from node.machine.waits import Wait, work_name
from protocol.base.ids import NodeId, TaskId, TensorRef

BELIEVED_MAX = 4
"""Leases of one task after which nobody is believed any more that its result was lost; servers that restart so often
within a step are a fault of their own."""


@dataclass(slots=True)
class Entry:
    """One unit of work. It is leased when `worker` is set, and finished when it needs nothing any more."""

    tasks: tuple[TaskId, ...]
    needs_result: bool
    needs_gradient: bool
    tensors: tuple[TensorRef, ...] | None = None
    """What goes out with the lease; None while nothing can begin."""
    complete: bool = True
    """Whether these are all that it needs. A sample in segments may begin before: the worker asks for the rest."""
    waits_for_all: bool = False
    """It was begun early once, and the rest did not come in time: who gets it next has no wait before it."""
    preferred: NodeId | None = None
    """The volunteer that still has the graph: it gets the task first, and without using a slot."""
    worker: NodeId | None = None
    fence: int = 0
    summed: bool = False
    """The worker has computed it: its weight gradient lies in the worker's sum."""
    stored: bool = False
    """All of the worker's contribution is here, and the ledger has it audited before it counts: it needs its worker no
    more."""
    issued_count: int = 0
    granted_at: float = 0.0
    """When the worker got it, or the part of its input that came last."""
    held: int = 1
    """Leases that the worker had then, with this one, of which it had not brought the result."""
    due_at: float = 0.0
    """When the worker's time for its result is over."""
    late: dict[NodeId, float] = field(default_factory=dict)
    """Workers that had it and neither finished nor kept it, and when they had got it."""
    brought: set[NodeId] = field(default_factory=set)
    """Those of them that brought something, which is doubted: if it was false they are blamed; they were not late."""
    doubted: bool = False
    """What a member brought for it was put aside: a server's opinion comes before another volunteer's …"""
    doubted_at: float = 0.0
    """… for a while."""
    late_at: float = 0.0
    """When that happened last …"""
    late_count: int = 0
    """… and how often."""

    @property
    def step(self) -> int:
        return self.tasks[0].step

    @property
    def finished(self) -> bool:
        return not (self.needs_result or self.needs_gradient)

    @property
    def open(self) -> bool:
        """Somebody still has to be given this."""
        return self.worker is None and not self.finished

    @property
    def free(self) -> bool:
        return self.open and self.tensors is not None and (self.complete or self.may_begin)

    @property
    def may_begin(self) -> bool:
        """Whether it may be given before all has come: a backward only to who has the graph, and holds it anyway.

        Who waits while he holds a place that others wait for could wait in a circle with them; so whatever was taken
        back from somebody who waited in vain is given again when nothing of it is missing.
        """
        return not self.waits_for_all and (self.tasks[0].op == "F" or self.preferred is not None)

    @property
    def waits_for_sum(self) -> bool:
        """All that is missing is the worker's contribution."""
        return self.worker is not None and self.summed and not self.needs_result

    def check(self, here: Container[NodeId], waited_for: Container[NodeId]) -> None:
        """`here`: workers with a link; `waited_for`: those without whose sums are waited for."""
        assert not (self.finished and self.worker is not None), f"{self.tasks[0]} is finished but leased"
        known = self.worker is None or self.worker in here
        summed = self.waits_for_sum and (self.stored or self.worker in waited_for)
        assert known or summed, f"{self.tasks[0]}: a ghost's (L2)"
        assert self.preferred is None or self.preferred in here, f"{self.tasks[0]} prefers a ghost"


@dataclass(slots=True)
class Worker:
    """A volunteer with a live link to this server."""

    node: NodeId
    is_server: bool
    number: int = 0
    """Order of arrival; breaks ties."""
    slots: int = 0
    slots_most: int = 0
    """That it ever had on this link. What is missing of them is about what it has under way, and graphs that wait for a
    backward; not quite: it may have come with graphs, or have lost memory for some since."""
    turn: int = 0
    """Grows with every lease that the pool gives: who had one longest ago comes first."""
    active_at: float = 0.0
    """When it last held a lease or asked for one."""
    asked: bool = False
    """Whether it has ever asked for one: its device is there."""
    refused: bool = False
    """It is being hung up on for what it sent, or since it is banned."""
    returned: dict[TaskId, float] = field(default_factory=dict)
    """What it has given back, by first tasks, and when it had got that: if it leaves now, it is forgiven."""
    returned_at: float = 0.0
    """When it began to."""
    overtaken: list[tuple[float, float]] = field(default_factory=list)
    """What others have finished of that meanwhile: when it had got it, and when they were done."""


@dataclass(slots=True)
class Holding:
    """What one node has to do with a pool, by the entries' first tasks."""

    leased: dict[TaskId, Entry] = field(default_factory=dict)
    busy_count: int = 0
    """Of the leased ones, those whose result has not come."""
    preferring: dict[TaskId, Entry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease that the pool has just given."""

    entry: Entry
    worker: NodeId
    has_graph: bool


def oldest_wait(entries: Iterable[Entry], own: NodeId, lonely: bool) -> Wait | None:
    """Why the oldest unfinished task is not finished, or nothing. `own`: the server itself, which may compute.
    `lonely`: nobody may do it."""
    entry = min((e for e in entries if not e.finished), key=lambda e: e.tasks[0], default=None)
    if entry is None:
        return None
    step, work = entry.tasks[0].step, work_name(entry.tasks)
    if entry.tensors is None:
        return Wait(step, f"input for the {work}")
    if entry.worker is not None:
        what = work if entry.needs_result else f"weight gradient of microbatch {entry.tasks[0].microbatch}"
        return Wait(step, f"its own {what}" if entry.worker == own else f"{what} by {entry.worker[:8]}")
    if lonely:
        return Wait(step, f"a volunteer for the {work}")
    return Wait(step, f"a volunteer with a free slot for the {work}")


def counted(entries: Iterable[Entry]) -> dict[str, int]:
    """Unfinished units by what they wait for."""
    result = {"input": 0, "free": 0, "leased": 0}
    for entry in entries:
        if not entry.finished:
            key = "leased" if entry.worker is not None else "free" if entry.tensors is not None else "input"
            result[key] += 1
    return result
