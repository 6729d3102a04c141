"""The machine of one node: its links, and its conversation with the coordinator; what it does for the run is `Roles`.

LinkUp(coordinator) ─▶ Join ─▶ Welcome (membership, run) ─▶ PlanChanged ─▶ Roles
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec

from node.machine.drain import Drain
from node.machine.facts import NodeFacts, join_message
from node.machine.jobs import Benchmark, FindCheckpoints, PrepareData
from node.machine.kept_plan import Resumption
from node.machine.outbox import Outbox
from node.machine.progress import Progress
from node.machine.readable import ReadableCheckpoints
from node.machine.revocation import Revocation
from node.machine.roles import Roles
from node.machine.stalls import Stalls
from node.machine.survey import SurveyDesk
from node.machine.wanted import Links
from node.machine.welcome import why_no_plan, why_not
from node.server.recovery import StateLostError
from node.server.server import ServerMachine
from node.volunteer.volunteer import VolunteerMachine
from protocol.base.ids import NodeId
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
    LinkMoved,
    LinkUp,
    Persisted,
    Received,
    Told,
    WorkGoesOn,
)
from protocol.messages import (
    Bye,
    CheckpointDone,
    CoordinatorSeen,
    DrainOrder,
    Join,
    Leave,
    Message,
    News,
    Ping,
    PlanChanged,
    Pong,
    Refused,
    Revoked,
    RunFinished,
    StepReportStored,
    Survey,
    Welcome,
    Work,
)
from protocol.run.plan import Plan
from protocol.run.run import RunConfig
from protocol.trust.membership import Trust

REPORT_S = 2.0
"""Seconds between reports to the coordinator; `limits.ping_s`, where it is more, between those of volunteers."""


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
        self._coordinator = coordinator
        self._coordinator_addresses = coordinator_addresses
        self._stalls = Stalls() if facts.role == "server" else None
        self._out = Outbox(node, keys, self._stalls)
        self._links = Links(self._out, ping_s=2.0, silent_s=6.0, asks=facts.asks)
        self._bans = Revocation(self._out, trust, serves=facts.role == "server")
        self._membership = b""
        self._readable = ReadableCheckpoints(self._out, facts.checkpoints)
        self._roles = Roles(node, facts, coordinator, self._out, self._links, self._bans, self._readable)
        self._survey = SurveyDesk(node, self._out)
        self._resumption = Resumption(facts.kept, facts.records)
        self._joined: Join | None = None
        """What the coordinator was told last."""
        self.news: News | None = None
        self._report_at = 0.0
        self._closed = -1
        """The newest closed step at the last report."""
        self._progress = Progress(self._out)
        self._drain = Drain()
        self._finished = False

    # ---- what others look at -------------------------------------------------------------------------------------

    @property
    def config(self) -> RunConfig | None:
        return self._roles.config

    @property
    def plan(self) -> Plan | None:
        return self._roles.plan

    @property
    def stage(self) -> int:
        return self._roles.stage

    @property
    def server(self) -> ServerMachine | None:
        return self._roles.server

    @property
    def volunteer(self) -> VolunteerMachine | None:
        return self._roles.volunteer

    @property
    def has_coordinator(self) -> bool:
        return self._links.is_up(self._coordinator)

    def waiting_for(self) -> str:
        """One sentence: what this node waits for, or nothing."""
        stalled = "" if self._stalls is None else self._stalls.sentence()
        return stalled or self._roles.waiting_for()

    # ---- the doors -----------------------------------------------------------------------------------------------

    def start(self, now: float) -> Sequence[Effect]:
        self._report_at = now + REPORT_S
        self._resumption.without_coordinator(now)
        self._want_links(now)
        return self._take(now)

    def handle(self, fact: Input, now: float) -> Sequence[Effect]:
        if self._stalls is not None and isinstance(fact, Computed | ComputeFailed):
            self._stalls.ended(fact.job, fact.result if isinstance(fact, Computed) else None)
        try:
            self._handle(fact, now)
        except StateLostError as error:
            self._lose_state(str(error))
        return self._take(now)

    def _lose_state(self, reason: str) -> None:
        """Other ledgers must begin: the coordinator hears on a new link that this node has nothing any more."""
        self._roles.lose_state(reason)
        self._out.add(HangUp(self._coordinator, "the state here is lost"))

    def _handle(self, fact: Input, now: float) -> None:
        match fact:
            case LinkUp():
                self._link_up(fact, now)
            case LinkDown():
                self._link_down(fact, now)
            case LinkMoved():
                self._roles.link_moved(fact.peer, fact.silent_s, now)
            case Received():
                self._links.heard(fact.peer, now)
                self._received(fact.peer, fact.message, now, fact.size)
            case Computed():
                self._computed(fact.job, fact.result, now)
            case ComputeFailed():
                self._failed(fact.job, fact.reason, now)
            case WorkGoesOn():
                if self._stalls is not None:
                    self._stalls.goes_on(fact.job, fact.silent_s)
            case Persisted():
                record = self._out.written(fact.record_number)
                if self.server is not None:
                    self.server.persisted(record, now)
            case CheckpointsFound():
                self._readable.add(fact.steps)
                self._say_news()
            case AddressesChanged():
                self._facts = replace(self._facts, addresses=fact.addresses, local_addresses=fact.local_addresses)
                self._say_news()
            case DeviceLost():
                self._device_lost(fact, now)
            case Told():
                self._told(fact.what, now)

    def wake_at(self) -> float | None:
        first = self._report_at  # asked after every input, so no list is made of these
        for time in (self._links.wake_at(), self._drain.until_s, self._resumption.at, self._roles.wake_at()):
            if time is not None and time < first:
                first = time
        return first

    @property
    def _report_every_s(self) -> float:
        """Of servers steps and places depend; who computes reports no more often than it would be asked whether it
        lives, so that a coordinator of ten thousand can be spared."""
        if self.config is None or self._facts.role == "server" or self._drain.until_s is not None:
            return REPORT_S
        return max(REPORT_S, self.config.limits.ping_s)

    def wake(self, now: float) -> Sequence[Effect]:
        self._links.wake(now)
        if _due(self._resumption.at, now):
            try:
                self._resume(now)
            except StateLostError as error:  # the kept plan begins what this disk cannot go on with
                self._lose_state(str(error))
        self._bans.look(self.plan, now)
        self._roles.wake(now)
        self._go_on_elsewhere(now)
        if now >= self._report_at:
            self._report_at = now + self._report_every_s
            if self._stalls is not None:
                self._stalls.look(now)
            if self._facts.role == "volunteer" and self.volunteer is not None:
                self._progress.say(self.stage, self.volunteer.counters(), self.waiting_for(), now)
            self._report()
        if _due(self._drain.until_s, now):
            self._leave(self._drain.time_over)
        return self._take(now)

    def check(self) -> None:
        self._roles.check()

    # ---- links ---------------------------------------------------------------------------------------------------

    def _want_links(self, now: float) -> None:
        peers = {self._coordinator: (self._coordinator_addresses, True)} | self._survey.peers() | self._roles.peers()
        self._links.want(peers, now)

    def _link_up(self, fact: LinkUp, now: float) -> None:
        if self._bans.is_banned(fact.peer):  # it was admitted a moment before the list came
            self._out.add(HangUp(fact.peer, "credential: banned"))
            return
        self._links.up(fact.peer, now)
        self._roles.credentials[fact.peer] = fact.role
        if fact.peer == self._coordinator:
            self._bans.coordinator(here=True)
            self._resumption.coordinator_here(now)
            self._join(first=True)
            self._bans.show(self._coordinator)
            if self.server is not None:
                self.server.coordinator_here()
            return
        self._bans.link_up(fact.peer, fact.role)
        self._roles.link_up(fact.peer, fact.role, now)

    def _link_down(self, fact: LinkDown, now: float) -> None:
        was_up = self._roles.credentials.pop(fact.peer, None) is not None
        self._links.down(fact.peer, now)
        if not was_up:
            if fact.peer == self._coordinator:
                self._resumption.dial_failed(now)
            return
        self._out.log("info", "link down", peer=fact.peer, reason=fact.reason)
        if fact.peer == self._coordinator:
            self._bans.coordinator(here=False)
            self._resumption.without_coordinator(now)
            if self.server is not None:
                self.server.coordinator_gone()
            return
        self._bans.link_down(fact.peer)
        self._roles.link_down(fact.peer, now)

    # ---- the coordinator -----------------------------------------------------------------------------------------

    def _join(self, first: bool = False) -> None:
        """Says what this node is; `first` on a link: also by which plan it goes."""
        self._joined = message = self._join_message()
        if first and (known := self._known_plan()) is not None:
            config, plan = known
            message = msgspec.structs.replace(message, plan=plan, config_hash=config.config_hash())
        self._out.send(self._coordinator, message)
        if self._roles.data is not None and self.stage == 0:  # who has lost its place there has no say in it
            self._out.send(self._coordinator, self._roles.data)

    def _known_plan(self) -> tuple[RunConfig, Plan] | None:
        """What a server goes by, or would if the coordinator stayed away: the run and its plan."""
        kept = self._facts.kept
        if self._facts.role != "server":
            return None
        if self.plan is not None and self.config is not None:
            return self.config, self.plan
        return None if kept is None else (kept.config, kept.plan)

    def _join_message(self) -> Join:
        """What this node would say of itself now."""
        held, speed = self._roles.held(self._readable.steps), self._survey.tokens_per_s(self.config)
        copies = self._roles.copies_named()
        return join_message(self._facts, held, self._readable.steps, speed, copies)

    def _say_news(self) -> None:
        """What this node says of itself has changed: the coordinator hears it now, or when it is back."""
        if self._links.is_up(self._coordinator) and self._join_message() != self._joined:
            self._join()

    def _received(self, peer: NodeId, message: Message, now: float, size: float = 0.0) -> None:
        if self._bans.is_banned(peer) or (self.server is not None and not self.server.may_speak(peer, now)):
            self._out.drop(getattr(message, "tensors", ()))
        elif isinstance(message, Work):  # nearly all are
            self._work(peer, message, now, size)
        elif isinstance(message, Revoked):
            linked = self._bans.take(peer, message)
            if self.server is not None:
                self.server.ban(self._bans.banned)
            for banned in linked:
                self._out.add(HangUp(banned, "credential: banned"))
                self._link_down(LinkDown(banned, "banned"), now)
        elif isinstance(message, CoordinatorSeen):
            self._bans.on_seen(peer, message)
        elif isinstance(message, Ping):
            if peer == self._coordinator:
                self._pinged(message)
            else:
                self._out.send(peer, Pong(number=message.number))
        elif isinstance(message, Bye):
            self._out.log("info", "peer says bye", peer=peer, reason=message.reason)
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
        numbers = self._readable.found(found)
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
            case Survey():
                if self.plan is None and self.config is not None and self._facts.role == "server":
                    self._survey.take(message, self.config, self._facts.computes)
                    self._want_links(now)
            case PlanChanged():
                self._plan_changed(message, now)
            case StepReportStored():
                if self.server is not None:
                    self.server.reports_stored(message.step)
            case News():
                self.news = message
                self._leave_if_drained(now)
            case DrainOrder():
                self._drained_by_operator(message, now)
            case RunFinished():
                if not self._finished:
                    self._finished = True
                    self._report()
                    self._leave("finished")
            case _:
                pass

    def _welcome(self, message: Welcome, now: float) -> None:
        refusal = why_not(
            message, self.config, self._facts.records, self._facts.memory_bytes, serves=self._facts.role == "server"
        )
        if refusal:
            self._out.add(Exit(f"refused: {refusal}"))
            return
        if self._membership and message.membership != self._membership:
            self._bans.renewed(message.membership)
        self._membership = message.membership
        self._resumption.welcome()
        first = self.config is None
        config = message.config
        if self.config is not None and self.config.settles(config):
            config = self.config
        self._roles.know(config, message.vocabulary or self._roles.vocabulary)
        if first:  # an owner who sees nothing more for a while shall know what for
            self._out.log("info", "joined", run=message.config.name, waiting_for=self.waiting_for())
        self._links.set_limits(message.config.limits.ping_s, message.config.limits.silent_s)
        self._begin_roles(now)

    def _resume(self, now: float) -> None:
        """No coordinator for a while, or none that knows the run: goes on by the plan on the disk."""
        kept = self._resumption.take(serves=self._facts.role == "server")
        if kept is None or self.plan is not None:
            return
        self._roles.know(kept.config, kept.vocabulary)
        self._links.set_limits(kept.config.limits.ping_s, kept.config.limits.silent_s)
        self._out.log("warning", "goes on without the coordinator", generation=kept.plan.generation, stage=kept.stage)
        self._roles.place(kept.plan, kept.stage, kept.reason)
        self._begin_roles(now)

    def _plan_changed(self, message: PlanChanged, now: float) -> None:
        generation, known = message.plan.generation, self._known_plan()
        before = known[1] if known is not None else self.plan
        older = before is not None and (
            (message.plan != before and generation <= before.generation)
            or message.plan.ledger_generation < before.ledger_generation
        )
        if older:
            self._out.count("barnraise_transport_rejected_messages_total", reason="version")
            self._out.log("warning", "plan of an older generation refused", generation=generation)
            self._out.add(HangUp(self._coordinator, "version: a plan of an older generation"))
            return
        if self.config is not None and (fault := why_no_plan(message.plan, self.config)):
            self._out.add(Exit(f"refused: {fault}"))
            return
        self._resumption.forget()
        self._survey.over()
        news = self.plan is None or generation > self.plan.generation
        if message.plan.undone and (self.plan is None or self.plan.ledger_generation < message.plan.ledger_generation):
            self._readable.undo_after(message.plan.restore_step)
        self._roles.place(message.plan, message.stage, message.reason)
        self._out.log("info", "plan", generation=message.plan.generation, stage=message.stage, reason=message.reason)
        self._begin_roles(now)
        if news and self.server is not None:  # a coordinator that did not know its plan has not believed our reports
            self.server.coordinator_here()
        if message.plan.held:
            self._report()  # the run waits until every server has said that it has this plan

    def _begin_roles(self, now: float) -> None:
        if self._roles.begin(now):
            self._want_links(now)

    # ---- work ----------------------------------------------------------------------------------------------------

    def _work(self, peer: NodeId, message: Work, now: float, size: float = 0.0) -> None:
        decides = self.plan is not None and (self.plan.decider, self.plan.ledger_generation)
        if isinstance(message, CheckpointDone) and (peer, message.ledger_generation) == decides:
            self._readable.add((message.step,))  # the coordinator must know before a disk is lost
            self._say_news()
        self._roles.work(peer, message, now, size)
        self._leave_if_drained(now)

    def _computed(self, job: Any, result: Any, now: float) -> None:
        if isinstance(job, PrepareData):
            if (ready := self._roles.prepared(job, *result)) is not None:
                self._out.send(self._coordinator, ready)
            self._begin_roles(now)
            return
        if isinstance(job, FindCheckpoints):
            self._looked(result)
            return
        if isinstance(job, Benchmark):
            self._survey.measured(result)
            self._say_news()
            return
        self._roles.computed(job, result, now)
        self._leave_if_drained(now)

    def _failed(self, job: Any, reason: str, now: float) -> None:
        if isinstance(job, FindCheckpoints):
            self._out.log("warning", "checkpoints cannot be looked for", reason=reason)
            self._looked(None)
            return
        if isinstance(job, Benchmark):
            self._out.log("warning", "the device cannot be measured", reason=reason)
            self._survey.measured(0.0)
            return
        if isinstance(job, PrepareData) and self._roles.cannot_read(job, reason, now):
            self._out.log("error", "the data cannot be read", reason=reason)
            self._begin_roles(now)
            self._report()
            return
        if self._roles.failed(job, reason, now):
            return
        # A shard that cannot do its arithmetic must not guess: it stops, and the journal has everything.
        self._out.log("critical", "server job failed", job=type(job).__name__, reason=reason)
        self._out.add(Exit(f"failed: {type(job).__name__}: {reason}"))

    def _device_lost(self, fact: DeviceLost, now: float) -> None:
        if reason := self._roles.device_lost(fact.reason, now):
            self._leave(reason)
        else:
            self._leave_if_drained(now)

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
        reason = "drained"
        if what.startswith("suspend "):
            reason = f"suspended: {what.removeprefix('suspend ')}"
            if self._facts.role != "volunteer":
                self._leave(reason)
                return
            what = "drain"
        if what == "drain" and self.volunteer is not None and self._facts.role == "volunteer":
            self._drain.begin(reason, now)
            self._roles.leaving = True
            self.volunteer.drain(now)
            self._leave_if_drained(now)
        elif what == "stop quota":
            self._leave("suspended: quota")
        elif what in ("drain", "stop"):
            self._leave("stopped")

    def _drained_by_operator(self, message: DrainOrder, now: float) -> None:
        """As its owner may: a volunteer ends what it has. A server goes only where it holds nothing of the run."""
        self._out.log("warning", "the operator lets this node go", reason=message.reason)
        if self._facts.role == "volunteer":
            self._told("drain", now)
        elif self.server is None:
            self._leave("drained by the operator")

    def _go_on_elsewhere(self, now: float) -> None:
        """A volunteer that was moved has finished with its old stage; a server has what new ledgers begin with."""
        if self._roles.has_restored or self._roles.has_moved_out(now):
            self._begin_roles(now)

    def _leave_if_drained(self, now: float) -> None:
        self._go_on_elsewhere(now)
        if self._drain.until_s is None or (self.volunteer is not None and not self.volunteer.drained):
            return
        if self.has_coordinator and self._drain.asks_for_news(self.news, now):
            self._report()
        elif not (self.has_coordinator and self._drain.waits_for_news(self.news)):
            self._leave(self._drain.reason)

    def _leave(self, reason: str) -> None:
        self._drain.end()
        self._out.send(self._coordinator, Leave(reason=reason))
        for peer in self._links.live:
            self._out.send(peer, Bye(reason=reason))
        self._out.add(Exit(reason))

    def _report(self) -> None:
        closed = -1 if self.server is None else self.server.context.closed
        if closed == self._closed and self._roles.copies.named():
            self._say_news()  # whoever holds the step up may be lost, and what is held here of it counts then
        self._closed = closed
        if self._links.is_up(self._coordinator):
            report = self._roles.report(draining=self._drain.until_s is not None)
            if self._stalls is not None:
                counters = {**report.counters, "stalled_s": round(self._stalls.seconds, 1)}
                report = msgspec.structs.replace(report, waiting_for=self.waiting_for(), counters=counters)
            self._out.send(self._coordinator, report)

    # ---- effects -------------------------------------------------------------------------------------------------

    def _take(self, now: float) -> list[Effect]:
        """Handles what this node says to itself until it has nothing more to say, then gives the effects away."""
        while messages := self._out.take_to_self():
            for message in messages:
                try:
                    self._received(self.node, message, now)
                except StateLostError as error:
                    self._lose_state(str(error))
        return self._out.take_effects()


def _due(time: float | None, now: float) -> bool:
    return time is not None and time <= now
