"""What is held against a run under faults: that it goes on, that its status names who holds it up, and at its end that
nothing was lost."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from node.audit import AuditError, audit
from tests.soak.fleet import Fleet, Process

WHOLE_S = 240.0
"""Everybody takes part again and steps close within this after a fault is over, on a computer that others use too."""
BACK_S = 120.0
"""The next step closes within this after a fault is over and the coordinator answers."""
NAMED_S = 30.0
"""Who holds a run up is named when no step has closed for so long: three leases, or what a place's clock takes."""
LOOK_S = 0.25
END_S = 300.0
COMMAND_S = 300.0
CLOSING_STEPS = 12


@dataclass
class Watch:
    """What the status showed while a fault was there, and after it."""

    begun: float
    step: int
    rollbacks: int
    lost_steps: int
    stood_s: float = 0.0
    """The longest time without a closed step, and without an answer."""
    mute_s: float = 0.0
    sentences: dict[str, float] = field(default_factory=dict)
    """What the run was waiting for -> how long no step had closed when it was last said."""
    newest: dict[str, Any] | None = None
    _closed_at: float = 0.0
    _heard_at: float = 0.0

    @staticmethod
    def of(status: dict[str, Any]) -> Watch:
        run, now = status["run"], time.monotonic()
        return Watch(
            now, run["step"], run["rollbacks"], run["lost_steps"], newest=status, _closed_at=now, _heard_at=now
        )

    def look(self, status: dict[str, Any] | None) -> bool:
        """Takes a status in; whether a step has closed since the look before."""
        now = time.monotonic()
        self.stood_s = max(self.stood_s, now - self._closed_at)
        if status is None:
            self.mute_s = max(self.mute_s, now - self._heard_at)
            return False
        self._heard_at, run = now, status["run"]
        closed = self.newest is not None and run["step"] != self.newest["run"]["step"]
        self.newest = status
        if closed:
            self._closed_at = now
        said = "; ".join([run["waiting_for"], *run["alerts"]]).strip("; ")
        if said:
            self.sentences[said] = now - self._closed_at
        return bool(closed)


def settle(fleet: Fleet) -> str:
    """Waits until everybody takes part and two steps have closed; else the reason why not."""
    deadline = time.monotonic() + WHOLE_S
    watch: Watch | None = None
    closed = 0
    while time.monotonic() < deadline:
        fleet.look_after()
        status = fleet.status()
        if fleet.whole(status):
            watch = watch or Watch.of(status or {})
            closed += watch.look(status)
            if closed >= 2:
                return ""
        else:
            watch, closed = None, 0
        time.sleep(LOOK_S)
    status = fleet.status()
    if status is None:
        return f"the coordinator does not answer after {WHOLE_S:.0f} s"
    here = {member["id"] for member in status["members"]}
    absent = [process.name for process in fleet.processes if process.node and process.node not in here]
    return f"not whole after {WHOLE_S:.0f} s: {status['run']['waiting_for'] or 'no step closes'}; absent: {absent}"


def named(watch: Watch, process: Process, place: str) -> bool:
    """Whether some sentence had the name or the place of who was hit."""
    return any(process.node[:8] in said or place in said for said in watch.sentences)


def place_name(process: Process, status: dict[str, Any]) -> str:
    """The words by which the status calls a server's place, or what no sentence has."""
    for stage in status["stages"]:
        for server in stage["servers"]:
            if server["id"] == process.node:
                front = [other["id"] for other in stage["servers"] if other["role"] == server["role"]]
                return f"stage {stage['stage']} {server['role']} {front.index(process.node)}"
    return "(no place)"


def command(*words: str) -> str:
    """What `barnraise WORDS` printed. Raises `AssertionError` with its complaint."""
    done = subprocess.run(
        [sys.executable, "-m", "protocol.cli", *words], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert done.returncode == 0, f"barnraise {' '.join(words)}: {done.stderr.strip()[-500:]}"
    return done.stdout


def close(fleet: Fleet) -> dict[str, Any]:
    """Lets the run end, and compares it with one process that did the same; what was found, for the list."""
    url = ["--url", f"http://{fleet.http}"]
    status = fleet.status()
    assert status is not None, "the coordinator does not answer at the end"
    wanted = int(status["run"]["step"]) + CLOSING_STEPS
    command("run", "set", "steps", str(wanted), *url)
    deadline = time.monotonic() + END_S
    while True:
        status = fleet.status()
        if status is not None and status["run"]["state"] == "finished":
            break
        waits = "nothing" if status is None else status["run"]["waiting_for"]
        assert time.monotonic() < deadline, f"the run does not end: it waits for {waits}"
        fleet.look_after()
        time.sleep(LOOK_S)
    changes = fleet.folder / "changes.json"
    changes.write_text(command("run", "changes", "--json", *url))
    servers = [process for process in fleet.processes if process.role == "server"]
    while any(process.child.running for process in servers) and time.monotonic() < deadline:
        time.sleep(LOOK_S)  # they leave by themselves once all is written
    try:
        verdict = audit([process.home for process in servers], wanted)
        sentences = [f"step {found.step} stage {found.stage}: {found.sentence}" for found in verdict.findings[:3]]
        lost, doubled = verdict.samples_lost, verdict.samples_doubled
    except AuditError as error:
        sentences, lost, doubled = [str(error)], -1, -1
    command("export", str(fleet.folder / "model"), str(fleet.checkpoints))
    alone = fleet.folder / "alone"
    command("demo", "--reference", "--config", str(fleet.toml), "--changes", str(changes), "--out", str(alone))
    equal = tensors(fleet.folder / "model") == tensors(alone / "model")
    return {
        "steps": wanted, "rollbacks": status["run"]["rollbacks"], "lost_steps": status["run"]["lost_steps"],
        "weights": "equal" if equal else "DIFFER", "samples_lost": lost, "samples_doubled": doubled,
        "found": "; ".join([*sentences, *([] if equal else ["the weights are not those of one process"])]),
    }  # fmt: skip


def tensors(model: Path) -> dict[str, bytes]:
    """Name -> bytes, of an exported model."""
    with safe_open(model / "model.safetensors", framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
