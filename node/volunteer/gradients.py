"""A volunteer's weight gradients: summed per step, uploaded as contributions, kept until the ledger's verdict.

A sum can never be taken apart again, so what is in it is written down task by task; and a contribution is the same
whenever it is sent again, so that sending twice does no harm (state-and-trust 4.1, 4.2).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from node.machine.jobs import DropAccumulators, TakeGradient
from node.machine.outbox import Outbox
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef, Ticket
from protocol.messages import Contribute, Verdict

OUTSTANDING_MAX = 64
"""Uploads without a verdict after which no further work is asked for: the ledger is stuck, and so are we."""
SEEN_UPLOADS = 8
"""Of so many the shortest says what the line takes: more than one of them in eight is not audited."""


@dataclass(slots=True)
class _Sum:
    """The weight gradients that are being summed up for one step."""

    accumulator: int
    version: int
    tasks: list[TaskId] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    """One for each backward among the tasks."""
    flush_at: float | None = None
    owed_count: int = 0
    """Tasks whose weight gradients are still to come into it."""


@dataclass(slots=True)
class _Upload:
    """A contribution on its way; `shards` is None until the device has cut it."""

    contribution: ContributionId
    step: int
    total: _Sum
    begun: float
    """When it was cut."""
    shards: tuple[TensorRef, ...] | None = None


class Gradients:
    """What the volunteer has computed and not yet seen accepted.

    Args:
        incarnation: drawn anew when the process starts, so that a restart never reuses a contribution's number.
    """

    def __init__(self, out: Outbox, incarnation: int, tasks_max: int, linger_s: float) -> None:
        self._out = out
        self._incarnation = incarnation
        self._tasks_max = tasks_max
        self._linger_s = linger_s
        self._sums: dict[int, _Sum] = {}
        self._uploads: dict[int, _Upload] = {}
        """By accumulator, which is also the contribution's number."""
        self._upload_s = 0.0
        """From the cut to the verdict, of the newest contribution; before the first one, as on a slow line."""
        self._lines_s: deque[float] = deque((0.0,), maxlen=SEEN_UPLOADS)
        """The same of the newest that were accepted: after the least of them an upload without a verdict has left, as
        far as can be known. What it waits for then is an audit, and that needs no line."""
        self._look_at: float | None = None
        """When a sum that waits for the line shall be looked at again."""
        self._generation = -1
        self._servers: tuple[NodeId, ...] = ()

    def reset(self, generation: int, servers: tuple[NodeId, ...], upload_s: float = 0.0) -> None:
        """Another stage, or other ledgers: what was summed up is worth nothing there. `servers` in shard order;
        `upload_s`: what a contribution of this stage may take, for as long as none was sent."""
        self.drop_steps(None)
        self._generation, self._servers = generation, servers
        self._upload_s, self._look_at = upload_s, None
        self._lines_s.clear()
        self._lines_s.append(upload_s)

    # ---- summing -------------------------------------------------------------------------------------------------

    def accumulator_for(self, step: int, version: int) -> int:
        """Where the next weight gradient of the step goes. Until it is `added`, the sum is not sent."""
        total = self._sums.get(step)
        if total is None:
            total = self._sums[step] = _Sum(self._out.key(), version)
        # A sum that was cut while a job adds to it would hold more than its list of tasks says.
        total.flush_at = None
        return total.accumulator

    def owe(self, accumulator: int, step: int) -> None:
        """A task of this sum has sent its result, and its weight gradient comes later: the sum waits for it."""
        total = self._sums.get(step)
        if total is not None and total.accumulator == accumulator:
            total.owed_count += 1

    def added(
        self,
        accumulator: int,
        tasks: tuple[TaskId, ...],
        losses: tuple[float, ...],
        ticket: Ticket,
        now: float,
        owed: bool = False,
    ) -> None:
        """The device has added the weight gradients of these tasks of one lease; `owed`: as was promised."""
        total = self._sums.get(tasks[0].step)
        if total is None or total.accumulator != accumulator:
            return  # the step was closed meanwhile
        total.owed_count -= owed
        total.tasks.extend(tasks)
        total.losses.extend(losses)
        total.tickets.append(ticket)
        total.flush_at = None
        if sum(task.op == "B" for task in total.tasks) >= self._tasks_max:
            self.flush(tasks[0].step, now)

    def has(self, task: TaskId) -> bool:
        """Whether the task's weight gradient is in a sum or an upload that has no verdict yet."""
        sums = [self._sums[task.step]] if task.step in self._sums else []
        sums.extend(upload.total for upload in self._uploads.values() if upload.step == task.step)
        return any(task in total.tasks for total in sums)

    def send_complete(
        self, busy_steps: list[int], tail_has_come: Callable[[int], bool], now: float, idle: bool
    ) -> None:
        """Sends the sums of steps for which nothing runs or is queued and nothing will come; `idle`: nothing runs.

        Where more may come, it is waited for, since a contribution costs a whole stage's vector on the way up; but not
        for ever, because a server that counts on the sum may be unable to say so: twice the time that an upload takes,
        while there is nothing to do. What is complete waits for nothing: a device that is never idle since there is
        always work of the next step would keep all others waiting for its sum of this one.
        While one of the step is on its way, the next one would only stand behind it: work that came back after the
        tail, a task at a time, would be a whole vector each. And sums go in the order of their steps: the run waits for
        the oldest, and a newer one beside it on the line would take half of its rate. An older one that has left the
        line and is only audited is not waited for.
        """
        for step in list(self._sums):
            total = self._sums[step]
            if step in busy_steps or total.owed_count or not total.tasks or self._is_uploading(step):
                continue
            if any(busy < step for busy in busy_steps):
                continue
            free_at = self._line_free_at(step)
            if free_at > now:
                if free_at < math.inf:
                    self._look_at = free_at if self._look_at is None else min(free_at, self._look_at)
                continue
            if tail_has_come(step):
                self.flush(step, now)
            elif idle and total.flush_at is None:
                total.flush_at = now + max(self._linger_s, 2 * self._upload_s)

    def wake_at(self) -> float | None:
        first = self._look_at
        for total in self._sums.values():
            if total.flush_at is not None and (first is None or total.flush_at < first):
                first = total.flush_at
        return first

    def wake(self, now: float) -> None:
        """`send_complete` is asked next."""
        if self._look_at is not None and self._look_at <= now:
            self._look_at = None
        for step in [s for s, total in self._sums.items() if total.flush_at is not None and total.flush_at <= now]:
            if self._is_uploading(step) or self._line_free_at(step) > now:
                self._sums[step].flush_at = None  # `send_complete` asks again, and a verdict
            else:
                self.flush(step, now)

    def _is_uploading(self, step: int) -> bool:
        return any(upload.step == step for upload in self._uploads.values())

    def _line_free_at(self, step: int) -> float:
        """When no sum of an earlier step is on the line any more: not before those that wait have been sent."""
        if any(each < step and total.tasks for each, total in self._sums.items()):
            return math.inf
        older = (upload.begun for upload in self._uploads.values() if upload.step < step)
        return max(older, default=-math.inf) + min(self._lines_s)

    # ---- uploading -----------------------------------------------------------------------------------------------

    def flush(self, step: int, now: float) -> None:
        """Closes the step's sum and has the device cut it into shards, unless something is still to come into it."""
        if step in self._sums and self._sums[step].owed_count:
            return
        total = self._sums.pop(step, None)
        if total is None:
            return
        if not total.tasks:
            self._out.compute(DropAccumulators((total.accumulator,)))
            return
        contribution = ContributionId(self._out.node, self._incarnation, total.accumulator)
        self._uploads[total.accumulator] = _Upload(contribution, step, total, now)
        keys = tuple(self._out.key() for _ in self._servers)
        self._out.compute(TakeGradient(total.accumulator, keys))

    def flush_all(self, now: float) -> None:
        for step in list(self._sums):
            self.flush(step, now)

    def taken(self, job: TakeGradient, shards: tuple[TensorRef, ...]) -> None:
        upload = self._uploads.get(job.accumulator)
        if upload is None:
            self._out.drop(shards)
            return
        upload.shards = shards
        for server in self._servers:
            self._send(upload, server)

    def resend(self, server: NodeId) -> None:
        """A shard is (again) ready: it gets its part of everything that has no verdict."""
        for upload in self._uploads.values():
            if upload.shards is not None:
                self._send(upload, server)

    def _send(self, upload: _Upload, server: NodeId) -> None:
        assert upload.shards is not None
        shard = self._servers.index(server)
        self._out.send(
            server,
            Contribute(
                ledger_generation=self._generation,
                contribution=upload.contribution,
                step=upload.step,
                version=upload.total.version,
                tasks=tuple(upload.total.tasks),
                losses=tuple(upload.total.losses),
                tickets=tuple(upload.total.tickets),
                shard=shard,
                tensors=(upload.shards[shard],),
            ),
        )

    def on_verdict(self, message: Verdict, now: float) -> bool:
        """The ledger's word, either way: the upload is over. Returns whether it was one of ours and news."""
        number = message.contribution.number
        upload = self._uploads.get(number)
        if upload is None or upload.contribution != message.contribution:
            return False
        del self._uploads[number]
        self._upload_s = now - upload.begun
        if message.accepted:
            self._lines_s.append(self._upload_s)
        self._out.drop(upload.shards or ())
        return True

    # ---- forgetting ----------------------------------------------------------------------------------------------

    def lose(self, step: int) -> tuple[TaskId, ...]:
        """The device failed in the middle of an addition: the step's sum is worthless. Returns its tasks."""
        total = self._sums.pop(step, None)
        if total is None:
            return ()
        self._out.compute(DropAccumulators((total.accumulator,)))
        return tuple(total.tasks)

    def cannot_take(self, job: TakeGradient) -> tuple[TaskId, ...]:
        """The device could not hand a sum over: it is gone. Returns its tasks."""
        upload = self._uploads.pop(job.accumulator, None)
        return () if upload is None else tuple(upload.total.tasks)

    def lose_all(self) -> tuple[TaskId, ...]:
        """The device is gone: every sum with it, and every upload that it had not cut yet. Returns their tasks."""
        lost: list[TaskId] = []
        for step in list(self._sums):
            lost.extend(self._sums.pop(step).tasks)
        for number in [number for number, upload in self._uploads.items() if upload.shards is None]:
            lost.extend(self._uploads.pop(number).total.tasks)
        return tuple(lost)

    def drop_steps(self, step: int | None) -> None:
        """Steps up to `step` (None: all) are closed: what was not accepted was not needed."""
        for key in [key for key in self._sums if step is None or key <= step]:
            self._out.compute(DropAccumulators((self._sums.pop(key).accumulator,)))
        for number in [n for n, upload in self._uploads.items() if step is None or upload.step <= step]:
            self._out.drop(self._uploads.pop(number).shards or ())

    # ---- what others ask -----------------------------------------------------------------------------------------

    def tasks_in_sums(self) -> list[TaskId]:
        """All that a contribution names, or will name as things are."""
        totals = (*self._sums.values(), *(upload.total for upload in self._uploads.values()))
        return [task for total in totals for task in total.tasks]

    def backwards(self) -> dict[TaskId, Ticket]:
        """All whose weight gradients are in a sum, or in an upload without a verdict, with their tickets."""
        totals = (*self._sums.values(), *(upload.total for upload in self._uploads.values()))
        return {
            task: ticket
            for total in totals
            for task, ticket in zip((t for t in total.tasks if t.op == "B"), total.tickets, strict=True)
        }

    @property
    def unsent_task_count(self) -> int:
        """Tasks whose weight gradient would be lost if this process died now."""
        sums = (*self._sums.values(), *(upload.total for upload in self._uploads.values()))
        return sum(len(total.tasks) for total in sums)

    @property
    def brought_within_s(self) -> float:
        """What the sums that are here take, one after the other; where none was judged yet, on the slowest line that
        the project is for. There are seldom more than two, and servers count on no more (`node.server.pool`)."""
        count = len(self._uploads) + sum(bool(total.tasks) for total in self._sums.values())
        return min(self._lines_s) * min(count, 2)

    @property
    def is_summing(self) -> bool:
        """Whether anything is summed up and not cut."""
        return bool(self._sums)

    @property
    def outstanding(self) -> int:
        return len(self._uploads)

    @property
    def empty(self) -> bool:
        return not self._uploads and not any(total.tasks for total in self._sums.values())

    def check(self) -> None:
        for total in (*self._sums.values(), *(upload.total for upload in self._uploads.values())):
            assert len(set(total.tasks)) == len(total.tasks), "a task stands twice in one sum"
