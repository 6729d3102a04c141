"""Runs a task graph: by the orders of a schedule, or by policies that choose as the work becomes ready.

Both end in a `Timeline`. A node does one thing at a time; what its operation lets go on arrives after the
link's latency and, where rates are limited, after its bytes were sent beside the others.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.planning.simulator.graph import Costs, TaskGraph, build_graph, graph_of, unordered
from coordinator.planning.simulator.kernel import EventHeap
from coordinator.planning.simulator.links import Network, SharedLinks
from protocol.base.errors import BadInputError
from protocol.schedule.check import find_cycle
from protocol.schedule.ir import Flow, Instruction, Key, Op, RouteRules, Schedule
from protocol.schedule.policies import Kind, Policy, Ready, State, Weights, choose, ready, start


class DeadlockError(BadInputError):
    """Nothing can start any more, and work is left; `cycle` says who waits for whom."""

    def __init__(self, cycle: list[Key]) -> None:
        super().__init__(f"schedule: deadlock: {' waits for '.join(map(str, cycle))}")
        self.cycle = cycle


@dataclass
class Timeline:
    """When every task of a graph ran.

    Attributes:
        start_s, end_s: per task.
        orders: per node, its tasks (those beside it left out) in the order in which they started.
        makespan_s: when the last task ended.
    """

    graph: TaskGraph
    start_s: list[float]
    end_s: list[float]
    orders: list[list[int]]

    @property
    def makespan_s(self) -> float:
        return max(self.end_s, default=0.0)

    def peaks(self) -> list[float]:
        """Per node, the most its memory ever held, in the graph's unit of memory."""
        graph = self.graph
        changes: list[list[tuple[float, int, float]]] = [[] for _ in graph.orders]
        for task, node in enumerate(graph.nodes):
            if graph.memory_end[task]:
                changes[node].append((self.end_s[task], 0, graph.memory_end[task]))
            if graph.memory_start[task]:
                changes[node].append((self.start_s[task], 1, graph.memory_start[task]))
        peaks = []
        for of_node in changes:
            held = peak = 0.0
            for _, _, change in sorted(of_node):
                held += change
                peak = max(peak, held)
            peaks.append(round(peak, 9))
        return peaks

    def schedule(
        self,
        stages: int,
        rules: RouteRules | None = None,
        samples: int | None = None,
        tokens: int | None = None,
    ) -> Schedule:
        """The schedule that this run is: explicit orders with planned times, ready to be checked and sent."""
        graph = self.graph
        listed: list[list[tuple[float, int, int]]] = [[] for _ in graph.orders]
        ranked: dict[int, None] = {}
        for of_node, order in zip(listed, self.orders, strict=True):
            at_s = 0.0
            for number, task in enumerate(order):
                # Starts within one instant may differ by a rounding; the order in which tasks ran is what counts.
                at_s = max(at_s, self.start_s[task])
                of_node.append((at_s, number, task))
                ranked[task] = None
        for task, node in enumerate(graph.nodes):
            if task not in ranked:
                listed[node].append((self.start_s[task], len(graph), task))
        orders = [tuple(self._instruction(task) for _, _, task in sorted(of_node)) for of_node in listed]
        return Schedule(
            stages=stages,
            flows=tuple(graph.flows.values()),
            orders=tuple(orders),
            rules=rules,
            samples=samples,
            tokens=tokens,
        )

    def _instruction(self, task: int) -> Instruction:
        given = self.graph.instructions[task]
        return Instruction(
            key=given.key,
            peer=given.peer,
            after=given.after,
            start_s=self.start_s[task],
            end_s=self.end_s[task],
            memory_start=given.memory_start,
            memory_end=given.memory_end,
            attempt=given.attempt,
            skippable=given.skippable,
            stealable=given.stealable,
        )


#: How a node picks what to start: `protocol.schedule.policies.choose`, or a function of your own like it.
Chooser = Callable[..., tuple[Ready | None, State]]


def simulate(schedule: Schedule, costs: Costs, network: Network | None = None, lookahead: int = 1) -> Timeline:
    """Runs a schedule in its order.

    Args:
        lookahead: how many of a node's next operations may be looked at when the first is not ready. 1
            keeps the order; more lets a node start a later one, as the runtime does.

    Raises:
        DeadlockError: when the orders wait for each other.
    """
    return replay(graph_of(schedule, costs, network), lookahead=lookahead)


