"""A run whose members live at home: behind routers of every kind, a carrier's NAT, and a firewall without UDP."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median

import pytest

from tests.integration.nat_world import VOLUNTEERS, World, table
from tests.integration.natbed import Bed, eventually, log_of, why_not

CONNECT_S = 5.0
CONNECT_MEDIAN_S = 2.0
RESUME_S = 10.0
"""What the run promises its volunteers; a machine that is busy with other things needs patience, not other promises."""


@pytest.fixture
def bed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bed:
    """The bed; without it nothing of this file is known to work here, and that is said aloud."""
    reason = why_not()
    if reason:
        with capsys.disabled():
            print(f"\n\n!!! LINKS THROUGH NATS WERE NOT TESTED: {reason}\n")
        pytest.skip(reason)
    return Bed(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_homes_of_every_kind_train_together(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    """All join by one command without options and contribute to sealed steps. A gateway restarts, an address changes,
    UDP is blocked: contribution goes on within 10 s. A relay is killed: its link goes another way within 10 s, and
    contribution goes on when the relay, which holds a shard, is back. No sample is lost or counted twice."""

    def tell(text: str) -> None:
        with capsys.disabled():
            print(text)

    with bed:
        world = World(bed)
        for place in VOLUNTEERS:
            world.join(place)
        eventually(lambda: not world.missing(), lambda: f"links, measured: {world.missing()}")
        pairs = world.pairs()
        tell("\n" + table(pairs))
        seconds = [pair.first_s for pair in pairs]
        tell(f"slowest {max(seconds):.2f} s, median {median(seconds):.2f} s")
        assert {pair.path for pair in pairs if pair.target == "den" and pair.source == "tcp"} == {"relay"}
        assert max(seconds) < CONNECT_S and median(seconds) < CONNECT_MEDIAN_S

        def resumes(what: str, place: str, *order: str) -> None:
            took_s = world.resumes(place, lambda: void(bed.script(*order)))
            tell(f"{what:34} {place} contributes again after {took_s:4.1f} s")
            assert took_s < RESUME_S, what

        resumes("its gateway restarts", "home", "restart", "gw-home")
        resumes("its address changes", "full", "readdress", "full")
        resumes("UDP is blocked", "cgn", "block-udp", "gw-cgn")
        kill_the_relay(world, tell)
        step = world.status()["run"]["step"]
        eventually(lambda: world.status()["run"]["step"] > step + 2, "further steps")
        bed.end()
        found = world.audit()
        tell(f"{found.steps} steps, {found.samples_lost} samples lost, {found.samples_doubled} doubled")
        assert found.steps > step and found.clean, found.findings


def void(_: str) -> None:
    """Takes what a script printed."""


def kill_the_relay(world: World, tell: object) -> None:
    """The server that carries the link between the firewall's volunteer and the server at home is killed, and started
    again by whoever keeps it up. The link takes another relay; the volunteer goes on when the server is back."""
    assert callable(tell)
    volunteer, den = world.volunteers["tcp"], world.servers["den"]
    newest = world.linked(volunteer, den)[-1]
    relay = next(each for each in world.servers.values() if newest["way"] == f"relay {each.node[:8]}")
    lines = len(log_of(volunteer.child))

    def kill() -> None:
        world.bed.kill(relay.child)
        world.restart(relay.place)

    def another() -> list[str]:
        return [line["way"] for line in world.linked(volunteer, den, lines) if relay.node[:8] not in line["way"]]

    linked_s = 0.0

    def watch() -> None:
        nonlocal linked_s
        kill()
        began = time.monotonic()
        eventually(another, "a link by another relay")
        linked_s = time.monotonic() - began

    took_s = world.resumes("tcp", watch)
    tell(
        f"{'the relay is killed':34} tcp is linked by {another()[0]} after {linked_s:4.1f} s, and contributes again "
        f"{took_s:4.1f} s later"
    )
    assert linked_s < RESUME_S


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_netcheck_tells_each_home_what_it_has(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    """The kind of NAT, whether UDP works, each server with its path and figures, and one sentence; nobody joins."""
    kinds = {"pub": "open", "full": "full_cone", "home": "home_router", "sym": "symmetric", "cgn": "home_router"}
    with bed:
        world = World(bed)
        for place, kind in {**kinds, "tcp": "no_udp"}.items():
            code, output = bed.run(f"check-{place}", place, "netcheck", world.links["volunteer"], "--json")
            found = json.loads(output)
            assert code == 0
            assert found["nat"]["kind"] == kind and found["udp"] == (kind != "no_udp"), place
            assert all(server["path"] for server in found["servers"]), (place, output)
            assert any(server["up_bytes_per_s"] and server["round_trip_s"] for server in found["servers"]), place
            with capsys.disabled():
                paths = [server["path"] for server in found["servers"]]
                print(f"{place:5} {found['nat']['kind']:12} {paths} {found['advice']}")
        assert world.status()["run"]["step"] == -1
