"""What a run costs and why: time, bubbles, memory, the critical path, and how far a proven bound is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from coordinator.planning.simulator.graph import TaskGraph
from coordinator.planning.simulator.pipeline import Timeline
from protocol.schedule.check import check_bound


@dataclass(frozen=True)
class Report:
    """A timeline in numbers.

    Attributes:
        makespan_s: until the last operation ends.
        span_s: the longest any node is between its first start and its last end; what zero-bubble schedules
            minimise, since an optimizer step without a barrier lets the next step's start move into it.
        bubble_ratio: 1 - busy time / (nodes * makespan).
        busy_s, peaks: per node, time at work and most memory held.
        critical_path: tasks, first to last, each of which starts when the one before lets it.
        master_node: the node with the most time on the critical path, the later one when tied (AutoPipe's
            master stage); shortening its work shortens the run.
        bound_s: no order on these nodes ends earlier.
        fraction: bound / makespan.
    """

    makespan_s: float
    span_s: float
    bubble_ratio: float
    busy_s: list[float]
    peaks: list[float]
    critical_path: list[int]
    master_node: int
    bound_s: float

    @property
    def fraction(self) -> float:
        return self.bound_s / self.makespan_s if self.makespan_s else 1.0


def report(timeline: Timeline, bound_s: float | None = None) -> Report:
    """Judges a timeline; the bound of the graph is used unless a better one is given.

    Raises:
        InvalidScheduleError: (I13) when the time is below the bound: one of the two is wrong.
    """
    graph, makespan_s = timeline.graph, timeline.makespan_s
    bound_s = max(bound_s or 0.0, graph_bound(graph))
    check_bound(makespan_s, bound_s)
    busy_s = [sum(graph.seconds[task] for task in order) for order in timeline.orders]
    spans = [timeline.end_s[order[-1]] - timeline.start_s[order[0]] for order in timeline.orders if order]
    path = critical_path(timeline)
    on_path = [0.0] * len(graph.orders)
    for task in path:
        if not graph.beside[task]:
            on_path[graph.nodes[task]] += graph.seconds[task]
    slots_s = len(busy_s) * makespan_s
    return Report(
        makespan_s=makespan_s,
        span_s=max(spans, default=0.0),
        bubble_ratio=1 - sum(busy_s) / slots_s if slots_s else 0.0,
        busy_s=busy_s,
        peaks=timeline.peaks(),
        critical_path=path,
        master_node=max(range(len(on_path)), key=lambda node: (round(on_path[node], 9), node)),
        bound_s=bound_s,
    )


def critical_path(timeline: Timeline) -> list[int]:
    """From the last task back to one that starts at zero, each step to what was waited for.

    Where two were waited for alike, the one on the later node is taken, so that ties of AutoPipe's master
    stage fall closest to the last stage.
    """
    graph = timeline.graph
    if not len(graph):
        return []
    before: list[list[tuple[int, float]]] = [[] for _ in range(len(graph))]
    for task, edges in enumerate(graph.followers):
        for edge in edges:
            before[edge.to].append((task, edge.delay_s))
    for order in timeline.orders:
        for index in range(1, len(order)):
            before[order[index]].append((order[index - 1], 0.0))
    task = max(range(len(graph)), key=lambda t: (timeline.end_s[t], graph.nodes[t]))
    path = [task]
    while before[task]:
        arrivals = [(timeline.end_s[t] + delay, graph.nodes[t], t) for t, delay in before[task]]
        latest = max(arrival for arrival, _, _ in arrivals)
        tied = [item for item in arrivals if item[0] >= latest * (1 - 1e-9)]
        task = max(tied, key=lambda item: (item[1], item[2]))[2]
        path.append(task)
    return path[::-1]


def graph_bound(graph: TaskGraph) -> float:
    """A makespan that no order of the graph can beat: data alone, and each node's work between head and tail.

    A node cannot start before the earliest of its tasks can, and after its last task the shortest of their
    ways to the end is left. Valid for every plan; a line of equal microbatches has tighter ones
    (`coordinator.planning.order.bounds`).
    """
    count = len(graph)
    waits = list(graph.waits)
    line = deque(task for task in range(count) if waits[task] == 0)
    head = [0.0] * count
    order: list[int] = []
    while line:
        task = line.popleft()
        order.append(task)
        for to, delay_s, _ in graph.followers[task]:
            head[to] = max(head[to], head[task] + graph.seconds[task] + delay_s)
            waits[to] -= 1
            if waits[to] == 0:
                line.append(to)
    tail = [0.0] * count
    for task in reversed(order):
        for to, delay_s, _ in graph.followers[task]:
            tail[task] = max(tail[task], delay_s + graph.seconds[to] + tail[to])
    bound_s = max((head[t] + graph.seconds[t] + tail[t] for t in range(count)), default=0.0)
    for tasks in graph.orders:
        if tasks:
            work_s = sum(graph.seconds[task] for task in tasks)
            bound_s = max(bound_s, min(head[t] for t in tasks) + work_s + min(tail[t] for t in tasks))
    return bound_s
