"""Whom the coordinator tells Prometheus to scrape."""

from __future__ import annotations

from coordinator.process.discovery import Discovery
from protocol.base.ids import NodeId
from protocol.base.machine import LinkUp
from protocol.messages import NodeReport
from tests.coordinator.live.desk import DATA, Desk, join


def arrive(desk: Desk, node: str, role: str, address: str, **counters: float) -> None:
    desk.feed(LinkUp(NodeId(node), role, public_key=node.encode(), credential=b"", address=address))
    desk.say(node, join(role=role, addresses=(f"{node}:1",)))
    desk.say(node, NodeReport(state="training", waiting_for="", counters=counters))


def targets(discovery: Discovery) -> dict[str, str]:
    """Role by target."""
    discovery.look()
    return {each["targets"][0]: each["labels"]["role"] for each in discovery.targets()}


def small_run() -> Desk:
    """Four servers (one on this machine, one open to all, one closed, one without metrics) and a volunteer here."""
    desk = Desk()
    arrive(desk, "s0", "server", "127.0.0.1:500", metrics_loopback_port=9001.0)
    arrive(desk, "s1", "server", "198.51.100.7:500", metrics_port=9002.0)
    arrive(desk, "s2", "server", "198.51.100.8:500", metrics_loopback_port=9003.0)
    arrive(desk, "s3", "server", "[2001:db8::9]:500")
    desk.say("s0", DATA)
    arrive(desk, "v0", "volunteer", "127.0.0.1:600", metrics_loopback_port=9004.0)
    return desk


def test_servers_are_listed_where_prometheus_can_reach_them_and_strangers_are_not() -> None:
    """A closed loopback elsewhere is of no use; a volunteer could name any port of this machine."""
    found = targets(Discovery(small_run().machine, "127.0.0.1:8471", local=False))
    assert found == {"127.0.0.1:8471": "coordinator", "127.0.0.1:9001": "server", "198.51.100.7:9002": "server"}


def test_a_run_that_nobody_can_reach_from_outside_lists_its_volunteers_too() -> None:
    """The demo and a laboratory: all processes of one machine."""
    found = targets(Discovery(small_run().machine, "127.0.0.1:8471", local=True))
    assert found["127.0.0.1:9004"] == "volunteer" and len(found) == 4


def test_a_server_stays_on_the_list_after_it_has_gone() -> None:
    """Its absence is what Prometheus must see; when it comes back elsewhere, the old place is dropped."""
    desk = small_run()
    discovery = Discovery(desk.machine, "", local=False)
    before = targets(discovery)
    desk.drop("s1")
    assert targets(discovery) == before
    arrive(desk, "s1", "server", "198.51.100.70:500", metrics_port=9002.0)
    assert "198.51.100.70:9002" in targets(discovery) and "198.51.100.7:9002" not in targets(discovery)


def test_numbers_that_are_no_ports_are_not_listed() -> None:
    """Whatever a server reports."""
    desk = Desk()
    for number, port in enumerate((-1.0, 0.5, 70000.0, 1e300)):
        arrive(desk, f"s{number}", "server", "127.0.0.1:500", metrics_port=port)
    assert targets(Discovery(desk.machine, "", local=False)) == {}
