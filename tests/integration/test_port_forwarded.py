"""A home's router forwards a port when the owner allows it: the server behind it is dialled, with nobody in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.nat_world import World
from tests.integration.natbed import Bed, eventually, log_of, why_not


@pytest.fixture
def bed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bed:
    """The bed, with a real router's program for it."""
    reason = why_not("miniupnpd")
    if reason:
        with capsys.disabled():
            print(f"\n\n!!! PORTS FORWARDED BY A ROUTER WERE NOT TESTED: {reason}\n")
        pytest.skip(reason)
    return Bed(tmp_path)


def forwarded(bed: Bed, gateway: str) -> list[str]:
    """The gateway's rules that forward."""
    rules = bed.script("exec", gateway, "nft", "list", "table", "inet", "miniupnpd")
    return [line.strip() for line in rules.splitlines() if "dnat" in line and "priority" not in line]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_at_home_is_dialled_from_behind_a_firewall(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    """The firewall passes no UDP, so that without the router's help only a relay leads there (test_natbed.py). When
    the server has ended nothing is forwarded any more."""
    with bed:
        bed.script("port-mapping", "gw-den")
        world = World(bed, options={"den": ("--map-port",)})
        den = world.servers["den"]
        (told,) = [line for line in log_of(den.child) if line["event"] == "port is forwarded"]
        assert told["address"].startswith("203.0.112.36:") and told["by"] == "NAT-PMP"
        (rule,) = forwarded(bed, "gw-den")
        assert f"10.36.0.2:{told['port']}" in rule
        world.join("tcp")
        (linked,) = world.linked(world.volunteers["tcp"], den)
        with capsys.disabled():
            print(f"\ntcp -> den at {told['address']}: {linked['path']}, {linked['way']}, {linked['seconds']} s")
        assert (linked["path"], linked["way"]) == ("tcp", "direct")
        bed.end()
        assert forwarded(bed, "gw-den") == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_volunteer_at_home_is_dialled_by_a_server_at_another_home(
    bed: Bed, capsys: pytest.CaptureFixture[str]
) -> None:
    """It listens, since its owner allows that; its router speaks UPnP only, and neither of the two punches."""
    with bed:
        bed.script("port-mapping", "gw-home", "upnp")
        world = World(bed, options={"den": ("--no-punch",), "home": ("--no-punch", "--map-port")})
        world.join("home")
        home, den = world.volunteers["home"], world.servers["den"]
        assert [line["by"] for line in log_of(home.child) if line["event"] == "port is forwarded"] == ["UPnP"]

        def dialled() -> list[dict[str, Any]]:
            return [line for line in world.linked(home, den) if (line["path"], line["way"]) == ("tcp", "reverse")]

        linked = eventually(dialled, "a link that the server at home dialled")[0]
        before = [line["way"] for line in world.linked(home, den) if line["way"] != "reverse"]
        with capsys.disabled():
            # Links are looked for while the router is still being asked: the relay's is left at once.
            print(f"\nhome -> den: {linked['path']}, {linked['way']}, {linked['seconds']} s; before: {before}")
        assert len(forwarded(bed, "gw-home")) == 1
        bed.end(home.child)
        assert forwarded(bed, "gw-home") == []
