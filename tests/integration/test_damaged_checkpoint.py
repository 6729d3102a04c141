"""A checkpoint with a damaged part in a folder that all servers share, by real processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.swarm import RUN, Swarm, eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_a_run_goes_back_behind_a_checkpoint_with_a_damaged_part(tmp_path: Path) -> None:
    """All disks are lost, and a bit of one part of the newest checkpoint has flipped. Servers that start look only
    which parts are there; the one whose part it is stops with a sentence, and started again as its operator's
    supervisor would it names the checkpoint no more: the run goes on from the one before."""
    folder = tmp_path / "shared"
    folder.mkdir()
    run = RUN.replace("every_steps = 0", f'every_steps = 40\nfolder = "{folder}"')
    with Swarm(tmp_path, run, more=("--checkpoints", str(folder))) as swarm:
        eventually(lambda: len(_manifests(folder)) > 1, "two checkpoints")
        for server in swarm.servers:
            swarm.kill(server)
        before, newest = _manifests(folder)[-2:]
        part = next(newest.glob("stage-1-shard-1-*.safetensors"))
        content = part.read_bytes()
        part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for server in swarm.servers:
            shutil.rmtree(server.child.folder)
            server.child.folder.mkdir()
            swarm.again(server)
        stopped = eventually(lambda: [one for one in swarm.servers if not one.child.running], "the damage to be found")
        assert [f"{part} is damaged" in one.child.log_tail() for one in stopped] == [True]
        swarm.again(stopped[0])
        eventually(lambda: swarm.status()["run"]["rollbacks"] and not swarm.status()["away"], "the servers to be back")
        swarm.moves_on()
        assert swarm.step() >= int(before.name[5:]), "not from the seed"


def _manifests(folder: Path) -> list[Path]:
    """The places of whole checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob("*/step-????????/manifest.json"))
