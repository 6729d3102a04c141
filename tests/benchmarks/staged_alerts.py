"""Alerts against a real Prometheus, each by a fault that is staged in a run of real processes.

    python -m tests.benchmarks.staged_alerts [CASE...]

A minute of the rules is a second here: windows, offsets and the time that an expression must hold; and the ten seconds
that a step's sum may take are one. Each case starts a
run of its own, waits until the alerts that it names are quiet, stages its fault and waits until they fire; what it saw
goes to `staged_alerts.json` beside this file, and a case that stands there is not run again unless it is named. Seven
more alerts are staged in `tests/integration/test_monitoring.py`; the exit code is the number of those staged nowhere.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from typing import Any

from coordinator.monitoring.files import rules_file
from coordinator.monitoring.rules import Thresholds, alerts
from coordinator.process.database import DATABASE
from node.platform.sensors import FAKE_VARIABLE
from tests.integration.bad_deeds import PLAIN_FORMS
from tests.integration.bad_device import PACE
from tests.integration.prometheus import Prometheus, prometheus
from tests.integration.swarm import RUN, Daemon, Swarm, eventually

TABLE = Path(__file__).with_suffix(".json")
SHORT = Thresholds(stalled_s=15.0, checkpoint_s=60.0, disk_bytes=4e6)
STEADY = RUN.replace("microbatches = 2", "microbatches = 8")
"""A loss that does not leap by itself: windows are seconds here, where the rules have minutes to average it."""
OWN = "owned"
"""The node whose owner watches it himself."""
SMALL_DISK = "server-0"
Stage = Callable[[Swarm, Prometheus], None]


def set_key(swarm: Swarm, key: str, value: str) -> None:
    words = [sys.executable, "-m", "protocol.cli", "run", "set", key, value, "--url", swarm.links["http"]]
    subprocess.run(words, check=True, capture_output=True)


def lend(swarm: Swarm, count: int) -> list[Daemon]:
    words = ("join", swarm.links["volunteer"], "--yes", "--always", "--no-page", "--no-benchmark")
    return [swarm.node(f"volunteer-{number}", *words) for number in range(count)]


def diverge(swarm: Swarm, watcher: Prometheus) -> None:
    """The operator sets a rate of 1, without clipping or warm-up: the loss leaps. Then one of 100, which multiplies all
    weights by -9 with each step; plain forms carry what comes of it."""
    eventually(lambda: swarm.step() >= 20, "some steps")
    time.sleep(22)  # what the loss is compared with
    for key, value in (
        ("optimizer.warmup_steps", "0"), ("optimizer.clip_norm", "0"), ("optimizer.learning_rate", "1"),
    ):  # fmt: skip
        set_key(swarm, key, value)
    watcher.fires("BarnraiseLossSpike")
    set_key(swarm, "optimizer.learning_rate", "100")


def too_few(swarm: Swarm, watcher: Prometheus) -> None:
    """Three servers for four places."""


def servers_die(swarm: Swarm, watcher: Prometheus) -> None:
    """All four servers are killed after a minute's training."""
    eventually(lambda: swarm.step() >= 3, "some steps")
    time.sleep(75)  # what the pace is compared with is that of a minute ago
    for server in swarm.servers:
        swarm.kill(server)


def slow_machines(swarm: Swarm, watcher: Prometheus) -> None:
    """A server's clock is 200 s ahead, another's disk takes 0.8 s for a sync, a third is stopped every other second."""
    words = ("server", swarm.links["server"], "--listen", "127.0.0.1:0")
    slow = swarm.folder / "slow"
    swarm._children.module = "tests.integration.hanging"
    for where in ("slow", "clock"):
        swarm.node(where, where, str(slow), *words)
    swarm._children.module = "protocol.cli"
    eventually(lambda: swarm.step() >= 3, "some steps")
    slow.touch()
    stopped = swarm.servers[0].child.process
    for _ in range(110):
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        stopped.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        if {"BarnraiseLoopBlocked", "BarnraiseJournalSlow", "BarnraiseClockOff"} <= watcher.firing():
            return


