"""Drives trackers: each gets the rows of the history that it does not have, in a process of its own.

What it has stands in `trackers.json` of the state folder. A tracker that fails is named in the log and started again a
minute later; training and the coordinator notice nothing of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
import trio

from coordinator.live.records import StepRow
from coordinator.process.store import Store
from coordinator.tracking.child import OPEN, frame_of
from coordinator.tracking.feed import Place, Segments, flat, row_for_trackers
from coordinator.tracking.trackers import About, Target
from protocol.run.batches import Batches
from protocol.run.run import RunConfig

LOOK_S = 2.0
"""Between two looks for new steps."""
ROWS_MAX = 500
"""Rows of one frame, 0.2 MB: 100,000 steps of a tracker that is new are 200 frames."""
ANSWER_S = 120.0
"""Starting a library on a busy computer takes half a minute at worst."""
AGAIN_S = 60.0
CLOSE_S = 20.0
"""To write what a library holds back when the coordinator ends."""
WORDS_MAX = 400
"""Letters of a failed process's last words that the log takes."""
PLACES = "trackers.json"


class History(NamedTuple):
    """Where rows come from."""

    steps: Callable[[int, int], Awaitable[Sequence[StepRow]]]
    """(first, most): closed steps that count, from the first on."""
    segments: Callable[[], Awaitable[Segments]]
    batches: Callable[[], Batches]
    """The run as it is changed by now."""


class Places:
    """The file that says how far each tracker is."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PLACES
        try:
            self._known = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Place])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            self._known = {}  # every tracker begins anew, which its files can bear

    def of(self, target: Target) -> Place:
        return self._known.get(str(target), Place())

    def set(self, target: Target, place: Place) -> None:
        self._known[str(target)] = place
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self._known))
        new.replace(self._path)


def start_trackers(
    nursery: trio.Nursery, targets: Sequence[Target], config: RunConfig, store: Store, history: History
) -> None:
    """Each follows the run until the nursery is cancelled."""
    places = Places(store.folder)
    for target in targets:
        nursery.start_soon(track, target, config, store.run_id.hex(), history, places)


async def track(target: Target, config: RunConfig, run_id: str, history: History, places: Places) -> None:
    """Until cancelled; then the tracker has a moment to end well."""
    log = structlog.get_logger("tracker")
    while True:
        try:
            await _follow(target, config, run_id, history, places)
        except (OSError, trio.BrokenResourceError, trio.TooSlowError, TrackerFailedError) as error:
            log.warning("tracker failed", tracker=str(target), reason=str(error), again_s=AGAIN_S)
        else:
            continue  # the run went back: it is opened anew at once
        await trio.sleep(AGAIN_S)


class TrackerFailedError(Exception):
    """A tracker's process has ended; with its last words."""


async def _follow(target: Target, config: RunConfig, run_id: str, history: History, places: Places) -> None:
    """One life of the tracker's process: until the run goes back, or it fails."""
    place = places.of(target).where_it_holds(await history.segments())
    about = About(
        run=config.name, run_id=run_id, folder=str(target.folder), first=place.next, config=flat(config)
    )  # fmt: skip
    command = [sys.executable, "-P", "-m", "coordinator.tracking.child", target.kind]
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()
    )
    child = _Child(process)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.read_words)
            await child.say(frame_of(about), OPEN)
            looked: Segments = ()
            while True:
                counting = await history.segments()
                if counting != looked and place.where_it_holds(counting) != place:
                    break
                looked = counting
                rows = await history.steps(place.next, ROWS_MAX)
                if rows and place.after(rows).where_it_holds(await history.segments()) == place.after(rows):
                    frame = frame_of(tuple(row_for_trackers(row, history.batches()) for row in rows))
                    await child.say(frame, b"%d" % (rows[-1].step + 1))
                    place = place.after(rows)
                    await trio.to_thread.run_sync(places.set, target, place)
                if len(rows) < ROWS_MAX:
                    await trio.sleep(LOOK_S)
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        failed = group.subgroup((TrackerFailedError, OSError, trio.BrokenResourceError, trio.TooSlowError))
        if failed is None:
            raise
        raise TrackerFailedError(child.last_words or str(failed.exceptions[0])) from group
    finally:
        with trio.CancelScope(deadline=trio.current_time() + CLOSE_S, shield=True):
            await child.end()


class _Child:
    def __init__(self, process: trio.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process, self._in, self._out, self._err = process, process.stdin, process.stdout, process.stderr
        self._heard = b""
        self.last_words = ""

    async def read_words(self) -> None:
        """What a library prints is read, or it would wait for a reader; the end of it is kept for the log."""
        async for piece in self._err:
            self.last_words = (self.last_words + piece.decode(errors="replace"))[-WORDS_MAX:].strip()

    async def say(self, frame: bytes, expected: bytes) -> None:
        """Raises `TrackerFailedError` when the answer is not the expected one."""
        with trio.fail_after(ANSWER_S):
            await self._in.send_all(frame)
            while b"\n" not in self._heard:
                piece = await self._out.receive_some(4096)
                if not piece:
                    await self._process.wait()
                    raise TrackerFailedError(self.last_words or f"it ended with {self._process.returncode}")
                self._heard += piece
        answer, _, self._heard = self._heard.partition(b"\n")
        if answer != expected:
            raise TrackerFailedError(f"it answered {answer[:40]!r}")

    async def end(self) -> None:
        """Lets it close its files; kills it when that takes too long."""
        await self._in.aclose()
        try:
            await self._process.wait()
        except trio.Cancelled:
            self._process.kill()
            raise
        finally:
            await self._out.aclose()
            await self._err.aclose()


def _environment() -> dict[str, str]:
    """Nothing is sent anywhere: what leaves this computer, its owner sends. And others' libraries are told nothing of
    ours: the database's address may hold its password."""
    theirs = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
    return {**theirs, "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
