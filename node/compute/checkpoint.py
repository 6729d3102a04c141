"""Snapshots and checkpoints: an interrupted write is never mistaken for a whole one.

A *part* is one shard's state of one version in a safetensors file that says what it is. A *checkpoint* is a place (a
folder, or a prefix of an object store: `node.compute.places`) with the parts of all shards and a manifest, written
last: it exists exactly if its manifest verifies. Files appear whole or not at all (state-and-trust 4.4).

    FOLDER/RUN-CONFIGHASH/step-00000100/stage-0-shard-1-93b0…e1.safetensors … manifest.json

The bytes of a part follow from its state alone, and its name from its bytes: a shard that writes the same state again
finds the file there and leaves it alone, and one whose state differs writes beside it. So nothing that a manifest
names is ever written again, and a manifest is replaced only when what it names does not verify any more. It is put
only where none is: of two servers that write it at once one succeeds, and the other goes by what it finds. Where each
server keeps its own parts and has no manifest, there is one part of a shard at most: what it wrote last, of a way that
was not undone.

A shard's state is `params`, `m`, `v` of the version and, where the run's delay needs it, `previous`: the weights of the
version before, on which the next step runs. With `gradients = "gi"` also `averages` (and `previous_averages`), from
which the grid of a step's gradients is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from node.compute.object_store import StorePlace, TooLargeError
from node.compute.places import Files, Place, file_digest, nearby, on, publish, sync
from protocol.base.errors import BadInputError
from protocol.run.keeping import kept_steps
from protocol.run.run import RunConfig

if TYPE_CHECKING:  # whoever only looks which checkpoints there are needs no torch
    from torch import Tensor

    from node.machine.jobs import SetUpServer

FORMAT = "barnraise-shard-2"
MANIFEST = "manifest.json"
UNDONE = "manifest.undone.json"
"""What a manifest is called once the run has gone back behind its checkpoint for good: nobody begins from it, and the
same step makes another. Its parts go when that is written, or with the older ones."""
_NOT_SHARED = "checkpoint.folder must be a folder that every server shares"
CHECKPOINTS_MAX = 16
"""Checkpoints that a node tells the coordinator of, newest first."""
_MANIFEST_BYTES_MAX = 16 * 2**20
_HOME = re.compile(r"step-[0-9]{8}")
_FILE = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
"""What a manifest may call a part: a file of its own folder, with a name that every system takes."""
_LOOSE = (".safetensors", ".seal", ".tmp")
"""How names of parts end, of what belongs to them, and of what killed writers left."""
_OPEN_MIN = 2
"""Newest parts that are kept until it is known what became of their checkpoints: a fellow may still be writing its own
of the one before."""


P = TypeVar("P", Path, StorePlace, Path | StorePlace)


class CheckpointError(Exception):
    """A snapshot or checkpoint cannot be used; the sentence names the file and what is wrong with it."""


class NoManifestError(CheckpointError):
    """There is no manifest. It is put down last and deleted first, so what lies there is being written or deleted."""


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
    home: Path, stage: int, shard: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any], alone: bool = False
) -> PartEntry:
    """Writes a part of the checkpoint in `home` under a name of its own; one that is there already is not touched.

    Args:
        alone: in a folder of this server's own, where mostly no manifest says which part counts: what this shard wrote
            of the step before, when the run had come to it otherwise, goes. No clock has to tell them apart.

    Raises:
        OSError: the folder is full, or cannot be written to; nothing of this part is left there.
    """
    fresh = not home.exists()
    temporary = _write_temporary(home / f"stage-{stage}-shard-{shard}", tensors, about)
    try:
        byte_count, digest = file_digest(temporary)
        path = home / part_name(stage, shard, digest)
        if alone:  # before the new one is there: killed in between, this server has no part of the step
            others = [other for other in _parts_of(home, stage, shard) if other != path]
            on(home).remove([other.name + end for other in others for end in (".seal", "")])
        if not path.exists() or file_digest(path) != (byte_count, digest):
            publish(temporary, path)
        if fresh:
            sync(home.parent)
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


def read_part(
    path: Path, about: Mapping[str, Any], config: RunConfig | None = None, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """A shard's state; its own words must agree with `about` in every key. With the `config` that `about` names, it may
    be called what an older build called it. Of the tensors only those with these `names` are read, where given.

    Raises:
        CheckpointError: the file is missing, damaged or of something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            _check_about(path, file.metadata(), about, config)
            held = file.keys()
            return {name: file.get_tensor(name) for name in held if names is None or name in names}
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


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def run_folder(folder: P, config: RunConfig) -> P:
    """Where a run keeps its checkpoints below a place that several runs may share: one that an older build has begun
    stays in use, or a run would go back to before its upgrade."""
    known = [folder / f"{config.name}-{called.hex()[:16]}" for called in config.hashes()]
    return next((home for home in known if on(home).exists()), known[0])


