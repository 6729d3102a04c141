"""Who gets a unit of work: the workers of a pool, and which of them is asked first."""

from __future__ import annotations

from node.server.conduct import Conduct
from node.server.entries import Entry, Worker
from node.server.tables import Tables
from node.server.worth import Worth
from protocol.base.ids import NodeId

IDLE_S = 2.0
"""A volunteer that neither holds a lease nor asks for one for so long does not count as one that works: the servers
of a run that compute `when_empty` do it then. Or for as long as a lease's tensors take on a slow line: who has all the
graphs that it may hold waits for their backwards. (At 1.1 B parameters servers took the next forwards after two
seconds, 24 at once at 5 s each: the whole pipeline waited for them, and their leases ran out.)"""
LOOK_AGAIN_S = 1.0
"""Where others are waited for, it is asked again so soon whether they still work."""
REDONE_WITHIN_S = 5.0
"""Who does again what others took with them gets all of it, as long as it asks for more within this time of the last
one. Whoever has sent its sum of the step has to send another for it, a whole stage's vector however few tasks are in
it; of equal members each would get a task, and each would send one, before the next step's."""
SERVER_TRIES = 8
JUDGED_WITHIN_S = 120.0
"""Failures with a doubted task, and seconds (or four times what a lease's tensors take on a slow line), after which
volunteers get it again: their usual result settles it, too. A server whose device hangs fails once in 48 s, or never
asks again."""


