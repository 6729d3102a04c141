"""Builds a run in the simulated world: a coordinator, the servers of every stage, volunteers."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from coordinator.live.core import CoordinatorMachine
from coordinator.live.generations import first_generation
from coordinator.live.history import first_step_after
from coordinator.live.records import (
    Banned,
    DataRow,
    HistoryEnded,
    InviteSpent,
    MemberRow,
    PlanRow,
    StepRow,
    StoredState,
)
from coordinator.process.planner import solve
from node.core import NodeMachine
from node.machine.facts import NodeFacts
from node.machine.kept_plan import KeptPlan
from node.machine.records import SnapshotWritten
from node.server.tickets import KEY_BYTES
from protocol.base.ids import NodeId, TaskId
from protocol.base.machine import Received
from protocol.messages import LinkFigures, LinkReport, PlanChanged, Revoked, Welcome
from protocol.run.course import EVEN, PLANNED
from protocol.run.run import (
    TUNED,
    AuditSection,
    BatchSection,
    CheckpointSection,
    ComputeSection,
    LimitsSection,
    ModelSection,
    RoutesSection,
    RunConfig,
    StagesSection,
    ValidationSection,
    WireSection,
)
from protocol.trust.identity import SIGNATURE_BYTES
from protocol.trust.membership import Invite, Revocations, Trust, join_revocations
from tests.simulation.host import Link
from tests.simulation.liar import Liar
from tests.simulation.scene import Scene
from tests.simulation.world import Host, Watcher, World

COORDINATOR = NodeId("coordinator")
PLAN, WELCOME, BANS = "plan", "welcome", "bans"
"""Files on a node's disk: what it keeps of the coordinator's words."""
INVITE = Invite(issuer=b"c" * 32, run_id=b"world", role="volunteer", uses=10**6, not_after=2**40, nonce=b"i" * 16)
"""What every node of the world shows; the world has no handshake, so its signature is taken for granted."""
SPARES_COME_S = 0.6
"""Servers start within half a second; a spare that is there before the last of them would take its place."""
FOLDER = "/checkpoint"
"""All servers of a world write to one (`SharedFolder`): a run whose servers keep their own parts is not simulated."""
SERVER_GONE_S = 10.0
"""After this a spare takes a place: longer than most pauses of the weather, shorter than its longest."""


COURSES: tuple[dict[str, Any], ...] = (
    {"stages": 2, "tied": True},
    {"stages": 3, "tied": True},
    {"stages": 4, "skip": 0.25},
    {"stages": 4, "skip": 0.5},
    {"stages": 3, "swaps": 1},
    {"stages": 4, "skip": 0.25, "swaps": 1},
    {"stages": 2, "chunks": 2, "placement": "interleaved"},
    {"stages": 1, "chunks": 3, "placement": "interleaved"},
    {"stages": 2, "chunks": 2, "placement": "v"},
    {"stages": 3, "chunks": 2, "placement": "v", "swaps": 2, "tied": True},
    {"stages": 3, "chunks": 2, "placement": "interleaved", "skip": 0.34},
)
"""Runs whose routes are no plain line through the stages."""


ORDERS = ("backward", "backward", "backward", "forward", "interleaved", TUNED)
"""What nodes do first."""


@dataclass(frozen=True)
class Shape:
    """What kind of run a seed draws."""

    stages: int = 2
    fronts: int = 1
    backs: int = 1
    volunteers: int = 3
    microbatches: int = 4
    steps: int = 8
    delay: int = 1
    contribution_tasks: int = 2
    collocated: str = "when_empty"
    snapshot_steps: int = 3
    checkpoint_every: int = 4
    linger_s: float = 10.0
    spares: int = 0
    """Servers that find no place."""
    chunks: int = 1
    placement: str = "line"
    tied: bool = False
    skip: float = 0.0
    swaps: int = 0
    segments: int = 1
    cut: str = EVEN
    lease_s: float = 8.0
    validate_every: int = 0
    audit_first: int = 20
    audit_rate: float = 0.05
    split: bool = False
    order: str = field(default="backward", repr=False)
    """Not in what is shown, since other things are drawn by that."""
    gradients: str = field(default="fp32", repr=False)
    """Form of sums; out of `repr`, from which other things are drawn."""
    buddy: str = field(default="never", repr=False)
    """Out of `repr`, from which other things are drawn."""
    greedy: bool = field(default=False, repr=False)
    """Whether volunteers ask for all the work that they have room for; out of `repr` for the same reason."""

    @property
    def shards(self) -> int:
        """Servers of a stage."""
        return self.fronts + self.backs

    @staticmethod
    def draw(rng: random.Random) -> Shape:
        """A line, as most runs are; every third run has another course, every fifth samples in segments, and some have
        servers that are both."""
        shape = Shape._line(rng)
        if rng.random() < 1 / 3:
            shape = replace(shape, **rng.choice(COURSES))
        if shape.collocated == "never":  # a stage that nobody computes for would wait for ever, and rightly so
            shape = replace(shape, volunteers=max(shape.volunteers, shape.stages))
        if shape.stages > 1 and rng.random() < 0.25:
            shape = replace(shape, cut=PLANNED)
        # Without a draw from `rng`: what a seed draws after this was drawn by it before.
        shape = replace(shape, split=random.Random(repr(shape)).random() < 0.3)
        # Two at the least: of a contribution that a liar made, one shard alone would never see the rest missing.
        shape = replace(shape, fronts=2, backs=0) if rng.random() < 0.15 else shape
        shape = replace(shape, segments=rng.choice([2, 3])) if rng.random() < 0.2 else shape
        return replace(shape, order=random.Random(repr(shape)).choice(ORDERS))

    @staticmethod
    def _line(rng: random.Random) -> Shape:
        fronts, backs = rng.choice([(1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2)])
        return Shape(
            stages=rng.choice([1, 2, 2, 2, 3]),
            fronts=fronts,
            backs=backs,
            volunteers=rng.randint(3, 6),
            microbatches=rng.randint(2, 5),
            steps=rng.randint(5, 9),
            delay=rng.randint(0, 1),
            contribution_tasks=rng.randint(1, 4),
            collocated=rng.choice(["when_empty", "when_empty", "always", "never"]),
            snapshot_steps=rng.randint(2, 4),
            checkpoint_every=rng.choice([0, 2, 3]),
            linger_s=rng.choice([0.05, 0.25, 10.0]),
            spares=rng.choice([0, 1, 1, 2]),
        )

    def config(self, seed: int) -> RunConfig:
        config = RunConfig(
            name="world",
            seed=seed,
            steps=self.steps,
            model=ModelSection(
                layers=max(4, self.stages),
                hidden=64,
                heads=4,
                kv_heads=2,
                feed_forward=64,
                context=16,
                tied_embeddings=self.tied,
            ),
            batch=BatchSection(
                microbatches=self.microbatches,
                samples=2,
                delay=self.delay,  # type: ignore[arg-type]
                segments=self.segments,
            ),
            stages=StagesSection(
                count=self.stages,
                front_servers=self.fronts,
                back_servers=self.backs,
                collocated=self.collocated,  # type: ignore[arg-type]
                chunks=self.chunks,
                placement=self.placement,  # type: ignore[arg-type]
                cut=self.cut,
                order=self.order,  # type: ignore[arg-type]
            ),
            routes=RoutesSection(skip=self.skip, swaps=self.swaps),
            compute=ComputeSection(split_backward=self.split),
            # Servers that are both take differences, too.
            wire=WireSection(
                activations_up="fp32" if self.backs else "d4",
                activations_down="fp32" if self.backs else "q8",
                gradients=self.gradients,  # type: ignore[arg-type]
                parameters="p12",
            ),
            checkpoint=CheckpointSection(
                folder=FOLDER,
                every_steps=self.checkpoint_every,
                buddy=self.buddy,  # type: ignore[arg-type]
            ),
            validation=ValidationSection(every_steps=self.validate_every, batches=2),
            limits=LimitsSection(
                lease_s=self.lease_s,
                contribution_tasks=self.contribution_tasks,
                snapshot_steps=self.snapshot_steps,
                linger_s=self.linger_s,
                server_gone_s=SERVER_GONE_S,
            ),
            audit=AuditSection(first=self.audit_first, rate=self.audit_rate if self.segments == 1 else 0.0),
        )
        config.validate()
        return config


class WorldTrust(Trust):
    """Believes every list of bans: the world has no signatures, and its names are no node ids."""

    def revoke(self, signed: bytes) -> bool:
        _, run_id, number, nodes = msgspec.msgpack.decode(signed[:-SIGNATURE_BYTES])
        if number <= self.revocations.number:
            return False
        self.revocations, self.revocations_signed = Revocations(run_id, number, tuple(nodes)), signed
        self._revoked = frozenset(nodes)
        return True


class Swarm:
    """A run in a world. Every host is started; `volunteers` and `servers` list them."""

    def __init__(self, seed: int, shape: Shape, watcher: Watcher, scene: Scene = Scene()) -> None:  # noqa: B008
        self.shape = shape
        self.scene = scene
        self.config = shape.config(seed)
        self.world = World(seed, watcher)
        self.coordinator = self.world.add(Host(COORDINATOR, "coordinator", self._build_coordinator, "c:1"))
        self.servers: list[Host] = []
        self.volunteers: list[Host] = []
        self._spoilt: dict[TaskId, bool] = {}
        """What liars have had their hands on."""
        self._made = 0
        self.world.on_exit = self._look_after
        self.world.before_received = keep_plan
        self.world.plan = lambda problem: solve(problem, clock=lambda: 0.0)
        self.world.linked = self._measure
        self.world.start(self.coordinator)
        for _ in range(shape.stages * shape.shards):
            self.add_server()
        for _ in range(shape.spares):
            self.world.at(SPARES_COME_S, self._add_spare)
        for _ in range(shape.volunteers):
            self.add_volunteer()

    def add_server(self) -> Host:
        host = self._add("server")
        self.servers.append(host)
        return host

    def prepare_server(self) -> Host:
        """One more, which whoever wants it starts."""
        host = self._make("server")
        self.servers.append(host)
        return host

    def _add_spare(self) -> None:
        self.add_server()

    def add_volunteer(self) -> Host:
        host = self._add("volunteer")
        self.volunteers.append(host)
        return host

    def add_liar(self) -> Host:
        """A volunteer that also says what no honest one would."""
        host = self._add("volunteer")
        host.lies = True
        conspire = self.shape.collocated != "never"
        host.build = lambda host, rng: Liar(
            self._build_node(host, rng), host, rng, self.scene.lies, self._spoilt, conspire
        )
        self.volunteers.append(host)
        return host

    def _look_after(self, host: Host) -> None:
        """A service manager: a process that failed is started again."""
        if host.exited.startswith("failed"):
            self.world.at(2.0, lambda: self.world.start(host) if host.machine is None else None)

    def _add(self, role: str) -> Host:
        host = self._make(role)
        self.world.at(
            self.world.rng.uniform(0.0, 0.5), lambda: self.world.start(host) if host.machine is None else None
        )
        return host

    def _make(self, role: str) -> Host:
        self._made += 1
        node = NodeId(f"{role[0]}{self._made}")
        rng = self.world.rng
        host = Host(
            node, role, self._build_node, f"{node}:1", speed=rng.uniform(0.5, 2.0), rate=rng.uniform(0.99, 1.01)
        )
        return self.world.add(host)

    def _build_node(self, host: Host, rng: random.Random) -> NodeMachine:
        records = []
        for record, tensors in host.records:
            if isinstance(record, SnapshotWritten) and record.file not in host.files:
                continue  # a journal does not read it either
            if tensors:
                refs = []
                for ref in record.tensors:
                    key = next(host.keys)
                    host.store[key] = tensors[ref.key]
                    refs.append(msgspec.structs.replace(ref, key=key))
                record = msgspec.structs.replace(record, tensors=tuple(refs))
            records.append(record)
        facts = NodeFacts(
            role=host.role,
            addresses=(host.address,) if host.role == "server" else (),
            build="world",
            tokens_per_s=100.0 * host.speed,
            memory_bytes=2**30,
            checkpoints=self.world.shared.complete() if host.role == "server" else (),
            incarnation=rng.getrandbits(48),
            secret=_secret(f"{self.world.seed} {host.node} {host.life}"),
            kept=host.files.get(PLAN),
            records=records,
        )
        trust = WorldTrust(b"world", INVITE.issuer)
        if (known := host.files.get(BANS)) is not None:
            trust.revoke(join_revocations(b"world", known.number, known.nodes, known.signature))
        return NodeMachine(host.node, facts, COORDINATOR, (self.coordinator.address,), host.keys, trust)

    def _build_coordinator(self, host: Host, rng: random.Random) -> CoordinatorMachine:
        stored = stored_state([record for record, _ in host.records])
        known = max(host.files.get("generation", 0), stored.plan.generation if stored.plan else 0)
        # The run's id lies beside the database: a coordinator that lost that knows that it starts again.
        host.files["generation"] = first_generation(known, again=host.life > 1, wall_s=self.world.now)
        generation = host.files["generation"]
        return CoordinatorMachine(
            self.config,
            b"world",
            generation,
            stored,
            sign_membership=lambda terms: f"{terms.node}/{terms.serial}".encode(),
            sign_thanks=lambda thanks: f"{thanks.node}/{thanks.tasks}".encode(),
            sign_revocations=lambda revocations: bytes(SIGNATURE_BYTES),
            read_invite=lambda credential: INVITE,
        )

    def _measure(self, link: Link) -> None:
        """What watches the links of a real node: both of two servers tell what they have measured."""
        world = self.world
        if not self.config.asks_planner or {world.hosts[node].role for node in (link.a, link.b)} != {"server"}:
            return

        def report(node: NodeId) -> None:
            host, peer = world.hosts[node], link.other(node)
            if host.machine is None or not link.alive:
                return
            figures = LinkFigures(
                peer=peer, path="tcp", round_trip_s=2 * link.latency_s, loss=0.0,
                sent_bytes_per_s=link.bytes_per_s * host.speed, received_bytes_per_s=link.bytes_per_s,
                age_s=0.0, spread=0.0,
            )  # fmt: skip
            world.say(host, COORDINATOR, LinkReport(links=(figures,)))

        for node in (link.a, link.b):
            world.at(0.1, partial(report, node))

    @property
    def finished(self) -> bool:
        machine = self.coordinator.machine
        return isinstance(machine, CoordinatorMachine) and machine.finished


def _secret(words: str) -> bytes:
    """Like random bytes, without drawing from the world's generator."""
    return hashlib.blake2b(words.encode(), digest_size=KEY_BYTES).digest()


