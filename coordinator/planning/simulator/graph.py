"""A schedule with its costs as a graph of numbered tasks: what the simulator runs and the searches
rearrange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.planning.simulator.links import Network
from protocol.base.errors import BadInputError
from protocol.schedule.ir import EVERY, Flow, Instruction, Key, Op, Schedule, dependencies, operations_of

#: Tasks that take no node's time: transfers overlap compute, servers reduce and step beside the node.
_BESIDE = (Op.SEND, Op.RECV, Op.LOAD, Op.REDUCE, Op.OPT)


@dataclass(frozen=True)
class StageCosts:
    """What one whole microbatch costs on one stage.

    Attributes:
        forward_s, backward_input_s, backward_weight_s, recompute_s, loss_s: seconds on a node of slowness
            1; a fused B takes input and weight together.
        reduce_s, optimizer_s: seconds of REDUCE and OPT, which the stage's servers do beside the nodes.
        activation_bytes, gradient_bytes: sent to the next stage, and back to the one before.
        activation: what one microbatch holds in memory from its F to the end of its backward, in any unit.
    """

    forward_s: float = 1.0
    backward_input_s: float = 1.0
    backward_weight_s: float = 1.0
    recompute_s: float = 0.0
    loss_s: float = 0.0
    reduce_s: float = 0.0
    optimizer_s: float = 0.0
    activation_bytes: float = 0.0
    gradient_bytes: float = 0.0
    activation: float = 1.0


@dataclass(frozen=True)
class Costs:
    """Costs per stage and what changes them per node and segment.

    Attributes:
        node_slowness: per node, a factor on every time; None for equal nodes.
        segment_shares: per segment, its share of a microbatch's time; None to take its share of the tokens.
        custom_s: per registered operation's name, its seconds.
    """

    stages: Sequence[StageCosts]
    node_slowness: Sequence[float] | None = None
    segment_shares: Sequence[float] | None = None
    custom_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def equal(cls, stages: int, forward_s: float, input_s: float, weight_s: float, chunks: int = 1) -> Costs:
        """Equal stages; the times and the activation of a node's whole share, cut into `chunks` stages
        each."""
        stage = StageCosts(forward_s / chunks, input_s / chunks, weight_s / chunks, activation=1 / chunks)
        return cls([stage] * stages)

    def share(self, key: Key, flow: Flow) -> float:
        """The share of its microbatch's time that an operation takes."""
        if self.segment_shares is not None and len(flow.segment_tokens) > 1:
            share = self.segment_shares[key.segment]
        else:
            share = flow.segment_tokens[key.segment] / sum(flow.segment_tokens)
        if key.op is Op.F:
            share *= flow.slice_samples[key.slice] / sum(flow.slice_samples)
        return share

    def seconds(self, key: Key, stage: int, node: int, flow: Flow | None) -> float:
        """How long an operation takes on a node."""
        if key.op is Op.CUSTOM:
            return self.custom_s.get(key.name, 0.0)
        costs = self.stages[stage]
        match key.op:
            case Op.F:
                whole = costs.forward_s
            case Op.B:
                whole = costs.backward_input_s + costs.backward_weight_s
            case Op.I:
                whole = costs.backward_input_s
            case Op.W:
                whole = costs.backward_weight_s
            case Op.R:
                whole = costs.recompute_s
            case Op.L:
                whole = costs.loss_s
            case Op.REDUCE:
                return costs.reduce_s
            case Op.OPT:
                return costs.optimizer_s
            case _:
                return 0.0
        slowness = 1.0 if self.node_slowness is None else self.node_slowness[node]
        return whole * slowness * (1.0 if flow is None else self.share(key, flow))


class Edge(NamedTuple):
    """What the end of a task means for another: it may start `delay_s` later, after `size` bytes were
    sent."""

    to: int
    delay_s: float
    size: float


@dataclass
class TaskGraph:
    """Tasks by number, in the order in which the schedule lists them.

    Attributes:
        keys, nodes, seconds: of each task.
        stages: the stage each task works for, -1 for a registered operation off every route.
        beside: whether the task takes none of its node's time.
        followers: per task, whom it lets go on.
        waits: per task, how many edges lead to it.
        memory_start, memory_end: what the node's memory grows by, per task.
        orders: per node, its tasks (those beside it left out) in the schedule's order.
    """

    network: Network
    flows: dict[int, Flow]
    keys: list[Key]
    nodes: list[int]
    stages: list[int]
    seconds: list[float]
    beside: list[bool]
    followers: list[list[Edge]]
    waits: list[int]
    memory_start: list[float]
    memory_end: list[float]
    orders: list[list[int]]
    instructions: list[Instruction]

    def __len__(self) -> int:
        return len(self.keys)


def unordered(flows: Iterable[Flow], nodes: int, split: bool, recompute: bool = False) -> list[list[Instruction]]:
    """Per node, every compute operation the flows need, for a policy to put in order."""
    listed: list[list[Instruction]] = [[] for _ in range(nodes)]
    for flow in flows:
        for key in operations_of(flow, split, recompute):
            node = flow.node_at(key.position)
            assert node is not None, f"{key} has no node"
            listed[node].append(Instruction(key=key))
    return listed


