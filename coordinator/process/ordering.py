"""What an operator orders of the run, until it is done: whoever asks hears of it when no crash can undo it."""

from __future__ import annotations

import trio

from coordinator.live.core import CoordinatorMachine
from coordinator.live.orders import ChangeRun, PauseRun, RollBack
from protocol.base.errors import BadInputError
from protocol.base.machine import Ordered
from protocol.drive.pump import Pump
from protocol.run.changes import RunChange, make_change

ORDER_S = 8.0
"""For a plan to be written, or all servers to look for a checkpoint and say so; whoever asks gives up after ten."""
LOOK_S = 0.05


async def change_run(machine: CoordinatorMachine, pump: Pump, key: str, value: str) -> RunChange:
    """Orders another value of a key; returns when the plan with it is durable. Raises `BadInputError`."""
    change = make_change(machine.config, machine.placement.wishes.changes, key, value)
    if key == "steps" and int(change.value) <= machine.history.newest_step + 1 + machine.config.batch.delay:
        raise BadInputError(f"steps: step {machine.history.newest_step + 1} is done, and the one after it is open")
    await _durable(machine, pump, ChangeRun(change))
    return change


async def pause_run(machine: CoordinatorMachine, pump: Pump, paused: bool) -> None:
    """Orders that no step is opened, or that they are again; returns when that is durable. Raises `BadInputError`."""
    await _durable(machine, pump, PauseRun(paused))


async def _durable(machine: CoordinatorMachine, pump: Pump, order: ChangeRun | PauseRun) -> None:
    placement = machine.placement
    before = placement.wishes.order_count
    pump.put(Ordered(order))
    with trio.move_on_after(ORDER_S):
        while placement.wishes.order_count == before or not placement.is_ordered:
            await trio.sleep(LOOK_S)
        return
    raise BadInputError(f"the order is not on the coordinator's disk within {ORDER_S:.0f} s; `run changes` will tell")


async def roll_back(machine: CoordinatorMachine, pump: Pump, step: int) -> int:
    """Returns how many closed steps that threw away. Raises `BadInputError` where nothing was, with the reason."""
    placement, history = machine.placement, machine.history
    if refusal := placement.why_no_rollback(step):
        raise BadInputError(refusal)
    before, lost = history.rollback_count, history.lost_steps
    pump.put(Ordered(RollBack(step)))
    with trio.move_on_after(ORDER_S):
        while history.rollback_count == before:
            await trio.sleep(LOOK_S)
            if placement.rollback is None and not placement.going_back and placement.rollback_refusal:
                raise BadInputError(placement.rollback_refusal)
        return history.lost_steps - lost
    raise BadInputError(
        f"not every server has said within {ORDER_S:.0f} s that it can read checkpoint {step}; the run goes back"
        " when they have"
    )
