"""What a run should do by what is measured of it: the production machines on its network, in its plan, for a few steps.

    setting_of(machine, spans) ─▶ Setting ─▶ predict ─▶ Prediction: spans like the measured ones, and their steps

Devices and volunteers' lines are as fast as they were in the spans at hand while anything went on there; where there
are none, devices as their benchmark says and lines as nodes have measured. What is predicted is the pipeline, its waits
and its steps, not what a device takes for one task or a line for one tensor. Nothing of a measured step's duration goes
in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
import numpy as np

from coordinator.live.core import CoordinatorMachine
from coordinator.live.measured_links import Direction
from coordinator.live.plan_builder import Guidance
from coordinator.live.survey import FLOPS_PER_S, MEMORY_BYTES
from coordinator.live.tracing import Traced
from coordinator.planning.placement.run_sizes import vocabulary_of
from coordinator.world.churn import no_churn
from coordinator.world.predicted import predicted
from coordinator.world.swarm import MakeMembers, Swarm
from coordinator.world.traces import busy_s
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.run.course import Course
from protocol.run.model_spec import ModelSpec, blocks_of
from protocol.run.run import RunConfig
from protocol.run.spans import CAPACITY, DTYPE, JOBS, KINDS, RECORD_BYTES, Records, SpanRing
from protocol.schedule.profile import Link, Machine, NetworkFile, build_network
from protocol.world.world import Host

STEPS = 8
"""Simulated: the first ones fill the pipeline, and the later ones repeat themselves."""
STEPS_BEYOND = 4
SHOWN = 5
"""Of these the last ones are told."""
BUDGET_S = 45.0
"""Of this computer's time: 200 volunteers with 256 microbatches a step take a second a step."""
HOURS_MAX = 24.0 * 30
"""Of simulated time: a run that closes no step in a month is not predicted."""
BULK_BYTES, BULK_OF_A_LINE_BYTES = 16e3, 1e6
"""Of a message that says how fast a line is, and of all of them together: less says little."""
LATENCY_S = 0.01
"""Of a way that nobody has measured, where no other is known either."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose plan is in force, and everybody who is in it."""

    config: RunConfig
    network: NetworkFile
    """Servers in the order of their seats, then volunteers."""
    stages: dict[str, int]
    """Of each volunteer."""
    guidance: Guidance
    """Of the plan."""


class PredictedNode(msgspec.Struct, frozen=True):
    """As `Traced`, of a simulated node: times from the beginning of the first step that is shown."""

    node: str
    role: str
    stage: int
    names: tuple[str, ...]
    spans: bytes


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, or a sentence why nothing was."""

    sentence: str = ""
    steps: tuple[tuple[int, float], ...] = ()
    """(number, when it closed): times as in the spans."""
    cost_step_s: float = 0.0
    """Of a step by the planners' cost of pools; 0: it knows no such course."""
    nodes: tuple[PredictedNode, ...] = ()


# ---- from the coordinator -------------------------------------------------------------------------------------------


def setting_of(machine: CoordinatorMachine, nodes: Sequence[Traced], now: float) -> Setting:
    """Raises `BadInputError` where there is nothing to predict."""
    plan = machine.placement.plan
    if plan is None or not plan.stages:
        raise BadInputError("no prediction: the run has no plan yet")
    config = machine.placement.running
    seats = [server.node for stage in plan.stages for server in stage.servers]
    volunteers = {member.peer: member.stage for member in machine.roster.volunteers() if member.stage >= 0}
    if not volunteers and config.stages.collocated == "never":
        raise BadInputError("no prediction: nobody computes")
    speeds = speeds_of(config, plan.course, nodes)
    # Whoever has no spans of its own is as fast as its benchmark says, by the scale of those who have both.
    benchmarks = {
        peer: machine.flops_per_s(member) for peer in (*seats, *volunteers) if (member := machine.roster.get(peer))
    }
    ratios = [speeds[peer][0] / power for peer, power in benchmarks.items() if power > 0 and peer in speeds]
    scale = median(ratios) if ratios else 1.0
    typical = median([power for power in benchmarks.values() if power > 0] or [FLOPS_PER_S])

    def speed(peer: str) -> tuple[float, float]:
        guess = scale * (benchmarks.get(NodeId(peer), 0.0) or typical)
        return speeds.get(peer, (guess, guess))

    memory = {member.peer: member.join.memory_bytes for member in machine.roster.all() if member.join is not None}
    return Setting(
        config=config,
        network=_network(
            seats, tuple(volunteers), machine.network.directions(now), lines_of(tuple(volunteers), nodes), speed, memory
        ),
        stages={str(peer): stage for peer, stage in volunteers.items()},
        guidance=Guidance(plan.order, plan.in_flight_max),
    )


