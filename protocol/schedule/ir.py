"""The schedule IR: per node, the order in which operations may start, and the routes that give them meaning.

One object serves all five papers (a microbatch may skip and swap stages, be cut into segments of tokens and
slices of samples, and have its backward split), so that one validator (`protocol.schedule.check`), one text
form (`protocol.schedule.text`) and one simulator judge every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec

#: The microbatch of an operation that serves a whole stage (REDUCE, OPT).
EVERY = -1


class Op(StrEnum):
    """What a node can be told to do. I and W are the two halves of B (input gradient, weight gradient)."""

    LOAD = "LOAD"
    F = "F"
    L = "L"
    B = "B"
    I = "I"  # noqa: E741 - the papers' own letter
    W = "W"
    R = "R"
    SEND = "SEND"
    RECV = "RECV"
    REDUCE = "REDUCE"
    OPT = "OPT"
    CUSTOM = "CUSTOM"


#: What SEND and RECV may carry: an activation, an output gradient, keys and values of a segment, parameters.
TENSORS = ("act", "grad", "kv", "param")


class Key(NamedTuple):
    """The name of an operation within a step; stable when the operation is issued again.

    Attributes:
        microbatch: its number, or `EVERY`.
        position: index in the microbatch's route; `len(route)` for L; the **stage** for REDUCE and OPT.
        segment: index of the token range, 0 when the microbatch is not cut.
        slice: index of the sample range of an F; 0 for every other op, whose microbatch is whole. For
            REDUCE and OPT, which of the stage's nodes (in ascending order) it is.
        name: the tensor of a SEND or RECV, the registered name of a CUSTOM op.
    """

    op: Op
    microbatch: int
    position: int
    segment: int = 0
    slice: int = 0
    name: str = ""

    def __str__(self) -> str:
        text = f"{self.position}{self.op.value}"
        if self.name:
            text += f"_{self.name}"
        if self.microbatch != EVERY:
            text += str(self.microbatch)
        if self.segment:
            text += f".{self.segment}"
        if self.slice:
            text += f"/{self.slice}"
        return text


class Instruction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a node's order.

    Attributes:
        peer: the node at the other end of a SEND or RECV, else -1.
        after: operations that must end first, beyond what the key implies (registered ops use it).
        start_s, end_s: planned times, when a simulation or a search gave them.
        memory_start, memory_end: what the node's memory grows by at the start and at the end, in bytes or any
            unit that the schedule uses throughout; negative when it shrinks.
        attempt: how often the operation was issued before, after its first node left.
        skippable: may be left out when its microbatch is dropped from the step.
        stealable: another node of the stage may run it.
    """

    key: Key
    peer: int = -1
    after: tuple[Key, ...] = ()
    start_s: float | None = None
    end_s: float | None = None
    memory_start: int = 0
    memory_end: int = 0
    attempt: int = 0
    skippable: bool = False
    stealable: bool = False


class Hop(NamedTuple):
    """One position of a route: which stage, on which node."""

    stage: int
    node: int


class Flow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The way of one microbatch, and how it is cut.

    Attributes:
        route: one hop per position, in forward order.
        segment_tokens: tokens of each segment; one entry when not cut.
        slice_samples: samples of each slice; one entry when not cut.
        wave: which wave it belongs to; routes are counted per wave.
        loss_node: the node of the operation L at position `len(route)`, or None when the loss is part of
            the last forward.
    """

    microbatch: int
    route: tuple[Hop, ...]
    segment_tokens: tuple[int, ...] = (1,)
    slice_samples: tuple[int, ...] = (1,)
    wave: int = 0
    loss_node: int | None = None

    def node_at(self, position: int) -> int | None:
        """The node that holds `position`, L's included; None when the route has no such position."""
        if 0 <= position < len(self.route):
            return self.route[position].node
        return self.loss_node if position == len(self.route) else None


