"""The machine of one node: its links, its conversation with the coordinator, and the roles that the plan gives it.

    LinkUp(coordinator) ─▶ Join ─▶ Welcome (membership, run) ─▶ PlanChanged ─▶ server machine and/or volunteer machine

A server that computes hosts both; what they say to each other goes through the same messages as between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from node.jobs import DEVICE_JOBS, PrepareData
from node.links.wanted import Links
from node.outbox import Outbox
from node.records import Record, ShardStarted, SnapshotWritten, StepCommitted
from node.server.server import ServerMachine
from node.server.shard import oldest_needed
from node.volunteer.volunteer import VolunteerMachine
from protocol.ids import NodeId, TensorRef
from protocol.machine import (
    AddressesChanged,
    CheckpointsFound,
    Computed,
    ComputeFailed,
    Effect,
    Exit,
    HangUp,
    Input,
    LinkDown,
    LinkUp,
    Persisted,
    Received,
    Told,
)
from protocol.messages import (
    Bye,
    CheckpointDone,
    DataReady,
    Forget,
    InputAnswer,
    Join,
    Lease,
    Leave,
    Message,
    NodeReport,
    Parameters,
    Ping,
    PlanChanged,
    Pong,
    Refused,
    RunFinished,
    StepClosed,
    StepReportStored,
    Verdict,
    VersionReady,
    Welcome,
    Work,
)
from protocol.plan import Plan
from protocol.run import RunConfig

PROGRESS_S = 30.0
"""Between two lines in a volunteer's log …"""
FIRST_PROGRESS_S = 10.0
"""… and until the first, for which its owner waits."""
REPORT_S = 2.0
"""Seconds between reports to the coordinator."""
CHECKPOINTS_NAMED_MAX = 16
"""As many as `Join` may name: older ones are nobody's first choice."""
DRAIN_S = 60.0
"""A node that drains waits so long for verdicts on what it sent (state-and-trust 4.5)."""
FOR_VOLUNTEER = (Lease, Forget, InputAnswer, Parameters, VersionReady)
FOR_BOTH = (Verdict, StepClosed)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node knows of itself before it joins."""

    role: str
    """server or volunteer"""
    addresses: tuple[str, ...] = ()
    """Where anybody can dial it."""
    local_addresses: tuple[str, ...] = ()
    """Where only its own network can."""
    build: str = ""
    tokens_per_s: float = 0.0
    memory_bytes: int = 0
    wished_stage: int = -1
    checkpoints: tuple[int, ...] = ()
    computes: bool = True
    """Whether a server hosts a volunteer too; a volunteer always does."""
    incarnation: int = 0
    """Drawn anew at every start."""
    records: list[Record] = field(default_factory=list)
    """A server's durable records, oldest first."""


