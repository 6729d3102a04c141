"""A run of real processes whose members live behind gateways of every kind; what the test looks at and breaks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.audit import Audit, audit
from node.demo.processes import Child
from protocol.drive.keyfile import load_or_create_identity
from tests.integration.natbed import Bed, eventually, log_of

RUN = """
name = "homes"
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
microbatches = 20
[stages]
count = 1
front_servers = 2
collocated = "never"
[checkpoint]
every_steps = 0
"""
"""One stage of three servers, which never compute themselves: every step is the volunteers' work."""
SERVERS = ("pub", "out", "den")
"""Two in public, one behind a home router."""
SPARE = "spare"
"""A server in public for which there is no place: it waits, and relays."""
VOLUNTEERS = ("full", "home", "sym", "cgn", "six", "tcp")
FRESH_S = 0.3
"""A report this old counts as of now."""
UNDER_WAY = 10
"""Contributions that a volunteer may have sent, or the ledgers accepted, since its last report: it makes two to five a
second here."""
PACE_S = 3.0
"""How long a volunteer is watched for the pace at which it contributes undisturbed: six to fifteen contributions."""
HTTP_PORT = 8470
COORDINATOR = "srv"


@dataclass
class Member:
    """One process: where it lives and who it is."""

    place: str
    child: Child
    node: str = ""


@dataclass(frozen=True)
class Pair:
    """A link as its log and the status tell."""

    source: str
    target: str
    first_path: str
    first_s: float
    """Until there was a link by any way."""
    path: str
    """Now."""
    up_mbit: float
    down_mbit: float
    round_trip_s: float | None


