"""Seals of checkpoints: each shard's server signs its part, the decider the manifest, beside the files.

    step-00000100/stage-0-shard-1-93b0…e1.safetensors.seal … manifest.json.6f0c…d2.seal

The manifest's seal covers the digests of all parts; a part's own names the server that wrote it. A seal is there before
what it vouches for is complete, so a checkpoint that a crash left is never half signed. The name of a manifest's seal
follows from the manifest's sum; older builds had one name for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from node.compute import checkpoint
from node.compute.checkpoint import MANIFEST, CheckpointError, Manifest, PartEntry, seal_name, verify_parts
from node.compute.object_store import TooLargeError
from node.compute.places import Place, on
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


def seal_part(home: Place, part: PartEntry, config_hash: str, step: int, sealer: Sealer) -> None:
    """Signs a part that this server has just written."""
    on(home).put(part.file + SUFFIX, sealer.seal(_of_part(part, config_hash, step)))


def seal_manifest(home: Place, manifest: Manifest, sealer: Sealer) -> None:
    """Signs a manifest, `sum` and all, that is about to be written."""
    on(home).put(seal_name(manifest), sealer.seal(_of_manifest(manifest)))


def files_of(home: Place, parts: Sequence[PartEntry]) -> list[str]:
    """Names of what `verify` reads."""
    return [MANIFEST, *(part.file for part in parts), *(part.file + SUFFIX for part in parts), *_of_manifests(home)]


def _of_manifests(home: Place) -> list[str]:
    """The seals of manifests that lie there."""
    return [name for name in sorted(on(home).sizes()) if name.startswith(f"{MANIFEST}.") and name.endswith(SUFFIX)]


def verify(home: Place, manifest: Manifest, parts: Sequence[PartEntry]) -> Vouched:
    """Reads these parts of a checkpoint back, and the seals that are there.

    Raises:
        CheckpointError: a part or a seal is not what it should be; names the file and the server that signed it.
    """
    vouched = Vouched(_read_manifests(home, manifest))
    for part in parts:
        sealed = _read(home, part.file, part.file + SUFFIX, _of_part(part, manifest.config_hash, manifest.step))
        if sealed is not None:
            vouched.servers[part.file] = sealed.node
        try:
            verify_parts(home, [part])
        except CheckpointError as error:
            signer = f"; server {sealed.node} signed it as it was" if sealed is not None else ""
            raise CheckpointError(f"{error}{signer}") from error
    return vouched


def scan_checkpoints(folder: Place) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """As `checkpoint.scan_checkpoints`; one with a false seal is not complete."""
    return checkpoint.scan_checkpoints(folder, lambda home, manifest: verify(home, manifest, manifest.parts))


def look_at_checkpoints(
    folder: Place, also: checkpoint.Check = lambda home, manifest: None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """As `scan_checkpoints` for who cannot wait until all is read: a part counts that is there with its size. `also`
    is asked of those that have passed."""

    def check(home: Any, manifest: Manifest) -> None:
        verify(home, manifest, ())
        checkpoint.check_there(home, manifest.parts, on(home).sizes())
        also(home, manifest)

    return checkpoint.scan_checkpoints(folder, check)


def present_checkpoints(folder: Place, also: checkpoint.Check = lambda home, manifest: None) -> tuple[int, ...]:
    """As `checkpoint.present_checkpoints`; one whose manifest has a false seal is not there."""
    return look_at_checkpoints(folder, also)[0]


def _of_part(part: PartEntry, config_hash: str, step: int) -> bytes:
    words = ("part", config_hash, step, part.stage, part.shard, part.file, part.byte_count, part.digest.hex())
    return "\n".join(map(str, words)).encode()


def _of_manifest(manifest: Manifest) -> bytes:
    return "\n".join(("manifest", manifest.config_hash, str(manifest.step), manifest.sum)).encode()


def _read_manifests(home: Place, manifest: Manifest) -> Sealed | None:
    """Who signed a manifest; None where no manifest's seal is there. A seal of another one is false: the manifest was
    made to fit what was changed."""
    statement = _of_manifest(manifest)
    sealed = _read(home, MANIFEST, seal_name(manifest), statement)
    for other in () if sealed is not None else _of_manifests(home):
        sealed = _read(home, MANIFEST, other, statement)
    return sealed


def _read(home: Place, file: str, seal: str, statement: bytes) -> Sealed | None:
    """Who signed the statement about `file`; None when nobody did."""
    try:
        data = on(home).read(seal, SEAL_BYTES_MAX)
    except FileNotFoundError:
        return None
    except TooLargeError as error:
        raise CheckpointError(f"{home / file} was changed, or its seal was: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{home / seal}: {error.strerror or error}") from error
    try:
        return open_seal(data, statement)
    except RemoteProtocolError as error:
        raise CheckpointError(f"{home / file} was changed, or its seal was: {error.detail}") from error
