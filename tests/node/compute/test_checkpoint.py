"""Checkpoints: whole or absent, verified before anything older goes, and damage named."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from node.compute import checkpoint, places
from node.compute.checkpoint import CheckpointError, Manifest, PartEntry
from protocol.base.errors import BadInputError
from protocol.run.batches import Batches
from protocol.run.run import AuditSection, CheckpointSection, RunConfig
from tests.node.compute.whole_checkpoint import read_checkpoint

CONFIG = RunConfig(checkpoint=CheckpointSection(keep=2), audit=AuditSection(rate=0.0))
ONE = msgspec.structs.replace(CONFIG, checkpoint=CheckpointSection(keep=1))
PARTITION = ((0, 5, 2), (5, 10, 1))
SHARDS = ((0, 0), (0, 1), (1, 0))


def about(version: int) -> dict[str, object]:
    """What the parts of these tests say of themselves."""
    return {"config_hash": CONFIG.config_hash().hex(), "version": version}


def write(folder: Path, step: int, shared: bool = True) -> Path:
    """A checkpoint of three small shards."""
    home = checkpoint.step_folder(folder, step)
    parts = []
    for stage, shard in SHARDS:
        state = {name: torch.full((5,), float(step + shard)) for name in ("params", "m", "v")}
        parts.append(checkpoint.write_checkpoint_part(home, stage, shard, state, about(step)))
    checkpoint.write_manifest(folder, manifest(step, tuple(parts)), shared)
    return home


def manifest(step: int, parts: tuple[PartEntry, ...]) -> Manifest:
    return Manifest(
        run=CONFIG.name,
        config_hash=CONFIG.config_hash().hex(),
        config=CONFIG,
        step=step,
        version=step,
        data_cursor=Batches.of(CONFIG).samples(step)[0],
        data_hash="d",
        vocabulary=259,
        partition=PARTITION,
        parts=parts,
    )


def part_of(home: Path, stage: int, shard: int) -> Path:
    """The file of one shard in a checkpoint."""
    return checkpoint.find_part(home, stage, shard)


def contents(home: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a checkpoint: which file it is, and what is in it."""
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in home.iterdir()}


def test_the_same_state_is_the_same_file_and_is_not_written_twice(tmp_path: Path) -> None:
    """Twenty restarts at a checkpoint's version: one file for each shard, and never touched again."""
    home = write(tmp_path, 100)
    before = contents(home)
    for _ in range(20):
        assert write(tmp_path, 100) == home
    assert contents(home) == before and len(before) == len(SHARDS) + 1


def test_a_shard_with_another_state_writes_beside_what_a_manifest_names(tmp_path: Path) -> None:
    """A twin, or a shard that came out differently, harms nothing: the checkpoint keeps what it named first."""
    home = write(tmp_path, 100)
    before = contents(home)
    other = {name: torch.full((5,), 7.0) for name in ("params", "m", "v")}
    parts = [checkpoint.write_checkpoint_part(home, *place, other, about(100)) for place in SHARDS]
    checkpoint.write_manifest(tmp_path, manifest(100, tuple(parts)), shared=True)
    after = contents(home)
    assert {name: after[name] for name in before} == before
    assert checkpoint.scan_checkpoints(tmp_path)[0] == checkpoint.present_checkpoints(tmp_path) == (100,)


def test_a_checkpoint_that_does_not_verify_any_more_is_made_anew(tmp_path: Path) -> None:
    """A flipped bit: the next write of the same state mends it, and what nobody names is gone."""
    home = write(tmp_path, 100)
    damage_bit(home)
    (home / "stage-0-shard-0.0011223344556677.tmp").write_bytes(b"half a file of a killed writer")
    assert checkpoint.scan_checkpoints(tmp_path)[0] == ()
    write(tmp_path, 100)
    assert checkpoint.scan_checkpoints(tmp_path)[0] == (100,) and len(contents(home)) == len(SHARDS) + 1