def speeds_of(config: RunConfig, course: Course, nodes: Sequence[Traced]) -> dict[str, tuple[float, float]]:
    """(forward, backward) operations a second of each node, by the medians of what its device took for a task."""
    tokens = config.batch.samples * config.model.context
    blocks = blocks_of(ModelSpec.of_run(config.model, vocabulary_of(config.data.tokenizer)))
    found = {}
    for node in nodes:
        if node.stage < 0 or not course.chunks_of(node.stage):
            continue
        # At a route's end forward and backward are one task, so such spans are of the other chunks, if there are any.
        # Of several of these a task is of one or the other: their mean stands for it.
        numbers = course.chunks_of(node.stage)
        inner = [number for number in numbers if number != len(course.chunks) - 1]
        chunks = [course.chunks[number] for number in inner or numbers]
        forward = (
            tokens * sum(b.forward_flops for c in chunks for b in blocks[c.first_block : c.end_block]) / len(chunks)
        )
        backward = (
            tokens * sum(b.backward_flops for c in chunks for b in blocks[c.first_block : c.end_block]) / len(chunks)
        )
        seconds = {kind: _typical_s(node, kind) for kind in ("forward", "backward", "loss")}
        if seconds["loss"] > 0 and not seconds["backward"]:
            rate = (forward + backward) / seconds["loss"]
            found[node.node] = rate, rate
        elif seconds["forward"] > 0 and seconds["backward"] > 0:
            found[node.node] = forward / seconds["forward"], backward / seconds["backward"]
    return found


def lines_of(volunteers: Sequence[str], nodes: Sequence[Traced]) -> dict[str, tuple[float, float]]:
    """(up, down) bytes a second of each volunteer's line while at least one tensor was under way on it, whoever had it;
    0: too little was seen. What a node measures of one way is half of its line where two ways are busy, or a burst."""
    sent: dict[str, list[Records]] = {}
    received: dict[str, list[Records]] = {}
    for node in nodes:
        bulk = node.records[(node.records["kind"] == KINDS.index("receive")) & (node.records["bytes"] >= BULK_BYTES)]
        received.setdefault(node.node, []).append(bulk)
        for number, name in enumerate(node.names):
            sent.setdefault(name, []).append(bulk[bulk["name"] == number])
    return {each: (_rate(sent.get(each, [])), _rate(received.get(each, []))) for each in volunteers}


def _rate(parts: Sequence[Records]) -> float:
    """Bytes a second in the time in which at least one of these spans goes on; 0 where they are too few.

    From the first span's end on, with every span's share of its bytes: what shared the line with that one and ended
    before it is in no ring any more, so the line would look slower than it was.
    """
    records = np.concatenate(parts) if parts else np.empty(0, DTYPE)
    if records["bytes"].sum() < BULK_OF_A_LINE_BYTES:
        return 0.0
    ends = records["start"] + records["seconds"]
    first_end = float(ends.min())
    shares = (ends - np.maximum(records["start"], first_end)) / np.maximum(records["seconds"], 1e-9)
    records["start"] -= first_end
    busy = busy_s(records, float(ends.max()) - first_end)
    return float((records["bytes"] * shares).sum()) / busy if busy > 0 else 0.0


