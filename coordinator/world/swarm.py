"""A whole run in the simulated world: the coordinator's machine, the servers and volunteers of a network, a trace.

The coordinator stands beside the first server, with a line like its. Servers come first, in the network's order, then
volunteers over the first seconds. What runs is what production runs: the coordinator seats servers in their order of
arrival and gives volunteers their stages. Where the run leaves something to a planner its answer is taken first
(`planned.py`), and servers come in the order of its seats.

A driver's part is here, too: a volunteer measures its lines to its stage's servers and tells the coordinator, once in
a life, since lines do not change. Without that every line counts as a home line, and stages are manned for those.

One thing differs: nodes do not ask each other whether they live, and volunteers report to the coordinator only every
`PING_S`, where the file says more often, and in large networks less often still. Here no link falls silent without its
end being told, so the questions cost time and show nothing (at 10,000 volunteers with three links each they were nine
inputs of ten; asked every 167 s, with twenty links each, still two of ten).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from coordinator.live.core import CoordinatorMachine
from coordinator.live.plan_builder import Guidance
from coordinator.live.records import StepRow, StoredState
from coordinator.planning.placement.run_sizes import pool_sizes, vocabulary_of
from coordinator.world.churn import Change, Churn
from coordinator.world.planned import planned
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.machine import Log, Machine
from protocol.link.messages import LinkFigures
from protocol.messages import LinkReport
from protocol.run.run import RunConfig
from protocol.schedule.profile import Network
from protocol.trust.membership import Invite
from protocol.world.lines import Downlink, Uplink
from protocol.world.world import CannotComputeError, Host, Lanes, Watch, World, collecting_seldom

COORDINATOR = NodeId("the coordinator")
RUN_ID = b"simulated"
KEY = b"c" * 32
INVITE = Invite(issuer=KEY, run_id=RUN_ID, role="volunteer", uses=10**6, not_after=2**40, nonce=b"i" * 16)
"""What everybody shows: this world has no handshake."""
PING_S, SILENT_S = 15.0, 60.0
HEARD_TOGETHER = 60
"""Machines of a network that may report within a second: of more than 900 each reports less often."""
MEASURED_S = 10.0
"""A volunteer's lines are measured and told so long after it came, as `node.measure.linkbook.REPORT_S` has it."""
ARRIVE_S = 5.0
"""Those who are there from the beginning come within so long; servers within half a second."""
SAMPLES = 240
"""Moments at which everybody is asked what he does and what he waits for."""
COLLECT_AFTER = 50_000
"""Objects that come between two looks for garbage: nearly all that is there stays, machines make no rings of what they
drop (a thousand nodes take 97 MB with and without any look), and with the usual 700 looks took a fifteenth of the time
of a thousand nodes."""
ASKED_MAX = 512
"""Volunteers that are asked: of more, an even choice."""


class Members(Protocol):
    """The node's side: `node.world.member.Members`, which this package may not import."""

    @property
    def executed(self) -> Counter[int]: ...

    def make(
        self, host: Host, forward_flops_per_s: float, backward_flops_per_s: float, memory_bytes: float
    ) -> tuple[Machine, Lanes]: ...


SEATED_APART_S = 2.0
"""Between two servers that come to planned seats: more than joining takes over a line of half a second."""

MakeMembers = Callable[..., Members]


class _NoLanes:
    """A coordinator computes nothing."""

    def takes(self, job: Any) -> tuple[str, float]:
        raise CannotComputeError(f"a coordinator has no lane for {job}")

    def result(self, job: Any) -> Any:
        raise CannotComputeError(f"a coordinator has no lane for {job}")


@dataclass(frozen=True, slots=True)
class Step:
    """A closed step: when its row was durable, and what its decider said that it took."""

    number: int
    at_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class Moment:
    """What the volunteers of each stage do at one moment: `by_stage[stage][what]`, of those asked."""

    at_s: float
    volunteers: int
    by_stage: tuple[Counter[str], ...]
    run_waits: str


