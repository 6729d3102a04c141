"""Seals of checkpoints: each shard's server signs its part, the decider the manifest, beside the files.

    step-00000100/stage-0-shard-1-93b0…e1.safetensors.seal … manifest.json.seal

The manifest's seal covers the digests of all parts; a part's own names the server that wrote it. A seal is on the disk
before what it vouches for is complete, so a checkpoint that a crash left is never half signed.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from node.compute import checkpoint
from node.compute.checkpoint import MANIFEST, CheckpointError, Manifest, PartEntry, publish, verify_parts
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.trust.identity import node_id
from protocol.trust.seals import SEAL_BYTES_MAX, Sealed, Sealer, open_seal

SUFFIX = ".seal"


@dataclass
class Vouched:
    """Who stands for a checkpoint that verifies."""

    manifest: Sealed | None
    """None: nobody has signed it."""
    servers: dict[str, NodeId] = field(default_factory=dict)
    """By part, those whose seal is there."""

    def of_another(self, coordinator_key: bytes) -> bool:
        """Whether a server of another coordinator has signed it."""
        return self.manifest is not None and self.manifest.coordinator_key != coordinator_key

    def sentence(self, coordinator_key: bytes | None) -> str:
        """What somebody who is about to use it must know, or nothing.

        Args:
            coordinator_key: of the run, where it is known.
        """
        if self.manifest is None:
            return (
                "nobody has signed this checkpoint: it was written before servers signed what they write, or the"
                " signature was taken away"
            )
        if coordinator_key is not None and self.manifest.coordinator_key != coordinator_key:
            other = node_id(self.manifest.coordinator_key)
            return f"this checkpoint was signed by a server of another coordinator, {other}"
        return ""


def seal_part(home: Path, part: PartEntry, config_hash: str, step: int, sealer: Sealer) -> None:
    """Signs a part that this server has just written."""
    _write(home / (part.file + SUFFIX), sealer.seal(_of_part(part, config_hash, step)))


def seal_manifest(home: Path, manifest: Manifest, sealer: Sealer) -> None:
    """Signs a manifest, `sum` and all, that is about to be written."""
    _write(home / (MANIFEST + SUFFIX), sealer.seal(_of_manifest(manifest)))


def verify(home: Path, manifest: Manifest, parts: Sequence[PartEntry]) -> Vouched:
    """Reads these parts of a checkpoint back, and the seals that are there.

    Raises:
        CheckpointError: a part or a seal is not what it should be; names the file and the server that signed it.
    """
    vouched = Vouched(_read(home / MANIFEST, _of_manifest(manifest)))
    for part in parts:
        sealed = _read(home / part.file, _of_part(part, manifest.config_hash, manifest.step))
        if sealed is not None:
            vouched.servers[part.file] = sealed.node
        try:
            verify_parts(home, [part])
        except CheckpointError as error:
            signer = f"; server {sealed.node} signed it as it was" if sealed is not None else ""
            raise CheckpointError(f"{error}{signer}") from error
    return vouched


def scan_checkpoints(folder: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """As `checkpoint.scan_checkpoints`; one with a false seal is not complete."""
    return checkpoint.scan_checkpoints(folder, lambda home, manifest: verify(home, manifest, manifest.parts))


def present_checkpoints(folder: Path) -> tuple[int, ...]:
    """As `checkpoint.present_checkpoints`; one whose manifest has a false seal is not there."""
    return checkpoint.present_checkpoints(folder, lambda home, manifest: verify(home, manifest, ()))


def _of_part(part: PartEntry, config_hash: str, step: int) -> bytes:
    words = ("part", config_hash, step, part.stage, part.shard, part.file, part.byte_count, part.digest.hex())
    return "\n".join(map(str, words)).encode()


def _of_manifest(manifest: Manifest) -> bytes:
    return "\n".join(("manifest", manifest.config_hash, str(manifest.step), manifest.sum)).encode()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(data)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(file: Path, statement: bytes) -> Sealed | None:
    """Who signed the statement about `file`; None when nobody did."""
    path = file.with_name(file.name + SUFFIX)
    try:
        with path.open("rb") as opened:
            data = opened.read(SEAL_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    try:
        return open_seal(data, statement)
    except RemoteProtocolError as error:
        raise CheckpointError(f"{file} was changed, or its seal was: {error.detail}") from error
