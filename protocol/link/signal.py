"""The two signed letters by which peers arrange a punched link (state-and-trust 2.3).

They travel through the coordinator, which can read, lose, delay and repeat them but not change them: each is signed
by its sender and names its receiver, and the answer names the offer that it belongs to. What they promise (the
certificates' fingerprints) becomes the prologue of the handshake, so nobody who swapped anything ends up in between.

A letter is `array || signature`: msgpack in its one canonical form, then 64 bytes of Ed25519 over label and array.
Pure: bytes, randomness and time are handed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import NUMBER_MAX, TEXT_MAX
from protocol.link.candidates import CANDIDATES_MAX, Candidate
from protocol.trust.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, node_id, verify_signature
from protocol.trust.membership import RUN_ID_BYTES

SIGNAL_LABEL = b"br-sdp-1\0"
"""Stands before every signed array, so that no other signature of the key can pass for a letter."""
LETTER_BYTES_MAX = 2048
"""Sixteen candidates and everything else take about 800 bytes; the coordinator forwards no more than this."""
NONCE_BYTES = 16
FINGERPRINT_BYTES = 32
LIFETIME_MAX_S = 60
"""The longest that a letter is good, from its first sight on, by the receiver's own clock: no two clocks compared."""
REMEMBERED_S = 120.0
"""An offer is known again for so long: twice its longest life."""
REMEMBERED_MAX = 4096
"""Offers remembered at once, about 150 bytes each: more can only come from more than a hundred members at once."""
REMEMBERED_PER_PEER = 64
"""Of these from one peer: one every two seconds, which is more than any redialling does."""

Way = Literal["quic", "channel"]
"""What can run on a punched path: QUIC on the UDP socket, or a WebRTC data channel."""

_Key = Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
_RunId = Annotated[bytes, msgspec.Meta(min_length=RUN_ID_BYTES, max_length=RUN_ID_BYTES)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Fingerprint = Annotated[bytes, msgspec.Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
_Node = Annotated[NodeId, msgspec.Meta(pattern=r"^[a-z2-7]{52}\Z")]
_Ufrag = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9+/]{4,32}\Z")]
_Password = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9+/]{22,64}\Z")]
_Lifetime = Annotated[int, msgspec.Meta(ge=1, le=LIFETIME_MAX_S)]
_Candidates = Annotated[tuple[Candidate, ...], msgspec.Meta(max_length=CANDIDATES_MAX)]
_Ways = Annotated[tuple[Way, ...], msgspec.Meta(min_length=1, max_length=2)]


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer", forbid_unknown_fields=True):
    """Asks a peer to punch; the offerer is the ICE-controlling side, the QUIC client and the handshake's initiator."""

    run_id: _RunId
    generation: _Number
    """The plan's generation that the sender works by."""
    sender: _Key
    """The sender's public key."""
    receiver: _Node
    nonce: _Nonce
    dtls_fingerprint: _Fingerprint
    """SHA-256 of the certificate (DER) that the sender shows in DTLS."""
    quic_fingerprint: _Fingerprint
    """SHA-256 of its certificate for QUIC; zeros when it does not offer that."""
    ufrag: _Ufrag
    password: _Password
    candidates: _Candidates
    ways: _Ways
    lifetime_s: _Lifetime


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer", forbid_unknown_fields=True):
    """Says where the answerer is. Fields as in `Offer`."""

    run_id: _RunId
    generation: _Number
    sender: _Key
    receiver: _Node
    nonce: _Nonce
    dtls_fingerprint: _Fingerprint
    quic_fingerprint: _Fingerprint
    ufrag: _Ufrag
    password: _Password
    candidates: _Candidates
    ways: _Ways
    lifetime_s: _Lifetime
    offer_hash: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """BLAKE2b-256 of the whole offer, signature included (`letter_hash`)."""


Letter = TypeVar("Letter", Offer, Answer)
_encoder = msgspec.msgpack.Encoder()
_offers = msgspec.msgpack.Decoder(Offer)
_answers = msgspec.msgpack.Decoder(Answer)


def sign_letter(letter: Offer | Answer, identity: Identity) -> bytes:
    """Canonical bytes, then the sender's signature. Raises `LocalProtocolError` if peers would refuse it."""
    body = _encoder.encode(letter)
    signed = body + identity.sign(SIGNAL_LABEL + body)
    if letter.sender != identity.public_key or len(signed) > LETTER_BYTES_MAX:
        raise LocalProtocolError(f"a letter of {len(signed)} bytes, or one in another's name")
    try:
        if isinstance(letter, Offer):
            _decode(body, _offers)
        else:
            _decode(body, _answers)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"a letter that peers would refuse: {error}") from error
    return signed


def letter_hash(signed: bytes) -> bytes:
    """What an answer says about the offer that it belongs to."""
    return hashlib.blake2b(signed, digest_size=32, person=b"br-sdp-hash").digest()


@dataclass(frozen=True, slots=True)
class Correspondent:
    """Who we are and whom we expect: what every letter is held against.

    Args:
        generation: our plan's; a letter may be one generation off, since a new plan reaches nobody at once.
    """

    run_id: bytes
    generation: int
    me: NodeId
    peer: NodeId


