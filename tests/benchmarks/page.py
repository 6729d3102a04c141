"""The live page beside a big run: `python -m tests.benchmarks.page [--members 1000] [--steps 100000] [--pictures DIR]`.

One coordinator process, whose record is filled with made-up steps while it is down, and members that keep real links
to it: real handshakes, memberships that its own key has signed, a greeting, and answers to its pings. Chromium looks at
the page for half a minute at 1280 px, then at 360 and 2560 px, light and dark. Printed, and judged with exit code 1:

* the longest time between two frames, as the page's own `requestAnimationFrame` saw it (100 ms, or twice what the same
  page took before it had steps and members: what the machine does to everybody);
* what the coordinator's resident memory has grown by, against the same process before the steps and the members
  (50 MB), and what one viewer takes a second.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import trio

from coordinator.live.records import MemberRow, StepRow
from coordinator.process.store import Store
from protocol.drive.keyfile import load_or_create_identity
from protocol.link.framing import Framing, MessageArrived
from protocol.messages import Ping, Pong
from protocol.run.config_file import load_run
from protocol.trust.handshake import ENTROPY_BYTES, NO_COOKIE, CookieDemanded, Initiator
from protocol.trust.identity import Identity
from protocol.trust.membership import JoinLink, Membership, sign_statement
from protocol.trust.records import STREAM_HEADER_BYTES
from tests.integration.attacker import join_message
from tests.integration.browser import Browser, browser
from tests.integration.swarm import RUN, Swarm, eventually

FRAME_S_MAX = 0.1
GROWN_BYTES_MAX = 50e6
LOOK_S = 30.0
WIDTHS = (360, 1280, 2560)
WRITE_ROWS = 5000
DIALS_AT_ONCE = 8
"""Fewer than the half-open handshakes above which a cookie costs another round."""
_WATCH = """
window.longest = 0; window.frames_seen = 0; window.before = performance.now();
window.watch = (now) => { longest = Math.max(longest, now - before); before = now; frames_seen += 1;
  requestAnimationFrame(watch); };
