"""What an audit compared, in one file that anybody can check again: `barnraise audit verify FILE`.

The file holds all that the result follows from, in the bytes in which it travelled: the stage's weights of the version
(and its grid), what went into each task, what the member brought, and the audit's order. Beside it lies the seal of the
server or auditor that wrote it. Whoever checks it computes the tasks once more and compares; that the member brought
these bytes is the server's word, since links are not signed message by message.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from node.compute import checkpoint
from node.machine import jobs
from node.process.store import Buffer
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import TensorRef
from protocol.run.audits import Audit, Difference
from protocol.run.plan import Plan
from protocol.run.run import RunConfig
from protocol.trust.seals import SEAL_BYTES_MAX, Sealed, Sealer, open_seal

FOLDER = "evidence"
FILES_MAX = 64
"""In one state folder: whoever lies again and again is banned after the first."""
FOLDER_BYTES_MAX = 8 * 2**30
"""Of all files there, each of which has a gigabyte at most: liars with many names must not fill a server's disk."""
LEFT_FREE_BYTES = 5 * 10**9
LEFT_FREE_SHARE = 0.1
"""Of the disk; the larger of both is left to the journal, without which a server can promise nothing and ends."""
_WORDS_BYTES = 1 << 20
"""What a file has beside its tensors, with some to spare."""


class NoRoomError(Exception):
    """The file is not written; a sentence for the operator says why."""


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file says beside its tensors."""

    config: RunConfig
    vocabulary: int
    plan: Plan
    stage: int
    order: Audit
    differences: tuple[Difference, ...]
    tensors: tuple[tuple[str, TensorRef], ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A file that was read."""

    about: About
    buffers: Mapping[str, Buffer]
    """By name."""
    sealed: Sealed | None
    """Which server or auditor wrote it; None: nobody has signed it."""


def write(
    folder: Path,
    place: jobs.SetUpServer | jobs.SetUpDevice,
    job: jobs.WriteEvidence,
    buffers: Mapping[int, Buffer],
    sealer: Sealer | None,
) -> str:
    """Writes the file and its seal; returns its name.

    Where there is no room the newest is refused, and the oldest stays: each file that the log has named lies there
    until the operator takes it away, and nobody pushes out the evidence against itself by lying under other names.

    Raises:
        NoRoomError: there are too many already, or too little of the disk would be left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for torn in folder.glob("*.tmp"):  # of a killed writer: this process alone writes here, one file at a time
        torn.unlink(missing_ok=True)
    _check_room(folder, sum(ref.byte_count for ref in job.tensors) + _WORDS_BYTES)
    made = job.order.contribution
    path = folder / f"{made.node[:12]}-{made.incarnation}-{made.number}.safetensors"
    about = About(
        config=place.config,
        vocabulary=place.vocabulary,
        plan=place.plan,
        stage=place.stage,
        order=job.order,
        differences=job.differences,
        tensors=tuple(zip(job.names, job.tensors, strict=True)),
    )
    tensors = {
        name: torch.frombuffer(bytearray(buffers[ref.key]), dtype=torch.uint8)
        for name, ref in zip(job.names, job.tensors, strict=True)
    }
    checkpoint.write_part(path, tensors, {"evidence": msgspec.json.encode(about).decode()})
    if sealer is not None:
        path.with_name(path.name + ".seal").write_bytes(sealer.seal(_statement(path)))
    return path.name


def _check_room(folder: Path, byte_count: int) -> None:
    """Raises `NoRoomError`."""
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    after = sum(sizes) + byte_count
    disk = shutil.disk_usage(folder)
    left_bytes = max(LEFT_FREE_BYTES, LEFT_FREE_SHARE * disk.total)
    why = ""
    if len(sizes) >= FILES_MAX:
        why = f"there are {len(sizes)} files"
    elif after > FOLDER_BYTES_MAX:
        why = f"with it there would be {after / 1e9:.1f} GB, and {FOLDER_BYTES_MAX / 1e9:.1f} are kept"
    elif disk.free - byte_count < left_bytes:
        why = f"the disk has {disk.free / 1e9:.1f} GB free, of which {left_bytes / 1e9:.1f} are left for the journal"
    if why:
        raise NoRoomError(f"{folder}: {why}; move what lies there elsewhere, or make room")


def read(path: Path) -> Evidence:
    """Reads a file and its seal.

    Raises:
        CheckpointError: it is no evidence, or was changed after a server signed it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            words = msgspec.json.decode(opened.metadata()["about"], type=dict[str, str])
            about = msgspec.json.decode(words["evidence"], type=About)
            found: dict[str, Any] = {name: opened.get_tensor(name) for name, _ in about.tensors}
    except (OSError, SafetensorError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise checkpoint.CheckpointError(f"{path}: no evidence of an audit: {error}") from error
    for name, ref in about.tensors:
        if found[name].dtype != torch.uint8 or found[name].numel() != ref.byte_count:
            raise checkpoint.CheckpointError(f"{path}: {name} is not of the size that it says")
    seal = path.with_name(path.name + ".seal")
    sealed = None
    if seal.exists():
        try:
            sealed = open_seal(seal.read_bytes()[: SEAL_BYTES_MAX + 1], _statement(path), ("server", "auditor"))
        except RemoteProtocolError as error:
            raise checkpoint.CheckpointError(f"{path} was changed, or its seal was: {error.detail}") from error
    return Evidence(about, {name: tensor.numpy().data for name, tensor in found.items()}, sealed)


def _statement(path: Path) -> bytes:
    """What a server signs: the name, and a digest of all bytes."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return "\n".join(("evidence", path.name, digest.hexdigest())).encode()