class NodeMachine:
    """One node. See `protocol.machine` for the doors.

    Args:
        coordinator: its node id; `coordinator_addresses` come from the join link.
        keys: numbers for tensors, shared with the driver.
    """

    def __init__(
        self,
        node: NodeId,
        facts: NodeFacts,
        coordinator: NodeId,
        coordinator_addresses: tuple[str, ...],
        keys: count[int],
    ) -> None:
        self.node = node
        self._facts = facts
        self._unread = facts.records
        """Records whose tensors no server machine has taken yet: later ledgers have nothing on this disk."""
        self._coordinator = coordinator
        self._coordinator_addresses = coordinator_addresses
        self._out = Outbox(node, keys)
        self._links = Links(self._out, ping_s=2.0, silent_s=6.0)
        self._roles: dict[NodeId, str] = {}
        """What the live peers' credentials say."""
        self._addresses = facts.addresses
        self._checkpoints = facts.checkpoints
        """Steps of complete checkpoints that this server can read, newest first."""
        self._joined: Join | None = None
        """What the coordinator was told last."""
        self.config: RunConfig | None = None
        self.vocabulary = 0
        self.plan: Plan | None = None
        self.stage = -1
        self._stage_reason = "not joined yet"
        self.server: ServerMachine | None = None
        self.volunteer: VolunteerMachine | None = None
        self._data: DataReady | None = None
        self._preparing = False
        self._report_at = 0.0
        self._said_at = float("-inf")
        self._say_at = float("-inf")
        self._said_tokens = 0.0
        self._drain_until: float | None = None
        self._drained_reason = "drained"
        self._finished = False

    # ---- the doors -----------------------------------------------------------------------------------------------

    def start(self, now: float) -> Sequence[Effect]:
        self._report_at = now + REPORT_S
        self._want_links(now)
        return self._take(now)

    def handle(self, fact: Input, now: float) -> Sequence[Effect]:
        match fact:
            case LinkUp():
                self._link_up(fact, now)
            case LinkDown():
                self._link_down(fact, now)
            case Received():
                self._links.heard(fact.peer, now)
                self._received(fact.peer, fact.message, now)
            case Computed():
                self._computed(fact.job, fact.result, now)
            case ComputeFailed():
                self._failed(fact.job, fact.reason, now)
            case Persisted():
                record = self._out.unwritten.pop(fact.record_number)
                if self.server is not None:
                    self.server.persisted(record, now)
            case CheckpointsFound():
                self._name_checkpoints(fact.steps)
            case AddressesChanged():
                self._addresses = fact.addresses
                self._say_news()
            case Told():
                self._told(fact.what, now)
        return self._take(now)

    def wake_at(self) -> float | None:
        times: list[float | None] = [self._report_at, self._links.wake_at(), self._drain_until]
        if self.server is not None:
            times.append(self.server.wake_at())
        if self.volunteer is not None:
            times.append(self.volunteer.wake_at())
        return min((time for time in times if time is not None), default=None)

    def wake(self, now: float) -> Sequence[Effect]:
        self._links.wake(now)
        if self.server is not None and _due(self.server.wake_at(), now):
            self.server.wake(now)
        if self.volunteer is not None and _due(self.volunteer.wake_at(), now):
            self.volunteer.wake(now)
        if now >= self._report_at:
            self._report_at = now + REPORT_S
            self._say_progress(now)
            self._report()
        if _due(self._drain_until, now):
            self._leave("drain time is over" if self._drained_reason == "drained" else self._drained_reason)
        return self._take(now)

    def check(self) -> None:
        if self.server is not None:
            self.server.check()
        if self.volunteer is not None:
            self.volunteer.check()

    # ---- links ---------------------------------------------------------------------------------------------------

    def _want_links(self, now: float) -> None:
        peers: dict[NodeId, tuple[tuple[str, ...], bool]] = {self._coordinator: (self._coordinator_addresses, True)}
        if self.plan is not None and self.server is not None:
            for peer in self.plan.server_nodes():
                if peer != self.node:
                    peers[peer] = (self.plan.addresses_of(peer), self.node < peer)
        elif self.plan is not None and self.volunteer is not None and self.stage >= 0:
            for server in self.plan.stages[self.stage].servers:
                peers[server.node] = (server.addresses, True)
        self._links.want(peers, now)

    def _link_up(self, fact: LinkUp, now: float) -> None:
        self._links.up(fact.peer, now)
        self._roles[fact.peer] = fact.role
        if fact.peer == self._coordinator:
            self._join()
            if self.server is not None:
                self.server.coordinator_here()
            return
        if self.server is not None:
            self.server.link_up(fact.peer, fact.role, now)
        if self.volunteer is not None:
            self.volunteer.link_up(fact.peer)

    def _link_down(self, fact: LinkDown, now: float) -> None:
        was_up = self._roles.pop(fact.peer, None) is not None
        self._links.down(fact.peer, now)
        if not was_up:
            return
        self._out.log("info", "link down", peer=fact.peer, reason=fact.reason)
        if fact.peer == self._coordinator:
            if self.server is not None:
                self.server.coordinator_gone()
            return
        if self.server is not None:
            self.server.link_down(fact.peer, now)
        if self.volunteer is not None:
            self.volunteer.link_down(fact.peer)

    # ---- the coordinator -----------------------------------------------------------------------------------------

    def _join(self) -> None:
        self._joined = self._join_message()
        self._out.send(self._coordinator, self._joined)
        if self._data is not None:
            self._out.send(self._coordinator, self._data)

    def _join_message(self) -> Join:
        """What this node would say of itself now."""
        stage, shard, version, generation = self._held()
        return Join(
            role="server" if self._facts.role == "server" else "volunteer",
            addresses=self._addresses,
            local_addresses=self._facts.local_addresses,
            build=self._facts.build,
            tokens_per_s=self._facts.tokens_per_s,
            memory_bytes=self._facts.memory_bytes,
            stage=stage,
            shard=shard,
            version=version,
            held_generation=generation,
            checkpoints=self._checkpoints,
        )

    def _checkpoint_done(self, message: CheckpointDone) -> None:
        """One more that this server can begin from: the coordinator must know before a disk is lost."""
        fits = self.plan is not None and message.ledger_generation == self.plan.ledger_generation
        if fits:
            self._name_checkpoints((message.step,))

    def _name_checkpoints(self, steps: tuple[int, ...]) -> None:
        """Tells the coordinator of checkpoints that this server has not named yet."""
        known = sorted({*self._checkpoints, *steps}, reverse=True)[:CHECKPOINTS_NAMED_MAX]
        self._checkpoints = tuple(known)
        self._say_news()

    def _say_news(self) -> None:
        """What this node says of itself has changed: the coordinator hears it now, or when it is back."""
        if self._links.is_up(self._coordinator) and self._join_message() != self._joined:
            self._join()

    def _held(self) -> tuple[int, int, int, int]:
        """(stage, shard, version, ledger generation) of what this node holds, as `Join` wants it."""
        if self.server is not None:
            context = self.server.context
            return context.stage, context.shard, self.server.shard.version, context.generation
        starts = [record for record in self._facts.records if isinstance(record, ShardStarted)]
        if not starts:
            return self._facts.wished_stage, -1, -1, -1
        newest = starts[-1]
        commits = [
            record.step + 1
            for record in self._facts.records
            if isinstance(record, StepCommitted) and record.ledger_generation == newest.ledger_generation
        ]
        version = commits[-1] if commits else max(0, newest.checkpoint_step)
        begun = newest.checkpoint_step == -1 or newest.checkpoint_step in self._facts.checkpoints
        # The run's delay is not known yet, so the longest is assumed.
        needed = oldest_needed(version, delay=1)
        snapshots = [
            record
            for record in self._facts.records
            if isinstance(record, SnapshotWritten) and record.ledger_generation == newest.ledger_generation
        ]
        if not begun and not any(record.step <= needed for record in snapshots):
            # What it began from is gone, so the rest cannot be made again: this disk holds nothing of use.
            return self._facts.wished_stage, -1, -1, -1
        return newest.stage, newest.shard, version, newest.ledger_generation

    def _received(self, peer: NodeId, message: Message, now: float) -> None:
        if isinstance(message, Ping):
            if peer == self._coordinator:
                self._say_news()  # first: a coordinator that must decide asks, and goes by what it has heard
            self._out.send(peer, Pong(number=message.number))
        elif isinstance(message, Pong):
            pass
        elif isinstance(message, Bye):
            self._out.log("info", "peer says bye", peer=peer, reason=message.reason)
        elif isinstance(message, Work):
            self._work(peer, message, now)
        elif peer == self._coordinator:
            self._from_coordinator(message, now)

    def _from_coordinator(self, message: Message, now: float) -> None:
        match message:
            case Welcome():
                self._welcome(message, now)
            case Refused():
                self._out.log("error", "refused by the coordinator", reason=message.reason)
                self._out.add(Exit(f"refused: {message.reason}"))
            case PlanChanged():
                self._plan_changed(message, now)
            case StepReportStored():
                if self.server is not None:
                    self.server.reports_stored(message.step)
            case RunFinished():
                if not self._finished:
                    self._finished = True
                    self._report()
                    self._leave("finished")
            case _:
                pass

    def _welcome(self, message: Welcome, now: float) -> None:
        if message.config.config_hash() != message.config_hash:
            self._out.add(Exit("refused: the run's configuration does not have the hash that came with it"))
            return
        if self.config is not None and self.config != message.config:
            self._out.add(Exit("refused: the run's configuration changed while this node was away"))
            return
        starts = [record for record in self._facts.records if isinstance(record, ShardStarted)]
        if starts and starts[-1].config_hash != message.config_hash:
            self._out.add(Exit("refused: this state folder belongs to another configuration of the run"))
            return
        first = self.config is None
        self.config = message.config
        self.vocabulary = message.vocabulary
        if first:  # an owner who sees nothing more for a while shall know what for
            self._out.log("info", "joined", run=message.config.name, waiting_for=self.waiting_for())
        self._links.set_limits(message.config.limits.ping_s, message.config.limits.silent_s)
        self._begin_roles(now)

    def _plan_changed(self, message: PlanChanged, now: float) -> None:
        if self.plan is not None and message.plan.generation < self.plan.generation:
            self._out.count("barnraise_transport_rejected_messages_total", reason="version")
            self._out.log("warning", "plan of an older generation refused", generation=message.plan.generation)
            self._out.add(HangUp(self._coordinator, "version: a plan of an older generation"))
            return
        self.plan, self.stage, self._stage_reason = message.plan, message.stage, message.reason
        self._out.log("info", "plan", generation=message.plan.generation, stage=message.stage, reason=message.reason)
        self._begin_roles(now)

    def _begin_roles(self, now: float) -> None:
        """Starts, keeps or restarts the roles, as soon as run, plan and vocabulary are known."""
        if self.config is None or self.plan is None:
            return
        serving = self._facts.role == "server" and self.plan.stage_of(self.node) is not None
        if serving and self.plan.stage_of(self.node) == 0 and self._data is None:
            if not self._preparing:
                self._preparing = True
                self._out.compute(PrepareData(self.config))
            return
        if self.vocabulary == 0:
            return
        if serving:
            self._begin_server(now)
        elif self.server is not None:
            self.server.end()
            self.server = None
        hosted = serving and self._facts.computes and self.config.stages.collocated != "never"
        if self.stage >= 0 and (hosted or self._facts.role == "volunteer"):
            if self.volunteer is None:
                self.volunteer = VolunteerMachine(self.config, self.vocabulary, self._out, self._facts.incarnation)
            if self.volunteer.set_plan(self.plan, self.stage):
                for peer in (*self._links.live, *((self.node,) if serving else ())):
                    self.volunteer.link_up(peer)
        self._want_links(now)

    def _begin_server(self, now: float) -> None:
        assert self.config is not None and self.plan is not None
        if self.server is not None and self.server.context.generation == self.plan.ledger_generation:
            self.server.change_plan(self.plan)
            return
        unreported = self.server.end() if self.server is not None else ()
        records, self._unread = self._unread, []
        self.server = ServerMachine(
            self.node, self.config, self.vocabulary, self.plan, self._out, records, self._coordinator
        )
        self.server.take_over(unreported)
        self.server.start(now)
        self.server.link_up(self.node, "server", now)
        for peer in self._links.live:
            if peer != self._coordinator:
                self.server.link_up(peer, self._roles[peer], now)
        if self._links.is_up(self._coordinator):
            self.server.coordinator_here()

    # ---- work ----------------------------------------------------------------------------------------------------

    def _work(self, peer: NodeId, message: Work, now: float) -> None:
        both = isinstance(message, FOR_BOTH)
        tensors: tuple[TensorRef, ...] = getattr(message, "tensors", ())
        if isinstance(message, CheckpointDone) and self.plan is not None and peer == self.plan.decider:
            self._checkpoint_done(message)
        if self.server is not None and (both or not isinstance(message, FOR_VOLUNTEER)):
            self.server.handle(peer, message, now)
        elif not both and not isinstance(message, FOR_VOLUNTEER):
            self._out.drop(tensors)
        if self.volunteer is not None and (both or isinstance(message, FOR_VOLUNTEER)):
            self.volunteer.handle(peer, message, now)
        elif isinstance(message, FOR_VOLUNTEER):
            self._out.drop(tensors)
        if self._drain_until is not None and self._drained:
            self._leave(self._drained_reason)

    def _computed(self, job: Any, result: Any, now: float) -> None:
        if isinstance(job, PrepareData):
            vocabulary, data_hash, token_count = result
            self._data = DataReady(vocabulary=vocabulary, data_hash=data_hash, token_count=token_count)
            self._out.send(self._coordinator, self._data)
            self._begin_roles(now)
            return
        if self.server is not None:
            self.server.computed(job, result, now)
        if self.volunteer is not None:
            self.volunteer.computed(job, result, now)
        if self._drain_until is not None and self._drained:
            self._leave(self._drained_reason)

    def _failed(self, job: Any, reason: str, now: float) -> None:
        if isinstance(job, DEVICE_JOBS) and self.volunteer is not None:
            self.volunteer.failed(job, reason, now)
            return
        # A shard that cannot do its arithmetic must not guess: it stops, and the journal has everything.
        self._out.log("critical", "server job failed", job=type(job).__name__, reason=reason)
        self._out.add(Exit(f"failed: {type(job).__name__}: {reason}"))

    # ---- leaving -------------------------------------------------------------------------------------------------

    def _told(self, what: str, now: float) -> None:
        """`drain`: finish and leave; `suspend REASON`: the same, to come back later; `stop`: leave at once; `stop
        quota`: the same, while suspending."""
        if what.startswith("suspend "):
            reason = f"suspended: {what.removeprefix('suspend ')}"
            if self._facts.role != "volunteer":
                self._leave(reason)
                return
            self._drained_reason, what = reason, "drain"
        elif what == "drain":
            self._drained_reason = "drained"
        if what == "drain" and self.volunteer is not None and self._facts.role == "volunteer":
            self._drain_until = now + DRAIN_S
            self.volunteer.drain()
            if self._drained:
                self._leave(self._drained_reason)
        elif what == "stop quota":
            self._leave("suspended: quota")
        elif what in ("drain", "stop"):
            self._leave("stopped")

    @property
    def _drained(self) -> bool:
        return self.volunteer is None or self.volunteer.drained

    def _leave(self, reason: str) -> None:
        self._drain_until = None
        self._out.send(self._coordinator, Leave(reason=reason))
        for peer in self._links.live:
            self._out.send(peer, Bye(reason=reason))
        self._out.add(Exit(reason))

    # ---- reports -------------------------------------------------------------------------------------------------

    def waiting_for(self) -> str:
        """One sentence: what this node waits for, or nothing."""
        if self.config is None:
            return "the coordinator"
        if self.plan is None:
            return "the plan, which the coordinator makes when all servers are there"
        if self.stage < 0:
            return f"a place: {self._stage_reason}"
        if self._preparing and self._data is None:
            return "the data to be read"
        if self.vocabulary == 0:
            return "stage 0 to read the data"
        if self.server is not None:
            return self.server.waiting_for()
        return self.volunteer.waiting_for() if self.volunteer is not None else ""

    def _report(self) -> None:
        if not self._links.is_up(self._coordinator):
            return
        counters: dict[str, float] = {}
        if self.server is not None:
            counters.update(self.server.counters())
        if self.volunteer is not None:
            counters.update(self.volunteer.counters())
        state = "joining" if self.plan is None or self.stage < 0 else "training"
        if self._drain_until is not None:
            state = "draining"
        elif self.server is not None and not self.server.ready:
            state = "syncing"
        self._out.send(
            self._coordinator,
            NodeReport(state=state, waiting_for=self.waiting_for(), counters=counters),  # type: ignore[arg-type]
        )

    def _say_progress(self, now: float) -> None:
        """A volunteer's owner sees now and then what the computer does for the run."""
        if self._facts.role != "volunteer" or self.volunteer is None or now < self._say_at:
            return
        counters = self.volunteer.counters()
        tokens = counters["tokens"]
        self._say_at = now + PROGRESS_S
        if self._said_at == float("-inf"):
            self._say_at = now + FIRST_PROGRESS_S
        else:
            self._out.log(
                "info", "working" if tokens > self._said_tokens else "idle", stage=self.stage,
                microbatches=int(counters["microbatches"]),
                tokens_per_s=round(max(0.0, tokens - self._said_tokens) / (now - self._said_at), 1),
                waiting_for=self.waiting_for(),
            )  # fmt: skip
        self._said_at, self._said_tokens = now, tokens

    # ---- effects -------------------------------------------------------------------------------------------------

    def _take(self, now: float) -> list[Effect]:
        """Handles what this node says to itself until it has nothing more to say, then gives the effects away."""
        while messages := self._out.take_to_self():
            for message in messages:
                self._received(self.node, message, now)
        return self._out.take_effects()


def _due(time: float | None, now: float) -> bool:
    return time is not None and time <= now
