"""Whether a slow worker's help would be in time: a lease that it brings back when the others have long done the rest
makes everybody wait, and so does its sum.

A worker that takes more than twice what is usual among those who are there, for a lease and its sum together, gets one
only if it would be done, with what it holds and with its sum, before the others are done with what they hold and what
is ready. What those do a second follows from what each has taken for a lease, with several at once; who has held
something for much longer than it should is not counted on, and where nobody is, everything goes to whoever asks. So it
helps where work piles up, in the stage that the others wait for, and nowhere else: where nothing piles up its help
makes no step shorter, and each lease makes one longer. (Two stages of two members with 20 Mbit/s up made a step in
1.75 s; a fifth member with 2 Mbit/s took what their slots had no room for, and steps took 1.9 to 3.6 s. With devices
three times as fast it cost 101 %.)

Who gets nothing for that is measured anew now and then, with one lease, so seldom that it costs the others about a
hundredth of their time: a home line that was busy may be free again. Who was in time until now, and needs much more at
once, is measured anew as soon as it has nothing left to bring: a link that changed its way, or a computer that was
asleep for some seconds, made a few answers late, and says nothing about the next ones. (An address that changed cost
its volunteer a minute's work.) And who comes new to others that are known begins with one lease, and with more only
where that would be in time if it took ten times what is usual.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.server.conduct import Conduct, Ruling
from node.server.entries import Worker
from node.server.tables import Tables
from protocol.base.ids import NodeId

SLOW_TIMES = 2.0
"""Up to so many times what is usual is not slow: how long results take is not known better than that."""
UNKNOWN_TIMES = 10.0
"""What is usual, for somebody of whom nothing is known: 2 Mbit/s beside 20."""
TRIAL_TIMES = 100.0
"""Times what it needs for a lease and its sum, between two trials of a worker that gets nothing else. (A trial cost up
to twice that, so a fiftieth at most: 1.1 % in the case above.)"""
SUDDEN_TIMES = 3.0
"""Whoever needs so many times what it did when it was last in time is tried at once. One answer in four weighs in what
it needs, so that one took nine times as long: that is a wait, and no busier line. (Members that were about as fast as
the limit, on 200 drawn home lines, were tried over and over without it, and a step took 124 s, not 80; by 2, 92.)"""
STUCK_TIMES = 4.0
"""Who has held a lease for so many times what it takes is not counted on."""
KNOWN_FOR_TIMES = 0.1
"""What the others do a second is counted once in so many of what a lease takes them, and once in as many looks as this
share of the workers, so that a look costs the same among three and among three hundred: each of three hundred asks
once in the time of a lease, so both come to a tenth of it."""
KNOWN_FOR_MIN_S = 1.0
"""So old it may be all the same, and as old as what a lease takes: where few ask, counting costs little."""
TOLD_AFTER_STEPS = 2
"""It is told when so many steps were closed in which it was given nothing …"""
TOLD_AFTER_S = 10.0
"""… and that has lasted so long: on a fast network steps take a second or less, most of it sums that wait for each
other at the servers, and who got nothing of two of them gets something of the third. Its owner read that it is of no
use, and that it is, and so on, ten times a minute."""
TOO_LATE = "its results and its sum of gradients come when the others of its stage are done with a step"


@dataclass(frozen=True, slots=True)
class _Pace:
    """Of a worker that is counted on."""

    leases_per_s: float
    held: int
    needs_s: float = 0.0
    answer_s: float = 0.0
    steady_s: float = 0.0
    has_sum: bool = False
    """Whether a sum of its has come."""


class Worth:
    """Of the workers of one pool. `workers`: those with a live link."""

    def __init__(self, workers: dict[NodeId, Worker], tables: Tables, conduct: Conduct) -> None:
        self._workers = workers
        self._tables = tables
        self._conduct = conduct
        self._paces: dict[NodeId, _Pace] = {}
        """Of each volunteer that is counted on, at `_counted_at`."""
        self._counted_at = float("-inf")
        self._looks = 0
        """Since then."""
        self._leases_per_s, self._held = 0.0, 0
        """Of all of them."""
        self._usual_s, self._usual_answer_s = 0.0, 0.0
        """What they need for a lease and its sum, and with what they held before it, the lower medians: one of those
        who are there is never slow, and half of them may be as slow as they like. 0: nobody is counted on."""
        self._usual_steady_s = 0.0
        """The same of what they take in the long run, and for a sum at best."""
        self.usual_pace_s = 0.0
        """What each lease takes one of them in the long run, the lower median; 0: not known."""
        self._sums_known = False
        """Whether a sum of one of them has come yet: before, nobody's counts."""
        self._passed_over: dict[NodeId, tuple[int, float]] = {}
        """Who was given nothing since it would be late -> steps that were closed since then, and when that began."""
        self._try_at: dict[NodeId, float] = {}
        """When it is given something all the same."""
        self._was_in_time: dict[NodeId, tuple[float, float]] = {}
        """Who did not take long, beside others that were counted on, since it was tried last: what it took for a lease
        and for its sum, the newest of these."""
        self._on_trial: dict[NodeId, None] = {}
        """Who is given the next lease for no other reason."""
        self._told: dict[NodeId, None] = {}
        self.rulings: list[Ruling] = []
        """What workers do not know yet."""

    def in_time(self, worker: Worker, now: float) -> bool:
        """Whether the others would still be busy when `worker` had brought one more lease and its sum; who would not
        is passed over."""
        node = worker.node
        self._on_trial.pop(node, None)
        self._looks += 1
        if self._is_old(now - self._counted_at):
            self._count(now)
        if worker.is_server or not self._usual_s:
            return True
        busy = self._tables.busy_count(node)
        each_s = self._conduct.typical_s(node, "each")
        if each_s and not self._is_slow(node):
            if len(self._paces) > (node in self._paces):
                self._was_in_time[node] = each_s, self._conduct.typical_s(node, "sum")
            return True
        own = self._paces.get(node, _Pace(0.0, 0))
        leases_per_s, held = self._leases_per_s - own.leases_per_s, self._held - own.held
        if not each_s:
            needs_s = (busy + 1) * UNKNOWN_TIMES * self._usual_s
            return not busy or needs_s * leases_per_s <= self._tables.free_count + held
        needs_s = busy * each_s + self._needs_s(node)
        if leases_per_s <= 0.0 or needs_s * leases_per_s <= self._tables.free_count + held:
            return True
        self._passed_over.setdefault(node, (0, now))
        known_at = float("-inf") if self._is_suddenly_slow(node) else self._conduct.result_at(node)
        known_at = max(known_at, self._conduct.tried_at(node))
        self._try_at[node] = known_at + TRIAL_TIMES * self._needs_s(node)
        if now < self._try_at[node] or self._tables.holds(node):
            return False
        self._on_trial[node] = None
        return True

    def granted(self, node: NodeId, now: float) -> None:
        """It has a lease."""
        if node in self._on_trial:
            del self._on_trial[node]
            self._was_in_time.pop(node, None)
            self._conduct.tries(node, now)
        self._passed_over.pop(node, None)
        if node in self._told:
            del self._told[node]
            self.rulings.append(Ruling(node, -1, 0.0, ""))

    def gone(self, node: NodeId) -> None:
        """Its link has ended."""
        for known in (self._passed_over, self._try_at, self._was_in_time, self._on_trial, self._told):
            known.pop(node, None)

    def close_step(self, now: float) -> None:
        for node, (before, since) in self._passed_over.items():
            steps = before + 1
            self._passed_over[node] = steps, since
            if steps >= TOLD_AFTER_STEPS and now - since >= TOLD_AFTER_S and node not in self._told:
                self._told[node] = None
                self.rulings.append(Ruling(node, 0, max(0.0, self._try_at[node] - now), TOO_LATE))

    def check(self) -> None:
        for known in (self._passed_over, self._try_at, self._was_in_time, self._on_trial, self._told):
            assert known.keys() <= self._workers.keys(), "somebody is gone and still passed over"
        assert self._told.keys() <= self._passed_over.keys(), "somebody has a lease and was told of none"

    def _needs_s(self, node: NodeId) -> float:
        return self._conduct.typical_s(node, "each") + self._conduct.typical_s(node, "sum")

    def _answers_s(self, node: NodeId) -> float:
        return self._conduct.typical_s(node, "result") + self._conduct.typical_s(node, "sum")

    def _is_slow(self, node: NodeId) -> bool:
        """Who holds much takes long for each result, and who holds little takes long for each of what it holds, since
        a way there and back is in both; who is slow is so by either count, and not only by its last few answers: what
        devices of a stage do for its other server is in them, by chance. (Equal computers in a cloud were told 20
        times in 3,000 s that they come too late, and with this not once; 41 times in a day.)"""
        sum_s = 0.0 if self._sums_known else self._conduct.typical_s(node, "sum")
        return (
            self._needs_s(node) - sum_s > SLOW_TIMES * self._usual_s
            and self._answers_s(node) - sum_s > SLOW_TIMES * self._usual_answer_s
            and self._conduct.steady_s(node, self._sums_known) > SLOW_TIMES * self._usual_steady_s
        )

    def _is_suddenly_slow(self, node: NodeId) -> bool:
        """Whether it took much less not long ago. A line is found out to be slow by its first sum: another one, to try
        it, would cost as much again."""
        each_s, sum_s = self._was_in_time.get(node, (0.0, 0.0))
        known = each_s > 0.0 and (sum_s > 0.0 or not self._conduct.typical_s(node, "sum"))
        return known and self._needs_s(node) > SUDDEN_TIMES * (each_s + sum_s)

    def _is_old(self, age_s: float) -> bool:
        """Whether what was counted so long ago is counted again."""
        if age_s >= max(KNOWN_FOR_MIN_S, self._usual_s):
            return True
        looks_min = KNOWN_FOR_TIMES * len(self._workers)
        return age_s >= KNOWN_FOR_TIMES * self._usual_s and self._looks >= looks_min

    def _count(self, now: float) -> None:
        self._counted_at, self._looks = now, 0
        self._paces = {node: pace for node, worker in self._workers.items() if (pace := self._pace(worker, now))}
        self._leases_per_s = sum(pace.leases_per_s for pace in self._paces.values())
        self._held = sum(pace.held for pace in self._paces.values())
        paces = self._paces.values()
        self._sums_known = any(pace.has_sum for pace in paces)
        known = [pace for pace in paces if pace.has_sum or not self._sums_known]
        self._usual_s = _lower_median([pace.needs_s for pace in known])
        self.usual_pace_s = _lower_median([self._conduct.pace_s(node, now) for node in self._paces])
        self._usual_answer_s = _lower_median([pace.answer_s for pace in known])
        self._usual_steady_s = _lower_median([pace.steady_s for pace in known])

    def _pace(self, worker: Worker, now: float) -> _Pace | None:
        each_s = self._conduct.typical_s(worker.node, "each")
        if worker.is_server or not each_s or self._conduct.leases_max(worker.node, now) == 0:
            return None
        held = self._tables.busy_with(worker.node)
        if any(now - entry.granted_at > STUCK_TIMES * each_s * entry.held for entry in held):
            return None
        if not held and not worker.slots:
            return None
        sum_s = self._conduct.typical_s(worker.node, "sum")
        result_s = self._conduct.typical_s(worker.node, "result")
        steady_s = self._conduct.steady_s(worker.node, with_sum=True)
        return _Pace(1 / each_s, len(held), each_s + sum_s, result_s + sum_s, steady_s, sum_s > 0.0)


def _lower_median(seconds: list[float]) -> float:
    return sorted(seconds)[(len(seconds) - 1) // 2] if seconds else 0.0
