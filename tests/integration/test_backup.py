"""The drill of deploy/README.md: a backup taken while the run trains brings a lost coordinator back."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.swarm import Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_coordinator_that_lost_its_disk_comes_back_from_a_backup(tmp_path: Path) -> None:
    """Copied while in use; killed with its state folder; key and database put back: the servers know it, and the run
    goes on without going back a step."""
    with Swarm(tmp_path) as swarm:
        swarm.moves_on()
        backup = tmp_path / "backup"
        backup.mkdir()
        with (
            closing(sqlite3.connect(swarm.state / "coordinator.sqlite3")) as source,
            closing(sqlite3.connect(backup / "coordinator.sqlite3")) as target,
        ):
            source.backup(target)
        shutil.copy2(swarm.state / "identity", backup)
        saved = swarm.step()
        swarm.kill(swarm.coordinator)
        for entry in swarm.state.iterdir():
            if entry.name != "log":
                entry.unlink()
        shutil.copytree(backup, swarm.state, dirs_exist_ok=True)
        command = swarm.coordinator.child.command
        command[command.index("--listen") + 1] = swarm.links["listen"]
        swarm.again(swarm.coordinator)
        links = eventually(lambda: swarm._read_links(swarm.coordinator.child), "the coordinator's links")
        assert links["run_id"] == swarm.links["run_id"]
        swarm.links = links
        eventually(lambda: swarm.step() > saved, "the run to go on")
        assert swarm.status()["run"]["lost_steps"] == 0
