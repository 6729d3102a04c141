"""A server lets the newest checkpoint's model write, in a process of its own, and says so once it can."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from node.compute import checkpoint
from node.compute.places import Place
from node.compute.sample_process import PROMPT, write
from node.process import sampler
from node.process.sampler import checkpoints_to_read, tell_samples
from protocol.link.codec import decode, encode
from protocol.messages import Wrote
from tests.node.commands.test_export import CONFIG, shared

PATIENCE_S = 120.0
__all__ = ["shared"]


def test_the_model_writes_the_same_for_the_same_checkpoint(shared: Path) -> None:
    """Text that begins with the prompt, and goes over the wire whatever letters an untrained model has chosen."""
    folder = checkpoint.run_folder(shared, CONFIG)
    sample = write(folder, 4)
    assert sample.startswith(PROMPT) and len(sample) > len(PROMPT) and write(folder, 4) == sample != write(folder, 2)
    sent = decode(encode(Wrote(step=4, sample=sample)))
    assert isinstance(sent, Wrote) and sent.sample.isprintable() and sent.sample.startswith(PROMPT.strip())


SLOW_STORE = """
import sys, time
from node.compute.object_store import StoreFiles
from node.compute.sample_process import main

def fetch(files, name, to):
    to.write_bytes(b"the beginning of a part")
    print("fetching", flush=True)
    time.sleep(600)

StoreFiles.fetch = fetch
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_one_that_takes_too_long_leaves_no_copy_of_what_it_has_fetched(shared: Path, tmp_path: Path) -> None:
    """A store may be too slow for it at every checkpoint of a month, and a part has gigabytes."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    place = f"file://{checkpoint.run_folder(shared, CONFIG)}"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_STORE, place, "4"],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"fetching\n"
        assert list(scratch.iterdir())
        process.terminate()  # as trio does, and kills after five seconds
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert not list(scratch.iterdir())


@pytest.mark.slow
async def test_the_newest_checkpoint_is_told_once_when_the_coordinator_is_there(shared: Path) -> None:
    """While the coordinator is away what was written is kept for it."""
    folder = checkpoint.run_folder(shared, CONFIG)
    said: list[Wrote] = []
    tries = 0

    def send(message: Wrote) -> bool:
        nonlocal tries
        tries += 1
        if tries < 3:
            return False
        said.append(message)
        return True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_samples, lambda: lambda: folder, send, 0.01)
        with trio.fail_after(PATIENCE_S):
            while not said:
                await trio.sleep(0.01)
        await trio.sleep(0.2)
        nursery.cancel_scope.cancel()
    assert [message.step for message in said] == [4] and said[0].sample.startswith(PROMPT)


async def test_a_system_without_room_for_a_process_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole server ended for the sake of a sample's text."""

    async def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(trio, "run_process", full)
    sample, why_not = await sampler._write(Path("/nowhere"), 4)
    assert not sample and why_not.startswith("its process cannot be started")


async def test_a_model_that_nobody_has_trained_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The checkpoint of step 0 is there from the beginning, and what it writes is noise: owners were shown it."""
    looks = 0

    def present(_: Path, most: int) -> list[int]:
        nonlocal looks
        looks += 1
        return [0]

    def send(_: Wrote) -> bool:
        raise AssertionError("noise was told")

    async def asked(folder: Path, step: int) -> tuple[str, str]:
        raise AssertionError(f"the model of step {step} was asked")

    monkeypatch.setattr("node.process.sampler.present_checkpoints", present)
    monkeypatch.setattr("node.process.sampler._write", asked)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_samples, lambda: lambda: tmp_path, send, 0.01)
        with trio.fail_after(PATIENCE_S):
            while looks < 3:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


def test_only_the_decider_of_a_run_with_a_shared_folder_writes() -> None:
    """Elsewhere no single computer has the model."""
    folder = msgspec.structs.replace(CONFIG.checkpoint, folder="/shared")
    sharing = msgspec.structs.replace(CONFIG, checkpoint=folder)
    decides, follows = SimpleNamespace(decider=object()), SimpleNamespace(decider=None)

    def place(config: Any, server: Any) -> Place | None:
        find = checkpoints_to_read(SimpleNamespace(config=config, server=server))  # type: ignore[arg-type]
        return None if find is None else find()

    assert place(sharing, decides) == checkpoint.run_folder(Path("/shared"), sharing)
    assert [place(sharing, follows), place(CONFIG, decides), place(None, None)] == [None, None, None]
