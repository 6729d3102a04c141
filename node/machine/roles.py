"""The roles that the plan gives one node: a server's, a volunteer's, both, an auditor's; what is theirs of what comes.

    run, plan, place ─▶ Roles.begin ─▶ ServerMachine and/or VolunteerMachine ◀─ links, work, results of jobs

A server that computes hosts both; what they say to each other goes through the same messages as between hosts.
"""

from __future__ import annotations

from typing import Any

from node.machine.drain import DRAIN_S
from node.machine.facts import NodeFacts
from node.machine.jobs import DEVICE_JOBS, FILE_JOBS, STORE_JOBS, SUM_JOBS, PrepareData, WriteEvidence
from node.machine.outbox import Outbox
from node.machine.readable import ReadableCheckpoints
from node.machine.records import AuditStanding, StateLost
from node.machine.revocation import Revocation
from node.machine.wanted import Links
from node.server.buddy import Copies
from node.server.recovery import held, newest_start, still_closed
from node.server.server import ServerMachine, say_evidence, say_no_evidence
from node.volunteer.only_audits import AuditingMachine
from node.volunteer.volunteer import VolunteerMachine
from protocol.base.ids import NodeId, TensorRef
from protocol.kinds import OF_DEVICE, OF_SERVER, taken_by
from protocol.messages import DataReady, NodeReport, StepReport, Work
from protocol.run.changes import running
from protocol.run.plan import Plan
from protocol.run.run import DataSection, RunConfig

DEVICE_LOST_S = 600.0
DEVICE_LOST_MAX = 3
"""A driver that crashes now and then is lived with; one that crashes a fourth time within ten minutes is not."""
READ_AGAIN_S = 15.0
"""Data that nobody could read is tried again so often: whoever mends a path at a server need not start it again."""
_OF_DEVICE, _OF_SERVER = taken_by(*OF_DEVICE), taken_by(*OF_SERVER)
FOR_VOLUNTEER = frozenset(_OF_DEVICE) - frozenset(_OF_SERVER)
FOR_BOTH = frozenset(_OF_DEVICE) & frozenset(_OF_SERVER)


