"""Mutants of what must not be left to a lease's clock, which lasts for as long as the run here, and of two faults that
such seeds found beside: see the end of `VIOLATIONS.md`. `mutants.py` hunts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from coordinator.live import wishes
from node.server import shard
from node.server.early import Early
from node.server.recovery import StateLostError
from node.volunteer.holdings import Holdings
from node.volunteer.volunteer import VolunteerMachine
from node.volunteer.words import Words
from protocol.run.changes import RunChange
from tests.simulation.mutant_registry import LINE, mutant
from tests.simulation.scene import Scene

LONG = {"lease_s": 1000.0}
RESTARTS = Scene(only=("snapshot_lost",), gap_s=(0.15, 0.5), until_s=(10.0, 20.0), disk_losses_max=8, run=LONG)
HOPS = Scene(only=("hop_kill",), gap_s=(0.15, 0.5), until_s=(10.0, 20.0), run={**LONG, "steps": 16})
GREEDY = {"greedy": True}
"""Who holds much has more to lose, and these rules matter seldom enough."""
MOVES = Scene(only=("server_moved",), gap_s=(0.15, 0.5), until_s=(10.0, 20.0), disk_losses_max=8, run=LONG)


SLOW_RESTARTS = replace(
    RESTARTS,
    only=("snapshot_lost", "link_slow", "latency_spike"),
    run={**LONG, **LINE, "fronts": 1, "backs": 2, "volunteers": 4, "microbatches": 8},
)
"""One in four has a server that hears of a step later than of what was done of it."""


@mutant(Early, "keep", scene=SLOW_RESTARTS, first=31)
def what_comes_before_the_word_that_its_step_is_open_is_dropped(original: Any) -> Any:
    return lambda self, peer, message, size: self._drop(message)


@mutant(Words, "server_begins", scene=replace(HOPS, run={**HOPS.run, **GREEDY}), first=21)
def nobody_says_that_a_result_may_be_lost(original: Any) -> Any:
    return lambda self, server, has: None


@mutant(VolunteerMachine, "set_plan", scene=MOVES)
def outputs_for_a_server_that_has_moved_are_forgotten(original: Any) -> Any:
    def set_plan(self: Any, plan: Any, stage: int) -> Any:
        self._held.unsent.clear()
        return original(self, plan, stage)

    return set_plan


@mutant(
    Holdings,
    "is_ending",
    scene=replace(
        MOVES,
        only=("volunteer_kill", "server_moved"),
        run={**LINE, **LONG, **GREEDY, "volunteers": 1, "collocated": "when_empty"},
    ),
)
def a_job_of_an_old_place_stands_for_a_new_lease(original: Any) -> Any:
    return lambda self, task, place: original(self, task, -1 if self.running is None else self.running.place)


@mutant(
    shard,
    "must_not_be",
    scene=Scene(
        only=("snapshot_bent",),
        gap_s=(1.0, 3.0),
        until_s=(10.0, 20.0),
        disk_losses_max=8,
        run={**LONG, **GREEDY, "checkpoint_every": 3, "delay": 0},
    ),
    first=701_441,
)
def a_wrong_version_stays_where_it_was_read(original: Any) -> Any:
    def must_not_be(out: Any, version: int, why: str) -> None:
        raise StateLostError(f"version {version} {why}")

    return must_not_be


@mutant(
    wishes,
    "begun_at",
    scene=Scene(
        only=("orders", "server_lost"), gap_s=(0.3, 1.0), until_s=(10.0, 20.0), run={**LINE, "spares": 2, "steps": 24}
    ),
)
def an_order_begins_before_what_was_changed_in_steps_that_are_done_again(original: Any) -> Any:
    def begun_at(changes: Sequence[RunChange], step: int) -> Any:
        _, late = original(changes, step)
        kept = [change for change in changes if change not in late]
        last = max((number for number, change in enumerate(kept) if change.is_pending), default=-1)
        found = (
            msgspec.structs.replace(change, from_step=step) if number <= last and change.from_step < 0 else change
            for number, change in enumerate(kept)
        )
        return tuple(found), late

    return begun_at
