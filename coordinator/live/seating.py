"""Puts servers in their places and keeps the plan in force: issues it, tells it, goes back to a checkpoint.

Generations only grow. The generation of the ledgers changes only when the run begins, goes back or is laid out anew: a
change throws away what open steps have gathered; a plan that merely moves an address keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from coordinator.live.adoption import Adoption
from coordinator.live.first_plan import FirstPlanner, settled_by, why_of
from coordinator.live.gray import note_hang, steps_of, tasks_of
from coordinator.live.history import History
from coordinator.live.look_first import LookFirst
from coordinator.live.measured_links import NetworkBook
from coordinator.live.orders import ChangeRun
from coordinator.live.outbox import Outbox
from coordinator.live.plan_builder import Guidance, build_plan
from coordinator.live.problem import Proposal
from coordinator.live.records import GoBackRefused, GoBackWish, PlanRow, StepRow, StoredState, Voiding
from coordinator.live.relays import RelayBook
from coordinator.live.replanning import due, lacking
from coordinator.live.rollback import BY_ORDER, guarded, readable_steps, review_of, unreported, went_back, why_not
from coordinator.live.roster import Member, Roster
from coordinator.live.slots import NOT_BACK, Review, Slot, SlotTable, holds_state, join_of, review, undone_after
from coordinator.live.spares import Situation, Spares
from coordinator.live.wishes import PAUSED_FOR, Wishes
from protocol.base.ids import NodeId
from protocol.messages import Join, NodeReport, PlanChanged
from protocol.run.batches import Batches
from protocol.run.changes import first_layout, running
from protocol.run.plan import Plan, ServerPlan
from protocol.run.run import RunConfig


class Placement:
    """The servers' side of the coordinator."""

    def __init__(
        self,
        config: RunConfig,
        generation: int,
        stored: StoredState,
        roster: Roster,
        history: History,
        outbox: Outbox,
        network: NetworkBook,
    ) -> None:
        self._roster = roster
        self._history = history
        self._outbox = outbox
        self.left_open = config.is_open
        self.config = config if stored.plan is None else settled_by(config, stored.plan)
        """The run, with what was open in it as the plan in force has it."""
        self.first = FirstPlanner(self.config, roster, network, outbox)
        known = () if stored.plan is None else (*stored.generations, stored.plan.generation)
        self.adoption = Adoption(roster, known, generation)
        self.on_adopted: Callable[[float], None] = lambda now: None
        """Called when a plan that servers showed has come into force."""
        self.on_void: Callable[[Voiding | None, float], None] = lambda voiding, now: None
        self.on_settled: Callable[[], None] = lambda: None
        """Called when `config` has changed, before anybody is told the plan."""
        self.on_laid_out: Callable[[float], None] = lambda now: None
        """Called when another layout is in force, before anybody is told."""
        self.plan: Plan | None = stored.plan
        """The plan in force: durable, so told to everybody."""
        self.sentence = stored.plan_sentence
        """Why the plan looks as it does."""
        self.guidance = Guidance.of(stored.plan)
        """For the next plan: of the one in force, or of a planner, who is not asked again."""
        self.generation = generation
        """The newest generation opened."""
        self.table = SlotTable(running(self.config, stored.plan.changes if stored.plan else ()).stages, stored.plan)
        self.review = Review("wait", "the coordinator has just started")
        self.wishes = Wishes(stored.plan, stored.plan_sentence, stored.changed_at, outbox)
        self.rollback = stored.wish
        """Where the operator wants the run to go back to, until it has."""
        self.rollback_refusal = ""
        """Why the newest wish of this kind came to nothing."""
        self.running = self._now_runs()
        """The run as the plan in force has it, with what was changed."""
        self._relays = RelayBook(roster, outbox)
        self._generation_used = False
        self._on_its_way: PlanRow | None = None
        self.step_stored_at = float("-inf")
        """When the newest step was stored by this process."""
        self._in_force_at = float("-inf")
        """When the present ledgers began, or this process."""
        self.worked_at = float("-inf")
        """When somebody was last heard to have finished a task."""
        self.hanging: dict[NodeId, None] = {}
        """Whose newest report says that its work stands still: whether somebody hangs is asked after every input."""
        self._closed_at, self._closed_step = float("-inf"), -1.0
        """When a server was last heard to know of one more closed step: the decider itself may have no link to us."""
        self._spares = Spares(roster, outbox)
        self._first_look = LookFirst(outbox)
        self._given: dict[Slot, bool] = dict.fromkeys(self.table.slots, stored.plan is not None)
        """Slots whose holder may have begun the present ledgers; after a restart nobody knows, so all."""

    def start(self, now: float) -> None:
        """After a restart: the placement of the database again, under a new generation and the same ledgers."""
        self._in_force_at = now
        if self.plan is None:
            self.look(now)
            return
        self.on_void(None if self.rollback is None else self.rollback.voiding, now)
        self._seat_anew(now)
        if not self._history.finished:
            stages = tuple(stage.servers for stage in self.plan.stages)
            self._issue(stages, self.plan.ledger_generation, self.plan.restore_step, "the coordinator came back")

    # ---- what the operator orders ------------------------------------------------------------------------------

    def change(self, order: ChangeRun, now: float) -> None:
        """A key has another value; stage 0 decides from which step on."""
        self.wishes.change(order, first_layout(self.config) if self.left_open else None)
        self.look(now)

    def pause(self, paused: bool, now: float, reason: str = "") -> None:
        """No step is opened any more, or they are opened again; training work that is under way ends."""
        if self.wishes.pause(paused, reason):
            self.look(now)

    def roll_back(self, step: int, now: float, cause: str = BY_ORDER, voiding: Voiding | None = None) -> None:
        """To a checkpoint, as soon as all servers have said that they can read it; if one cannot, the run goes on."""
        self.rollback_refusal = self.why_no_rollback(step)
        if not self.rollback_refusal:
            self.rollback = GoBackWish(
                step=step, cause=cause, voiding=voiding, change_count=len(self.wishes.changes)
            )  # fmt: skip
            self._outbox.persist(self.rollback)  # before the ban: whoever is banned for what is undone, is undone
            self.on_void(voiding, now)
            self.look(now)

    def _guard(self, row: StepRow, now: float) -> None:
        """If training went wrong in a step, the run waits for its operator, behind it or at a checkpoint before it."""
        wanted, why = guarded(self.config.guard, row, list(self._history.tail)[:-1])
        if not wanted or self.wishes.paused or self._history.finished:
            return
        self._outbox.log("warning", "run guarded", detail=why, step=row.step)
        self.pause(True, now, why)
        good = [each for each in self.readable_steps() if each <= row.step - self.config.batch.delay]
        if wanted == "rollback" and good:
            self.roll_back(good[0], now, f"{why}; back to the newest checkpoint before it")

    def why_no_rollback(self, step: int) -> str:
        """A sentence, or nothing. Who is away cannot say what it can read."""
        if self.plan is None or self._history.finished:
            return "there is nothing to go back from"
        absent = [self.table.name(slot) for slot in self.table.slots if self._join_of(slot) is None]
        if absent or self.review.kind == "go_back" or (self.review.lost and not self.review.unread):
            return f"not while servers are missed: {', '.join(absent) or self.review.sentence}"
        return why_not(step, self.readable_steps())

    def readable_steps(self) -> tuple[int, ...]:
        """Checkpoints that every server of the plan can read, newest first; none while one is away."""
        joins = [self._join_of(slot) for slot in self.table.slots]
        here = [join for join in joins if join is not None]
        if self.plan is None or len(here) < len(joins):
            return ()
        return readable_steps(here, self.config, undone_after(self.plan, self._newest_of_ledgers))

    def _join_of(self, slot: Slot) -> Join | None:
        member = self._roster.get(self.table.holder[slot]) if slot in self.table.holder else None
        return member.join if member is not None and member.welcomed else None

    def _rolled_back(self, verdict: Review, linked: Mapping[NodeId, Member], now: float) -> Review:
        """What the operator's wish to go back makes of a verdict that is nothing but that all is well."""
        wanted = self.rollback
        if wanted is not None and self._history.finished:
            self._refuse_rollback("the run has done all its steps")
            return verdict
        if wanted is None or verdict.kind != "keep" or verdict.sentence:
            return verdict
        asked = self._first_look.ask(review_of(wanted), linked, now, self.table, "an order")
        if asked.kind != "go_back":
            return asked
        if refusal := why_not(wanted.step, self.readable_steps()):
            self._refuse_rollback(refusal)
            return verdict
        return self._granted(wanted, asked)

    def _refuse_rollback(self, why: str) -> None:
        """Nothing comes of the wish any more; nothing to say: it has been granted already."""
        wanted, self.rollback, self.rollback_refusal = self.rollback, None, why
        self._outbox.persist(GoBackRefused())
        if why and wanted is not None:
            self._outbox.log("warning", "run does not go back", step=wanted.step, reason=why)

    def _granted(self, wanted: GoBackWish, verdict: Review) -> Review:
        self.rollback, self.rollback_refusal = None, ""
        self.wishes.go_back(wanted)
        return verdict

    @property
    def is_ordered(self) -> bool:
        """Whether the plan in force, which is durable, has all that the operator ordered."""
        return self.plan is not None and self._on_its_way is None and self.wishes.are_in(self.plan)

    def settle(self, now: float) -> None:
        """A server of a held plan has told how it gets on: the run may be at the boundary, or past it."""
        if self.plan is None or self._on_its_way is not None:
            return
        members = [self._roster.get(node) for node in self.plan.server_nodes()]
        if self.wishes.settle(self.plan, [None if member is None else member.report for member in members]):
            self.look(now)

    def _now_runs(self) -> RunConfig:
        """Also tells the history, which counts by it."""
        self._history.batches = Batches.of(self.config, () if self.plan is None else self.plan.changes)
        return self._history.config

    # ---- servers come and go -----------------------------------------------------------------------------------

    def arrive(self, member: Member, now: float) -> None:
        """A welcomed server: its own slot, else the one whose state it holds, else the first empty one, else none."""
        assert member.join is not None
        slot = self.table.slot_of(member.peer)
        if slot is None:
            slot = self._slot_by_disk(member)
        if slot is None:
            slot = next(iter(self.table.empty()), None)
        if slot is None:
            self._count_assignment("spare")
            self._outbox.log("info", "server waits as a spare", node=member.peer)
        else:
            self.table.bind(slot, member.peer)
            self._count_assignment("slot")
            self._outbox.log("info", "server placed", node=member.peer, slot=self.table.name(slot))
        self.look(now)
        self.tell(member)
        self._name_relays()

    def depart(self, node: NodeId, now: float, *, for_good: bool = False) -> None:
        """A server's link is gone. Its place stays its own unless it has nothing of this run, or is unwanted."""
        slot = self.table.slot_of(node)
        if slot is None:
            self._name_relays()
            return
        if self._in_plan(slot) and not for_good:
            self.table.gone_since[slot] = now
        else:
            self.table.release(slot)
        self.look(now)

    @property
    def is_writing(self) -> bool:
        """Whether a plan is on its way to the disk: the run may have other steps when it is there."""
        return self._on_its_way is not None

    @property
    def going_back(self) -> bool:
        """Whether a plan is being written that throws steps away: reports of the present ledgers come too late."""
        return self._on_its_way is not None and self._on_its_way.goes_back

    @property
    def newest_news_at(self) -> float:
        """When a step closed, by all that is heard here; or when the ledgers or this process began."""
        return max(self.step_stored_at, self._closed_at, self._in_force_at)

    def heard(self, member: Member, report: NodeReport, now: float) -> None:
        """A node has told how it gets on; `member` still has what it said before."""
        note_hang(member, report, now, self.hanging)
        before = member.report
        if before is None or self.plan is None or before.ledger_generation != report.ledger_generation:
            return
        ours = report.ledger_generation == self.plan.ledger_generation
        if ours and steps_of(report) > max(steps_of(before), self._closed_step):  # and not one that catches up
            self._closed_at, self._closed_step = now, steps_of(report)
        if tasks_of(report) > tasks_of(before):
            self.worked_at = now

    def step_stored(self, row: StepRow, now: float) -> None:
        """The run makes progress, so servers without a link to us are not gone. The guard looks at it."""
        self.step_stored_at = now
        self._guard(row, now)

    def _slot_by_disk(self, member: Member) -> Slot | None:
        """The slot whose shard lies on the server's disk, unless somebody with as good a claim has it."""
        join = join_of(member)
        slot = (join.stage, join.shard)
        if join.held_generation < 0 or slot not in self.table.slots:
            return None
        if slot not in self.table.holder:
            return slot
        if self.plan is None or not holds_state(member, slot, self.plan.ledger_generation, self._newest_of_ledgers):
            return None
        holder = self._roster.get(self.table.holder[slot])
        if holder is not None and holder.welcomed and slot not in self.review.lost:
            return None
        self._outbox.log("warning", "another server brings the disk of a shard", slot=self.table.name(slot))
        return slot

    def _in_plan(self, slot: Slot) -> bool:
        """Whether the holder of a slot holds it in the plan in force too."""
        return self.plan is not None and self.plan.stages[slot[0]].servers[slot[1]].node == self.table.holder[slot]

    @property
    def _newest_of_ledgers(self) -> int:
        return -1 if self.plan is None else self._history.newest_of(self.plan.ledger_generation)

    # ---- the plan ----------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Compares places and plan, and does what is due."""
        was_open = self.adoption.open
        if self._on_its_way is not None or self._looks_after_shown(now):
            return
        self._review(now)  # only it knows whose state is lost; and nobody was told anything meanwhile
        for member in self._roster.all() if was_open else ():
            self.tell(member)

    def _review(self, now: float) -> None:
        if not self._history.finished:
            self._call_spares(now)
        linked = {member.peer: member for member in self._roster.servers()}
        verdict = review(self.table, linked, self.plan, self._given, self._newest_of_ledgers)
        if verdict.kind == "go_back":
            verdict = self._look_first(verdict, linked, now)
        elif self.rollback is None and not self.wishes.lays_out:
            self._first_look.forget()
        verdict = self._rolled_back(verdict, linked, now)
        if verdict == Review("keep", "") and not self._history.finished and self._lay_out(linked, now):
            return
        found = [slot for slot in self.review.lost if slot not in verdict.lost]
        self.review = verdict
        if self._history.finished:
            return  # nothing is undone after the end
        if verdict.kind == "keep":
            for slot in found:  # it was taken for lost, and has what it needs after all
                if self.table.holder.get(slot) in linked:
                    self.tell(linked[self.table.holder[slot]])
        if verdict.kind in ("keep", "wait") and self.plan is not None and not self.wishes.are_in(self.plan):
            stages = tuple(stage.servers for stage in self.plan.stages)
            self._issue(stages, self.plan.ledger_generation, self.plan.restore_step, "the operator changed the run")
        elif verdict.kind == "issue" and self.plan is None and self.config.asks_planner and self.guidance is None:
            self._plan_first(linked, verdict.sentence, now)
        elif verdict.kind == "issue":
            began, step = (None, -1) if self.plan is None else (self.plan.ledger_generation, self.plan.restore_step)
            self._issue(self.table.servers(linked, self.plan), began, step, verdict.sentence)
        elif verdict.kind == "go_back":
            servers = self.table.servers(linked, self.plan)
            self._issue(servers, None, verdict.restore_step, verdict.sentence, back=verdict)

    def _look_first(self, verdict: Review, linked: Mapping[NodeId, Member], now: float) -> Review:
        """A loss. Who has ordered to go back as far, or further, is not asked whether all see the folder."""
        where, wanted = self.config.checkpoint, self.rollback
        ordered = wanted is not None and wanted.step <= verdict.restore_step
        if not where.shared or verdict.continues >= 0 or ordered or self.plan is None or self._history.finished:
            asked = self._first_look.ask(verdict, linked, now, self.table)
            if wanted is None or asked.kind == "wait" or not ordered or why_not(wanted.step, self.readable_steps()):
                return asked
            return self._granted(wanted, replace(review_of(wanted), lost=verdict.lost))
        most = undone_after(self.plan, self._newest_of_ledgers)
        return self._first_look.ask_in_one_place(verdict, linked, now, self.table, where.folder, most)

    def _lay_out(self, linked: Mapping[NodeId, Member], now: float) -> bool:
        """Whether a plan with the ordered layout is on its way. Where it cannot be, the run goes on as it is."""
        if self.plan is None or (table := due(self.plan, self.config, self.wishes, self.table, linked)) is None:
            return False
        step = self.plan.save
        verdict = Review("go_back", "", restore_step=step)
        if self._first_look.ask(verdict, linked, now, table, "another layout").kind != "go_back":
            return False
        if unread := lacking(table, linked, step):
            self.wishes.give_up_layout(f"server {unread[0][:8]} cannot read checkpoint {step}")
            return False
        self.wishes.lay_out(step)
        cause = f"laid out anew from step {step} on, {self.wishes.why_laid_out}"
        self._issue(table.servers(linked, self.plan), None, step, cause, why=cause, table=table)
        return True

    def adopt(self, now: float) -> None:
        """The operator's word: the newest plan that is shown counts, whoever is missing."""
        self.adoption.forced = True
        self.look(now)

    def _looks_after_shown(self, now: float) -> bool:
        """Whether servers show a newer plan than the one in force: it is taken over, or waited for."""
        if self._history.finished:
            return False
        found = self.adoption.look(self.plan, self.config, self.wishes.ordered_count(self.plan))
        if found.generation >= self.generation:  # no number stands for two plans, though nothing of one may be left
            self.generation, self._generation_used = found.generation, True
        if found.sentence:
            self.review = Review("wait", found.sentence)
        elif found.plan is not None:
            self._take_over(found.plan, now)
        return self.adoption.open

    def _take_over(self, plan: Plan, now: float) -> None:
        """A plan that this database does not know goes on, under a new generation and with the same ledgers."""
        config, self.guidance = settled_by(self.config, plan), Guidance.of(plan)
        self.table = SlotTable(running(config, plan.changes).stages, plan)
        self._seat_anew(now)
        self.wishes.take_over(plan, config, self.plan)
        self.adoption.taken_over()
        known = -1 if self.plan is None else self.plan.ledger_generation
        undone = plan.restore_step if plan.undone and plan.ledger_generation > known else None
        if self.rollback is not None and self.rollback.step == undone:
            self._refuse_rollback("")  # granted after this database was copied
        stages = tuple(stage.servers for stage in plan.stages)
        self._issue(
            stages, plan.ledger_generation, plan.restore_step, "the servers' plan is taken over", config,
            back=Review("go_back", "", undone=plan.undone, continues=plan.continues), adopted=True)  # fmt: skip

    def _seat_anew(self, now: float) -> None:
        """Places of another table: their holders may be away, or unwanted by now."""
        for slot, node in tuple(self.table.holder.items()):
            if self.adoption.is_banned(node):
                self.table.release(slot)
        holders = self.table.holder
        self.table.gone_since = {slot: now for slot in holders if self._join_of(slot) is None}

    def _plan_first(self, linked: Mapping[NodeId, Member], cause: str, now: float) -> None:
        """All servers are here, and how the model is cut is open: they measure, a planner plans, its answer counts."""
        if not self.config.stages.count and not self.first.is_planning and (why := self.first.too_few(linked, now)):
            self.review = Review("wait", why)
            return
        seated = [self.table.holder[slot] for slot in self.table.slots]
        servers = [linked[node] for node in seated] + [m for node, m in linked.items() if node not in seated]
        decision = self.first.look(servers, now)
        if decision is None:
            self.review = Review("wait", self.first.sentence)
            return
        proposal = decision.proposal
        config = self.config.settled(decision.stage_count, proposal.edges if proposal is not None else ())
        table = SlotTable(config.stages)
        order = [member.peer for member in servers] if proposal is None else chain.from_iterable(proposal.servers)
        for slot, node in zip(table.slots, order, strict=False):
            table.bind(slot, node)
        self.table, self.guidance = table, None if proposal is None else proposal.guidance
        self._issue(table.servers(linked, None), None, -1, cause, config, why_of(decision))

    def planned(self, number: int, proposal: Proposal | None, sentence: str, now: float) -> None:
        """A planner has answered."""
        self.first.answered(number, proposal, sentence, now)
        self.look(now)

    def answered(self, now: float) -> None:
        """A pong has come: if it was the last one that going back waits for, the run goes back."""
        if self._first_look.is_open:
            self.look(now)

    def _call_spares(self, now: float) -> None:
        """Fills empty places, and those whose holder is gone for too long, with servers that wait."""
        situation = Situation(
            self.table, self.plan, self._newest_of_ledgers, self.running.limits, tuple(self.review.lost),
            self.step_stored_at, self.newest_news_at,
        )  # fmt: skip
        for _ in self._spares.called(situation, now):
            self._count_assignment("slot")

    def _issue(
        self,
        servers: Sequence[Sequence[ServerPlan]],
        ledger_generation: int | None,
        restore_step: int,
        cause: str,
        settled: RunConfig | None = None,
        why: str = "",
        adopted: bool = False,
        back: Review = NOT_BACK,
        table: SlotTable | None = None,
    ) -> None:
        """Makes a plan and writes it; it is in force once it is durable. No ledger generation: new ledgers.

        The first plan may fill in what was open in the run (`settled`), with the planner's words (`why`). An `adopted`
        one continues ledgers that servers have begun, which this database may not know. `table`: a new layout.
        """
        config = settled or self.config
        if self._generation_used:
            self.generation += 1
        self._generation_used = True
        known = -1 if self.plan is None else self.plan.ledger_generation
        new_ledgers = self.plan is not None and (ledger_generation is None or ledger_generation != known)
        goes_back = new_ledgers and table is None
        undone = (goes_back and not adopted and self.wishes.laid_back(restore_step)) or back.undone
        plan, sentence = build_plan(
            running(config, self.wishes.changes),
            servers,
            generation=self.generation,
            ledger_generation=self.generation if ledger_generation is None else ledger_generation,
            restore_step=restore_step,
            continues=back.continues if self.plan is None or new_ledgers else self.plan.continues,
            changes=self.wishes.changes,
            paused=self.wishes.paused,
            held=self.wishes.held,
            undone=undone or (self.plan is not None and self.plan.undone),
            save=self.wishes.save,
            why=why,
            guidance=self.guidance if table is None else self.wishes.guidance_after(self.plan),
        )
        if self.plan is not None and self.plan.course == plan.course and table is None:
            sentence = self.sentence.partition(PAUSED_FOR)[0]  # the reason for the cut does not change with a server
        sentence = self.wishes.said_after(sentence)
        lost_steps = max(self._history.lost_by(restore_step), 0) if goes_back else 0
        if goes_back and not adopted:
            lost_steps = max(lost_steps, unreported(self._roster.servers(), known, restore_step))
        row = PlanRow(
            plan=plan, sentence=sentence, goes_back=goes_back, lost_steps=lost_steps, voided=back.voiding,
            by_wish=back.undone and not adopted,
        )  # fmt: skip
        self._on_its_way = row

        def durable(now: float) -> None:
            self._on_its_way = None
            new_ledgers = self.plan is None or self.plan.ledger_generation != plan.ledger_generation
            self.table.begin(self.plan, plan)
            self.plan, self.sentence, self.guidance = plan, sentence, Guidance.of(plan)
            self.adoption.issued(plan)
            if table is not None:
                self.table = table
                self._seat_anew(now)
            if config != self.config:
                self.config = config
                self.on_settled()
            self.running = self._now_runs()
            if table is not None:
                self.on_laid_out(now)
            if new_ledgers:
                self._in_force_at, self._closed_step = now, -1.0
                self._given = dict.fromkeys(self.table.slots, adopted)
            if goes_back:
                went_back(self._history, self._outbox, restore_step, lost_steps, cause)
            self._outbox.log(
                "info", "plan in force", generation=plan.generation, ledger_generation=plan.ledger_generation,
                cause=cause, detail=sentence,
            )  # fmt: skip
            self.look(now)  # what happened while it was written
            self._name_relays()
            for member in self._roster.all():
                self.tell(member)
            if adopted:
                self.on_adopted(now)

        self._outbox.persist(row, durable)

    def _name_relays(self) -> None:
        """Servers that wait have nothing to lose: they relay before others do."""
        self._relays.set(member for member in self._roster.servers() if self.table.slot_of(member.peer) is None)

    def tell(self, member: Member) -> None:
        """Sends the plan to a welcomed node that has not had it, unless it has to wait for the next one.

        The relays too: they need no plan.
        """
        self._relays.tell(member)
        plan = self.plan
        if plan is None or self._on_its_way is not None or self.adoption.open:
            return  # everybody is told when it is durable
        if not member.welcomed or member.told_generation >= plan.generation:
            return
        if member.role != "server":
            stage, reason = member.stage, member.stage_reason
        else:
            slot = self.table.slot_of(member.peer)
            if slot is None and plan.stage_of(member.peer) is None:
                stage, reason = -1, "all places are taken: this server is a spare"
            elif slot is None or slot in self.review.lost or not self._in_plan(slot):
                # By this plan it would begin anew where another has the place by now, or where the others have more; or
                # one with it is on its way. It is told the next.
                return
            else:
                stage, reason = slot[0], self.table.name(slot)
                member.told_ledger = plan.ledger_generation
                self._given[slot] = True
        member.told_generation = plan.generation
        self._outbox.send(member.peer, PlanChanged(plan=plan, stage=stage, reason=reason))

    def _count_assignment(self, reason: str) -> None:
        self._outbox.count("barnraise_coordinator_assignments_total", run=self.config.name, reason=reason)

    def check(self) -> None:
        """Raises if an invariant is broken."""
        self.table.check()
        plan = self.plan
        if plan is None:
            return
        assert plan.ledger_generation <= plan.generation <= self.generation, "a plan of an unopened generation"
        nodes = plan.server_nodes()
        assert len(set(nodes)) == len(nodes) == len(self.table.slots), "a plan with doubled or missing servers"
        plan.course.check(self.config.block_count, len(plan.stages))
        for member in self._roster.all():
            assert member.told_generation <= plan.generation, f"{member.peer} was told a plan that is not durable"
            assert -1 <= member.stage < len(plan.stages)
