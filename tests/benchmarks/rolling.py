"""Two builds of Barnraise in one run, as an upgrade by rolling restart meets them: real processes, both ways.

    python -m tests.benchmarks.rolling [--before COMMIT]

The older build is the last one before the wire's minor version grew, taken out of git's history. For every pairing of
coordinator, servers and volunteer it says whether steps close, or what the one that cannot take part tells its people;
and last whether the newer build goes on with the state that the older one has left. `rolling.json` beside this file
has what was seen. "version" is what a build of 1.1 or its peer logs where the other one speaks another minor version.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tests.integration.swarm import fetch

HERE = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".json")
RUN = """
name = "rolling"
steps = 1000000
[model]
layers = 1
hidden = 32
heads = 2
kv_heads = 1
feed_forward = 64
context = 16
[data]
source = "builtin:grammar"
[batch]
microbatches = 2
[stages]
count = 1
back_servers = 0
collocated = "when_empty"
[checkpoint]
every_steps = 0
"""
PATIENCE_S = 60.0
STEPS = 3


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(HERE), *words], check=True, capture_output=True).stdout


def newest_before_this_minor() -> str:
    """The commit before the one that made the minor version what it is now."""
    path = "protocol/link/codec.py"
    minor = re.search(r"PROTOCOL_MINOR = (\d+)", (HERE / path).read_text())
    assert minor is not None
    found = git("log", "--format=%h", f"-SPROTOCOL_MINOR = {minor[1]}", "--", path).decode().split()
    return f"{found[-1]}~1"


class Build:
    """A tree of the source, run as its own package."""

    def __init__(self, name: str, tree: Path) -> None:
        self.name = name
        self._environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        self._tree = tree

    def start(self, log: Path, *words: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "protocol.cli", *words],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=self._tree, env=self._environment,
            )  # fmt: skip


def tree_of(commit: str, folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        archive.extractall(folder, filter="data")
    return folder


def last_words(log: Path) -> str:
    """What somebody who looks at a log reads last of why it did not work."""
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    found = [line for line in said if "minor" in line or "refused" in line or "version" in line or "Error" in line]
    line = (found or said or ["nothing"])[-1]
    try:
        fields = json.loads(line)
        line = fields.get("reason") or fields.get("detail") or fields["event"]
    except (ValueError, KeyError):
        pass
    return str(line)[:300]


def step(links: dict[str, str]) -> int:
    found: int = json.loads(fetch(f"{links['http']}/api/status"))["run"]["step"]
    return found


def trial(folder: Path, coordinator: Build, server: Build, volunteer: Build | None, steps: int = STEPS) -> str:
    """Whether `steps` more close, or what is said instead. State stays in the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "RUN.toml").write_text(RUN)
    state, started = folder / "coordinator", []
    (state / "links.json").unlink(missing_ok=True)
    try:
        words = ["coordinator", str(folder / "RUN.toml"), "--state", str(state), "--listen", "127.0.0.1:0"]
        started.append(coordinator.start(folder / "coordinator.log", *words, "--http", "127.0.0.1:0"))
        deadline = time.monotonic() + PATIENCE_S
        while not (state / "links.json").exists():
            if started[0].poll() is not None or time.monotonic() > deadline:
                return f"the coordinator does not start: {last_words(folder / 'coordinator.log')}"
            time.sleep(0.1)
        links = json.loads((state / "links.json").read_text())
        before = step(links)
        logs = {"server": folder / "server.log", "volunteer": folder / "volunteer.log"}
        options = ["--state", str(folder / "server"), "--listen", "127.0.0.1:0"]
        started.append(server.start(logs["server"], "server", links["server"], *options))
        if volunteer is not None:
            options = ["--yes", "--always", "--no-benchmark", "--state", str(folder / "volunteer")]
            started.append(volunteer.start(logs["volunteer"], "join", links["volunteer"], *options))
        deadline = time.monotonic() + PATIENCE_S
        works = {"server": False, "volunteer": volunteer is None}
        while time.monotonic() < deadline:
            members = json.loads(fetch(f"{links['http']}/api/status"))["members"]
            works |= {member["role"]: True for member in members}
            if step(links) >= before + steps and all(works.values()):
                return f"trains: {step(links) - before} steps"
            time.sleep(0.3)
        away = [role for role, here in works.items() if not here]
        trains = "it trains without, " if step(links) > before else ""
        return "; ".join(f"{trains}{role}: {last_words(logs[role])}" for role in away or ["server"])
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="the older build's commit [the last one of the minor version before this]")
    commit = parser.parse_args().before or newest_before_this_minor()
    table = {}
    with tempfile.TemporaryDirectory() as scratch:
        old = Build("before", tree_of(commit, Path(scratch, "tree")))
        new = Build("now", HERE)
        for number, builds in enumerate(itertools.product((old, new), repeat=3)):
            coordinator, server, volunteer = builds
            name = f"coordinator {coordinator.name}, server {server.name}, volunteer {volunteer.name}"
            table[name] = trial(Path(scratch, str(number)), coordinator, server, volunteer)
            print(f"{name}: {table[name]}", flush=True)
        left = Path(scratch, "left")
        table["before, alone"] = trial(left, old, old, None, 10)
        table["now, with the state that before has left"] = trial(left, new, new, None)
        for name in list(table)[-2:]:
            print(f"{name}: {table[name]}", flush=True)
    TABLE.write_text(json.dumps({"before": git("rev-parse", commit).decode()[:7], "seen": table}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
