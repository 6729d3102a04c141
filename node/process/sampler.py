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
from node.core import NodeMachine
from protocol.base.errors import LocalProtocolError
from protocol.messages import Wrote

LOOK_S = 15.0
WRITE_S = 300.0
"""To read the checkpoint, make its tokenizer and write: minutes on a busy server."""
ANSWER_BYTES_MAX = 64 << 10


def checkpoints_to_read(machine: NodeMachine) -> Path | None:
    """Where whole checkpoints lie, on the server that decides on steps; None on others, and where none are shared."""
    config = machine.config
    if config is None or machine.server is None or machine.server.decider is None or not config.checkpoint.shared:
        return None
    return run_folder(Path(config.checkpoint.folder), config)


async def tell_samples(place: Callable[[], Path | None], send: Callable[[Wrote], bool], look_s: float = LOOK_S) -> None:
    """Until cancelled.

    Args:
        place: where the run's checkpoints lie, while this server is the one that writes.
        send: to the coordinator; False while it is away.
    """
    log = structlog.get_logger("node")
    written = told = 0  # the checkpoint of step 0 is noise: nothing has been trained
    sample = ""
    while True:
        await trio.sleep(look_s)
        folder = place()
        if folder is None:
            continue
        newest = max(await trio.to_thread.run_sync(present_checkpoints, folder), default=-1)
        if newest > written:
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


async def _write(folder: Path, step: int) -> tuple[str, str]:
    """(what the model writes, why nothing)."""
    command = [sys.executable, "-P", "-m", "node.compute.sample_process", str(folder), str(step)]
    with trio.move_on_after(WRITE_S):
        done = await trio.run_process(
            command, capture_stdout=True, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=False
        )
        try:
            answer = json.loads(done.stdout[:ANSWER_BYTES_MAX])
            return str(answer.get("sample", "")), str(answer.get("why_not", ""))
        except (ValueError, AttributeError):
            return "", f"its process ended with {done.returncode}"
    return "", f"it took longer than {WRITE_S:.0f} s"
