"""The coordinator's picture of the network: newest word of either end, nothing that cannot be, a file for planners."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.live.measured_links import NetworkBook
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.messages import LinkFigures, LinkReport, PlanChanged, Welcome
from protocol.schedule.profile import NetworkFile, build_network
from tests.coordinator.live.desk import Desk

A, B = NodeId("a" * 52), NodeId("b" * 52)


def figures(peer: NodeId = B, **facts: Any) -> LinkFigures:
    fields: dict[str, Any] = {
        "peer": peer, "path": "tcp", "round_trip_s": 0.04, "loss": -1.0, "sent_bytes_per_s": 1e6,
        "received_bytes_per_s": 2e6, "age_s": 1.0, "spread": 0.1,
    }  # fmt: skip
    return LinkFigures(**{**fields, **facts})


def report(*links: LinkFigures) -> LinkReport:
    return LinkReport(links=links)


def test_each_direction_is_the_newest_word_of_either_end() -> None:
    """A says how fast it sends and hears; B, later, how fast it sends: that one direction is replaced."""
    book = NetworkBook()
    assert book.take(A, report(figures(B, age_s=5.0)), 100.0) == ""
    assert book.take(B, report(figures(A, sent_bytes_per_s=3e6, received_bytes_per_s=0.0, age_s=1.0)), 101.0) == ""
    found = book.directions(110.0)
    assert found[A, B].bytes_per_s == 1e6 and found[A, B].age_s == 15.0
    assert found[B, A].bytes_per_s == 3e6 and found[B, A].age_s == 10.0
    book.left(B)
    assert book.directions(110.0)[B, A].bytes_per_s == 2e6


def test_a_ways_round_trip_is_the_least_of_some_minutes() -> None:
    """Not what its queues add while tensors wait in them; either end has a say, and another path begins anew."""
    book = NetworkBook()

    def said(trip_s: float, now: float, path: str = "tcp", reporter: NodeId = A, peer: NodeId = B) -> float:
        book.take(reporter, report(figures(peer, round_trip_s=trip_s, path=path)), now)
        return book.directions(now)[A, B].round_trip_s

    assert [said(trip_s, now) for trip_s, now in ((0.4, 0.0), (0.05, 5.0), (1.2, 10.0), (-1.0, 15.0))] == [
        0.4, 0.05, 0.05, 0.05,
    ]  # fmt: skip
    assert said(0.03, 20.0, reporter=B, peer=A) == 0.03
    book.left(B)
    assert [said(0.3, now) for now in (301.0, 400.0, 602.0)] == [0.05, 0.05, 0.3]
    assert said(0.9, 610.0, path="relay") == 0.9


@pytest.mark.parametrize(
    "wrong",
    [
        {"peer": A},
        {"round_trip_s": -2.0},
        {"round_trip_s": 1e9},
        {"loss": 1.1},
        {"sent_bytes_per_s": -1.0},
        {"received_bytes_per_s": 1e13},
        {"age_s": -1.0},
        {"spread": -0.1},
    ],
)
def test_a_figure_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    """With its name; nothing of the report counts."""
    book = NetworkBook()
    fault = book.take(A, report(figures(B), figures(**wrong)), 0.0)
    assert fault and (next(iter(wrong)) in fault or "itself" in fault)
    assert book.directions(0.0) == {}


def test_a_line_is_the_best_that_a_server_has_seen_of_it() -> None:
    """A member says 1 MB/s up; one server has it by a relay, the other straight: who spoke last does not matter."""
    book, servers = NetworkBook(), (NodeId("s1"), NodeId("s2"))
    book.take(A, report(*(figures(server) for server in servers)), 0.0)
    assert book.line_of(A) == (1e6, 2e6)
    rates = {NodeId("s1"): (8e6, 9e6), NodeId("s2"): (3e6, 0.0)}
    for server, (received, sent) in rates.items():
        book.take(server, report(figures(A, received_bytes_per_s=received, sent_bytes_per_s=sent)), 1.0)
    assert book.line_of(A) == (8e6, 9e6)


def admitted() -> Desk:
    """A desk with a run that trains, and a volunteer with a measured speed."""
    desk = Desk()
    desk.train()
    desk.volunteer(A, tokens_per_s=1000.0)
    return desk


def test_what_is_measured_becomes_a_network_for_the_planner() -> None:
    """Only machines of whom a link is known; the file passes the planner's own checks."""
    desk = admitted()
    with pytest.raises(BadInputError, match="no link is measured"):
        desk.machine.network_file(desk.now)
    desk.say(A, report(figures(NodeId("s1"))))
    file = desk.machine.network_file(desk.now + 4.0)
    assert {machine.name: machine.role for machine in file.machines} == {A: "volunteer", "s1": "server"}
    forth, back = sorted(file.links, key=lambda link: link.source != A)
    assert (forth.bytes_per_s, back.bytes_per_s, forth.latency_s, forth.age_s) == (1e6, 2e6, 0.02, 5.0)
    network = build_network(msgspec.convert(msgspec.to_builtins(file), NetworkFile))
    assert network.servers == 1 and network.to_bytes_per_s[1, 0] == 1e6
    [shown] = [member for member in desk.machine.status(desk.now)["members"] if member["id"] == A]
    assert shown["links"][0]["path"] == "tcp" and shown["links"][0]["loss"] is None


def test_a_node_that_reports_nonsense_is_expelled() -> None:
    """By name of the field, in the log."""
    desk = admitted()
    desk.say(A, report(figures(NodeId("s1"), loss=7.0)))
    assert A not in desk.machine.roster
    assert any("loss" in str(log.fields.get("detail")) for log in desk.logs)


def test_a_visitor_learns_run_and_plan_and_takes_no_place() -> None:
    """It is welcomed and told the servers; no stage, no power, and nobody is moved for it."""
    desk = admitted()
    desk.volunteer(B, visit=True)
    assert len(desk.sent(B, Welcome)) == 1
    [told] = desk.sent(B, PlanChanged)
    assert told.stage == -1 and told.reason == "only looks" and len(told.plan.stages) == 2
    assert [member.peer for member in desk.machine.roster.volunteers()] == [A]
    desk.stay(30.0, A, B, "s0", "s1", "s2", "s3")
    assert len(desk.sent(B, PlanChanged)) == 1 and desk.machine.roster.get(B) is not None
    assert desk.counted("barnraise_coordinator_assignments_total", run="demo", reason="empty_stage") == 1


def test_when_all_who_were_measured_have_left_that_is_said() -> None:
    """Not that nothing is measured yet."""
    desk = admitted()
    desk.say(A, report(figures(NodeId("s0"))))
    desk.machine.network_file(desk.now)
    for member in desk.machine.roster.all():
        desk.drop(member.peer)
    with pytest.raises(BadInputError, match="has left; ask again while they take part"):
        desk.machine.network_file(desk.now)
