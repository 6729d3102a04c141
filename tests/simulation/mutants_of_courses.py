"""Mutants of routes, chunks, and changes of a run: who is next on a route, what a step consists of. `mutants.py` hunts
them.

What this world cannot tell, and who can: a loss divided by visited tokens and the scale of another version are
arithmetic of `node/compute`, and a clock of weight gradients that is renewed without progress is of no use to honest
nodes, who always show some (all three are taken away in `tests/test_plans_matter.py`); a checkpoint that is cut anew
one number further (`test_replanned.py`); a course that counts for an open step (a course changes with the layout alone,
under new ledgers: no step has two).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

import node.server.ledger as ledger
from node.machine.jobs import DropGraphs
from node.server.back import BackRole
from node.server.context import StageContext
from node.server.decider import DeciderRole
from node.server.front import FrontRole
from node.server.ledger import LedgerRole
from node.server.shard import ShardRole
from node.volunteer.holdings import Holdings
from node.volunteer.owed import OwedQueue
from node.volunteer.slots import RUN, Slots
from protocol.base.ids import NodeId, TaskId
from tests.simulation.mutant_registry import LINE, SHORT_LEASES, mutant
from tests.simulation.scene import Scene

CALM = ("link_slow",)
CALM_RUN = {**LINE, "collocated": "when_empty", "cut": "even"}
V = Scene(only=("volunteer_kill",), run={**CALM_RUN, "chunks": 2, "placement": "v"})
SWAPS = Scene(only=("volunteer_kill",), run={**CALM_RUN, "stages": 3, "swaps": 1})
SKIPS = Scene(only=("volunteer_kill",), run={**CALM_RUN, "stages": 4, "skip": 0.5, "microbatches": 4})
UNVISITED = Scene(only=CALM, run={**CALM_RUN, "stages": 4, "skip": 0.5, "microbatches": 1})
"""Steps of one microbatch, which leaves out half of the stages."""
FULL = Scene(
    only=CALM,
    run={
        **CALM_RUN, "stages": 2, "tied": True, "microbatches": 32, "volunteers": 2, "collocated": "never", "steps": 3,
    },
)  # fmt: skip
"""One volunteer a stage, and more microbatches than graphs that it may hold."""
ORDERS = Scene(only=("orders", "server_kill"), gap_s=(0.1, 0.3), run={**CALM_RUN, "steps": 12, "stages": 3})
FAILING = Scene(
    only=("device_fails",),
    gap_s=(0.1, 0.2),
    until_s=(6.0, 12.0),
    run={**CALM_RUN, "stages": 3, "microbatches": 8, "volunteers": 6, "collocated": "never", "steps": 9},
)
"""Devices that run out of memory while they hold graphs."""
SPLIT_SLOW = Scene(always=("volunteer_kill", "slow_host"), run={**LINE, "stages": 3, "split": True})


# ---- who is next on a route ------------------------------------------------------------------------------------------


@mutant(BackRole, "_send_activation", scene=SKIPS)
def an_output_goes_to_the_stage_with_the_next_number(original: Any) -> Any:
    """Whatever the route says."""

    def send_activation(self: Any, step: int, place: Any) -> None:
        context, (microbatch, position, _) = self._context, place
        plan = context.plan
        fronts = plan.stages[(context.stage + 1) % len(plan.stages)].fronts
        wrong = fronts[microbatch % len(fronts)].node
        self._out = _Readdressed(context.out, plan.front_of(step, microbatch, position + 1), wrong)
        original(self, step, place)
        self._out = context.out

    return send_activation


@mutant(FrontRole, "_send_gradient", scene=SKIPS)
def a_gradient_goes_to_the_stage_with_the_number_before(original: Any) -> Any:
    def send_gradient(self: Any, step: int, place: Any) -> None:
        context, (microbatch, position, _) = self._context, place
        plan = context.plan
        backs = plan.stages[context.stage - 1].backs
        wrong = backs[microbatch % len(backs)].node
        self._out = _Readdressed(context.out, plan.back_of(step, microbatch, position - 1), wrong)
        original(self, step, place)
        self._out = context.out

    return send_gradient


class _Readdressed:
    """An outbox from which what is meant for one goes to another."""

    def __init__(self, out: Any, right: NodeId, wrong: NodeId) -> None:
        self._out, self._right, self._wrong = out, right, wrong

    def send(self, peer: NodeId, message: Any) -> None:
        self._out.send(self._wrong if peer == self._right else peer, message)


@mutant(BackRole, "on_gradient", scene=V)
def two_visits_of_a_stage_exchange_their_gradients(original: Any) -> Any:
    def on_gradient(self: Any, message: Any) -> None:
        task, context = message.task, self._context
        places = [
            position
            for microbatch, position, segment in context.back_places(task.step)
            if microbatch == task.microbatch and segment == task.segment
        ]
        if len(places) == 2 and task.position in places:
            other = places[1 - places.index(task.position)]
            message = msgspec.structs.replace(message, task=msgspec.structs.replace(task, position=other))
        original(self, message)

    return on_gradient


# ---- what a step consists of -----------------------------------------------------------------------------------------


@mutant(ledger, "stage_tasks", scene=Scene(only=CALM, run={**CALM_RUN, "tied": True}))
def a_loss_counts_in_the_last_stage(original: Any) -> Any:
    """Where the numbers end, and not where the head is."""

    def stage_tasks(context: Any, step: int) -> list[TaskId]:
        tasks = [task for task in original(context, step) if task.op != "L"]
        if context.stage == len(context.plan.stages) - 1:
            for microbatch in range(context.batches.count(step)):
                tasks.append(TaskId(step, microbatch, context.plan.length(step, microbatch), "L"))
        return tasks

    return stage_tasks


@mutant(LedgerRole, "on_step_opened", scene=UNVISITED)
def a_stage_without_a_visit_never_freezes(original: Any) -> Any:
    def on_step_opened(self: Any, message: Any) -> None:
        freeze, self._freeze = self._freeze, lambda number, step: None
        original(self, message)
        self._freeze = freeze

    return on_step_opened


@mutant(StageContext, "take_plan", scene=ORDERS)
def the_newest_number_of_microbatches_is_that_of_every_step(original: Any) -> Any:
    def take_plan(self: Any, plan: Any) -> None:
        original(self, plan)
        self.batches = replace(self.batches, counts=((0, self.batches.counts[-1][1]),))

    return take_plan


@mutant(DeciderRole, "_waits_for_orders", scene=ORDERS)
def steps_open_before_everybody_knows_what_is_changed(original: Any) -> Any:
    return property(lambda self: self._context.plan.paused)


# ---- room, graphs, pieces --------------------------------------------------------------------------------------------


@mutant(Slots, "give", scene=FULL, first=11)
def the_ends_of_routes_share_the_room_of_graphs(original: Any) -> Any:
    """Whoever holds as many graphs as he may asks for no end of a route, which alone would free them."""

    def give(self: Any, servers: Any, holdings: Any, owed: Any, *rest: Any) -> Any:
        full = len(holdings.graphs) + len(owed) >= self._graphs_max * len(self._positions)
        for server, ready in original(self, servers, holdings, owed, *rest):
            if full and ready.slots:
                self._given[server][RUN] -= ready.slots
                ready = msgspec.structs.replace(ready, slots=0)
            yield server, ready

    return give


@mutant(Holdings, "make_room", scene=FAILING)
def graphs_that_a_device_has_dropped_are_counted_on(original: Any) -> Any:
    """Out of memory it drops them all, and nobody is told."""

    def make_room(self: Any) -> None:
        self._out.compute(DropGraphs(tuple(self.graphs)))

    return make_room


@mutant(OwedQueue, "end", scene=SPLIT_SLOW)
def a_weight_gradient_is_added_twice(original: Any) -> Any:
    """After its first time it is owed again."""

    def end(self: Any) -> Any:
        owed = original(self)
        done = self.__dict__.setdefault("done_once", {})
        if owed.job.task not in done:
            done[owed.job.task] = None
            self._waiting[owed.job.task] = owed
        return owed

    return end


@mutant(ShardRole, "on_verdict", scene=SHORT_LEASES)
def the_parts_of_two_contributions_are_mixed(original: Any) -> Any:
    """A shard folds another part of the same node than the one that was accepted."""

    def on_verdict(self: Any, message: Any) -> None:
        key = message.contribution, message.step
        others = [
            known for known in self._parts
            if known[1] == message.step and known != key and not self._parts[known].folded
        ]  # fmt: skip
        if message.accepted and key in self._parts and others and not self._parts[key].folded:
            one, two = self._parts[key], self._parts[others[0]]
            self._out.drop(one.message.tensors)
            copy = self._out.share(two.message.tensors[0])
            one.message = msgspec.structs.replace(one.message, tensors=(copy,))
        original(self, message)

    return on_verdict
