"""Bad peers against real daemons that train: each is refused by name, counted and closed, and nobody else notices.

One run of real processes for the whole file; every case is an attacker with real papers and real keys where it needs
them (`attacker.py`). The reasons are those of `protocol.base.limits.REJECT_REASONS`.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
import trio

from protocol.base.ids import NodeId
from protocol.base.limits import HALF_OPEN_MAX
from protocol.drive.keyfile import load_or_create_identity
from protocol.link.framing import Frame
from protocol.messages import FetchParameters, Ping, Pong
from protocol.trust.handshake import VERSION
from tests.integration.attacker import RawLink, attack, join
from tests.integration.bad_deeds import CASES, GOOD, PLAIN_FORMS, Case, Target, output, signed
from tests.integration.swarm import REJECTED, RUN, Daemon, Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("bad_peers")]

ATTACKS_A_STEP = 8
"""A step each would be most of the time of the hundred attacks."""


class Fixture:
    """The run, two members that it knows, and where its daemons are."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.volunteer = attack(join, swarm.link("volunteer"), 101)
        self.spare = attack(join, swarm.link("server"), 102)
        plan = self.volunteer.plan
        assert plan is not None
        coordinator = swarm.link("server")
        self.places: dict[str, tuple[str, NodeId, Daemon]] = {
            "coordinator": (coordinator.addresses[0], coordinator.coordinator, swarm.coordinator)
        }
        for index, stage in enumerate(plan.stages):
            for server in stage.servers:
                daemon = swarm.at(int(server.addresses[0].rpartition(":")[2]))
                self.places[f"{server.role} {index}"] = (server.addresses[0], server.node, daemon)
        self.issuer = load_or_create_identity(swarm.state / "identity")
        self.rejected = {daemon.name: daemon.rejected() for daemon in swarm.daemons}
        """What each daemon had refused before the present test."""
        self._unproven: list[str] = []

    def moves_on(self, after: str) -> None:
        """A step closes after every eighth attack, and after the last by the tests below: a step each would be most
        of the time of the hundred attacks."""
        self._unproven.append(after)
        if len(self._unproven) >= ATTACKS_A_STEP:
            try:
                self.swarm.moves_on()
            except AssertionError as error:
                raise AssertionError(f"training stopped after one of {self._unproven}: {error}") from error
            self._unproven.clear()

    def target(self, place: str) -> Target:
        address, node, daemon = self.places[place]
        known = Target(daemon, address, node, self.volunteer, self.spare, self.issuer, self.swarm.step())
        # Another member each time: whoever was hung up on would wait before it could try the next.
        return replace(known, volunteer=signed(known, self.issuer))


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fixture]:
    with Swarm(tmp_path_factory.mktemp("attacked"), RUN + PLAIN_FORMS) as swarm:
        eventually(lambda: swarm.step() >= 0, "the first step")
        yield Fixture(swarm)


@pytest.mark.parametrize(
    ("case", "place"),
    [pytest.param(case, place, id=f"{case.name} at {place}") for case in CASES for place in case.places],
)
def test_it_is_refused_by_name_counted_and_closed(attacked: Fixture, case: Case, place: str) -> None:
    """The attacker's connection ends, log and counter of the attacked daemon say why, no other daemon is touched, and
    training goes on."""
    target = attacked.target(place)
    swarm = attacked.swarm
    before = attacked.rejected
    log_length = target.daemon.log_length()

    async def until_closed() -> None:
        await (await case.strike(target)).is_closed()

    attack(until_closed)

    def refused() -> bool:
        return target.daemon.rejected()[case.reason] > before[target.daemon.name][case.reason]

    eventually(refused, f"{REJECTED} of {case.reason!r}; the log: {target.daemon.log(log_length)}")
    named = [line for line in target.daemon.log(log_length) if line.get("reason") == case.reason]
    assert named and named[0]["level"] == "warning" and named[0]["detail"], target.daemon.log(log_length)
    assert target.volunteer.credential.hex() not in str(named)
    attacked.moves_on(f"{case.name} at {place}")
    attacked.rejected = {daemon.name: daemon.rejected() for daemon in swarm.daemons}
    for daemon in swarm.daemons:
        if daemon is not target.daemon:
            assert attacked.rejected[daemon.name] == before[daemon.name], f"{daemon.name} was touched"


