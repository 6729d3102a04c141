"""A pipeline schedule in a few lines: FlexPipe's language as a builder over the order policies.

    Design.of(nodes=4, microbatches=8).place("circular", chunks=2).order("interleaved", wait_turn=True)

A `Design` is a value; every method gives a new one. `timeline` simulates it, `schedule` lowers it to
explicit orders,
which is all that ever leaves the coordinator: functions given to `choose_with` or `rule` stay here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from coordinator.planning.simulator.graph import Costs
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pipeline import Chooser, Timeline, plan
from protocol.base.errors import BadInputError
from protocol.schedule.ir import Flow, Hop, Instruction, Key, Op, Schedule
from protocol.schedule.policies import First, Policy, Ready, State, Traversal, Weights, choose

Route = tuple[Hop, ...]
PLACEMENTS = ("one-to-one", "circular", "V-shape", "bidirectional")


def routes_of(placement: str, nodes: int, chunks: int = 2) -> tuple[Route, ...]:
    """The routes that microbatches take in turn, for FlexPipe's four placements.

    `circular` gives every node `chunks` stages, `V-shape` goes down the nodes and up again, `bidirectional`
    sends every other microbatch up through copies of the same stages (Chimera).
    """
    down = tuple(Hop(stage, stage) for stage in range(nodes))
    if placement == "one-to-one":
        return (down,)
    if placement == "circular":
        return (tuple(Hop(stage, stage % nodes) for stage in range(nodes * chunks)),)
    if placement == "V-shape":
        return (tuple(Hop(stage, min(stage, 2 * nodes - 1 - stage)) for stage in range(2 * nodes)),)
    if placement == "bidirectional":
        return (down, tuple(Hop(stage, nodes - 1 - stage) for stage in range(nodes)))
    raise BadInputError(f"placement: {placement!r} is not one of {', '.join(PLACEMENTS)}")


@dataclass(frozen=True)
class Design:
    """A schedule to be: flows, and a policy per node.

    Attributes:
        flows: every microbatch's route and cut.
        policies: one per node.
        split: whether backwards are split into I and W.
        extra: per node, registered operations, and flow operations with more to wait for.
        chooser: the priority function.
        chunks: the stages that share a node's work, so that a picture can scale times per node.
    """

    flows: tuple[Flow, ...]
    policies: tuple[Policy, ...]
    split: bool = False
    extra: tuple[tuple[Instruction, ...], ...] = ()
    chooser: Chooser = field(default=choose, compare=False)
    chunks: int = 1

    @classmethod
    def of(cls, nodes: int, microbatches: int) -> Design:
        """A line of `nodes` stages, one per node, backward first, without limits."""
        for key, value in (("stages", nodes), ("microbatches", microbatches)):
            if value < 1:
                raise BadInputError(f"{key}: {value} is not at least 1")
        flows = tuple(Flow(microbatch=m, route=routes_of("one-to-one", nodes)[0]) for m in range(microbatches))
        return cls(flows, (Policy(),) * nodes)

    @property
    def nodes(self) -> int:
        """How many nodes work."""
        return len(self.policies)

    @property
    def stages(self) -> int:
        """How many stages the routes name."""
        return 1 + max(hop.stage for flow in self.flows for hop in flow.route)

    def place(self, placement: str | Sequence[Route], chunks: int = 2) -> Design:
        """Puts stages on nodes: one of `PLACEMENTS`, or routes of your own, taken by microbatches in turn."""
        routes = routes_of(placement, self.nodes, chunks) if isinstance(placement, str) else tuple(placement)
        flows = tuple(
            Flow(microbatch=f.microbatch, route=routes[number % len(routes)], segment_tokens=f.segment_tokens)
            for number, f in enumerate(self.flows)
        )
        held = max(len({hop.stage for route in routes for hop in route if hop.node == n}) for n in range(self.nodes))
        return replace(self, flows=flows, chunks=held if len(routes) == 1 else 1)

    def add(self, other: Design) -> Design:
        """Another modality beside this one: its nodes, stages and microbatches are numbered after these."""
        nodes, stages, microbatches = self.nodes, self.stages, len(self.flows)

        def shifted(flow: Flow) -> Flow:
            return Flow(
                microbatch=flow.microbatch + microbatches,
                route=tuple(Hop(hop.stage + stages, hop.node + nodes) for hop in flow.route),
                segment_tokens=flow.segment_tokens,
                slice_samples=flow.slice_samples,
            )

        return replace(
            self,
            flows=self.flows + tuple(map(shifted, other.flows)),
            policies=self.policies + other.policies,
            split=self.split or other.split,
        )

    def cut(self, segments: int | Sequence[int]) -> Design:
        """Cuts every microbatch into segments: equal ones, or of the given tokens."""
        tokens = (1,) * segments if isinstance(segments, int) else tuple(segments)
        if not tokens or min(tokens) < 1:
            raise BadInputError(f"segments: {segments} leaves an empty segment")
        flows = tuple(Flow(microbatch=f.microbatch, route=f.route, segment_tokens=tokens) for f in self.flows)
        return replace(self, flows=flows)

    def slice_first(self, count: int) -> Design:
        """Halves the first `count` microbatches (AutoPipe's slicer): forwards in halves, backwards whole."""
        flows = tuple(
            Flow(microbatch=f.microbatch, route=f.route, slice_samples=(1, 1) if number < count else (2,))
            for number, f in enumerate(self.flows)
        )
        return replace(self, flows=flows)

    def split_backward(self, weights: Weights = Weights.GAP, free_first: bool = False) -> Design:
        """Splits backwards into I and W (gradient separation); W runs in gaps, or when memory is full."""
        policies = tuple(_with(policy, weights=weights, free_first=free_first) for policy in self.policies)
        return replace(self, split=True, policies=policies)

    def order(
        self,
        first: str,
        forward_unit: int = 1,
        backward_unit: int = 1,
        wait_turn: bool = False,
        nodes: Sequence[int] | None = None,
    ) -> Design:
        """Computation-type priority: `backward`, `forward` or `interleaved`, for some nodes or all."""
        if first not in tuple(First):
            raise BadInputError(f"order: {first!r} is not one of {', '.join(First)}")
        return self._change(
            nodes,
            lambda _: {
                "first": First(first),
                "forward_unit": forward_unit,
                "backward_unit": backward_unit,
                "wait_turn": wait_turn,
            },
        )

    def traverse(
        self,
        forward: str = "breadth",
        backward: str = "depth",
        forward_interval: int = 0,
        backward_interval: int = 0,
        nodes: Sequence[int] | None = None,
    ) -> Design:
        """Stage traversal among a node's stages: `breadth` or `depth`, with or without waiting in turns."""
        for key, value in (("forward", forward), ("backward", backward)):
            if value not in ("breadth", "depth"):
                raise BadInputError(f"traverse: {key}: {value!r} is neither breadth nor depth")
        change: dict[str, object] = {
            "forward": Traversal(deepest_first=forward == "depth", interval=forward_interval),
            "backward": Traversal(deepest_first=backward == "depth", interval=backward_interval),
        }
        return self._change(nodes, lambda _: change)

    def in_flight(self, limit: Callable[[int], int | tuple[int, ...]], nodes: Sequence[int] | None = None) -> Design:
        """How many segments may be alive on node d: one number for each of its stages, or one per stage.

        A simulation refuses fewer than a microbatch has.
        """

        def change(node: int) -> dict[str, object]:
            cap = limit(node)
            held = len({hop.stage for flow in self.flows for hop in flow.route if hop.node == node})
            return {"alive_max": cap if isinstance(cap, tuple) else (cap,) * held}

        return self._change(nodes, change)

    def in_flight_total(self, limit: Callable[[int], int]) -> Design:
        """How many segments may be alive on node d, all its stages together."""
        return self._change(None, lambda node: {"alive_total_max": limit(node)})

    def warm_up(self, forwards: Callable[[int], int]) -> Design:
        """How many forwards node d runs before its steady state; the first backward comes one forward
        later."""
        return self._change(None, lambda node: {"warmup": max(0, forwards(node))})

    def rule(self, allowed: Callable[[State, Ready], bool]) -> Design:
        """A rule of your own: operations that it refuses are not candidates (yet)."""
        inner = self.chooser

        def ruled(
            policy: Policy,
            state: State,
            candidates: Sequence[Ready],
            forward_gap_s: float = math.inf,
            backward_gap_s: float = math.inf,
        ) -> tuple[Ready | None, State]:
            kept = [candidate for candidate in candidates if allowed(state, candidate)]
            return inner(policy, state, kept, forward_gap_s, backward_gap_s)

        return replace(self, chooser=ruled)

    def choose_with(self, chooser: Chooser) -> Design:
        """A priority of your own instead of the built-in ones."""
        return replace(self, chooser=chooser)

    def register(
        self,
        name: str,
        at: Sequence[Key],
        after: Callable[[Key], Sequence[Key]],
        before: Callable[[Key], Sequence[Key]],
    ) -> Design:
        """A new instruction with its dependencies.

        Args:
            name: lower-case letters and underscores; its time is `Costs.custom_s[name]`.
            at: one forward per new instruction; it stands on that forward's node and takes its numbers.
            after, before: for such a forward, which operations the new instruction waits for, and which
                wait for it.
        """
        flows = {flow.microbatch: flow for flow in self.flows}
        extra: list[dict[Key, Instruction]] = [
            {instruction.key: instruction for instruction in (self.extra[node] if self.extra else ())}
            for node in range(self.nodes)
        ]
        for place in at:
            key = place._replace(op=Op.CUSTOM, name=name)
            node = flows[place.microbatch].node_at(place.position)
            assert node is not None, f"{place} is on no route"
            extra[node][key] = Instruction(key=key, after=tuple(after(place)))
            for later in before(place):
                node = flows[later.microbatch].node_at(later.position)
                assert node is not None, f"{later} is on no route"
                known = extra[node].get(later, Instruction(key=later))
                extra[node][later] = Instruction(key=later, after=(*known.after, key))
        return replace(self, extra=tuple(tuple(of_node.values()) for of_node in extra))

    def timeline(self, costs: Costs | None = None, network: Network | None = None) -> Timeline:
        """Simulates the design; without costs, a node's share of a microbatch takes F=1 and B=2."""
        costs = costs or Costs.equal(self.stages, 1.0, 1.0, 1.0, self.chunks)
        return plan(self.flows, self.policies, self.split, costs, network, self.extra, self.chooser)

    def schedule(self, costs: Costs | None = None, network: Network | None = None) -> Schedule:
        """The explicit orders, with planned times."""
        first = self.flows[0]
        return self.timeline(costs, network).schedule(
            self.stages,
            samples=sum(sum(flow.slice_samples) for flow in self.flows),
            tokens=sum(first.segment_tokens),
        )

    def _change(self, nodes: Sequence[int] | None, change: Callable[[int], dict[str, object]]) -> Design:
        chosen = range(self.nodes) if nodes is None else nodes
        policies = list(self.policies)
        for node in chosen:
            policies[node] = _with(policies[node], **change(node))
        return replace(self, policies=tuple(policies))


def _with(policy: Policy, **changes: object) -> Policy:
    values = {name: getattr(policy, name) for name in policy.__struct_fields__}
    return Policy(**{**values, **changes})
