"""A disk that acknowledged a record and does not have it after a crash: real processes."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.swarm import RUN, Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", ["StepDone", pytest.param("ContributionAccepted", marks=pytest.mark.long)])
def test_a_lost_record_sends_the_run_back_and_it_goes_on(kind: str, tmp_path: Path) -> None:
    """The decider is killed, the newest record of a kind is taken from its journal, and it starts again: no process
    ends and nothing waits for ever. Either nobody can tell, and no step is lost; or the run goes back to its newest
    checkpoint and trains on."""
    folder = tmp_path / "shared"
    folder.mkdir()
    run = RUN.replace("every_steps = 0", f'every_steps = 20\nfolder = "{folder}"')
    with Swarm(tmp_path, run, more=("--checkpoints", str(folder))) as swarm:
        eventually(lambda: swarm.step() > 25, "a checkpoint")
        decider = next(server for server in swarm.servers if _records(server.child.folder, "StepDone"))
        swarm.kill(decider)
        number = _records(decider.child.folder, kind)[-1]
        with closing(sqlite3.connect(decider.child.folder / "journal.sqlite")) as journal:
            journal.execute("DELETE FROM records WHERE number = ?", (number,))
            journal.commit()
        before, begun = swarm.step(), time.monotonic()
        swarm.again(decider)
        eventually(lambda: swarm.step() > before and not swarm.status()["away"], "steps to close again")
        run_now = swarm.status()["run"]
        print(
            f"\n{kind}: {run_now['rollbacks']} times back, {run_now['lost_steps']} steps done again,"
            f" on from step {before} after {time.monotonic() - begun:.1f} s"
        )
        swarm.moves_on()


def _records(folder: Path, kind: str) -> list[int]:
    with closing(sqlite3.connect(folder / "journal.sqlite")) as journal:
        return [row[0] for row in journal.execute("SELECT number FROM records WHERE kind = ? ORDER BY number", (kind,))]
