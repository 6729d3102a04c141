"""The letters that arrange a punched link: what is accepted, and that nobody in between can change one (S2)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.link import signal
from protocol.link.candidates import CANDIDATES_MAX, Candidate
from protocol.link.signal import (
    LETTER_BYTES_MAX,
    REMEMBERED_MAX,
    REMEMBERED_PER_PEER,
    REMEMBERED_S,
    SIGNAL_LABEL,
    Answer,
    Correspondent,
    Offer,
    SeenOffers,
    common_ways,
    letter_hash,
    open_answer,
    open_offer,
    prologue,
    sign_letter,
)
from protocol.trust.identity import Identity
from tests.protocol.golden import GOLDEN
from tests.protocol.samples import ALICE, BOB, COORDINATOR, RUN_ID

VECTORS = json.loads((GOLDEN / "signal.json").read_text())
OFFER, ANSWER = bytes.fromhex(VECTORS["offer"]), bytes.fromhex(VECTORS["answer"])
BOB_EXPECTS = Correspondent(RUN_ID, 3, BOB.node, ALICE.node)
ALICE_EXPECTS = Correspondent(RUN_ID, 3, ALICE.node, BOB.node)


def offer(**changes: Any) -> Offer:
    return msgspec.structs.replace(open_offer(OFFER, BOB_EXPECTS), **changes)


def unchecked(letter: Offer | Answer, identity: Identity = ALICE) -> bytes:
    """Signed without looking at what it says."""
    body = msgspec.msgpack.encode(letter)
    return body + identity.sign(SIGNAL_LABEL + body)


def refusal(signed: bytes, expected: Correspondent = BOB_EXPECTS) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        open_offer(signed, expected)
    return caught.value.reason


def test_letters_open_for_whom_they_are_meant() -> None:
    opened = open_offer(OFFER, BOB_EXPECTS)
    answer = open_answer(ANSWER, ALICE_EXPECTS, OFFER)
    assert opened.receiver == BOB.node and answer.offer_hash == letter_hash(OFFER)
    assert common_ways(opened, answer) == ("channel",)
    assert prologue("quic", opened, answer).hex() == VECTORS["prologue_quic"]
    assert prologue("channel", opened, answer).hex() == VECTORS["prologue_channel"]
    assert sign_letter(opened, ALICE) == OFFER


def test_every_flipped_bit_is_noticed() -> None:
    for changed in _flipped(OFFER):
        with pytest.raises(RemoteProtocolError):
            open_offer(changed, BOB_EXPECTS)
    for changed in _flipped(ANSWER):
        with pytest.raises(RemoteProtocolError):
            open_answer(changed, ALICE_EXPECTS, OFFER)


def _flipped(letter: bytes) -> Iterator[bytes]:
    for position in range(len(letter) * 8):
        changed = bytearray(letter)
        changed[position // 8] ^= 1 << position % 8
        yield bytes(changed)


def test_every_cut_and_every_appendix_is_noticed() -> None:
    for length in range(len(OFFER)):
        assert refusal(OFFER[:length])
    assert refusal(OFFER + b"\0")
    assert refusal(OFFER + bytes(LETTER_BYTES_MAX)) == "size"


@given(st.binary(max_size=LETTER_BYTES_MAX + 8))
def test_noise_is_refused_and_nothing_else_happens(noise: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        open_offer(noise, BOB_EXPECTS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", bytes(15)),
        ("generation", -1),
        ("receiver", "a" * 51),
        ("receiver", "../" + "a" * 49),
        ("nonce", b""),
        ("dtls_fingerprint", bytes(20)),
        ("quic_fingerprint", bytes(33)),
        ("ufrag", "abc"),
        ("ufrag", "ab:cd"),
        ("ufrag", "abcd\n"),
        ("password", "short"),
        ("password", "x" * 65),
        ("candidates", (Candidate("host", b"\x08\x08\x08\x08", 4000),) * (CANDIDATES_MAX + 1)),
        ("candidates", (Candidate("host", b"12345", 4000),)),
        ("candidates", (Candidate("host", b"\x08\x08\x08\x08", 0),)),
        ("candidates", (("host", "printer.local", 4000),)),
        ("candidates", (("tcp", b"\x08\x08\x08\x08", 4000),)),
        ("ways", ()),
        ("ways", ("quic", "quic")),
        ("ways", ("pigeon",)),
        ("lifetime_s", 0),
        ("lifetime_s", 61),
    ],
)
def test_what_stands_in_a_letter_is_bounded_whoever_signed_it(field: str, value: Any) -> None:
    """A member signs nonsense: it is refused as such."""
    letter = offer(**{field: value})
    assert refusal(unchecked(letter)) == "decode"
    with pytest.raises((LocalProtocolError, msgspec.ValidationError)):
        sign_letter(letter, ALICE)


def test_a_letter_counts_only_between_those_it_names() -> None:
    """Swapped ids, another run, another generation: an attacker in between gets nowhere with real letters."""
    assert refusal(OFFER, Correspondent(RUN_ID, 3, BOB.node, COORDINATOR.node)) == "identity"
    assert refusal(OFFER, Correspondent(RUN_ID, 3, COORDINATOR.node, ALICE.node)) == "identity"
    assert refusal(OFFER, Correspondent(RUN_ID, 3, ALICE.node, ALICE.node)) == "identity"
    assert refusal(OFFER, Correspondent(bytes(16), 3, BOB.node, ALICE.node)) == "run"
    assert refusal(OFFER, Correspondent(RUN_ID, 5, BOB.node, ALICE.node)) == "version"
    assert open_offer(OFFER, Correspondent(RUN_ID, 4, BOB.node, ALICE.node))


def test_the_attackers_own_signature_does_not_help() -> None:
    """It can sign in its own name (nobody asked for that one) or in another's (which does not verify)."""
    own = offer(sender=COORDINATOR.public_key)
    assert refusal(unchecked(own, COORDINATOR)) == "identity"
    assert refusal(unchecked(offer(), COORDINATOR)) == "signature"


