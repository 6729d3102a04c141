"""Real processes in the bed of NATs (deploy/natbed), and what a test sees of them: status, logs, journals."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from node.demo.processes import Child, Children
from tests.integration import namespaces

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "natbed"
LOCK = Path("/tmp/natbed.lock")
"""One bed at a time on one machine: its namespaces have fixed names."""
LIFE_S = 900
"""The bed is gone after so long whatever happens to the test."""
PATIENCE_S = 120.0
"""What takes longer than this on a busy machine hangs; the tests never wait for it when all is well."""
_CLONE_NEWNET = 0x40000000


def why_not(*programs: str) -> str:
    """Why there can be no bed here, or an empty string. `programs`: what a test needs beyond what all need."""
    probe = ["ip", "netns", "exec", "NAME", "nft", "add", "table", "ip", "probe"]
    return namespaces.why_not(("ip", "nft", "turnserver", "bash", *programs), probe, "nftables does not work here")


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread is in a namespace of the bed: sockets that it makes stay there for ever."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(descriptor: int) -> None:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")

    with open("/proc/thread-self/ns/net") as home, open(f"/var/run/netns/brn-{namespace}") as there:
        enter(there.fileno())
        try:
            yield
        finally:
            enter(home.fileno())


class Bed:
    """The bed, with the processes that a test starts in it. Use as a context: at its end nothing of it is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children = Children()
        self._ends = ExitStack()

    def __enter__(self) -> Bed:
        with ExitStack() as ends:
            ends.enter_context(namespaces.alone(LOCK))
            ends.callback(self.script, "down")
            ends.push(self._children.__exit__)
            self.script("up", str(LIFE_S))
            self.script("stun")
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def script(self, *arguments: str) -> str:
        """Runs deploy/natbed; its output."""
        environment = {**os.environ, "NATBED_RUN": str(self.folder / "natbed")}
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            env=environment,
            capture_output=True,
            timeout=60,
            text=True,
        )
        assert done.returncode == 0, f"natbed {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def start(self, name: str, namespace: str, *arguments: str) -> Child:
        """Starts `barnraise ARGUMENTS` in a namespace, as somebody who lives there: with a home folder of its own."""
        home = self.folder / name
        within = ["ip", "netns", "exec", f"brn-{namespace}", "env", f"XDG_STATE_HOME={home}", f"HOME={home}"]
        within += ["OMP_NUM_THREADS=1"]
        return self._children.start(name, home, list(arguments), within)

    def run(self, name: str, namespace: str, *arguments: str, timeout_s: float = 60.0) -> tuple[int, str]:
        """Runs `barnraise ARGUMENTS` to its end; its exit code and what it wrote."""
        child = self.start(name, namespace, *arguments)
        return child.process.wait(timeout_s), child.log_path.read_text()

    def again(self, child: Child) -> Child:
        return self._children.again(child)

    def kill(self, child: Child) -> None:
        self._children.kill(child)

    def end(self, *children: Child) -> None:
        """Asks these processes to end, or all, and waits until they have."""
        self._children.end(children or self._children.running)

    def fetch(self, namespace: str, port: int, path: str) -> str:
        """What an HTTP server in a namespace answers on its loopback."""
        with inside(namespace):
            stream = socket.create_connection(("127.0.0.1", port), timeout=20)
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.sock = stream
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()


def log_of(child: Child) -> list[dict[str, Any]]:
    """Its log's lines that are JSON."""
    return [json.loads(line) for line in child.log_path.read_text().splitlines() if line.startswith("{")]


def eventually(happened: Callable[[], Any], what: str | Callable[[], str], patience_s: float = PATIENCE_S) -> Any:
    """The first true value that `happened` gives; fails with `what` when none comes in time."""
    deadline = time.monotonic() + patience_s
    while True:
        value = happened()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited in vain for {what if isinstance(what, str) else what()}"
        time.sleep(0.1)
