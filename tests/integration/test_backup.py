"""The drill of deploy/README.md: a coordinator that lost its disk, or its database alone, costs the run no step."""

from __future__ import annotations

import shutil
import sqlite3
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.swarm import RUN, Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
DATABASE = "coordinator.sqlite3"
RUN_WITH_CHECKPOINTS = RUN.replace("every_steps = 0", "every_steps = 2\nkeep = 8")


def come_back(swarm: Swarm) -> None:
    """The coordinator's command once more, where its members look for it."""
    command = swarm.coordinator.child.command
    command[command.index("--listen") + 1] = swarm.links["listen"]
    (swarm.state / "links.json").unlink(missing_ok=True)
    swarm.again(swarm.coordinator)
    links = eventually(lambda: swarm._read_links(swarm.coordinator.child), "the coordinator's links")
    assert links["run_id"] == swarm.links["run_id"]
    swarm.links = links


def goes_on(swarm: Swarm, saved: int) -> None:
    """Steps close beyond `saved`, none was thrown away, and no server has ended."""
    eventually(lambda: swarm.step() > saved, "the run to go on")
    # The first server that finds the coordinator tells of a step while others are still on their way to it.
    eventually(lambda: swarm.status()["run"]["state"] == "training", "all servers")
    assert swarm.status()["run"]["lost_steps"] == 0
    assert all(server.child.running for server in swarm.servers)


def test_a_coordinator_that_lost_its_disk_comes_back_from_a_backup(tmp_path: Path) -> None:
    """Copied while in use; killed with its state folder; key and database put back: the servers know it, and the run
    goes on without going back a step."""
    with Swarm(tmp_path) as swarm:
        swarm.moves_on()
        backup = tmp_path / "backup"
        backup.mkdir()
        with (
            closing(sqlite3.connect(swarm.state / DATABASE)) as source,
            closing(sqlite3.connect(backup / DATABASE)) as target,
        ):
            source.backup(target)
        shutil.copy2(swarm.state / "identity", backup)
        saved = swarm.step()
        swarm.kill(swarm.coordinator)
        for entry in swarm.state.iterdir():
            if entry.name != "log":
                entry.unlink()
        shutil.copytree(backup, swarm.state, dirs_exist_ok=True)
        come_back(swarm)
        goes_on(swarm, saved)


@pytest.mark.long
def test_a_database_from_before_or_none_at_all_is_made_up_for_by_the_servers(tmp_path: Path) -> None:
    """A copy from before the run was sent back to a checkpoint, which gave it other ledgers, is put back; later the
    database is deleted while a server is killed and restarted. The servers show their plan, no step is lost, and all
    of them stay."""
    with Swarm(tmp_path, RUN_WITH_CHECKPOINTS) as swarm:
        first = tmp_path / "first.sqlite3"
        swarm.moves_on()
        eventually(lambda: swarm.step() > 6, "a checkpoint")
        with closing(sqlite3.connect(swarm.state / DATABASE)) as source, closing(sqlite3.connect(first)) as target:
            source.backup(target)
        order(swarm, "rollback", b'{"step": 4}')
        swarm.moves_on()
        saved, ledgers = swarm.step(), swarm.status()["ledger_generation"]
        assert ledgers > 1
        swarm.kill(swarm.coordinator)
        wipe(swarm)
        shutil.copy2(first, swarm.state / DATABASE)
        come_back(swarm)
        eventually(lambda: swarm.status()["ledger_generation"] == ledgers, "the servers' plan to be taken over")
        lost_steps = swarm.status()["run"]["lost_steps"]
        eventually(lambda: swarm.step() > saved, "the run to go on")
        eventually(lambda: swarm.status()["run"]["state"] == "training", "the run to train")
        assert swarm.status()["ledger_generation"] == ledgers
        assert swarm.status()["run"]["lost_steps"] == lost_steps
        assert all(server.child.running for server in swarm.servers)

        saved = swarm.step()
        swarm.kill(swarm.coordinator)
        wipe(swarm)
        swarm.kill(swarm.servers[3])
        come_back(swarm)
        waits = eventually(lambda: swarm.status()["run"]["waiting_for"], "the coordinator to wait for the server")
        eventually(lambda: "barnraise run adopt" in swarm.status()["run"]["waiting_for"], f"another word than {waits}")
        swarm.again(swarm.servers[3])
        goes_on(swarm, saved)


def wipe(swarm: Swarm) -> None:
    """Removes the database with all that belongs to it."""
    for entry in swarm.state.glob(f"{DATABASE}*"):
        entry.unlink()


def order(swarm: Swarm, what: str, body: bytes) -> None:
    """An operator's order by the API."""
    headers = {"Authorization": f"Bearer {swarm.links['admin_token']}"}
    request = urllib.request.Request(f"{swarm.links['http']}/api/{what}", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        assert answer.status == 200
