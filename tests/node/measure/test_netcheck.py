"""What netcheck prints: one line a server, each by its own name, and what is not known said plainly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from node.measure import netcheck
from node.measure.meter import Figures
from node.measure.nat import Nat, Seen
from node.measure.netcheck import Check, check, describe, to_json
from node.process.journal import JOURNAL_FILE, Journal
from node.process.state import NodeState
from node.visit.survey import Reached
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.trust.membership import Invite, JoinLink, sign_statement
from tests.protocol.samples import BOB, RUN_ID

INVITE = Invite(issuer=BOB.public_key, run_id=RUN_ID, role="volunteer", uses=1, not_after=2**40, nonce=bytes(16))
NAT = Nat("home_router", mapped="203.0.113.9:40000")


def figures(round_trip_s: float, *, up: float, down: float) -> Figures:
    """Of a measurement; rates in bytes per second."""
    return Figures(round_trip_s, down, up, byte_count=1_000_000, complete=True)


SERVERS = (
    Reached(NodeId("a" * 52), 0, "front", "tcp", "a:1", 0.01, figures(0.02, up=1e6, down=2e6), 0.01),
    Reached(NodeId("b" * 52), 0, "front", "relay", "relay c", 1.2, figures(0.05, up=5e5, down=0.0), None),
    Reached(NodeId("d" * 52), 1, "back", problem="nobody answered"),
)
FOUND = Check("homes", 0.004, NAT, (Seen("s:1", ("203.0.113.9", 40000)),), False, SERVERS, planned=5, finished=False)


def test_servers_of_one_kind_are_told_apart_by_the_name_that_logs_use() -> None:
    """Two front servers of a stage are two lines with two names, in columns that people can follow."""
    rows = [line for line in describe(FOUND).splitlines() if line.startswith(("server", "stage"))]
    assert [row[:22] for row in rows[1:]] == [
        "stage 0 front aaaaaaaa",
        "stage 0 front bbbbbbbb",
        "stage 1 back dddddddd ",
    ]
    ends = [rows[0].index("Mbit/s up") + len("Mbit/s up"), rows[1].index(" 8.0") + 4, rows[2].index(" 4.0") + 4]
    assert len(set(ends)) == 1
    assert rows[2].split()[-3:] == ["-", "4.0", "-"]  # loss, up, down
    assert rows[3].endswith("not reached: nobody answered")
    assert all(len(row) <= 80 for row in rows), "a terminal of 80 columns would break them in the middle of a figure"


def test_within_one_computer_no_line_loses_anything() -> None:
    """A server of the same computer was said to be behind a line that loses 2 %: the machine was busy."""
    near = replace(SERVERS[0], path="quic", address="127.0.0.1:500", loss=0.02)
    found = replace(FOUND, servers=(near, replace(near, address="203.0.113.1:500")))
    rows = [line.split() for line in describe(found).splitlines() if line.startswith("stage")]
    assert [row[-3] for row in rows] == ["-", "%"]
    assert [server["loss"] for server in to_json(found)["servers"]] == [None, 0.02]


def test_servers_that_were_not_looked_at_are_counted() -> None:
    """A large run is sampled, and says so."""
    assert "… and 2 more servers" in describe(FOUND)


def test_a_run_without_a_plan_is_no_fault_of_the_line() -> None:
    """There is nothing to reach yet, and that is not taken for a failure."""
    early = replace(FOUND, servers=(), planned=0)
    assert early.reached and "try again when it trains" in describe(early)
    assert not replace(FOUND, servers=SERVERS[2:]).reached


def test_a_run_that_is_over_is_said_to_be() -> None:
    over = replace(FOUND, servers=(), finished=True)
    assert over.reached and "The run is finished" in describe(over) and to_json(over)["finished"]


def test_a_volunteer_at_work_keeps_nobody_from_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is locked, so another identity looks, whose folder is gone afterwards; a damaged folder is named."""
    seen: list[Path] = []

    async def look(link: JoinLink, state: NodeState) -> Check:
        seen.append(state.folder)
        await trio.lowlevel.checkpoint()
        return FOUND

    monkeypatch.setattr(netcheck, "_check", look)
    link = JoinLink(("192.0.2.1:1",), sign_statement(INVITE, BOB))
    assert check(link, tmp_path) is FOUND
    journal = Journal(tmp_path)
    try:
        assert check(link, tmp_path) is FOUND
    finally:
        journal.close()
    assert seen[0] == tmp_path != seen[1] and not seen[1].exists()
    (tmp_path / JOURNAL_FILE).write_bytes(b"no journal at all")
    with pytest.raises(BadInputError, match=str(tmp_path)):
        check(link, tmp_path)


def test_programs_get_the_same_with_null_for_what_is_unknown() -> None:
    """Whole node ids, rates in bytes, and JSON that can be written."""
    found = json.loads(json.dumps(to_json(FOUND)))
    first, second, third = found["servers"]
    assert (first["node"], first["up_bytes_per_s"], first["down_bytes_per_s"]) == ("a" * 52, 1e6, 2e6)
    assert second["loss"] is None and second["down_bytes_per_s"] is None
    assert third["path"] is None and third["problem"] == "nobody answered" and third["connect_s"] is None


def test_udp_that_nobody_could_try_is_not_called_broken() -> None:
    """On a private network no server outside can tell: it was not tested, for people and for programs."""
    found = replace(FOUND, nat=Nat("unknown"), seen=())
    assert "UDP          was not tested" in describe(found) and to_json(found)["udp"] is None
    assert "UDP          does not work" in describe(replace(FOUND, nat=Nat("no_udp")))