class Roles:
    """What one node does for the run. Hosted by `node.core.NodeMachine`, which owns the links and the conversation.

    Args:
        coordinator: the one live peer that is none of the roles'.
        out, links, bans, readable: the host's; roles only read the links, the bans and the checkpoints.
    """

    def __init__(
        self,
        node: NodeId,
        facts: NodeFacts,
        coordinator: NodeId,
        out: Outbox,
        links: Links,
        bans: Revocation,
        readable: ReadableCheckpoints,
    ) -> None:
        self.node = node
        self._facts = facts
        self._unread = facts.records
        """Records whose tensors no server machine has taken yet: later ledgers have nothing on this disk."""
        self._coordinator = coordinator
        self._out = out
        self._links = links
        self._bans = bans
        self._readable = readable
        self.credentials: dict[NodeId, str] = {}
        """The roles that the live peers' credentials say."""
        self.config: RunConfig | None = None
        self.vocabulary = 0
        self.plan: Plan | None = None
        self.stage = -1
        self._stage_reason = "not joined yet"
        self.server: ServerMachine | None = None
        self.volunteer: VolunteerMachine | None = None
        self.copies = Copies(out)
        """What this server holds of other servers' shards."""
        self.data: DataReady | None = None
        """What was read here of the run's data, by a server of stage 0."""
        self._restores_first = False
        """Whether later ledgers wait until what they begin with is in memory again: they could not read this disk."""
        self._preparing = False
        self._data_fault = ""
        """Why the data could not be read here, while nobody else has read it either."""
        self._read_again_at: float | None = None
        self._state_lost = {r.ledger_generation: r.reason for r in facts.records if isinstance(r, StateLost)}
        """Ledger generations of which this node has given up what it had, and why."""
        newest = newest_start(facts.records) if facts.gives_up else None
        if newest is not None:
            self._state_lost[newest.ledger_generation] = facts.gives_up
        self._still = still_closed(facts.records)
        """Of ledgers whose state this node has given up, what holds all the same, as `Join` names a copy."""
        self._unreported: tuple[StepReport, ...] = ()
        """Of a decider that has given up its state."""
        self._standing: tuple[AuditStanding, ...] = ()
        """Of a ledger that has."""
        self._lost_at: list[float] = []
        self._moves_until: float | None = None
        """Until when a volunteer finishes what it has of the stage that it leaves; None: it leaves none."""
        self.leaving = False
        """Whether the node has begun to leave: nothing more is taken in any stage."""

    # ---- the place in the plan -----------------------------------------------------------------------------------

    def know(self, config: RunConfig, vocabulary: int) -> None:
        """The run, and its vocabulary in tokens (0: nobody has read the data yet)."""
        if self.config is not None and _data_of(config) != _data_of(self.config):
            self.data, self._data_fault, self._read_again_at = None, "", None
        self.config, self.vocabulary = config, vocabulary

    def place(self, plan: Plan, stage: int, reason: str) -> None:
        """The plan, and this node's stage in it (-1: none, for this reason)."""
        self.plan, self.stage, self._stage_reason = plan, stage, reason

    def prepared(self, job: PrepareData, vocabulary: int, data_hash: str, token_count: int) -> DataReady | None:
        """The data is read; returns what the coordinator wants to hear of it. None: it is other data than the run now
        wants."""
        self._preparing, self._data_fault = False, ""
        if self.config is None or _data_of(job.config) != _data_of(self.config):
            return None
        self.data = DataReady(vocabulary=vocabulary, data_hash=data_hash, token_count=token_count)
        return self.data

    def cannot_read(self, job: PrepareData, reason: str, now: float) -> bool:
        """Whether to stay though the data cannot be read here: nobody has read it yet, so it may be named wrongly. The
        operator hears of it, mends the file here or the run's configuration, and it is read again. Where others have
        read it, this server is of no use, and another may take its place."""
        self._preparing = False
        if self.vocabulary:
            return False
        if self.config is not None and _data_of(job.config) == _data_of(self.config):
            self._data_fault = reason
            self._read_again_at = now + READ_AGAIN_S
        return True

    def begin(self, now: float) -> bool:
        """Starts, keeps or restarts the roles, as soon as run, plan and vocabulary are known; returns whether they
        are."""
        if self.config is None or self.plan is None:
            return False
        self._restores_first = False
        serving = self._facts.role == "server" and self.plan.stage_of(self.node) is not None
        if serving and self.plan.stage_of(self.node) == 0 and self.data is None:
            if not self._preparing and (self._read_again_at is None or self._read_again_at <= now):
                self._preparing, self._read_again_at = True, None
                self._out.compute(PrepareData(self.config))
            return False
        if self.vocabulary == 0:
            return False
        if serving and self.plan.ledger_generation not in self._state_lost:
            self._begin_server(now)
            if self._restores_first:
                return True  # nothing here speaks of the new ledgers yet
        elif self.server is not None:
            self.server.end()
            self.server = None
            self.copies.end()
        now_runs = running(self.config, self.plan.changes)
        hosted = serving and self._facts.computes and now_runs.stages.collocated != "never"
        if self.stage >= 0 and (hosted or self._facts.role != "server"):
            if self.volunteer is None:
                kind = AuditingMachine if self._facts.role == "auditor" else VolunteerMachine
                self.volunteer = kind(self.config, self.vocabulary, self._out, self._facts.incarnation)
            if not serving and self._finishes_first(self.volunteer, now):
                return True
            if self.volunteer.set_plan(self.plan, self.stage):
                for peer in (*self._links.live, *((self.node,) if serving else ())):
                    self.volunteer.link_up(peer)
        return True

    def _finishes_first(self, device: VolunteerMachine, now: float) -> bool:
        """Whether a volunteer that the plan moves to another stage still has something of the old one: it takes no more
        work there, and sends what is summed up, or others would do it again (C9). Where ledgers or servers of the old
        stage are others now, what it has is of no use to anybody."""
        assert self.plan is not None
        moves = device.stage not in (-1, self.stage) and device.generation == self.plan.ledger_generation
        moves = moves and device.servers == tuple(server.node for server in self.plan.stages[device.stage].servers)
        if moves and self._moves_until is None:
            device.drain(now)
            self._moves_until = now + max(DRAIN_S, device.gradients.brought_within_s)
        if moves and not self.has_moved_out(now):
            return True
        if self._moves_until is not None:
            self._moves_until = None
            if not self.leaving:
                device.stay()
        return False

    @property
    def has_restored(self) -> bool:
        """Whether ledgers that waited for that may begin."""
        return self._restores_first and (self.server is None or self.server.ready)

    def has_moved_out(self, now: float) -> bool:
        """Whether a volunteer that moves has nothing left of its old stage, or has had time enough."""
        until = self._moves_until
        return until is not None and (now >= until or self.volunteer is None or self.volunteer.drained)

    def _begin_server(self, now: float) -> None:
        assert self.config is not None and self.plan is not None
        if self.server is not None and self.server.context.generation == self.plan.ledger_generation:
            self.server.change_plan(self.plan, now)
            return
        self._restores_first = self.server is not None and self.server.restores_what_begins(self.plan)
        if self._restores_first:
            return
        if self.server is not None:
            self._unreported, self._standing = self.server.end(), self.server.standing()
        unreported, standing = self._unreported, self._standing
        self._unreported, self._standing = (), ()
        records, self._unread = self._unread, []
        self.server = ServerMachine(
            self.node, self.config, self.vocabulary, self.plan, self._out, records, self._coordinator,
            self._facts.secret, self._facts.incarnation, self.copies, self._facts.memory_bytes,
            self._readable, self._facts.computes,
        )  # fmt: skip
        self.server.ban(self._bans.banned)
        self.server.take_over(unreported, standing)
        self.server.start(now)
        self.server.link_up(self.node, "server", now)
        for peer in self._links.live:
            if peer != self._coordinator:
                self.server.link_up(peer, self.credentials[peer], now, here_before=True)
        if self._links.is_up(self._coordinator):
            self.server.coordinator_here()

    def lose_state(self, reason: str) -> None:
        """Gives up what this node has of the present ledgers, durably, but for what closed steps came to: other ledgers
        begin."""
        if self.server is None:
            return
        generation = self.server.context.generation
        self._state_lost[generation] = reason
        self._out.log("critical", "state lost", ledger_generation=generation, reason=reason)
        context, version = self.server.context, self.server.closed_version
        self._still = ((context.stage, context.shard, version, generation),) if version >= 0 else ()
        self._out.persist(StateLost(ledger_generation=generation, step=0, reason=reason, closed_version=version))
        self._unreported, self._standing = self.server.end(), self.server.standing()
        self.server = None

    def held(self, readable: tuple[int, ...]) -> tuple[int, int, int, int]:
        """(stage, shard, version, ledger generation) of what this node holds, as `Join` wants it; `readable` are
        the steps of checkpoints that it can read."""
        if self.server is not None:
            context = self.server.context
            return context.stage, context.shard, self.server.shard.held_version, context.generation
        newest = newest_start(self._facts.records)
        present = -1 if self.plan is None else self.plan.ledger_generation
        if present in self._state_lost or (newest is not None and newest.ledger_generation in self._state_lost):
            return self._facts.wished_stage, -1, -1, -1
        config = self.config or (self._facts.kept and self._facts.kept.config)
        delay = config.batch.delay if config else 1  # the longest, where the run is not known
        return held(self._facts.records, delay, readable) or (self._facts.wished_stage, -1, -1, -1)

    def copies_named(self) -> tuple[tuple[int, int, int, int], ...]:
        """(stage, shard, version, ledger generation) of what a run can go on from here besides: copies of other
        servers' shards, and what holds of the own one where its state is given up."""
        return (*self.copies.named(), *(self._still if self.server is None else ()))

    # ---- links ---------------------------------------------------------------------------------------------------

    def peers(self) -> dict[NodeId, tuple[tuple[str, ...], bool]]:
        """Whom the roles want links to: (addresses, whether this node dials)."""
        peers: dict[NodeId, tuple[tuple[str, ...], bool]] = {}
        if self.plan is not None and self.server is not None:
            for peer in self.plan.server_nodes():
                if peer != self.node:
                    peers[peer] = (self.plan.addresses_of(peer), self.node < peer)
        elif self.plan is not None and self.volunteer is not None and self.stage >= 0:
            stages = {self.stage} if self._moves_until is None else {self.stage, self.volunteer.stage}
            for server in (server for stage in sorted(stages) for server in self.plan.stages[stage].servers):
                if server.node != self.node:  # it may have given up its own state, and compute all the same
                    peers[server.node] = (server.addresses, True)
        return peers

    def link_up(self, peer: NodeId, role: str, now: float) -> None:
        if self.server is not None:
            self.server.link_up(peer, role, now)
        if self.volunteer is not None:
            self.volunteer.link_up(peer)

    def link_moved(self, peer: NodeId, silent_s: float, now: float) -> None:
        if self.server is not None:
            self.server.link_moved(peer, silent_s, now)

    def link_down(self, peer: NodeId, now: float) -> None:
        if self.server is not None:
            self.server.link_down(peer, now)
        if self.volunteer is not None:
            self.volunteer.link_down(peer)

    # ---- work ----------------------------------------------------------------------------------------------------

    def work(self, peer: NodeId, message: Work, now: float, size: float) -> None:
        """Gives a message of `size` bytes to whom it is for; tensors for a role that is not here are dropped."""
        kind = type(message)
        for_server, for_volunteer = kind not in FOR_VOLUNTEER, kind in FOR_VOLUNTEER or kind in FOR_BOTH
        if for_server and self.server is not None:
            self.server.handle(peer, message, now, size)
        if for_volunteer and self.volunteer is not None:
            self.volunteer.handle(peer, message, now)
        if kind not in FOR_BOTH and (self.server if for_server else self.volunteer) is None:
            self._out.drop(getattr(message, "tensors", ()))

    def computed(self, job: Any, result: Any, now: float) -> None:
        # Each result has one owner: what a device made is no server's to drop when other ledgers begin.
        if isinstance(job, DEVICE_JOBS):
            if self.volunteer is not None:
                self.volunteer.computed(job, result, now)
        elif self.server is not None:
            self.server.computed(job, result, now)
        elif isinstance(job, WriteEvidence):  # an auditor's
            say_evidence(self._out, job, result)
        else:  # ordered for ledgers in which this node has no place any more
            results = result if isinstance(result, tuple) else (result,)
            self._out.drop(ref for ref in results if isinstance(ref, TensorRef))

    def failed(self, job: Any, reason: str, now: float) -> bool:
        """Whether a role can go on without the job's result."""
        if isinstance(job, DEVICE_JOBS) and self.volunteer is not None:
            self.volunteer.failed(job, reason, now)
            return True
        if self.server is None and isinstance(job, WriteEvidence):
            say_no_evidence(self._out, job, reason)
            return True
        if self.server is None and isinstance(job, (*STORE_JOBS, *SUM_JOBS, *FILE_JOBS)):
            return True  # its place is another server's now, or it has given its state up
        return self.server is not None and self.server.failed(job, reason, now)

    def device_lost(self, reason: str, now: float) -> str:
        """Goes on with a fresh one; a device that is lost again and again is of no use: returns why to leave, or
        nothing."""
        self._lost_at = [when for when in self._lost_at if when > now - DEVICE_LOST_S] + [now]
        self._out.log("error", "device lost", reason=reason, times=len(self._lost_at))
        self._out.count("barnraise_errors_total", component="compute")
        if len(self._lost_at) > DEVICE_LOST_MAX:
            return f"failed: the device was lost {len(self._lost_at)} times in ten minutes: {reason}"
        if self.volunteer is not None:
            self.volunteer.device_lost(reason)
        return ""

    # ---- time ----------------------------------------------------------------------------------------------------

    def wake_at(self) -> float | None:
        if self.server is None and self.volunteer is None:
            return self._read_again_at
        server = None if self.server is None else self.server.wake_at()
        volunteer = None if self.volunteer is None else self.volunteer.wake_at()
        return min((at for at in (server, volunteer, self._moves_until) if at is not None), default=None)

    def wake(self, now: float) -> None:
        if _due(self._read_again_at, now):
            self.begin(now)
        if self.server is not None and _due(self.server.wake_at(), now):
            self.server.wake(now)
        if self.volunteer is not None and _due(self.volunteer.wake_at(), now):
            self.volunteer.wake(now)

    def check(self) -> None:
        if self.server is not None:
            self.server.check()
        if self.volunteer is not None:
            self.volunteer.check()

    # ---- reports -------------------------------------------------------------------------------------------------

    def waiting_for(self) -> str:
        """One sentence: what this node waits for, or nothing."""
        if self.config is None:
            return "the coordinator"
        if self.plan is None:
            return "the plan, which the coordinator makes when all servers are there"
        if self.stage < 0:
            return f"a place: {self._stage_reason}"
        if self._data_fault and self.data is None:
            return "the data, which cannot be read here"
        if self._preparing and self.data is None:
            return "the data to be read"
        if self.vocabulary == 0:
            return "stage 0 to read the data"
        if self.server is not None:
            return self.server.waiting_for()
        if lost := self._state_lost.get(self.plan.ledger_generation):
            return f"the run to go back, because the state here is lost: {lost}"
        return self.volunteer.waiting_for() if self.volunteer is not None else ""

    def report(self, draining: bool) -> NodeReport:
        counters: dict[str, float] = {}
        if self.server is not None:
            counters.update(self.server.counters())
        if self.volunteer is not None:
            counters.update(self.volunteer.counters())
        state = "joining" if self.plan is None or self.stage < 0 else "training"
        if draining:
            state = "draining"
        elif self.server is not None and not self.server.ready:
            state = "syncing"
        return NodeReport(
            state=state,  # type: ignore[arg-type]
            waiting_for=self.waiting_for(),
            alert=self.server.alert() if self.server is not None else self._data_alert(),
            ledger_generation=self.server.context.generation if self.server is not None else -1,
            linked=tuple(filter(self._links.is_up, self.server.context.plan.server_nodes())) if self.server else (),
            resting=self.server.resting() if self.server else (),
            counters=counters,
        )

    def _data_alert(self) -> str:
        """Why the data cannot be read here, or nothing."""
        return f"the data cannot be read: {self._data_fault}" if self._data_fault else ""


def _data_of(config: RunConfig) -> tuple[DataSection, str]:
    """What is read before the run begins."""
    return config.data, config.validation.source


def _due(time: float | None, now: float) -> bool:
    return time is not None and time <= now
