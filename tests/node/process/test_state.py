"""A state folder: a place of checkpoints that is away costs a sentence, and nothing of what the server has."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.compute import checkpoint, places
from node.data.allowed import Allowed
from node.process.crashes import GIVE_UP_AFTER
from node.process.journal import Journal
from node.process.state import NodeState
from protocol.messages import Welcome
from protocol.run.run import CheckpointSection, RunConfig
from tests.node.compute.test_checkpoint import write
from tests.node.process.test_daemon import link_of_a


@pytest.fixture
def state(tmp_path: Path) -> Iterator[NodeState]:
    """Of a server that knows its run, whose checkpoints lie in a folder that all share."""
    journal = Journal(tmp_path / "state")
    state = NodeState(tmp_path / "state", link_of_a("server"), journal)
    config = RunConfig(checkpoint=CheckpointSection(folder=str(tmp_path / "shared")))
    state.keep(Welcome(membership=b"m", config=config, config_hash=config.config_hash(), vocabulary=1))
    checkpoint.step_folder(checkpoint.run_folder(tmp_path / "shared", config), 100).mkdir(parents=True)
    yield state
    journal.close()


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("is_dir", errno.ESTALE),
        ("is_dir", errno.EIO),
        ("is_dir", errno.ENOTCONN),
        ("is_dir", errno.EACCES),
        ("iterdir", errno.ESTALE),
        ("iterdir", errno.EIO),
    ],
)
def test_a_folder_that_is_stale_or_closed_is_a_sentence(
    tmp_path: Path, state: NodeState, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """A shared folder whose server is away or whose rights have changed, at the start and at a welcome: it is as a
    store that is away."""
    allowed, kind = Allowed(checkpoints=(tmp_path,)), type(tmp_path)
    assert "manifest.json" in state.checkpoints(None, allowed)[1][0]
    real = getattr(kind, call)

    def away(self: Path) -> object:
        if self.is_relative_to(tmp_path / "shared"):
            raise OSError(number, os.strerror(number), str(self))
        return real(self)

    monkeypatch.setattr(kind, call, away)
    found, (sentence,) = state.checkpoints(None, allowed)
    assert found == () and os.strerror(number) in sentence and str(tmp_path / "shared") in sentence


def test_one_checkpoint_that_cannot_be_looked_at_hides_no_other(
    tmp_path: Path, state: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the system is a sentence on that one."""

    def away(home: Path) -> checkpoint.Manifest:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(home))

    monkeypatch.setattr(checkpoint, "read_manifest", away)
    assert state.config is not None
    run = checkpoint.run_folder(tmp_path / "shared", state.config)
    checkpoint.step_folder(run, 200).mkdir()
    _, sentences = state.checkpoints(None, Allowed(checkpoints=(tmp_path,)))
    assert ["step-00000200" in sentences[0], "step-00000100" in sentences[1]] == [True, True]


def test_a_start_reads_no_part_of_a_checkpoint(
    tmp_path: Path, state: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All servers of a folder would each read all that it holds, before they dial anybody. A part that is not there
    with its size is a sentence all the same."""

    def digest(path: Path) -> tuple[int, bytes]:
        raise AssertionError(f"{path} was read")

    assert state.config is not None
    run = checkpoint.run_folder(tmp_path / "shared", state.config)
    homes = [write(run, step) for step in (200, 300)]
    monkeypatch.setattr(places, "file_digest", digest)
    monkeypatch.setattr(checkpoint, "file_digest", digest)
    allowed = Allowed(checkpoints=(tmp_path,))
    assert state.checkpoints(None, allowed)[0] == (300, 200)
    part = checkpoint.find_part(homes[1], 1, 0)
    part.write_bytes(part.read_bytes()[:-1])
    found, sentences = state.checkpoints(None, allowed)
    assert found == (200,) and str(part) in sentences[0]


def test_what_the_system_says_of_the_checkpoints_is_no_crash(tmp_path: Path, state: NodeState) -> None:
    """Nothing of the server's own state is given up for it; what it says of that is a crash as before."""

    def end(path: Path) -> None:
        with pytest.raises(ExceptionGroup), state.crashes.counted(state.is_of_checkpoints):
            raise ExceptionGroup("a nursery", [OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))])

    def gives_up() -> str:
        return NodeState(state.folder, link_of_a("server"), state.journal).crashes.gives_up

    for _ in range(GIVE_UP_AFTER):
        end(tmp_path / "shared" / "run-1")
    assert not gives_up()
    for _ in range(GIVE_UP_AFTER):
        end(state.folder / "snapshot-00000001.safetensors")
        state.crashes = NodeState(state.folder, link_of_a("server"), state.journal).crashes
    assert "Stale" in gives_up()