def build_graph(
    flows: Sequence[Flow],
    listed: Sequence[Sequence[Instruction]],
    costs: Costs,
    network: Network | None = None,
) -> TaskGraph:
    """The task graph of instructions listed per node.

    Raises:
        BadInputError: when an operation waits for one that is not listed.
    """
    network = network or Network()
    by_microbatch = {flow.microbatch: flow for flow in flows}
    instructions = [instruction for order in listed for instruction in order]
    nodes = [node for node, order in enumerate(listed) for _ in order]
    keys = [instruction.key for instruction in instructions]
    index = {key: number for number, key in enumerate(keys)}
    stages = [_stage(key, by_microbatch) for key in keys]
    graph = TaskGraph(
        network=network,
        flows=by_microbatch,
        keys=keys,
        nodes=nodes,
        stages=stages,
        seconds=_seconds(costs, keys, stages, nodes, by_microbatch),
        beside=[key.op in _BESIDE for key in keys],
        followers=[[] for _ in keys],
        waits=[0] * len(keys),
        memory_start=[float(instruction.memory_start) for instruction in instructions],
        memory_end=[float(instruction.memory_end) for instruction in instructions],
        orders=[],
        instructions=instructions,
    )
    number = 0
    for order in listed:
        graph.orders.append([i for i in range(number, number + len(order)) if not graph.beside[i]])
        number += len(order)
    for key, before in dependencies(instructions, flows).items():
        _connect(graph, costs, index, key, before)
    if not any(graph.memory_start) and not any(graph.memory_end):
        _default_memory(graph, costs)
    return graph


def graph_of(schedule: Schedule, costs: Costs, network: Network | None = None) -> TaskGraph:
    """The task graph of a schedule."""
    return build_graph(schedule.flows, schedule.orders, costs, network)


def _stage(key: Key, flows: dict[int, Flow]) -> int:
    if key.microbatch == EVERY:
        return key.position
    flow = flows.get(key.microbatch)
    if flow is None:
        return -1
    return flow.route[min(key.position, len(flow.route) - 1) if key.op is not Op.L else 0].stage


def _seconds(costs: Costs, keys: list[Key], stages: list[int], nodes: list[int], flows: dict[int, Flow]) -> list[float]:
    """Times of all tasks; the same (op, stage, node, segment, slice, cut) is worked out once."""
    known: dict[tuple[object, ...], float] = {}
    seconds = []
    for key, stage, node in zip(keys, stages, nodes, strict=True):
        flow = flows.get(key.microbatch)
        cut = None if flow is None else (flow.segment_tokens, flow.slice_samples)
        kind = (key.op, key.name, stage, node, key.segment, key.slice, cut)
        if kind not in known:
            known[kind] = costs.seconds(key, stage, node, flow)
        seconds.append(known[kind])
    return seconds


def _connect(graph: TaskGraph, costs: Costs, index: dict[Key, int], key: Key, before: tuple[Key, ...]) -> None:
    task = index[key]
    node = graph.nodes[task]
    wait_s = 0.0
    for other in before:
        if other not in index:
            raise BadInputError(f"schedule: {key} waits for {other}, which is not in the schedule")
        source = index[other]
        origin = graph.nodes[source]
        if origin == node:
            graph.followers[source].append(Edge(task, 0.0, 0.0))
            continue
        size = _sent(graph, costs, source)
        if graph.network.blocking:
            wait_s = max(wait_s, graph.network.alone_s(origin, node, size))
            graph.followers[source].append(Edge(task, 0.0, 0.0))
        elif graph.network.shares:
            graph.followers[source].append(Edge(task, graph.network.latency(origin, node), size))
        else:
            graph.followers[source].append(Edge(task, graph.network.latency(origin, node), 0.0))
    graph.seconds[task] += wait_s
    graph.waits[task] = len(before)


def _sent(graph: TaskGraph, costs: Costs, source: int) -> float:
    """Bytes that leave a node after a task, for the next one of its microbatch."""
    key = graph.keys[source]
    flow = graph.flows.get(key.microbatch)
    if flow is None or graph.stages[source] < 0:
        return 0.0
    stage = costs.stages[graph.stages[source]]
    tokens = flow.segment_tokens[key.segment] / sum(flow.segment_tokens)
    if key.op is Op.F or key.name == "act":
        return stage.activation_bytes * tokens * flow.slice_samples[key.slice] / sum(flow.slice_samples)
    if key.op is Op.L:
        return costs.stages[flow.route[-1].stage].activation_bytes * tokens
    return stage.gradient_bytes * tokens


def _default_memory(graph: TaskGraph, costs: Costs) -> None:
    """An F takes its share of the stage's activation; the B, or the W of a split backward, gives it back."""
    split = {(k.microbatch, k.position, k.segment) for k in graph.keys if k.op is Op.W}
    for task, key in enumerate(graph.keys):
        flow = graph.flows.get(key.microbatch)
        if flow is None or key.op not in (Op.F, Op.B, Op.W):
            continue
        held = costs.stages[graph.stages[task]].activation
        held *= flow.segment_tokens[key.segment] / sum(flow.segment_tokens)
        if key.op is Op.F:
            graph.memory_start[task] = held * flow.slice_samples[key.slice] / sum(flow.slice_samples)
        elif key.op is Op.W or (key.microbatch, key.position, key.segment) not in split:
            graph.memory_end[task] = -held