class Choice:
    """The workers with a live link, and the choice among them.

    Args:
        collocated: `always`, `never`, or `when_empty`: servers get leases only while no volunteer works.
        transfer_s: what a lease's tensors take on a slow line, behind others.
    """

    def __init__(self, collocated: str, tables: Tables, conduct: Conduct, transfer_s: float = 0.0) -> None:
        self.collocated = collocated
        self._tables = tables
        self._conduct = conduct
        self._works_s = max(IDLE_S, transfer_s)
        self._judged_within_s = max(JUDGED_WITHIN_S, 4.0 * transfer_s)
        self.workers: dict[NodeId, Worker] = {}
        self.askers: dict[NodeId, Worker] = {}
        """Volunteers with a free slot."""
        self.now = 0.0
        self.look_at: float | None = None
        """When a volunteer that does nothing counts no longer."""
        self.worth = Worth(self.workers, tables, conduct)
        self._redoers: dict[int, tuple[NodeId, float]] = {}
        """Who does again what is missing of a step whose tail has come, and when it was given something last."""

    def choose(self, entry: Entry) -> Worker | None:
        """Who gets an entry that nobody is preferred for: of those with a free slot the one that is not slow and would
        be done first with this and all that it has (`_load`). Servers only where the run says so; who failed with it
        before only if nobody else takes it.
        """
        if self.waits_for_server(entry):
            servers = [worker for worker in self._judges() if worker.slots > 0]
            fresh = [worker for worker in servers if worker.node not in entry.late]
            return min(fresh or servers, key=lambda worker: -worker.slots, default=None)
        if self.collocated != "always" and (asker := self._best_asker(entry)) is not None:
            return asker
        volunteers = [w for w in self.workers.values() if not w.is_server and self._could_do(entry, w)]
        servers = [w for w in self.workers.values() if w.is_server and w.asked and w.node not in entry.late]
        allowed = list(volunteers)
        if self.collocated == "always" or (self.collocated == "when_empty" and not self._some_work(volunteers)):
            allowed += servers
        if not allowed:
            allowed = [w for w in self.workers.values() if not w.is_server or self.collocated != "never"]
        ready = [w for w in allowed if w.slots > 0 and (self.may_have_more(w) or not volunteers)]
        ready = [w for w in ready if self._in_time(entry, w)]
        # Each time that it is given back to one of these, the others have had four times as long to take it.
        if not ready and entry.late and not self._passed(entry.late_at + IDLE_S * 4.0 ** min(4, entry.late_count - 1)):
            return None
        if not ready and entry.late:
            ready = [w for w in self.workers.values() if w.node in entry.late and w.slots and self.may_have_more(w)]
        return min(ready, key=lambda w: (self._conduct.is_slow(w.node, self.now), self._load(w)), default=None)

    def choose_again(self, entry: Entry, tail_at: float) -> Worker | None:
        """Who gets an entry whose weight gradient is missing although the stage had given everything at `tail_at`:
        one member, which is waited for a little. None: nobody now."""
        if self.collocated == "always" or self.waits_for_server(entry):
            return self.choose(entry)
        node, given_at = self._redoers.get(entry.step, (None, 0.0))
        worker = None if node is None else self.workers.get(node)
        if worker is not None and self._could_do(entry, worker) and self.may_have_more(worker):
            until = given_at + REDONE_WITHIN_S
            if worker.slots > 0 and (self.now < until or self._has_first_sum(worker, entry.step, tail_at)):
                return self._redone_by(worker, entry.step)
            if worker.slots <= 0 and not self._passed(until):
                return None
        able = [w for w in self.askers.values() if self._could_do(entry, w) and self.may_have_more(w)]
        if not able:
            return self.choose(entry)
        # Whose sum has come has nothing of the step on its line.
        best = min(able, key=lambda w: (self._conduct.is_slow(w.node, self.now), self._owes(w, entry.step), _order(w)))
        return self._redone_by(best, entry.step)

    def close_step(self, step: int) -> None:
        """Nothing of it is missing any more."""
        self.worth.close_step(self.now)
        for old in [each for each in self._redoers if each <= step]:
            del self._redoers[old]

    def _redone_by(self, worker: Worker, step: int) -> Worker:
        self._redoers[step] = worker.node, self.now
        return worker

    def _owes(self, worker: Worker, step: int) -> bool:
        return any(e.step == step and not e.stored for e in self._tables.leased_by(worker.node))

    def _has_first_sum(self, worker: Worker, step: int, tail_at: float) -> bool:
        """Whether what it had summed up by then has not come: its next sum of the step waits for that one's verdict,
        so more may go into it."""
        leased = self._tables.leased_by(worker.node)
        return any(e.step == step and e.waits_for_sum and not e.stored and e.granted_at <= tail_at for e in leased)

    def waits_for_server(self, entry: Entry) -> bool:
        """Whether only servers may have it: what a member brought for it is doubted, and two members that agree may
        belong to one person."""
        if not entry.doubted or entry.late_count >= SERVER_TRIES or not self._judges():
            return False
        return not self._passed(entry.doubted_at + self._judged_within_s)

    def _judges(self) -> list[Worker]:
        if self.collocated == "never":
            return []
        return [worker for worker in self.workers.values() if worker.is_server and worker.asked]

    def _best_asker(self, entry: Entry) -> Worker | None:
        """The same, where a volunteer with a free slot may have it: nobody else need be looked at."""
        best: Worker | None = None
        best_is_slow, best_load = False, (0.0, 0, 0, 0)
        for worker in self.askers.values():
            load = self._load(worker)
            if best is not None and not best_is_slow and load > best_load:
                continue
            if not self._could_do(entry, worker) or not self.may_have_more(worker):
                continue
            if not self._in_time(entry, worker):
                continue
            is_slow = self._conduct.is_slow(worker.node, self.now)
            if best is None or (is_slow, load) < (best_is_slow, best_load):
                best, best_is_slow, best_load = worker, is_slow, load
        return best

    def _load(self, worker: Worker) -> tuple[float, int, int, int]:
        """Seconds until it would be done with one more lease and what it has: results that have not come, and backwards
        of the graphs that fill its slots, those of forwards under way among them. Then who has most slots, and of
        equals who was given something longest ago. (By slots alone, all lines of a stage got the same, 5 Mbit/s and 80:
        of 200 drawn home lines a step took 110 s, and takes 65. Equal ones take 98 and 99.)

        Slots come back when the device is done, while the line still sends: the first one would get everything, and the
        others' sums would wait so long for more that they are sent for a task or two.
        """
        pace_s = self._conduct.pace_s(worker.node, self.now) or self.worth.usual_pace_s
        has = self._tables.busy_count(worker.node) + worker.slots_most - worker.slots
        return (1 + has) * pace_s, *_order(worker)

    def _could_do(self, entry: Entry, worker: Worker) -> bool:
        return worker.node not in entry.late and self._conduct.leases_max(worker.node, self.now) != 0

    def may_have_more(self, worker: Worker) -> bool:
        most = self._conduct.leases_max(worker.node, self.now)
        return most is None or self._tables.busy_count(worker.node) < most

    def _in_time(self, entry: Entry, worker: Worker) -> bool:
        """Whether it would not make the others wait, who could do it as well. If it would, looks again soon."""
        if entry.late or self.worth.in_time(worker, self.now):
            return True
        return self._passed(self.now + LOOK_AGAIN_S)

    def _some_work(self, volunteers: list[Worker]) -> bool:
        """Whether one of these has room, holds a lease, or did so a moment ago."""
        if any(w.slots > 0 or self._tables.holds(w.node) for w in volunteers):
            return True
        return bool(volunteers) and not self._passed(max(w.active_at for w in volunteers) + self._works_s)

    def _passed(self, until: float) -> bool:
        """Whether it is as late as that. If not, looks again when it is."""
        if until <= self.now:
            return True
        self.look_at = min(until, float("inf") if self.look_at is None else self.look_at)
        return False


def _order(worker: Worker) -> tuple[int, int, int]:
    return -worker.slots, worker.turn, worker.number