def too_hot(swarm: Swarm, watcher: Prometheus) -> None:
    """A volunteer's sensors tell of 95 degrees; its owner's Prometheus watches it by its state folder."""
    readings = swarm.folder / "readings.json"
    readings.write_text(json.dumps({"idle_s": 1e6, "temperature_c": 95.0, "gpu": True}))
    os.environ[FAKE_VARIABLE] = str(readings)
    try:
        swarm.node(OWN, "join", swarm.links["volunteer"], "--yes", "--no-page", "--no-benchmark")
    finally:
        del os.environ[FAKE_VARIABLE]


def no_answer(swarm: Swarm, watcher: Prometheus) -> None:
    """A volunteer's device hangs: what it was given is done by others, and it ends nothing any more."""
    words = ("hangs", "join", swarm.links["volunteer"], "--yes", "--always", "--no-page", "--no-benchmark")
    swarm._children.module = "tests.integration.bad_volunteer"
    swarm.node("hangs", *words)
    swarm._children.module = "protocol.cli"


def strangers(swarm: Swarm, watcher: Prometheus) -> None:
    """Somebody who is no member calls the coordinator forty times and shakes hands with noise."""
    eventually(lambda: swarm.step() >= 1, "some steps")
    host, _, port = swarm.links["listen"].rpartition(":")
    for _ in range(40):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(bytes(range(256)) * 4)
        time.sleep(0.05)


def nobody_left(swarm: Swarm, watcher: Prometheus) -> None:
    """Servers do not compute, and each stage has one volunteer: work waits. Then both are killed."""
    crew = lend(swarm, 2)
    watcher.fires("BarnraiseStageStarved")
    eventually(lambda: swarm.step() >= 0, "a step: nobody is paged for a run that has not begun")
    for volunteer in crew:
        swarm.kill(volunteer)


def short_leases(swarm: Swarm, watcher: Prometheus) -> None:
    """Two of four volunteers take three seconds for a task that is leased for one: others do it again."""
    words = ("join", swarm.links["volunteer"], "--yes", "--always", "--no-page", "--no-benchmark")
    swarm._children.module = "tests.integration.bad_volunteer"
    os.environ[PACE] = "0.2"
    for number, deed in enumerate(("paced", "paced", "dawdles", "dawdles")):
        # At a device's pace: on a quiet computer two that do hundreds of tasks a second made a tenth of them too many.
        swarm.node(f"{deed}-{number}", deed, *words)
    del os.environ[PACE]
    swarm._children.module = "protocol.cli"


def absurd(swarm: Swarm, watcher: Prometheus) -> None:
    """Two volunteers show what is usual; then the gradients of two more are a thousand million each: the first do their
    tasks again, slowly."""
    words = ("join", swarm.links["volunteer"], "--yes", "--always", "--no-page", "--no-benchmark")
    swarm._children.module = "tests.integration.bad_volunteer"
    os.environ[PACE] = "0.3"
    for number in range(2):
        swarm.node(f"paced-{number}", "paced", *words)
    eventually(lambda: swarm.step() >= 4, "some steps")
    for number in range(2):
        swarm.node(f"huge-{number}", "huge", *words)
    del os.environ[PACE]
    swarm._children.module = "protocol.cli"


def behind(swarm: Swarm, watcher: Prometheus) -> None:
    """A server is killed; started again, it hangs while it reads its state."""
    eventually(lambda: swarm.step() >= 12, "some steps")
    swarm.kill(swarm.servers[3])
    hangs = swarm.folder / "hangs"
    hangs.touch()
    swarm._children.module = "tests.integration.hanging"
    words = ("server", swarm.links["server"], "--listen", "127.0.0.1:0")
    swarm.node("server-3", "lane", str(hangs), *words)
    swarm._children.module = "protocol.cli"


def slow_sums(swarm: Swarm, watcher: Prometheus) -> None:
    """A server takes five seconds to apply a step, as on a machine whose memory others have taken."""
    words = ("server", swarm.links["server"], "--listen", "127.0.0.1:0")
    slow = swarm.folder / "slow"
    swarm._children.module = "tests.integration.hanging"
    swarm.node("sums", "sums", str(slow), *words)
    swarm._children.module = "protocol.cli"
    eventually(lambda: swarm.step() >= 3, "some steps")
    slow.touch()