def test_a_quick_look_sees_what_is_missing_or_cut(tmp_path: Path) -> None:
    """It reads no part: a missing or shortened file is seen, newest first."""
    for step in (100, 200, 300):
        write(tmp_path, step)
    assert checkpoint.present_checkpoints(tmp_path) == (300, 200)  # two are kept
    path = part_of(checkpoint.step_folder(tmp_path, 300), 0, 0)
    path.write_bytes(path.read_bytes()[:-1])
    assert checkpoint.present_checkpoints(tmp_path) == (200,)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_folder_leaves_nothing_of_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the reason, and no torn file stays to fill the disk further."""
    home = write(tmp_path, 100)
    before = contents(home)

    def full(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata)
        with open("/dev/full", "wb", buffering=0) as device:
            device.write(b"x")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.write_checkpoint_part(home, 0, 0, {"params": torch.ones(5)}, about(100))
    assert contents(home) == before


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """A checkpoint gives back every shard's state and the position in the data."""
    write(tmp_path, 100)
    found, shards = read_checkpoint(tmp_path, 100)
    assert found.data_cursor == 100 * CONFIG.batch.microbatches * CONFIG.batch.samples
    assert list(shards) == list(SHARDS)
    assert torch.equal(shards[0, 1]["params"], torch.full((5,), 101.0))
    assert checkpoint.scan_checkpoints(tmp_path)[0] == (100,)


def test_older_ones_go_only_beyond_keep(tmp_path: Path) -> None:
    """The newest `keep` stay; what was never completed goes with them, what is still being written stays."""
    write(tmp_path, 100)
    half = checkpoint.step_folder(tmp_path, 150)
    checkpoint.write_part(half / "stage-0-shard-0.safetensors", {"params": torch.zeros(1)}, {})
    newer = checkpoint.step_folder(tmp_path, 500)
    checkpoint.write_part(newer / "stage-0-shard-0.safetensors", {"params": torch.zeros(1)}, {})
    write(tmp_path, 200)
    write(tmp_path, 300)
    assert checkpoint.scan_checkpoints(tmp_path)[0] == (300, 200)
    assert sorted(home.name for home in tmp_path.iterdir()) == [f"step-{n:08d}" for n in (200, 300, 500)]


def test_what_somebody_lays_beside_checkpoints_is_left_alone(tmp_path: Path) -> None:
    """A copy that an operator keeps under a name of his own is no step, whatever letters it has: it stays as it is, and
    no server ends over it."""
    kept = [tmp_path / name for name in ("step-0000000a", "step-keep-old", "step-١٢٣٤٥٦٧٨")]
    for each in kept:
        shutil.copytree(write(tmp_path, 100), each)
    before = [contents(each) for each in kept]
    for step in (200, 300, 400):
        write(tmp_path, step)
    assert checkpoint.steps_in(tmp_path) == [300, 400] and checkpoint.present_checkpoints(tmp_path) == (400, 300)
    checkpoint.undo_after(tmp_path, 300, shared=False)
    checkpoint.delete_older_parts(tmp_path, 400, ONE)
    checkpoint.undo_after(tmp_path, -1)
    assert [contents(each) for each in kept] == before and checkpoint.present_checkpoints(tmp_path) == ()


