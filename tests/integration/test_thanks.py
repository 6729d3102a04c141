"""A volunteer's thanks with real processes: signed by the coordinator, kept, shown at the end, checked afterwards."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from node.owner.thanks import FILE, read_thanks
from protocol.trust.identity import node_id
from tests.integration.swarm import Swarm
from tests.integration.test_owner import OWNED_RUN, lend

RUN = f'description = "For a school."\n{OWNED_RUN}'.replace('"always"', '"when_empty"')
"""Where a volunteer is, servers leave the work to it."""
PATIENCE_S = 240.0
"""News come every half minute."""


@pytest.mark.slow
def test_accepted_work_is_thanked_for(tmp_path: Path) -> None:
    """The owner's page is told the loss and the part; at the end the computer says what it gave; the file in its state
    folder is the coordinator's word for at most what the ledgers have accepted, and `barnraise thanks` checks it."""
    with tempfile.TemporaryDirectory() as folder, Swarm(Path(folder), RUN) as swarm:
        lent = lend(swarm, "thanked", "--limit", "name=Ada")

        def thanked() -> dict[str, Any] | None:
            status = lent.status()
            return status if status and status["signed"]["ever"] and status["news"]["curve"] else None

        deadline = time.monotonic() + PATIENCE_S
        while (status := thanked()) is None:
            assert time.monotonic() < deadline, f"no thanks: {lent.status()}"
            time.sleep(0.5)
        assert status["signed"]["ever"]["tasks"] > 0 and status["news"]["step"] >= 0
        assert 0 <= status["news"]["hour_ratio"] <= 1
        command = [sys.executable, "-m", "protocol.cli", "leave", "--state", str(lent.state)]
        left = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        assert left.returncode == 0 and lent.daemon.child.process.wait(5) == 0, "leave waits for the end"
        assert "Thank you. This visit: " in left.stdout and "Signed by the run, for ever: " in left.stdout
        (said,) = [line for line in lent.daemon.log() if line["event"] == "thanks"]
        assert "accepted" in said["text"] and "of the last hour" in said["text"]
        found = read_thanks(lent.state / FILE)
        link = swarm.link("volunteer")
        assert found.coordinator == node_id(link.coordinator_key) and found.thanks.run_id == link.run_id
        assert (found.thanks.name, found.thanks.run) == ("Ada", "lent")
        assert found.thanks.tasks >= status["signed"]["ever"]["tasks"]
        command = [sys.executable, "-m", "protocol.cli", "thanks", "--state", str(lent.state)]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        assert shown.returncode == 0 and "Ada has given the run lent" in shown.stdout
