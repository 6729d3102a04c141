"""The machine of one node: its links, its conversation with the coordinator, and the roles that the plan gives it.

    LinkUp(coordinator) ─▶ Join ─▶ Welcome (membership, run) ─▶ PlanChanged ─▶ server machine and/or volunteer machine

A server that computes hosts both; what they say to each other goes through the same messages as between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from node.machine.facts import NodeFacts as NodeFacts
from node.machine.facts import join_message
from node.machine.jobs import DEVICE_JOBS, FindCheckpoints, PrepareData
from node.machine.kept_plan import Resumption
from node.machine.outbox import Outbox
from node.machine.progress import Progress
from node.machine.readable import ReadableCheckpoints
from node.machine.revocation import Revocation
from node.machine.wanted import Links
from node.machine.welcome import why_no_plan, why_not
from node.server.recovery import held
from node.server.server import ServerMachine
from node.volunteer.volunteer import VolunteerMachine
from protocol.base.ids import NodeId, TensorRef
from protocol.base.machine import (
    AddressesChanged,
    CheckpointsFound,
    Computed,
    ComputeFailed,
    DeviceLost,
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
    Allowance,
    Bye,
    CheckpointDone,
    CoordinatorSeen,
    DataReady,
    Flush,
    Forget,
    InputAnswer,
    Join,
    Lease,
    Leave,
    Message,
    News,
    NodeReport,
    Parameters,
    Ping,
    PlanChanged,
    Pong,
    Refused,
    Revoked,
    RunFinished,
    StepClosed,
    StepReportStored,
    Verdict,
    VersionReady,
    Welcome,
    Work,
)
from protocol.run.plan import Plan
from protocol.run.run import RunConfig
from protocol.trust.membership import Trust

REPORT_S = 2.0
"""Seconds between reports to the coordinator."""
DRAIN_S = 60.0
"""A node that drains waits so long for verdicts on what it sent (state-and-trust 4.5)."""
DEVICE_LOST_S = 600.0
DEVICE_LOST_MAX = 3
"""A driver that crashes now and then is lived with; one that crashes a fourth time within ten minutes is not."""
FOR_VOLUNTEER = (Lease, Flush, Allowance, Forget, InputAnswer, Parameters, VersionReady)
FOR_BOTH = (Verdict, StepClosed)


class NodeMachine:
    """One node. See `protocol.base.machine` for the doors.

    Args:
        coordinator: its node id; `coordinator_addresses` come from the join link.
        keys: numbers for tensors, shared with the driver.
        trust: what the driver admits peers by.
    """

    def __init__(
        self,
        node: NodeId,
        facts: NodeFacts,
        coordinator: NodeId,
        coordinator_addresses: tuple[str, ...],
        keys: count[int],
        trust: Trust,
    ) -> None:
        self.node = node
        self._facts = facts
        self._unread = facts.records
        """Records whose tensors no server machine has taken yet: later ledgers have nothing on this disk."""
        self._coordinator = coordinator
        self._coordinator_addresses = coordinator_addresses
        self._out = Outbox(node, keys)
        self._links = Links(self._out, ping_s=2.0, silent_s=6.0)
        self._bans = Revocation(self._out, trust, serves=facts.role == "server")
        self._membership = b""
        self._roles: dict[NodeId, str] = {}
        """What the live peers' credentials say."""
        self._addresses = facts.addresses
        self._readable = ReadableCheckpoints(self._out, facts.checkpoints)
        self._resumption = Resumption(facts.kept, facts.records)
        self._joined: Join | None = None
        """What the coordinator was told last."""
        self.config: RunConfig | None = None
        self.vocabulary = 0
        self.plan: Plan | None = None
        self.stage = -1
        self._stage_reason = "not joined yet"
        self.news: News | None = None
        self.server: ServerMachine | None = None
        self.volunteer: VolunteerMachine | None = None
        self._data: DataReady | None = None
        self._preparing = False
        self._report_at = 0.0
        self._progress = Progress(self._out)
        self._drain_until: float | None = None
        self._drained_reason = "drained"
        self._finished = False
        self._lost_at: list[float] = []

    # ---- the doors -----------------------------------------------------------------------------------------------

    def start(self, now: float) -> Sequence[Effect]:
        self._report_at = now + REPORT_S
        self._resumption.without_coordinator(now)
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
                self._received(fact.peer, fact.message, now, fact.size)
            case Computed():
                self._computed(fact.job, fact.result, now)
            case ComputeFailed():
                self._failed(fact.job, fact.reason, now)
            case Persisted():
                record = self._out.unwritten.pop(fact.record_number)
                if self.server is not None:
                    self.server.persisted(record, now)
            case CheckpointsFound():
                self._readable.add(fact.steps)
                self._say_news()
            case AddressesChanged():
                self._addresses = fact.addresses
                self._say_news()
            case DeviceLost():
                self._device_lost(fact, now)
            case Told():
                self._told(fact.what, now)
        return self._take(now)

    def wake_at(self) -> float | None:
        times: list[float | None] = [self._report_at, self._links.wake_at(), self._drain_until, self._resumption.at]
        if self.server is not None:
            times.append(self.server.wake_at())
        if self.volunteer is not None:
            times.append(self.volunteer.wake_at())
        return min((time for time in times if time is not None), default=None)

    def wake(self, now: float) -> Sequence[Effect]:
        self._links.wake(now)
        if _due(self._resumption.at, now):
            self._resume(now)
        self._bans.look(self.plan, now)
        if self.server is not None and _due(self.server.wake_at(), now):
            self.server.wake(now)
        if self.volunteer is not None and _due(self.volunteer.wake_at(), now):
            self.volunteer.wake(now)
        if now >= self._report_at:
            self._report_at = now + REPORT_S
            if self._facts.role == "volunteer" and self.volunteer is not None:
                self._progress.say(self.stage, self.volunteer.counters(), self.waiting_for(), now)
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
        if self._bans.is_banned(fact.peer):  # it was admitted a moment before the list came
            self._out.add(HangUp(fact.peer, "credential: banned"))
            return
        self._links.up(fact.peer, now)
        self._roles[fact.peer] = fact.role
        if fact.peer == self._coordinator:
            self._bans.coordinator(here=True)
            self._resumption.coordinator_here()
            self._join()
            if self.server is not None:
                self.server.coordinator_here()
            return
        self._bans.link_up(fact.peer, fact.role)
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
            self._bans.coordinator(here=False)
            self._resumption.without_coordinator(now)
            if self.server is not None:
                self.server.coordinator_gone()
            return
        self._bans.link_down(fact.peer)
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
        return join_message(self._facts, self._addresses, self._held(), self._readable.steps)

    def _say_news(self) -> None:
        """What this node says of itself has changed: the coordinator hears it now, or when it is back."""
        if self._links.is_up(self._coordinator) and self._join_message() != self._joined:
            self._join()

    def _held(self) -> tuple[int, int, int, int]:
        """(stage, shard, version, ledger generation) of what this node holds, as `Join` wants it."""
        if self.server is not None:
            context = self.server.context
            return context.stage, context.shard, self.server.shard.held_version, context.generation
        config = self.config or (self._facts.kept and self._facts.kept.config)
        delay = config.batch.delay if config else 1  # the longest, where the run is not known
        return held(self._facts.records, delay, self._readable.steps) or (self._facts.wished_stage, -1, -1, -1)

    def _received(self, peer: NodeId, message: Message, now: float, size: float = 0.0) -> None:
        if self._bans.is_banned(peer) or (self.server is not None and not self.server.may_speak(peer, now)):
            self._out.drop(getattr(message, "tensors", ()))
        elif isinstance(message, Revoked):
            for banned in self._bans.take(peer, message):
                self._out.add(HangUp(banned, "credential: banned"))
                self._link_down(LinkDown(banned, "banned"), now)
            if self.server is not None:
                self.server.ban(self._bans.banned)
        elif isinstance(message, CoordinatorSeen):
            self._bans.on_seen(peer, message)
        elif isinstance(message, Ping):
            if peer == self._coordinator:
                self._pinged(message)
            else:
                self._out.send(peer, Pong(number=message.number))
        elif isinstance(message, Bye):
            self._out.log("info", "peer says bye", peer=peer, reason=message.reason)
        elif isinstance(message, Work):
            self._work(peer, message, now, size)
        elif peer == self._coordinator:
            self._from_coordinator(message, now)

    def _pinged(self, message: Ping) -> None:
        """The answer comes behind the news: a coordinator that must decide asks, and goes by what it has heard."""
        if message.look and self._facts.role == "server" and self.config is not None:
            self._readable.look(self.config, message.number)
            return
        self._say_news()
        self._out.send(self._coordinator, Pong(number=message.number))

    def _looked(self, found: tuple[int, ...] | None) -> None:
        """Says which checkpoints lie there now (None: nobody can tell), and answers those who asked."""
        assert self.config is not None
        numbers = self._readable.found(self.config, found)
        self._say_news()
        for number in numbers:
            self._out.send(self._coordinator, Pong(number=number))

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
            case News():
                self.news = message
            case RunFinished():
                if not self._finished:
                    self._finished = True
                    self._report()
                    self._leave("finished")
            case _:
                pass

    def _welcome(self, message: Welcome, now: float) -> None:
        refusal = why_not(message, self.config, self._facts.records, self._facts.memory_bytes)
        if refusal:
            self._out.add(Exit(f"refused: {refusal}"))
            return
        if self._membership and message.membership != self._membership:
            self._bans.renewed(message.membership)
        self._membership = message.membership
        first = self.config is None
        self.config = message.config
        self.vocabulary = message.vocabulary
        if first:  # an owner who sees nothing more for a while shall know what for
            self._out.log("info", "joined", run=message.config.name, waiting_for=self.waiting_for())
        self._links.set_limits(message.config.limits.ping_s, message.config.limits.silent_s)
        self._begin_roles(now)

    def _resume(self, now: float) -> None:
        """No coordinator for a while: goes on by the plan on the disk."""
        kept = self._resumption.take(serves=self._facts.role == "server")
        if kept is None or self.plan is not None:
            return
        self.config, self.vocabulary = kept.config, kept.vocabulary
        self._links.set_limits(kept.config.limits.ping_s, kept.config.limits.silent_s)
        self._out.log("warning", "goes on without the coordinator", generation=kept.plan.generation, stage=kept.stage)
        self.plan, self.stage, self._stage_reason = kept.plan, kept.stage, kept.reason
        self._begin_roles(now)

    def _plan_changed(self, message: PlanChanged, now: float) -> None:
        self._resumption.forget()
        generation = message.plan.generation
        if self.plan is not None and message.plan != self.plan and generation <= self.plan.generation:
            self._out.count("barnraise_transport_rejected_messages_total", reason="version")
            self._out.log("warning", "plan of an older generation refused", generation=generation)
            self._out.add(HangUp(self._coordinator, "version: a plan of an older generation"))
            return
        if self.config is not None and (fault := why_no_plan(message.plan, self.config)):
            self._out.add(Exit(f"refused: {fault}"))
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
            self.server.change_plan(self.plan, now)
            return
        unreported = self.server.end() if self.server is not None else ()
        records, self._unread = self._unread, []
        self.server = ServerMachine(
            self.node, self.config, self.vocabulary, self.plan, self._out, records, self._coordinator,
            self._facts.secret, self._facts.incarnation,
        )  # fmt: skip
        self.server.ban(self._bans.banned)
        self.server.take_over(unreported)
        self.server.start(now)
        self.server.link_up(self.node, "server", now)
        for peer in self._links.live:
            if peer != self._coordinator:
                self.server.link_up(peer, self._roles[peer], now)
        if self._links.is_up(self._coordinator):
            self.server.coordinator_here()

    # ---- work ----------------------------------------------------------------------------------------------------

    def _work(self, peer: NodeId, message: Work, now: float, size: float = 0.0) -> None:
        both = isinstance(message, FOR_BOTH)
        tensors: tuple[TensorRef, ...] = getattr(message, "tensors", ())
        decides = self.plan is not None and (self.plan.decider, self.plan.ledger_generation)
        if isinstance(message, CheckpointDone) and (peer, message.ledger_generation) == decides:
            self._readable.add((message.step,))  # the coordinator must know before a disk is lost
            self._say_news()
        if self.server is not None and (both or not isinstance(message, FOR_VOLUNTEER)):
            self.server.handle(peer, message, now, size)
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
        if isinstance(job, FindCheckpoints):
            self._looked(result)
            return
        # Each result has one owner: what a device made is no server's to drop when other ledgers begin.
        if isinstance(job, DEVICE_JOBS):
            if self.volunteer is not None:
                self.volunteer.computed(job, result, now)
        elif self.server is not None:
            self.server.computed(job, result, now)
        if self._drain_until is not None and self._drained:
            self._leave(self._drained_reason)

    def _failed(self, job: Any, reason: str, now: float) -> None:
        if isinstance(job, DEVICE_JOBS) and self.volunteer is not None:
            self.volunteer.failed(job, reason, now)
            return
        if isinstance(job, FindCheckpoints):
            self._out.log("warning", "checkpoints cannot be looked for", reason=reason)
            self._looked(None)
            return
        if self.server is not None and self.server.failed(job, reason, now):
            return
        # A shard that cannot do its arithmetic must not guess: it stops, and the journal has everything.
        self._out.log("critical", "server job failed", job=type(job).__name__, reason=reason)
        self._out.add(Exit(f"failed: {type(job).__name__}: {reason}"))

    def _device_lost(self, fact: DeviceLost, now: float) -> None:
        """Goes on with a fresh one; a device that is lost again and again is of no use."""
        self._lost_at = [when for when in self._lost_at if when > now - DEVICE_LOST_S] + [now]
        self._out.log("error", "device lost", reason=fact.reason, times=len(self._lost_at))
        self._out.count("barnraise_errors_total", component="compute")
        if len(self._lost_at) > DEVICE_LOST_MAX:
            self._leave(f"failed: the device was lost {len(self._lost_at)} times in ten minutes: {fact.reason}")
        elif self.volunteer is not None:
            self.volunteer.device_lost(fact.reason)
            if self._drain_until is not None and self._drained:
                self._leave(self._drained_reason)

    # ---- leaving -------------------------------------------------------------------------------------------------

    def _told(self, what: str, now: float) -> None:
        """`drain`: finish and leave; `suspend REASON`: the same, to come back later; `yield REASON`: the device is
        gone already, so everything is handed back at once, to come back later; `stop`: leave at once; `stop
        quota`: the same, while suspending."""
        if what.startswith("yield "):
            reason = what.removeprefix("yield ")
            if self.volunteer is not None:
                self.volunteer.hand_back(f"the owner's computer: {reason}")
            self._leave(f"suspended: {reason}")
            return
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
            self.volunteer.drain(now)
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

    @property
    def has_coordinator(self) -> bool:
        return self._links.is_up(self._coordinator)

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
            NodeReport(
                state=state,  # type: ignore[arg-type]
                waiting_for=self.waiting_for(),
                alert=self.server.alert() if self.server is not None else "",
                ledger_generation=self.server.context.generation if self.server is not None else -1,
                linked=tuple(filter(self._links.is_up, self.server.context.plan.server_nodes())) if self.server else (),
                counters=counters,
            ),
        )

    # ---- effects -------------------------------------------------------------------------------------------------

    def _take(self, now: float) -> list[Effect]:
        """Handles what this node says to itself until it has nothing more to say, then gives the effects away."""
        while messages := self._out.take_to_self():
            for message in messages:
                self._received(self.node, message, now)
        return self._out.take_effects()


def _due(time: float | None, now: float) -> bool:
    return time is not None and time <= now