def _typical_s(node: Traced, kind: str) -> float:
    """The mean length of such spans, without the tenth that took longest: a pause of the whole computer is no work."""
    spans = np.sort(node.records["seconds"][node.records["kind"] == KINDS.index(kind)])
    kept = spans[: max(1, len(spans) - len(spans) // 10)]
    return float(kept.mean()) if len(kept) else 0.0


def _network(
    seats: Sequence[NodeId],
    volunteers: Sequence[NodeId],
    directions: Mapping[tuple[NodeId, NodeId], Direction],
    lines: Mapping[str, tuple[float, float]],
    speed: Callable[[str], tuple[float, float]],
    memory: Mapping[NodeId, int],
) -> NetworkFile:
    """Everybody's ways as measured. A line is as fast as the spans say, else as the fastest way that was measured over
    it; ways of which spans tell, or that nobody measured, take what the lines at both ends allow."""
    here = {*seats, *volunteers}
    known = {pair: found for pair, found in directions.items() if pair[0] in here and pair[1] in here}
    if not known:
        raise BadInputError("no prediction: no link is measured yet")
    ups: dict[str, float] = {}
    downs: dict[str, float] = {}
    for (source, target), found in known.items():
        ups[source] = max(ups.get(source, 0.0), found.bytes_per_s)
        downs[target] = max(downs.get(target, 0.0), found.bytes_per_s)
    for peer, (up, down) in lines.items():
        ups[NodeId(peer)], downs[NodeId(peer)] = up or ups.get(NodeId(peer), 0.0), down or downs.get(NodeId(peer), 0.0)
    ups, downs = ({peer: rate for peer, rate in rates.items() if rate} for rates in (ups, downs))
    seen_up = {peer for peer, (up, _) in lines.items() if up}
    seen_down = {peer for peer, (_, down) in lines.items() if down}
    for source, target in known:  # whoever is at the other end has at least as much
        if source in seen_up:
            downs[target] = max(downs.get(target, 0.0), ups[source])
        if target in seen_down:
            ups[source] = max(ups.get(source, 0.0), downs[target])
    typical = median(found.bytes_per_s for found in known.values())
    trips = [found.round_trip_s for found in known.values() if found.round_trip_s >= 0]
    latency_s = median(trips) / 2 if trips else LATENCY_S

    def way(source: NodeId, target: NodeId) -> Link:
        found = known.get((source, target))
        rate = min(ups.get(source, typical), downs.get(target, typical))
        if found is not None and source not in seen_up and target not in seen_down:
            rate = found.bytes_per_s
        trip_s = -1.0 if found is None else found.round_trip_s
        return Link(
            source=source, target=target, latency_s=latency_s if trip_s < 0 else trip_s / 2, bytes_per_s=rate
        )  # fmt: skip

    links = [way(a, b) for a in seats for b in seats if a != b]
    for volunteer in volunteers:
        for server in seats:
            links += [way(volunteer, server), way(server, volunteer)]
    machines = [
        Machine(
            name=peer,
            role="server" if number < len(seats) else "volunteer",
            forward_flops_per_s=speed(peer)[0],
            backward_flops_per_s=speed(peer)[1],
            memory_bytes=memory.get(peer, 0) or MEMORY_BYTES,
            uplink_bytes_per_s=ups.get(peer, typical),
            downlink_bytes_per_s=downs.get(peer, typical),
        )
        for number, peer in enumerate((*seats, *volunteers))
    ]
    return NetworkFile(kind="network", machines=tuple(machines), links=tuple(links))


# ---- in the world ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Watcher:
    """Keeps what simulated nodes do as spans of the kinds that real ones keep."""

    rings: dict[str, SpanRing]
    free_at: dict[str, float]

    def _ring(self, host: Host) -> SpanRing:
        ring = self.rings.get(host.node)
        if ring is None:
            ring = self.rings[host.node] = SpanRing(CAPACITY)
        return ring

    def computed(self, host: Host, lane: str, job: Any, start: float, end: float) -> None:
        ring = self._ring(host)
        if lane == "device":
            free_at = self.free_at.get(host.node, start)
            if start > free_at:
                machine: Any = host.machine
                ring.add("wait", free_at, start, name="" if machine is None else "work")
            self.free_at[host.node] = end
        ring.add(JOBS.get(type(job).__name__, "other"), start, end, about=job)

    def moved(
        self, source: Host, target: Host, message: Any, byte_count: float, began: float, sent: float, arrives: float
    ) -> None:
        content = type(message).__name__
        self._ring(source).add(
            "send", began, sent, about=message, name=target.node, content=content, byte_count=byte_count
        )  # fmt: skip
        self._ring(target).add(
            "receive", began, arrives, about=message, name=source.node, content=content, byte_count=byte_count
        )  # fmt: skip


def predict(setting: Setting, make: MakeMembers, clock: Callable[[], float], steps: int = STEPS) -> Prediction:
    """Runs the setting in simulated time; ends by itself after `BUDGET_S` of `clock`."""
    # Some more than are looked at: a run that draws to its end has less to do at once.
    config = msgspec.structs.replace(setting.config, steps=min(setting.config.steps, steps + STEPS_BEYOND))
    wanted = min(config.steps, steps)
    try:
        network = build_network(setting.network)
        volunteers = [machine.name for machine in network.machines[network.servers :]]
        watcher = _Watcher({}, {})
        pinned = {NodeId(node): stage for node, stage in setting.stages.items()}
        swarm = Swarm(
            config, network, no_churn(volunteers), 1, make, pinned=pinned, watch=watcher, guidance=setting.guidance
        )
    except BadInputError as error:
        return Prediction(sentence=f"no prediction: {error}")
    until, ends = 8.0, clock() + BUDGET_S
    while len(swarm.steps) < wanted and until < HOURS_MAX * 3600.0 and clock() < ends:
        swarm.world.run(until, lambda: len(swarm.steps) >= wanted or clock() >= ends)
        until *= 1.5
    if len(swarm.steps) < 3:
        return Prediction(sentence=f"no prediction: {len(swarm.steps)} steps closed in {swarm.world.now:.0f} s there")
    closed = swarm.steps[-(SHOWN + 1) :]
    plan = predicted(swarm)
    seats = {machine.name: number for number, machine in enumerate(network.machines[: network.servers])}
    shards = config.stages.front_servers + config.stages.back_servers
    begins = closed[0].at_s
    nodes = []
    for node, ring in watcher.rings.items():
        _, records = ring.newest(ring.since(begins), CAPACITY)
        records = records[records["start"] + records["seconds"] <= closed[-1].at_s]
        records["start"] -= begins
        stage = setting.stages.get(node, seats[node] // shards if node in seats else -1)
        role = "server" if node in seats else "volunteer"
        assert len(records) * RECORD_BYTES == len(records.tobytes())
        nodes.append(PredictedNode(node, role, stage, ring.names, records.tobytes()))
    return Prediction(
        steps=tuple((step.number, step.at_s - begins) for step in closed),
        cost_step_s=plan.step_s if plan is not None else 0.0,
        nodes=tuple(nodes),
    )
