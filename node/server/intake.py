"""What peers say about work, before any role hears it.

    Work ──▶ fence ──▶ bounds ──▶ sender ──▶ ticket ──▶ the role that handles it

Whoever breaks a rule on the way is hung up on, with the reason.
"""

from __future__ import annotations

import msgspec

from node.machine.jobs import AddUp
from node.machine.records import StageKeyKnown
from node.server.bounds import check_bounds
from node.server.context import StageContext
from node.server.judging import Judge
from node.server.recovery import StateLostError
from node.server.roles import Roles
from node.server.senders import check_sender
from node.server.tickets import NEED_LEASE
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId, TensorRef
from protocol.base.machine import HangUp
from protocol.kinds import taken_by
from protocol.link.faults import NO_FAULTS
from protocol.messages import (
    Activation,
    Audit,
    AuditOver,
    AuditReport,
    Commit,
    Contribute,
    Evaluated,
    FetchAudited,
    FetchInput,
    FetchParameters,
    Freeze,
    FrozenList,
    Gradient,
    Held,
    InputGradient,
    Labels,
    LeaseReturned,
    Output,
    Ready,
    ServerReady,
    StageKey,
    StepClosed,
    StepOpened,
    Summed,
    Tail,
    Verdict,
    Work,
)

TensorWork = Output | Activation | Gradient | InputGradient | Labels | Evaluated
FOR_LEDGER, FOR_DECIDER, FOR_BUDDY = taken_by("ledger"), taken_by("decider"), taken_by("buddy")