def database_held(swarm: Swarm, watcher: Prometheus) -> None:
    """Another program (a copy, a virus scanner) holds the coordinator's database for two seconds, again and again."""
    eventually(lambda: swarm.step() >= 3, "some steps")
    with closing(sqlite3.connect(swarm.state / DATABASE, isolation_level=None, timeout=30.0)) as other:
        for _ in range(30):
            other.execute("BEGIN IMMEDIATE")
            time.sleep(2.0)
            other.execute("ROLLBACK")
            time.sleep(1.0)
            if "BarnraiseDatabaseSlow" in watcher.firing():
                return


def disk_fills(swarm: Swarm, watcher: Prometheus) -> None:
    """A program writes a megabyte a second to a server's disk, of 200 MB."""
    eventually(lambda: swarm.step() >= 3, "some steps")
    with (swarm.folder / SMALL_DISK / "ballast").open("wb") as ballast:
        for _ in range(120):
            ballast.write(bytes(10**6))
            ballast.flush()
            time.sleep(1.0)
            if "BarnraiseDiskFilling" in watcher.firing():
                return


def relayed(swarm: Swarm, watcher: Prometheus) -> None:
    """Three servers and four volunteers cannot be dialled and may not punch: the fourth server carries their links."""
    # One alone: of two that share a stage, each dialled by its volunteers, half of the members would need no relay.
    nowhere = ("--announce", "127.0.0.1:1", "--no-punch")
    words = ("server", swarm.links["server"], "--listen", "127.0.0.1:0")
    for number in range(4):
        swarm.node(f"way-{number}", *words, *(nowhere if number > 0 else ("--no-punch",)))
    join = ("join", swarm.links["volunteer"], "--yes", "--always", "--no-page", "--no-benchmark")
    for number in range(4):
        swarm.node(f"volunteer-{number}", *join, *nowhere)


ALONE = """[model]
layers = 2
hidden = 128
heads = 4
kv_heads = 2
feed_forward = 256
context = 128
"""
LONG = STEADY[: STEADY.index("[model]")] + ALONE + STEADY[STEADY.index("[data]") :]
LONG = LONG.replace("microbatches = 8", "microbatches = 128").replace('"always"', '"never"')
"""Steps of half a minute, by volunteers only."""
PLAIN = STEADY + PLAIN_FORMS + 'parameters = "fp32"\n'
LENT = STEADY.replace('"always"', '"never"')
BY_LEASE = LENT + "[limits]\nlease_s = 1\n"
CASES: dict[str, tuple[str, int, Stage, tuple[str, ...]]] = {
    "diverge": (PLAIN, 4, diverge, ("BarnraiseLossSpike", "BarnraiseRunNotFinite")),
    "too_few": (STEADY, 3, too_few, ("BarnraisePlacesOpen",)),
    "servers_die": (
        STEADY,
        4,
        servers_die,
        ("BarnraiseNodesLeaving", "BarnraiseRunStalled", "BarnraiseThroughputDropped"),
    ),
    "slow_machines": (
        STEADY,
        2,
        slow_machines,
        ("BarnraiseClockOff", "BarnraiseJournalSlow", "BarnraiseLoopBlocked"),
    ),
    "too_hot": (STEADY, 4, too_hot, ("BarnraiseNodeHot", "BarnraiseNodeIdleUnwillingly")),
    "no_answer": (STEADY, 4, no_answer, ("BarnraiseNodeIdle",)),
    "strangers": (STEADY, 4, strangers, ("BarnraiseBadPeers",)),
    "nobody_left": (LONG, 4, nobody_left, ("BarnraiseStageEmpty", "BarnraiseStageStarved")),
    "short_leases": (BY_LEASE, 4, short_leases, ("BarnraiseWorkRepeated",)),
    "absurd": (LENT, 4, absurd, ("BarnraiseUpdatesRefused",)),
    "behind": (STEADY, 4, behind, ("BarnraiseServerBehind",)),
    "slow_sums": (STEADY, 3, slow_sums, ("BarnraiseServerSlow",)),
    "database_held": (STEADY, 4, database_held, ("BarnraiseDatabaseSlow",)),
    "disk_fills": (STEADY, 4, disk_fills, ("BarnraiseDiskFilling",)),
    "relayed": (STEADY, 0, relayed, ("BarnraiseMostlyRelayed",)),
}
ELSEWHERE = (
    "BarnraiseDaemonDown", "BarnraiseServerGone", "BarnraiseCheckpointOld", "BarnraiseDiskFull",
    "BarnraiseCheckpointFailing", "BarnraiseErrorsLogged", "BarnraiseNoCoordinator",
)  # fmt: skip
"""Those that `tests/integration/test_monitoring.py` stages, besides a run that stands."""