def test_peers_that_keep_us_waiting_are_cut_off(attacked: Fixture) -> None:
    """Half a handshake, half a record, a tensor that never comes, questions without end: each is cut off, the log
    says why, and training goes on meanwhile."""
    swarm, target = attacked.swarm, attacked.target("back 0")
    log_length = target.daemon.log_length()

    async def half_a_handshake() -> None:
        link = await RawLink.connect(target.address)
        await link.raw((65).to_bytes(4, "big") + bytes((VERSION,)))
        await link.is_closed()

    async def half_a_record() -> None:
        link = await target.open(signed(target, target.issuer))
        await link.raw(link.writer.seal(Frame.MESSAGE, bytes(100))[:50])
        await link.is_closed()

    async def half_a_tensor() -> None:
        link = await target.open(signed(target, target.issuer))
        message = output(GOOD)(target, target.step)
        await link.frame(Frame.BULK, bytes(4) + msgspec.msgpack.encode(message))
        await link.is_closed()

    async def no_end() -> None:
        """Asks for parameters over and over, and reads none of them."""
        link = await target.open()
        version = await trio.to_thread.run_sync(swarm.step)
        with contextlib.suppress(trio.BrokenResourceError):  # cut off in the middle of a question
            for _ in range(200):
                await link.say(FetchParameters(ledger_generation=target.volunteer.generation, version=version))
        await link.is_closed()

    async def all_at_once() -> None:
        async with trio.open_nursery() as nursery:
            for one in (half_a_handshake, half_a_record, half_a_tensor, no_end):
                nursery.start_soon(one)
            await trio.to_thread.run_sync(swarm.moves_on)

    attack(all_at_once)
    said = [(line.get("reason"), line.get("detail", "")) for line in target.daemon.log(log_length)]
    late = [detail for reason, detail in said if reason == "timeout"]
    # Whoever has not said a word about work is a visitor: no machine waits for it, so the transport cuts it off.
    assert sum("handshake" in detail for detail in late) == 1, said
    assert sum("in a frame" in detail for detail in late) == 2, said
    assert len(late) == 3, said
    assert any("over and over" in detail for reason, detail in said if reason == "busy"), said
    swarm.moves_on()


def test_a_flood_of_half_open_calls_keeps_nobody_out(attacked: Fixture) -> None:
    """Three times as many silent callers as there are places: the oldest give way, and an honest call gets through."""
    swarm, target = attacked.swarm, attacked.target("front 0")
    before, memory_bytes = target.daemon.rejected(), target.daemon.resident_bytes()

    async def flood() -> None:
        callers = [await RawLink.connect(target.address) for _ in range(3 * HALF_OPEN_MAX)]
        honest = await target.open()
        await honest.say(Ping(number=7))
        assert (await honest.hear(Pong))[Pong] == Pong(number=7)
        for caller in callers:
            await caller.is_closed()

    attack(flood)
    refused = {reason: count - before[reason] for reason, count in target.daemon.rejected().items()}
    assert refused["busy"] >= 2 * HALF_OPEN_MAX
    assert refused["busy"] + refused["timeout"] == 3 * HALF_OPEN_MAX
    assert target.daemon.resident_bytes() - memory_bytes < 64 << 20
    swarm.moves_on()


def test_nothing_was_logged_as_an_error(attacked: Fixture) -> None:
    """After all that no daemon has met an error of its own, refused an honest one, or printed a traceback."""
    attacked.swarm.moves_on()
    honest = {node for _, node, _ in attacked.places.values()}
    for daemon in attacked.swarm.daemons:
        assert "Traceback" not in daemon.child.log_path.read_text()
        assert [line for line in daemon.log() if line["level"] in ("error", "critical")] == []
        assert [line for line in daemon.log() if line["level"] == "warning" and line.get("peer") in honest] == []


def test_a_volunteer_joins_after_all_that_and_promtool_likes_every_daemon(attacked: Fixture) -> None:
    """An honest volunteer gets work; `promtool check metrics` has no complaint about any of the six processes."""
    swarm = attacked.swarm
    volunteer = swarm.node("volunteer", "join", swarm.links["volunteer"], "--yes", "--always", "--no-benchmark")
    eventually(lambda: any(line["event"] == "plan" for line in volunteer.log()), "the volunteer's plan")

    def accepted() -> bool:
        found = re.search(
            r'^barnraise_node_work_results_total{outcome="accepted".*} (\S+)$', volunteer.metrics(), re.MULTILINE
        )
        return found is not None and float(found[1]) > 0

    eventually(accepted, "the volunteer's first accepted work")
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("PROMTOOL IS MISSING, so no /metrics was checked: apt-get install prometheus")
    for daemon in (*swarm.daemons, volunteer):
        done = subprocess.run(
            [promtool, "check", "metrics"], input=daemon.metrics(), capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), daemon.name
