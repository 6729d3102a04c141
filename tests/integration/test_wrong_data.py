"""A path that is wrong at the servers alone: named where the operator looks, corrected, and nobody joins anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.drive.process import free_port
from tests.integration.swarm import RUN, Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BUILTIN = 'source = "builtin:grammar"'


def says(swarm: Swarm, *words: str) -> bool:
    """Whether `status` says all of this of what the run waits for."""
    return all(word in swarm.status()["run"]["waiting_for"] for word in words)


def trains(swarm: Swarm) -> bool:
    """Whether a coordinator that has been started again answers and a step is closed."""
    assert swarm.coordinator.child.running, swarm.coordinator.child.log_tail()
    try:
        return swarm.step() >= 1
    except OSError:
        return False


def written(folder: Path, name: str) -> str:
    """A run of one stage, of two servers, whose text is a file of their folder."""
    text = RUN.replace(BUILTIN, f'source = "{folder / name}"').replace("count = 2", "count = 1")
    return text.replace('"attacked"', '"corrected"')


@pytest.mark.long
def test_a_path_that_is_wrong_at_the_servers_is_corrected_in_the_file(tmp_path: Path) -> None:
    """Before the first step: the sentence of the server that could not read it stands in `status`. With another path in
    RUN.toml the coordinator starts again, and the same servers train."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "book.txt").write_text("The cat sat on the mat, and the dog lay beside it. " * 400)
    ports = ("--listen", f"127.0.0.1:{free_port()}", "--http", f"127.0.0.1:{free_port()}")
    with Swarm(tmp_path, written(texts, "bok.txt"), 2, ("--data", str(texts)), ports) as swarm:
        eventually(lambda: says(swarm, "stage 0 front 0", "bok.txt"), "the server's own words")
        before = [server.child.pid for server in swarm.servers]
        assert all(server.child.running for server in swarm.servers), "nobody leaves over it"
        swarm.stop(swarm.coordinator)
        (tmp_path / "RUN.toml").write_text(written(texts, "book.txt"))
        swarm.again(swarm.coordinator)
        eventually(lambda: trains(swarm), "steps on the corrected path")
        assert [server.child.pid for server in swarm.servers] == before
        assert all(server.child.running for server in swarm.servers)
        assert swarm.status()["run"]["data_tokens"] > 1000
        # What is computed by is what it was: now it cannot be changed any more.
        swarm.stop(swarm.coordinator)
        (tmp_path / "RUN.toml").write_text(written(texts, "bok.txt"))
        swarm.again(swarm.coordinator)
        eventually(lambda: not swarm.coordinator.child.running, "the refusal")
        assert "another configuration" in swarm.coordinator.child.log_tail()


def test_a_file_that_comes_later_is_read_without_a_word(tmp_path: Path) -> None:
    """The path was right, and the text was not there yet."""
    texts = tmp_path / "texts"
    texts.mkdir()
    with Swarm(tmp_path, written(texts, "book.txt"), server_count=2, more=("--data", str(texts))) as swarm:
        eventually(lambda: says(swarm, "stage 0 front 0", "book.txt"), "the server's own words")
        (texts / "book.txt").write_text("The cat sat on the mat, and the dog lay beside it. " * 400)
        eventually(lambda: swarm.step() >= 1, "steps")
        assert all(server.child.running for server in swarm.servers)
