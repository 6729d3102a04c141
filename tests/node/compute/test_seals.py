"""A checkpoint says who wrote it: what was changed afterwards is found, sums and all, and named with its server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from node.compute import checkpoint, seals
from node.compute.checkpoint import CheckpointError, Manifest
from protocol.trust.identity import Identity
from protocol.trust.membership import JoinRole, Membership, sign_statement
from protocol.trust.seals import Sealer
from tests.node.compute.test_checkpoint import CONFIG, SHARDS, about, manifest

COORDINATOR, OTHER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
SERVERS = [Identity(bytes([10 + number]) * 32) for number in range(len(SHARDS))]


def sealer(server: Identity, coordinator: Identity = COORDINATOR, role: JoinRole = "server") -> Sealer:
    """A server as the coordinator made it; its membership ran out long ago."""
    membership = sign_statement(Membership(server.node, role, bytes(16), 1, 1, 1), coordinator)
    return Sealer(server, lambda: membership, coordinator.public_key)


def write(folder: Path, step: int = 100, signed: bool = True) -> Path:
    """A checkpoint of three small shards of three servers; the first is the decider's."""
    home = checkpoint.step_folder(folder, step)
    parts = []
    for server, (stage, shard) in zip(SERVERS, SHARDS, strict=True):
        state = {name: torch.full((5,), float(step + shard)) for name in ("params", "m", "v")}
        part = checkpoint.write_checkpoint_part(home, stage, shard, state, about(step))
        if signed:
            seals.seal_part(home, part, CONFIG.config_hash().hex(), step, sealer(server))
        parts.append(part)

    def sign(home: Path, manifest: Manifest) -> None:
        if signed:
            seals.seal_manifest(home, manifest, sealer(SERVERS[0]))

    checkpoint.write_manifest(folder, manifest(step, tuple(parts)), True, sign)
    return home


def check(home: Path) -> seals.Vouched:
    found = checkpoint.read_manifest(home)
    return seals.verify(home, found, found.parts)


def replace_part(home: Path, stage: int, shard: int) -> Path:
    """Another state in a part's place, with a manifest whose digest and sum fit it: it verified before."""
    state = {name: torch.full((5,), 666.0) for name in ("params", "m", "v")}
    part = checkpoint.write_checkpoint_part(home, stage, shard, state, about(100))
    found = checkpoint.read_manifest(home)
    parts = tuple(part if (old.stage, old.shard) == (stage, shard) else old for old in found.parts)
    changed = msgspec.structs.replace(found, parts=parts, sum="")
    changed = msgspec.structs.replace(changed, sum=changed.expected_sum())
    (home / checkpoint.MANIFEST).write_bytes(msgspec.json.encode(changed))
    return home / part.file


def test_every_server_vouches_for_its_part_and_the_decider_for_all(tmp_path: Path) -> None:
    """To the coordinator's key; nothing is left beside the seals."""
    home = write(tmp_path)
    vouched = check(home)
    assert vouched.manifest is not None and vouched.manifest.node == SERVERS[0].node
    assert list(vouched.servers.values()) == [server.node for server in SERVERS]
    assert vouched.sentence(COORDINATOR.public_key) == "" and "another coordinator" in vouched.sentence(bytes(32))
    assert seals.scan_checkpoints(tmp_path)[0] == seals.present_checkpoints(tmp_path) == (100,)
    assert {path.suffix for path in home.iterdir()} == {".safetensors", ".seal", ".json"}


def test_a_part_that_was_changed_is_named_with_its_server(tmp_path: Path) -> None:
    """One bit, in the file that its seal lies beside."""
    home = write(tmp_path)
    path = checkpoint.find_part(home, 0, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged.*{SERVERS[1].node}"):
        check(home)


def test_a_manifest_that_was_made_to_fit_is_found(tmp_path: Path) -> None:
    """Its sums are right and its seal is not, so it is no checkpoint to go back to. Without the seal there is a
    sentence, and who knows the coordinator's key refuses it."""
    home = write(tmp_path)
    replace_part(home, 1, 0)
    with pytest.raises(CheckpointError, match=f"not what server {SERVERS[0].node} signed"):
        check(home)
    complete, bad = seals.scan_checkpoints(tmp_path)
    assert complete == seals.present_checkpoints(tmp_path) == () and "manifest.json was changed" in bad[0]
    next(home.glob("manifest.json.*.seal")).unlink()
    vouched = check(home)
    assert "taken away" in vouched.sentence(None) and "taken away" in vouched.sentence(COORDINATOR.public_key)


@pytest.mark.parametrize("who", ["volunteer", "other coordinator", "borrowed", "garbage", "large"])
def test_only_a_server_of_the_coordinator_can_sign(tmp_path: Path, who: str) -> None:
    """A volunteer's seal, one with a membership that is another node's or that the named coordinator never signed."""
    home = write(tmp_path)
    path = replace_part(home, 0, 0)
    path.with_name(path.name + ".seal").unlink(missing_ok=True)
    found = checkpoint.read_manifest(home)
    liar = Identity(bytes([99]) * 32)
    makers = {
        "volunteer": sealer(liar, role="volunteer"),
        "other coordinator": Sealer(liar, sealer(liar, OTHER).credential, COORDINATOR.public_key),
        "borrowed": Sealer(liar, sealer(SERVERS[0]).credential, COORDINATOR.public_key),
    }
    if who in makers:
        seals.seal_manifest(home, found, makers[who])
    else:
        (home / "manifest.json.seal").write_bytes(b"{}" if who == "garbage" else b"{" * 10_000)
    with pytest.raises(CheckpointError, match=r"manifest\.json was changed"):
        check(home)


def test_a_checkpoint_from_before_is_whole_and_says_so(tmp_path: Path) -> None:
    """Nobody signed it: it can be used, with a sentence."""
    vouched = check(write(tmp_path, signed=False))
    assert vouched.servers == {} and "before servers signed" in vouched.sentence(None)
    assert seals.scan_checkpoints(tmp_path)[0] == (100,)


def test_seals_go_with_their_parts(tmp_path: Path) -> None:
    """What no manifest names is deleted, its seal as well."""
    home = write(tmp_path)
    stray = home / "stage-0-shard-0-0000000000000000.safetensors"
    stray.write_bytes(b"")
    stray.with_name(stray.name + ".seal").write_bytes(b"")
    write(tmp_path)
    assert not list(home.glob("*0000000000000000*")) and len(list(home.glob("*.seal"))) == 4