class Swarm:
    """One run in one world. `run` lets time pass; everything else only looks."""

    def __init__(
        self,
        config: RunConfig,
        network: Network,
        churn: Churn,
        seed: int,
        make: MakeMembers,
        *,
        pinned: Mapping[NodeId, int] | None = None,
        watch: Watch | None = None,
        guidance: Guidance | None = None,
    ) -> None:
        """`pinned`: stages of volunteers that are not the coordinator's choice. `watch`: hears what everybody does.
        `guidance`: of a plan in force, where no planner shall be asked.

        Raises `BadInputError` where the network has too few servers, or no way between two machines."""
        _check(config, network)
        ping_s = max(PING_S, config.limits.ping_s, len(network.machines) / HEARD_TOGETHER)
        limits = msgspec.structs.replace(
            config.limits, ping_s=ping_s, silent_s=max(SILENT_S, config.limits.silent_s, 4 * ping_s)
        )
        if guidance is None:
            config, seats, guidance = planned(config, network)
        else:
            seats = list(range(network.servers))
        self._guidance = guidance
        self.config = msgspec.structs.replace(config, limits=limits)
        self.network = network
        self.churn = churn
        self.steps: list[Step] = []
        self.moments: list[Moment] = []
        self.warnings: Counter[tuple[str, str]] = Counter()
        """Lines that machines logged above `info`: (role, event)."""
        self.said: dict[tuple[str, str], str] = {}
        """The first of each kind, with its fields."""
        sizes = pool_sizes(config)
        self.members = make(
            self.config, vocabulary_of(config.data.tokenizer), RUN_ID, COORDINATOR, KEY, sizes.held_bytes,
            sizes.value_bytes,
        )  # fmt: skip
        self._pinned = pinned or {}
        self.world = World(seed, self._way, self._durable, self._logged, watch)
        self._random = random.Random(seed + 1)
        first = network.machines[0]
        self.coordinator = Host(
            COORDINATOR, "coordinator", 0, self._make_coordinator,
            Uplink(first.uplink_bytes_per_s), Downlink(first.downlink_bytes_per_s),
        )  # fmt: skip
        self.world.add(self.coordinator)
        self.world.at(0.0, self.world.start, self.coordinator)
        self.servers = [self._host(network.machines[place].name, place) for place in range(network.servers)]
        # Whoever comes first sits first: where seats are planned nobody overtakes.
        apart_s = 0.4 / len(self.servers) if seats == sorted(seats) else SEATED_APART_S
        for number, place in enumerate(seats):
            self.world.at(0.05 + apart_s * number, self.world.start, self.servers[place])
        self.volunteers: dict[str, Host] = {}
        self.departures = 0
        self._ways: dict[int, tuple[float, float]] = {}
        for change in churn.changes:
            begun = ARRIVE_S * self._random.random() if change.comes and change.at_s == 0.0 else 0.0
            self.world.at(0.5 + change.at_s + begun, self._change, change)

    # ---- who is there --------------------------------------------------------------------------------------------

    def _host(self, name: str, place: int) -> Host:
        machine = self.network.machines[place]

        def make(host: Host) -> tuple[Machine, Lanes]:
            return self.members.make(
                host, machine.forward_flops_per_s, machine.backward_flops_per_s, machine.memory_bytes
            )

        host = Host(
            NodeId(name), machine.role, place, make,
            Uplink(machine.uplink_bytes_per_s), Downlink(machine.downlink_bytes_per_s),
        )  # fmt: skip
        self.world.add(host)
        return host

    def _change(self, change: Change) -> None:
        host = self.volunteers.get(change.name)
        if change.comes:
            if host is None:
                place = self.network.servers + self.churn.kind_of[change.name]
                host = self.volunteers[change.name] = self._host(change.name, place)
            self.world.start(host)
            self.world.at(self.world.now + MEASURED_S, self._measure, host, host.life)
        elif host is not None and host.machine is not None:
            self.departures += 1
            self.world.end(host)

    def _make_coordinator(self, host: Host) -> tuple[CoordinatorMachine, Lanes]:
        machine = CoordinatorMachine(
            self.config,
            RUN_ID,
            1,
            StoredState(),
            sign_membership=lambda terms: b"membership",
            sign_thanks=lambda thanks: b"thanks",
            sign_revocations=lambda revocations: b"",  # nobody is banned here
            read_invite=lambda credential: INVITE,
        )
        machine.crew.pinned = self._pinned
        machine.placement.guidance = self._guidance
        return machine, _NoLanes()

    @property
    def machine(self) -> CoordinatorMachine:
        machine = self.coordinator.machine
        assert isinstance(machine, CoordinatorMachine), "the coordinator runs as long as the world"
        return machine

    # ---- the network ---------------------------------------------------------------------------------------------

    def _way(self, source: int, target: int) -> tuple[float, float]:
        """Seconds and bytes per second from one place to another; one of the two is a server's."""
        known = self._ways.get(source * 65_536 + target)
        if known is not None:
            return known
        network = self.network
        if source == target:
            found = 0.0002, 1e10  # the coordinator and the first server: two processes of one machine
        elif target < network.servers:
            found = float(network.to_latency_s[source, target]), float(network.to_bytes_per_s[source, target])
        else:
            found = float(network.from_latency_s[source, target]), float(network.from_bytes_per_s[source, target])
        self._ways[source * 65_536 + target] = found
        return found

    def _measure(self, host: Host, life: int) -> None:
        """What its driver has found on the lines to its servers; again later where it has none yet."""
        if host.life != life:
            return
        figures = [self._figures(host, link.other(host)) for link in host.links.values()]
        figures = [each for each in figures if each.peer != COORDINATOR]
        if figures and COORDINATOR in host.links:
            self.world.send(host, COORDINATOR, LinkReport(links=tuple(figures)))
        else:
            self.world.at(self.world.now + MEASURED_S, self._measure, host, life)

    def _figures(self, host: Host, peer: Host) -> LinkFigures:
        (there_s, sent), (back_s, received) = self._way(host.place, peer.place), self._way(peer.place, host.place)
        return LinkFigures(
            peer=peer.node,
            path="tcp",
            round_trip_s=there_s + back_s,
            loss=-1.0,
            sent_bytes_per_s=min(sent, host.uplink.rate, peer.downlink.rate),
            received_bytes_per_s=min(received, host.downlink.rate, peer.uplink.rate),
            age_s=0.0,
            spread=0.0,
        )

    # ---- what happens --------------------------------------------------------------------------------------------

    def _durable(self, host: Host, record: Any) -> None:
        if isinstance(record, StepRow):
            self.steps.append(Step(record.step, self.world.now, record.duration_s))

    def _logged(self, host: Host, line: Log) -> None:
        if line.level != "info":
            key = host.role, line.event
            self.warnings[key] += 1
            if key not in self.said:
                self.said[key] = f"{host.node}: {line.fields}"

    def run(self, until_s: float) -> None:
        """Lets time pass until then, or until the run is finished."""
        every_s = until_s / SAMPLES
        with collecting_seldom(COLLECT_AFTER):
            for number in range(1, SAMPLES + 1):
                self.world.run(number * every_s, lambda: self._ended())
                if self._ended():
                    return
                self._look()

    def _ended(self) -> bool:
        return len(self.steps) >= self.config.steps or bool(self.coordinator.exited)

    def _look(self) -> None:
        stages = [Counter[str]() for _ in range(self.config.stages.count)]
        there = [host for host in self.volunteers.values() if host.machine is not None]
        for host in there[:: -(-len(there) // ASKED_MAX) or 1]:
            machine: Any = host.machine
            if 0 <= machine.stage < len(stages):
                stages[machine.stage][self._doing(host, machine)] += 1
        self.moments.append(Moment(self.world.now, len(there), tuple(stages), self.machine.waiting_for))

    def _doing(self, host: Host, machine: Any) -> str:
        """One of: computes; sends; receives; or what it says that it waits for."""
        if host.lane_free_at.get("device", 0.0) > self.world.now:
            return "computes"
        if host.uplink.waiting_bytes > 0:
            return "sends"
        if host.downlink.free_at > self.world.now:
            return "receives"
        return without_numbers(machine.waiting_for()) or "takes its next task"


def without_numbers(sentence: str) -> str:
    """A sentence with each number as `#`, so that like ones count together."""
    words = []
    for word in sentence.split():
        bare = word.strip(",;:()")
        words.append(word.replace(bare, "#") if bare and bare[0].isdigit() else word)
    return " ".join(words)


def _check(config: RunConfig, network: Network) -> None:
    stages = config.stages
    needed = stages.count * (stages.front_servers + stages.back_servers)
    if network.servers < needed:
        raise BadInputError(
            f"stages.count: {stages.count} stages with {stages.front_servers} front and {stages.back_servers} back"
            f" servers each need {needed} servers; the network has {network.servers}"
        )
    if not network.volunteers and stages.collocated == "never":
        raise BadInputError("machines: nobody computes: the network has no volunteer, and stages.collocated is never")
    for place, machine in enumerate(network.machines):
        if machine.name == COORDINATOR:
            raise BadInputError(f"machines[{place}].name: {machine.name!r} is what the coordinator is called here")
        if machine.uplink_bytes_per_s <= 0 or machine.downlink_bytes_per_s <= 0:
            raise BadInputError(f"machines[{place}]: {machine.name!r} has a line that carries nothing")
        if math.isinf(network.to_latency_s[place, 0]) or math.isinf(network.from_latency_s[0, place]):
            raise BadInputError(
                f"links: no way between {machine.name!r} and {network.machines[0].name!r}, where the coordinator stands"
            )