def replay(graph: TaskGraph, orders: Sequence[Sequence[int]] | None = None, lookahead: int = 1) -> Timeline:
    """Runs a graph by explicit orders, the graph's own unless others are given."""
    chosen = graph.orders if orders is None else orders
    return _Engine(graph).run(_Replay(graph, chosen, max(1, lookahead)))


def plan(
    flows: Sequence[Flow],
    policies: Sequence[Policy],
    split: bool,
    costs: Costs,
    network: Network | None = None,
    extra: Sequence[Sequence[Instruction]] = (),
    chooser: Chooser = choose,
) -> Timeline:
    """Lets every node's policy order the work of the flows.

    Args:
        policies: one per node.
        split: whether backwards are split into I and W.
        extra: per node, further instructions (registered operations) that go with them; one whose key the
            flows already need replaces theirs.
        chooser: a priority of your own, with the signature and purity of `protocol.schedule.policies.choose`.
    """
    listed = unordered(flows, len(policies), split)
    for node, more in enumerate(extra):
        by_key = {instruction.key: instruction for instruction in (*listed[node], *more)}
        listed[node] = list(by_key.values())
    return drive(build_graph(flows, listed, costs, network), policies, chooser)


def drive(graph: TaskGraph, policies: Sequence[Policy], chooser: Chooser = choose) -> Timeline:
    """Runs a graph by policies, one per node.

    The timeline is that of the orders which the policies chose, and so of the schedule made from it. A policy may
    wait in vain (a W for a forward that then finds no room) and start after all what it could have started before;
    a schedule is an order and cannot say so, and the run is repeated in that order without the wait.

    Raises:
        BadInputError: when a policy does not fit its node.
        DeadlockError: when every policy waits.
    """
    engine = _Engine(graph)
    timeline = engine.run(_Driven(graph, policies, chooser))
    return replay(graph, timeline.orders) if engine.waited else timeline


class _Chooser(Protocol):
    def offer(self, task: int) -> None:
        """A task became ready."""

    def next_task(self, node: int, now_s: float) -> int | None:
        """What an idle node starts now."""

    def started(self, task: int, end_s: float) -> None:
        """A task started somewhere; others may foresee what follows."""

    def held_back_by(self, task: int) -> list[int]:
        """Tasks that a ready but refused task waits for, to explain a deadlock."""


