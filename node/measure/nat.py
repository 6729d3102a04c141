"""What STUN servers see of us, turned into a word for the gateway in between and a sentence for its owner. Pure.

Mapping and filtering are RFC 4787's words (tested as RFC 5780 does): does the gateway give one socket the same public
port towards everybody, and does it let strangers in through it?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.link.reach import is_local

Kind = Literal["open", "full_cone", "home_router", "symmetric", "nat", "no_udp", "unknown"]

WORDS: dict[Kind, str] = {
    "open": "none: this computer has a public address",
    "full_cone": "an open one (full cone): whoever knows the port comes through",
    "home_router": "a usual home router (port-restricted): lets in whoever it sent to before",
    "symmetric": "a strict one (symmetric): another port for every peer, so nobody can be told where to knock",
    "nat": "there is one; of what kind cannot be told with only one server to ask",
    "no_udp": "cannot be told: no UDP comes back (a firewall that passes only TCP?)",
    "unknown": "cannot be told: this run names no server to ask",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """One STUN server and how it sees our socket: None when no answer came."""

    server: str
    mapped: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Nat:
    """What was found out."""

    kind: Kind
    mapped: str = ""
    """HOST:PORT that the first server saw."""
    carrier: bool = False
    """This computer's own address is from the carriers' range (RFC 6598)."""

    @property
    def udp(self) -> bool | None:
        """Whether UDP comes through; None: nobody was there to try it with."""
        return None if self.kind == "unknown" else self.kind != "no_udp"


def classify(own: Sequence[tuple[str, int]], seen: Sequence[Seen], stranger_came: bool | None) -> Nat:
    """The kind of gateway.

    Args:
        own: (address, port) of our socket on each interface.
        seen: answers to one socket, of servers with different addresses.
        stranger_came: whether an answer came from a port that we had not sent to; None: not tried.
    """
    carrier = any(host.startswith("100.") and is_local(host) for host, _ in own)
    if not seen:
        return Nat("unknown", carrier=carrier)
    answers = [each.mapped for each in seen if each.mapped is not None]
    if not answers:
        return Nat("no_udp", carrier=carrier)
    host, port = answers[0]
    mapped = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    kind: Kind
    if answers[0] in own:
        kind = "open"
    elif any(answer != answers[0] for answer in answers):
        kind = "symmetric"
    elif stranger_came:
        kind = "full_cone"
    elif len(answers) == 1:
        kind = "nat"
    else:
        kind = "home_router"
    return Nat(kind, mapped, carrier)


def advice(nat: Nat, paths: Sequence[str], lost: int) -> str:
    """One sentence for the owner. `paths`: of the servers that were reached; `lost`: servers that were not."""
    count = len(paths) + lost
    relayed = sum(path == "relay" for path in paths)
    some = f"{relayed} of {count} servers {'is' if relayed == 1 else 'are'} reached through a relay"
    if not paths and lost:
        return (
            "No server of the run is reached from here: a firewall may forbid outgoing connections to their ports; "
            "ask who runs the network to allow outgoing TCP, or try another network."
        )
    if lost:
        return (
            f"{lost} of {count} servers cannot be reached from here, so you will get work of the others' stages only; "
            "tell the run's operator, or allow outgoing UDP if a firewall of yours stands between."
        )
    if relayed and nat.kind == "no_udp":
        return (
            f"You can join as it is: this network passes only TCP, so {some}, a little slower; "
            "allowing outgoing UDP would make the link direct."
        )
    if relayed and nat.kind == "symmetric":
        return (
            f"You can join as it is: your router gives every peer another port, so {some}, a little slower; "
            'if it has a setting for the NAT\'s type, "cone" would make the link direct, and so may `barnraise join` '
            "with --map-port if it forwards ports on request."
        )
    if relayed:
        return (
            f"You can join as it is: {some}, a little slower, because that server sits behind a router too; "
            "`barnraise join` with --map-port may make the link direct, if your router forwards ports on request."
        )
    return "You can join as it is: every server is reached directly, and there is nothing to set up."