def keep_plan(host: Host, fact: Received) -> None:
    """As the state folder of a real node does it."""
    news = fact.message
    if isinstance(news, Revoked):
        keep_bans(host, news)
    if fact.peer != COORDINATOR or not isinstance(news, Welcome | PlanChanged):
        return
    kept: KeptPlan | None = host.files.get(PLAN)
    if isinstance(news, Welcome):
        host.files[WELCOME] = news
    if kept is not None:
        host.files[PLAN] = kept.after(news)
    elif isinstance(news, PlanChanged) and WELCOME in host.files:
        welcome: Welcome = host.files[WELCOME]
        host.files[PLAN] = KeptPlan(
            config=welcome.config,
            vocabulary=welcome.vocabulary,
            plan=news.plan,
            stage=news.stage,
            reason=news.reason,
        )


def keep_bans(host: Host, news: Revoked) -> None:
    """The newest list that it has heard of."""
    kept: Revoked | None = host.files.get(BANS)
    if kept is None or kept.number < news.number:
        host.files[BANS] = news


def stored_state(records: list[Any]) -> StoredState:
    """What the coordinator's database would give back for these records."""
    plans = [record for record in records if isinstance(record, PlanRow)]
    members = [record for record in records if isinstance(record, MemberRow)]
    data = [record for record in records if isinstance(record, DataRow)]
    plan = plans[-1].plan if plans else None
    steps: list[StepRow] = []
    thrown: dict[int, StepRow] = {}
    for record in records:
        if isinstance(record, StepRow):
            steps.append(record)
        elif isinstance(record, PlanRow) and record.goes_back:
            first = first_step_after(record.plan.restore_step)
            thrown.update({step.step: step for step in steps if step.step >= first})
            steps = [step for step in steps if step.step < first]
            counted = {step.step for step in steps}
            steps += [thrown[number] for number in sorted(thrown) if number < first and number not in counted]
            steps.sort(key=lambda step: step.step)
    return StoredState(
        plan=plan,
        plan_sentence=plans[-1].sentence if plans else "",
        generations=tuple(record.plan.generation for record in plans),
        rollback_count=sum(record.goes_back for record in plans),
        lost_steps=sum(record.lost_steps for record in plans),
        data=data[-1] if data else None,
        steps=tuple(steps),
        ended=any(
            isinstance(record, HistoryEnded) and plan is not None and record.ledger_generation == plan.ledger_generation
            for record in records
        ),
        thrown=tuple(thrown[number] for number in sorted(thrown)),
        tokens=sum(record.tokens for record in steps),
        spent=tuple(record for record in records if isinstance(record, InviteSpent)),
        banned=tuple(record for record in records if isinstance(record, Banned)),
        next_serial=max((record.serial for record in members), default=0) + 1,
    )
