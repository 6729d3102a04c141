"""What the coordinator does for nodes that cannot reach each other: it carries, names helpers, and decides nothing."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.commands.coordinator import read_helpers
from coordinator.live.signals import TURN_S, Helpers, turn_credentials
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.limits import SIGNALS_BURST, SIGNALS_PER_S
from protocol.base.machine import Effect, LinkUp, Send
from protocol.messages import NodeReport, Reach, Signal
from tests.coordinator.live.desk import Desk, join


def signal(peer: str, content: bytes = b"hello", seen_from: str = "") -> Signal:
    return Signal(peer=NodeId(peer), content=content, seen_from=seen_from)


def sent(effects: Sequence[Effect]) -> list[tuple[str, Signal]]:
    return [(e.peer, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, Signal)]


@pytest.fixture
def desk() -> Desk:
    """Four servers and two volunteers."""
    made = Desk()
    made.train()
    made.volunteer("v0")
    made.volunteer("v1")
    return made


def test_a_signal_arrives_under_the_name_of_who_sent_it(desk: Desk) -> None:
    """Whatever a node claims, the receiver hears the name that the link has proven; the content is untouched."""
    assert sent(desk.say("v0", signal("s1", b"\x00\xff"))) == [("s1", signal("v0", b"\x00\xff"))]
    assert sent(desk.say("s1", signal("v0"))) == [("v0", signal("s1"))]


@pytest.mark.parametrize("to", ["nobody", "v0", "v1"])
def test_what_cannot_be_handed_over_comes_back_empty(desk: Desk, to: str) -> None:
    """To a stranger, to oneself, and between volunteers, who have no business with each other."""
    assert sent(desk.say("v0", signal(to))) == [("v0", signal(to, b""))]


def test_an_empty_signal_is_the_coordinators_alone(desk: Desk) -> None:
    """Else a node could tell another that it cannot be reached."""
    assert sent(desk.say("v0", signal("s1", b""))) == []


def test_who_has_not_been_welcomed_gets_no_signal(desk: Desk) -> None:
    """A link that has not joined is nobody yet, and sends nothing either."""
    desk.link("s9")
    assert sent(desk.say("v0", signal("s9"))) == [("v0", signal("s9", b""))]
    assert sent(desk.say("s9", signal("v0"))) == []


def test_a_flood_of_signals_is_dropped_and_others_are_not(desk: Desk) -> None:
    """After the burst only the rate passes; another sender has its own."""
    passed = sum(len(sent(desk.say("v0", signal("s1")))) for _ in range(int(SIGNALS_BURST) + 50))
    assert passed == SIGNALS_BURST
    assert len(sent(desk.say("v1", signal("s1")))) == 1
    desk.now += 2.0
    assert sum(len(sent(desk.say("v0", signal("s1")))) for _ in range(100)) == 2 * SIGNALS_PER_S


def test_a_node_hears_how_it_looks_from_outside_and_who_helps() -> None:
    """With its welcome, and with new credentials before the old ones end."""
    desk = Desk()
    desk.machine.signalling._helpers = Helpers(("stun.example:1",), ("turn.example:2",), b"0123456789abcdef")
    desk.feed(LinkUp(NodeId("s0"), "server", b"k", b"", "203.0.113.7:4711"))
    effects = desk.say("s0", join())
    (first,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Reach)]
    assert (first.seen_from, first.stun, first.turn) == ("203.0.113.7", ("stun.example:1",), ("turn.example:2",))
    assert first.username.split(":")[0] == str(int(1e9 + 100 + TURN_S)) and first.valid_s == TURN_S
    later = [e.message for e in desk.stay(TURN_S / 2 + 5, "s0") if isinstance(e, Send) and isinstance(e.message, Reach)]
    assert len(later) == 1 and later[0].password != first.password


def test_what_servers_relay_is_added_up(desk: Desk) -> None:
    """By differences between the reports of one link, so that nothing counts twice."""
    for total in (100.0, 150.0, 150.0, 400.0):
        desk.say("s1", NodeReport(state="training", waiting_for="", counters={"relay_bytes": total}))
    counted = [count for count in desk.counts if count.metric == "barnraise_coordinator_relay_bytes_total"]
    assert sum(count.value for count in counted) == 2 * 300.0


def test_turn_credentials_are_what_coturn_computes() -> None:
    """username = expiry:name, password = base64(HMAC-SHA1(secret, username))."""
    username, password = turn_credentials(b"secret of sixteen", NodeId("a" * 52), 1_700_000_000)
    assert username == "1700000000:" + "a" * 16
    assert password == base64.b64encode(hmac.digest(b"secret of sixteen", username.encode(), hashlib.sha1)).decode()


@pytest.mark.parametrize(
    ("seen_from", "expected"),
    [
        ("198.51.100.9:5", ("198.51.100.1:1",)),  # behind a NAT: its private address leads elsewhere
        ("192.168.1.7:5", ("198.51.100.1:1", "192.168.1.7:1")),  # the coordinator is in its network
        ("127.0.0.1:5", ("198.51.100.1:1", "192.168.1.7:1")),
        ("", ("198.51.100.1:1", "192.168.1.7:1")),
    ],
)
def test_the_plan_names_only_addresses_that_lead_to_the_server(seen_from: str, expected: tuple[str, ...]) -> None:
    """Private addresses count when the coordinator sees the server at such a one."""
    desk = Desk()
    for number in range(4):
        desk.feed(LinkUp(NodeId(f"s{number}"), "server", b"k", b"", seen_from))
        desk.say(f"s{number}", join(addresses=("198.51.100.1:1",), local_addresses=("192.168.1.7:1",)))
    assert desk.plan.addresses_of(NodeId("s2")) == expected


def test_a_server_that_nobody_can_dial_is_admitted() -> None:
    """It is reached by other ways, or dials those that can be dialled."""
    desk = Desk()
    for number in range(4):
        desk.server(f"s{number}", addresses=())
    assert desk.plan.addresses_of(NodeId("s0")) == ()


def test_helpers_of_the_command_line_are_checked(tmp_path: Path) -> None:
    """Each wrong option is named; the secret is shown nowhere."""
    secret = tmp_path / "secret"
    secret.write_text("short\n")
    with pytest.raises(BadInputError, match=r"--turn-secret-file: .* holds 5 bytes"):
        read_helpers((), ("a.example:1",), secret)
    with pytest.raises(BadInputError, match="go together"):
        read_helpers((), ("a.example:1",), None)
    with pytest.raises(BadInputError, match="--stun: address: 'nowhere'"):
        read_helpers(("nowhere",), (), None)
    with pytest.raises(BadInputError, match="--stun: more than"):
        read_helpers(("a.example:1",) * 9, (), None)
    secret.write_text("0123456789abcdef\n")
    helpers = read_helpers(("stun:a.example:1",), ("turn:b.example:2",), secret)
    assert helpers == Helpers(("a.example:1",), ("b.example:2",), b"0123456789abcdef")
    assert "0123456789abcdef" not in repr(helpers)
