"""Judges of the simulated world: the invariants of state-and-trust 4.6, from the disks and the messages alone.

The checkers read what became durable and what was sent, never a machine's memory; each machine's own `check()` runs
besides. Safety is judged at every step, liveness (L1) and what must hold of a whole run at the end, by `finish`.
`promises.py` judges what is said before it is durable, `leaks.py` what is kept for nothing (L3).
"""

from __future__ import annotations

from typing import Any

from coordinator.live.core import CoordinatorMachine
from coordinator.live.records import Banned, HistoryEnded, PlanRow, StepRow
from node.machine.jobs import SetUpDevice
from node.machine.records import (
    CheckpointWritten,
    ContributionAccepted,
    ContributionStored,
    ShardStarted,
    SnapshotWritten,
    StateLost,
    StepCommitted,
    StepDecided,
    StepDone,
    StepSealed,
)
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.base.machine import Compute, Dial, Effect, Exit, Send
from protocol.messages import Contribute, Parameters, Ping, PlanChanged, StepOpened
from protocol.run.batches import Batches
from protocol.run.changes import AT_BOUNDARY, running
from protocol.run.course import course_of
from protocol.run.plan import Plan
from protocol.run.run import RunConfig
from tests.simulation.absence import Absence
from tests.simulation.arithmetic import State, add, grid_of, reference, shards, sum_up
from tests.simulation.copied import Copied
from tests.simulation.given_up import COORDINATOR, SURELY_LINKED_S, GivenUp
from tests.simulation.leaks import Leaks
from tests.simulation.promises import Promises
from tests.simulation.told import Told
from tests.simulation.violation import expect
from tests.simulation.world import Host, Watcher, World

SEEN_GONE_S = 6.5
"""A link's silence: everybody knows by then who is gone."""
BANS = "bans"
"""The file in which a host keeps the newest list that it has heard of."""