class _Engine:
    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self._waits = list(graph.waits)
        self._start_s = [-1.0] * len(graph)
        self._end_s = [-1.0] * len(graph)
        self._orders: list[list[int]] = [[] for _ in graph.orders]
        self._heap: EventHeap[int] = EventHeap()
        self._links = SharedLinks(graph.network) if graph.network.shares else None
        self._sent: dict[int, tuple[int, float]] = {}  # transfer -> task it is for, latency
        self._ended = 0
        self._ready_s = [0.0] * len(graph)
        self._free_s = [0.0] * len(graph.orders)
        self.waited = False  # whether a node stood idle and then started what it could have started before

    def run(self, chooser: _Chooser) -> Timeline:
        """Until nothing is left; an event is a task that ended, or ~task whose operand arrived."""
        graph = self._graph
        idle = [True] * len(graph.orders)
        touched: dict[int, None] = dict.fromkeys(range(len(graph.orders)))
        for task, waits in enumerate(self._waits):
            if waits == 0:
                self._ready(task, 0.0, chooser, touched)
        now_s = 0.0
        while True:
            for node in sorted(touched):
                if idle[node]:
                    task_to_start = chooser.next_task(node, now_s)
                    if task_to_start is not None:
                        idle[node] = False
                        if now_s > self._ready_s[task_to_start] and now_s > self._free_s[node]:
                            self.waited = True
                        self._orders[node].append(task_to_start)
                        self._start(task_to_start, now_s, chooser)
            touched.clear()
            now_s, events = self._next_instant()
            if not events:
                break
            for event in events:
                if event < 0:
                    self._arrive(~event, now_s, chooser, touched)
                    continue
                if not graph.beside[event]:
                    idle[graph.nodes[event]] = True
                    self._free_s[graph.nodes[event]] = now_s
                    touched[graph.nodes[event]] = None
                self._end(event, now_s, chooser, touched)
        if self._ended < len(graph):
            raise DeadlockError(self._explain(chooser))
        return Timeline(graph, self._start_s, self._end_s, self._orders)

    def _next_instant(self) -> tuple[float, list[int]]:
        heap, links = self._heap, self._links
        if links is not None:
            transfer_s = links.next_end_s()
            if transfer_s < math.inf and transfer_s <= heap.next_s():
                for transfer in links.take_ended(transfer_s):
                    task, latency_s = self._sent.pop(transfer)
                    heap.push(transfer_s + latency_s, ~task)
        if not heap:
            return 0.0, []
        if links is not None and links.next_end_s() < heap.next_s():
            return self._next_instant()
        return heap.pop_instant()

    def _start(self, task: int, now_s: float, chooser: _Chooser) -> None:
        end_s = now_s + self._graph.seconds[task]
        self._start_s[task] = now_s
        self._end_s[task] = end_s
        self._heap.push(end_s, task)
        chooser.started(task, end_s)

    def _end(self, task: int, now_s: float, chooser: _Chooser, touched: dict[int, None]) -> None:
        self._ended += 1
        for to, delay_s, size in self._graph.followers[task]:
            if size > 0 and self._links is not None:
                graph = self._graph
                transfer = self._links.start(now_s, graph.nodes[task], graph.nodes[to], size)
                self._sent[transfer] = (to, delay_s)
            elif delay_s > 0:
                self._heap.push(self._end_s[task] + delay_s, ~to)
            else:
                self._arrive(to, now_s, chooser, touched)

    def _arrive(self, task: int, now_s: float, chooser: _Chooser, touched: dict[int, None]) -> None:
        self._waits[task] -= 1
        if self._waits[task] == 0:
            self._ready(task, now_s, chooser, touched)

    def _ready(self, task: int, now_s: float, chooser: _Chooser, touched: dict[int, None]) -> None:
        if self._graph.beside[task]:
            self._start(task, now_s, chooser)
        else:
            self._ready_s[task] = now_s
            chooser.offer(task)
            touched[self._graph.nodes[task]] = None

    def _explain(self, chooser: _Chooser) -> list[Key]:
        """Who waits for whom among what never ran, as a cycle."""
        graph = self._graph
        left = [task for task in range(len(graph)) if self._start_s[task] < 0]
        waits: dict[Key, list[Key]] = {graph.keys[task]: [] for task in left}
        for task, followers in enumerate(graph.followers):
            if self._start_s[task] < 0:
                for edge in followers:
                    waits[graph.keys[edge.to]].append(graph.keys[task])
        for task in left:
            for other in chooser.held_back_by(task):
                if self._start_s[other] < 0 and other != task:
                    waits[graph.keys[task]].append(graph.keys[other])
        return find_cycle(waits) or [graph.keys[left[0]]]


class _Replay:
    """Starts each node's tasks in the given order, looking ahead a little."""

    def __init__(self, graph: TaskGraph, orders: Sequence[Sequence[int]], lookahead: int) -> None:
        self._graph = graph
        self._orders = orders
        self._lookahead = lookahead
        self._at = [0] * len(orders)
        self._is_ready = [False] * len(graph)
        self._is_started = [False] * len(graph)

    def offer(self, task: int) -> None:
        self._is_ready[task] = True

    def next_task(self, node: int, now_s: float) -> int | None:
        order, at = self._orders[node], self._at[node]
        while at < len(order) and self._is_started[order[at]]:
            at += 1
        self._at[node] = at
        seen = 0
        for index in range(at, len(order)):
            if seen == self._lookahead:
                break
            task = order[index]
            if not self._is_started[task]:
                if self._is_ready[task]:
                    self._is_started[task] = True
                    return task
                seen += 1
        return None

    def started(self, task: int, end_s: float) -> None:
        pass

    def held_back_by(self, task: int) -> list[int]:
        node = self._graph.nodes[task]
        return list(self._orders[node][self._at[node] : self._at[node] + 1])


#: Queues per stage of a node: forwards that go on with a microbatch, and one per kind for what else is ready.
_QUEUES = 1 + len(Kind)


