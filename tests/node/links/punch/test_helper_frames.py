"""What the daemon reads from its helper: any cut, any bound, any nonsense."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.links.punch.helper_frames import (
    DATA_BYTES_MAX,
    ORDER_BYTES_MAX,
    Census,
    Connect,
    Credit,
    Ended,
    FrameReader,
    Gather,
    Order,
    SocketReady,
    StunServer,
    TurnServer,
    data_frame,
    order_frame,
)
from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.link.candidates import CANDIDATES_MAX, Candidate

FRAMES: list[tuple[int, Order | bytes]] = [
    (1, SocketReady("203.0.113.9", 50000)),
    (2, b"bytes of a stream"),
    (1, Ended("the peer closed the connection", True)),
    (3, Credit(65536)),
    (2**32 - 1, b"x" * DATA_BYTES_MAX),
    (0, Census(1, 2, 3)),
]


def _wire() -> bytes:
    return b"".join(
        data_frame(number, frame) if isinstance(frame, bytes) else order_frame(number, frame)
        for number, frame in FRAMES
    )


@given(st.lists(st.integers(1, 5000), max_size=40))
def test_frames_come_out_whole_however_the_bytes_are_cut(lengths: list[int]) -> None:
    reader, wire, found = FrameReader(daemon=True), _wire(), []
    for length in [*lengths, len(wire)]:
        found += reader.receive(wire[:length])
        wire = wire[length:]
    assert found == FRAMES


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_noise_is_refused_or_waited_for_and_never_heaped_up(pieces: list[bytes]) -> None:
    reader = FrameReader(daemon=True)
    with suppress(RemoteProtocolError):
        for piece in pieces:
            reader.receive(piece)
            assert len(reader._inbox) <= DATA_BYTES_MAX + 9


@pytest.mark.parametrize(
    "head",
    [
        (6 + DATA_BYTES_MAX).to_bytes(4, "big") + bytes(4) + b"\0",
        (6 + ORDER_BYTES_MAX).to_bytes(4, "big") + bytes(4) + b"\1",
        (5).to_bytes(4, "big") + bytes(4) + b"\0",
        (0).to_bytes(4, "big") + bytes(4) + b"\0",
        (2**32 - 1).to_bytes(4, "big") + bytes(4) + b"\0",
        (10).to_bytes(4, "big") + bytes(4) + b"\2",
    ],
)
def test_a_frame_of_a_wrong_length_or_kind_is_refused_by_its_head(head: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        FrameReader(daemon=True).receive(head)


def test_each_side_reads_only_what_the_other_may_say() -> None:
    with pytest.raises(RemoteProtocolError):
        FrameReader(daemon=True).receive(order_frame(1, Gather(True, (), (), False, False, 1.0)))
    with pytest.raises(RemoteProtocolError):
        FrameReader(daemon=False).receive(order_frame(1, SocketReady("203.0.113.9", 50000)))


@pytest.mark.parametrize(
    "order",
    [
        SocketReady("x" * 257, 50000),
        SocketReady("203.0.113.9", 0),
        Ended("x" * 257),
        Credit(0),
        Credit(2**40),
        Census(-1, 0, 0),
    ],
)
def test_what_stands_in_an_order_is_bounded(order: Order) -> None:
    with pytest.raises(RemoteProtocolError):
        FrameReader(daemon=True).receive(order_frame(1, order))


def test_the_largest_orders_fit() -> None:
    widest = Candidate("relay", b"\xff" * 16, 65535)
    connect = Connect("u" * 32, "p" * 64, bytes(32), (widest,) * CANDIDATES_MAX, ("quic", "channel"), True, 6.0)
    turn = TurnServer("h" * 253, 3478, "u" * 256, "p" * 256, True)
    gather = Gather(True, (StunServer("h" * 253),) * 4, (turn,) * 4, True, True, 1.5)
    for order in (connect, gather):
        assert FrameReader(daemon=False).receive(order_frame(7, order)) == [(7, order)]


def test_we_make_no_frame_that_would_be_refused() -> None:
    for data in (b"", bytes(DATA_BYTES_MAX + 1)):
        with pytest.raises(LocalProtocolError):
            data_frame(1, data)


def test_no_repr_shows_a_password() -> None:
    assert "secret" not in repr(TurnServer("turn.example", 3478, "user", "secret", False))
