"""A computer with several devices, with real processes: each computes, and one owner has them all. The processor plays
two small devices; nothing but their memory is pretended."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.owner.thanks import read_thanks, thanks_files
from node.platform.local_socket import NotRunningError, NotWellError, ask
from tests.integration.swarm import RUN, Daemon, Swarm, eventually
from tests.integration.test_owner import owned

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cards")]

CARDS_RUN = RUN.replace('name = "attacked"', 'name = "cards"').replace('"always"', '"when_empty"')
FREE_S = 5.0
"""Both are free within a second; a test machine with many busy processes gets some more."""


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    with tempfile.TemporaryDirectory() as folder, Swarm(Path(folder), CARDS_RUN) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def lent(swarm: Swarm) -> Daemon:
    """One `barnraise join` with two devices, whose sensors hold nothing back."""
    home = swarm.folder / "lent"
    home.mkdir()
    (home / "sensors.json").write_text("{}")
    with owned(home):
        words = ("--yes", "--no-benchmark", "--device", "small:256,256")
        return swarm.node("lent", "join", swarm.links["volunteer"], *words)


def status(swarm: Swarm) -> dict[str, Any]:
    try:
        return ask(swarm.folder / "lent", {"verb": "status"})
    except (NotRunningError, NotWellError):
        return {"ever": {"tasks": 0.0}}


def devices(lent: Daemon) -> list[psutil.Process]:
    """The processes that have the devices."""
    found = []
    for child in psutil.Process(lent.child.pid).children():
        try:
            if any("device_process" in word for word in child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def both_have_a_place(swarm: Swarm) -> bool:
    cards = status(swarm).get("cards", [])  # it may only begin
    return len(cards) == 2 and all(card["stage"] >= 0 and "small device" in card["device"] for card in cards)


def signed(swarm: Swarm) -> list[int]:
    """Accepted tasks by the run's own word, for each device that has given some."""
    return [read_thanks(file).thanks.tasks for file in thanks_files(swarm.folder / "lent")]


def test_both_devices_of_a_computer_give_work_and_are_one_to_their_owner(swarm: Swarm, lent: Daemon) -> None:
    """Each is a volunteer of the run with a key, metrics and signed thanks of its own; the owner's count has both. With
    one daemon a card, `pause` had to be said to each, and each took the whole of the line's limit."""
    eventually(lambda: both_have_a_place(swarm), "both devices to have a place")
    eventually(lambda: len(signed(swarm)) == 2 and all(signed(swarm)), "thanks for both")
    homes = [swarm.folder / "lent", swarm.folder / "lent" / "device-2"]
    keys = {(home / "identity").read_bytes() for home in homes}
    targets = {json.loads((home / "metrics.json").read_text())[0]["targets"][0] for home in homes}
    assert len(keys) == len(targets) == 2
    eventually(lambda: status(swarm)["signed"]["ever"]["tasks"] == sum(signed(swarm)), "the sum of what was signed")
    assert status(swarm)["ever"]["tasks"] > max(signed(swarm))


def test_a_pause_frees_both_devices_at_once_and_both_come_back(
    swarm: Swarm, lent: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """One word of the owner; nothing of the run is lost, and it goes on without them."""
    eventually(lambda: len(devices(lent)) == 2, "both devices' processes")
    both = devices(lent)
    began = time.monotonic()
    ask(swarm.folder / "lent", {"verb": "pause"})
    eventually(lambda: not any(device.is_running() for device in both), "both devices to be free")
    free_s = time.monotonic() - began
    eventually(lambda: (s := status(swarm))["device"]["free"] and s["reason"] == "user", "the pause")
    with capsys.disabled():
        print(f"\nboth devices free after {free_s:.2f} s", flush=True)
    assert free_s < FREE_S
    swarm.moves_on()
    given = status(swarm)["ever"]["tasks"]
    ask(swarm.folder / "lent", {"verb": "resume"})
    eventually(lambda: both_have_a_place(swarm) and status(swarm)["ever"]["tasks"] > given, "work of both")


def test_a_device_that_is_lost_takes_nothing_of_the_other_along(swarm: Swarm, lent: Daemon) -> None:
    """Its process is killed from outside: a fresh one comes, and the other's is the same as before."""
    eventually(lambda: len(devices(lent)) == 2, "both devices' processes")
    lost, stays = devices(lent)
    lost.kill()
    eventually(lambda: len(devices(lent)) == 2 and lost.pid not in [one.pid for one in devices(lent)], "a fresh device")
    assert stays.is_running() and stays.pid in [one.pid for one in devices(lent)]
    eventually(lambda: both_have_a_place(swarm), "both to have a place")


def test_the_end_is_in_peace_for_both_and_nothing_was_lost_or_doubled(swarm: Swarm, lent: Daemon) -> None:
    """`leave` drains both; the same command knows both again; the servers' disks count every sample once."""
    from node.audit import audit

    ask(swarm.folder / "lent", {"verb": "leave"})
    assert lent.child.process.wait(60) == 0
    before = signed(swarm)
    with owned(swarm.folder / "lent"):
        swarm.again(lent)
    eventually(lambda: both_have_a_place(swarm), "both devices to have a place again")
    eventually(lambda: all(now > then for now, then in zip(signed(swarm), before, strict=True)), "thanks that go on")
    for server in swarm.servers:
        swarm.stop(server)
    verdict = audit([swarm.folder / server.name for server in swarm.servers])
    assert verdict.clean and verdict.samples_lost == verdict.samples_doubled == 0, verdict