def test_what_could_not_be_read_once_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error while the manifest of 200 is read: it stays whole, and costs no other its place. The next look counts
    it, and retention goes on."""
    for step in (100, 200):
        write(tmp_path, step)
    read = places.Folder.read

    def away(self: places.Folder, name: str, bytes_max: int) -> bytes:
        if self.path.name == "step-00000200":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, name, bytes_max)

    monkeypatch.setattr(places.Folder, "read", away)
    write(tmp_path, 300)
    monkeypatch.setattr(places.Folder, "read", read)
    assert checkpoint.scan_checkpoints(tmp_path)[0] == (300, 200, 100)
    write(tmp_path, 400)
    assert checkpoint.scan_checkpoints(tmp_path)[0] == (400, 300)


def test_a_manifest_with_a_field_of_another_build_is_not_deleted(tmp_path: Path) -> None:
    """Nor one that this build cannot make sense of: whose it is, an operator may find out."""
    home = write(tmp_path, 100)
    path = home / "manifest.json"
    path.write_text(path.read_text().replace('"step": 100', '"step": 100, "later": 1'))
    for step in (200, 300, 400):
        write(tmp_path, step)
    assert path.exists() and checkpoint.scan_checkpoints(tmp_path)[0] == (400, 300)


def damage_bit(home: Path) -> None:
    path = part_of(home, 1, 0)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def remove_part(home: Path) -> None:
    part_of(home, 0, 1).unlink()


def tear_manifest(home: Path) -> None:
    path = home / "manifest.json"
    path.write_bytes(path.read_bytes()[:-40])


def edit_manifest(home: Path) -> None:
    path = home / "manifest.json"
    path.write_text(path.read_text().replace('"step": 200', '"step": 201'))


def escape_folder(home: Path) -> None:
    found = checkpoint.read_manifest(home)
    evil = PartEntry(0, 0, "../../etc/passwd", 1, b"")
    bad = manifest(200, (evil, *found.parts[1:]))
    bad = msgspec.structs.replace(bad, sum=bad.expected_sum())
    (home / "manifest.json").write_bytes(msgspec.json.encode(bad))


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (damage_bit, r"stage-1-shard-0-[0-9a-f]{16}\.safetensors is damaged"),
        (remove_part, r"stage-0-shard-1-[0-9a-f]{16}\.safetensors: No such file"),
        (tear_manifest, r"manifest\.json is torn or damaged"),
        (edit_manifest, r"manifest\.json is damaged: its sum does not fit"),
        (escape_folder, r"is not the name of a file in its folder"),
        (lambda home: (home / "manifest.json").unlink(), r"manifest\.json: No such file"),
    ],
)
def test_a_bad_checkpoint_is_named_and_the_last_good_one_counts(tmp_path: Path, harm: object, sentence: str) -> None:
    """Torn, missing, flipped or forged: the error names the file, and the one before is still complete."""
    write(tmp_path, 100)
    harm(write(tmp_path, 200))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=sentence):
        read_checkpoint(tmp_path, 200)
    complete, bad = checkpoint.scan_checkpoints(tmp_path)
    assert complete == (100,) and len(bad) == 1


def test_nothing_old_goes_for_a_new_one_that_does_not_verify(tmp_path: Path) -> None:
    """A part that is not what its shard said: no manifest, and the older checkpoints stay."""
    write(tmp_path, 100)
    write(tmp_path, 200)
    home = checkpoint.step_folder(tmp_path, 300)
    part = checkpoint.write_checkpoint_part(home, 0, 0, {"params": torch.zeros(5)}, about(300))
    wrong = PartEntry(0, 0, part.file, part.byte_count, part.digest[::-1])
    with pytest.raises(CheckpointError, match=r"is damaged"):
        checkpoint.write_manifest(tmp_path, manifest(300, (wrong,)), shared=True)
    elsewhere = PartEntry(0, 1, checkpoint.part_name(0, 1, part.digest), part.byte_count, part.digest)
    with pytest.raises(CheckpointError, match=r"checkpoint\.folder must be a folder that every server shares"):
        checkpoint.write_manifest(tmp_path, manifest(300, (elsewhere,)), shared=True)
    assert checkpoint.scan_checkpoints(tmp_path)[0] == (200, 100)


def test_parts_that_lie_elsewhere_wait_to_be_brought(tmp_path: Path) -> None:
    """Without a shared folder the manifest is written, and the checkpoint is complete once all parts are there."""
    home = write(tmp_path / "all", 100)
    mine = tmp_path / "mine"
    part = checkpoint.step_folder(mine, 100)
    part.mkdir(parents=True)
    shutil.copy(part_of(home, 0, 0), part)
    checkpoint.write_manifest(mine, checkpoint.read_manifest(home), shared=False)
    assert checkpoint.scan_checkpoints(mine)[0] == ()
    for file in home.glob("*.safetensors"):
        shutil.copy(file, part)
    assert checkpoint.scan_checkpoints(mine)[0] == (100,)


def test_parts_of_ones_own_are_kept_too(tmp_path: Path) -> None:
    """In a folder that is not shared the newest `keep` of a server's parts stay."""
    for step in (100, 200, 300):
        checkpoint.write_part(checkpoint.step_folder(tmp_path, step) / "part.safetensors", {"m": torch.zeros(1)}, {})
    checkpoint.delete_older_parts(tmp_path, 200, ONE)
    assert sorted(home.name for home in tmp_path.iterdir()) == ["step-00000200", "step-00000300"]


