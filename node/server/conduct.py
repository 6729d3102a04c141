"""What a server remembers of those who compute for it: how long they take, and whose leases others had to finish.

A lease that has run out goes to somebody else long before the run's longest time (`limits.lease_s`), since the others
show how long such work takes here. Whoever lost a lease that way and did not have it finished first is *overtaken*.
That is no crime: a link hangs, a computer is busy. But until it has finished something again it gets one lease at a
time, and after three in a row it rests: for twenty times as long as the others waited for its last one, two minutes at
least, twice as long with each further one, ten minutes at most. So a member that hangs, hoards, gives everything back,
or has a line that is too slow for the stage costs a few leases and not the run, and a computer that was busy for half a
minute is not sent away for ten. Its owner is told why, and until when, also on a new link.

Nobody is overtaken while nothing moves: it takes somebody else who finished the same work. Nor does it say anything
of anybody how long a lease took while a server of the stage was away, who holds results and takes sums: who answered
first when it was back looked slow beside those whose leases had run out meanwhile, and half of a stage was given
nothing for minutes. Nor do the seconds count in which a link carried nothing before it went on by another path (a lease
that ran out meanwhile did, since others had to do it): of five volunteers whose gateway restarted, or whose address
changed, three were given nothing for a minute, since a few of their answers had taken four seconds.

And nobody is overtaken by leaving: an owner pauses a computer or pulls its plug as often as he likes, which frees its
leases at once and costs the run nothing. What came back just before a link closed belongs to that. Who does nothing but
take leases and leave, time after time within minutes and without one result, gets nothing for ten minutes all the same;
and so does whoever is hung up on for what it sent, for the third time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Literal

from protocol.base.ids import NodeId

PATIENCE = 6.0
"""Times what such work takes the others: graphics cards of one stage differ by a factor of four or so, and a lease
waits behind those before it."""
PATIENCE_MIN_S = 2.0
"""Never less: a write to a slow disk, or a busy computer, costs this much now and then."""
PACE_WEIGHT = 0.03
"""Of a new answer in a worker's pace. A line that sends a sum carries results half as fast meanwhile, so what the last
few took tells equal workers apart that are not: 200 equal home lines took 107 s a step by a weight of 0.25, and 99 by
this one, as without any pace."""
PACE_KEPT_TIMES = 40.0
PACE_KEPT_MIN_S = 120.0
"""How long a pace is gone by after the last answer, in times that results take: who is never the first choice has none,
and a computer that was busy for a while would stay the last. At 5 s for a result that is a trial in 200 s."""
SAMPLES_MIN = 3
"""Answers, of all workers together, before anybody is measured by them."""
OVERTAKEN_MAX = 3
"""In a row, each with a lease that was given after the one before ran out: then it gets nothing …"""
OUT_TIMES = 20.0
"""… for so many times what the others waited for its last lease, so that it costs a twentieth of their time …"""
OUT_S = 120.0
"""… and not less than this, doubled with each further lease that it loses: where a lease is waited for two seconds, a
computer that was busy with something else is asked again when that is over …"""
OUT_MAX_S = 600.0
"""… nor more than this: a home line that was busy may be free again. Also for whoever leaves time after time, or sends
what is false."""
LEFT_MAX = 16
"""Times in a row that somebody may leave with unfinished leases: an owner who needs the computer now and then has
results in between, or more than `OUT_MAX_S`."""
REJOIN_S = 5.0
"""A worker that vanished with weight gradients in its sums may be back with them: nobody waits for these before the
tail of the step, and to do them again costs a whole contribution, his or another's. A link outlives a change of its
path by itself, so who is not back after this is gone. Whoever is away so long in every step would hold up each: of
these seconds each member has as many within `OUT_MAX_S`, which is 0.8 % of the run's time, and when they are used up
its sums are done again at once."""
REJOIN_MIN_S = 0.5
"""Less than this is no wait: a new link takes a dial and a handshake."""
REFUSED_MAX = 3
"""Times within `OUT_MAX_S` that somebody may be hung up on for a fault of its own: what it had under way is done again
each time, and the transport lets it come back after half a second, one, two (`protocol.link.faults`). The same program
in the same state would be refused again, so the third time is no accident."""
STILL_S = 15.0
"""So many seconds that its link stood still are excused of each `OUT_MAX_S`, which is three changes of an address; a
router that starts takes a minute, and the link is a new one. Whoever changes its way with each result would not be
found out to be slow otherwise: a fortieth of the time it may hold others up."""
STILL_SPANS = 8
"""As many as that are remembered: of two seconds each, since a link is silent for longer before it looks for a way."""
SLOW_TIMES = 2.0
"""Who takes more than so many times what is usual waits until nobody else is free …"""
SLOW_FORGOTTEN_TIMES = 4.0
SLOW_FORGOTTEN_MIN_S = 10.0
"""… but only for so long after its last answer, in times that it took then: after that it gets work like the others
and is measured anew. A computer that was busy once would otherwise get nothing for ever where others take all there
is. Who stays slow spends a fifth of its time on leases that it makes others wait for, at most."""
SUMS_KEPT = 3
"""Of a worker's newest sums the shortest says what its line takes: whether a sum has the line and the device to itself
or comes while they are at something else tells equal workers apart that are not."""
REMEMBERED_MAX = 4096
"""Nodes that are remembered, also after their links are gone: sixteen times what one server links to."""

Kind = Literal["result", "gradient", "each", "sum"]
"""From a grant to its result; from a step's tail, or a later grant, to when its sum counts; a result's time over the
leases that were held when it was granted; from the later one of the tail and the last result to when the sum counts."""
KINDS: tuple[Kind, ...] = ("result", "gradient", "each", "sum")


@dataclass(slots=True)
class _Record:
    """What is known of one node."""

    typical_s: dict[Kind, float] = field(default_factory=dict)
    """Moving averages of how long it takes."""
    samples: dict[Kind, int] = field(default_factory=dict)
    pace_s: float = 0.0
    """Of each of what it holds, over some dozens of them; 0: not known."""
    pace_count: int = 0
    """Answers in that."""
    sums_s: list[float] = field(default_factory=list)
    """What the newest ones took."""
    whole: tuple[int, float] = (-1, 0.0)
    """The newest step of which a sum of its was whole at the servers and waited for an audit, and since when."""
    counted_step: int = -1
    """The newest step whose sum says how fast it is: a verdict may be said again."""
    tried_at: float = float("-inf")
    """When it was given something to measure it anew: what began before says nothing any more."""
    still: list[tuple[float, float]] = field(default_factory=list)
    """From when to when its link carried nothing, the last few times."""
    still_s: float = 0.0
    """How long that was together by `still_at`; forgotten at the rate at which it is excused."""
    still_at: float = 0.0
    anew: set[Kind] = field(default_factory=set)
    """What was not measured since then."""
    answered_at: dict[Kind, float] = field(default_factory=dict)
    overtaken: int = 0
    """In a row."""
    overtaken_at: float = float("-inf")
    out_until: float = float("-inf")
    out_for: str = ""
    """Why, in the words of the ruling."""
    false_until: float = float("-inf")
    """Until when it is out for what it sent, whatever else it brings: what it was given before may still come."""
    left: int = 0
    """In a row, too: links that ended with leases unfinished."""
    left_at: float = float("-inf")
    waited_s: float = 0.0
    """For its sums, while it was gone, by `waited_at`; forgotten at the rate at which it may be waited for."""
    waited_at: float = 0.0
    unfinished: int = 0
    """Leases in a row that it did not finish, whether or not others did, each given after the one before was over."""
    unfinished_at: float = float("-inf")
    refused: int = 0
    """Times that it was hung up on for what it sent, each soon after the one before; results in between are none of an
    honest member's either."""
    refused_at: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a node gets from here on, and why: for itself and for the log."""

    node: NodeId
    leases_max: int
    """At once; -1: as many as it asks for."""
    seconds: float
    """How long, or 0: until it has finished a lease."""
    reason: str


class Conduct:
    """The memory of one pool."""

    def __init__(self) -> None:
        self._records: dict[NodeId, _Record] = {}
        self._times: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
        """What each node takes, in ascending order: the usual is asked for with every lease, and for every worker."""
        self._samples: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        """Answers by those who are remembered."""
        self._whole_since = float("-inf")
        """Since when all servers of the stage are there; infinite while one is not."""
        self._whole_with = -1
        """The step that is closed when all are back: the newest that was open when one went."""
        self._out_until: dict[NodeId, float] = {}
        """Until when those get nothing who do at present, and some whose time is over."""

    def server_gone(self, newest_step: int) -> None:
        """A server of the stage is away, and `newest_step` the newest that is open."""
        self._whole_since, self._whole_with = float("inf"), newest_step

    def step_closed(self, step: int, now: float) -> None:
        """All servers of the stage have committed it."""
        if step >= self._whole_with and self._whole_since > now:
            self._whole_since = now

    def counts(self, began_at: float) -> bool:
        """Whether what began then and has ended now says how fast somebody is."""
        return began_at >= self._whole_since

    def answered(self, node: NodeId, kind: Kind, seconds: float, now: float) -> None:
        """It took so long."""
        record = self._of(node)
        old = "each" in record.anew or self._pace_is_old(record, now)
        anew = kind in record.anew or self._is_forgotten(record, kind, now)
        before = seconds if anew else record.typical_s.get(kind, seconds)
        if kind == "sum":
            kept = [] if kind in record.anew else record.sums_s[1 - SUMS_KEPT :]
            record.sums_s = [*kept, seconds]
        record.anew.discard(kind)
        record.answered_at[kind] = now
        typical_s = before + 0.25 * (seconds - before)
        times = self._times[kind]
        if kind in record.typical_s:
            del times[bisect_left(times, record.typical_s[kind])]
        insort(times, typical_s)
        record.typical_s[kind] = typical_s
        record.samples[kind] = record.samples.get(kind, 0) + 1
        if kind == "each":
            record.pace_count = 1 if old else record.pace_count + 1
            record.pace_s += (seconds - record.pace_s) * max(PACE_WEIGHT, 1.0 / record.pace_count)
        self._samples[kind] += 1

    def says_how_fast(self, node: NodeId, began_at: float) -> bool:
        """Whether what `node` began then and has ended now says how fast it is."""
        record = self._records.get(node)
        return self.counts(began_at) and (record is None or began_at >= record.tried_at)

    def stood_still(self, node: NodeId, seconds: float, now: float) -> None:
        """Its link has, for so long until now."""
        record = self._of(node)
        record.still_s = max(0.0, record.still_s - (now - record.still_at) * STILL_S / OUT_MAX_S)
        since = max([now - min(seconds, STILL_S - record.still_s), *(end for _, end in record.still)])
        record.still_at = now
        if since < now:
            record.still_s += now - since
            record.still = [*record.still[1 - STILL_SPANS :], (since, now)]

    def _took_s(self, node: NodeId, began_at: float, ended_at: float) -> float:
        """From then to then, without the time that its link carried nothing."""
        still = self._of(node).still
        still_s = sum(max(0.0, min(end, ended_at) - max(start, began_at)) for start, end in still)
        return max(0.0, ended_at - began_at - still_s)

    def tries(self, node: NodeId, now: float) -> None:
        """It is given something to measure it anew: the next answers stand alone."""
        record = self._of(node)
        record.tried_at, record.anew = now, set(KINDS)

    def tried_at(self, node: NodeId) -> float:
        """When it last was."""
        record = self._records.get(node)
        return float("-inf") if record is None else record.tried_at

    def result_came(self, node: NodeId, granted_at: float, held: int, now: float) -> bool:
        """Of a lease that was given at `granted_at`, as one of `held`. Returns whether that says how fast it is."""
        if not self.says_how_fast(node, granted_at):
            return False
        took_s = self._took_s(node, granted_at, now)
        self.answered(node, "result", took_s, now)
        self.answered(node, "each", took_s / held, now)
        return True

    def sum_is_whole(self, node: NodeId, step: int, now: float) -> None:
        """It is here, and waits for its audit: what that takes is no slowness of the sender's."""
        self._of(node).whole = step, now

    def sum_came(self, node: NodeId, step: int, tail_at: float, granted_at: float | None, now: float) -> bool:
        """Its sum of a step is accepted, whose tail came at `tail_at`; `granted_at`: when it was given the last of that
        here, None: it was given all elsewhere in the stage. Returns whether that says how fast it is."""
        record, result_at = self._of(node), self.result_at(node)
        if granted_at is None and (step <= record.counted_step or result_at == float("-inf")):
            return False
        record.counted_step = max(step, record.counted_step)
        if not self.says_how_fast(node, result_at if granted_at is None else min(granted_at, result_at)):
            return False
        at = record.whole[1] if record.whole[0] == step else now
        if granted_at is not None:
            self.answered(node, "gradient", self._took_s(node, max(tail_at, granted_at), at), now)
        self.answered(node, "sum", self._took_s(node, max(tail_at, result_at), at), now)
        return True

    def finished(self, node: NodeId, now: float) -> Ruling | None:
        """It finished a lease: that it was slow before is forgotten, that it sent what is false is not. Returns what
        changes for it, if anything."""
        record = self._records.get(node)
        if record is None:
            return None
        record.left = record.unfinished = 0
        if not record.overtaken or now < record.false_until:
            return None
        record.overtaken, record.out_until = 0, float("-inf")
        self._out_until.pop(node, None)
        return Ruling(node, -1, 0.0, "")

    def overtaken_by_others(self, node: NodeId, granted_at: float, now: float) -> Ruling | None:
        """Somebody else had to finish a lease that it was given at `granted_at`. Leases that ran out together count
        once. Returns what changes for it, if anything."""
        record = self._of(node)
        if granted_at < record.overtaken_at or not self.counts(granted_at):
            return None
        record.overtaken += 1
        record.overtaken_at = now
        count = record.overtaken
        others = "others had to finish a task that it did not bring back in time"
        if count > 1:
            others = f"others had to finish {count} tasks in a row that it did not bring back in time"
        if count < OVERTAKEN_MAX:
            return Ruling(node, 1, 0.0, others)
        least_s = OUT_S * 2.0 ** min(count - OVERTAKEN_MAX, 8)
        return self._rests(node, now, min(OUT_MAX_S, max(least_s, OUT_TIMES * (now - granted_at))), others)

    def unfinished(self, node: NodeId, granted_at: float, now: float) -> None:
        """A lease that it was given at `granted_at` is over, and not done."""
        record = self._of(node)
        if granted_at >= record.unfinished_at and self.counts(granted_at):
            before = record.unfinished if now - record.unfinished_at < OUT_MAX_S else 0
            record.unfinished, record.unfinished_at = before + 1, now

    def left(self, node: NodeId, now: float) -> Ruling | None:
        """Its link has ended, and it had leases that it did not finish. Returns what changes for it, if anything."""
        record = self._of(node)
        record.left = record.left + 1 if now - record.left_at < OUT_MAX_S else 1
        record.left_at = now
        if record.left < LEFT_MAX:
            return None
        return self._out(node, now, f"it left {record.left} times in a row with leases, and finished none")

    def may_be_waited_for_s(self, node: NodeId, now: float) -> float:
        """Seconds for which others may wait for its sums, now that its link has ended; 0: do them again."""
        record = self._of(node)
        record.waited_s = max(0.0, record.waited_s - (now - record.waited_at) * REJOIN_S / OUT_MAX_S)
        record.waited_at = now
        left_s = REJOIN_S - record.waited_s
        return left_s if left_s >= REJOIN_MIN_S else 0.0

    def waited_for(self, node: NodeId, now: float) -> None:
        """That wait is over: it is back, or is given up."""
        record = self._of(node)
        record.waited_s, record.waited_at = record.waited_s + now - record.waited_at, now

    def refused(self, node: NodeId, now: float) -> Ruling | None:
        """It was hung up on for a fault of its own. Returns what changes for it, if anything."""
        record = self._of(node)
        record.refused = record.refused + 1 if now - record.refused_at < OUT_MAX_S else 1
        record.refused_at = now
        if record.refused < REFUSED_MAX:
            return None
        record.false_until = now + OUT_MAX_S
        return self._out(node, now, f"it was hung up on {record.refused} times for what it sent")

    def blamed(self, node: NodeId, now: float) -> Ruling:
        """A result of its was false."""
        self._of(node).false_until = now + OUT_MAX_S
        return self._out(node, now, "its result for a task was not what others computed")

    def leases_max(self, node: NodeId, now: float) -> int | None:
        """Leases that it may hold without a result; None: as many as it asks for."""
        record = self._records.get(node)
        if record is None or not record.overtaken:
            return None
        return 0 if now < record.out_until else 1

    def still_out(self, node: NodeId, now: float) -> Ruling | None:
        """What it was told and may have forgotten with its last link: that it gets nothing yet, and for how long."""
        record = self._records.get(node)
        if record is None or not record.overtaken or now >= record.out_until:
            return None
        return Ruling(node, 0, record.out_until - now, record.out_for)

    def resting(self, now: float) -> list[NodeId]:
        """Those who get nothing at present, or would if there were others to compare them with."""
        return [
            node
            for node, record in self._records.items()
            if record.out_until > now or (record.unfinished >= OVERTAKEN_MAX and now - record.unfinished_at < OUT_MAX_S)
        ]

    def back_at(self, now: float) -> float | None:
        """When the first of those who get nothing may have a lease again."""
        if not self._out_until:  # asked after every input
            return None
        return min((until for until in self._out_until.values() if until > now), default=None)

    def is_slow(self, node: NodeId, now: float) -> bool:
        """Whether it took more than twice what is usual here, not long ago: others come first."""
        usual = self._usual_s("result")
        record = self._records.get(node)
        typical = None if record is None else record.typical_s.get("result")
        if usual is None or record is None or typical is None or typical <= SLOW_TIMES * usual:
            return False
        return not self._is_forgotten(record, "result", now)

    def typical_s(self, node: NodeId, kind: Kind) -> float:
        """What it takes, 0: not known."""
        record = self._records.get(node)
        return 0.0 if record is None else record.typical_s.get(kind, 0.0)

    def pace_s(self, node: NodeId, now: float) -> float:
        """What each lease of it takes in the long run, 0: not known, or so long ago that it says nothing."""
        record = self._records.get(node)
        return 0.0 if record is None or self._pace_is_old(record, now) else record.pace_s

    def steady_s(self, node: NodeId, with_sum: bool) -> float:
        """What it takes for a lease in the long run, and perhaps for its sum at best; 0: not known."""
        record = self._records.get(node)
        if record is None or not record.pace_s:
            return 0.0
        return record.pace_s + (min(record.sums_s, default=0.0) if with_sum else 0.0)

    def result_at(self, node: NodeId) -> float:
        """When its last one came."""
        record = self._records.get(node)
        return float("-inf") if record is None else record.answered_at.get("result", float("-inf"))

    def patience_s(self, kind: Kind, most_s: float) -> float:
        """Seconds until a lease, or a sum of gradients, goes to somebody else."""
        usual = self._usual_s(kind)
        return most_s if usual is None else min(most_s, max(PATIENCE_MIN_S, PATIENCE * usual))

    def _out(self, node: NodeId, now: float, reason: str) -> Ruling:
        record = self._of(node)
        record.overtaken, record.overtaken_at = OVERTAKEN_MAX, now
        return self._rests(node, now, OUT_MAX_S, reason)

    def _rests(self, node: NodeId, now: float, seconds: float, reason: str) -> Ruling:
        record = self._of(node)
        record.out_until = self._out_until[node] = now + seconds
        record.out_for = reason
        return Ruling(node, 0, seconds, reason)

    def _is_forgotten(self, record: _Record, kind: Kind, now: float) -> bool:
        """Whether its last answer of the kind is so long ago that it says nothing about the next one."""
        at = record.answered_at.get(kind, float("-inf"))
        if kind == "gradient":  # once a step, which may be long
            at = max(at, record.answered_at.get("result", at))
        typical = record.typical_s.get("result", 0.0)
        return now - at >= max(SLOW_FORGOTTEN_MIN_S, SLOW_FORGOTTEN_TIMES * typical)

    def _pace_is_old(self, record: _Record, now: float) -> bool:
        at = record.answered_at.get("each", float("-inf"))
        return now - at >= max(PACE_KEPT_MIN_S, PACE_KEPT_TIMES * record.typical_s.get("result", 0.0))

    def _usual_s(self, kind: Kind) -> float | None:
        """The median over nodes, the lower one of two: half of the nodes may be as slow as they like."""
        if self._samples[kind] < SAMPLES_MIN:
            return None
        times = self._times[kind]
        return times[(len(times) - 1) // 2]

    def _of(self, node: NodeId) -> _Record:
        record = self._records.get(node)
        if record is None:
            if len(self._records) >= REMEMBERED_MAX:
                self._forget(next(iter(self._records)))
            record = self._records[node] = _Record()
        return record

    def _forget(self, node: NodeId) -> None:
        record = self._records.pop(node)
        self._out_until.pop(node, None)
        for kind, typical_s in record.typical_s.items():
            times = self._times[kind]
            del times[bisect_left(times, typical_s)]
            self._samples[kind] -= record.samples[kind]
