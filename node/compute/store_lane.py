"""Lane `store`: brings a server's checkpoints from its disk to the run's object store, while the other lanes go on.

    STATE/outgoing/RUN-CONFIGHASH/step-00000100/ ──parts, seals, then the manifest──▶ s3://BUCKET/PREFIX/RUN-…/step-…/

What lies in `outgoing` is whole and durable, and goes when it was brought, or when newer ones are there.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from node.compute import checkpoint, seals
from node.compute.checkpoint import CheckpointError, Manifest, PartEntry
from node.compute.lane import Buffers
from node.compute.performer import Performer
from node.compute.places import on, place_of, soon
from node.data.allowed import Allowed
from node.machine import jobs
from protocol.run.run import RunConfig
from protocol.trust.seals import SEAL_BYTES_MAX

OUTGOING, FETCHED = "outgoing", "fetched"
"""Folders below a server's state: on their way to a store, and from there."""
OUTGOING_MAX = 3
"""Newest checkpoints whose parts wait there, beside the oldest, which may be under way."""


class Door:
    """Between a server's lanes: when newer ledgers begin, no manifest that earlier ones ordered goes in any more.

    A run that goes back says first which checkpoints are none any more (`checkpoint.undo_after`); one of them that came
    in behind that would be believed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0

    def begin(self, generation: int) -> None:
        """Waits until who is in the door is through; a store ends what hangs."""
        with self._lock:
            self._generation = max(self._generation, generation)

    @contextlib.contextmanager
    def through(self, generation: int) -> Iterator[None]:
        """Raises `CheckpointError` for earlier ledgers."""
        with self._lock:
            if generation < self._generation:
                raise CheckpointError("the run has gone on under other ledgers")
            yield


def outgoing(state: Path, config: RunConfig) -> Path:
    """Where a server leaves what a store is to have."""
    return checkpoint.run_folder(state / OUTGOING, config)


def forget_outgoing(folder: Path) -> None:
    """Of what a store would not take, only the newest stays: a disk must not fill with it."""
    for home in sorted(folder.glob("step-????????"))[1:-OUTGOING_MAX]:
        shutil.rmtree(home, ignore_errors=True)


class StorePerformer(Performer):
    """Does `node.machine.jobs.STORE_JOBS`.

    Args:
        state: the server's state folder.
        allowed: whether the run may write to its store with this server's keys.
    """

    def __init__(self, state: Path, allowed: Allowed, door: Door) -> None:
        super().__init__()
        self._state = state
        self._allowed = allowed
        self._door = door

    def _methods(self) -> dict[type, tuple[str, Callable[[Any, Buffers], Any]]]:
        return {
            jobs.TryStore: ("other", self._try),
            jobs.BringPart: ("other", self._bring_part),
            jobs.BringManifest: ("other", self._bring_manifest),
        }

    def _homes(self, config: RunConfig, step: int) -> tuple[Any, Path, Path]:
        """(the run's place in the store, the step's folder here, the folder that it lies in)."""
        self._allowed.check(config)
        here = outgoing(self._state, config)
        return checkpoint.run_folder(place_of(self._state, config), config), checkpoint.step_folder(here, step), here

    def _try(self, job: jobs.TryStore, _: Buffers) -> None:
        self._allowed.check(job.config)
        place = soon(place_of(self._state, job.config))
        on(place).try_writing()

    def _bring_part(self, job: jobs.BringPart, _: Buffers) -> None:
        folder, here, all_here = self._homes(job.config, job.step)
        home = checkpoint.step_folder(folder, job.step)
        part = PartEntry(job.stage, job.shard, job.file, job.byte_count, job.digest)
        for older in all_here.glob("step-????????"):
            # Nobody will ask for these any more, but a manifest that the store would not take yet is tried again.
            if older.name < here.name and not (older / checkpoint.MANIFEST).exists():
                shutil.rmtree(older, ignore_errors=True)
        bring_part(here, home, part)
        if not (here / checkpoint.MANIFEST).exists():
            shutil.rmtree(here, ignore_errors=True)

    def _bring_manifest(self, job: jobs.BringManifest, _: Buffers) -> str:
        folder, here, all_here = self._homes(job.config, job.step)
        try:
            manifest = checkpoint.read_manifest(here)
        except checkpoint.NoManifestError:
            there = checkpoint.step_folder(folder, job.step)
            if checkpoint.MANIFEST not in on(there).sizes():
                raise
            return str(there / checkpoint.MANIFEST)  # ordered twice: a server said once more that it has its part

        def sign(home: Any, written: Manifest) -> None:
            name = checkpoint.seal_name(written)
            with contextlib.suppress(FileNotFoundError):
                on(home).put(name, on(here).read(name, SEAL_BYTES_MAX))

        with self._door.through(job.ledger_generation):
            name = checkpoint.write_manifest(folder, manifest, True, sign)
        for done in all_here.glob("step-????????"):
            if done.name <= here.name:
                shutil.rmtree(done, ignore_errors=True)
        return name


def bring_part(here: Path, home: Any, part: PartEntry) -> None:
    """Brings a part that lies in `here`, then its seal, and reads the part back.

    A part of that name which is there and is what its name says stays as it is.

    Raises:
        CheckpointError: it is not in `home` what it is here.
        OSError: the place cannot be written to.
    """
    files = on(home)
    if files.sizes().get(part.file) != part.byte_count or files.digest(part.file) != (part.byte_count, part.digest):
        files.keep(here / part.file, part.file)
        checkpoint.verify_parts(home, [part])
    seal = part.file + seals.SUFFIX
    if (here / seal).exists():
        files.put(seal, on(here).read(seal, SEAL_BYTES_MAX))