def steps_kept(folder: Path, written: range, complete: tuple[int, ...], config: RunConfig = CONFIG) -> list[int]:
    """Which parts of its own a server has after it has written these, having been told of `complete`."""
    for step in written:
        checkpoint.write_part(checkpoint.step_folder(folder, step) / "part.safetensors", {"m": torch.zeros(1)}, {})
        checkpoint.delete_older_parts(folder, step, config, complete)
    return checkpoint.steps_in(folder)


def test_parts_of_ones_own_push_out_no_checkpoint_that_is_complete(tmp_path: Path) -> None:
    """A fellow's disk is full for many intervals: no newer checkpoint is complete, and the last ones that are stay.
    What is written meanwhile fills no disk, and goes when there is a newer one that all have."""
    assert steps_kept(tmp_path, range(1, 4), ()) == [2, 3]
    assert steps_kept(tmp_path, range(4, 10), (1, 2, 3)) == [2, 3, 8, 9]
    assert steps_kept(tmp_path, range(10, 40), (2, 3)) == [2, 3, 38, 39]
    assert steps_kept(tmp_path, range(40, 41), (2, 3, 39)) == [3, 38, 39, 40]
    assert steps_kept(tmp_path, range(41, 42), (2, 3, 39, 40)) == [39, 40, 41]


def test_the_one_before_may_still_become_complete(tmp_path: Path) -> None:
    """A fellow is slow: its part of the step before is not written yet, when this server has its own of the next."""
    assert steps_kept(tmp_path, range(1, 5), (1,), ONE) == [1, 3, 4]


def test_what_an_earlier_process_was_told_of_stays_by_the_same_rule(tmp_path: Path) -> None:
    """With audits old ones are kept ever farther apart; a server that has started anew was told of the newest only."""
    audited = msgspec.structs.replace(CONFIG, audit=AuditSection(rate=0.1))
    every = tuple(range(1, 40))
    kept = [steps_kept(tmp_path / name, range(1, 40), told, audited) for name, told in (("a", every), ("b", ()))]
    assert kept[0] == kept[1] and len(kept[0]) > 4
    assert set(kept[0]) - {1} <= set(steps_kept(tmp_path / "b", range(40, 41), (39,), audited))


def test_another_run_or_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """A restart may not change the configuration. (Another cut is read: `test_cut_anew.py`.)"""
    found = checkpoint.read_manifest(write(tmp_path, 100))
    checkpoint.check_run(found, CONFIG)
    with pytest.raises(BadInputError, match="another configuration of run 'demo'"):
        checkpoint.check_run(found, RunConfig(seed=2))
    path = part_of(checkpoint.step_folder(tmp_path, 100), 0, 0)
    with pytest.raises(CheckpointError, match="version is '100', this run's is '101'"):
        checkpoint.read_part(path, about(101))


KILLED = """
import sys
from pathlib import Path
import torch
from node.compute.checkpoint import write_part
size = 400_000
for number in range(10**6):
    write_part(Path(sys.argv[1]), {"params": torch.full((size,), float(number))}, {"number": number})
    print(number, flush=True)
"""


@pytest.mark.slow
def test_kill_in_mid_write_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    """A process killed while it replaces a file over and over: the file is one of the whole ones."""
    path = tmp_path / "part.safetensors"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert child.stdout is not None
    for _ in range(20):
        promised = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    promised = max([promised, *(int(line) for line in child.stdout.read().split())])
    child.wait()
    child.stdout.close()
    newest = checkpoint.read_part(path, {})["params"]
    assert int(newest[0]) in (promised, promised + 1) and bool((newest == newest[0]).all())


