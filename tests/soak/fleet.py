"""The processes of one run of the soak: a coordinator, servers of two stages, a spare, volunteers; all by their
ordinary commands, started again when they end, as a service manager does it."""

from __future__ import annotations

import json
import signal
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from node.demo.processes import Child, Children
from protocol.drive.keyfile import load_or_create_identity
from protocol.drive.process import free_port
from tests.integration.swarm import eventually
from tests.soak.ground import DISK_MB, LENT_DISK_MB, Ground

SERVERS, VOLUNTEERS = 5, 3
"""A front and a back server for each of two stages, and a spare."""
ASK_S = 3.0
PLACE_KEPT_S = 25.0
"""For whoever is gone: a process that takes longer to start finds a spare in its place."""
RUN = """
name = "soaked"
seed = SEED
steps = 1000000
[model]
layers = 2
hidden = 32
heads = 2
kv_heads = 1
feed_forward = 64
context = 16
[data]
source = "builtin:grammar"
[batch]
microbatches = 4
delay = DELAY
[stages]
count = 2
collocated = "COLLOCATED"
[optimizer]
warmup_steps = 2
[audit]
rate = 0.0
first = 0
[limits]
lease_s = 8.0
server_gone_s = GONE
[checkpoint]
every_steps = 20
folder = "FOLDER"
buddy = "BUDDY"
"""
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class BentChildren(Children):
    """Every process can be made to hang, or to have a clock that is ahead, by a file beside its state."""

    module = "tests.integration.hanging"


@dataclass
class Process:
    """One of the fleet. `role`: coordinator, server or volunteer."""

    name: str
    role: str
    home: Path
    child: Child
    wanted: bool = True
    """Whether it should run: not while a fault keeps it down."""

    @property
    def bent(self) -> Path:
        """What makes it hang: see `tests.integration.hanging`."""
        return self.home / "bent"

    @property
    def node(self) -> str:
        """As others call it; empty for the coordinator, and before it has a name."""
        key = self.home / "identity"
        return load_or_create_identity(key).node if self.role != "coordinator" and key.exists() else ""

    def pids(self) -> list[int]:
        """Of the process itself and of what it has started, itself first."""
        with suppress(psutil.NoSuchProcess):
            here = psutil.Process(self.child.pid)
            return [here.pid, *(child.pid for child in here.children(recursive=True))]
        return []


class Fleet:
    """Use as a context: at its end no process is left."""

    def __init__(self, ground: Ground, seed: int, collocated: str, delay: int, buddy: str) -> None:
        self.ground = ground
        self.keeps_copies = buddy == "always"
        """Whether each shard has a buddy. `auto` keeps no copies here: this model's are larger than its boundaries."""
        self.folder = ground.folder
        self.checkpoints = ground.disk("checkpoints")
        text = RUN.replace("FOLDER", str(self.checkpoints)).replace("COLLOCATED", collocated)
        text = text.replace("GONE", str(PLACE_KEPT_S)).replace("BUDDY", buddy)
        self.toml = self.folder / "RUN.toml"
        self.toml.write_text(text.replace("SEED", str(seed)).replace("DELAY", str(delay)))
        self.children = BentChildren()
        self.processes: list[Process] = []
        self.exits: list[str] = []
        """Who ended though nobody wanted it, with the last of what it said."""
        self.http = f"127.0.0.1:{free_port()}"
        listen = f"{ground.address}:{free_port()}"
        self.coordinator = self._start(
            "coordinator", "coordinator", str(self.toml), "--listen", listen, "--announce", listen, "--http", self.http
        )
        links = self.coordinator.home / "links.json"
        eventually(links.exists, "the coordinator's links")
        self.links: dict[str, Any] = json.loads(links.read_text())
        for number in range(SERVERS):
            more = ("--checkpoints", str(self.checkpoints), "--no-punch")
            self._start(f"server-{number}", "server", str(self.links["server"]), *more)
        for number in range(VOLUNTEERS):
            alone = ("--yes", "--always", "--no-page", "--no-benchmark", "--no-punch")
            self._start(f"volunteer-{number}", "join", str(self.links["volunteer"]), *alone)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            self.signal(process, signal.SIGCONT)
            if process.bent.with_suffix(".lane").exists() or process.bent.with_suffix(".disk").exists():
                self.kill(process)
        self.children.__exit__()
        self.ground.clear()

    def _start(self, name: str, command: str, *words: str) -> Process:
        role = {"join": "volunteer"}.get(command, command)
        home = self.ground.disk(name, LENT_DISK_MB if role == "volunteer" else DISK_MB)
        address, within = ("", ()) if role == "coordinator" else self.ground.host(name)
        listen = ("--listen", f"{address}:{free_port()}") if role == "server" else ()
        state = ("--state", str(home), "--metrics", "off")
        # What a process says goes to a disk that is never full, as a service manager has one.
        logs = self.folder / "logs" / name
        child = self.children.start(name, logs, ["any", str(home / "bent"), command, *words, *listen, *state], within)
        process = Process(name, role, home, child)
        self.processes.append(process)
        return process

    # ---- what is done to it --------------------------------------------------------------------------------------

    def signal(self, process: Process, number: signal.Signals) -> None:
        """To the process and all that it has started."""
        for pid in process.pids():
            with suppress(ProcessLookupError):
                psutil.Process(pid).send_signal(number)

    def kill(self, process: Process) -> None:
        """No last word, no clean-up; what it had started ends by itself."""
        process.wanted = False
        self.children.kill(process.child)

    def again(self, process: Process) -> None:
        process.wanted = True
        if not process.child.running:
            process.child = self.children.again(process.child)

    def look_after(self) -> None:
        """Starts again who has ended by itself, and keeps its last words."""
        for process in self.processes:
            if process.wanted and not process.child.running:
                tail = process.child.log_tail().strip().splitlines()
                code = process.child.process.returncode
                self.exits.append(f"{process.name} ended with {code}: {tail[-1][:300] if tail else ''}")
                self.again(process)

    # ---- what can be seen of it ----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any] | None:
        """What the coordinator says; None while it says nothing."""
        try:
            with _opener.open(f"http://{self.http}/api/status", timeout=ASK_S) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except (OSError, ValueError):
            return None

    def whole(self, status: dict[str, Any] | None) -> bool:
        """Whether everybody takes part, and the run trains."""
        if status is None or status["away"] or status["run"]["state"] != "training":
            return False
        here = {member["id"] for member in status["members"]}
        return all(process.node in here for process in self.processes if process.role != "coordinator")

    def place_of(self, process: Process, status: dict[str, Any]) -> str:
        """What a server is at this moment: decider, front, back or spare; else its role."""
        for stage in status["stages"]:
            for server in stage["servers"]:
                if server["id"] == process.node:
                    decides = stage["stage"] == 0 and server["shard"] == 0
                    return "decider" if decides else str(server["role"])
        return "spare" if process.role == "server" else process.role
