"""Three messages after which both sides know who the other is and share keys nobody else has (state-and-trust 2.2).

A SIGMA-I exchange: ephemeral X25519 keys, then each side signs the transcript under a key that only the two know.

    initiator                                         responder
      M1  version, run, e_i, cookie          ──▶
      (or, when it is busy:                  ◀──        a cookie; call again with it)
                                             ◀──   M2  e_r, sealed: key, credential, signature
      M3  sealed: key, credential, signature ──▶

Sans-I/O: bytes in, bytes out, randomness handed in. On a stream every message has its length (4 bytes, big endian)
before it. Any mistake of the peer raises `RemoteProtocolError`; the caller closes and tells the peer nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import nacl.bindings
import nacl.exceptions

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import COOKIE_S, CREDENTIAL_BYTES_MAX
from protocol.trust.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, node_id, verify_signature
from protocol.trust.membership import RUN_ID_BYTES

PROTO = b"barnraise/hs/1\0"
VERSION = 1
TCP_PROLOGUE = b"tcp"
"""What both sides must agree on before the first message; a data channel puts its certificates' fingerprints here."""
ENTROPY_BYTES = 32
COOKIE_BYTES = 16
NO_COOKIE = bytes(COOKIE_BYTES)

_EPHEMERAL_BYTES = 32
_M1_BYTES = 1 + RUN_ID_BYTES + _EPHEMERAL_BYTES + COOKIE_BYTES
_COOKIE_DEMAND = 2
_COOKIE_DEMAND_BYTES = 1 + COOKIE_BYTES
_TAG_BYTES = 16
_HTTP = (b"HTTP", b"GET ", b"POST", b"CONN", b"HEAD", b"<htm", b"<!DO")
"""How an answer of a web server or a proxy begins, and a question to one; as lengths all are far beyond any message."""
_NONCE = bytes(24)  # every key seals one message, so the nonce need not vary
_PROOF_BYTES_MAX = 3 * 4 + PUBLIC_KEY_BYTES + CREDENTIAL_BYTES_MAX + SIGNATURE_BYTES + _TAG_BYTES
_MESSAGE_BYTES_MAX = _EPHEMERAL_BYTES + _PROOF_BYTES_MAX

Admit = Callable[[bytes, bytes], str]
"""(public key, credential) -> role; raises `RemoteProtocolError`. Asked only after the signature was checked."""


@dataclass(frozen=True, slots=True)
class Session:
    """What a finished handshake gives. The keys are for `protocol.trust.records` and are not shown by repr."""

    session_id: bytes
    peer: NodeId
    public_key: bytes
    credential: bytes = field(repr=False)
    role: str
    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CookieDemanded:
    """The responder is busy: dial again and show this cookie."""

    cookie: bytes