class Checker(Watcher):
    """All safety invariants of one run.

    Args:
        shard_counts: servers of each stage.
    """

    def __init__(self, config: RunConfig, shard_counts: list[int]) -> None:
        self._config = config
        self._shard_counts = shard_counts
        self._batches = Batches.of(config)
        self.reference = reference(config, shard_counts)
        self.promises = Promises()
        self.copied = Copied(config.checkpoint.buddy == "always" and sum(shard_counts) > 1)
        self.leaks = Leaks(config, max(shard_counts))
        self.given_up = GivenUp(config)
        self._absence = Absence(config, COORDINATOR, self._has_begun)
        self._place: dict[NodeId, ShardStarted] = {}
        self._committed: dict[tuple[int, int, int], int] = {}
        """(generation, stage, shard) -> newest version."""
        self._accepted: dict[tuple[int, int, int], dict[ContributionId, tuple[TaskId, ...]]] = {}
        """(generation, stage, step) -> acceptances in order."""
        self._seals: dict[tuple[int, int, int], StepSealed] = {}
        self._decisions: dict[tuple[int, int], StepDecided] = {}
        """(generation, step)."""
        self._opened: dict[int, int] = {}
        """Ledger generation -> newest step that its decider has opened."""
        self._done: dict[int, int] = {}
        """Generation -> newest closed step."""
        self._credit: dict[tuple[int, TaskId, int], ContributionId] = {}
        self._stored: dict[tuple[int, int, int, ContributionId], ContributionStored] = {}
        """(generation, stage, shard, contribution) that is durable, or was until a disk was lost."""
        self._brought: dict[ContributionId, NodeId] = {}
        """Who has sent each contribution under its own name."""
        self._lost_commits: dict[tuple[int, int, int, int], None] = {}
        """Commits that a disk had acknowledged and lost: they may be made again, with the same content."""
        self._plans: list[Plan] = []
        self.first_plan_s = 0.0
        """When the run had its first plan."""
        self.told = Told()
        self._restored = False
        """Whether the coordinator has come back with an older copy of its database."""
        self._readable: tuple[int, ...] | None = None
        """Checkpoints that verified when the coordinator first asked for them, since the last plan."""
        self._since_asked: dict[int, None] = {}  # those, and all that have verified at any moment since
        self._verified: dict[int, None] = {}
        """Checkpoints whose manifest was written; only the weather may make one of them unreadable."""
        self._moved: dict[NodeId, float] = {}
        """Who has the disk of a computer that is gone for good, and since when."""
        self.moves = 0
        """Volunteers that have gone to another stage."""
        self._named: dict[tuple[NodeId, int], dict[TaskId, None]] = {}
        """(node, its life) -> tasks of all contributions that it has sent."""
        self._banned: dict[NodeId, float] = {}
        """Who was banned, and when that was durable."""
        self.done_at: list[float] = []
        """When steps were closed, in the world's time."""
        self._moved_at: list[float] = []
        """When plans came into force."""
        self.sealed_count = 0
        self.accepted_count = 0

    # ---- what became durable -------------------------------------------------------------------------------------

    def durable(self, world: World, host: Host, record: Any, tensors: dict[int, Any]) -> None:
        self.promises.durable(host, record)
        self.copied.durable(host, record)
        match record:
            case ShardStarted():
                self._place[host.node] = record
                self._committed[record.ledger_generation, record.stage, record.shard] = max(0, record.checkpoint_step)
            case ContributionStored():
                self._on_stored(world, host, record, tensors)
            case ContributionAccepted():
                self._on_accepted(world, host, record)
            case StepSealed():
                self._on_sealed(host, record)
            case StepCommitted():
                self._on_committed(host, record)
            case StepDecided():
                self._on_decided(record)
            case StepDone():
                self._on_done(world, record)
            case CheckpointWritten():
                self._on_checkpoint(world, record)
            case PlanRow() if self._is_overruled(record.plan):
                pass
            case PlanRow():
                self._on_new_ledgers(world, record)
                self._on_going_back(world, record)
                self.given_up.replaced(world, self._plans[-1].server_nodes() if self._plans else (), record.plan)
                self._on_plan(world, record)
                self._moved_at.append(world.now)
            case StepRow():
                self._on_row(record)
            case Banned():
                self._banned[record.node] = world.now
            case HistoryEnded():
                self.told.given_up(record.first_missing, self.steps)

    def _on_stored(self, world: World, host: Host, record: ContributionStored, tensors: dict[int, Any]) -> None:
        """A contribution is what it says: the sum over its tasks, on its step's version, of its shard."""
        place = self._place[host.node]
        expect(all(t.step == record.step for t in record.tasks), "T-I3", f"tasks of another step in {record}")
        version = self._config.version_of(record.step)
        expect(record.version == version, "T-I4", f"step {record.step} on version {record.version}")
        self._stored[record.ledger_generation, place.stage, place.shard, record.contribution] = record
        gradients = self.reference.gradients[record.step][place.stage]
        elements = len(self.reference.versions[0][place.stage])
        total = sum_up([gradients[t.microbatch, t.position] for t in record.tasks if t.op == "B"], elements)
        (value,) = tensors.values()
        right = value == shards(total)[place.shard] or world.hosts[record.contribution.node].lies
        expect(right, "T-I4", f"{record.contribution} is not the sum over {record.tasks}")
        brought = self._brought.get(record.contribution)
        expect(brought is not None, "T-I11", f"{record.contribution} is not of the node that it credits")

    def _on_accepted(self, world: World, host: Host, record: ContributionAccepted) -> None:
        stage = self._place[host.node].stage
        key = (record.ledger_generation, stage, record.step)
        opened = self._opened.get(record.ledger_generation, -1)
        expect(record.step <= opened, "T-I3", f"a contribution to step {record.step}, which is not open, is accepted")
        self._expect_not_banned(world, host, record.contribution.node)
        accepted = self._accepted.setdefault(key, {})
        expect(record.contribution not in accepted, "T-I11", f"{record.contribution} accepted twice")
        accepted[record.contribution] = record.tasks
        self.accepted_count += 1
        for shard in range(self._shard_counts[stage]):
            stored = self._stored.get((record.ledger_generation, stage, shard, record.contribution))
            expect(stored is not None, "T-I2", f"{record.contribution} is accepted, but not on shard {stage}/{shard}")
            assert stored is not None
            expect(stored.tasks == record.tasks, "T-I11", f"{record.contribution} is not what shard {shard} stored")
        for task in record.tasks:
            credit = (record.ledger_generation, task, stage)
            expect(credit not in self._credit, "T-I1", f"{task} counts twice in stage {stage}")
            self._credit[credit] = record.contribution

    def _expect_not_banned(self, world: World, host: Host, node: NodeId) -> None:
        """A ban that the coordinator could tell this server of counts there."""
        coordinator = world.hosts[COORDINATOR]
        both = [world.now - each.started_at for each in (host, coordinator)]
        well = min(both) >= SURELY_LINKED_S and not coordinator.paused and not coordinator.hung
        told = world.now - self._banned.get(node, world.now) >= SURELY_LINKED_S and well
        told = told and world.steady(host.node, COORDINATOR)
        expect(not told, "T-I11", f"{node} is banned, and {host.node} accepts what it brings")

    def _on_sealed(self, host: Host, record: StepSealed) -> None:
        stage = self._place[host.node].stage
        key = (record.ledger_generation, stage, record.step)
        earlier = self._seals.setdefault(key, record)
        expect(earlier == record, "T-I9", f"two seals of step {record.step} differ")
        accepted = self._accepted.get(key, {})
        expect(tuple(accepted) == record.contributions, "T-I1", f"the seal of {key} lists other contributions")
        tasks = sorted(task for tasks in accepted.values() for task in tasks)
        expect(tasks == self._stage_tasks(stage, record.step), "T-I1", f"step {record.step}: tasks {tasks}")
        decision = self._decisions.get((record.ledger_generation, record.step))
        expect(decision is not None, "T-I9", f"stage {stage} seals step {record.step}, which nobody decided")
        assert decision is not None
        same = (record.clip_factor, record.skipped) == (decision.clip_factor, decision.skipped)
        expect(same, "T-I9", f"stage {stage} seals step {record.step} with another decision")
        self.sealed_count += 1

    def _on_decided(self, record: StepDecided) -> None:
        key = (record.ledger_generation, record.step)
        expect(self._decisions.setdefault(key, record) == record, "T-I9", f"two decisions of step {record.step}")
        expect(record.data_cursor == self._batches.samples(record.step), "T-I10", f"cursor of {record}")
        loss, clip = self.reference.losses[record.step], self.reference.clips[record.step]
        expect(record.loss == loss, "T-I1", f"step {record.step}: loss {record.loss}, not {loss}")
        skipped = self.reference.skipped[record.step]
        expect(record.skipped == skipped, "T-I6", f"step {record.step}: skipped is {record.skipped}")
        expect(record.clip_factor == clip, "T-I6", f"step {record.step}: clip factor {record.clip_factor}, not {clip}")

    def _on_committed(self, host: Host, record: StepCommitted) -> None:
        place = self._place[host.node]
        key = (record.ledger_generation, place.stage, place.shard)
        newest = self._committed.get(key)
        again = (*key, record.step) in self._lost_commits
        expect(newest == record.step or again, "T-I5", f"{key} commits step {record.step} at version {newest}")
        seal = self._seals.get((record.ledger_generation, place.stage, record.step))
        expect(seal is not None, "T-I9", f"{key} commits step {record.step}, which is not sealed")
        assert seal is not None
        expect(seal.contributions == record.contributions, "T-I9", f"{key} commits step {record.step} in another order")
        self._committed[key] = max(newest or 0, record.step + 1)
        right = self.reference.digests[record.step + 1][place.stage][place.shard]
        expect(record.digest == right, "T-I6", f"version {record.step + 1} of {key} is not the reference's")

    def _on_done(self, world: World, record: StepDone) -> None:
        before = self._done.get(record.ledger_generation)
        if before is not None:
            expect(record.step == before + 1, "T-I10", f"step {record.step} is closed after step {before}")
        self._done[record.ledger_generation] = record.step
        self.done_at.append(world.now)
        self._absence.closed(world.now)
        for stage, count in enumerate(self._shard_counts):
            for shard in range(count):
                newest = self._committed.get((record.ledger_generation, stage, shard), -1)
                expect(newest > record.step, "T-I8", f"step {record.step} closed, but {stage}/{shard} is at {newest}")
        plans = [plan for plan in self._plans if plan.ledger_generation == record.ledger_generation]
        self.copied.closed(plans[-1], record.step)

    def _on_checkpoint(self, world: World, record: CheckpointWritten) -> None:
        """The parts are the reference's state, so that whoever starts from them goes on as if nothing had happened."""
        runs_on = self._config.version_of(record.step)
        parts = {part[:2]: part[2] for part in world.shared[record.manifest]}
        listed = list(parts)
        all_parts = [(stage, shard) for stage, count in enumerate(self._shard_counts) for shard in range(count)]
        expect(listed == all_parts, "T-I12", f"the manifest of checkpoint {record.step} lists {listed}")
        for stage, count in enumerate(self._shard_counts):
            for shard in range(count):
                part = world.shared.get(parts[stage, shard])
                if part is None:
                    continue  # the weather has taken it
                right = self.reference.state(record.step, runs_on, stage, shard)
                for what, found, wanted in zip(State._fields, part, right, strict=True):
                    expect(found == wanted, "T-I12", f"checkpoint {record.step}, shard {stage}/{shard}: {what}")

    def _is_overruled(self, plan: Plan) -> bool:
        """Whether a coordinator with an old database has issued what the servers know better: nobody follows it."""
        before = self._plans[-1] if self._plans and self._restored else None
        return before is not None and (
            plan.generation <= before.generation or plan.ledger_generation < before.ledger_generation
        )

    def _on_new_ledgers(self, world: World, record: PlanRow) -> None:
        """Whatever the coordinator has forgotten, no step that is closed is thrown away while all disks are whole, but
        one that two computers had, which are gone."""
        plan, before = record.plan, self._plans[-1] if self._plans else None
        if before is None or plan.ledger_generation == before.ledger_generation:
            return
        closed = self._done.get(before.ledger_generation, max(0, before.restore_step) - 1)
        harmed = world.shared.harmed or any(host.harmed for host in world.hosts.values())
        kept = closed < max(0, plan.restore_step) or plan.server_nodes() != before.server_nodes() or harmed
        kept = kept or self.copied.nobody_has(world, before)
        expect(kept, "T-I12", f"{closed + 1} closed steps are thrown away, and no disk has lost anything")

    def _on_going_back(self, world: World, record: PlanRow) -> None:
        """To the newest checkpoint that verifies: every server could read it, whatever it was told before."""
        if record.goes_back and record.plan.ledger_generation == record.plan.generation:
            expect(self._readable is not None, "T-I12", "the run goes back, and nobody was asked where it could go")
            complete = world.shared.complete()
            best = max((step for step in self._readable or () if step in complete), default=-1)
            goes_to = record.plan.restore_step
            expect(goes_to >= best, "T-I12", f"the run goes back to {goes_to}, not {best}")
            there = goes_to == -1 or record.plan.continues >= 0 or goes_to in self._since_asked
            expect(there, "T-I12", f"the run goes back to {goes_to}, and when it asked that was gone")
            before = self._plans[-1]
            if not (self._restored or record.by_wish):
                closed = self._done.get(before.ledger_generation, max(0, before.restore_step) - 1)
                self.copied.went_back(world, before, record.plan, closed, self._committed)
            same = record.plan.server_nodes() == self._plans[-1].server_nodes()
            harmed = world.shared.harmed or any(host.harmed for host in world.hosts.values())
            lost = bool(record.lost_steps) and same and not harmed
            lost = lost and not self.copied.nobody_has(world, self._plans[-1])
            expect(not lost, "T-I12", f"{record.lost_steps} steps are thrown away, and no disk has lost anything")
        if not self._plans or record.plan.ledger_generation != self._plans[-1].ledger_generation:
            self._readable = None  # an operator's order between the question and the answers changes neither

    def _on_written_again(self, world: World) -> None:
        """What verifies stays readable, whoever writes what."""
        complete = dict.fromkeys(world.shared.whole())
        if self._readable is not None:
            self._since_asked.update(complete)
        for step in [step for step in self._verified if step not in complete]:
            expect(world.shared.harmed, "T-I12", f"checkpoint {step} does not verify any more")
            del self._verified[step]
        self._verified.update(complete)

    # ---- what the coordinator keeps ------------------------------------------------------------------------------

    def _on_plan(self, world: World, record: PlanRow) -> None:
        plan = record.plan
        for earlier in self._plans:
            expect(plan.generation > earlier.generation, "T-I9", f"generation {plan.generation} is used twice")
        if self._plans:
            before = self._plans[-1].ledger_generation
            expect(plan.course == self._plans[-1].course, "C1", "the model is cut anew in the middle of a run")
            new = plan.ledger_generation == plan.generation
            expect(new or plan.ledger_generation == before, "T-I9", f"ledgers of {plan.ledger_generation} come back")
        else:
            self.first_plan_s = world.now
        self._plans.append(plan)
        before_it, self._batches = self._batches, Batches.of(self._config, plan.changes)
        if self._batches.counts != before_it.counts:  # of steps that nobody has opened: what was right stays so
            self.reference = reference(self._config, self._shard_counts, batches=self._batches)
            self.leaks.microbatches_are(max(count for _, count in (*before_it.counts, *self._batches.counts)))
        if record.goes_back:
            self.told.went_back(max(0, plan.restore_step), plan.decider != self._plans[-2].decider)

    def _on_row(self, row: StepRow) -> None:
        self.told.stored(row, self._plans[-1].ledger_generation, self.reference)

    def _on_spare(self, world: World, host: Host, plan: Plan) -> None:
        """Nobody waits for a place that holds the whole state of one whose server is gone for good. It knows that it
        does by its disk: not where all that lies there is that the ledgers begin with a checkpoint, nor where it says
        that this state is lost, since another's disk has lied (the run goes back, and waits for all)."""
        place = self._place.get(host.node)
        if place is None or place.ledger_generation != plan.ledger_generation or host.node not in self._moved:
            return
        if place.checkpoint_step >= 0 and not any(
            isinstance(record, StepCommitted | SnapshotWritten) and record.ledger_generation == place.ledger_generation
            for record, _ in host.records
        ):
            return
        lost = [each for each, _ in host.records if isinstance(each, StateLost)]
        if any(each.ledger_generation == place.ledger_generation for each in lost):
            return
        before = world.hosts[plan.stages[place.stage].servers[place.shard].node]
        waited = world.now - self._moved[host.node] >= SEEN_GONE_S and not host.harmed
        expect(not (before.gone and waited), "L1", f"{host.node} waits with the disk of {place.stage}/{place.shard}")

    def _on_status(self, world: World, host: Host, machine: CoordinatorMachine) -> None:
        """Where no step has closed for three leases, the run does not count as training, and somebody is named."""
        last_s = max([host.started_at, *self._moved_at[-1:], *self.done_at[-1:]])
        quiet_s = 3 * self._config.limits.lease_s + 5.0  # news takes a report's time, and a link its silence
        if world.now - last_s > quiet_s and not machine.finished and not machine.placement.wishes.paused:
            named = "stage " in machine.waiting_for or "server" in machine.waiting_for
            expect(named, "L1", f"no step for {world.now - last_s:.0f} s, and the status says {machine.waiting_for!r}")

    # ---- what is said --------------------------------------------------------------------------------------------

    def stepped(self, world: World, host: Host, effects: list[Effect]) -> None:
        for effect in effects:
            self.given_up.said(world, host, effect)
            expect(not isinstance(effect, Dial) or effect.peer != host.node, "L2", f"{host.node} dials itself")
            if isinstance(effect, Exit):
                needless = effect.reason.startswith("failed: Write")
                expect(not needless, "L1", f"{host.node} ends over a file that training does not need: {effect.reason}")
                if effect.reason == "drained" and not host.lies:
                    self._on_left(host, "T-I11", "was to leave in peace")
            if isinstance(effect, Compute) and isinstance(effect.job, SetUpDevice) and not host.lies:
                self._on_moved(host, effect.job)
            if not isinstance(effect, Send):
                continue
            message = effect.message
            if isinstance(message, Contribute) and message.contribution.node == host.node:
                self._brought[message.contribution] = host.node
                self._named.setdefault((host.node, host.life), {}).update(dict.fromkeys(message.tasks))
            if host.lies:
                continue
            if isinstance(message, Ping) and message.look and self._readable is None:
                self._readable = world.shared.complete()
                self._since_asked = dict.fromkeys(world.shared.whole())
            self.promises.said(host, effect.peer, message)
            self.copied.said(host, effect.peer, message)
            if isinstance(message, Parameters) and message.tensors:
                self._on_parameters(host, message)
            elif isinstance(message, StepOpened):
                self._on_opened(world, host, message)
            elif isinstance(message, PlanChanged) and message.stage == -1:
                self._on_spare(world, world.hosts[effect.peer], message.plan)

    def performed(self, world: World, host: Host) -> None:
        if isinstance(host.machine, CoordinatorMachine):
            self._on_status(world, host, host.machine)
        self._on_written_again(world)
        self.leaks.performed(host)
        plan = self._plans[-1] if self._plans else None
        ended = plan is not None and self._done.get(plan.ledger_generation, -1) >= self.steps - 1
        self._absence.performed(world, None if ended else plan)

    def _has_begun(self, host: Host, plan: Plan) -> bool:
        place = self._place.get(host.node)
        return place is not None and place.ledger_generation == plan.ledger_generation

    def _on_moved(self, host: Host, job: SetUpDevice) -> None:
        """So has who is moved to another stage, unless its servers have others in their places (C9)."""
        before = None if host.lanes is None else host.lanes.device
        if before is None or before.stage == job.stage or before.plan.ledger_generation != job.plan.ledger_generation:
            return
        then, now = ([each.node for each in plan.stages[before.stage].servers] for plan in (before.plan, job.plan))
        if then != now:
            return
        self.moves += 1
        self._on_left(host, "C9", f"was moved from stage {before.stage} to {job.stage}")

    def _on_left(self, host: Host, rule: str, what: str) -> None:
        """Who leaves in peace has sent all that it summed up, for as long as anybody could use it: other ledgers take
        nothing that was made for these."""
        lanes, newest = host.lanes, self._plans[-1].ledger_generation
        if lanes is None or lanes.failed or lanes.device is None or lanes.device.plan.ledger_generation != newest:
            return
        sent, closed = self._named.get((host.node, host.life), {}), self._done.get(newest, -1)
        kept = [task for task in lanes.added if task not in sent and task.step > closed]
        expect(not kept, rule, f"{host.node} {what}, and takes gradients with it: {kept[:3]}")

    def _on_parameters(self, host: Host, message: Parameters) -> None:
        began = max([0, *(p.restore_step for p in self._plans if p.ledger_generation == message.ledger_generation)])
        stage, shard = self._place_of(host, message.ledger_generation)
        newest = self._committed.get((message.ledger_generation, stage, shard), began)
        expect(message.version <= newest, "T-I7", f"version {message.version} served at {newest}")
        right = shards(self.reference.versions[message.version][stage])[shard]
        served = tuple(0 for _ in right)
        if message.base >= 0:
            served = shards(self.reference.versions[message.base][stage])[shard]
        *changes, grid = (
            message.tensors if self._config.wire.gradients == "gi" else (*message.tensors, message.tensors[0])
        )
        for tensor in changes:
            served = add(served, host.store[tensor.key][1])
        averages = self.reference.averages[message.version][stage]
        fits = not averages or host.store[grid.key] == grid_of(shards(averages)[shard])
        expect(fits, "T-I6", f"version {message.version} is served with another grid")
        expect(served == right, "T-I6", f"version {message.version} is served with other parameters")

    def _all_know(self, world: World, step: int) -> None:
        """What every server must know before a step opens, the newest plan says, and every server goes by that."""
        wanted = [each for each in self._plans[-1].changes if each.key in AT_BOUNDARY and 0 <= each.from_step <= step]
        for peer in world.hosts.values():
            server = getattr(peer.machine, "server", None)
            if wanted and server is not None and server.context.generation == self._plans[-1].ledger_generation:
                known = server.context.plan.changes
                expect(all(each in known for each in wanted), "O1", f"step {step} opens, and {peer.node} knows {known}")

    def _place_of(self, host: Host, ledger_generation: int) -> tuple[int, int]:
        """(stage, shard) that a server serves: by its disk, which may have come from another computer, or where nothing
        is written yet by the newest plan that names it."""
        if (known := self._place.get(host.node)) is not None:
            return known.stage, known.shard
        plans = [plan for plan in self._plans if plan.ledger_generation == ledger_generation]
        plan = next(plan for plan in reversed(plans) if plan.stage_of(host.node) is not None)
        stage, shard = plan.stage_of(host.node), plan.shard_of(host.node)
        assert stage is not None and shard is not None
        return stage, shard

    def _on_opened(self, world: World, host: Host, message: StepOpened) -> None:
        """Only the decider opens a step, and every shard has committed what must be over (or begins after it)."""
        # Its disk may have moved to another computer, under the same ledgers.
        deciders = [plan.decider for plan in self._plans if plan.ledger_generation == message.ledger_generation]
        if host.node in deciders:
            before = self._opened.get(message.ledger_generation, -1)
            self._opened[message.ledger_generation] = max(message.step, before)
        opened = self._opened.get(message.ledger_generation, -1)
        expect(message.step <= opened, "T-I8", f"{host.node} opens step {message.step}, the decider only {opened}")
        self._all_know(world, message.step)
        needed = message.step - self._config.batch.delay
        began = max([0, *(p.restore_step for p in self._plans if p.ledger_generation == message.ledger_generation)])
        for stage, count in enumerate(self._shard_counts):
            for shard in range(count):
                newest = self._committed.get((message.ledger_generation, stage, shard), began)
                expect(newest >= needed, "T-I8", f"step {message.step} open, but {stage}/{shard} is at {newest}")

    def record_lost(self, world: World, host: Host, record: Any) -> None:
        """What was true before may come to be true again, in the same way only."""
        place = self._place[host.node]
        generation = getattr(record, "ledger_generation", -1)
        match record:
            case StepCommitted() | ContributionStored():  # a version is made again from all that counts in it
                newest = self._committed.get((generation, place.stage, place.shard), 0)
                for step in range(record.step, newest):
                    self._lost_commits[generation, place.stage, place.shard, step] = None
            case ContributionAccepted():
                self.promises.record_lost(host, record)
                self._accepted.get((generation, place.stage, record.step), {}).pop(record.contribution, None)
                for task in record.tasks:
                    self._credit.pop((generation, task, place.stage), None)
            case StepDone():
                self._done.pop(generation, None)
                self.told.reports_were_lost = True
            case StepDecided() | StepSealed() if place.stage == 0 and (generation, 0, record.step) in self._seals:
                # Each says how the step ended; without both the report cannot be made.
                left = [each for each, _ in host.records if isinstance(each, StepDecided | StepSealed)]
                self.told.reports_were_lost |= all(
                    (r.ledger_generation, r.step) != (generation, record.step) for r in left
                )

    def disk_moved(self, world: World, host: Host, other: Host) -> None:
        if host.node in self._place:
            self._place[other.node] = self._place[host.node]
        self.promises.disk_moved(host, other)
        self._moved[other.node] = world.now

    def disk_lost(self, world: World, host: Host) -> None:
        self._moved.pop(host.node, None)
        if any(plan.decider == host.node for plan in self._plans):
            self.told.reports_were_lost = True
        self.promises.disk_lost(host)
        self.copied.disk_lost(host)

    def restored(self, world: World, host: Host, records: list[Any]) -> None:
        """The coordinator knows only this any more; what it had acknowledged since, nobody reports a second time."""
        self._restored = self.told.reports_were_lost = True
        kept = [record.node for record in records if isinstance(record, Banned)]
        for server in world.hosts.values():
            if server.role == "server" and not server.gone and BANS in server.files:
                kept += server.files[BANS].nodes
        self._banned = {node: when for node, when in self._banned.items() if node in kept}
        self.promises.disk_lost(host)
        self.told.begin_anew()
        for record in records:
            self.promises.durable(host, record)
            self.told.known(record)

    @property
    def rows(self) -> list[StepRow]:
        """The coordinator's present history."""
        return self.told.rows

    @property
    def steps(self) -> int:
        """Those that the run is to have, as the operator has changed it."""
        return running(self._config, self._plans[-1].changes).steps if self._plans else self._config.steps

    @property
    def newest_plan(self) -> Plan:
        """The plan that was durable last."""
        return self._plans[-1]

    # ---- the end -------------------------------------------------------------------------------------------------

    def finish(self, world: World) -> None:
        """Every shard of the last plan has made every version, and the history has every step once."""
        expect(bool(self._plans), "L1", "there never was a plan")
        plan = self._plans[-1]
        for stage, count in enumerate(self._shard_counts):
            for shard in range(count):
                newest = self._committed.get((plan.ledger_generation, stage, shard), plan.restore_step)
                expect(newest == self.steps, "L1", f"shard {stage}/{shard} ends at version {newest}")
        self.told.finish(self.steps)
        if not self._restored and not any(
            plan.restore_step >= 0 for plan in self._plans
        ):  # of what goes back with unheard reports, some is lost
            validated = [found.version for row in self.rows for found in row.validations]
            right = sorted(self.reference.validations)
            if not any(change.key == "steps" for plan in self._plans for change in plan.changes):
                expect(validated == right, "T-I10", f"versions {validated} were validated")
        self.leaks.finish(world, self._plans[-1].changes if self._plans else ())

    def _stage_tasks(self, stage: int, step: int) -> list[TaskId]:
        """Written anew here, so that a mistake of the ledger's own list shows."""
        course = course_of(self._config)
        tasks = []
        for microbatch in range(self._batches.count(step)):
            owners = [course.chunks[chunk].stage for chunk in course.route(step, microbatch)]
            tasks += [TaskId(step, microbatch, place, "B") for place, owner in enumerate(owners) if owner == stage]
            tasks += [TaskId(step, microbatch, len(owners), "L")] * (owners[-1] == stage)
        return sorted(tasks)
