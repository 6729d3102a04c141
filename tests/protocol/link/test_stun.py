"""STUN's one question: the RFC's own vectors, a real responder, and nothing that a stranger can gain from it."""

from __future__ import annotations

import random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from protocol.drive.stun import ANSWERS_BURST, NETWORK_ANSWERS_BURST, StunAsker, StunResponder
from protocol.drive.tcp import open_listeners
from protocol.link import stun

TRANSACTION = bytes(range(12))
RFC5769_TRANSACTION = bytes.fromhex("b7e7a701bc34d686fa87dfae")
RFC5769_IPV4 = bytes.fromhex(
    "0101003c2112a442b7e7a701bc34d686fa87dfae8022000b7465737420766563746f7220002000080001a147e112a643"
    "000800142b91f599fd9e90c38c7489f92af9ba53f06be7d780280004c07d4c96"
)
"""RFC 5769 section 2.2."""
RFC5769_IPV6 = bytes.fromhex(
    "010100482112a442b7e7a701bc34d686fa87dfae8022000b7465737420766563746f722000200014"
    "0002a1470113a9faa5d3f179bc25f4b5bed2b9d900080014a382954e4be67bf11784c97c8292c275bfe3ed4180280004c8fb0b4c"
)
"""RFC 5769 section 2.3."""


def test_the_vectors_of_the_rfc() -> None:
    """Answers of another implementation are read, over both families."""
    assert stun.seen(RFC5769_IPV4, RFC5769_TRANSACTION) == ("192.0.2.1", 32853)
    assert stun.seen(RFC5769_IPV6, RFC5769_TRANSACTION) == ("2001:db8:1234:5678:11:2233:4455:6677", 32853)
    assert stun.seen(RFC5769_IPV4, TRANSACTION) is None


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [("203.0.113.7", 1, "203.0.113.7"), ("::ffff:10.0.0.1", 65535, "10.0.0.1"), ("2001:db8::1", 443, "2001:db8::1")],
)
def test_what_is_answered_is_what_is_seen(host: str, port: int, told: str) -> None:
    """And never longer than the question."""
    question = stun.question(TRANSACTION)
    made = stun.answer(question, host, port)
    assert made is not None and not made[1] and len(made[0]) <= len(question)
    assert stun.seen(made[0], TRANSACTION) == (told, port)
    made = stun.answer(stun.question(TRANSACTION, other_port=True), host, port)
    assert made is not None and made[1]


@given(st.binary(max_size=600))
def test_noise_is_answered_by_nothing(data: bytes) -> None:
    """No bytes raise."""
    stun.answer(data, "203.0.113.7", 9)
    assert stun.seen(data, TRANSACTION) is None


def test_a_message_cut_or_changed_anywhere_raises_nothing() -> None:
    """Every cut of a question is none; changed bits are another question or none."""
    question = stun.question(TRANSACTION, other_port=True)
    assert all(stun.answer(question[:end], "203.0.113.7", 9) is None for end in range(len(question)))
    for bit in range(8 * len(question)):
        changed = bytearray(question)
        changed[bit // 8] ^= 1 << bit % 8
        made = stun.answer(bytes(changed), "203.0.113.7", 9)
        assert made is None or len(made[0]) <= stun.ANSWER_BYTES_MAX


@pytest.mark.slow
@pytest.mark.trio
async def test_a_responder_beside_a_listener(nursery: trio.Nursery) -> None:
    """It says from where it is asked; asked for the other port, it answers from there."""
    listeners = await open_listeners("0.0.0.0", 0)
    port = listeners[0].socket.getsockname()[1]
    nursery.start_soon(StunResponder().serve, listeners)
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock, trio.fail_after(20):
        await sock.bind(("127.0.0.1", 0))
        asker = StunAsker(sock)
        nursery.start_soon(asker.run)
        assert await asker.ask("127.0.0.1", port) == sock.getsockname()
        assert await asker.ask("127.0.0.1", port, other_port=True) == sock.getsockname()
        assert await asker.ask("127.0.0.1", 9) is None
        nursery.cancel_scope.cancel()
    for listener in listeners:
        await listener.aclose()


@pytest.mark.trio
async def test_the_answer_comes_from_the_address_that_was_asked(nursery: trio.Nursery) -> None:
    """Also when the listener stands for all addresses: a connected socket hears from no other."""
    listeners = await open_listeners("0.0.0.0", 0)
    port = listeners[0].socket.getsockname()[1]
    nursery.start_soon(StunResponder().serve, listeners)
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock, trio.fail_after(20):
        await sock.bind(("127.0.0.1", 0))
        await sock.connect(("127.0.0.77", port))
        await trio.testing.wait_all_tasks_blocked()
        await sock.send(stun.question(TRANSACTION))
        assert stun.seen(await sock.recv(1024), TRANSACTION) == sock.getsockname()
        nursery.cancel_scope.cancel()
    for listener in listeners:
        await listener.aclose()


@pytest.mark.trio
async def test_a_flood_is_answered_in_measure(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    """However much is asked, and by whom, buckets bound what is answered; one network leaves most to the others."""
    responder = StunResponder()
    assert sum(responder._may("192.0.2.7") for _ in range(20_000)) == NETWORK_ANSWERS_BURST
    assert responder._may("198.51.100.1"), "a flood in one network's name takes nobody else's answers"
    granted = sum(responder._may(f"203.0.{number % 256}.1") for number in range(20_000))
    assert granted == ANSWERS_BURST - NETWORK_ANSWERS_BURST - 1
    await trio.sleep(1.0)
    assert sum(responder._may(f"203.0.{number % 256}.1") for number in range(20_000)) == 100


def test_seeded_noise_around_a_real_answer() -> None:
    """An answer with other attributes before and behind is read; one with a wrong length is not."""
    draw = random.Random(5)
    made = stun.answer(stun.question(TRANSACTION), "203.0.113.7", 9)
    assert made is not None
    body = made[0][20:]
    for _ in range(200):
        noise = draw.randbytes(4 * draw.randrange(8))
        attribute = (0x8022).to_bytes(2, "big") + len(noise).to_bytes(2, "big") + noise
        content = attribute + body if draw.random() < 0.5 else body + attribute
        message = made[0][:2] + len(content).to_bytes(2, "big") + made[0][4:20] + content
        assert stun.seen(message, TRANSACTION) == ("203.0.113.7", 9)
        assert stun.seen(message[:-4], TRANSACTION) is None
