"""From what STUN servers see to a word and a sentence: every case by hand."""

from __future__ import annotations

import pytest

from node.measure.nat import WORDS, Nat, Seen, advice, classify

OWN = [("10.0.0.5", 4000), ("127.0.0.1", 4000)]
HOME = ("198.51.100.7", 4000)
OTHER = ("198.51.100.7", 61234)


@pytest.mark.parametrize(
    ("own", "mapped", "stranger", "kind"),
    [
        (OWN, [], None, "unknown"),
        (OWN, [None, None], None, "no_udp"),
        (OWN, [HOME, HOME], False, "home_router"),
        (OWN, [HOME, HOME], True, "full_cone"),
        (OWN, [HOME, None], True, "full_cone"),
        (OWN, [None, HOME], False, "nat"),
        (OWN, [HOME, OTHER], False, "symmetric"),
        (OWN, [HOME, OTHER], True, "symmetric"),
        ([("198.51.100.7", 4000)], [HOME, HOME], True, "open"),
        ([("198.51.100.7", 4000)], [HOME], None, "open"),
    ],
)
def test_kinds(
    own: list[tuple[str, int]], mapped: list[tuple[str, int] | None], stranger: bool | None, kind: str
) -> None:
    """Mapping first: a gateway that changes ports is strict whatever it lets in."""
    seen = [Seen(f"192.0.2.{number}:3478", each) for number, each in enumerate(mapped)]
    nat = classify(own, seen, stranger)
    assert nat.kind == kind and kind in WORDS
    assert nat.udp == (None if kind == "unknown" else kind != "no_udp")
    assert nat.mapped == ("198.51.100.7:4000" if any(mapped) else "")


def test_a_carriers_range_is_named() -> None:
    """RFC 6598's addresses mean a NAT that no owner can configure."""
    assert classify([("100.64.3.4", 1)], [Seen("x:1", HOME)], False).carrier
    assert not classify([("100.1.3.4", 1)], [Seen("x:1", HOME)], False).carrier


@pytest.mark.parametrize(
    ("kind", "paths", "lost", "words"),
    [
        ("home_router", ["tcp", "quic"], 0, "every server is reached directly"),
        ("no_udp", ["tcp", "relay"], 0, "passes only TCP, so 1 of 2 servers is reached through a relay"),
        ("symmetric", ["relay", "relay"], 0, "another port, so 2 of 2 servers are reached through a relay"),
        ("home_router", ["tcp", "relay"], 0, "sits behind a router too"),
        ("home_router", ["tcp"], 2, "2 of 3 servers cannot be reached"),
        ("no_udp", [], 2, "No server of the run is reached"),
    ],
)
def test_advice_is_one_sentence_that_says_what_to_do(kind: str, paths: list[str], lost: int, words: str) -> None:
    """It begins with whether one can join, and ends with one full stop."""
    sentence = advice(Nat(kind), paths, lost)  # type: ignore[arg-type]
    assert words in sentence
    assert sentence.count(".") == 1 and sentence.endswith(".")
