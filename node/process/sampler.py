"""For people: when a checkpoint is whole, one server lets the model write a little and tells the coordinator.

It is the server that decides on steps, and only where all servers share a folder of checkpoints: elsewhere no single
computer has the model. Nothing of the training waits for it, or hears of it when it fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import structlog
import trio

from node.compute.checkpoint import present_checkpoints, run_folder
from node.compute.places import Place, place_of, soon
from node.core import NodeMachine
from protocol.base.errors import LocalProtocolError
from protocol.messages import Wrote

LOOK_S = 15.0
WRITE_S = 300.0
"""To read the checkpoint, make its tokenizer and write: minutes on a busy server."""
ANSWER_BYTES_MAX = 64 << 10


def checkpoints_to_read(machine: NodeMachine) -> Callable[[], Place] | None:
    """How to find where whole checkpoints lie, which may take a while, on the server that decides on steps; None on
    others, and where none are shared."""
    config = machine.config
    if config is None or machine.server is None or machine.server.decider is None or not config.checkpoint.shared:
        return None
    return lambda: run_folder(soon(place_of(Path(), config)), config)


def _newest(find: Callable[[], Place]) -> tuple[Place | None, int]:
    """Where the newest whole checkpoint lies, and its step; blocks. A store that is away has none."""
    try:
        folder = find()
        return folder, max(present_checkpoints(folder, most=1), default=-1)
    except OSError:
        return None, -1


async def tell_samples(
    place: Callable[[], Callable[[], Place] | None], send: Callable[[Wrote], bool], look_s: float = LOOK_S
) -> None:
    """Until cancelled.

    Args:
        place: how to find where the run's checkpoints lie, while this server is the one that writes.
        send: to the coordinator; False while it is away.
    """
    log = structlog.get_logger("node")
    written = told = 0  # the checkpoint of step 0 is noise: nothing has been trained
    sample = ""
    while True:
        await trio.sleep(look_s)
        if (find := place()) is None:
            continue
        folder, newest = await trio.to_thread.run_sync(_newest, find, abandon_on_cancel=True)
        if folder is not None and newest > written:
            written = newest
            sample, why_not = await _write(folder, newest)
            if why_not:
                log.info("no sample", step=newest, reason=why_not)
        try:
            if sample and written > told and send(Wrote(step=written, sample=sample)):
                told = written
        except LocalProtocolError as error:
            log.warning("no sample", step=written, reason=str(error))
            told = written


async def _write(folder: Place, step: int) -> tuple[str, str]:
    """(what the model writes, why nothing)."""
    command = [sys.executable, "-P", "-m", "node.compute.sample_process", str(folder), str(step)]
    with trio.move_on_after(WRITE_S):
        try:
            done = await trio.run_process(
                command, capture_stdout=True, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=False
            )
        except OSError as error:  # the system has no room for another process: no reason to end the server
            return "", f"its process cannot be started: {error.strerror or error}"
        try:
            answer = json.loads(done.stdout[:ANSWER_BYTES_MAX])
            return str(answer.get("sample", "")), str(answer.get("why_not", ""))
        except (ValueError, AttributeError):
            return "", f"its process ended with {done.returncode}"
    return "", f"it took longer than {WRITE_S:.0f} s"