class RouteRules(msgspec.Struct, frozen=True, kw_only=True):
    """SkipPipe's rules for routes: stage 0 first, few swaps, equal visits, memory (CC1-CC3 and TC1).

    Attributes:
        swaps_max: exchanges of two neighbours in a route whose stage numbers differ by one.
        visits_per_stage: routes of a wave on every stage but 0, or None when stages are not visited equally.
        routes_per_node_max: routes of a wave on one node, or None.
    """

    swaps_max: int = 0
    visits_per_stage: int | None = None
    routes_per_node_max: int | None = None


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who does what in which order, for one step.

    Attributes:
        stages: how many there are; hops and REDUCE name them by number.
        orders: per node, its instructions in the order in which they may start.
        samples, tokens: of the whole batch and of one sample, in the units that the flows use, so that
            every part of the loss is weighed once; None when the flows do not say.
        memory_max: per node, the most that instructions' memory may add up to; None for no limit.
        rules: what routes must obey, when they may skip.
    """

    stages: int
    flows: tuple[Flow, ...]
    orders: tuple[tuple[Instruction, ...], ...]
    samples: int | None = None
    tokens: int | None = None
    memory_max: tuple[int, ...] | None = None
    rules: RouteRules | None = None

    @property
    def nodes(self) -> int:
        """How many nodes have an order (it may be empty)."""
        return len(self.orders)

    def instructions(self) -> Iterator[tuple[int, Instruction]]:
        """Every instruction with its node, node by node."""
        for node, order in enumerate(self.orders):
            for instruction in order:
                yield node, instruction


def operations_of(flow: Flow, split: bool, recompute: bool = False) -> Iterator[Key]:
    """Every compute operation that one microbatch needs, in an order that respects its data."""
    microbatch, last = flow.microbatch, len(flow.route)
    segments, slices = range(len(flow.segment_tokens)), range(len(flow.slice_samples))
    for segment in segments:
        for position in range(last):
            for part in slices:
                yield Key(Op.F, microbatch, position, segment, part)
        if flow.loss_node is not None:
            yield Key(Op.L, microbatch, last, segment)
    for segment in reversed(segments):
        for position in reversed(range(last)):
            if recompute:
                yield Key(Op.R, microbatch, position, segment)
            yield Key(Op.I if split else Op.B, microbatch, position, segment)
            if split:
                yield Key(Op.W, microbatch, position, segment)


def node_of(key: Key, flows: dict[int, Flow], stage_nodes: dict[int, tuple[int, ...]]) -> int | None:
    """The node that the plan's flows name for an operation, or None when they name none.

    Args:
        flows: by microbatch.
        stage_nodes: per stage, the nodes that hold it (`nodes_by_stage`).
    """
    if key.microbatch == EVERY:
        holders = stage_nodes.get(key.position, ())
        return holders[key.slice] if key.slice < len(holders) else None
    flow = flows.get(key.microbatch)
    return None if flow is None else flow.node_at(key.position)


def nodes_by_stage(flows: Iterable[Flow]) -> dict[int, tuple[int, ...]]:
    """Per stage, the nodes on which some route visits it, ascending."""
    found: dict[int, dict[int, None]] = {}
    for flow in flows:
        for hop in flow.route:
            found.setdefault(hop.stage, {})[hop.node] = None
    return {stage: tuple(sorted(nodes)) for stage, nodes in sorted(found.items())}


def paired(key: Key) -> Key:
    """The RECV that takes what a SEND sends, or the SEND that a RECV waits for.

    An activation goes one position on, a gradient one position back; keys, values and parameters move between
    nodes at the same position.
    """
    step = {"act": 1, "grad": -1}.get(key.name, 0)
    if key.op is Op.SEND:
        return key._replace(op=Op.RECV, position=key.position + step)
    return key._replace(op=Op.SEND, position=key.position - step)


def dependencies(instructions: Iterable[Instruction], flows: Iterable[Flow]) -> dict[Key, tuple[Key, ...]]:
    """What every operation waits for, by its data alone (a node's order comes on top).

    Operations that the keys imply but that are nowhere in `instructions` are named all the same, so that a
    validator can say what is missing. RECV, R and LOAD are waited for only when they exist: a compute-only
    plan is complete.

    Returns:
        Per key, the keys that must end before it starts.
    """
    by_key = {instruction.key: instruction for instruction in instructions}
    by_microbatch = {flow.microbatch: flow for flow in flows}
    closing: dict[int, list[Key]] = {}  # per stage, what REDUCE waits for
    reduces: dict[int, list[Key]] = {}
    for key in by_key:
        if key.op is Op.REDUCE:
            reduces.setdefault(key.position, []).append(key)
        elif key.op in (Op.B, Op.W):
            flow = by_microbatch.get(key.microbatch)
            if flow is not None and 0 <= key.position < len(flow.route):
                closing.setdefault(flow.route[key.position].stage, []).append(key)
    stage_nodes = nodes_by_stage(by_microbatch.values()) if reduces else {}
    return {
        key: (
            *(
                _needs_of_stage(key, closing, reduces, stage_nodes, by_microbatch)
                if key.microbatch == EVERY
                else _needs_of_flow(key, by_microbatch[key.microbatch], by_key)
                if key.microbatch in by_microbatch
                else ()
            ),
            *instruction.after,
        )
        for key, instruction in by_key.items()
    }


def _needs_of_stage(
    key: Key,
    closing: dict[int, list[Key]],
    reduces: dict[int, list[Key]],
    stage_nodes: dict[int, tuple[int, ...]],
    flows: dict[int, Flow],
) -> list[Key]:
    if key.op is Op.OPT:
        return reduces.get(key.position) or [Key(Op.REDUCE, EVERY, key.position)]
    if key.op is not Op.REDUCE:
        return []
    holders = stage_nodes.get(key.position, ())
    node = holders[key.slice] if key.slice < len(holders) else None
    return [k for k in closing.get(key.position, ()) if flows[k.microbatch].route[k.position].node == node]


def _needs_of_flow(key: Key, flow: Flow, by_key: dict[Key, Instruction]) -> list[Key]:
    op, microbatch, position, segment, part, name = key
    last = len(flow.route)

    def backward(at: int, of_segment: int) -> Key:
        split = Key(Op.I, microbatch, at, of_segment)
        return split if split in by_key else Key(Op.B, microbatch, at, of_segment)

    def forwards(at: int) -> list[Key]:
        return [Key(Op.F, microbatch, at, segment, s) for s in range(len(flow.slice_samples))]

    def unless_received(tensor: str, plain: list[Key]) -> list[Key]:
        received = [k for k in (Key(Op.RECV, microbatch, position, segment, s, tensor) for s in parts) if k in by_key]
        return received or plain

    parts = [part] if op is Op.F else list(range(len(flow.slice_samples)))
    needs: list[Key] = []
    if op is Op.F:
        if position > 0:
            needs += unless_received("act", [Key(Op.F, microbatch, position - 1, segment, part)])
        elif (load := Key(Op.LOAD, microbatch, 0)) in by_key:
            needs.append(load)
        if segment > 0:
            needs.append(Key(Op.F, microbatch, position, segment - 1, part))
    elif op is Op.L:
        needs += unless_received("act", forwards(position - 1))
    elif op in (Op.B, Op.I):
        needs += forwards(position)
        if (again := Key(Op.R, microbatch, position, segment)) in by_key:
            needs.append(again)
        if position + 1 < last:
            needs += unless_received("grad", [backward(position + 1, segment)])
        elif flow.loss_node is not None:
            needs += unless_received("grad", [Key(Op.L, microbatch, last, segment)])
        if segment + 1 < len(flow.segment_tokens):
            needs.append(backward(position, segment + 1))
    elif op is Op.W:
        needs.append(Key(Op.I, microbatch, position, segment))
    elif op is Op.R:
        needs += forwards(position)
    elif op is Op.RECV:
        needs.append(paired(key))
    elif op is Op.SEND and name in ("act", "kv"):
        needs.append(Key(Op.F, microbatch, position, segment, part))
    elif op is Op.SEND and name == "grad":
        needs.append(Key(Op.L, microbatch, last, segment) if position == last else backward(position, segment))
    return needs
