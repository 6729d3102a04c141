"""A port is forwarded by the home router while we run, and given back; what the router says is not believed blindly."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog.testing
import trio
from hypothesis import given
from hypothesis import strategies as st

from node.links.router.natpmp import Mapping, mapping_request, read_address, read_mapping
from node.links.router.port_mapping import default_router, forwardable_port, keep_mapping, with_forwarded
from node.links.router.routers import Router
from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.base.limits import ADDRESSES_MAX

PUBLIC = b"\xcb\x00\x71\x09"


class _Router:
    """A home router that forwards, or does not."""

    def __init__(
        self,
        *,
        outside: bytes = PUBLIC,
        result: int = 0,
        lifetime_s: int = 3600,
        loses: int = 0,
        raw: bytes | None = None,
        stutters: bool = False,
    ) -> None:
        self.outside = outside
        self.result = result
        self.lifetime_s = lifetime_s
        self.loses = loses
        """Requests that get lost first."""
        self.raw = raw
        """Said instead of an answer."""
        self.stutters = stutters
        """Repeats its answer to the previous request, as one does that is slow."""
        self.last = b""
        self.forwarded: dict[int, int] = {}
        self.asked = 0
        self.at = Router("")

    async def serve(self, sock: trio.socket.SocketType) -> None:
        while True:
            request, caller = await sock.recvfrom(64)
            self.asked += 1
            if self.loses:
                self.loses -= 1
                continue
            if self.stutters:
                await sock.sendto(self.last, caller)
            self.last = self.answer(request) if self.raw is None else self.raw
            await sock.sendto(self.last, caller)

    def answer(self, request: bytes) -> bytes:
        if len(request) == 2:
            return struct.pack("!BBHI", 0, 128, self.result, 7) + self.outside
        _, code, _, inside, outside, lifetime_s = struct.unpack("!BBHHHI", request)
        if lifetime_s:
            self.forwarded[inside] = outside or inside
        else:
            self.forwarded.pop(inside, None)
        return struct.pack(
            "!BBHIHHI", 0, 128 + code, self.result, 7, inside, self.forwarded.get(inside, 0), self.lifetime_s
        )


@asynccontextmanager
async def _running(router: _Router) -> AsyncIterator[_Router]:
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        router.at = Router("127.0.0.1", sock.getsockname()[1], search_at=None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.serve, sock)
            yield router
            nursery.cancel_scope.cancel()


class _Changes:
    """What `keep_mapping` reports."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[tuple[str, int] | None](16)

    def __call__(self, change: tuple[str, int] | None) -> None:
        self._send.send_nowait(change)

    async def next(self) -> tuple[str, int] | None:
        with trio.fail_after(10):
            return await self._receive.receive()


async def test_a_port_is_forwarded_while_wanted_and_given_back() -> None:
    changes = _Changes()
    async with _running(_Router(loses=1)) as router:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: keep_mapping("tcp", 7001, changes, router=router.at))
            assert await changes.next() == ("203.0.113.9", 7001)
            assert router.forwarded == {7001: 7001}
            nursery.cancel_scope.cancel()
        with trio.fail_after(10):
            while router.forwarded:
                await trio.sleep(0.01)


