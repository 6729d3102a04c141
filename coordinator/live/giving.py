"""Credit: what each member has given, by the count of the stages' ledgers, and its part of the last hour.

A step report names who brought the tasks of the step that the ledgers accepted; nothing else counts here, least of all
what a volunteer says of itself. Steps that the run later goes back behind stay counted: they were computed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.live.records import Credit
from protocol.base.ids import NodeId
from protocol.messages import Share

HOUR_S = 3600.0
BUCKET_S = 60.0
"""The last hour is kept in pieces of this length: sixty lists, each of those who worked in it."""
LEFT_MAX = 4096
"""Members that left a while ago and may still have tasks in an open step: as many as a report can name."""


@dataclass(slots=True)
class _Bucket:
    begun_s: float
    tasks: Counter[NodeId] = field(default_factory=Counter)
    total: int = 0
    """Of all of them: each member hears its part of it every half minute, and thousands may have some."""


class Giving:
    """Counts on from what the database knows.

    Args:
        credits: by member, since the run began.
        task_tokens: tokens of one task: a microbatch's.
    """

    def __init__(self, credits: Mapping[NodeId, Credit], task_tokens: int) -> None:
        self._credits = dict(credits)
        self._task_tokens = task_tokens
        self._buckets: deque[_Bucket] = deque()
        self._left: dict[NodeId, None] = {}
        self._step_wall_s: float | None = None
        self.newest: Counter[NodeId] = Counter()
        """The newest step's tasks."""

    def left(self, node: NodeId) -> None:
        """A volunteer's link has ended; what it brought before still counts."""
        self._left.pop(node, None)
        self._left[node] = None
        if len(self._left) > LEFT_MAX:
            del self._left[next(iter(self._left))]

    def known(self, shares: Iterable[Share], linked: Iterable[NodeId]) -> tuple[Share, ...]:
        """Those of members: a server cannot fill the database with names that nobody has."""
        members = set(linked)
        return tuple(s for s in shares if s.node in members or s.node in self._credits or s.node in self._left)

    def worked_s(self, duration_s: float, wall_s: float) -> float:
        """The time that a step adds to those who computed it. Steps overlap, so it is never more than what has passed
        since the one before."""
        before, self._step_wall_s = self._step_wall_s, wall_s
        return max(0.0, duration_s if before is None else min(duration_s, wall_s - before))

    def store(self, shares: tuple[Share, ...], step: int, worked_s: float, wall_s: float, now: float) -> None:
        """A step's shares are durable."""
        if not self._buckets or now >= self._buckets[-1].begun_s + BUCKET_S:
            self._buckets.append(_Bucket(now))
        self.newest = Counter()
        for share in shares:
            before = self._credits.get(share.node, Credit(node=share.node, since_s=wall_s))
            self._credits[share.node] = before.plus(share, step, self._task_tokens, worked_s, wall_s)
            self._buckets[-1].tasks[share.node] += share.tasks
            self._buckets[-1].total += share.tasks
            self.newest[share.node] = share.tasks

    def all(self) -> tuple[Credit, ...]:
        """Of everybody who ever gave anything, the most first."""
        return tuple(sorted(self._credits.values(), key=lambda credit: (-credit.tasks, credit.node)))

    def of(self, node: NodeId) -> Credit | None:
        """What a member has given for ever; None: nothing yet."""
        return self._credits.get(node)

    def hour_ratio(self, node: NodeId, now: float) -> float:
        """The member's part of all tasks of the last hour, or of as much of it as this process has seen."""
        while self._buckets and now >= self._buckets[0].begun_s + HOUR_S:
            self._buckets.popleft()
        total = sum(bucket.total for bucket in self._buckets)
        return sum(bucket.tasks[node] for bucket in self._buckets) / total if total else 0.0
