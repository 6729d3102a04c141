"""The owner of a lent computer, with real processes: every reason to pause on and off by its sensor, at once, with
nothing lost; signals, orders, a second daemon, a clock that jumps. Figures are printed by `python -m
tests.integration.test_owner`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.owner.limits import OwnerLimits, shown
from node.platform.local_socket import NotRunningError, NotWellError, ask
from protocol.base.errors import BadInputError
from tests.integration.swarm import RUN, Daemon, Swarm, eventually

pytestmark = pytest.mark.xdist_group("owner")

OWNED_RUN = RUN.replace('name = "attacked"', 'name = "lent"').replace('"always"', '"when_empty"')
"""Servers compute while the volunteer is held back, and leave the work to it as soon as it is there."""
DEFAULTS = shown(OwnerLimits())
FREE_S = 5.0
"""A device is free within a second (`figures`); a test machine with many busy processes gets some more."""
CASES: tuple[tuple[str, dict[str, str], dict[str, Any], dict[str, Any], str], ...] = (
    ("program", {}, {"games": ["cyberpunk"]}, {}, "cyberpunk is running, which counts as a game"),
    ("program", {"while-not": "@games,steam"}, {"programs": ["bash", "steam"]}, {}, "steam is running"),
    ("user_active", {}, {"idle_s": 2.0}, {"idle_s": 999.0}, "you are using the computer"),
    ("user_active", {"other-cpu": "25 %"}, {"other_cpu_ratio": 0.9}, {"other_cpu_ratio": 0.0, "jump_s": 29},
     "other programs use 90 % of the processor"),
    ("battery", {}, {"on_battery": True}, {"on_battery": False}, "on battery"),
    ("metered", {}, {"metered": True}, {}, "on a metered network"),
    ("temperature", {"temperature": "80 C"}, {"temperature_c": 90.0}, {"temperature_c": 50.0},
     "at 90 C, cooling to 75"),
    ("power", {"power": "50 W"}, {"power_w": 400.0}, {"power_w": 10.0, "jump_s": 200},
     "GPU at 400 W, your limit is 50 W"),
    ("memory", {}, {"memory_free_bytes": 1e7}, {"memory_free_bytes": 8e9, "jump_s": 31},
     "the computer has 0.01 GB of memory left"),
    ("memory", {"memory": "4 GB"}, {"own_memory_bytes": 5e9}, {"own_memory_bytes": 1e9, "jump_s": 31},
     "5 GB of memory used, your limit is 4 GB"),
    ("disk", {}, {"disk_free_bytes": 1e7}, {"disk_free_bytes": 9e9, "jump_s": 31},
     "the computer has 0.01 GB of disk left"),
    ("disk", {"disk": "10 GB"}, {"own_disk_bytes": 2e10}, {"own_disk_bytes": 1e9, "jump_s": 31},
     "20 GB of disk used, your limit is 10 GB"),
)  # fmt: skip
"""(reason, limits, readings that hold it back, readings that let it go, what the owner reads)."""


@dataclass
class Lent:
    """A volunteer's process, its sensors and its owner's words."""

    daemon: Daemon
    state: Path
    sensors: Path
    ahead_s: float = 0.0

    def sense(self, **readings: Any) -> float:
        """The sensors say so from now on; returns the time. `jump_s`: all clocks are ahead by so much more."""
        self.ahead_s += readings.pop("jump_s", 0.0)
        readings["clock_offset_s"] = self.ahead_s
        draft = self.sensors.with_suffix(".new")
        draft.write_text(json.dumps(readings))
        draft.replace(self.sensors)
        return time.monotonic()

    def ask(self, verb: str, **more: Any) -> dict[str, Any]:
        return ask(self.state, {"verb": verb, **more})

    def status(self) -> dict[str, Any] | None:
        try:
            return self.ask("status")
        except (NotRunningError, NotWellError):
            return None

    def works(self) -> bool:
        status = self.status()
        return status is not None and status["reason"] == "" and status["stage"] >= 0

    def has_a_place(self) -> bool:
        """It takes part: beside servers that compute, another volunteer, and on a busy machine, work may be rare."""
        status = self.status()
        return status is not None and status["stage"] >= 0

    def device(self) -> psutil.Process | None:
        """The process that has the device, while there is one."""
        for child in psutil.Process(self.daemon.child.pid).children():
            try:
                if any("device_process" in word for word in child.cmdline()):
                    return child
            except psutil.Error:
                continue
        return None

    def page(self) -> str:
        """The address of its owner's page, as its screens say it."""
        text = (self.state / "control.json").read_text()
        return str(json.loads(text).get("page", ""))

    def gave(self) -> float:
        status = self.status()
        return 0.0 if status is None else float(status["ever"]["tasks"])

    def gave_more_than(self, tasks: float) -> bool:
        return self.gave() > tasks


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    with tempfile.TemporaryDirectory() as folder, Swarm(Path(folder), OWNED_RUN) as swarm:
        yield swarm


