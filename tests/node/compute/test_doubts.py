"""Damaged parts in folders: found by the server that begins from them, and then no more named by it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from node.compute import checkpoint, doubts, places, seals
from node.compute.doubts import doubt, doubted, trust
from node.machine import jobs
from protocol.base.machine import ComputeFailed
from tests.node.compute.test_checkpoint import write
from tests.node.compute.test_lanes import Bench, small_run


def saved(tmp_path: Path, folder: str) -> Bench:
    """Two stages of two servers with checkpoints 1 and 2."""
    config = small_run(0, folder)
    bench = Bench(config, tmp_path)
    bench.start()
    for step in (1, 2):
        bench.fetch(config.version_of(step - 1))
        bench.step(step - 1)
        parts = [
            (stage, shard, *bench.do(server, jobs.WriteCheckpoint(step, step)))
            for stage, servers in enumerate(bench.servers)
            for shard, server in enumerate(servers)
        ]
        bench.do(bench.servers[0][0], jobs.WriteManifest(step, tuple(parts), 6 * step))
    return bench


def test_a_damaged_part_in_a_shared_folder_is_not_named_again_until_it_was_mended(tmp_path: Path) -> None:
    """A look sees that all is there. Only the server whose part it is finds the damage, reads it again at each look
    and no other part, and names the checkpoint before; once mended and read it is read at no look any more."""
    bench = saved(tmp_path, str(tmp_path / "shared"))
    folder = checkpoint.run_folder(tmp_path / "shared", bench.config)
    part = checkpoint.find_part(checkpoint.step_folder(folder, 2), 1, 0)
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    server, state, look = bench.servers[1][0], tmp_path / "10", jobs.FindCheckpoints(bench.config)
    assert bench.do(server, look) == (2, 1)
    fact = server.perform(jobs.StartShard(2), {}).fact
    assert isinstance(fact, ComputeFailed) and f"{part} is damaged" in fact.reason
    complete, (sentence,) = seals.look_at_checkpoints(folder, doubted(state))
    assert complete == bench.do(server, look) == (1,) and f"{part} is damaged" in sentence
    assert bench.do(bench.servers[0][0], look) == (2, 1)
    bench.do(server, jobs.StartShard(1))
    assert (state / doubts.FILE).read_text() == f"{part}\n"

    part.write_bytes(whole)
    assert bench.do(server, look) == (2, 1)
    bench.do(server, jobs.StartShard(2))
    assert (state / doubts.FILE).read_text() == ""


def test_a_damaged_part_in_a_folder_of_a_servers_own_is_no_beginning(tmp_path: Path) -> None:
    """Mostly there is no manifest: the part's name says what its bytes must be."""
    bench = saved(tmp_path, "mine")
    server = bench.servers[1][1]
    home = checkpoint.step_folder(checkpoint.run_folder(tmp_path / "11" / "mine", bench.config), 2)
    assert not (home / checkpoint.MANIFEST).exists()
    part = checkpoint.find_part(home, 1, 1)
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fact = server.perform(jobs.StartShard(2), {}).fact
    assert isinstance(fact, ComputeFailed) and f"{part} is damaged" in fact.reason
    bench.do(server, jobs.StartShard(1))
    part.write_bytes(whole)
    bench.do(server, jobs.StartShard(2))


def test_a_sector_that_cannot_be_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint is there with all sizes, at every look: nobody could begin from it, and everybody would."""
    bench = saved(tmp_path, str(tmp_path / "shared"))
    folder = checkpoint.run_folder(tmp_path / "shared", bench.config)
    part = checkpoint.find_part(checkpoint.step_folder(folder, 2), 0, 1)
    real = places.file_digest

    def bad(path: Path) -> tuple[int, bytes]:
        if path == part:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    server = bench.servers[0][1]
    with monkeypatch.context() as patch:
        patch.setattr(places, "file_digest", bad)
        fact = server.perform(jobs.StartShard(2), {}).fact
        assert isinstance(fact, ComputeFailed) and os.strerror(errno.EIO) in fact.reason
        assert bench.do(server, jobs.FindCheckpoints(bench.config)) == (1,)
    assert bench.do(server, jobs.FindCheckpoints(bench.config)) == (2, 1), "the disk was away for a while"


def test_what_an_older_build_doubted_counts_if_all_of_it_verifies(tmp_path: Path) -> None:
    """It wrote down the checkpoint, not the part."""
    state, home = tmp_path / "state", write(tmp_path / "shared", 100)
    state.mkdir()
    (state / doubts.FILE).write_text(f"{home}\n")
    assert seals.present_checkpoints(home.parent, doubted(state)) == (100,)
    part = checkpoint.find_part(home, 1, 0)
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert seals.present_checkpoints(home.parent, doubted(state)) == ()
    part.write_bytes(whole)
    trust(state, home, [part.name])
    assert (state / doubts.FILE).read_text() == ""


def test_of_what_was_doubted_the_newest_is_kept(tmp_path: Path) -> None:
    """Each part once, and the file cannot grow without end."""
    for number in range(300):
        doubt(tmp_path, tmp_path, [f"part-{number}", "again"])
    lines = (tmp_path / doubts.FILE).read_text().splitlines()
    assert len(lines) == len(set(lines)) == 256 and lines[-2:] == [f"{tmp_path}/part-299", f"{tmp_path}/again"]
