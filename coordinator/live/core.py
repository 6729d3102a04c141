"""The coordinator's machine: admits nodes, keeps the plan in force, stores what the run reports.

Training needs it only to begin and to change: while it is away, steps are decided, sealed and committed by the servers
alone (state-and-trust 4.3, 4.5). Nothing is said to a node before it is durable: a generation, a spent invite, a
membership's serial, the vocabulary, the acknowledgement of a step.

This file routes inputs; the parts it is made of are `roster` (links), `admission` (invites and bans), `seating`
(places and plan), `crew` (stages), `history` (steps), `signals` (what nodes say to each other). They write their
effects into one `Outbox`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from coordinator.live.admission import Admission
from coordinator.live.adoption import unexplained
from coordinator.live.auditors import Auditors
from coordinator.live.bans import Bans
from coordinator.live.believable import fault_of_join, fault_of_report
from coordinator.live.bulletin import LAST_NEWS_S, Bulletin, LossCurve
from coordinator.live.crew import Crew
from coordinator.live.draining import drain
from coordinator.live.giving import Giving
from coordinator.live.history import History
from coordinator.live.join_rates import JoinRates
from coordinator.live.measured_links import NetworkBook
from coordinator.live.memberships import Memberships
from coordinator.live.naming import Naming
from coordinator.live.orders import Adopt, ChangeRun, DrainNode, FetchTrace, NameNode, Order, PauseRun, RollBack
from coordinator.live.outbox import Outbox
from coordinator.live.records import DataRow, StepRow, StoredState
from coordinator.live.reported import Reported
from coordinator.live.roster import MEMBERS_MAX, LeaveReason, Member, Roster, sweep_s
from coordinator.live.seating import Placement
from coordinator.live.signals import Helpers, Signalling
from coordinator.live.status import build_status, run_state
from coordinator.live.throughput import benchmarked_flops_per_s
from coordinator.live.tracing import Tracing
from protocol.base.ids import NodeId
from protocol.base.machine import (
    Effect,
    Input,
    LinkDown,
    LinkUp,
    Ordered,
    Persisted,
    PlanReady,
    Received,
    Told,
    WallClockMoved,
)
from protocol.link.reach import host_of
from protocol.messages import (
    Blamed,
    Bye,
    DataReady,
    Join,
    Leave,
    LinkReport,
    Message,
    NodeReport,
    Ping,
    Pong,
    Revoked,
    RunFinished,
    Signal,
    Spans,
    StepReport,
    StepReportStored,
    Welcome,
    Wrote,
)
from protocol.run.run import RunConfig
from protocol.schedule.profile import NetworkFile
from protocol.trust.membership import Invite, JoinRole, Membership, Revocations
from protocol.trust.thanks import Thanks


class CoordinatorMachine:
    """See the module. `status()` may be called at any time between two inputs."""

    def __init__(
        self,
        config: RunConfig,
        run_id: bytes,
        generation: int,
        stored: StoredState,
        sign_membership: Callable[[Membership], bytes],
        sign_revocations: Callable[[Revocations], bytes],
        sign_thanks: Callable[[Thanks], bytes],
        wall_offset_s: float = 0.0,
        read_invite: Callable[[bytes], Invite | None] = lambda credential: None,
        helpers: Helpers | None = None,
    ) -> None:
        """
        Args:
            generation: newly opened by the database, used by no plan yet.
            stored: what the database knows; `StoredState()` for a new run.
            sign_membership: the statement with the coordinator's signature behind it.
            sign_revocations: the coordinator's signature of a list of bans, alone.
            sign_thanks: what a volunteer has given, with the coordinator's signature behind it.
            wall_offset_s: seconds since 1970 minus the machine's `now`.
            read_invite: what a credential says if it is an invite (its signature is checked), None for a membership.
            helpers: servers that help nodes behind NATs.
        """
        self.run_id = run_id
        self.outbox = Outbox(wall_offset_s)
        self.roster = Roster()
        self.admission = Admission(stored.spent, stored.banned, stored.closed_invites, stored.ban_number)
        self.history = History(config, stored, self.outbox)
        self.network = NetworkBook(over=self.history.finished)
        self.placement = Placement(config, generation, stored, self.roster, self.history, self.outbox, self.network)
        self.placement.first.flops_per_s = self.flops_per_s
        self.placement.adoption.is_banned = lambda node: self.admission.ban_reason(node) is not None
        self.placement.on_settled = self._settled
        self.placement.on_adopted, self.placement.on_laid_out = self._welcome_all, self._laid_out
        self.crew = Crew(config, self.roster, self.placement, self.outbox, self.network, self.flops_per_s)
        self.auditors = Auditors(config, self.roster, self.placement, self.outbox)
        self.signalling = Signalling(self.roster, self.outbox, helpers or Helpers())
        self._bans = Bans(run_id, self.admission, self.roster, self.outbox, sign_revocations, self._expel_banned)
        self.history.on_going_back, self.placement.on_void = self.admission.go_back, self._bans.void
        self.tracing = Tracing(self.outbox)
        self.naming = Naming(stored.names, self.outbox)
        self._joins = JoinRates()
        self._task_tokens = config.batch.samples * config.model.context
        self.giving = Giving({credit.node: credit for credit in stored.credits}, self._task_tokens)
        curve = LossCurve(stored.curve)
        self.bulletin = Bulletin(run_id, config.name, self.giving, curve, self.outbox, sign_thanks)
        self.data = stored.data
        self.reported = Reported(self.config, self.outbox)
        self._memberships = Memberships(run_id, self.roster, self.outbox, sign_membership, stored.next_serial)
        self._read_invite = read_invite
        self._data_on_its_way: DataRow | None = None
        self._next_sweep: float | None = None
        self._end_told = self.finished
        self.waiting_for = ""
        """What the run waited for at the last input, as a sentence, or nothing."""
        self.waiting_since = 0.0
        """When the run began to wait for what it waits for now."""

    # ---- the machine's doors -----------------------------------------------------------------------------------

    def start(self, now: float) -> Sequence[Effect]:
        """After a restart, puts the placement of the database in force again under a new generation."""
        self.outbox.begin(now)
        self.outbox.log(
            "info", "coordinator started", generation=self.placement.generation, newest_step=self.history.newest_step
        )
        self.placement.start(now)
        return self._end(now)

    def handle(self, fact: Input, now: float) -> Sequence[Effect]:
        self.outbox.begin(now)
        match fact:
            case LinkUp():
                self._link_up(fact, now)
            case LinkDown():
                if (member := self.roster.get(fact.peer)) is not None:
                    self._gone(member, "timeout", fact.reason, now)
            case Received():
                member = self.roster.get(fact.peer)
                if member is not None:  # else it was sent before the peer knew that we had hung up
                    self._received(member, fact.message, now)
            case Persisted():
                self.outbox.persisted(fact.record_number, now)
            case Told():
                self._told(fact.what, now)
            case Ordered():
                self._ordered(fact.order, now)
            case WallClockMoved():
                self._memberships.clock_moved(fact.wall_offset_s, now)
            case PlanReady():
                self.placement.planned(fact.number, fact.proposal, fact.sentence, now)
            case _:
                raise AssertionError(f"a coordinator has no use for {fact!r}")
        if len(self.roster) and self._next_sweep is None:
            self._next_sweep = now + sweep_s(self.config.limits)
        return self._end(now)

    def _ordered(self, order: Order, now: float) -> None:
        match order:
            case ChangeRun():
                self.placement.change(order, now)
            case RollBack():
                self.placement.roll_back(order.step, now, voiding=order.voiding)
            case DrainNode():
                drain(order, self.roster, self.placement.table, self.outbox)
            case NameNode():
                self.naming.order(order)
            case PauseRun():
                self.placement.pause(order.paused, now)
            case Adopt():
                self.placement.adopt(now)
            case FetchTrace():
                here = [member for member in self.roster.all() if member.welcomed]
                self.tracing.begin(((m.peer, m.role, self.stage_of(m)) for m in here), order.seconds, now)
            case _:
                self._bans.order(order, now)

    def _end(self, now: float) -> Sequence[Effect]:
        """The effects of an input; notes since when the run waits for the same thing."""
        if not self.finished:
            self._end_told = False
        elif not self._end_told and not self.placement.is_writing:
            self._end_told = True
            last, hint = self.history.newest_step, self.config.checkpoint.export_hint()
            self.outbox.log("info", "run finished", newest_step=last, detail=hint)
            self.placement.wishes.over(last)
            for member in self.roster.all():
                if member.welcomed:
                    self._tell_news(member, now)  # the last ones, with all that its owner gave
                    self.outbox.send(member.peer, RunFinished())
        if (waiting_for := run_state(self, now)[1]) != self.waiting_for:
            self.waiting_for, self.waiting_since = waiting_for, now
            if waiting_for:
                self.outbox.log("info", "run waits", detail=waiting_for)
        return self.outbox.take()

    def wake_at(self) -> float | None:
        return self.crew.wake_at(self._next_sweep)

    def wake(self, now: float) -> Sequence[Effect]:
        """Looks after the links, then after places that nobody fills and stages that nobody serves."""
        self.outbox.begin(now)
        for member in self.roster.all():
            self._look_after(member, now)
        self.placement.look(now)
        for member in self.roster.volunteers():
            self.bulletin.tell_if_due(member, self.history, now)
        if self.data is not None and self.placement.plan is not None:
            self.crew.even_out(self.data.vocabulary, now)
            self.auditors.even_out(now)
        self._next_sweep = now + sweep_s(self.config.limits) if len(self.roster) else None
        return self._end(now)

    def check(self) -> None:
        """Raises if an invariant is broken."""
        self.roster.check()
        self.history.check()
        self.placement.check()
        self.crew.check()
        assert self.data is None or self.data.vocabulary > 0
        assert self.data is not None or not self.roster.volunteers(), "a volunteer was welcomed without a vocabulary"

    @property
    def config(self) -> RunConfig:
        """The run; what its file leaves open is filled in by the first plan."""
        return self.placement.config

    @property
    def finished(self) -> bool:
        """Whether the run's last step is stored."""
        return self.history.finished

    def status(self, now: float) -> dict[str, Any]:
        """Everything that the API shows, as plain values."""
        return build_status(self, now)

    def network_file(self, now: float) -> NetworkFile:
        """What is measured, in the planner's form. Raises `BadInputError` when nothing is."""
        working = [*self.roster.servers(), *self.roster.volunteers()]
        return self.network.to_network(working, self.flops_per_s, now)

    def flops_per_s(self, member: Member) -> float:
        """A member's power by its own benchmark, 0 where there was none."""
        return benchmarked_flops_per_s(member, self.config, self.data.vocabulary if self.data is not None else 0)

    # ---- links -------------------------------------------------------------------------------------------------

    def _link_up(self, fact: LinkUp, now: float) -> None:
        earlier = self.roster.get(fact.peer)
        if earlier is not None:
            self._gone(earlier, "timeout", "replaced by a new link", now)
        ban = self.admission.ban_reason(fact.peer)
        if ban is not None:
            self.outbox.refuse(fact.peer, "banned", f"banned: {ban}")
        elif fact.role == "coordinator":
            self._reject(fact.peer, "role", "a coordinator has no business here")
        elif len(self.roster) >= MEMBERS_MAX:
            self.outbox.refuse(fact.peer, "busy", f"{MEMBERS_MAX} nodes are linked already")
        else:
            role = cast(JoinRole, fact.role)
            member = self.roster.add(fact.peer, role, fact.public_key, fact.credential, now, fact.address)
            if (plan := self.placement.plan) is not None:
                member.closed_before = plan.ledger_generation, self.history.newest_of(plan.ledger_generation)

    def _look_after(self, member: Member, now: float) -> None:
        """Pings a quiet link, closes a silent one, renews a membership at half of its life."""
        limits = self.config.limits
        quiet_s = now - member.heard_at
        if quiet_s >= limits.silent_s:
            self.outbox.log("warning", "link silent", node=member.peer, quiet_s=round(quiet_s, 3))
            self.outbox.hang_up(member.peer, "silent")
            self._gone(member, "timeout", "silent", now)
        elif quiet_s >= limits.ping_s and now - member.pinged_at >= limits.ping_s:
            self.outbox.send(member.peer, member.next_ping(now))
        elif member.membership and now >= member.renew_at:
            self._give_membership(member, now)
        elif member.welcomed and now >= member.help_again_at:
            self.signalling.help(member, now)

    def _gone(self, member: Member, leave: LeaveReason, detail: str, now: float) -> None:
        """The end of a link, whoever ended it: the member leaves at once."""
        self.roster.remove(member)
        self.network.left(member.peer)
        self.reported.left(member.peer)
        self.crew.left(member, now)
        self._bans.left(member.peer)
        self.tracing.left(member.peer)
        self.placement.hanging.pop(member.peer, None)
        if not member.welcomed:
            return
        self.giving.left(member.peer)
        self.outbox.count("barnraise_coordinator_node_leaves_total", reason=leave)
        self.outbox.count("barnraise_coordinator_node_session_seconds", now - member.linked_at)
        self.outbox.log("info", "node left", node=member.peer, role=member.role, reason=leave, detail=detail)
        if member.role == "server":
            self.placement.depart(member.peer, now, for_good=leave == "banned")

    def _expel(self, member: Member, reason: str, detail: str, now: float) -> None:
        """Closes a link for the peer's fault."""
        self._reject(member.peer, reason, detail)
        self._gone(member, "evicted", reason, now)

    def _reject(self, peer: NodeId, reason: str, detail: str) -> None:
        self.outbox.count("barnraise_transport_rejected_messages_total", reason=reason)
        self.outbox.log("warning", "message refused", node=peer, reason=reason, detail=detail)
        self.outbox.hang_up(peer, reason, fault=reason != "busy")

    def _told(self, what: str, now: float) -> None:
        """`drain` or `stop`: a coordinator has nothing to finish."""
        if what in ("drain", "stop"):
            for member in self.roster.all():
                self.outbox.send(member.peer, Bye(reason="the coordinator stops"))
            self.outbox.log("info", "coordinator stops")
            self.outbox.exit("stopped")
        else:
            raise AssertionError(f"nobody knows how to {what!r}")

    def _expel_banned(self, node: NodeId, reason: str, now: float) -> None:
        member = self.roster.get(node)
        if member is not None:
            self.outbox.farewell(node, "banned", f"banned: {reason}")
            self._gone(member, "banned", reason, now)
        self.placement.depart(node, now, for_good=True)

    # ---- messages ----------------------------------------------------------------------------------------------

    def _received(self, member: Member, message: Message, now: float) -> None:
        member.heard_at = now
        match message:
            case Ping():
                self.outbox.send(member.peer, Pong(number=message.number))
            case Pong():
                if message.number == member.ping_number:
                    self.outbox.count("barnraise_coordinator_heartbeat_delay_seconds", now - member.pinged_at)
                if member.answer(message.number):
                    self.placement.answered(now)
            case Bye() | Leave():
                self.outbox.hang_up(member.peer, "left")
                self._gone(member, "graceful", message.reason, now)
            case Join():
                self._join(member, message, now)
            case _ if member.join is None:
                self._expel(member, "unexpected", f"{type(message).__name__} before Join", now)
            case NodeReport():
                if message.alert and (member.report is None or member.report.alert != message.alert):
                    self.outbox.log("warning", "alert", node=member.peer, detail=message.alert)
                self.reported.take(member, self.stage_of(member), message, now)
                if message.state == "draining" and now >= member.news_at + LAST_NEWS_S:
                    self._tell_news(member, now)  # its owner is about to read what it gave
                self.placement.heard(member, message, now)
                member.report, member.report_at = message, now
                self.placement.settle(now)
                self._end_of_history(member, message)
            case LinkReport():
                self._link_report(member, message, now)
            case Spans():
                if fault := self.tracing.take(member.peer, message, now):
                    self._expel(member, "unexpected", fault, now)
            case Signal():
                self.signalling.carry(member, message, now)
            case DataReady():
                self._data_ready(member, message, now)
            case StepReport():
                self._step_report(member, message, now)
            case Blamed() | Revoked():
                self._bans.heard(member, message, self.stage_of(member), now)
            case Wrote():
                if self.stage_of(member) >= 0:
                    self.bulletin.wrote(message.sample, message.step)
            case _:
                self._expel(member, "unexpected", f"a coordinator takes no {type(message).__name__}", now)

    def stage_of(self, member: Member) -> int:
        """Where a member stands, or -1."""
        slot = self.placement.table.slot_of(member.peer) if member.role == "server" else None
        return member.stage if slot is None else slot[0]

    def _join(self, member: Member, join: Join, now: float) -> None:
        fault = fault_of_join(member, join)
        if fault:
            self._expel(member, "unexpected", fault, now)
        elif member.join is not None:
            member.join = join  # the same node with news: a checkpoint, an address, a speed
            self.crew.changed(member.peer)
            if member.role == "server" and member.welcomed:
                self.placement.look(now)
        else:
            invite = self._read_invite(member.credential)
            refusal = self._refusal_of(member, join, invite)
            if refusal is None and invite is not None and self._comes_too_fast(member, invite, now):
                return
            if refusal is not None:
                self.roster.remove(member)
                self.outbox.refuse(member.peer, *refusal)
                return
            member.join = msgspec.structs.replace(join, plan=None)
            member.shown, member.shown_hash = join.plan, join.config_hash
            spent = (
                self.admission.spend(invite, member.peer, self.history.newest_step + 1) if invite is not None else None
            )
            if spent is not None:
                self.outbox.persist(spent)
            self._give_membership(member, now)

    def _comes_too_fast(self, member: Member, invite: Invite, now: float) -> bool:
        """New members of one network are let in slowly; it is told when to come again, and does so by itself."""
        if self.admission.has_used(invite, member.peer) or self._joins.may(host_of(member.address), now):
            return False
        self.outbox.send(member.peer, Bye(reason="many computers of this network have just joined: trying again soon"))
        self._expel(member, "busy", "more new members from its network than may come at once", now)
        return True

    def _refusal_of(self, member: Member, join: Join, invite: Invite | None) -> tuple[str, str] | None:
        """(reason, sentence) why an honest node cannot take part, or None."""
        if invite is not None and self.admission.is_closed(invite):
            return "credential", "this invite was closed by the run's operator: ask for another"
        if invite is not None and self.admission.is_spent(invite, member.peer):
            return "credential", f"this invite was for {invite.uses} node(s), and all have come: ask for another"
        return None

    def _give_membership(self, member: Member, now: float) -> None:
        self._memberships.give(member, self.placement.generation, self._welcome, now)

    def _welcome(self, member: Member, now: float) -> None:
        """Says welcome, for the first time or with news; who computes only waits for the vocabulary."""
        vocabulary = self.data.vocabulary if self.data is not None else 0
        if member.role != "server" and (not vocabulary or self.placement.plan is None):
            return
        if not member.welcomed and self.placement.adoption.is_ahead(member, self.placement.plan):
            self.placement.look(now)  # it is welcomed when its plan is in force
            if not self.placement.adoption.open:
                self.outbox.log("warning", "server waits", node=member.peer, detail=unexplained(member))
            return
        self._say_welcome(member)
        if member.welcomed:
            return
        assert member.join is not None
        member.welcomed = True
        self._bans.tell(member, now)
        self.signalling.help(member, now)
        self.outbox.count("barnraise_coordinator_node_joins_total", outcome="accepted")
        self.outbox.log("info", "node joined", node=member.peer, role=member.role, build=member.join.build)
        if member.role == "server":
            self.placement.arrive(member, now)
        elif member.join.visit:
            member.stage_reason = "only looks"
        elif member.role == "auditor":
            self.auditors.arrive(member, now)
        else:
            self.crew.arrive(member, vocabulary, now)
            self._tell_news(member, now)
        if self._end_told:
            self.outbox.send(member.peer, RunFinished())
        if member.join.visit:
            self.placement.tell(member)  # last: it waits for nothing after that

    def _tell_news(self, member: Member, now: float) -> None:
        if member.role == "volunteer" and member.welcomed:
            self.bulletin.tell(member, self.history, now)

    # ---- what the run reports ----------------------------------------------------------------------------------

    def _link_report(self, member: Member, report: LinkReport, now: float) -> None:
        fault = self.network.take(member.peer, report, now)
        if fault:
            self._expel(member, "unexpected", fault, now)
        elif self.placement.first.is_planning:
            self.placement.look(now)

    def _settled(self) -> None:
        """What was open in the run is filled in: servers hear of it before the plan."""
        self.reported.stages = self.config.stages.count
        for member in self.roster.all():
            if member.welcomed:
                self._say_welcome(member)

    def _laid_out(self, now: float) -> None:
        """The plan in force has another layout: who computes gets a stage of it."""
        self.reported.stages = self.placement.running.stages.count
        if self.data is not None:
            self.crew.lay_out(self.data.vocabulary, now)
            self.auditors.lay_out(now)

    def _say_welcome(self, member: Member) -> None:
        self.outbox.send(
            member.peer,
            Welcome(
                membership=member.membership,
                config=self.config,
                config_hash=self.config.config_hash(),
                vocabulary=self.data.vocabulary if self.data is not None else 0,
            ),
        )

    def _data_ready(self, member: Member, message: DataReady, now: float) -> None:
        slot = self.placement.table.slot_of(member.peer)
        stage = slot[0] if slot is not None else member.shown.stage_of(member.peer) if member.shown is not None else -1
        if stage != 0 or message.vocabulary < 1:
            self._expel(member, "unexpected", "DataReady from a server that is not of stage 0", now)
            return
        row = DataRow(vocabulary=message.vocabulary, data_hash=message.data_hash, token_count=message.token_count)
        known = self.data or self._data_on_its_way
        if known is None:
            self._data_on_its_way = row
            self.outbox.persist(row, lambda now: self._data_known(row, now))
        elif known != row:
            sentence = (
                f"this server reads other data than the run: {row.token_count} tokens with hash {row.data_hash[:16]},"
                f" not {known.token_count} with {known.data_hash[:16]}; stage 0 needs the same files and Python"
            )
            self.outbox.refuse(member.peer, "data", sentence)
            self._gone(member, "evicted", "data", now)
            self.placement.depart(member.peer, now, for_good=True)

    def _data_known(self, row: DataRow, now: float) -> None:
        self.data, self._data_on_its_way = row, None
        self.outbox.log("info", "data ready", vocabulary=row.vocabulary, tokens=row.token_count, hash=row.data_hash)
        self._welcome_all(now)

    def _welcome_all(self, now: float) -> None:
        """What members waited for is there: the vocabulary, or a plan that servers have shown."""
        for member in self.roster.all():
            if member.membership:
                self._welcome(member, now)

    def _step_report(self, member: Member, report: StepReport, now: float) -> None:
        plan = self.placement.plan
        if plan is None or report.ledger_generation != plan.ledger_generation or self.placement.going_back:
            self.outbox.log("info", "old step report", node=member.peer, step=report.step)
            return
        if member.peer != plan.decider:
            self._expel(member, "unexpected", "StepReport from a server that does not decide", now)
            return
        fault = fault_of_report(report, self.history.batches, plan)
        if fault:
            self._expel(member, "unexpected", fault, now)
            return
        shares = self.giving.known(report.shares, (known.peer for known in self.roster.all()))
        row = self.history.take(member.peer, report, self.outbox.wall_s(now), shares)
        if row is not None:
            worked_s = self.giving.worked_s(row.duration_s, row.wall_s)
            row = msgspec.structs.replace(row, worked_s=worked_s, task_tokens=self._task_tokens)
            self.outbox.persist(row, lambda now: self._step_stored(member, row, now))

    def _end_of_history(self, member: Member, report: NodeReport) -> None:
        """A run that went back to its last checkpoint has nothing left to train, but perhaps something to report: what
        its decider knows of the last steps. Only when that is told, or nobody knows, is the run finished."""
        plan = self.placement.plan
        if plan is None or plan.restore_step < self.placement.running.steps or self.placement.going_back:
            return
        speaks = member.peer == plan.decider and report.ledger_generation == plan.ledger_generation
        if not speaks or report.counters.get("unreported", 1.0) > 0:
            return
        row = self.history.end(plan.ledger_generation)
        if row is not None:
            self.outbox.persist(row, lambda now: self.history.ended(still=not self.placement.going_back))

    def _step_stored(self, member: Member, row: StepRow, now: float) -> None:
        self.history.store(row)
        self.giving.store(row.shares, row.step, row.worked_s, row.wall_s, now)
        self.bulletin.curve.add(row.step, row.loss)
        self.placement.wishes.counted(row.changes, row.step)
        self.reported.accepted(self.history.batches.count(row.step))
        self.placement.step_stored(row, now)
        if self.data is not None:
            self.crew.step_closed(row.shares, row.duration_s, self.data.vocabulary, now)
        self.outbox.send(member.peer, StepReportStored(step=row.step))