def open_offer(signed: bytes, expected: Correspondent) -> Offer:
    """The offer in `signed`, proven to be from `expected.peer` for us.

    Whether it is new only `SeenOffers` knows. Raises `RemoteProtocolError` (size, decode, signature, identity, run,
    version).
    """
    return _open(signed, expected, _offers)


def open_answer(signed: bytes, expected: Correspondent, offer: bytes) -> Answer:
    """The answer in `signed`, proven to be from `expected.peer` to our `offer`.

    Raises `RemoteProtocolError` as `open_offer` does, and "replay" for an answer to another offer.
    """
    answer = _open(signed, expected, _answers)
    if answer.offer_hash != letter_hash(offer):
        raise RemoteProtocolError("replay", "an answer to another offer")
    return answer


def _open(signed: bytes, expected: Correspondent, decoder: msgspec.msgpack.Decoder[Letter]) -> Letter:
    if not SIGNATURE_BYTES < len(signed) <= LETTER_BYTES_MAX:
        raise RemoteProtocolError("size", f"a letter of {len(signed)} bytes")
    body, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    letter = _decode(body, decoder)
    sender = node_id(letter.sender)
    if sender != expected.peer or sender == expected.me:
        raise RemoteProtocolError("identity", "a letter of another sender")
    if not verify_signature(letter.sender, SIGNAL_LABEL + body, signature):
        raise RemoteProtocolError("signature", "a letter that its sender did not sign")
    if letter.receiver != expected.me:
        raise RemoteProtocolError("identity", "a letter for another node")
    if letter.run_id != expected.run_id:
        raise RemoteProtocolError("run", "a letter of another run")
    if abs(letter.generation - expected.generation) > 1:
        raise RemoteProtocolError("version", f"generation {letter.generation}, ours is {expected.generation}")
    return letter


def _decode(body: bytes, decoder: msgspec.msgpack.Decoder[Letter]) -> Letter:
    try:
        letter = decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise RemoteProtocolError("decode", str(error)[:TEXT_MAX]) from None
    if _encoder.encode(letter) != body:
        raise RemoteProtocolError("decode", "a letter that is not in its canonical form")
    if any(len(candidate.address) not in (4, 16) for candidate in letter.candidates):
        raise RemoteProtocolError("decode", "a candidate's address is neither IPv4 nor IPv6")
    if len(set(letter.ways)) != len(letter.ways):
        raise RemoteProtocolError("decode", "a way is offered twice")
    return letter


def common_ways(offer: Offer, answer: Answer) -> tuple[Way, ...]:
    """The ways that both can go, best first: QUIC keeps its rate under loss and costs half of the channel."""
    both: Sequence[Way] = [way for way in offer.ways if way in answer.ways]
    return tuple(way for way in ("quic", "channel") if way in both)


def prologue(way: Way, offer: Offer, answer: Answer) -> bytes:
    """What the handshake inside the link binds: which way, and whose certificates (initiator's first)."""
    if way == "quic":
        return b"quic" + _lp(offer.quic_fingerprint) + _lp(answer.quic_fingerprint)
    return b"webrtc" + _lp(offer.dtls_fingerprint) + _lp(answer.dtls_fingerprint)


def _lp(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


@dataclass(frozen=True, slots=True)
class _Seen:
    peer: NodeId
    first_seen_s: float


class SeenOffers:
    """Remembers offers for a while, so that each counts once and only while it is young. Bounded in every direction."""

    def __init__(self) -> None:
        self._seen: dict[bytes, _Seen] = {}
        self._per_peer: dict[NodeId, int] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, signed: bytes, peer: NodeId, now: float) -> None:
        """Take an offer of `peer` (already proven) at `now`, seconds of any clock that only goes forward.

        Raises `RemoteProtocolError`: "replay" for one that was here before, "busy" for too many.
        """
        self._forget(now)
        key = letter_hash(signed)
        if key in self._seen:
            raise RemoteProtocolError("replay", "an offer that was here before")
        if self._per_peer.get(peer, 0) >= REMEMBERED_PER_PEER or len(self._seen) >= REMEMBERED_MAX:
            raise RemoteProtocolError("busy", "too many offers in a short time")
        self._seen[key] = _Seen(peer, now)
        self._per_peer[peer] = self._per_peer.get(peer, 0) + 1

    def _forget(self, now: float) -> None:
        for key, seen in list(self._seen.items()):  # oldest first: a dict keeps the order of insertion
            if now - seen.first_seen_s < REMEMBERED_S:
                break
            del self._seen[key]
            left = self._per_peer[seen.peer] - 1
            if left:
                self._per_peer[seen.peer] = left
            else:
                del self._per_peer[seen.peer]

    def check(self) -> None:
        """The invariants."""
        assert len(self._seen) <= REMEMBERED_MAX, "more offers remembered than the bound"
        assert sum(self._per_peer.values()) == len(self._seen), "the counts of peers do not add up"
        assert all(0 < count <= REMEMBERED_PER_PEER for count in self._per_peer.values()), "a peer's count is off"