class CookieJar:
    """Makes and checks cookies without keeping any: a keyed hash of the caller's address and the time."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: 32 random bytes, new with every process."""
        self._secret = secret

    def cookies(self, address: str, now: float) -> tuple[bytes, bytes]:
        """The cookie to give to `address`, and the one before it that is still good. `now` in seconds, any origin."""
        period = int(now // COOKIE_S)
        return self._cookie(address, period), self._cookie(address, period - 1)

    def _cookie(self, address: str, period: int) -> bytes:
        content = (period % 2**64).to_bytes(8, "big") + address.encode()
        return hashlib.blake2b(content, digest_size=COOKIE_BYTES, key=self._secret, person=b"br-hs-cookie").digest()


class _Handshake:
    """What both sides share: the transcript's hash, the message boundaries, sealing and opening of proofs."""

    def __init__(
        self, identity: Identity, credential: bytes, run_id: bytes, entropy: bytes, prologue: bytes, admit: Admit
    ) -> None:
        if len(credential) > CREDENTIAL_BYTES_MAX or len(run_id) != RUN_ID_BYTES or len(entropy) != ENTROPY_BYTES:
            raise LocalProtocolError("handshake: credential, run id or entropy has a wrong length")
        self._identity = identity
        self._credential = credential
        self._run_id = run_id
        self._admit = admit
        self._may_come: Callable[[bytes], None] | None = None
        self._ephemeral, self._ephemeral_secret = nacl.bindings.crypto_kx_seed_keypair(entropy)
        self._hash = _hash(PROTO + _lp(prologue) + _lp(run_id))
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._over = False

    def data_to_send(self) -> bytes:
        """Bytes for the peer; each is given once."""
        data = bytes(self._outbox)
        self._outbox.clear()
        return data

    @property
    def trailing(self) -> bytes:
        """After the end: bytes that came behind the last message; they are the first of the records."""
        return bytes(self._inbox)

    def _queue(self, message: bytes) -> None:
        self._outbox += _lp(message)

    def _next_message(self) -> bytes | None:
        """One whole message of the stream, or None until more bytes have come."""
        if len(self._inbox) < 4:
            return None
        length = int.from_bytes(self._inbox[:4], "big")
        if bytes(self._inbox[:4]) in _HTTP:
            raise RemoteProtocolError(
                "decode", "an HTTP server or proxy speaks there, and no member of the run: check the address, or let"
                " this connection past the proxy"
            )  # fmt: skip
        if length > _MESSAGE_BYTES_MAX:
            raise RemoteProtocolError("size", f"a handshake message of {length} bytes")
        if len(self._inbox) < 4 + length:
            return None
        message = bytes(self._inbox[4 : 4 + length])
        del self._inbox[: 4 + length]
        return message

    def _seal_proof(self, side: bytes, key: bytes) -> bytes:
        """Own key, credential and signature over the transcript, sealed."""
        body = _lp(self._identity.public_key) + _lp(self._credential)
        signature = self._identity.sign(PROTO + side + self._hash + body)
        return nacl.bindings.crypto_aead_xchacha20poly1305_ietf_encrypt(body + _lp(signature), self._hash, _NONCE, key)

    def _open_proof(self, side: bytes, key: bytes, sealed: bytes) -> tuple[bytes, bytes]:
        """The peer's (public key, credential), proven by its signature over the transcript."""
        if len(sealed) < _TAG_BYTES or len(sealed) > _PROOF_BYTES_MAX:
            raise RemoteProtocolError("size", "a handshake proof of a wrong length")
        try:
            plain = nacl.bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(sealed, self._hash, _NONCE, key)
        except nacl.exceptions.CryptoError:
            raise RemoteProtocolError("signature", "a handshake proof that was changed or meant for others") from None
        public_key, rest = _take_lp(plain)
        credential, rest = _take_lp(rest)
        signature, rest = _take_lp(rest)
        if rest or len(public_key) != PUBLIC_KEY_BYTES or len(credential) > CREDENTIAL_BYTES_MAX:
            raise RemoteProtocolError("size", "a handshake proof whose fields have wrong lengths")
        if self._may_come is not None:
            self._may_come(public_key)
        if not verify_signature(public_key, PROTO + side + self._hash + _lp(public_key) + _lp(credential), signature):
            raise RemoteProtocolError("signature", "the peer does not own the key that it shows")
        if public_key == self._identity.public_key:
            raise RemoteProtocolError("replay", "the peer shows our own key")
        return public_key, credential

    def _session(self, send_root: bytes, receive_root: bytes, proof: tuple[bytes, bytes, str]) -> Session:
        """Derive what both sides keep, and forget what they must not."""
        public_key, credential, role = proof
        self._over = True
        self._ephemeral_secret = b""
        return Session(
            session_id=_derive(self._hash, b"", b"br-session-id"),
            peer=node_id(public_key),
            public_key=public_key,
            credential=credential,
            role=role,
            send_key=_derive(self._hash, send_root, b"br-traffic"),
            receive_key=_derive(self._hash, receive_root, b"br-traffic"),
        )


class Initiator(_Handshake):
    """The side that dialled. `data_to_send` holds M1 from the start."""

    def __init__(
        self,
        *,
        identity: Identity,
        credential: bytes,
        run_id: bytes,
        peer: NodeId,
        entropy: bytes,
        admit: Admit,
        prologue: bytes = TCP_PROLOGUE,
        cookie: bytes = NO_COOKIE,
    ) -> None:
        """`peer` is the node that must answer; `entropy`: 32 secret random bytes used for nothing else."""
        super().__init__(identity, credential, run_id, entropy, prologue, admit)
        self._peer = peer
        m1 = bytes((VERSION,)) + run_id + self._ephemeral + cookie
        self._hash = _hash(self._hash + m1)
        self._queue(m1)

    def receive(self, data: bytes) -> Session | CookieDemanded | None:
        """Bytes from the responder; the result once M2 is complete and right (then send M3). Raises
        `RemoteProtocolError`."""
        if self._over:
            raise LocalProtocolError("handshake: it is over")
        self._inbox += data
        message = self._next_message()
        if message is None:
            return None
        self._over = True
        if self._inbox:
            raise RemoteProtocolError("size", "bytes behind the responder's message")
        if len(message) == _COOKIE_DEMAND_BYTES and message[0] == _COOKIE_DEMAND:
            return CookieDemanded(message[1:])
        if len(message) < _EPHEMERAL_BYTES:
            raise RemoteProtocolError("size", "the responder's message is too short")
        their_ephemeral, sealed = message[:_EPHEMERAL_BYTES], message[_EPHEMERAL_BYTES:]
        try:
            to_initiator, to_responder = nacl.bindings.crypto_kx_client_session_keys(
                self._ephemeral, self._ephemeral_secret, their_ephemeral
            )
        except nacl.exceptions.CryptoError:
            raise RemoteProtocolError("signature", "an ephemeral key of low order") from None
        self._hash = _hash(self._hash + their_ephemeral)
        key = _derive(self._hash, to_responder, b"br-hs-r")
        public_key, credential = self._open_proof(b"R", key, sealed)
        if node_id(public_key) != self._peer:
            raise RemoteProtocolError("identity", f"dialled {self._peer}, answered {node_id(public_key)}")
        role = self._admit(public_key, credential)
        self._hash = _hash(self._hash + message)
        m3 = self._seal_proof(b"I", _derive(self._hash, to_initiator, b"br-hs-i"))
        self._hash = _hash(self._hash + m3)
        self._queue(m3)
        return self._session(to_responder, to_initiator, (public_key, credential, role))


class Responder(_Handshake):
    """The side that was dialled."""

    def __init__(
        self,
        *,
        identity: Identity,
        credential: bytes,
        run_id: bytes,
        entropy: bytes,
        admit: Admit,
        prologue: bytes = TCP_PROLOGUE,
        cookies: tuple[bytes, ...] = (),
        may_come: Callable[[bytes], None] | None = None,
    ) -> None:
        """`cookies`: when there are some, M1 must carry one of them; otherwise the first is sent back instead of
        M2 and the handshake is over, having cost no cryptography.

        `may_come(public_key)` raises `RemoteProtocolError` when nobody with this key is wanted now. It is asked before
        the caller's signature is verified, which is most of what M3 costs, so it must blame nobody for the key.
        """
        super().__init__(identity, credential, run_id, entropy, prologue, admit)
        self._may_come = may_come
        self._cookies = cookies
        self._keys: tuple[bytes, bytes] | None = None
        self.cookie_sent = False
        self.cookie_shown = False
        """Whether the caller has proven that it hears us at its address."""

    def receive(self, data: bytes) -> Session | None:
        """Bytes from the initiator; the result once M3 is complete and right. Raises `RemoteProtocolError`."""
        if self._over:
            raise LocalProtocolError("handshake: it is over")
        self._inbox += data
        try:
            if self._keys is None:
                m1 = self._next_message()
                if m1 is None:
                    return None
                self._answer(m1)
                if self._keys is not None and self._inbox:
                    raise RemoteProtocolError("size", "bytes behind the first message")
                return None
            m3 = self._next_message()
            if m3 is None:
                return None
            return self._finish(m3, *self._keys)
        except RemoteProtocolError:
            self._over = True
            raise

    def _answer(self, m1: bytes) -> None:
        if not m1 or m1[0] != VERSION:
            raise RemoteProtocolError("version", f"handshake version {m1[:1].hex() or 'none'}; ours is {VERSION}")
        if len(m1) != _M1_BYTES:
            raise RemoteProtocolError("size", f"a first message of {len(m1)} bytes")
        run_id, rest = m1[1 : 1 + RUN_ID_BYTES], m1[1 + RUN_ID_BYTES :]
        if run_id != self._run_id:
            raise RemoteProtocolError("run", f"the peer asks for run {run_id.hex()}")
        their_ephemeral, cookie = rest[:_EPHEMERAL_BYTES], rest[_EPHEMERAL_BYTES:]
        if self._cookies and cookie not in self._cookies:
            self._queue(bytes((_COOKIE_DEMAND,)) + self._cookies[0])
            self.cookie_sent = True
            self._over = True
            return
        self.cookie_shown = bool(self._cookies)
        if their_ephemeral == self._ephemeral:
            raise RemoteProtocolError("replay", "our own ephemeral key comes back")
        try:
            to_responder, to_initiator = nacl.bindings.crypto_kx_server_session_keys(
                self._ephemeral, self._ephemeral_secret, their_ephemeral
            )
        except nacl.exceptions.CryptoError:
            raise RemoteProtocolError("signature", "an ephemeral key of low order") from None
        self._hash = _hash(_hash(self._hash + m1) + self._ephemeral)
        m2 = self._ephemeral + self._seal_proof(b"R", _derive(self._hash, to_responder, b"br-hs-r"))
        self._hash = _hash(self._hash + m2)
        self._queue(m2)
        self._keys = (to_responder, to_initiator)

    def _finish(self, m3: bytes, to_responder: bytes, to_initiator: bytes) -> Session:
        public_key, credential = self._open_proof(b"I", _derive(self._hash, to_initiator, b"br-hs-i"), m3)
        role = self._admit(public_key, credential)
        self._hash = _hash(self._hash + m3)
        self._keys = None
        return self._session(to_initiator, to_responder, (public_key, credential, role))


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()


def _derive(transcript: bytes, root: bytes, person: bytes) -> bytes:
    return hashlib.blake2b(transcript, digest_size=32, key=root, person=person).digest()


def _lp(content: bytes) -> bytes:
    """The content after its length, so that two fields can never be read as two others."""
    return len(content).to_bytes(4, "big") + content


def _take_lp(content: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(content[:4], "big")
    if len(content) < 4 + length:
        raise RemoteProtocolError("size", "a handshake field that ends too early")
    return content[4 : 4 + length], content[4 + length :]
