"""A small run of real processes that trains for ever, and what a test can see of it: logs, counters, steps."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from node.demo.processes import Child, Children
from protocol.drive.process import free_port
from protocol.trust.membership import JoinLink

PATIENCE_S = 150.0  # what takes seconds on an idle computer, among a dozen processes with torch of another test
"""What takes longer than this on a busy machine hangs; the tests never wait for it when all is well."""
RUN = """
name = "attacked"
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
count = 2
collocated = "always"
[checkpoint]
every_steps = 0
"""
"""Two stages of a front and a back server each; they compute everything themselves, so no volunteer is needed."""
_LINE_CHARACTERS, _LAST_LINES, _LAST_CHARACTERS = 600, 6, 4000
"""Of a line, of each log, and of the status: what is printed of a run whose test failed."""
REJECTED = "barnraise_transport_rejected_messages_total"
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str) -> str:
    """The text at a URL on this machine."""
    with _opener.open(url, timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
    return text


def eventually(happened: Callable[[], Any], what: str) -> Any:
    """The first true value that `happened` gives; fails with `what` when none comes in time."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        value = happened()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


@dataclass
class Daemon:
    """One process as its operator sees it."""

    child: Child
    metrics_url: str

    @property
    def name(self) -> str:
        return self.child.name

    def metrics(self) -> str:
        return fetch(self.metrics_url)

    def rejected(self) -> dict[str, float]:
        """Refused messages and callers so far, by reason."""
        found = re.findall(rf'^{REJECTED}{{reason="(\w+)"}} (\S+)$', self.metrics(), re.MULTILINE)
        return {reason: float(value) for reason, value in found}

    def log(self, after: int = 0) -> list[dict[str, Any]]:
        """Its log's lines as JSON, without the first `after`."""
        lines = self.child.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines[after:] if line.startswith("{")]

    def log_length(self) -> int:
        return len(self.child.log_path.read_text().splitlines())

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.child.pid).memory_info().rss)


class Swarm:
    """Coordinator and servers, by their ordinary commands. Use as a context: at its end no process is left.

    `servers` holds one server process for each place of the run, or none when a test plays the servers itself.
    """

    def __init__(
        self,
        folder: Path,
        run: str = RUN,
        server_count: int = 4,
        more: tuple[str, ...] = (),
        coordinator: tuple[str, ...] = (),
        children: type[Children] = Children,
    ) -> None:
        """`more`, `coordinator`: further words of every server's command line, and of the coordinator's; `children`:
        how processes are started."""
        self.folder = folder
        self._server_count = server_count
        self._children = children()
        toml = folder / "RUN.toml"
        toml.write_text(run)
        home = folder / "coordinator"
        arguments = ["coordinator", str(toml), "--state", str(home), "--listen", "127.0.0.1:0"]
        arguments += ["--http", "127.0.0.1:0", "--metrics", "127.0.0.1:0", *coordinator]
        child = self._children.start("coordinator", home, arguments)
        self.state = home
        self.links: dict[str, Any] = eventually(lambda: self._read_links(child), "the coordinator's links")
        self.coordinator = Daemon(child, self.links["metrics"])
        self.servers = [
            self.node(f"server-{number}", "server", self.links["server"], "--listen", "127.0.0.1:0", *more)
            for number in range(server_count)
        ]

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, error: BaseException | None = None, *_: object) -> None:
        if error is not None:
            print(self._last_words())
            if isinstance(error, AssertionError):  # the first line is all that a summary shows
                error.args = (f"{error}; {self._in_short()}",)
        self._children.__exit__()

    def _in_short(self) -> str:
        """Who has ended, what the run waits for, and since when, on one line."""
        words = [f"{daemon.name} ended with {daemon.child.process.returncode}" for daemon in self._dead()]
        with suppress(Exception):
            status = self.status()
            words.append(f"step {status['run']['step']} waits for {status['run'].get('waiting_for')!r}")
            words += [
                f"{member['role']} {member['id'][:8]} waits for {member['waiting_for']!r}"
                for member in status["members"]
                if member["waiting_for"]
            ]
        return "; ".join(words)[:_LINE_CHARACTERS]

    def _last_words(self) -> str:
        """What a test that failed is asked: where the run stands, and the end of everybody's log."""
        words = []
        with suppress(Exception):
            words.append(f"status: {json.dumps(self.status())[:_LAST_CHARACTERS]}")
        for log in sorted(self.folder.glob("*/log")):
            words += [f"---- {log.parent.name}", *(line[:300] for line in log.read_text().splitlines()[-_LAST_LINES:])]
        return "\n".join(words)

    def _read_links(self, child: Child) -> dict[str, Any] | None:
        assert child.running, child.log_tail()
        path = self.state / "links.json"
        links: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return links

    def node(self, name: str, *arguments: str) -> Daemon:
        """Starts `barnraise ARGUMENTS` with its metrics and a state folder of its own."""
        port = free_port()
        home = self.folder / name
        options = ["--state", str(home), "--metrics", f"127.0.0.1:{port}"]
        return Daemon(self._children.start(name, home, [*arguments, *options]), f"http://127.0.0.1:{port}/metrics")

    def kill(self, daemon: Daemon) -> None:
        """No last word, no clean-up."""
        self._children.kill(daemon.child)

    def stop(self, daemon: Daemon) -> None:
        """SIGTERM, and waits for its end."""
        self._children.end([daemon.child])

    def again(self, daemon: Daemon) -> None:
        """Starts the same command on the same state."""
        daemon.child = self._children.again(daemon.child)

    def link(self, role: str) -> JoinLink:
        return JoinLink.parse(self.links[role])

    @property
    def daemons(self) -> list[Daemon]:
        return [self.coordinator, *self.servers]

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(fetch(self.links["http"] + "/api/status"))
        return status

    def step(self) -> int:
        """Newest step that is closed everywhere; -1 before the first."""
        step: int = self.status()["run"]["step"]
        return step

    def moves_on(self) -> None:
        """A further step closes everywhere, and every process lives."""
        before = self.step()
        eventually(lambda: self.step() > before or not self._all_live(), f"step {before + 1}")
        assert self._all_live(), [(daemon.name, daemon.child.log_tail()) for daemon in self._dead()]

    def _dead(self) -> list[Daemon]:
        return [daemon for daemon in self.daemons if not daemon.child.running]

    def _all_live(self) -> bool:
        return not self._dead()

    def at(self, address_port: int) -> Daemon:
        """The server process that listens at a port."""
        for server in self.servers:
            listening = psutil.Process(server.child.pid).net_connections(kind="tcp")
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == address_port for c in listening):
                return server
        raise AssertionError(f"nobody listens at {address_port}")
