"""Sends the run back to a checkpoint and waits until it is there, for whoever asked."""

from __future__ import annotations

import trio

from coordinator.live.core import CoordinatorMachine
from coordinator.live.orders import RollBack
from protocol.base.errors import BadInputError
from protocol.base.machine import Ordered
from protocol.drive.pump import Pump

ROLLBACK_S = 8.0
"""For all servers to look for a checkpoint and say so; whoever asks gives up after ten."""


async def roll_back(machine: CoordinatorMachine, pump: Pump, step: int) -> int:
    """Returns how many closed steps that threw away. Raises `BadInputError` where nothing was, with the reason."""
    placement, history = machine.placement, machine.history
    if refusal := placement.why_no_rollback(step):
        raise BadInputError(refusal)
    before, lost = history.rollback_count, history.lost_steps
    pump.put(Ordered(RollBack(step)))
    with trio.move_on_after(ROLLBACK_S):
        while history.rollback_count == before:
            await trio.sleep(0.05)
            if placement.rollback is None and not placement.going_back and placement.rollback_refusal:
                raise BadInputError(placement.rollback_refusal)
        return history.lost_steps - lost
    raise BadInputError(
        f"not every server has said within {ROLLBACK_S:.0f} s that it can read checkpoint {step}; the run goes back"
        " when they have"
    )