class _Driven:
    """Asks each node's policy, showing it the first of each queue."""

    def __init__(self, graph: TaskGraph, policies: Sequence[Policy], chooser: Chooser) -> None:
        if len(policies) != len(graph.orders):
            raise BadInputError(f"policies: {len(policies)} for {len(graph.orders)} nodes")
        self._graph = graph
        self._policies = policies
        self._choose = chooser
        self._foresees = [policy.weights is not Weights.GAP for policy in policies]
        self._anyone_foresees = any(self._foresees)
        self._task_of: dict[Key, int] = {}
        self._queues: list[list[list[Ready]]] = []
        self._states: list[State] = []
        self._begun: dict[tuple[int, int], None] = {}
        """(microbatch, position) of forwards that were started."""
        self._ready: list[Ready | None] = [None] * len(graph)
        self._pending = list(graph.waits)
        self._arrivals: list[tuple[list[float], list[float]]] = [([], []) for _ in graph.orders]
        for node, order in enumerate(graph.orders):
            self._add_node(node, order)

    def _add_node(self, node: int, order: Sequence[int]) -> None:
        graph = self._graph
        stages = sorted(dict.fromkeys(graph.stages[task] for task in order if graph.keys[task].op is Op.F))
        chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
        totals = ([0] * len(stages), [0] * len(stages))
        segments = [1] * len(stages)
        split = False
        for task in order:
            key = graph.keys[task]
            chunk = chunk_of.get(graph.stages[task], 0)
            flow = graph.flows[key.microbatch]
            item = ready(key, flow, chunk, graph.seconds[task])
            self._ready[task] = item
            self._task_of[key] = task
            if item.kind <= Kind.BACKWARD:
                totals[item.kind][chunk] += 1
            if item.kind == Kind.FORWARD:
                segments[chunk] = max(segments[chunk], item.to_come + 1)
            split = split or key.op is Op.W
        self._queues.append([[] for _ in range(_QUEUES * max(1, len(stages)))])
        policy = self._policies[node]
        self._states.append(start(policy, totals[0], totals[1], split))
        for cap, needed in zip(policy.alive_max, segments, strict=False):
            if cap < needed:
                raise BadInputError(
                    f"policies[{node}]: alive_max {list(policy.alive_max)}: a cap of {cap} lets no microbatch of"
                    f" {needed} segments go back; all of them are alive before its first backward"
                )

    def offer(self, task: int) -> None:
        item = self._ready[task]
        assert item is not None, "only tasks of a node's own order are offered"
        insort(self._queue(self._graph.nodes[task], item), item)

    def next_task(self, node: int, now_s: float) -> int | None:
        queues = self._queues[node]
        heads = [queue[0] for queue in queues if queue]
        if not heads:
            return None
        if self._foresees[node]:
            gaps = [self._gap_s(arrivals, now_s) for arrivals in self._arrivals[node]]
            chosen, state = self._choose(self._policies[node], self._states[node], heads, gaps[0], gaps[1])
        else:
            chosen, state = self._choose(self._policies[node], self._states[node], heads)
        if chosen is None:
            return None
        self._states[node] = state
        if chosen.kind == Kind.FORWARD:
            self._begun[chosen.key.microbatch, chosen.key.position] = None
        del self._queue(node, chosen)[0]
        return self._task_of[chosen.key]

    def started(self, task: int, end_s: float) -> None:
        """Notes when followers become ready, where a policy wants to know how long its gap is."""
        if not self._anyone_foresees:
            return
        for edge in self._graph.followers[task]:
            self._pending[edge.to] -= 1
            item = self._ready[edge.to]
            if self._pending[edge.to] == 0 and item is not None and item.kind <= Kind.BACKWARD:
                insort(self._arrivals[self._graph.nodes[edge.to]][item.kind], end_s + edge.delay_s)

    @staticmethod
    def _gap_s(arrivals: list[float], now_s: float) -> float:
        while arrivals and arrivals[0] <= now_s:
            del arrivals[0]
        return arrivals[0] - now_s if arrivals else math.inf

    def _queue(self, node: int, item: Ready) -> list[Ready]:
        return self._queues[node][_QUEUES * item.chunk + (0 if item.goes_on else 1 + item.kind)]

    def held_back_by(self, task: int) -> list[int]:
        """A refused operation waits for whatever else its node still has to do: a forward for who has its place, that
        is, for what goes back of microbatches that have begun there."""
        item = self._ready[task]
        if item is None or item not in self._queue(self._graph.nodes[task], item):
            return []
        of_node = [self._ready[other] for other in self._graph.orders[self._graph.nodes[task]]]
        others = [other for other in of_node if other is not None and other.kind != item.kind]
        begun = [other for other in others if (other.key.microbatch, other.key.position) in self._begun]
        return [self._task_of[other.key] for other in begun or others]