def in_seconds(rules: str) -> str:
    """The rules with seconds where they have minutes."""
    hours = re.sub(r"(?<=[\[ ])(\d+)h(?=[\] )])", lambda found: f"{60 * int(found[1])}s", rules)
    hours = hours.replace("barnraise_run_step_interval_seconds, 10)", "barnraise_run_step_interval_seconds, 1)")
    idle = hours.replace("> 3600 and", "> 60 and").replace("24 * 3600", "24 * 60")
    return re.sub(r"(?<=[\[ ])(\d+)m(?=[\] )])", r"\1s", idle)


def healthy(swarm: Swarm, watcher: Prometheus) -> list[str]:
    """A minute of a run with nothing wrong: what fires nevertheless."""
    eventually(lambda: swarm.step() >= 3, "some steps")
    seen: set[str] = set()
    for _ in range(60):
        seen |= watcher.firing()
        time.sleep(1)
    return sorted(seen)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of 200 MB at `folder`."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run_case(name: str) -> dict[str, object]:
    """What a case saw."""
    text, servers, stage, names = CASES.get(name, (STEADY, 4, too_few, ()))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "mon").mkdir()
        rules = in_seconds(rules_file(SHORT, lambda alert: max(1.0, alert.hold_s / 60)))
        with (
            small_disk(home / SMALL_DISK) if stage is disk_fills else nullcontext(),
            Swarm(home, text.replace('"attacked"', '"staged"'), servers) as swarm,
            prometheus(
                home / "mon", swarm.links["http"], SHORT, lambda alert: 1.0, rules, [str(home / OWN)]
            ) as watcher,
        ):
            eventually(lambda: watcher.up().get("coordinator") == 1, "the coordinator")
            if name == "healthy":
                return {"fires": healthy(swarm, watcher)}
            watcher.is_quiet(*names)
            began = time.monotonic()
            after: dict[str, float] = {}
            over = Event()

            def watch() -> None:
                while len(after) < len(names) and not over.wait(0.2):
                    for alert in sorted(set(names) & watcher.firing() - after.keys()):
                        after[alert] = round(time.monotonic() - began, 1)

            looks = Thread(target=watch, daemon=True)
            looks.start()
            try:
                stage(swarm, watcher)
                looks.join(max(1.0, began + 240 - time.monotonic()))
            finally:
                over.set()
                looks.join()
            return {"fault": " ".join((stage.__doc__ or "").split()), "fires_after_s": after, "wanted": list(names)}


def read() -> dict[str, dict[str, Any]]:
    """The table as it stands; others may be writing their rows meanwhile."""
    found: dict[str, dict[str, Any]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return found


def main(words: list[str]) -> int:
    """Runs the named cases, or those that are missing; says which alerts nothing has staged yet."""
    for name in words or [name for name in ("healthy", *CASES) if name not in read()]:
        try:
            row = run_case(name)
        except AssertionError as error:
            print(f"{name}: {error}", flush=True)
            continue
        TABLE.write_text(json.dumps(dict(sorted({**read(), name: row}.items())), indent=1) + "\n")
        print(f"{name}: {row}", flush=True)
    table = read()
    staged = {alert for found in table.values() for alert in found.get("fires_after_s", {})} | set(ELSEWHERE)
    known = [alert.name for alert in alerts()]
    missing = [name for name in known if name not in staged]
    print(f"{len(known) - len(missing)} of {len(known)} alerts are staged; missing: {', '.join(missing) or 'none'}")
    return len(missing)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
