"""A server that is lost with its disk costs open steps and no closed one, where its buddy has what it had: real
processes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from protocol.drive.keyfile import load_identity
from tests.integration.swarm import RUN, Swarm, eventually
from tests.integration.test_changes import command, tensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GONE_S = 24.0
CLOCK_S = GONE_S / 4
"""A place's clock where a buddy has the state."""
BACK_S = 30.0
"""After it has run out, the run trains again within this."""
STEPS = 400
RUN_WITH_BUDDIES = (
    RUN.replace("steps = 1000000", f"steps = {STEPS}").replace(
        "[checkpoint]\nevery_steps = 0", "[checkpoint]\nCHECKPOINT"
    )
    + f"[limits]\nserver_gone_s = {GONE_S}\nlease_s = 5.0\n"
)


@pytest.mark.parametrize("slot", ["stage 0 front 0", pytest.param("stage 1 back 0", marks=pytest.mark.long)])
def test_a_server_lost_with_its_disk_costs_no_closed_step(slot: str, tmp_path: Path) -> None:
    """With a spare: the decider, or a server that only keeps a shard, is killed and its state folder deleted. The
    status names it until the spare has its place; no closed step is thrown away though there is no checkpoint at all
    yet; and the run ends with the weights of one process, bit by bit."""
    folder = tmp_path / "shared"
    folder.mkdir()
    keys = f'every_steps = 0\nfolder = "{folder}"\nbuddy = "always"'
    run = RUN_WITH_BUDDIES.replace("CHECKPOINT", keys)
    more = ("--checkpoints", str(folder))
    with Swarm(tmp_path, run, more=more) as swarm:
        eventually(lambda: swarm.step() > 10, "some steps")
        spare = swarm.node("spare", "server", swarm.links["server"], "--listen", "127.0.0.1:0", *more)
        eventually(lambda: _spare_waits(swarm), "the spare to wait")
        node = _holder(swarm, slot)
        lost = next(s for s in swarm.servers if load_identity(s.child.folder / "identity").node == node)
        swarm.kill(lost)
        for entry in lost.child.folder.iterdir():
            if entry.name != "log":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        begun, before, said = time.monotonic(), swarm.step(), dict[str, float]()

        def replaced() -> bool:
            now = swarm.status()["run"]
            if now["state"] == "waiting":
                said.setdefault(now["waiting_for"], round(time.monotonic() - begun, 1))
            return bool(now["rollbacks"] == 1)

        eventually(replaced, "the spare to have the place")
        replaced_s = time.monotonic() - begun
        status = swarm.status()
        goes_on_from = status["restore_step"]
        eventually(lambda: swarm.step() > goes_on_from, "steps to close again")
        back_s = time.monotonic() - begun
        print(
            f"\n{slot}: closed {before + 1}, goes on from version {goes_on_from}, {status['run']['lost_steps']} steps"
            f" lost; the spare's after {replaced_s:.1f} s, a step closed after {back_s:.1f} s; said: {said}"
        )
        assert goes_on_from > before and status["run"]["lost_steps"] == 0
        assert replaced_s < GONE_S and back_s < CLOCK_S + BACK_S
        assert any(slot in sentence for sentence in said) and all("server" in s or "stage" in s for s in said)
        eventually(lambda: swarm.status()["run"]["state"] == "finished", "the end")
        assert swarm.status()["run"]["lost_steps"] == 0 and swarm.status()["run"]["rollbacks"] == 1
        eventually(lambda: not spare.child.running, "the end of the spare")
    exported = command("export", str(tmp_path / "model"), str(folder))
    assert exported.returncode == 0, exported.stderr
    done = command("demo", "--reference", "--config", str(tmp_path / "RUN.toml"), "--out", str(tmp_path / "alone"))
    assert done.returncode == 0, done.stderr
    assert tensors(tmp_path / "model") == tensors(tmp_path / "alone" / "model")


def _holder(swarm: Swarm, slot: str) -> str:
    members: list[dict[str, Any]] = swarm.status()["members"]
    found: str = next(member["id"] for member in members if member["place"] == slot)
    return found


def _spare_waits(swarm: Swarm) -> bool:
    members = swarm.status()["members"]
    return any(member["role"] == "server" and member["stage"] == -1 and member["report_age_s"] for member in members)