@contextmanager
def owned(home: Path) -> Iterator[None]:
    """What is started meanwhile takes its readings and its settings from this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARNRAISE_SENSORS", str(home / "sensors.json"))
        patch.setenv("BARNRAISE_CONFIG", str(home / "config"))
        yield


def lend(swarm: Swarm, name: str, *more: str, **readings: Any) -> Lent:
    """A volunteer with sensors from a file and settings of its own, that has a place."""
    home = swarm.folder / name
    home.mkdir()
    sensors = home / "sensors.json"
    sensors.write_text(json.dumps(readings))
    arguments = ("join", swarm.links["volunteer"], "--yes", "--no-benchmark", *more)
    with owned(home):
        lent = Lent(swarm.node(name, *arguments), home, sensors)
    eventually(lent.has_a_place, f"{name} to have a place")
    return lent


@pytest.fixture(scope="module")
def lent(swarm: Swarm) -> Lent:
    return lend(swarm, "lent")


@pytest.fixture(scope="module")
def neighbour(swarm: Swarm, lent: Lent) -> Lent:
    """Another volunteer, whom nothing holds back, and whose device is a GPU, as its sensors say. It works a fifth of
    the time: with tasks of milliseconds it and the servers would otherwise keep two cores busy with an endless run."""
    return lend(swarm, "neighbour", "--always", "--limit", "gpu=20%", gpu=True)


def suspended(lent: Lent) -> set[str]:
    """The reasons that Prometheus is told of."""
    found = re.findall(r'^barnraise_node_suspended\{reason="(\w+)"\} 1\.0$', lent.daemon.metrics(), re.MULTILINE)
    return set(found) - {"no_work", "coordinator"}


def is_suspended_for(lent: Lent, reason: str) -> bool:
    return suspended(lent) == {reason}


def rests_for(lent: Lent, reason: str) -> bool:
    """It says the reason, and nothing of it is on the device any more."""
    status = lent.status()
    return status is not None and status["reason"] == reason and bool(status["device"]["free"])


def switch(lent: Lent, reason: str, on: dict[str, Any], off: dict[str, Any], says: str = "") -> tuple[float, float]:
    """(seconds until the device was free, seconds until it had given work again); checks what is shown meanwhile."""
    lent.sense(**off)
    eventually(lent.works, "work")
    device = eventually(lent.device, "the device's process")
    began = lent.sense(**on)
    eventually(lambda: not device.is_running(), f"the device to be free for {reason}")
    free_s = time.monotonic() - began
    status = eventually(
        lambda: (s := lent.status()) and s["reason"] == reason and s["device"]["free"] and s, f"the reason {reason}"
    )
    assert status["state"] == "paused", status
    # The load of other programs is a mean over some seconds: right after the pause it is still on its way up.
    eventually(lambda: says in (lent.status() or status)["sentence"], f"the sentence: {says}")
    assert status["holds"] == [[reason, status["sentence"]]]
    eventually(lambda: suspended(lent) == {reason}, f"the metric of {reason}")
    given = lent.gave()
    began = lent.sense(**off)
    eventually(lambda: lent.gave() > given, f"work after {reason}")
    again_s = time.monotonic() - began
    assert suspended(lent) == set()
    return free_s, again_s


@pytest.mark.slow
@pytest.mark.parametrize(("reason", "limits", "on", "off", "says"), CASES, ids=[case[4] for case in CASES])
def test_a_reason_gives_the_device_back_and_then_work_goes_on(
    swarm: Swarm,
    lent: Lent,
    neighbour: Lent,
    capsys: pytest.CaptureFixture[str],
    reason: str,
    limits: dict[str, str],
    on: dict[str, Any],
    off: dict[str, Any],
    says: str,
) -> None:
    """The sensor says so: the device's process ends, one reason is named on screen and in the metrics, the run goes on
    and so does another volunteer; the sensor lets go: it works again."""
    lent.ask("limits", values=limits)
    others = neighbour.gave()
    free_s, again_s = switch(lent, reason, on, off, says)
    lent.ask("limits", values={name: DEFAULTS[name] for name in limits})
    with capsys.disabled():
        print(f"\n{says}: device free after {free_s:.2f} s, work accepted {again_s:.1f} s after its end", flush=True)
    assert free_s < FREE_S or reason in ("disk", "power"), "finished first, and first met by working less"
    eventually(lambda: neighbour.gave() > others, "work of another volunteer")
    swarm.moves_on()


@pytest.mark.slow
def test_shares_and_rates_hold_without_a_pause(lent: Lent, neighbour: Lent) -> None:
    """A share of the processor or of the GPU, rates, and others by the clock: the working daemon follows, says so on
    every screen and to Prometheus, and gives work all the while. A GPU that is hot is called one."""
    lent.sense()
    eventually(lent.works, "work")
    # Two days, since midnight may come meanwhile: on its clocks, which are ahead, or on ours.
    days = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
    today = time.localtime(time.time() + lent.ahead_s).tm_wday
    now = f"{days[today]},{days[(today + 1) % 7]} 00:00-24:00"
    another_day = f"{days[(today + 3) % 7]} 00:00-24:00"
    cases: tuple[tuple[Lent, dict[str, str], float, int | None, int | None], ...] = (
        (lent, {"cpu": "50 %", "gpu": "80 %"}, 0.5, None, None),
        (neighbour, {"cpu": "50 %", "gpu": "80 %"}, 0.8, None, None),
        (lent, {"cpu": "100 %", "up": "20 Mbit/s", "down": "40 Mbit/s"}, 1.0, 20, 40),
        (lent, {"other-hours": now, "other-up": "10 Mbit/s", "other-down": "off"}, 1.0, 10, None),
        (lent, {"other-hours": another_day}, 1.0, 20, 40),
    )
    for one, values, share, up, down in cases:
        one.ask("limits", values=values)
        eventually(partial(lends, one, share, up, down), f"{values} to hold")
        given = one.gave()
        eventually(partial(one.gave_more_than, given), "work below the limits")
    lent.ask("limits", values=dict.fromkeys(("up", "down", "other-hours", "other-up"), "off"))
    switch(neighbour, "temperature", {"temperature_c": 90.0}, {"temperature_c": 50.0}, "GPU at 90 C, cooling to 78")


def lends(lent: Lent, share: float, up_mbit: int | None, down_mbit: int | None) -> bool:
    """Whether it says so on its screens, and to Prometheus."""
    status = lent.status()
    if status is None or status["device"]["share"] != share:
        return False
    up, down = (None if rate is None else rate * 1e6 / 8 for rate in (up_mbit, down_mbit))
    line = status["line"]
    family = r'^barnraise_node_bandwidth_limit_bytes_per_second{direction="([rt]x)"} (\S+)$'
    told = {name: float(value) for name, value in re.findall(family, lent.daemon.metrics(), re.MULTILINE)}
    return (line["up_limit_bytes_per_s"], line["down_limit_bytes_per_s"]) == (up, down) and (
        told == {"tx": up or 0.0, "rx": down or 0.0}
    )


@pytest.mark.slow
def test_the_owner_pauses_finishes_and_resumes(swarm: Swarm, lent: Lent) -> None:
    """By the socket: a pause frees the device, a pause for a time ends by itself, finish ends what was begun."""
    lent.sense()
    eventually(lent.works, "work")
    device = eventually(lent.device, "the device's process")
    assert lent.ask("pause")["sentence"] == "by you"
    eventually(lambda: not device.is_running(), "the device to be free")
    swarm.moves_on()
    assert lent.ask("resume")["reason"] in ("", "no_work")
    eventually(lent.works, "work")
    lent.ask("pause", for_s=3)
    eventually(lambda: (lent.status() or {}).get("reason") == "user", "the pause")
    eventually(lent.works, "the pause to end by itself")
    lent.ask("finish")
    eventually(lambda: (s := lent.status()) and s["state"] == "paused" and s["device"]["free"], "finish")
    lent.ask("resume")
    eventually(lent.works, "work")
    for wrong in ({"verb": "dance"}, {"verb": "pause", "for_s": -1}, {"verb": "limits", "values": {"up": "5 apples"}}):
        assert "error" in ask(lent.state, wrong)


@pytest.mark.slow
def test_hours_and_quota_finish_first(swarm: Swarm, lent: Lent) -> None:
    """What was begun is finished; then each names its reason, and ends when its cause does. The quota is so small that
    beside the rest nearly always less than one message is left of it: it ends as one that is used up to the byte."""
    lent.sense()
    now = time.localtime()
    other_day = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")[(now.tm_wday + 3) % 7]
    for name, on, off, reason in (
        ("hours", f"{other_day} 10:00-11:00", "always", "schedule"),
        ("quota", "0.02 MB", "off", "quota"),
    ):
        eventually(lent.works, "work")
        lent.ask("limits", values={name: on})
        eventually(partial(rests_for, lent, reason), reason)
        eventually(partial(is_suspended_for, lent, reason), f"the metric of {reason}")
        lent.ask("limits", values={name: off})
    eventually(lent.works, "work")
    swarm.moves_on()


@pytest.mark.slow
def test_a_clock_that_jumps_and_a_process_that_stood_still(swarm: Swarm, lent: Lent) -> None:
    """Sleep for an hour: stopped, then all clocks are an hour on. It says that it woke, and works; others went on."""
    lent.sense()
    eventually(lent.works, "work")
    process = psutil.Process(lent.daemon.child.pid)
    before = lent.daemon.log_length()
    process.suspend()
    try:
        swarm.moves_on()
        lent.sense(jump_s=3600)
        time.sleep(8.0)  # silent for longer than the servers wait
        swarm.moves_on()
    finally:
        process.resume()
    given = lent.gave()
    eventually(lambda: lent.gave() > given, "work after sleep")
    woke = [line for line in lent.daemon.log(before) if line["event"] == "woke up"]
    assert woke and woke[0]["slept_s"] >= 3600


@pytest.mark.slow
def test_a_second_daemon_on_the_folder_is_refused(swarm: Swarm, lent: Lent) -> None:
    """One sentence, exit code 2; the first goes on and is still found."""
    command = [sys.executable, "-m", "protocol.cli", "join", swarm.links["volunteer"], "--yes", "--no-benchmark"]
    done = subprocess.run(
        [*command, "--state", str(lent.state)], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2 and "is in use by another process" in done.stderr + done.stdout
    assert lent.status() is not None


@pytest.mark.slow
def test_the_device_may_be_lost(swarm: Swarm, lent: Lent) -> None:
    """Its process is killed from outside (no memory): it is named, a fresh one works on."""
    eventually(lent.works, "work")
    before = lent.daemon.log_length()
    eventually(lent.device, "the device").kill()
    eventually(lambda: any(line["event"] == "device lost" for line in lent.daemon.log(before)), "the loss to be named")
    given = lent.gave()
    eventually(lambda: lent.gave() > given, "work with a fresh device")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_drains_and_says_thanks(swarm: Swarm, number: signal.Signals) -> None:
    """Logout, closed terminal, Ctrl-C: finished in peace, with what was given, and nothing left running."""
    lent = lend(swarm, f"signal-{number.name}")
    device = eventually(lent.device, "the device")
    lent.daemon.child.process.send_signal(number)
    assert lent.daemon.child.process.wait(60) == 0
    said = [line for line in lent.daemon.log() if line["event"] in ("thanks", "ended")]
    assert [line["event"] for line in said] == ["thanks", "ended"]
    assert said[0]["text"].startswith("Thank you. This visit: ") and said[1]["reason"] == "drained"
    assert not device.is_running() and not (lent.state / "control.json").exists()
    swarm.moves_on()


@pytest.mark.slow
def test_a_second_signal_ends_at_once(swarm: Swarm) -> None:
    """Whatever it computes: within three seconds on a busy machine."""
    lent = lend(swarm, "twice")
    device = eventually(lent.device, "the device")
    device.suspend()  # it would never finish
    began = time.monotonic()
    lent.daemon.child.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    lent.daemon.child.process.send_signal(signal.SIGINT)
    assert lent.daemon.child.process.wait(60) == 0
    assert time.monotonic() - began < 10 and not device.is_running()
    swarm.moves_on()


@pytest.mark.slow
def test_power_loss(swarm: Swarm) -> None:
    """Daemon and device are gone without a word; the same command works again, and what was given is still known."""
    lent = lend(swarm, "power")
    lent.ask("pause", for_s=1)
    eventually(lent.has_a_place, "a place again")
    device = eventually(lent.device, "the device")
    page = eventually(lent.page, "the page")
    swarm.kill(lent.daemon)
    eventually(lambda: not device.is_running(), "the device's process to end with its daemon")
    assert lent.status() is None
    swarm.moves_on()
    with owned(lent.state):
        swarm.again(lent.daemon)
    eventually(lent.has_a_place, "a place after a power loss")
    assert eventually(lent.page, "the page again") == page, "its owner's bookmark still leads there"


@pytest.mark.slow
def test_leave_ends_it_with_thanks(swarm: Swarm) -> None:
    """The owner's last word."""
    lent = lend(swarm, "leaves")
    assert lent.ask("leave")["thanks"].startswith("Thank you. This visit: ")
    assert lent.daemon.child.process.wait(60) == 0


@pytest.mark.slow
def test_nothing_was_lost_or_doubled(swarm: Swarm) -> None:
    """After all of that: the auditor counts every sample of every closed step exactly once, from the servers' disks."""
    from node.audit import audit

    swarm.moves_on()
    for server in swarm.servers:
        swarm.stop(server)
    verdict = audit([swarm.folder / server.name for server in swarm.servers])
    assert verdict.clean and verdict.samples_lost == verdict.samples_doubled == 0, verdict
    assert verdict.steps > 10


def figures() -> None:
    """Prints how long "a game starts -> the device is free" and "it ends -> working" take."""
    with tempfile.TemporaryDirectory() as folder, Swarm(Path(folder), OWNED_RUN) as swarm:
        lent = lend(swarm, "lent")
        rows = [switch(lent, "program", {"games": ["cyberpunk"]}, {}) for _ in range(10)]
    for what, column in (("game starts -> device free", 0), ("game ends -> task accepted (3 s of it grace)", 1)):
        times = sorted(row[column] for row in rows)
        print(f"{what}: median {times[len(times) // 2]:.2f} s, worst {times[-1]:.2f} s of {len(times)}")


if __name__ == "__main__":
    try:
        figures()
    except BadInputError as error:
        sys.exit(str(error))