class Intake:
    """Every message of a peer of one server comes through here."""

    def __init__(self, context: StageContext, roles: Roles) -> None:
        self._context = context
        self._roles = roles
        self._judge = Judge(context)
        self._out = context.out

    def may_speak(self, peer: NodeId, now: float) -> bool:
        """Counts a message of any kind; a volunteer that floods this server is hung up on, with the reason."""
        try:
            if peer in self._roles.volunteers:
                self._roles.guard.check_message(peer, now)
        except RemoteProtocolError as error:
            self._roles.clock(now)
            self._refuse(peer, error, ())
            return False
        return True

    def handle(self, peer: NodeId, message: Work, now: float, size: float = 0.0) -> None:
        """One message about work. A peer that breaks the rules is hung up on, with the reason. `size`: of the values of
        an activation, where it was measured (`protocol.base.machine.Received`)."""
        context = self._context
        tensors: tuple[TensorRef, ...] = getattr(message, "tensors", ())
        self._roles.clock(now)
        if message.ledger_generation > context.generation:
            self._out.drop(tensors)  # our plan is on its way; being ready under it brings everything again
            return
        try:
            if message.ledger_generation < context.generation:
                raise RemoteProtocolError(
                    "version", f"generation {message.ledger_generation}, not {context.generation}"
                )
            check_bounds(context, message)
            check_sender(
                context,
                peer,
                message,
                is_volunteer=peer in self._roles.volunteers,
                is_auditor=peer in self._roles.auditors,
            )
            if isinstance(message, NEED_LEASE) and not context.tickets.open:
                self._out.drop(tensors)  # whoever sent it hears when we take work, and what still counts comes again
                return
            if isinstance(message, Ready) and not context.tickets.open:
                # A new link begins with it: whoever hung up here would never hear the key that is on its way.
                message = msgspec.structs.replace(message, graphs=(), tickets=())
            context.tickets.check_message(peer, message)
        except RemoteProtocolError as error:
            self._refuse(peer, error, tensors)
            return
        try:
            self._dispatch(peer, message, now, size)
        except RemoteProtocolError as error:
            self._refuse(peer, error, ())
        self._roles.give_leases(now)

    def _refuse(self, peer: NodeId, error: RemoteProtocolError, tensors: tuple[TensorRef, ...]) -> None:
        self._out.drop(tensors)
        self._out.count("barnraise_transport_rejected_messages_total", reason=error.reason)
        self._out.log("warning", "message refused", peer=peer, reason=error.reason, detail=error.detail)
        if peer != self._context.node:
            fault = error.reason == "busy" or error.reason not in NO_FAULTS
            if fault and peer in self._roles.volunteers:
                for pool in self._roles.pools():
                    pool.worker_refused(peer)
            self._out.add(HangUp(peer, str(error), fault=fault))

    def _dispatch(self, peer: NodeId, message: Work, now: float, size: float) -> None:
        match message:
            case Output() | Activation() | Gradient() | InputGradient() | Labels() | Evaluated() if (
                self._context.in_window(message.task.step)
            ):
                self._on_work(peer, message, size)
            case Held():
                for role in (self._roles.front, self._roles.back):
                    if role is not None:
                        role.on_held(peer, message)
            case Ready():
                if peer in self._context.stage_servers:
                    self._context.computing[peer] = None  # at link-up, before it has anything to ask for
                if self._roles.ledger is not None and peer not in self._roles.volunteers:
                    self._roles.ledger.desk.auditor_here(peer)  # it has a device
                if message.hello:
                    self._roles.greet(peer)
                if peer in self._roles.auditors:
                    return
                self._roles.tails.greeted(peer, anew=message.hello)
                if self._roles.back is not None and self._roles.ready:
                    self._roles.back.on_graphs(peer, message.graphs)
                for role in (self._roles.front, self._roles.back):
                    if role is not None:
                        role.add_slots(peer, message)
            case Summed():
                for pool in self._roles.pools():
                    if message.complete:
                        tasks = tuple(task for task in message.tasks if self._context.in_window(task.step))
                        pool.claim(tasks, peer, now)
                    else:
                        pool.summed(message.tasks, peer, now)
            case Tail():
                self._roles.tails.on_tail(peer, message.step)
            case LeaseReturned():
                for pool in self._roles.pools():
                    if message.result_only:
                        pool.result_may_be_lost(message.tasks, peer)
                    else:
                        pool.give_back(message.tasks, peer, untried=True)
            case FetchInput() if self._roles.front is not None and message.task.op == "F":
                self._roles.front.on_fetch_input(peer, message)
            case FetchInput() if self._roles.back is not None and message.task.op == "B":
                self._roles.back.on_fetch_gradient(peer, message)
            case FetchParameters():
                if peer in self._roles.volunteers:
                    self._roles.guard.check_fetch(peer, self._roles.shard.version, now)
                self._roles.shard.on_fetch(peer, message)
            case Contribute():
                self._on_contribute(peer, message, now)
            case Verdict():
                self._roles.shard.on_verdict(message)
                self._roles.guard.on_verdict(message)
            case Audit():
                self._roles.pins.on_audit(message)
                for pool in self._roles.pools():
                    pool.stored(message.tasks, message.contribution.node)
            case FetchAudited():
                self._roles.pins.on_fetch(peer, message)
            case AuditOver():
                self._roles.pins.on_over(message)
                for pool in self._roles.pools():
                    for node in message.blamed:
                        pool.blame(node)
            case AuditReport() if self._roles.ledger is not None:
                self._roles.ledger.desk.on_report(peer, message)
            case Freeze():
                self._roles.shard.on_freeze(message)
            case FrozenList():
                self._roles.shard.on_frozen_list(message)
            case Commit():
                norm = self._roles.shard.square_norm(message.step)
                self._judge.check(message, {}, {} if norm is None else {self._context.shard: norm})
                self._roles.shard.on_commit(message)
            case ServerReady():
                self._on_server_ready(peer)
            case StageKey():
                if self._context.tickets.open and message.key != self._context.tickets.key:
                    raise StateLostError("the key of the stage's leases is said to be another one")
                if not self._context.tickets.open:
                    self._out.persist(
                        StageKeyKnown(ledger_generation=message.ledger_generation, step=0, key=message.key)
                    )
            case StepOpened():
                self._on_step_opened(message)
            case StepClosed():
                self._on_step_closed(message)
            case _ if isinstance(message, FOR_BUDDY):
                self._roles.buddy.handle(peer, message)
            case _ if isinstance(message, (*FOR_LEDGER, *FOR_DECIDER)):  # a kind may be for both
                if self._roles.ledger is not None and isinstance(message, FOR_LEDGER):
                    self._roles.ledger.handle(message)
                if self._roles.decider is not None and isinstance(message, FOR_DECIDER):
                    self._roles.decider.handle(peer, message)
            case _:
                self._out.drop(getattr(message, "tensors", ()))

    def _on_work(self, peer: NodeId, message: TensorWork, size: float) -> None:
        """Work of a step can come by another link before the word that the step is open: believe the work.

        Only the decider opens steps; whoever computed this has heard of it. Where routes begin the word of a volunteer
        is not enough, since new work would be made of it (`Early`).
        """
        step = message.task.step
        if not self._roles.has_opened(step):
            if self._context.reads_data and isinstance(message, (Output, InputGradient, Evaluated)):
                self._roles.early.keep(peer, message, size)
                return
            self._open(step)
        self._on_tensor(peer, message, size)

    def _open(self, step: int) -> None:
        self._roles.open_step(step)
        for kept in self._roles.early.take(step):
            self._on_tensor(*kept)

    def _on_tensor(self, peer: NodeId, message: Work, size: float) -> None:
        if self._roles.front is not None and isinstance(message, Activation):
            self._roles.front.on_activation(message)
            self._roles.sums.base_here(message.task)
        elif self._roles.front is not None and isinstance(message, Labels):
            self._roles.front.on_labels(message)
        elif self._roles.front is not None and isinstance(message, Evaluated):
            self._roles.front.on_evaluated(message)
        elif isinstance(message, Output | InputGradient):
            self._on_result(peer, message, size)
        elif self._roles.back is not None and isinstance(message, Gradient):
            self._roles.back.on_gradient(message)
            self._roles.sums.base_here(message.task)
        else:
            self._out.drop(getattr(message, "tensors", ()))

    def _on_result(self, peer: NodeId, message: Output | InputGradient, size: float) -> None:
        """What is waited for goes on, unless it is absurd; what came as a difference, as soon as it is whole."""
        role = self._roles.back if isinstance(message, Output) else self._roles.front
        sums = self._roles.sums
        if role is None:
            self._out.drop(message.tensors)
        elif not role.wants(message.task):
            self._take(peer, message)
        elif sums.has(message.task):
            self._out.drop(message.tensors)
            self._graph_of(peer, message)
        elif not self._roles.guard.is_used(peer, message, size):
            self._graph_of(peer, message)
        elif not sums.takes(peer, message):
            self._take(peer, message)

    def _take(self, peer: NodeId, message: Output | InputGradient) -> None:
        if isinstance(message, Output):
            assert self._roles.back is not None
            self._roles.back.on_output(peer, message)
        else:
            assert self._roles.front is not None
            self._roles.front.on_input_gradient(peer, message)

    def _graph_of(self, peer: NodeId, message: Output | InputGradient) -> None:
        """What it has computed is not used, and yet it has the graph."""
        if isinstance(message, Output) and self._roles.back is not None:
            self._roles.back.on_graph_of(peer, message.task)

    def added(self, job: AddUp, whole: TensorRef) -> None:
        """A result that came as a difference is whole."""
        found = self._roles.sums.added(job, whole)
        if found is not None:
            self._take(*found)

    def _on_contribute(self, peer: NodeId, message: Contribute, now: float) -> None:
        if message.contribution.node != peer:
            error = RemoteProtocolError("signature", "a contribution in another node's name")
            self._refuse(peer, error, message.tensors)
            return
        if not self._context.in_window(message.step):
            self._out.drop(message.tensors)
            if self._roles.ledger is not None:  # whose verdicts are counted: once for a contribution, not per shard
                self._out.count("barnraise_server_updates_total", outcome="stale")
            return
        before = self._roles.shard.part_count
        reason = self._roles.shard.on_contribute(peer, message)
        if reason:
            word, _, detail = reason.partition(": ")
            self._refuse(peer, RemoteProtocolError(word, detail), ())
        for pool in (
            self._roles.pools() if self._roles.shard.part_count > before else ()
        ):  # what comes twice is no progress
            pool.progress(peer, message.step, now)

    def _on_server_ready(self, peer: NodeId) -> None:
        self._roles.buddy.begun(peer)
        if not self._roles.servers.get(peer, True):
            self._roles.servers[peer] = True
            if self._roles.ready:
                # It may have become ready before it could hear that we are.
                self._roles.say_ready(peer)
                self._roles.sync(peer)

    def _on_step_opened(self, message: StepOpened) -> None:
        if message.closed > self._context.closed:
            self._roles.close_step(message.closed)
        if message.step <= self._context.closed:
            return
        self._context.opened = max(self._context.opened, message.step)
        if self._roles.ledger is not None:
            self._roles.ledger.on_step_opened(message)
        self._open(message.step)

    def _on_step_closed(self, message: StepClosed) -> None:
        if self._roles.decider is not None:
            self._roles.decider.check_closed(message.step)
        if message.step <= self._context.closed:
            return
        if self._roles.ledger is not None:
            self._roles.ledger.on_step_closed(message)
        self._roles.close_step(message.step)