async def test_a_router_that_restarts_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what it granted later; a new address of the router is reported."""
    monkeypatch.setattr("node.links.router.port_mapping.LIFETIME_MIN_S", 0.1)
    changes = _Changes()
    async with _running(_Router(lifetime_s=0)) as router, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: keep_mapping("udp", 7001, changes, router=router.at))
        assert await changes.next() == ("203.0.113.9", 7001)
        router.forwarded.clear()
        router.outside = b"\xcb\x00\x71\x0a"
        assert await changes.next() == ("203.0.113.10", 7001)
        assert router.forwarded == {7001: 7001}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "router", [_Router(outside=b"\x64\x40\x00\x01"), _Router(outside=b"\x0a\x00\x00\x01"), _Router(result=2)]
)
async def test_a_router_of_no_use_announces_nothing(router: _Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a carrier's gateway, or one that refuses. It is asked again later."""
    monkeypatch.setattr("node.links.router.port_mapping.AGAIN_FIRST_S", 0.05)
    changes = _Changes()
    async with _running(router), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: keep_mapping("tcp", 7001, changes, router=router.at))
        with trio.fail_after(10):
            while router.asked < 3:
                await trio.sleep(0.01)
        assert router.forwarded == {}
        assert changes._receive.statistics().current_buffer_used == 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00\x80",
        b"\x02\x80\x00\x01" + bytes(20),
        b"\x00\x80\x00\x00" + bytes(60),
        struct.pack("!BBHI", 0, 128, 0, 7) + b"\x7f\x00\x00\x01",
        struct.pack("!BBHI", 0, 128, 0, 7) + b"\xa9\xfe\xa9\xfe",
        struct.pack("!BBHI", 0, 128, 0, 7) + b"\xff\xff\xff\xff",
    ],
)
async def test_a_router_that_talks_nonsense_is_named_and_announces_nothing(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too short, another protocol's version, too long; an address of this computer, of a cloud's metadata service, of
    everybody. The log says why, once."""
    monkeypatch.setattr("node.links.router.port_mapping.AGAIN_FIRST_S", 0.01)
    monkeypatch.setattr("node.links.router.routers.TRIES_S", (0.02,))
    changes = _Changes()
    with structlog.testing.capture_logs() as logs:
        async with _running(_Router(raw=raw)) as router, trio.open_nursery() as nursery:
            nursery.start_soon(lambda: keep_mapping("tcp", 7001, changes, router=router.at))
            with trio.fail_after(10):
                while router.asked < 3:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert changes._receive.statistics().current_buffer_used == 0
    (line,) = logs
    assert line["event"] == "port is not forwarded" and line["log_level"] == "warning" and line["reason"]


async def test_an_answer_that_comes_twice_is_no_answer_to_the_next_request() -> None:
    changes = _Changes()
    async with _running(_Router(stutters=True)) as router, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: keep_mapping("tcp", 7001, changes, router=router.at))
        assert await changes.next() == ("203.0.113.9", 7001)
        nursery.cancel_scope.cancel()


async def test_a_mapping_that_is_not_renewed_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router has forgotten it, or its owner has switched that off; when it works again that is said, too."""
    monkeypatch.setattr("node.links.router.port_mapping.LIFETIME_MIN_S", 0.02)
    monkeypatch.setattr("node.links.router.port_mapping.AGAIN_FIRST_S", 0.02)
    changes = _Changes()
    async with _running(_Router(lifetime_s=0)) as router, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: keep_mapping("tcp", 7001, changes, router=router.at))
        assert await changes.next() == ("203.0.113.9", 7001)
        router.result = 2
        assert await changes.next() is None
        router.result = 0
        assert await changes.next() == ("203.0.113.9", 7001)
        nursery.cancel_scope.cancel()


async def test_a_computer_that_has_moved_asks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another address by DHCP, another network: the mapping is good for an hour, but leads to where nobody is."""
    monkeypatch.setattr("node.links.router.port_mapping.LOOK_S", 0.01)
    place = ["192.168.0.2"]
    monkeypatch.setattr("node.links.router.port_mapping._place", lambda router: (place[0], router))
    changes = _Changes()
    async with _running(_Router()) as router, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: keep_mapping("tcp", 7001, changes, router=router.at))
        assert await changes.next() == ("203.0.113.9", 7001)
        router.outside = b"\xcb\x00\x71\x0a"
        place[0] = "192.168.0.3"
        assert await changes.next() == ("203.0.113.10", 7001)
        nursery.cancel_scope.cancel()


async def test_a_port_that_the_router_can_reach_is_chosen() -> None:
    """Never one of this computer only; without any the sentence names the option."""
    loopback = await trio.open_tcp_listeners(0, host="127.0.0.1")
    everywhere = await trio.open_tcp_listeners(0, host="0.0.0.0")
    try:
        assert forwardable_port([*loopback, *everywhere]) == everywhere[0].socket.getsockname()[1]
        with pytest.raises(BadInputError, match=r"--map-port: .*--listen"):
            forwardable_port(loopback)
    finally:
        for listener in (*loopback, *everywhere):
            await listener.aclose()


def test_what_is_forwarded_is_announced_first_and_bounded() -> None:
    own = tuple(f"[2001:db8::{n}]:1" for n in range(ADDRESSES_MAX))
    assert with_forwarded(own, None) == own
    assert with_forwarded(own, ("203.0.113.9", 7)) == ("203.0.113.9:7", *own[:-1])
    assert with_forwarded(("203.0.113.9:7",), ("203.0.113.9", 7)) == ("203.0.113.9:7",)


@given(st.binary(max_size=64))
def test_any_answer_is_read_or_refused(answer: bytes) -> None:
    for read in (read_address, lambda data: read_mapping(data, "udp", 7001)):
        try:
            found = read(answer)
        except RemoteProtocolError:
            continue
        assert not isinstance(found, Mapping) or found.internal_port == 7001


def test_requests_have_the_bytes_of_the_rfc() -> None:
    """Section 3.3: version 0, opcode, two zero bytes, internal port, wished port, lifetime."""
    assert mapping_request("udp", 7001, 7002, 3600).hex() == "000100001b591b5a00000e10"
    assert mapping_request("tcp", 7001, 0, 0).hex() == "000200001b59000000000000"


def test_the_default_route_names_the_router() -> None:
    text = (
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        "eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    )
    assert default_router(text) == "192.168.0.1"
    assert default_router("Iface\tDestination\n") is None