class World:
    """Coordinator, servers and volunteers in a bed, each started by one command without options.

    `coordinator_options`, `server_options`, `options` (by place): but with these, where a test is about them.
    """

    def __init__(
        self,
        bed: Bed,
        coordinator_options: tuple[str, ...] = (),
        server_options: tuple[str, ...] = (),
        options: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.bed = bed
        self._server_options = server_options
        self._options = options or {}
        toml = bed.folder / "RUN.toml"
        toml.write_text(RUN)
        child = bed.start("coordinator", COORDINATOR, "coordinator", str(toml), *coordinator_options)
        links = bed.folder / "coordinator" / "barnraise" / "coordinator" / "homes" / "links.json"
        self.coordinator = Member(COORDINATOR, child)
        self.links: dict[str, Any] = eventually(lambda: self._read(links), "the coordinator's links")
        self.servers = {place: self._start("server", place) for place in SERVERS}
        for member in self.servers.values():
            self._identify(member, "server")
        self.volunteers: dict[str, Member] = {}
        eventually(lambda: "volunteers" in self.status()["run"]["waiting_for"], "the servers to be ready")
        self.spare = self._start("server", SPARE)
        self._identify(self.spare, "server")
        eventually(lambda: self.spare.node in self.members(), "the spare to join")

    def _read(self, path: Path) -> dict[str, Any] | None:
        assert self.coordinator.child.running, self.coordinator.child.log_tail()
        try:
            links: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return links

    def _start(self, command: str, place: str) -> Member:
        role, options = (
            ("server", self._server_options) if command == "server" else ("volunteer", ("--yes", "--always"))
        )
        more = (*options, *self._options.get(place, ()))
        return Member(place, self.bed.start(f"{command}-{place}", place, command, self.links[role], *more))

    def _identify(self, member: Member, role: str) -> None:
        file = member.child.folder / "barnraise" / self.links["run_id"] / role / "identity"
        eventually(lambda: file.exists() or not member.child.running, f"the identity of {member.place}")
        assert member.child.running, member.child.log_tail()
        member.node = load_or_create_identity(file).node

    def join(self, place: str) -> None:
        """One volunteer, until it has contributed."""
        member = self.volunteers[place] = self._start("join", place)
        self._identify(member, "volunteer")
        eventually(lambda: self.accepted(place) > 0 or not member.child.running, f"a contribution of {place}")
        assert member.child.running, member.child.log_tail()

    def restart(self, member: Member) -> None:
        """A process that was killed starts again on what it has."""
        member.child = self.bed.again(member.child)

    # ---- looking -------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.bed.fetch(COORDINATOR, HTTP_PORT, "/api/status"))
        return status

    def members(self) -> dict[str, dict[str, Any]]:
        """What the coordinator says of each linked node, by its id."""
        return {member["id"]: member for member in self.status()["members"]}

    def accepted(self, place: str) -> float:
        """Contributions of a volunteer that the ledgers took, as it last reported; 0 while it has no link."""
        member = self.members().get(self.volunteers[place].node)
        return 0.0 if member is None else member["counters"].get("accepted", 0.0)

    @property
    def everybody(self) -> list[Member]:
        return [*self.servers.values(), self.spare, *self.volunteers.values()]

    def place_of(self, node: str) -> str:
        return next((member.place for member in self.everybody if member.node == node), node[:8])

    def linked(self, member: Member, peer: Member, after: int = 0) -> list[dict[str, Any]]:
        """The log's lines about links that came up to a peer, from a line number on."""
        lines = log_of(member.child)[after:]
        return [line for line in lines if line.get("event") == "linked" and line.get("peer") == peer.node]

    def relays(self, place: str, target: str, relay: Member) -> bool:
        """Whether a volunteer's link to a server goes through this relay at present."""
        came = self.linked(self.volunteers[place], self.servers[target])
        return bool(came) and came[-1]["way"] == f"relay {relay.node[:8]}"

    def pairs(self) -> list[Pair]:
        """Every link between a volunteer and a server, and between two servers."""
        shown = self.members()
        found = []
        for member in self.everybody:
            for peer in self.servers.values():
                came = self.linked(member, peer)
                if not came:
                    continue  # the other end opened it
                link = _told(shown, member, peer)
                back = _told(shown, peer, member)
                up = link.get("sent_bytes_per_s") or back.get("received_bytes_per_s", 0.0)
                down = link.get("received_bytes_per_s") or back.get("sent_bytes_per_s", 0.0)
                trip = link.get("round_trip_s") or back.get("round_trip_s")
                found.append(
                    Pair(
                        member.place,
                        peer.place,
                        came[0]["path"],
                        came[0]["seconds"],
                        link.get("path", "-"),
                        8e-6 * up,
                        8e-6 * down,
                        trip,
                    )
                )
        return found

    def missing(self) -> list[tuple[str, str]]:
        """Pairs that have no link, or of which nothing is measured yet."""
        known = {(pair.source, pair.target) for pair in self.pairs() if pair.up_mbit and pair.down_mbit}
        known |= {(target, source) for source, target in known}
        wanted = [(place, server) for place in (*VOLUNTEERS, *SERVERS) for server in SERVERS if place != server]
        return [pair for pair in wanted if pair not in known]

    # ---- breaking ------------------------------------------------------------------------------------------------

    def resumes(self, place: str, act: Callable[[], None], patience_s: float = 60.0) -> float:
        """Does something to a volunteer's network; seconds until it contributes again.

        UNDER_WAY more must be accepted than it had reported just before, since some may have been sent already. Making
        so many takes a while that says nothing of links and much of the computer: at its pace of just before, that is
        taken off.
        """
        node = self.volunteers[place].node
        first, watched = eventually(lambda: self._fresh(node), f"a fresh report of {place}"), time.monotonic()
        eventually(lambda: time.monotonic() - watched > PACE_S and self._fresh(node) > first, f"the pace of {place}")
        before = eventually(lambda: self._fresh(node), f"a fresh report of {place}")
        computing_s: float = UNDER_WAY * (time.monotonic() - watched) / (before - first)
        act()
        began = time.monotonic()
        while time.monotonic() < began + patience_s:
            member = self.members().get(node)
            if member is not None and member["report_age_s"] is not None:
                elapsed_s: float = time.monotonic() - began - member["report_age_s"]
                if elapsed_s > 0 and member["counters"].get("accepted", 0.0) >= before + UNDER_WAY:
                    return max(elapsed_s - computing_s, 0.0)
            time.sleep(0.1)
        waits = [
            f"{self.place_of(each['id'])}: {each['waiting_for']}"
            for each in self.members().values()
            if each["waiting_for"]
        ]
        raise AssertionError(f"{place} contributes no more; {waits}\n{self.volunteers[place].child.log_tail()}")

    def _fresh(self, node: str) -> float:
        """Accepted contributions as reported this very moment; 0 when the report is older."""
        member = self.members().get(node)
        if member is None or (member["report_age_s"] or 0.0) > FRESH_S:
            return 0.0
        accepted: float = member["counters"].get("accepted", 0.0)
        return accepted

    def audit(self) -> Audit:
        """Counts samples from the journals of the servers, which must have ended."""
        folders = [
            member.child.folder / "barnraise" / self.links["run_id"] / "server" for member in self.servers.values()
        ]
        return audit(folders)


def _told(shown: dict[str, dict[str, Any]], member: Member, peer: Member) -> dict[str, Any]:
    """What a member says of its link to a peer."""
    links = shown.get(member.node, {}).get("links", ())
    return next((link for link in links if link["peer"] == peer.node), {})


def table(pairs: list[Pair]) -> str:
    """The pairs as people read them."""
    lines = [f"{'from':6} {'to':5} {'first':8} {'seconds':>7}  {'now':8} {'trip ms':>7} {'Mbit/s':>8} {'back':>8}"]
    for pair in pairs:
        trip = "-" if pair.round_trip_s is None else f"{1000 * pair.round_trip_s:.1f}"
        lines.append(
            f"{pair.source:6} {pair.target:5} {pair.first_path:8} {pair.first_s:7.2f}  {pair.path:8} {trip:>7} "
            f"{pair.up_mbit:8.1f} {pair.down_mbit:8.1f}"
        )
    return "\n".join(lines)
