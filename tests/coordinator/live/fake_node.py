"""A node that says what a test tells it to, over real sockets, and a coordinator as a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from protocol.drive.transport import Link, Transport
from protocol.messages import Bye, Message, Ping, Pong, Welcome
from protocol.trust.identity import Identity
from protocol.trust.membership import JoinLink, Trust
from tests.coordinator.live.desk import join

M = TypeVar("M", bound=Message)
PATIENCE_S = 20.0
"""A step that takes longer than this on a busy machine hangs; the tests never wait for it when all is well."""
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Coordinator:
    """`barnraise coordinator` in a folder, at a port that stays the same."""

    def __init__(self, folder: Path, run: str, port: int) -> None:
        self.folder = folder
        self.toml = folder / "RUN.toml"
        self.toml.write_text(run)
        self.port = port
        self.process: subprocess.Popen[str]
        self.links: dict[str, Any] = {}
        self.more: tuple[str, ...] = ()
        """Further words of the command line."""

    def command(self) -> list[str]:
        options = ["--state", str(self.folder / "state"), "--listen", f"127.0.0.1:{self.port}", "--json"]
        options += ["--http", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
        return [
            sys.executable,
            "-c",
            "from protocol.cli import main; main()",
            "coordinator",
            str(self.toml),
            *options,
            *self.more,
        ]

    def start(self) -> None:
        """Returns when it has printed its links, which is after it listens."""
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(self.command(), stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "log").read_text()
        self.links = {**json.loads((self.folder / "state" / "links.json").read_text()), "printed": json.loads(line)}

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(PATIENCE_S)

    def link(self, role: str) -> JoinLink:
        return JoinLink.parse(self.links[role])

    def get(self, path: str, **headers: str) -> Any:
        """An answer of the API, as Python values."""
        return json.loads(self.text(path, **headers))

    def text(self, path: str, **headers: str) -> str:
        """An answer of the API, as it came."""
        request = urllib.request.Request(self.links["http"] + path, headers=headers)
        with _opener.open(request, timeout=PATIENCE_S) as answer:
            content: bytes = answer.read()
        return content.decode()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        request = urllib.request.Request(self.links["http"] + path, json.dumps(body).encode(), headers)
        try:
            with _opener.open(request, timeout=PATIENCE_S) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def metrics(self) -> str:
        with _opener.open(self.links["metrics"], timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
        return text

    def metric(self, line: str) -> float:
        """The value of one line of `/metrics`, named with its labels."""
        for shown in self.metrics().splitlines():
            if shown.startswith(line + " "):
                return float(shown.rpartition(" ")[2])
        raise AssertionError(f"no metric {line}")


class FakeNode:
    """One identity; links on demand; keeps every message."""

    def __init__(self, nursery: trio.Nursery, link: JoinLink, seed: int) -> None:
        self.identity = Identity(bytes([seed]) * 32)
        self.link = link
        self.credential = link.invite
        self.heard: list[Message] = []
        self.downs: list[str] = []
        self._changed = trio.Event()
        trust = Trust(link.run_id, link.coordinator_key)
        self._transport = Transport(
            nursery,
            identity=self.identity,
            role=link.role,
            run_id=link.run_id,
            credential=lambda: self.credential,
            admit=lambda key, credential: trust.admit(key, credential, time.time()),
            events=self,
        )

    @property
    def node(self) -> str:
        return self.identity.node

    async def join(self, **facts: Any) -> None:
        """Dials until the coordinator answers, and joins."""
        with trio.fail_after(PATIENCE_S):
            await self._transport.dial(self.link.addresses, self.link.coordinator)
        own = {"role": self.link.role, "addresses": (f"127.0.0.1:{self.identity.public_key[0] + 1}",)}
        self.say(join(**{**own, **facts}))

    def say(self, message: Message) -> None:
        link = self._transport.link_to(self.link.coordinator)
        assert link is not None, f"no link: {self.downs}"
        link.send(message)

    async def hears(self, kind: type[M], after: int = 0, **facts: Any) -> M:
        """The first message of a kind with these facts, not counting the first `after` messages heard."""
        with trio.fail_after(PATIENCE_S):
            while True:
                for message in self.heard[after:]:
                    if isinstance(message, kind) and all(getattr(message, name) == facts[name] for name in facts):
                        return message
                await self._changed.wait()

    async def is_down(self) -> str:
        """Why the last link ended."""
        with trio.fail_after(PATIENCE_S):
            while not self.downs:
                await self._changed.wait()
        return self.downs[-1]

    def _note(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def on_up(self, link: Link) -> None:
        self.downs.clear()

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        if isinstance(message, Ping):
            link.send(Pong(number=message.number))
        else:
            self.heard.append(message)
        if isinstance(message, Welcome):
            self.credential = message.membership
        if isinstance(message, Bye):
            link.close("bye")
        self._note()

    def on_down(self, link: Link, reason: str) -> None:
        self.downs.append(reason)
        self._note()

    def on_rejected(self, address: str, reason: str, detail: str, count: int = 1) -> None:
        raise AssertionError(f"the coordinator broke the protocol: {reason}: {detail}")

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        pass


@asynccontextmanager
async def nodes(coordinator: Coordinator, *roles: str) -> AsyncIterator[list[FakeNode]]:
    """Fake nodes with the coordinator's links, one for each role."""
    async with trio.open_nursery() as nursery:
        yield [FakeNode(nursery, coordinator.link(role), 10 + number) for number, role in enumerate(roles)]
        nursery.cancel_scope.cancel()
