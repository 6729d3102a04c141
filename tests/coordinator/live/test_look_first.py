"""A run whose servers share a folder does not go back to its seed because one of them cannot read it."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from coordinator.live.look_first import LOOK_AGAIN_S
from coordinator.process.ordering import roll_back
from protocol.base.errors import BadInputError
from protocol.base.machine import Input
from protocol.run.plan import Plan
from protocol.run.run import CheckpointSection
from tests.coordinator.live.desk import CONFIG, Desk, join
from tests.coordinator.live.test_seating import GONE_S, held

SHARED = msgspec.structs.replace(CONFIG, checkpoint=CheckpointSection(every_steps=1, folder="/shared"))
OTHERS = ("s0", "s1", "s3")


def _with_checkpoint(config: object = SHARED, *, leave: bool = True) -> tuple[Desk, Plan]:
    """Four servers that train, one closed step, and checkpoint 1, which all but s2 have named; s2 is gone (`leave`)."""
    desk = Desk(config)  # type: ignore[arg-type]
    plan = desk.train()
    desk.report(0)
    for node in OTHERS:
        desk.say(node, join(**held(node, plan, version=1, checkpoints=(1,), addresses=(f"{node}:1",))))
    if leave:
        desk.drop("s2")
    return desk, plan


def _waiting_for(desk: Desk) -> str:
    return str(desk.machine.status(desk.now)["run"]["waiting_for"])


def test_a_spare_that_cannot_read_the_folder_is_named_and_no_step_is_thrown_away() -> None:
    desk, _ = _with_checkpoint()
    desk.server("spare")
    desk.stay(GONE_S + 2.0, *OTHERS, "spare")
    assert desk.plan.ledger_generation == 1 and desk.machine.history.newest_step == 0
    said = _waiting_for(desk)
    assert "stage 1 front 0 (spare) cannot see checkpoint 1 in /shared, which s0 and 2 more can" in said
    desk.stay(60.0, *OTHERS, "spare")
    assert desk.plan.ledger_generation == 1 and _waiting_for(desk) == said


def test_it_goes_on_from_the_checkpoint_once_the_folder_is_mounted() -> None:
    """Its servers look again and again: nobody has to start anything anew."""
    desk, _ = _with_checkpoint()
    desk.server("spare")
    desk.stay(GONE_S + 2.0, *OTHERS, "spare")
    desk.say("spare", join(addresses=("spare:1",), checkpoints=(1,)))
    desk.stay(2 * LOOK_AGAIN_S, *OTHERS, "spare")
    assert (desk.plan.ledger_generation, desk.plan.restore_step) == (2, 1)
    assert desk.machine.history.lost_steps == 0


def test_a_spare_that_can_read_it_takes_the_place_of_one_that_cannot() -> None:
    desk, _ = _with_checkpoint()
    desk.server("blind")
    desk.server("reader", checkpoints=(1,))
    desk.stay(GONE_S + 2 * LOOK_AGAIN_S, *OTHERS, "blind", "reader")
    assert (desk.plan.ledger_generation, desk.plan.restore_step) == (2, 1)
    assert "reader" in desk.plan.server_nodes() and "blind" not in desk.plan.server_nodes()
    assert {"node": "reader", "slot": "stage 1 front 0", "detail": "blind cannot see checkpoint 1"} in desk.logged(
        "spare takes a place"
    )


class _Pump:
    """Gives the machine what is put, at once."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def put(self, fact: Input) -> None:
        self._desk.feed(fact)


async def test_the_operator_can_have_it_begin_again_all_the_same() -> None:
    desk, _ = _with_checkpoint()
    desk.server("spare")
    desk.stay(GONE_S + 2.0, *OTHERS, "spare")
    with pytest.raises(BadInputError, match="there is no checkpoint yet that every server can read"):
        await roll_back(desk.machine, cast("Any", _Pump(desk)), 1)
    assert await roll_back(desk.machine, cast("Any", _Pump(desk)), 0) == 1
    assert (desk.plan.restore_step, desk.machine.history.newest_step) == (-1, -1)
    desk.stay(30.0, *OTHERS, "spare")
    assert (desk.plan.ledger_generation, desk.machine.history.rollback_count) == (2, 1)


def test_an_order_to_go_back_that_waits_does_not_send_the_run_further() -> None:
    """An order for checkpoint 1 hangs on s2, which is lost then; the spare in its place sees no folder."""
    desk, _ = _with_checkpoint(leave=False)
    desk.say("s2", join(**held("s2", desk.plan, version=1, checkpoints=(1,), addresses=("s2:1",))))
    desk.answers = False
    desk.machine.placement.roll_back(1, desk.now)
    desk.answers = True
    desk.drop("s2")
    desk.server("spare")
    desk.stay(GONE_S + 2.0, *OTHERS, "spare")
    assert desk.plan.ledger_generation == 1 and "cannot see checkpoint 1" in _waiting_for(desk)


def test_a_checkpoint_that_one_server_has_found_damaged_is_passed_over() -> None:
    """It sees the folder, and names an older one there: the run goes back to that, and waits for nobody."""
    desk, plan = _with_checkpoint(leave=False)
    desk.report(1)
    for node in OTHERS:
        desk.say(node, join(**held(node, plan, version=2, checkpoints=(2, 1), addresses=(f"{node}:1",))))
    desk.drop("s2")
    desk.server("s2", checkpoints=(1,))
    desk.stay(3.0, *OTHERS, "s2")
    assert (desk.plan.ledger_generation, desk.plan.restore_step) == (2, 1)


def test_what_a_spare_named_long_ago_holds_nobody_up() -> None:
    """The folder was emptied, and a spare that hangs has not looked since (seed 27): there is nothing to wait for."""
    desk, plan = _with_checkpoint(leave=False)
    desk.server("spare", checkpoints=(1,))
    for node in OTHERS:
        desk.say(node, join(**held(node, plan, version=1, addresses=(f"{node}:1",))))
    desk.drop("s2")
    desk.server("s2")
    desk.stay(3.0, *OTHERS, "s2")
    assert (desk.plan.ledger_generation, desk.plan.restore_step) == (2, -1)


@pytest.mark.parametrize("folder", ["", "checkpoints"])
def test_where_each_server_keeps_its_own_parts_a_lost_disk_is_a_lost_checkpoint(folder: str) -> None:
    """Nobody else has the part that was on it: to wait would be for ever."""
    own = CheckpointSection(every_steps=1, folder=folder) if folder else CheckpointSection(every_steps=1)
    desk, _ = _with_checkpoint(msgspec.structs.replace(CONFIG, checkpoint=own))
    desk.server("spare")
    desk.stay(GONE_S + 2.0, *OTHERS, "spare")
    assert desk.plan.restore_step == -1 and desk.plan.ledger_generation > 1
