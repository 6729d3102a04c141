"""Checkpoints in an object store, by real processes: obstore's local store is the bucket that all servers share."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.swarm import RUN, Swarm, eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "protocol.cli", *words], capture_output=True, text=True, check=False)


def test_servers_whose_disks_are_lost_go_on_from_the_store(tmp_path: Path) -> None:
    """First one disk is lost for ever, then all: fresh servers train on from what the store has. The store's
    checkpoints verify and give a model."""
    bucket = tmp_path / "bucket"
    url = f"file://{bucket}"
    run = RUN.replace("every_steps = 0", f'every_steps = 20\nfolder = "{url}"')
    run += "[limits]\nserver_gone_s = 2\nsnapshot_steps = 1000000\n"
    with Swarm(tmp_path, run, more=("--checkpoints", url)) as swarm:
        for lost in (swarm.servers[:1], swarm.servers):
            kept = _another_checkpoint(bucket)
            before, begun = swarm.status()["run"], time.monotonic()
            for server in lost:
                swarm.kill(server)
            for server in lost:
                shutil.rmtree(server.child.folder)
                server.child.folder.mkdir()
            for server in lost:
                swarm.again(server)
            eventually(lambda: not swarm.status()["away"] and swarm.step() > 0, "the servers to be back")
            swarm.moves_on()
            now = swarm.status()["run"]
            again = now["lost_steps"] - before["lost_steps"]
            print(
                f"\n{len(lost)} disk(s) lost at step {before['step']}: {again} steps done again,"
                f" on after {time.monotonic() - begun:.1f} s"
            )
            # From the seed it would be all of them; some may have closed between the look and the kill.
            assert again <= before["step"] + 1 - kept + 20, (before, now)
        assert now["rollbacks"] >= 1
    verified = command("checkpoints", "verify", url)
    lines = [line for line in verified.stdout.splitlines() if line.startswith("step")]
    # Who was killed while it wrote the newest, or removed the oldest, left parts without a manifest: no checkpoint.
    counted = [line for line in lines if " no checkpoint: " not in line]
    assert len(counted) >= 2 and all(" whole: 4 parts" in line for line in counted), verified.stdout + verified.stderr
    exported = command("export", str(tmp_path / "model"), url)
    assert exported.returncode == 0, exported.stdout + exported.stderr
    assert "signed by server" in exported.stdout and (tmp_path / "model" / "model.safetensors").exists()


def _another_checkpoint(bucket: Path) -> int:
    """The step of the newest checkpoint in the store, as soon as it has one more than now; older ones go."""

    def newest() -> int:
        return max((int(path.parent.name[5:]) for path in bucket.glob("*/step-????????/manifest.json")), default=0)

    before = max(newest(), 60)
    eventually(lambda: newest() > before, "a checkpoint in the store")
    return newest()
