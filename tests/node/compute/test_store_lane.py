"""Two stages of two servers with their checkpoints in an object store: what the lanes write, bring and begin from."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.compute import checkpoint, seals
from node.compute.doubts import doubted
from node.compute.lane import Outcome
from node.compute.places import Place, on, open_place
from node.compute.store_lane import FETCHED, Door, StorePerformer, outgoing
from node.data.allowed import Allowed
from node.machine import jobs
from node.machine.jobs import BringManifest, BringPart
from protocol.base.machine import ComputeFailed, WorkGoesOn
from protocol.run.run import RunConfig
from tests.node.compute.test_lanes import Bench, small_run


def trained(config: RunConfig, folder: Path, steps: int) -> Bench:
    bench = Bench(config, folder)
    bench.start()
    for step in range(steps):
        bench.fetch(config.version_of(step))
        bench.step(step)
    return bench


def save(bench: Bench, config: RunConfig, folder: Path, step: int) -> Place:
    """A checkpoint as four servers make it: each its part, then one of them the manifest. Returns its place."""
    allowed = Allowed(checkpoints=(folder,))
    lanes = {
        (stage, shard): StorePerformer(folder / f"{stage}{shard}", allowed, Door())
        for stage in range(2)
        for shard in range(2)
    }
    parts = []
    for (stage, shard), lane in lanes.items():
        written = bench.do(bench.servers[stage][shard], jobs.WriteCheckpoint(step, step))
        bench.do(lane, BringPart(config, 1, step, stage, shard, *written))
        parts.append((stage, shard, *written))
    bench.do(bench.servers[0][0], jobs.WriteManifest(step, tuple(parts), 6 * step))
    bench.do(lanes[0, 0], BringManifest(config, 1, step))
    return checkpoint.step_folder(checkpoint.run_folder(open_place(config.checkpoint.folder), config), step)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 1])
def test_servers_without_a_disk_go_on_from_the_store_to_the_bit(tmp_path: Path, delay: int) -> None:
    """The next step gives the same digests; a long way says that it goes on; nothing is left on either disk."""
    config = small_run(delay, f"file://{tmp_path}/bucket")
    bench = trained(config, tmp_path, 3)
    home = save(bench, config, tmp_path, 3)
    manifest = checkpoint.read_manifest(home)
    vouched = seals.verify(home, manifest, manifest.parts)
    assert vouched.manifest is not None and len(vouched.servers) == 4 and manifest.data_cursor == 18
    assert not any(list(outgoing(tmp_path / place, config).glob("*")) for place in ("00", "01", "10", "11"))
    bench.fetch(config.version_of(3))
    expected = bench.step(3)

    fresh = Bench(config, tmp_path, states=tmp_path / "fresh")
    for number in range(2):  # killed while they loaded, twice
        left = tmp_path / "fresh" / "00" / FETCHED / f".barnraise-fetched-{number}"
        left.mkdir(parents=True)
        (left / "part.safetensors").write_bytes(b"gigabytes")
    said: list[Outcome] = []
    fresh.servers[0][0].deliver = said.append
    fresh.start(checkpoint_step=3)
    assert said and all(isinstance(outcome.fact, WorkGoesOn) for outcome in said)
    fresh.fetch(config.version_of(3))
    assert fresh.step(3) == expected
    assert not list((tmp_path / "fresh" / "00" / FETCHED).iterdir())


def test_a_damaged_part_is_named_by_its_url_and_counts_again_when_it_was_mended(tmp_path: Path) -> None:
    """A look sees that all is there; the server that has found the damage names that checkpoint no more."""
    config = small_run(0, f"file://{tmp_path}/bucket")
    bench = trained(config, tmp_path, 1)
    home = save(bench, config, tmp_path, 1)
    part = next(part for part in checkpoint.read_manifest(home).parts if (part.stage, part.shard) == (1, 0))
    whole = on(home).read(part.file, 1 << 20)
    on(home).put(part.file, whole[:-1] + bytes([whole[-1] ^ 1]))
    folder = checkpoint.run_folder(open_place(config.checkpoint.folder), config)
    server, state = bench.servers[1][0], tmp_path / "10"
    assert bench.do(server, jobs.FindCheckpoints(config)) == (1,)
    fact = server.perform(jobs.StartShard(1), {}).fact
    assert isinstance(fact, ComputeFailed) and f"{home / part.file} is damaged" in fact.reason
    assert bench.do(server, jobs.FindCheckpoints(config)) == ()
    assert seals.present_checkpoints(folder, doubted(state)) == ()
    on(home).put(part.file, whole)
    assert bench.do(server, jobs.FindCheckpoints(config)) == seals.present_checkpoints(folder, doubted(state)) == (1,)
    assert not isinstance(server.perform(jobs.StartShard(1), {}).fact, ComputeFailed)


def test_a_store_that_is_away_for_a_while_makes_no_checkpoint_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was read, so nothing is known of what lies there."""
    config = small_run(0, f"file://{tmp_path}/bucket")
    bench = trained(config, tmp_path, 1)
    save(bench, config, tmp_path, 1)
    server = bench.servers[1][0]

    def away(*_: object) -> None:
        raise OSError("away")

    with monkeypatch.context() as patch:
        patch.setattr("node.compute.object_store.StoreFiles.fetch", away)
        fact = server.perform(jobs.StartShard(1), {}).fact
    assert isinstance(fact, ComputeFailed) and fact.reason.endswith("away")
    assert not (tmp_path / "10" / "doubted").exists()
    assert not isinstance(server.perform(jobs.StartShard(1), {}).fact, ComputeFailed)