def step_folder(folder: P, step: int) -> P:
    """The place of one checkpoint below a run's."""
    return folder / f"step-{step:08d}"


def runs_in(place: Place) -> list[Place]:
    """The places of runs that have checkpoints in `place`: itself, or directly below."""
    return [run for run in (place, *(place / name for name in on(place).below())) if _homes(run)]


def steps_in(folder: Place) -> list[int]:
    """Those that have a place there, whole or not, oldest first."""
    return [step_of(home.name) for home in _homes(folder)]


def _homes(folder: Place) -> list[Any]:
    """The places of a run's checkpoints, whole or not, oldest first. What else lies there is somebody's own."""
    return [folder / name for name in on(folder).below() if _HOME.fullmatch(name)]


def part_name(stage: int, shard: int, digest: bytes) -> str:
    """The name of a part's file within its checkpoint: another content has another name."""
    return f"stage-{stage}-shard-{shard}-{digest.hex()[:16]}.safetensors"


def find_part(home: Path, stage: int, shard: int) -> Path:
    """The file of a shard in a checkpoint: what the manifest names; without one here, what this shard wrote (the
    newest, where an older build has left several).

    Raises:
        CheckpointError: there is none.
    """
    with contextlib.suppress(CheckpointError):
        for part in read_manifest(home).parts:
            if (part.stage, part.shard) == (stage, shard):
                return home / part.file
    newest = max(_parts_of(home, stage, shard), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        raise CheckpointError(f"{home}: no part of stage {stage} shard {shard}")
    return newest


def _parts_of(home: Path, stage: int, shard: int) -> list[Path]:
    """All that a shard has ever written there."""
    return list(home.glob(f"stage-{stage}-shard-{shard}-????????????????.safetensors"))


def verify_own(path: Path) -> None:
    """Reads back a part that may have no manifest: its name follows from its bytes. Raises `CheckpointError`."""
    try:
        _, digest = file_digest(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    if not path.stem.endswith(digest.hex()[:16]):
        raise CheckpointError(f"{path} is damaged: not the bytes that its name follows from")


def own_parts(folder: Place, steps: Iterable[int], place: SetUpServer | None) -> tuple[int, ...]:
    """Those of the steps of which the part of a server's shard lies here, whether or not there is a manifest."""
    found = []
    for step in steps:
        home = step_folder(folder, step)
        with contextlib.suppress(CheckpointError):
            if isinstance(home, Path) and place and find_part(home, place.stage, place.shard).is_file():
                found.append(step)
    return tuple(found)


def write_manifest(
    folder: Place,
    manifest: Manifest,
    shared: bool,
    sign: Callable[[Any, Manifest], None] = lambda home, manifest: None,
) -> str:
    """Makes a checkpoint of parts that are all durable, then deletes what is older than the newest `keep`.

    A manifest that is there, fits this run and verifies stays as it is, and so does all that it names: after going
    back, the shards write the state that they began from once more, and no restart may depend on that going well.
    Every part, and the manifest itself, is read back first: nothing old goes before the new one is known good. Where
    the servers share no folder (`shared` false) only the parts that lie here can be read back; the checkpoint is
    complete once somebody has brought the others. There a manifest of other parts is replaced: who wrote these has
    no others any more (`write_checkpoint_part`). `sign` is called with the place and the manifest as it will be, just
    before it is there. Returns what the manifest is called.

    Raises:
        CheckpointError: a part is missing or is not what its shard said, or another server writes another manifest.
        OSError: the place cannot be written to.
    """
    home = step_folder(folder, manifest.step)
    files, path = on(home), str(home / MANIFEST)
    present = files.sizes()
    seen = _content(files) if MANIFEST in present else None
    if (standing := _standing(home, manifest, shared)) is None:
        here = [part for part in manifest.parts if shared or part.file in present]
        if files.reads_back:
            verify_parts(home, here)
        else:
            check_there(home, here, present)
        manifest = msgspec.structs.replace(manifest, sum=manifest.expected_sum())
        sign(home, manifest)
        content = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        if not (files.add(MANIFEST, content) if seen is None else files.swap(MANIFEST, content, seen)):
            # Another server was here between the look and the word: it is right if what it wrote is.
            if (standing := _standing(home, manifest, shared)) is None:
                raise CheckpointError(f"{path}: another server writes it, too, and not of the same parts")
        elif read_manifest(home) != manifest:
            raise CheckpointError(f"{path}: reads back differently from what was written")
    if shared:
        _delete_unnamed(home, standing or manifest)
    _delete_older(folder, manifest)
    return path


def _content(files: Files) -> bytes | None:
    """The manifest's bytes, whatever they are."""
    try:
        return files.read(MANIFEST, _MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        return None
    except TooLargeError:  # than any manifest
        files.remove([MANIFEST])
        return None


def _standing(home: Place, manifest: Manifest, shared: bool) -> Manifest | None:
    """The manifest in `home`, if it is of this run and this cut, and verifies; of parts that lie elsewhere, too, if it
    names the same."""
    try:
        found = read_manifest(home)
        present = {} if shared else on(home).sizes()
        verify_parts(home, [part for part in found.parts if shared or part.file in present])
    except CheckpointError:
        return None
    names = ("step", "version", "data_hash", "vocabulary", "partition")
    same = all(getattr(found, name) == getattr(manifest, name) for name in names)
    same = same and (shared or found.parts == manifest.parts)
    return found if same and _is_of(found, manifest.config) else None


def check_there(home: Place, parts: Sequence[PartEntry], sizes: Mapping[str, int]) -> None:
    """Raises `CheckpointError` for a part that is not there, or has another size."""
    for part in parts:
        if sizes.get(part.file) != part.byte_count:
            raise CheckpointError(
                f"{home / part.file}: is not there with the bytes that its shard wrote; {_NOT_SHARED}"
            )


def _is_of(manifest: Manifest, config: RunConfig) -> bool:
    return manifest.config_hash in [known.hex() for known in config.hashes()]


def seal_name(manifest: Manifest) -> str:
    """The file with the seal of this very manifest: servers that write others at once do not spoil each other's."""
    return f"{MANIFEST}.{manifest.sum[:16]}.seal"


def _delete_unnamed(home: Place, manifest: Manifest) -> None:
    """Parts that no manifest names, and what killed writers left: the checkpoint is complete without them."""
    named = {MANIFEST, seal_name(manifest), f"{MANIFEST}.seal", *(part.file for part in manifest.parts)}
    named |= {f"{part.file}.seal" for part in manifest.parts}
    on(home).remove([name for name in on(home).sizes() if name not in named and name.endswith(_LOOSE)])


def read_manifest(home: Place) -> Manifest:
    """The manifest of the checkpoint in `home`. Raises `CheckpointError` naming what is wrong, `NoManifestError` for
    none."""
    path = home / MANIFEST
    try:
        content = on(home).read(MANIFEST, _MANIFEST_BYTES_MAX)
        manifest = msgspec.json.decode(content, type=Manifest)
    except FileNotFoundError as error:
        raise NoManifestError(f"{path}: {error.strerror or error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"{path} is torn or damaged: {error}") from error
    if manifest.sum != _sum_of(content):
        raise CheckpointError(f"{path} is damaged: its sum does not fit")
    for part in manifest.parts:
        if not _FILE.fullmatch(part.file):
            raise CheckpointError(f"{path}: {part.file!r} is not the name of a file in its folder")
    return manifest


def _sum_of(content: bytes) -> str:
    """What `Manifest.expected_sum` gave whoever wrote this: its configuration may have had fewer keys than ours."""
    written = msgspec.json.decode(content)
    written["sum"] = ""
    return hashlib.blake2b(msgspec.json.encode(written), digest_size=32).hexdigest()


def verify_parts(home: Place, parts: Sequence[PartEntry]) -> None:
    """Reads every part back. Raises `CheckpointError` naming the first that is missing or damaged."""
    for part in parts:
        path = home / part.file
        try:
            found = on(home).digest(part.file)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}; {_NOT_SHARED}") from error
        if found != (part.byte_count, part.digest):
            raise CheckpointError(f"{path} is damaged: not the {part.byte_count} bytes that its shard wrote")


def verify_checkpoint(home: Place, manifest: Manifest) -> None:
    """Reads all of a checkpoint back. Raises `CheckpointError`."""
    verify_parts(home, manifest.parts)


Check = Callable[[Any, Manifest], object]
"""Called with a checkpoint's place and its manifest; raises `CheckpointError` for one that is not complete."""


def scan_checkpoints(folder: Place, check: Check = verify_checkpoint) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(steps of the complete checkpoints of a run's place, newest first; a sentence on each that is not)."""
    complete: list[int] = []
    bad: list[str] = []
    for home in reversed(_homes(folder)):
        if len(complete) == CHECKPOINTS_MAX:
            break
        try:
            manifest = read_manifest(home)
            check(home, manifest)
        except (CheckpointError, OSError) as error:
            bad.append(str(error))
        else:
            complete.append(manifest.step)
    return tuple(complete), tuple(bad)


def present_checkpoints(
    folder: Place, check: Check = lambda home, manifest: None, most: int = CHECKPOINTS_MAX
) -> tuple[int, ...]:
    """Steps of checkpoints whose manifest verifies and whose parts are there with their sizes, newest first.

    For a look that must not take minutes (128 GB for 8 B parameters at 16 bytes); who restarts from one reads its
    own part in full, and names a checkpoint no more when that part is damaged.
    """
    present: list[int] = []
    for home in reversed(_homes(folder)):
        if len(present) == most:
            break
        with contextlib.suppress(CheckpointError, OSError):
            manifest = read_manifest(home)
            check(home, manifest)
            check_there(home, manifest.parts, on(home).sizes())
            present.append(manifest.step)
    return tuple(present)


def read_verified(
    home: Place, manifest: Manifest, part: PartEntry, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """A shard's state out of a checkpoint's part all of which is verified, in pieces; in memory are the tensors with
    these `names`, or all. Raises `CheckpointError`."""
    about = {"config_hash": manifest.config_hash, "version": manifest.version}
    with fetched(home, [part.file]) as local:
        verify_parts(local, [part])
        return read_part(local / part.file, about, names=names)


@contextlib.contextmanager
def fetched(
    home: Place, names: Iterable[str], scratch: Path | None = None, progress: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """`places.nearby`, and errors inside that speak of a copy name what it is a copy of.

    Raises:
        CheckpointError: the place cannot be read.
    """
    try:
        with nearby(home, names, scratch, progress) as local:
            try:
                yield local
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(str(local), str(home))) from error
    except OSError as error:
        raise CheckpointError(f"{home}: {error.strerror or error}") from error


def check_run(manifest: Manifest, config: RunConfig) -> None:
    """Refuses to restart from a checkpoint of another run."""
    if not _is_of(manifest, config):
        raise BadInputError(f"checkpoint {manifest.step} is of another configuration of run {manifest.run!r}")


def delete_older_parts(folder: Path, step: int, config: RunConfig, complete: Collection[int] = ()) -> None:
    """For a folder that is not shared: of the checkpoints up to `step`, keeps this server's parts of those that stay.

    Of those that it was told are `complete` these are what `protocol.run.keeping` says: a part alone is no checkpoint,
    and while a fellow cannot write its own, newer parts must not push out the last that all have. Of what came behind
    those only the newest may still become one. What is older was perhaps told to an earlier process: it is kept by the
    same rule. So what lies here is at most twice what the rule keeps, and `checkpoint.keep` (or two) parts more.
    """
    steps = [each for each in steps_in(folder) if each <= step]
    told = [each for each in steps if each in complete]
    newest = max(told, default=step)
    kept = kept_steps(told, config) | kept_steps([each for each in steps if each <= newest], config)
    kept |= frozenset([each for each in steps if each > newest][-max(config.checkpoint.keep, _OPEN_MIN) :])
    for each in steps:
        if each not in kept:
            shutil.rmtree(step_folder(folder, each), ignore_errors=True)


def step_of(name: str) -> int:
    """Of the name of a checkpoint's place."""
    return int(name.removeprefix("step-"))


def _delete_older(folder: Place, newest: Manifest) -> None:
    """Keeps complete ones as `protocol.run.keeping` says; what never got its manifest goes with the older ones.

    A manifest that is there and could not be read says nothing of its checkpoint: a disk or a store may be away for a
    minute, and another build may know more fields. It stays, and is not counted; the next write looks again.
    """
    this = step_folder(folder, newest.step)
    older = [home for home in _homes(folder) if home.name < this.name]
    complete, unread = [newest.step], set[str]()
    for home in older:
        try:
            complete.append(read_manifest(home).step)
        except NoManifestError:
            pass
        except CheckpointError:
            unread.add(home.name)
    kept = kept_steps(complete, newest.config)
    for home in older:
        if step_of(home.name) in kept or home.name in unread:
            continue
        # Without its manifest what is left of a half-deleted checkpoint is none.
        on(home).remove([MANIFEST])
        on(home).remove_all()


def undo_after(folder: Place, step: int, shared: bool = True) -> None:
    """The run has gone back to `step` (-1: to its beginning), and what it does now comes out otherwise: later
    checkpoints are none any more. Every server says so before it begins, so none of the new ones can be there yet.

    In a folder that the servers do not share, later parts go as well: without a manifest each counts as long as it is
    there.
    """
    for home in _homes(folder):
        if home.name > step_folder(folder, max(step, 0)).name or step < 0:
            with contextlib.suppress(FileNotFoundError):  # another server of the run has done it
                on(home).rename(MANIFEST, UNDONE)
            if not shared:
                on(home).remove([name for name in on(home).sizes() if name.endswith(_LOOSE)])
