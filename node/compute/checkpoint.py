"""Snapshots and checkpoints on disk: an interrupted write is never mistaken for a whole one.

A *part* is one shard's state of one version in a safetensors file that says what it is. A *checkpoint* is a folder
with the parts of all shards and a manifest, written last: it exists exactly if its manifest verifies. Files appear by
write to a temporary name, fsync, rename, fsync of the folder (state-and-trust 4.4).

    FOLDER/RUN-CONFIGHASH/step-00000100/stage-0-shard-1-93b0…e1.safetensors … manifest.json

The bytes of a part follow from its state alone, and its name from its bytes: a shard that writes the same state again
finds the file there and leaves it alone, and one whose state differs writes beside it. So nothing that a manifest
names is ever written again, and a manifest is replaced only when what it names does not verify any more.

A shard's state is `params`, `m`, `v` of the version and, where the run's delay needs it, `previous`: the weights of the
version before, on which the next step runs. With `gradients = "gi"` also `averages` (and `previous_averages`), from
which the grid of a step's gradients is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError, safe_open

from protocol.base.errors import BadInputError
from protocol.run.keeping import kept_steps
from protocol.run.run import RunConfig

if TYPE_CHECKING:  # whoever only looks which checkpoints there are needs no torch
    from torch import Tensor

FORMAT = "barnraise-shard-2"
MANIFEST = "manifest.json"
UNDONE = "manifest.undone.json"
"""What a manifest is called once the run has gone back behind its checkpoint for good: nobody begins from it, and the
same step makes another. Its parts go when that is written, or with the older ones."""
CHECKPOINTS_MAX = 16
"""Checkpoints that a node tells the coordinator of, newest first."""
_MANIFEST_BYTES_MAX = 16 * 2**20
_READ_BYTES = 1 << 20


class CheckpointError(Exception):
    """A snapshot or checkpoint cannot be used; the sentence names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class PartEntry:
    """One part of a checkpoint as its manifest lists it. `digest` is BLAKE2b-256 over the file."""

    stage: int
    shard: int
    file: str
    byte_count: int
    digest: bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is; `sum` is BLAKE2b-256 over the canonical form of all other fields."""

    format: int = 1
    run: str
    config_hash: str
    config: RunConfig
    step: int
    """Steps that are done: the next one has this number."""
    version: int
    data_cursor: int
    """Number of the first sample that the next step trains on."""
    data_hash: str
    vocabulary: int
    partition: tuple[tuple[int, ...], ...]
    """(first block, end block, shards) of each stage, then first and end of each further chunk that it holds; for
    another one the state is cut anew (`node.compute.cut_anew`)."""
    parts: tuple[PartEntry, ...]
    sum: str = ""

    def expected_sum(self) -> str:
        plain = msgspec.json.encode(msgspec.structs.replace(self, sum=""), order="deterministic")
        return hashlib.blake2b(plain, digest_size=32).hexdigest()


# ---- parts -----------------------------------------------------------------------------------------------------------


def write_part(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Writes a shard's state so that the file is whole or absent; `about` is kept with it as text.

    The same state and words give the same bytes: safetensors orders the tensors but not its metadata, so those are
    one canonical JSON text under one key.
    """
    temporary = _write_temporary(path, tensors, about)
    try:
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_checkpoint_part(
    home: Path, stage: int, shard: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]
) -> PartEntry:
    """Writes a part of the checkpoint in `home` under a name of its own; one that is there already is not touched.

    Raises:
        OSError: the folder is full, or cannot be written to; nothing of this part is left there.
    """
    fresh = not home.exists()
    temporary = _write_temporary(home / f"stage-{stage}-shard-{shard}", tensors, about)
    try:
        byte_count, digest = file_digest(temporary)
        path = home / part_name(stage, shard, digest)
        if not path.exists() or file_digest(path) != (byte_count, digest):
            publish(temporary, path)
        if fresh:
            _sync(home.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return PartEntry(stage, shard, path.name, byte_count, digest)


def _write_temporary(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """The bytes of a part under a name that no other writer uses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    words = {"format": FORMAT, **{name: str(value) for name, value in about.items()}}
    text = msgspec.json.encode(words, order="deterministic").decode()
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), temporary, metadata={"about": text})
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):  # safetensors wraps the system's errors
            raise OSError(f"{path}: {error}") from error
        raise
    return temporary


def read_part(path: Path, about: Mapping[str, Any], config: RunConfig | None = None) -> dict[str, Tensor]:
    """A shard's state; its own words must agree with `about` in every key. With the `config` that `about` names, it may
    be called what an older build called it.

    Raises:
        CheckpointError: the file is missing, damaged or of something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            _check_about(path, file.metadata(), about, config)
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_ranges(
    path: Path,
    about: Mapping[str, Any],
    ranges: Mapping[str, Sequence[tuple[int, int]]],
    config: RunConfig | None = None,
) -> dict[str, list[Tensor]]:
    """Of each tensor in a part, by its name, these half-open ranges; no more is read. Else as `read_part`."""
    try:
        with safe_open(path, framework="pt") as file:
            _check_about(path, file.metadata(), about, config)
            found: dict[str, list[Tensor]] = {}
            for name in file.keys():  # noqa: SIM118 - not a mapping
                whole = file.get_slice(name)
                shape = whole.get_shape()
                if name not in ranges or len(shape) != 1 or any(end > shape[0] for _, end in ranges[name]):
                    raise CheckpointError(f"{path}: {name} {shape} is no tensor of this shard")
                found[name] = [whole[first:end] for first, end in ranges[name]]
            return found
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_about(
    path: Path, metadata: Mapping[str, str] | None, about: Mapping[str, Any], config: RunConfig | None
) -> None:
    found = msgspec.json.decode((metadata or {}).get("about", "{}"), type=dict[str, str])
    if config is not None and found.get("config_hash") in [known.hex() for known in config.hashes()]:
        about = {**about, "config_hash": found["config_hash"]}
    for name, wanted in {"format": FORMAT, **about}.items():
        if found.get(name) != str(wanted):
            raise CheckpointError(f"{path}: {name} is {found.get(name)!r}, this run's is {str(wanted)!r}")


def file_digest(path: Path) -> tuple[int, bytes]:
    """(bytes, BLAKE2b-256) of a file, read from the disk in pieces."""
    state = hashlib.blake2b(digest_size=32)
    byte_count = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            state.update(piece)
            byte_count += len(piece)
    return byte_count, state.digest()


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def run_folder(folder: Path, config: RunConfig) -> Path:
    """Where a run keeps its checkpoints below a folder that several runs may share: one that an older build has begun
    stays in use, or a run would go back to before its upgrade."""
    known = [folder / f"{config.name}-{called.hex()[:16]}" for called in config.hashes()]
    return next((home for home in known if home.is_dir()), known[0])


def step_folder(folder: Path, step: int) -> Path:
    """The folder of one checkpoint below a run's folder."""
    return folder / f"step-{step:08d}"


def part_name(stage: int, shard: int, digest: bytes) -> str:
    """The name of a part's file within its checkpoint: another content has another name."""
    return f"stage-{stage}-shard-{shard}-{digest.hex()[:16]}.safetensors"


def find_part(home: Path, stage: int, shard: int) -> Path:
    """The file of a shard in a checkpoint: what the manifest names; without one here, the newest that this shard wrote.

    Raises:
        CheckpointError: there is none.
    """
    with contextlib.suppress(CheckpointError):
        for part in read_manifest(home).parts:
            if (part.stage, part.shard) == (stage, shard):
                return home / part.file
    written = home.glob(f"stage-{stage}-shard-{shard}-????????????????.safetensors")
    newest = max(written, key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        raise CheckpointError(f"{home}: no part of stage {stage} shard {shard}")
    return newest


def write_manifest(
    folder: Path, manifest: Manifest, shared: bool, sign: Callable[[Path, Manifest], None] = lambda home, manifest: None
) -> Path:
    """Makes a checkpoint of parts that are all on disk, then deletes what is older than the newest `keep`.

    A manifest that is there, fits this run and verifies stays as it is, and so does all that it names: after going
    back, the shards write the state that they began from once more, and no restart may depend on that going well.
    Every part, and the manifest itself, is read back first: nothing old goes before the new one is known good. Where
    the servers share no folder (`shared` false) only the parts that lie here can be read back; the checkpoint is
    complete once somebody has brought the others. `sign` is called with the folder and the manifest as it will be, just
    before it is there.

    Raises:
        CheckpointError: a part is missing or is not what its shard said.
    """
    home = step_folder(folder, manifest.step)
    path = home / MANIFEST
    if (standing := _standing(home, manifest, shared)) is not None:
        if shared:
            _delete_unnamed(home, standing)
        _delete_older(folder, manifest)
        return path
    verify_parts(home, [part for part in manifest.parts if shared or (home / part.file).exists()])
    manifest = msgspec.structs.replace(manifest, sum=manifest.expected_sum())
    temporary = path.with_name(f"{MANIFEST}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        sign(home, manifest)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if read_manifest(home) != manifest:
        raise CheckpointError(f"{path}: reads back differently from what was written")
    if shared:
        _delete_unnamed(home, manifest)
    _delete_older(folder, manifest)
    return path


def _standing(home: Path, manifest: Manifest, shared: bool) -> Manifest | None:
    """The manifest in `home`, if it is of this run and this cut, and verifies."""
    try:
        found = read_manifest(home)
        verify_parts(home, [part for part in found.parts if shared or (home / part.file).exists()])
    except CheckpointError:
        return None
    names = ("step", "version", "data_hash", "vocabulary", "partition")
    same = all(getattr(found, name) == getattr(manifest, name) for name in names)
    return found if same and _is_of(found, manifest.config) else None


def _is_of(manifest: Manifest, config: RunConfig) -> bool:
    return manifest.config_hash in [known.hex() for known in config.hashes()]


def _delete_unnamed(home: Path, manifest: Manifest) -> None:
    """Parts that no manifest names, and what killed writers left: the checkpoint is complete without them."""
    named = {part.file for part in manifest.parts}
    for path in home.iterdir():
        name = path.name.removesuffix(".seal")
        if name not in named and name != MANIFEST and path.suffix in (".safetensors", ".seal", ".tmp"):
            path.unlink(missing_ok=True)


def read_manifest(home: Path) -> Manifest:
    """The manifest of the checkpoint in `home`. Raises `CheckpointError` naming what is wrong."""
    path = home / MANIFEST
    try:
        if path.stat().st_size > _MANIFEST_BYTES_MAX:
            raise CheckpointError(f"{path}: larger than any manifest")
        content = path.read_bytes()
        manifest = msgspec.json.decode(content, type=Manifest)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"{path} is torn or damaged: {error}") from error
    if manifest.sum != _sum_of(content):
        raise CheckpointError(f"{path} is damaged: its sum does not fit")
    for part in manifest.parts:
        if Path(part.file).name != part.file:
            raise CheckpointError(f"{path}: {part.file!r} is not the name of a file in its folder")
    return manifest


def _sum_of(content: bytes) -> str:
    """What `Manifest.expected_sum` gave whoever wrote this: its configuration may have had fewer keys than ours."""
    written = msgspec.json.decode(content)
    written["sum"] = ""
    return hashlib.blake2b(msgspec.json.encode(written), digest_size=32).hexdigest()


def verify_parts(home: Path, parts: Sequence[PartEntry]) -> None:
    """Reads every part back. Raises `CheckpointError` naming the first that is missing or damaged."""
    for part in parts:
        path = home / part.file
        try:
            found = file_digest(path)
        except OSError as error:
            raise CheckpointError(
                f"{path}: {error.strerror}; checkpoint.folder must be a folder that every server shares"
            ) from error
        if found != (part.byte_count, part.digest):
            raise CheckpointError(f"{path} is damaged: not the {part.byte_count} bytes that its shard wrote")


def verify_checkpoint(home: Path, manifest: Manifest) -> None:
    """Reads all of a checkpoint back. Raises `CheckpointError`."""
    verify_parts(home, manifest.parts)


def scan_checkpoints(
    folder: Path, check: Callable[[Path, Manifest], object] = verify_checkpoint
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(steps of the complete checkpoints of a run's folder, newest first; a sentence on each that is not).

    `check` raises `CheckpointError` for one that is not.
    """
    complete: list[int] = []
    bad: list[str] = []
    for home in sorted(folder.glob("step-????????"), reverse=True):
        if len(complete) == CHECKPOINTS_MAX:
            break
        try:
            manifest = read_manifest(home)
            check(home, manifest)
        except CheckpointError as error:
            bad.append(str(error))
        else:
            complete.append(manifest.step)
    return tuple(complete), tuple(bad)


def present_checkpoints(
    folder: Path, check: Callable[[Path, Manifest], object] = lambda home, manifest: None
) -> tuple[int, ...]:
    """Steps of checkpoints whose manifest verifies and whose parts are there with their sizes, newest first.

    For a look that must not take minutes (128 GB for 8 B parameters at 16 bytes); who restarts from one reads its
    own part in full, and names a checkpoint no more when that part is damaged. `check` as in `scan_checkpoints`.
    """
    present: list[int] = []
    for home in sorted(folder.glob("step-????????"), reverse=True):
        if len(present) == CHECKPOINTS_MAX:
            break
        with contextlib.suppress(CheckpointError, OSError):
            manifest = read_manifest(home)
            check(home, manifest)
            if all((home / part.file).stat().st_size == part.byte_count for part in manifest.parts):
                present.append(manifest.step)
    return tuple(present)


def read_checkpoint(folder: Path, step: int) -> tuple[Manifest, dict[tuple[int, int], dict[str, Tensor]]]:
    """A checkpoint, verified: its manifest, and each (stage, shard)'s state.

    Raises:
        CheckpointError: it is not complete.
    """
    home = step_folder(folder, step)
    manifest = read_manifest(home)
    verify_parts(home, manifest.parts)
    about = {"config_hash": manifest.config_hash, "version": manifest.version}
    return manifest, {(part.stage, part.shard): read_part(home / part.file, about) for part in manifest.parts}


def check_run(manifest: Manifest, config: RunConfig) -> None:
    """Refuses to restart from a checkpoint of another run."""
    if not _is_of(manifest, config):
        raise BadInputError(f"checkpoint {manifest.step} is of another configuration of run {manifest.run!r}")


def delete_older_parts(folder: Path, step: int, config: RunConfig) -> None:
    """For a folder that is not shared: of the checkpoints up to `step`, keeps this server's parts of those that stay
    (`protocol.run.keeping`)."""
    homes = [home for home in folder.glob("step-????????") if home.name <= step_folder(folder, step).name]
    kept = kept_steps([_step_of(home) for home in homes], config)
    for home in homes:
        if _step_of(home) not in kept:
            shutil.rmtree(home, ignore_errors=True)


def _step_of(home: Path) -> int:
    return int(home.name.removeprefix("step-"))


def _delete_older(folder: Path, newest: Manifest) -> None:
    """Keeps complete ones as `protocol.run.keeping` says; what never got its manifest goes with the older ones."""
    this = step_folder(folder, newest.step)
    older = sorted(home for home in folder.glob("step-????????") if home.name < this.name)
    complete = [newest.step]
    for home in older:
        with contextlib.suppress(CheckpointError):
            complete.append(read_manifest(home).step)
    kept = kept_steps(complete, newest.config)
    for home in older:
        if _step_of(home) in kept:
            continue
        # Without its manifest what is left of a half-deleted folder is no checkpoint.
        (home / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(home, ignore_errors=True)


def undo_after(folder: Path, step: int) -> None:
    """The run has gone back to `step` (-1: to its beginning), and what it does now comes out otherwise: later
    checkpoints are none any more. Every server says so before it begins, so none of the new ones can be there yet."""
    for home in folder.glob("step-????????"):
        if home.name > step_folder(folder, max(step, 0)).name or step < 0:
            with contextlib.suppress(FileNotFoundError):  # another server of the run has done it
                (home / MANIFEST).rename(home / UNDONE)
                _sync(home)


def publish(temporary: Path, path: Path) -> None:
    """Gives a finished file its name, durably."""
    _sync(temporary)
    temporary.rename(path)
    _sync(path.parent)


def try_writing(folder: Path) -> None:
    """Writes a byte durably where checkpoints lie, and takes it away: where writing hangs, so does this. A folder that
    is full, read-only or not there yet is no reason to say nothing."""
    path = folder / f".try.{secrets.token_hex(8)}.tmp"
    with contextlib.suppress(OSError):
        try:
            path.write_bytes(b"?")
            _sync(path)
        finally:
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
