"""The handshake proves who is who, and nothing that differs by one bit gets through (S1, S4, S5)."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import pytest

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.base.limits import COOKIE_S, CREDENTIAL_BYTES_MAX
from protocol.trust.handshake import NO_COOKIE, CookieDemanded, CookieJar, Initiator, Responder, Session
from protocol.trust.identity import Identity
from tests.protocol.samples import ALICE, BOB, COORDINATOR, RUN_ID

_EVE = Identity(b"\x0e" * 32)


def _admit(key: bytes, credential: bytes) -> str:
    return "server"


def _initiator(entropy: bytes = b"\x0a" * 32, **changes: object) -> Initiator:
    options: dict[str, object] = {
        "identity": ALICE, "credential": b"alice's paper", "run_id": RUN_ID, "peer": BOB.node,
        "entropy": entropy, "admit": _admit,
    } | changes  # fmt: skip
    return Initiator(**options)  # type: ignore[arg-type]


def _responder(entropy: bytes = b"\x0b" * 32, **changes: object) -> Responder:
    options: dict[str, object] = {
        "identity": BOB, "credential": b"bob's paper", "run_id": RUN_ID, "entropy": entropy, "admit": _admit,
    } | changes  # fmt: skip
    return Responder(**options)  # type: ignore[arg-type]


def _shake(initiator: Initiator, responder: Responder) -> tuple[Session, Session]:
    assert responder.receive(initiator.data_to_send()) is None
    ours = initiator.receive(responder.data_to_send())
    theirs = responder.receive(initiator.data_to_send())
    assert isinstance(ours, Session) and theirs is not None
    return ours, theirs


def _refused(receive: Callable[[bytes], object], data: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        receive(data)
    return caught.value.reason


def _transcript() -> tuple[bytes, bytes, bytes]:
    initiator, responder = _initiator(), _responder()
    m1 = initiator.data_to_send()
    responder.receive(m1)
    m2 = responder.data_to_send()
    initiator.receive(m2)
    return m1, m2, initiator.data_to_send()


def test_both_sides_agree() -> None:
    """Session id and keys are shared, each direction has its own key, and each side knows the other."""
    ours, theirs = _shake(_initiator(), _responder())
    assert ours.session_id == theirs.session_id
    assert (ours.send_key, ours.receive_key) == (theirs.receive_key, theirs.send_key)
    assert ours.send_key != ours.receive_key
    assert (ours.peer, ours.credential) == (BOB.node, b"bob's paper")
    assert (theirs.peer, theirs.credential) == (ALICE.node, b"alice's paper")
    assert ours.send_key.hex() not in repr(ours) and repr(ours.send_key) not in repr(ours)


def test_bytes_may_come_one_by_one() -> None:
    """The handshake does not depend on how the stream is cut; records behind M3 are handed on."""
    initiator, responder = _initiator(), _responder()
    for byte in initiator.data_to_send():
        assert responder.receive(bytes((byte,))) is None
    answer = responder.data_to_send()
    assert all(initiator.receive(bytes((byte,))) is None for byte in answer[:-1])
    assert isinstance(initiator.receive(answer[-1:]), Session)
    assert isinstance(responder.receive(initiator.data_to_send() + b"records"), Session)
    assert responder.trailing == b"records"


@pytest.mark.parametrize("message", [0, 1, 2])
def test_every_flipped_bit_fails(message: int) -> None:
    """Of all single-bit changes of M1, M2 and M3 not one ends in a session on either side (S1, exhaustive)."""
    honest = _transcript()
    for bit in range(8 * len(honest[message])):
        changed = bytearray(honest[message])
        changed[bit // 8] ^= 1 << bit % 8
        initiator, responder = _initiator(), _responder()
        first = initiator.data_to_send()
        try:
            responder.receive(bytes(changed) if message == 0 else first)
            second = responder.data_to_send()
            if not second:
                continue  # a length that announces more than will come: the timeout's business
            result = initiator.receive(bytes(changed) if message == 1 else second)
            assert message == 2 or result is None, f"bit {bit} of M{message + 1} was accepted by the initiator"
            theirs = responder.receive(bytes(changed) if message == 2 else initiator.data_to_send())
            assert theirs is None, f"bit {bit} of M{message + 1} was accepted by the responder"
        except RemoteProtocolError:
            continue


@pytest.mark.parametrize("message", [0, 1, 2])
def test_every_truncation_and_extension_fails(message: int) -> None:
    """A message that is shorter or longer by any number of bytes, with its length made to fit, is refused."""
    honest = [part[4:] for part in _transcript()]
    whole = honest[message]
    for changed in [whole[:end] for end in range(len(whole))] + [whole + bytes(extra) for extra in (1, 2, 64, 4000)]:
        framed = len(changed).to_bytes(4, "big") + changed
        initiator, responder = _initiator(), _responder()
        first = initiator.data_to_send()
        if message == 0:
            assert _refused(responder.receive, framed) in ("size", "version")
            continue
        responder.receive(first)
        second = responder.data_to_send()
        if message == 1:
            if len(changed) == 17 and changed[0] == 2:
                continue  # a cookie demand
            assert _refused(initiator.receive, framed) in ("size", "signature")
            continue
        initiator.receive(second)
        assert _refused(responder.receive, framed) in ("size", "signature")


def test_bytes_behind_a_message_fail() -> None:
    """Nothing may follow M1 or M2 before they are answered (S5: no room for an extra field)."""
    m1, m2, _ = _transcript()
    assert _refused(_responder().receive, m1 + b"\0") == "size"
    assert _refused(_initiator().receive, m2 + b"\0") == "size"


def test_versions_and_runs() -> None:
    """Another version, an unknown one and another run are refused by name (S5)."""
    m1, _, _ = _transcript()
    for version in (0, 2, 255):
        assert _refused(_responder().receive, m1[:4] + bytes((version,)) + m1[5:]) == "version"
    assert _refused(_responder(run_id=bytes(16)).receive, m1) == "run"


def test_wrong_peer() -> None:
    """The initiator sends no proof of itself to anybody but the node that it dialled."""
    initiator, responder = _initiator(), _responder(identity=_EVE)
    responder.receive(initiator.data_to_send())
    assert _refused(initiator.receive, responder.data_to_send()) == "identity"
    assert initiator.data_to_send() == b""


def test_replays() -> None:
    """Recorded messages are worth nothing in another session, nor when mixed between parallel ones (S4)."""
    m1, m2, m3 = _transcript()
    responder = _responder(b"\x0c" * 32)
    responder.receive(m1)
    assert responder.data_to_send() != m2
    assert _refused(responder.receive, m3) == "signature"
    initiator = _initiator(b"\x0d" * 32)
    initiator.data_to_send()
    assert _refused(initiator.receive, m2) == "signature"
    one, two = _responder(b"\x0c" * 32), _responder(b"\x0d" * 32)
    first, second = _initiator(b"\x1c" * 32), _initiator(b"\x1d" * 32)
    one.receive(first.data_to_send())
    two.receive(second.data_to_send())
    assert _refused(first.receive, two.data_to_send()) == "signature"


def test_reflection() -> None:
    """A node does not accept its own messages or its own key as a peer (S4)."""
    both = _initiator(peer=ALICE.node)
    m1 = both.data_to_send()
    assert _refused(both.receive, m1) in ("size", "signature")
    initiator, responder = _initiator(peer=ALICE.node), _responder(identity=ALICE)
    responder.receive(initiator.data_to_send())
    assert _refused(initiator.receive, responder.data_to_send()) == "replay"
    mirror = _responder(entropy=b"\x0a" * 32)
    assert _refused(mirror.receive, _initiator(entropy=b"\x0a" * 32).data_to_send()) == "replay"


def test_low_order_points() -> None:
    """Ephemeral keys that make the shared secret known are refused on both sides."""
    low_order = [
        bytes(32),
        b"\x01" + bytes(31),
        bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    ]
    m1, m2, _ = _transcript()
    for point in low_order:
        assert _refused(_responder().receive, m1[:21] + point + m1[53:]) == "signature"
        initiator = _initiator()
        assert _refused(initiator.receive, m2[:4] + point + m2[36:]) == "signature"


def test_prologues_must_agree() -> None:
    """What lies outside the handshake (a data channel's certificates) is bound by it."""
    initiator, responder = _initiator(prologue=b"webrtc one"), _responder(prologue=b"webrtc two")
    responder.receive(initiator.data_to_send())
    assert _refused(initiator.receive, responder.data_to_send()) == "signature"


def test_credentials_are_judged_after_the_proof() -> None:
    """`admit` sees only keys whose owner has signed, and its refusal ends the handshake on either side."""
    asked: list[bytes] = []

    def refuse(key: bytes, credential: bytes) -> str:
        asked.append(key)
        raise RemoteProtocolError("credential", "not today")

    initiator, responder = _initiator(), _responder(admit=refuse)
    m1 = initiator.data_to_send()
    responder.receive(m1)
    initiator.receive(responder.data_to_send())
    m3 = initiator.data_to_send()
    damaged = m3[:-1] + bytes((m3[-1] ^ 1,))
    other = _responder(admit=refuse)
    other.receive(m1)
    assert _refused(other.receive, damaged) == "signature" and asked == []
    assert _refused(responder.receive, m3) == "credential" and asked == [ALICE.public_key]
    initiator, responder = _initiator(admit=refuse), _responder()
    responder.receive(initiator.data_to_send())
    assert _refused(initiator.receive, responder.data_to_send()) == "credential"
    assert initiator.data_to_send() == b""


def test_an_ended_handshake_stays_ended() -> None:
    """After an end, good or bad, no further byte is taken."""
    initiator, responder = _initiator(), _responder()
    _shake(initiator, responder)
    for side in (initiator, responder):
        with pytest.raises(LocalProtocolError):
            side.receive(b"\0")
    failed = _responder()
    assert _refused(failed.receive, b"\xff\xff\xff\xff") == "size"
    with pytest.raises(LocalProtocolError):
        failed.receive(b"\0")


def test_cookies() -> None:
    """A busy responder answers only callers that show the cookie of their address."""
    jar = CookieJar(b"\x0f" * 32)
    cookies = jar.cookies("192.0.2.1", 1000.0)
    responder = _responder(cookies=cookies)
    assert responder.receive(_initiator().data_to_send()) is None and responder.cookie_sent
    demand = _initiator()
    demand.data_to_send()
    answer = demand.receive(responder.data_to_send())
    assert answer == CookieDemanded(cookies[0])
    _shake(_initiator(cookie=cookies[0]), _responder(cookies=jar.cookies("192.0.2.1", 1000.0 + COOKIE_S)))
    for address, now in (("192.0.2.2", 1000.0), ("192.0.2.1", 1000.0 + 2 * COOKIE_S)):
        refused = _responder(cookies=jar.cookies(address, now))
        refused.receive(_initiator(cookie=cookies[0]).data_to_send())
        assert refused.cookie_sent
    assert NO_COOKIE not in cookies


def test_own_mistakes_are_ours() -> None:
    """A credential or an entropy of a wrong length is a bug of the caller, not the peer's."""
    with pytest.raises(LocalProtocolError):
        _initiator(credential=bytes(CREDENTIAL_BYTES_MAX + 1))
    with pytest.raises(LocalProtocolError):
        _responder(entropy=b"short")


@pytest.mark.slow
def test_ten_thousand_handshakes_leave_nothing_behind() -> None:
    """10,000 random handshakes succeed, all with different keys, and hold no memory afterwards (S1)."""
    rng = random.Random(1)
    seen: set[bytes] = set()

    def shake() -> None:
        ours, theirs = _shake(
            _initiator(rng.randbytes(32), credential=rng.randbytes(rng.randrange(2049))), _responder(rng.randbytes(32))
        )
        assert ours.session_id == theirs.session_id and ours.send_key == theirs.receive_key
        seen.add(ours.send_key)

    for _ in range(100):
        shake()
    seen.clear()
    tracemalloc.start()
    for _ in range(200):
        _shake(_initiator(rng.randbytes(32)), _responder(rng.randbytes(32)))
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held_bytes < 200 * 1024
    for _ in range(10_000):
        shake()
    assert len(seen) == 10_000


def test_random_bytes() -> None:
    """Whatever a stranger sends first, the responder raises nothing but `RemoteProtocolError` and answers nothing."""
    rng = random.Random(2)
    for _ in range(2000):
        responder = _responder()
        with suppress(RemoteProtocolError):
            responder.receive(rng.randbytes(rng.randrange(200)))
        assert responder.data_to_send() == b""


def test_the_coordinator_needs_no_special_path() -> None:
    """The handshake knows nothing of roles: what `admit` says is what the session holds."""
    ours, _ = _shake(
        _initiator(peer=COORDINATOR.node, admit=lambda key, paper: "coordinator"), _responder(identity=COORDINATOR)
    )
    assert ours.role == "coordinator"


def test_a_web_proxy_in_between_is_named() -> None:
    """Its first four letters would otherwise be the length of a message of a gigabyte."""
    initiator = Initiator(
        identity=ALICE, credential=b"", run_id=RUN_ID, peer=BOB.node, entropy=b"\x0a" * 32, admit=lambda *_: "server"
    )
    with pytest.raises(RemoteProtocolError, match="an HTTP server or proxy speaks there"):
        initiator.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")
