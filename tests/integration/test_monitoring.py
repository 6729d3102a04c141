"""A real Prometheus watches a real run: it finds every daemon, every panel has data, faults raise their alerts."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from coordinator.monitoring.dashboards import dashboards
from coordinator.monitoring.rules import Alert, Thresholds
from tests.coordinator.monitoring.expressions import families, filled_in
from tests.integration.prometheus import Prometheus, prometheus
from tests.integration.swarm import RUN, Swarm, eventually, fetch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CHECKPOINTS = RUN.replace("every_steps = 0", "every_steps = 2").replace('"attacked"', '"watched"')
SHORT = Thresholds(stalled_s=8.0, checkpoint_s=15.0, disk_bytes=4e6)
STAGED = {
    "BarnraiseDaemonDown", "BarnraiseServerGone", "BarnraiseRunStalled", "BarnraiseCheckpointOld", "BarnraiseDiskFull",
    "BarnraiseCheckpointFailing", "BarnraiseErrorsLogged", "BarnraiseNoCoordinator",
}  # fmt: skip


def hold(alert: Alert) -> float:
    """Those that are staged here need hold for a second only; the others keep their patience."""
    return min(alert.hold_s, 1.0) if alert.name in STAGED else alert.hold_s


def empty_panels(watcher: Prometheus, run: str) -> list[str]:
    """Queries of dashboards that answer without data. Data have the labels that their legend names."""
    empty = []
    for dashboard in dashboards():
        for variable in dashboard.variables:
            selector = filled_in(variable.selector, run=run)
            found = watcher.ask("series", **{"match[]": selector})
            assert any(variable.label in labels for labels in found), f"{dashboard.title}: ${variable.name}"
        for panel in dashboard.panels():
            for query in panel.queries:
                text = filled_in(query.expression, run=run)
                end = time.time()
                found = watcher.ask("query_range", query=text, start=str(end - 30), end=str(end), step="5")["result"]
                where = f"{dashboard.title}: {panel.title}: {text}"
                if not found:
                    empty.append(where)
                for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
                    assert all(label in series["metric"] for series in found), f"{where}: no {label}"
    return empty


def check_families(watcher: Prometheus) -> None:
    """Every family that our code declares is in the store: 0 is visible before anything happens."""
    seen = set(watcher.ask("label/__name__/values"))
    missing = [name for name in families() if not {name, f"{name}_count"} & seen]
    assert not missing, missing


def test_prometheus_watches_a_run_with_kills(tmp_path: Path) -> None:
    """Found by service discovery; full panels; quiet while healthy. A killed server, a run that stands, old and failing
    checkpoints, a full disk and a killed coordinator each raise their alert, which ends with the fault."""
    disk = tmp_path / "server-0"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], capture_output=True)
    try:
        with Swarm(tmp_path, CHECKPOINTS) as swarm:
            volunteer = swarm.node(
                "volunteer", "join", swarm.links["volunteer"], "--yes", "--no-benchmark", "--listen", "127.0.0.1:0"
            )
            (tmp_path / "mon").mkdir()
            with prometheus(tmp_path / "mon", swarm.links["http"], SHORT, hold) as watcher:
                eventually(lambda: watcher.up() == {"coordinator": 1, "server": 4, "volunteer": 1}, "every daemon")
                swarm.moves_on()
                eventually(lambda: watcher.values("barnraise:run_goodput:ratio1h > 0"), "some steps")
                eventually(
                    lambda: watcher.values("barnraise_server_checkpoint_last_success_timestamp_seconds > 0"),
                    "a checkpoint",
                )
                check_families(watcher)
                # A rate needs two scrapes of each daemon.
                eventually(lambda: not empty_panels(watcher, "watched"), "data in every panel")
                assert empty_panels(watcher, "watched") == []
                assert "watched: tokens a second" in fetch(f"{watcher.url}/consoles/barnraise.html")
                watcher.is_quiet(*STAGED)
                assert not watcher.firing(), "a healthy run is quiet"

                swarm.kill(swarm.servers[1])
                watcher.fires("BarnraiseDaemonDown", "BarnraiseServerGone", "BarnraiseRunStalled")
                swarm.again(swarm.servers[1])
                watcher.is_quiet("BarnraiseDaemonDown", "BarnraiseServerGone", "BarnraiseRunStalled")
                swarm.kill(volunteer)
                swarm.moves_on()

                for server in swarm.servers:  # a file where the folder was: nothing can be written below it
                    place = tmp_path / server.name / "checkpoints"
                    place.rename(place.with_name("moved"))
                    place.write_text("")
                watcher.fires("BarnraiseCheckpointOld", "BarnraiseCheckpointFailing", "BarnraiseErrorsLogged")
                swarm.moves_on()
                if mounted.returncode == 0:
                    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                    (disk / "ballast").write_bytes(bytes(free - 3_000_000))
                    watcher.fires("BarnraiseDiskFull")
                    (disk / "ballast").unlink()
                    watcher.is_quiet("BarnraiseDiskFull")
                else:
                    print(f"NO full disk is tried: a small one cannot be mounted here: {mounted.stderr.decode()}")
                swarm.kill(swarm.coordinator)
                watcher.fires("BarnraiseNoCoordinator", "BarnraiseDaemonDown")
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(disk)], check=True)
