"""A pool of unfinished tasks: what is free, who has a lease, what still has to come back.

One entry is one unit of work: an F, a B, or the F, L and B of a route's end. It is finished when its result (the
output, or the input gradient) is held by a server and its weight gradient is covered by the ledger; each of the two
can be lost and needed again on its own. A fence number tells a lease from the one before.

A lease has two clocks. The *result* is needed at once, so it has a short one, from the grant on. The *weight gradient*
lies in the worker's sum, which is uploaded once a step, so it has none while the stage has work of the step to give;
from the *tail* of the step on (`node.server.tails`) the worker must show progress: a clock that nothing but bytes of
its gradients, arriving here or at a fellow server, renews.

Of workers who let leases run out, or give them back, `node.server.conduct` judges; who took part in an entry in vain
is written down in it (`late`). Only whoever stays has failed: what an owner's pause gives back looks like what a
hoarder gives back until the one leaves and the other asks for more. Leases only save work: that no gradient counts
twice is the ledger's doing. Nothing here looks at all entries to give one away (`node.server.tables`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from node.machine.waits import Wait
from node.server.choice import Choice
from node.server.clocks import Clocks
from node.server.conduct import Conduct, Ruling
from node.server.entries import BELIEVED_MAX, Worker, counted, oldest_wait
from node.server.entries import Entry as Entry
from node.server.entries import Grant as Grant
from node.server.patience import Patience
from node.server.tables import Tables
from protocol.base.ids import NodeId, TaskId, TensorRef


class Pool:
    """The pool of one role of one server.

    Args:
        result_s: seconds from a grant after which a task without its result goes to somebody else.
        collocated: `always`, `never`, or `when_empty`: servers get leases only while no volunteer works.
        gradient_s: the same for weight gradients of which nothing more arrives in the tail of a step.
        next_fence: gives numbers that no lease of this server had before.
        transfer_s: what a lease's tensors take on a slow line, behind others: nobody has less time for a result.
        rank: what is free goes by it, the smallest first; None: by task.
    """

    def __init__(
        self,
        result_s: float,
        collocated: str,
        gradient_s: float,
        next_fence: Callable[[], int],
        transfer_s: float = 0.0,
        rank: Callable[[TaskId], tuple[int, ...]] | None = None,
    ) -> None:
        self._next_fence = next_fence
        self._conduct = Conduct()
        self._tables = Tables(rank)
        self._entries, self._of_task = self._tables.entries, self._tables.of_task
        self._leased_by = self._tables.leased_by
        self._choice = Choice(collocated, self._tables, self._conduct, transfer_s)
        self._workers, self._askers = self._choice.workers, self._choice.askers
        self._arrivals = 0
        self._deadlines: list[tuple[float, int, TaskId]] = []
        """Heap of result clocks: (time, fence, first task); stale when time or fence are not the entry's."""
        self._gradient_clocks: Clocks[tuple[NodeId, int]] = Clocks()
        """(worker, step) in its tail -> when its sums are given up."""
        self._tails: dict[int, float] = {}
        """Steps whose tail has come in the whole stage, and when."""
        self._gone: dict[NodeId, float] = {}
        """Workers without a link whose sums are waited for, until when."""
        self._claims: dict[TaskId, NodeId] = {}
        """Tasks that a worker says it has summed up, of steps that are not open here yet."""
        self._dirty = False
        """Something has changed since the last grant that may allow another one."""
        self.reissued_count = self._turn = 0
        self._patience = Patience(result_s, gradient_s, transfer_s)
        self._rulings: list[Ruling] = []
        self._withdrawn: list[tuple[NodeId, TaskId]] = []

    def collocate(self, collocated: str) -> None:
        """The operator has another wish for when servers compute."""
        self._choice.collocated, self._dirty = collocated, True

    def clock(self, now: float) -> None:
        """What happens from here on, happens at `now`."""
        back_at = self._conduct.back_at(self._now)
        self._dirty = self._dirty or (back_at is not None and back_at <= now)
        self._choice.now = now

    @property
    def _now(self) -> float:
        return self._choice.now

    # ---- workers -------------------------------------------------------------------------------------------------

    def worker_here(self, node: NodeId, is_server: bool) -> None:
        """A link to somebody who may compute is up: it starts without slots."""
        self._dirty = True
        self._askers.pop(node, None)
        before = self._workers.get(node)
        self._arrivals += 1
        number = self._arrivals if before is None else before.number
        self._workers[node] = Worker(node, is_server, number, active_at=self._now)
        if (ruling := self._conduct.still_out(node, self._now)) is not None:
            self._rulings.append(ruling)

    def worker_late(self, node: NodeId, seconds: float) -> None:
        """Its link has stood still for so long until now, which says nothing of it."""
        if node in self._workers and (self._leased_by(node) or self._conduct.result_at(node) > 0.0):
            self._conduct.stood_still(node, seconds, self._now)

    def worker_gone(self, node: NodeId, now: float) -> None:
        """Its leases are free at once, and its graphs are lost; its sums are waited for a little, unless it was refused
        or has been waited for a lot: whoever goes and comes again, time after time, would hold up each step."""
        self._dirty = True
        worker = self._workers.pop(node, None)
        self._askers.pop(node, None)
        self._choice.worth.gone(node)
        if worker is not None and worker.is_server:
            self._conduct.server_gone(max(self._tables.open, default=-1))
        if worker is not None and not worker.is_server and (worker.returned or self._leased_by(node)):
            self._forgive(worker, now)
            self._rule(self._conduct.left(node, now))
        self._claims = {task: claimer for task, claimer in self._claims.items() if claimer != node}
        for entry in self._tables.preferring(node):
            self._change(entry, preferred=None)
        for entry in self._leased_by(node):
            if not entry.waits_for_sum:
                self._change(entry, worker=None)
        if self._gone.pop(node, None) is not None:
            self._conduct.waited_for(node, now)
        if self._leased_by(node):
            refused = worker is not None and worker.refused
            self._gone[node] = now if refused else now + self._conduct.may_be_waited_for_s(node, now)

    def worker_refused(self, node: NodeId) -> None:
        """It is hung up on for a fault of its own: nothing of it is waited for."""
        worker = self._workers.get(node)
        if worker is not None and not worker.is_server and not worker.refused:
            worker.refused = True
            self._rule(self._conduct.refused(node, self._now))

    def ban(self, nodes: Iterable[NodeId]) -> None:
        """Their links end, or have ended a moment ago: nothing of them is waited for."""
        for node in nodes:
            if node in self._workers:
                self._workers[node].refused = True
            elif node in self._gone:
                self._gone[node] = self._now

    def add_slots(self, node: NodeId, slots: int, slots_max: int) -> None:
        """The worker takes `slots` more leases."""
        worker = self._workers.get(node)
        self._dirty = True
        if worker is None:
            return
        if slots > 0:
            self._stays(worker)
            worker.asked = True
        worker.slots = min(worker.slots + slots, slots_max)
        worker.slots_most = max(worker.slots_most, worker.slots)
        worker.active_at = self._now
        if worker.slots > 0 and not worker.is_server:
            self._askers[node] = worker

    def prefer(self, task: TaskId, node: NodeId) -> bool:
        """`node` has the graph that this backward needs. Returns whether it will be asked for it."""
        entry = self._of_task.get(task)
        if entry is None or entry.finished or node not in self._workers or node in entry.late:
            return False
        if self._choice.waits_for_server(entry) and not self._workers[node].is_server:
            return False
        if self._conduct.leases_max(node, self._now) == 0:
            return False
        if entry.preferred is None:
            self._change(entry, preferred=node)
        return entry.preferred == node

    # ---- tasks ---------------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        self._dirty = True
        self._tables.add(entry)
        claimer = None
        for task in entry.tasks:
            claimer = self._claims.pop(task, claimer)
        if claimer is not None and entry.needs_gradient and not entry.needs_result:
            self._change(entry, worker=claimer, summed=True)

    def supply(self, task: TaskId, tensors: tuple[TensorRef, ...], complete: bool = True) -> None:
        """What the task needs has come, or (not `complete`) enough to begin with it: it can be leased."""
        entry = self._of_task.get(task)
        if entry is None:
            return
        news = not entry.complete
        self._change(entry, tensors=tensors, complete=complete)
        if news and entry.worker is not None and not entry.waits_for_sum:
            entry.granted_at = self._now  # it could not have gone on before
            self._start_clock(entry)

    def result_held(self, task: TaskId) -> None:
        entry = self._of_task.get(task)
        if entry is not None and entry.needs_result:
            self._change(entry, needs_result=False)

    def result_lost(self, task: TaskId) -> None:
        """The server that held the result has lost it: the task has to be done again, perhaps for that alone. So it has
        where the worker has computed it already: it was sent when that server was not there to take it, and is not sent
        again. Whoever has the weight gradient comes first."""
        entry = self._of_task.get(task)
        if entry is None:
            return
        if not entry.needs_result:
            self._change(entry, needs_result=True, worker=None)
        elif entry.summed and entry.worker is not None:
            self._change(entry, worker=None, preferred=entry.worker)

    def withdraw(self, backward: TaskId) -> None:
        """Its forward has to be done again before it can be: whoever has the graph need not keep it until then."""
        entry = self._of_task.get(backward)
        if entry is not None and entry.preferred is not None:
            self._change(entry, preferred=None)

    def covered(self, tasks: Iterable[TaskId], node: NodeId) -> None:
        """The ledger has accepted a contribution of `node` with these tasks, in this pool or another of the stage: how
        long its sums take says here, too, whether more work for it would be in time."""
        steps: dict[int, None] = {}
        begun: dict[int, float] = {}
        for task in tasks:
            steps[task.step] = None
            entry = self._of_task.get(task)
            if entry is not None and entry.needs_gradient:
                begun[entry.step] = max(entry.granted_at, begun.get(entry.step, 0.0))
                self._overtaken(entry, but=node)
                self._change(entry, needs_gradient=False)
        for step in steps:
            if step in begun:
                self._rule(self._conduct.finished(node, self._now))
            tail_at, granted_at = self._tails.get(step), begun.get(step)
            if tail_at is not None and self._conduct.sum_came(node, step, tail_at, granted_at, self._now):
                self._set_patience()

    def summed(self, tasks: Iterable[TaskId], node: NodeId, now: float) -> None:
        """`node` has computed these: from now on it is its contribution that is waited for."""
        for task in tasks:
            entry = self._of_task.get(task)
            if entry is not None and entry.worker == node and not entry.summed:
                self._change(entry, summed=True)
                self._start_gradient_clock(node, entry.step, now)

    def claim(self, tasks: tuple[TaskId, ...], node: NodeId, now: float) -> None:
        """`node`, whose link is new, says all that it has summed up: that is its own (again), and nothing else is."""
        if self._gone.pop(node, None) is not None:
            self._conduct.waited_for(node, now)
        claimed = dict.fromkeys(tasks)
        # Also where it said something else on the same link before: a volunteer begins anew with other servers.
        self._claims = {task: claimer for task, claimer in self._claims.items() if claimer != node}
        for entry in self._leased_by(node):
            if entry.summed and not entry.stored and not any(task in claimed for task in entry.tasks):
                self._change(entry, worker=None)
        for task in claimed:
            held = self._of_task.get(task)
            if held is None:
                self._claims[task] = node
            elif held.open and held.needs_gradient and not held.needs_result:
                self._change(held, worker=node, summed=True)
                self._start_gradient_clock(node, held.step, now)
        self._dirty = True

    def stored(self, tasks: Iterable[TaskId], node: NodeId) -> None:
        """A contribution of `node` with these is whole at the servers, and its audit is waited for. Whoever did them
        again because `node` has left would have them in a sum that is refused whole when this one counts."""
        for task in tasks:
            self._conduct.sum_is_whole(node, task.step, self._now)
            entry = self._of_task.get(task)
            if entry is not None and entry.waits_for_sum and entry.worker == node and not entry.stored:
                self._change(entry, stored=True)

    def tail(self, step: int, now: float) -> None:
        """The stage has no work of the step to give any more: weight gradients that are summed up are waited for."""
        if step in self._tails or step not in self._tables.open:
            return
        self._tails[step] = now
        for node, holding in self._tables.holdings.items():
            if any(entry.step == step and entry.summed for entry in holding.leased.values()):
                self._gradient_clocks.set((node, step), now + self._patience.gradient_s)

    def allow_upload(self, seconds: float) -> None:
        """A whole contribution may take so long: the clock of weight gradients is that much longer."""
        self._patience.allow_upload(seconds)

    def progress(self, node: NodeId, step: int, now: float) -> None:
        """Bytes of the worker's weight gradients of the step have arrived."""
        if (node, step) in self._gradient_clocks:
            self._gradient_clocks.set((node, step), now + self._patience.gradient_s)

    def give_back(self, tasks: Iterable[TaskId], node: NodeId, *, untried: bool = False, doubted: bool = False) -> None:
        """`node` says that it will not finish these (`untried`), or the ledger refused what it sent for them, and
        somebody else shall do them if it is `doubted`."""
        for entry in [entry for task in tasks if (entry := self._of_task.get(task)) is not None]:
            if entry.worker == node:
                here = untried and entry.complete  # else it has waited for others in vain
                if here or doubted:
                    self._failed_with(entry, node)
                if doubted:
                    entry.brought.add(node)
                if here and (worker := self._workers.get(node)) is not None:
                    worker.returned_at = worker.returned_at if worker.returned else self._now
                    worker.returned[entry.tasks[0]] = entry.granted_at
                self._change(entry, worker=None, waits_for_all=entry.waits_for_all or not entry.complete)
            if entry.preferred == node:
                self._change(entry, preferred=None)

    def result_may_be_lost(self, tasks: Iterable[TaskId], node: NodeId) -> None:
        """`node` has computed these and sent the result in vain: no fault of its own, and it comes first where it has
        the sum. Not for ever: whoever brings nothing would have them each time."""
        for entry in [entry for task in tasks if (entry := self._of_task.get(task)) is not None]:
            if entry.worker == node and entry.needs_result and entry.issued_count < BELIEVED_MAX:
                self._change(entry, worker=None, preferred=node if entry.summed else entry.preferred)
            elif entry.worker == node and entry.needs_result:
                self.give_back(entry.tasks, node, untried=True)

    def reserve(self, tasks: Iterable[TaskId]) -> None:
        """What a member brought for these is doubted: before another volunteer's, a server's opinion is asked for."""
        for task in tasks:
            entry = self._of_task.get(task)
            if entry is not None and not entry.doubted:
                self._change(entry, doubted=True, doubted_at=self._now)

    def blame(self, node: NodeId) -> None:
        """Others have shown that a result of its was false: it gets nothing for a while."""
        self._rule(self._conduct.blamed(node, self._now))
        for entry in self._leased_by(node):
            self._change(entry, worker=None)

    def drop_step(self, step: int) -> None:
        """Steps up to `step` are closed."""
        self._choice.close_step(step)
        self._conduct.step_closed(step, self._now)
        for key in [key for key in self._entries if key.step <= step]:
            entry = self._entries[key]
            self._forget(entry)
            self._tables.remove(entry)
        for number in [number for number in self._tables.open if number <= step]:
            del self._tables.open[number]
            self._tails.pop(number, None)
        for clock, _ in self._gradient_clocks.items():
            if clock[1] <= step:
                self._gradient_clocks.pop(clock)
        self._claims = {task: claimer for task, claimer in self._claims.items() if task.step > step}

    # ---- leases --------------------------------------------------------------------------------------------------

    def grant(self, now: float) -> list[Grant]:
        """Gives what is free to who may have it, older steps first; each grant is a new lease."""
        self.clock(now)
        if not self._dirty:
            return []
        self._dirty, self._choice.look_at = False, None
        given: list[tuple[Entry, Worker, bool]] = []
        for node in self._tables.preferred_nodes():
            worker = self._workers.get(node)
            while worker is not None and (entry := self._tables.first_free(node)) is not None:
                if not self._choice.may_have_more(worker):
                    self._change(entry, preferred=None)
                    continue
                self._lease(entry, worker, now)
                given.append((entry, worker, True))
        skipped: list[Entry] = []
        while (free := self._tables.first_free(None)) is not None:
            tail_at = self._tails.get(free.step) if free.needs_gradient else None
            again = tail_at is not None
            worker = self._choice.choose(free) if tail_at is None else self._choice.choose_again(free, tail_at)
            if worker is None and not (free.late or again or self._choice.waits_for_server(free)):
                break
            if worker is None:
                self._tables.pass_over()
                skipped.append(free)
                continue
            worker.slots -= 1
            if worker.slots <= 0:
                self._askers.pop(worker.node, None)
            self._lease(free, worker, now)
            given.append((free, worker, False))
        for free in skipped:
            self._tables.wait_free(free)
        given.sort(key=lambda each: each[0].tasks[0])
        return [Grant(entry, worker.node, has_graph) for entry, worker, has_graph in given]

    def open_to_all(self, step: int) -> bool:
        """Whether any worker may still get work of the step from this pool: also what a worker has summed up that is
        gone and may be back. Who sent its sum meanwhile would have to send another one for that."""
        if self._tables.open.get(step, {}).get(None, 0):
            return True
        if not self._gone:  # asked after every input
            return False
        awaited = (entry for node in self._gone for entry in self._leased_by(node))
        return any(entry.step == step and entry.waits_for_sum and not entry.stored for entry in awaited)

    def open_count(self, step: int) -> int:
        """Entries of the step that somebody still has to be given."""
        return sum(self._tables.open.get(step, {}).values())

    def has_more_for(self, node: NodeId, step: int) -> bool:
        """Whether `node` can still expect work of the step from this pool."""
        counts = self._tables.open.get(step, {})
        return bool(counts.get(None, 0) or counts.get(node, 0))

    def expire(self, now: float) -> list[tuple[Entry, NodeId]]:
        """Takes back the leases whose time is over; says whose they were."""
        late: list[tuple[Entry, NodeId]] = []
        self.clock(now)
        while self._deadlines and self._deadlines[0][0] <= now:
            due_at, fence, key = heapq.heappop(self._deadlines)
            entry = self._entries.get(key)
            if entry is not None and self._result_is_due(entry, fence, due_at):
                assert entry.worker is not None
                late.append((entry, entry.worker))
        first = self._gradient_clocks.first()
        over = [] if first is None or first > now else [c for c, at in self._gradient_clocks.items() if at <= now]
        for node, step in over:
            self._gradient_clocks.pop((node, step))
            late += [(e, node) for e in self._leased_by(node) if e.step == step and e.waits_for_sum]
        for node in [node for node, until in self._gone.items() if until <= now]:
            del self._gone[node]
            self._conduct.waited_for(node, now)
            late += [(e, node) for e in self._leased_by(node) if e.waits_for_sum and not e.stored]
            for step in sorted({e.step for e in self._leased_by(node) if e.stored}):
                self._start_gradient_clock(node, step, now)
        for entry, node in late:
            if node in self._workers and entry.complete:  # who is gone has not failed: it may have been killed
                self._failed_with(entry, node)
            waits_for_all = entry.waits_for_all or not entry.complete
            self._change(entry, preferred=None, worker=None, waits_for_all=waits_for_all)
        look_at = self._choice.look_at
        if look_at is not None and look_at <= now:
            self._dirty = True
        return late

    def next_deadline(self) -> float | None:
        while self._deadlines:
            deadline, fence, key = self._deadlines[0]
            entry = self._entries.get(key)
            if entry is not None and self._result_is_due(entry, fence, deadline):
                break
            heapq.heappop(self._deadlines)
        first = deadline if self._deadlines else None  # asked after every input, so no list is made of these
        others = self._gradient_clocks.first(), self._choice.look_at, self._conduct.back_at(self._now)
        for at in (*others, *self._gone.values()):
            if at is not None and (first is None or at < first):
                first = at
        return first

    # ---- what an operator asks -----------------------------------------------------------------------------------

    def waiting_for(self, own: NodeId) -> Wait | None:
        """Why the oldest unfinished task is not finished, or nothing. `own`: the server itself, which may compute."""
        servers_only = all(worker.is_server for worker in self._workers.values())  # one look, where they are hundreds
        lonely = not self._workers or (servers_only and self._choice.collocated == "never")
        return oldest_wait(self._entries.values(), own, lonely)

    def resting(self) -> list[NodeId]:
        """Where no volunteer with a link is of any use for the time being: these, and others like them."""
        resting = self._conduct.resting(self._now)
        return resting if all(each.is_server or each.node in resting for each in self._workers.values()) else []

    def counts(self) -> dict[str, int]:
        """Unfinished units by what they wait for."""
        return counted(self._entries.values())

    def take_rulings(self) -> list[Ruling]:
        """What has changed for workers since this was asked last."""
        rulings, self._rulings, self._choice.worth.rulings = self._rulings + self._choice.worth.rulings, [], []
        return rulings

    def take_withdrawn(self) -> list[tuple[NodeId, TaskId]]:
        """Backwards that the holders of their graphs will not be asked for: kept for nothing, these fill their room."""
        withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn

    def check(self) -> None:
        for entry in self._entries.values():
            entry.check(self._workers.keys(), self._gone.keys())
        self._tables.check()
        self._choice.worth.check()

    # ---- changes -------------------------------------------------------------------------------------------------

    def _change(self, entry: Entry, **values: object) -> None:
        """Every change of an entry goes through here, so that heaps and counts follow."""
        self._dirty = True
        waited, node = entry.waits_for_sum, None if entry.waits_for_sum else entry.worker
        holder = entry.preferred if entry.tasks[0].op == "B" else None
        if holder is not None and holder in self._workers and values.get("preferred", holder) != holder:
            self._withdrawn.append((holder, entry.tasks[0]))
        self._forget(entry)
        for name, value in values.items():
            setattr(entry, name, value)
        if node is not None and entry.worker == node and (entry.finished or entry.waits_for_sum):
            if self._conduct.result_came(node, entry.granted_at, entry.held, self._now):
                self._set_patience()
            if entry.finished and "needs_gradient" not in values:
                self._overtaken(entry, but=node)
                self._rule(self._conduct.finished(node, self._now))
        if entry.worker is None or entry.finished:
            entry.worker, entry.summed, entry.stored = None, False, False
        elif entry.waits_for_sum and not waited:
            self._start_gradient_clock(entry.worker, entry.step, self._now)
        self._tables.note(entry)

    def _forget(self, entry: Entry) -> None:
        self._tables.forget(entry)
        for node in (entry.worker, entry.preferred):
            if node in self._workers:
                self._workers[node].active_at = self._now

    def _overtaken(self, entry: Entry, but: NodeId) -> None:
        """The entry is done: others had it before and did not finish it."""
        for node, granted_at in entry.late.items():
            worker = self._workers.get(node)
            if node == but or node in entry.brought or (worker is not None and worker.is_server):
                continue
            if worker is not None and worker.returned.get(entry.tasks[0]) == granted_at:
                worker.overtaken.append((granted_at, self._now))
            else:
                self._rule(self._conduct.overtaken_by_others(node, granted_at, self._now))
        entry.late, entry.brought = {}, set()

    def _stays(self, worker: Worker) -> None:
        """It has given leases back and goes on taking others: those were failures, in the order of their ends."""
        for granted_at, at in worker.overtaken:
            self._rule(self._conduct.overtaken_by_others(worker.node, granted_at, at))
        worker.returned, worker.overtaken = {}, []

    def _forgive(self, worker: Worker, now: float) -> None:
        """It has left: it may have what it gave back just before that again when it comes back, like any other."""
        if now - worker.returned_at > self._patience.leaving_s:
            self._stays(worker)
        for task, granted_at in worker.returned.items():
            entry = self._entries.get(task)
            if entry is not None and entry.late.get(worker.node) == granted_at:
                del entry.late[worker.node]
                entry.late_count = entry.late_count - 1 if entry.late else 0

    def _rule(self, ruling: Ruling | None) -> None:
        if ruling is None:
            return
        self._dirty = True
        self._rulings.append(ruling)
        if ruling.leases_max == 0:
            for entry in self._tables.preferring(ruling.node):
                self._change(entry, preferred=None)

    def _lease(self, entry: Entry, worker: Worker, now: float) -> None:
        if now - worker.returned_at > self._patience.leaving_s:
            self._stays(worker)  # the graphs that it has bring it leases that it need not ask for
        fence = self._next_fence()
        self.reissued_count += entry.issued_count > 0
        self._turn += 1
        worker.turn = self._turn
        held = 1 + self._tables.busy_count(worker.node)
        issued = entry.issued_count + 1
        self._change(entry, worker=worker.node, held=held, fence=fence, issued_count=issued, granted_at=now)
        self._choice.worth.granted(worker.node, now)
        # Who gets it after somebody has failed with it has more time: perhaps it is the work that takes long.
        self._start_clock(entry)

    def _start_clock(self, entry: Entry) -> None:
        patience_s = self._patience.late_result_s(len(entry.late))
        entry.due_at = entry.granted_at + patience_s
        heapq.heappush(self._deadlines, (entry.due_at, entry.fence, entry.tasks[0]))

    def _set_patience(self) -> None:
        """What was given with more patience ends earlier, too."""
        results, gradients = self._patience.learn(self._conduct)
        if results:
            self._deadlines = []
            for entry in self._entries.values():
                if self._result_is_due(entry, entry.fence, entry.due_at):
                    self._start_clock(entry)
        if gradients:
            for clock, deadline in self._gradient_clocks.items():
                self._gradient_clocks.set(clock, min(deadline, self._now + self._patience.gradient_s))

    def _start_gradient_clock(self, node: NodeId, step: int, now: float) -> None:
        if step in self._tails and (node, step) not in self._gradient_clocks:
            self._gradient_clocks.set((node, step), now + self._patience.gradient_s)

    def _failed_with(self, entry: Entry, node: NodeId) -> None:
        self._conduct.unfinished(node, entry.granted_at, self._now)
        entry.late[node] = entry.granted_at
        entry.late_at = self._now
        entry.late_count += 1

    def _result_is_due(self, entry: Entry, fence: int, due_at: float) -> bool:
        leased = entry.worker is not None and not entry.waits_for_sum
        return leased and (entry.fence, entry.due_at) == (fence, due_at)
