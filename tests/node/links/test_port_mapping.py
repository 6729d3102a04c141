"""A port is forwarded by the home router while we run, and given back; what the router says is not believed blindly."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from node.links.natpmp import Mapping, mapping_request, read_address, read_mapping
from node.links.port_mapping import default_router, keep_mapping
from protocol.errors import RemoteProtocolError

PUBLIC = b"\xcb\x00\x71\x09"


class _Router:
    """A home router that forwards, or does not."""

    def __init__(self, *, outside: bytes = PUBLIC, result: int = 0, lifetime_s: int = 3600, loses: int = 0) -> None:
        self.outside = outside
        self.result = result
        self.lifetime_s = lifetime_s
        self.loses = loses
        """Requests that get lost first."""
        self.forwarded: dict[int, int] = {}
        self.asked = 0
        self.address = ("", 0)

    async def serve(self, sock: trio.socket.SocketType) -> None:
        while True:
            request, caller = await sock.recvfrom(64)
            self.asked += 1
            if self.loses:
                self.loses -= 1
                continue
            await sock.sendto(self.answer(request), caller)

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
        router.address = sock.getsockname()
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
            nursery.start_soon(lambda: keep_mapping("tcp", 7001, changes, router=router.address))
            assert await changes.next() == ("203.0.113.9", 7001)
            assert router.forwarded == {7001: 7001}
            nursery.cancel_scope.cancel()
        with trio.fail_after(10):
            while router.forwarded:
                await trio.sleep(0.01)


async def test_a_router_that_restarts_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what it granted later; a new address of the router is reported."""
    monkeypatch.setattr("node.links.port_mapping.LIFETIME_MIN_S", 0.1)
    changes = _Changes()
    async with _running(_Router(lifetime_s=0)) as router, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: keep_mapping("udp", 7001, changes, router=router.address))
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
    monkeypatch.setattr("node.links.port_mapping.AGAIN_S", 0.05)
    changes = _Changes()
    async with _running(router), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: keep_mapping("tcp", 7001, changes, router=router.address))
        with trio.fail_after(10):
            while router.asked < 3:
                await trio.sleep(0.01)
        assert router.forwarded == {}
        assert changes._receive.statistics().current_buffer_used == 0
        nursery.cancel_scope.cancel()


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