requestAnimationFrame((now) => { before = now; requestAnimationFrame(watch); }); 1
"""


def identity(number: int) -> Identity:
    """The same key for the same number, so that papers can be written before anybody dials."""
    return Identity(hashlib.sha256(b"a member of the page's benchmark %d" % number).digest())


def fill(folder: Path, run: Path, steps: int, members: int) -> None:
    """Steps that closed, and members that were let in, as the coordinator itself would have written them."""
    store = Store(folder, load_run(run))
    try:
        generation, now_s = store.generation, time.time()
        for first in range(0, steps, WRITE_ROWS):
            store.write(
                [
                    StepRow(
                        ledger_generation=generation,
                        step=step,
                        loss=2 + 4 * math.exp(-step / (steps / 6)) + 0.1 * math.sin(step * 1.7),
                        tokens=32,
                        gradient_norm=1.0,
                        clip_factor=1.0,
                        skipped=False,
                        learning_rate=1e-3,
                        duration_s=0.5,
                        wall_s=now_s - 0.5 * (steps - step),
                    )
                    for step in range(first, min(first + WRITE_ROWS, steps))
                ]
            )
        keys = [identity(number) for number in range(members)]
        store.write(
            [
                MemberRow(node=key.node, public_key=key.public_key, role="volunteer", serial=1000 + number)
                for number, key in enumerate(keys)
            ]
        )
    finally:
        store.close()


class Members:
    """Volunteers that are linked and nothing else, in a thread with a loop of its own."""

    def __init__(self, link: JoinLink, issuer: Identity, count: int) -> None:
        self._link, self._issuer, self._count = link, issuer, count
        self._stop: trio.CancelScope | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self.linked = 0
        self.lost: list[str] = []
        self._thread = threading.Thread(target=trio.run, args=(self._run,))
        self._thread.start()

    def close(self) -> None:
        if self._token is not None and self._stop is not None:
            self._token.run_sync_soon(self._stop.cancel)
        self._thread.join()

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        gate = trio.CapacityLimiter(DIALS_AT_ONCE)
        async with trio.open_nursery() as nursery:
            self._stop = nursery.cancel_scope
            for number in range(self._count):
                nursery.start_soon(self._member, number, gate)

    async def _member(self, number: int, gate: trio.CapacityLimiter) -> None:
        try:
            async with gate:
                stream, framing = await self._dial(number)
            self.linked += 1
            while True:
                for piece in framing.data_to_send(1 << 16):
                    await stream.send_all(piece)
                data = await stream.receive_some(1 << 16)
                if not data:
                    break
                for event in framing.receive(data):
                    if isinstance(event, MessageArrived) and isinstance(event.message, Ping):
                        framing.send(Pong(number=event.message.number))
        except (OSError, trio.BrokenResourceError) as error:
            self.lost.append(repr(error))
        else:
            self.lost.append("hung up on")

    async def _dial(self, number: int) -> tuple[trio.SocketStream, Framing]:
        key = identity(number)
        papers = Membership(key.node, "volunteer", self._link.run_id, 1, 1000 + number, int(time.time()) + 3600)
        host, _, port = self._link.addresses[0].rpartition(":")
        cookie = NO_COOKIE
        while True:
            stream = await trio.open_tcp_stream(host, int(port))
            handshake = Initiator(
                identity=key,
                credential=sign_statement(papers, self._issuer),
                run_id=self._link.run_id,
                peer=self._link.coordinator,
                entropy=os.urandom(ENTROPY_BYTES),
                admit=lambda key, credential: "coordinator",
                cookie=cookie,
            )
            await stream.send_all(handshake.data_to_send())
            session = None
            while session is None:
                data = await stream.receive_some(4096)
                if not data:
                    raise OSError("hung up on in the handshake")
                session = handshake.receive(bytes(data))
            if not isinstance(session, CookieDemanded):
                break
            cookie = session.cookie
            await stream.aclose()
        await stream.send_all(handshake.data_to_send())
        framing = Framing(session, role="volunteer", header=os.urandom(STREAM_HEADER_BYTES))
        framing.send(join_message("volunteer", name=f"member {number}", tokens_per_s=1000.0))
        return stream, framing


def longest_frame_s(page: Browser, seconds: float) -> tuple[float, float]:
    """The longest time between two frames meanwhile, and how many came in a second."""
    page.ask(_WATCH)
    time.sleep(seconds)
    longest_ms, count = page.ask("[longest, frames_seen]")
    return longest_ms / 1e3, count / seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say with the exit code whether both bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pictures", type=Path, help="a folder for screenshots of every width, light and dark")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="barnraise-page-") as name:
        folder = Path(name)
        with Swarm(folder, RUN, server_count=0) as swarm, browser(folder) as page:
            before = _resident_bytes(swarm, page)
            empty_s, _ = longest_frame_s(page, 5.0)
            page.open("about:blank")
            swarm.stop(swarm.coordinator)
            fill(swarm.state, folder / "RUN.toml", options.steps, options.members)
            (swarm.state / "links.json").unlink()
            swarm.again(swarm.coordinator)
            swarm.links = eventually(lambda: swarm._read_links(swarm.coordinator.child), "the coordinator's links")
            eventually(lambda: swarm.step() == options.steps - 1, "the steps")
            issuer = load_or_create_identity(swarm.state / "identity")
            members = Members(swarm.link("volunteer"), issuer, options.members)
            try:
                return judge(swarm, page, members, options, before, empty_s)
            finally:
                members.close()


def judge(
    swarm: Swarm, page: Browser, members: Members, options: argparse.Namespace, before: int, empty_s: float
) -> int:
    """Looks, when all are linked."""
    began = time.monotonic()
    while members.linked < options.members and time.monotonic() < began + 300:
        time.sleep(0.5)
    print(f"{members.linked} of {options.members} members linked after {time.monotonic() - began:.0f} s")
    process = psutil.Process(swarm.coordinator.child.pid)
    unseen = swarm.coordinator.resident_bytes() - before
    page.open(swarm.links["http"] + "/")
    page.until(f"document.querySelector('#rows tr') && members.length >= {options.members}")
    page.until("document.querySelectorAll('.chart canvas').length >= 2 && pieces.length > 100")
    busy_s = sum(process.cpu_times()[:2])
    longest_s, rate = longest_frame_s(page, LOOK_S)
    busy_s = sum(process.cpu_times()[:2]) - busy_s
    grown = _resident_bytes(swarm, page) - before
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        for dark in (False, True):
            page.look(width, 900, dark=dark)
            page.until(f"document.documentElement.scrollWidth <= {width}")
            if options.pictures:
                page.picture(options.pictures / f"{width}-{'dark' if dark else 'light'}.png")
    print(f"longest time between frames {longest_s * 1e3:.0f} ms in {LOOK_S:.0f} s at {rate:.0f} frames a second;")
    print(f"  the same page without steps and members: {empty_s * 1e3:.0f} ms")
    print(f"the coordinator's memory has grown by {grown / 1e6:.1f} MB, {(grown - unseen) / 1e6:.1f} of it by being")
    print(f"  looked at, the rest by links, members and steps; it is busy {busy_s / LOOK_S:.1%} of the time")
    print(f"members lost meanwhile: {len(members.lost)} {members.lost[:2]}; complaints: {page.complaints[:3]}")
    failures: list[Any] = [*members.lost, *page.complaints]
    failures += ["frames"] if longest_s > max(FRAME_S_MAX, 2 * empty_s) else []
    failures += ["memory"] if grown > GROWN_BYTES_MAX else []
    return 1 if failures or members.linked < options.members else 0


def _resident_bytes(swarm: Swarm, page: Browser) -> int:
    """With a viewer, so that the page's own parts are in it both times."""
    page.open(swarm.links["http"] + "/")
    page.until("document.querySelectorAll('#events li').length")
    time.sleep(2.0)
    return swarm.coordinator.resident_bytes()


if __name__ == "__main__":
    sys.exit(main())