def test_a_signature_for_something_else_does_not_count() -> None:
    body = msgspec.msgpack.encode(offer())
    assert refusal(body + ALICE.sign(body)) == "signature"
    assert refusal(body + ALICE.sign(b"barnraise/credential/1\0" + body)) == "signature"


def test_an_offer_is_no_answer_and_an_answer_no_offer() -> None:
    with pytest.raises(RemoteProtocolError):
        open_answer(OFFER, BOB_EXPECTS, OFFER)
    with pytest.raises(RemoteProtocolError):
        open_offer(ANSWER, ALICE_EXPECTS)


def test_an_answer_to_another_offer_is_refused() -> None:
    other = sign_letter(offer(nonce=bytes(16)), ALICE)
    with pytest.raises(RemoteProtocolError) as caught:
        open_answer(ANSWER, ALICE_EXPECTS, other)
    assert caught.value.reason == "replay"


def test_the_longest_letter_fits() -> None:
    widest = Candidate("relay", b"\xff" * 16, 65535)
    fields = open_answer(ANSWER, ALICE_EXPECTS, OFFER)
    longest = msgspec.structs.replace(
        fields,
        ufrag="x" * 32,
        password="x" * 64,
        candidates=(widest,) * CANDIDATES_MAX,
        generation=2**63 - 1,
        ways=("quic", "channel"),
    )
    assert len(sign_letter(longest, BOB)) < LETTER_BYTES_MAX // 2


def test_we_sign_only_in_our_own_name() -> None:
    with pytest.raises(LocalProtocolError):
        sign_letter(offer(), BOB)


def test_an_offer_counts_once() -> None:
    seen = SeenOffers()
    seen.note(OFFER, ALICE.node, 0.0)
    for now in (0.0, 59.0, REMEMBERED_S - 0.001):
        with pytest.raises(RemoteProtocolError) as caught:
            seen.note(OFFER, ALICE.node, now)
        assert caught.value.reason == "replay"
    assert len(seen) == 1


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5), st.floats(0, 5)), max_size=300))
def test_memory_of_offers_is_bounded_and_forgets(steps: list[tuple[int, int, float]]) -> None:
    """Whatever comes in whatever order: no offer twice within its time, and the counts always add up."""
    seen, now = SeenOffers(), 0.0
    accepted: dict[bytes, float] = {}
    nodes = [Identity(bytes((number,)) * 32).node for number in range(6)]
    for number, peer, wait_s in steps:
        now += wait_s
        content = b"%d of %d" % (number, peer)
        try:
            seen.note(content, nodes[peer], now)
            is_new = True
        except RemoteProtocolError:
            is_new = False
        if is_new:
            assert now - accepted.get(content, -REMEMBERED_S) >= REMEMBERED_S
            accepted[content] = now
        seen.check()


def test_one_peer_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SeenOffers()
    for number in range(REMEMBERED_PER_PEER):
        seen.note(b"%d" % number, ALICE.node, 0.0)
    with pytest.raises(RemoteProtocolError, match="busy"):
        seen.note(b"one more", ALICE.node, 1.0)
    seen.note(b"of another", BOB.node, 1.0)
    seen.note(b"one more", ALICE.node, REMEMBERED_S)
    monkeypatch.setattr(signal, "REMEMBERED_MAX", len(seen))
    assert len(seen) < REMEMBERED_MAX
    with pytest.raises(RemoteProtocolError, match="busy"):
        seen.note(b"of a third", COORDINATOR.node, REMEMBERED_S)