def test_what_was_undone_is_no_checkpoint_and_its_step_makes_another(tmp_path: Path) -> None:
    """After going back for good the same step comes out otherwise: nobody begins from the old one, the new one takes
    its place; what lies before the step that the run went back to stays."""
    for step in (100, 200):
        home = write(tmp_path, step)
    old = {part.file for part in checkpoint.read_manifest(home).parts}
    checkpoint.undo_after(tmp_path, 100)
    checkpoint.undo_after(tmp_path, 100)
    assert checkpoint.scan_checkpoints(tmp_path)[0] == (100,)
    state = {name: torch.full((5,), 7.5) for name in ("params", "m", "v")}
    parts = [checkpoint.write_checkpoint_part(home, stage, shard, state, about(200)) for stage, shard in SHARDS]
    checkpoint.write_manifest(tmp_path, manifest(200, tuple(parts)), shared=True)
    assert checkpoint.scan_checkpoints(tmp_path)[0] == (200, 100)
    assert {part.file for part in checkpoint.read_manifest(home).parts}.isdisjoint(old)
    assert not old & {path.name for path in home.iterdir()}, "and its files are gone"
    checkpoint.undo_after(tmp_path, -1)
    assert checkpoint.scan_checkpoints(tmp_path)[0] == ()


def own_part(folder: Path, value: float) -> Path:
    """What a server that keeps its own parts writes of step 100."""
    home = checkpoint.step_folder(folder, 100)
    state = {"params": torch.full((3,), value)}
    written = checkpoint.write_checkpoint_part(home, 1, 0, state, about(100), alone=True)
    return home / written.file


def test_a_server_that_keeps_its_own_parts_begins_from_what_it_wrote_last(tmp_path: Path) -> None:
    """The run comes to a step one way, another, and the first again, whose bytes are the same; or the clock is set
    back between two ways. Other shards, which somebody may have brought, keep theirs."""
    other = checkpoint.write_checkpoint_part(checkpoint.step_folder(tmp_path, 100), 1, 1, {"m": torch.ones(1)}, {})
    first = own_part(tmp_path, 1.0)
    (first.parent / (first.name + ".seal")).write_bytes(b"who wrote it")
    ahead = first.stat().st_mtime + 3600
    os.utime(first, (ahead, ahead))
    second = own_part(tmp_path, 2.0)
    assert checkpoint.find_part(first.parent, 1, 0) == second != first
    assert sorted(path.name for path in first.parent.iterdir()) == [second.name, other.file]
    os.utime(second, (ahead, ahead))
    assert own_part(tmp_path, 1.0) == checkpoint.find_part(first.parent, 1, 0) == first


def test_parts_of_ones_own_that_were_undone_are_none(tmp_path: Path) -> None:
    """A folder that is not shared, and a way back: what the run will come to otherwise is not there meanwhile, and what
    lies before it stays."""
    home = own_part(tmp_path, 1.0).parent
    before = checkpoint.step_folder(tmp_path, 50)
    part = checkpoint.write_checkpoint_part(before, 1, 0, {"params": torch.zeros(3)}, about(50), alone=True)
    checkpoint.undo_after(tmp_path, 50, shared=False)
    checkpoint.undo_after(tmp_path, 50, shared=False)
    with pytest.raises(CheckpointError, match="no part of stage 1 shard 0"):
        checkpoint.find_part(home, 1, 0)
    assert checkpoint.find_part(before, 1, 0) == before / part.file
    own_part(tmp_path, 2.0)


def test_where_parts_lie_elsewhere_a_manifest_of_other_parts_is_made_anew(tmp_path: Path) -> None:
    """Nobody can see what has become of the parts of others; what all have just written counts."""
    for value in (1.0, 2.0, 2.0):
        mine = own_part(tmp_path, value)
        byte_count, digest = places.file_digest(mine)
        elsewhere = PartEntry(0, 0, f"stage-0-shard-0-{value}.safetensors", 7, bytes(32))
        parts = (elsewhere, PartEntry(1, 0, mine.name, byte_count, digest))
        checkpoint.write_manifest(tmp_path, manifest(100, parts), shared=False)
        assert checkpoint.read_manifest(mine.parent).parts == parts
        assert checkpoint.find_part(mine.parent, 1, 0) == mine


def test_a_look_writes_where_checkpoints_lie_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever answers it has shown that writing there does not hang. A folder that is not there yet says nothing."""
    synced: list[Path] = []
    monkeypatch.setattr(places, "sync", synced.append)
    places.on(tmp_path).try_writing()
    assert [path.parent for path in synced] == [tmp_path] and not list(tmp_path.iterdir())
    places.on(tmp_path / "nowhere").try_writing()
    assert len(synced) == 1
