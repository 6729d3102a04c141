"""A router that speaks UPnP only forwards too; whatever it points to elsewhere, or says too much of, is refused."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from node.links.router import upnp
from node.links.router.routers import NoMappingError, Router, ask
from node.links.router.upnp import REPLY_BYTES_MAX, Place, RefusedError, read_address, read_description, read_location
from protocol.base.errors import RemoteProtocolError

HERE = "127.0.0.1"
DESCRIPTION = """<?xml version="1.0"?><root><device><deviceList><device><serviceList>
<service><serviceType>urn:schemas-upnp-org:service:WANCommonInterfaceConfig:1</serviceType>
<controlURL>/ctl/CmnIfCfg</controlURL></service>
<service><serviceType>urn:schemas-upnp-org:service:WANIPConnection:1</serviceType>
<controlURL>{control}</controlURL></service>
</serviceList></device></deviceList></device></root>"""
AT = Place(5000, "/root.xml")


def found(location: str) -> bytes:
    """An answer to a search."""
    return f"HTTP/1.1 200 OK\r\nST: upnp:rootdevice\r\nLocation: {location}\r\n\r\n".encode()


class _Router:
    """A home router; what it says can be replaced by something worse."""

    def __init__(self) -> None:
        self.location = ""
        self.outside = "203.0.113.9"
        self.padding = 0
        self.errors: list[int] = []
        """Codes with which the next orders to forward are refused."""
        self.silent = False
        """Takes connections and says nothing."""
        self.forwarded: dict[int, tuple[str, int]] = {}
        self.orders: list[str] = []

    async def answer_searches(self, sock: trio.socket.SocketType) -> None:
        while True:
            _, caller = await sock.recvfrom(2048)
            await sock.sendto(found(self.location), caller)

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            if self.silent:
                await trio.sleep_forever()
            request = b""
            while b"\r\n\r\n" not in request or len(request) < _length(request):
                more = await stream.receive_some()
                if not more:
                    return
                request += more
            status, body = self._reply(request.decode())
            body += " " * self.padding
            head = f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\nContent-Type: text/xml\r\n\r\n"
            chunk = f"{len(body):x}\r\n{body}\r\n0\r\n\r\n"
            try:
                await stream.send_all((head + chunk).encode())
            except trio.BrokenResourceError:
                return  # the caller had enough

    def _reply(self, request: str) -> tuple[int, str]:
        if request.startswith("GET "):
            return 200, DESCRIPTION.format(control="/ctl?a=1&amp;b=2")
        assert request.startswith("POST /ctl?a=1&b=2 ")
        field = dict(re.findall(r"<(New\w+)>([^<]*)</", request))
        (action,) = re.findall(r'soapaction: "urn:schemas-upnp-org:service:WANIPConnection:1#(\w+)"', request, re.I)
        self.orders.append(action)
        if action == "GetExternalIPAddress":
            return 200, f"<s:Body><NewExternalIPAddress>{self.outside}</NewExternalIPAddress></s:Body>"
        if action == "DeletePortMapping":
            self.forwarded.pop(int(field["NewExternalPort"]))
        elif self.errors:
            return 500, f"<detail><UPnPError><errorCode>{self.errors.pop(0)}</errorCode></UPnPError></detail>"
        else:
            assert field["NewProtocol"] == "TCP" and field["NewLeaseDuration"] == "3600"
            inside = field["NewInternalClient"], int(field["NewInternalPort"])
            self.forwarded[int(field["NewExternalPort"])] = inside
        return 200, "<s:Body/>"


def _length(request: bytes) -> int:
    """Of a request whose head is complete."""
    told = re.search(rb"content-length: (\d+)", request.lower())
    return request.index(b"\r\n\r\n") + 4 + (int(told[1]) if told else 0)


@asynccontextmanager
async def running(router: _Router) -> AsyncIterator[Router]:
    """The router at work, on loopback; by NAT-PMP nobody is there."""
    with (
        trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody,
    ):
        await sock.bind((HERE, 0))
        nobody.bind((HERE, 0))
        nobody.connect(sock.getsockname())  # hears nobody else, so that others are told that nobody is there
        listeners = await trio.open_tcp_listeners(0, host=HERE)
        router.location = f"http://{HERE}:{listeners[0].socket.getsockname()[1]}/root.xml"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, router.serve, listeners)
            nursery.start_soon(router.answer_searches, sock)
            yield Router(HERE, nobody.getsockname()[1], sock.getsockname())
            nursery.cancel_scope.cancel()


async def test_a_port_is_forwarded_and_given_back() -> None:
    """NAT-PMP is tried before; the description may be chunked, its URL relative and escaped."""
    router = _Router()
    async with running(router) as at:
        grant = await ask(at, "tcp", 7001, 7001)
        assert (grant.address, grant.port, grant.by) == ("203.0.113.9", 7001, "UPnP")
        assert router.forwarded == {7001: (HERE, 7001)}
        await grant.release()
        assert router.forwarded == {}


async def test_somebody_elses_port_is_left_alone() -> None:
    """The next ones are tried, and not all of them."""
    router = _Router()
    async with running(router) as at:
        router.errors = [718, 718]
        assert (await ask(at, "tcp", 7001, 7001)).port == 7003
        router.errors = [718] * 9
        with pytest.raises(NoMappingError, match="has given that port to another computer"):
            await ask(at, "tcp", 7001, 7001)


@pytest.mark.parametrize(
    ("code", "sentence"), [(606, "does not allow it"), (725, "only for ever"), (99999, "answers with error 99999")]
)
async def test_a_refusal_is_named(code: int, sentence: str) -> None:
    """A mapping for ever is none that we ask for: nobody would end it after a crash."""
    router = _Router()
    router.errors = [code]
    async with running(router) as at:
        with pytest.raises(NoMappingError, match=f"by NAT-PMP the router cannot be reached.*; by UPnP .*{sentence}"):
            await ask(at, "tcp", 7001, 7001)
        assert router.forwarded == {}


@pytest.mark.parametrize("outside", ["10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "", "a.example", "::1"])
async def test_an_address_of_no_use_ends_it(outside: str) -> None:
    """Behind a carrier's gateway, or nonsense: nothing is ordered."""
    router = _Router()
    router.outside = outside
    async with running(router) as at:
        with pytest.raises(NoMappingError):
            await ask(at, "tcp", 7001, 7001)
        assert router.orders == ["GetExternalIPAddress"]


async def test_a_router_that_says_too_much_is_not_heard_to_the_end() -> None:
    """A description has a size."""
    router = _Router()
    router.padding = REPLY_BYTES_MAX
    async with running(router) as at:
        with pytest.raises(NoMappingError, match="more than anybody needs"):
            await ask(at, "tcp", 7001, 7001)


async def test_a_router_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection and leaves it at that."""
    monkeypatch.setattr("node.links.router.routers.EXCHANGE_S", 0.05)
    router = _Router()
    router.silent = True
    async with running(router) as at:
        with pytest.raises(NoMappingError, match="takes too long"):
            await ask(at, "tcp", 7001, 7001)


async def test_only_the_router_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody in the network may answer a search: a television, or worse."""
    monkeypatch.setattr("node.links.router.routers.SEARCH_TRIES_S", (0.05,))
    monkeypatch.setattr("node.links.router.routers.TRIES_S", (0.05,))
    async with running(_Router()) as at:
        with pytest.raises(NoMappingError, match="by UPnP the router does not answer"):
            await ask(Router("127.0.0.2", at.natpmp_port, at.search_at), "tcp", 7001, 7001)


@pytest.mark.parametrize(
    "url",
    [
        "http://192.0.2.1:5000/ctl",
        "https://127.0.0.1/ctl",
        "http://127.0.0.1.a.example/ctl",
        "http://127.0.0.1@192.0.2.1/ctl",
        "//192.0.2.1/ctl",
        "file:///etc/passwd",
        "http://127.0.0.1:99999/ctl",
        "http://[::1/ctl",
        "/ctl HTTP/1.1",
        "/ctl\x00",
        "/ctl\nX: y",
        "/" + 600 * "a",
        "",
    ],
)
def test_what_it_points_to_must_be_its_own(url: str) -> None:
    """Else a device at home could send us to any server, or put words into a request."""
    for read in (
        lambda: read_location(found(url), HERE),
        lambda: read_description(DESCRIPTION.format(control=url).encode(), HERE, AT),
    ):
        with pytest.raises(RemoteProtocolError):
            read()


@pytest.mark.parametrize("url", ["/ctl", "ctl", "http://127.0.0.1:5000/ctl"])
def test_its_own_may_be_relative(url: str) -> None:
    """To where it describes itself."""
    assert read_description(DESCRIPTION.format(control=url).encode(), HERE, AT).place == Place(5000, "/ctl")


@given(st.binary(max_size=300) | st.text(max_size=300).map(found))
def test_any_answer_is_read_or_refused(answer: bytes) -> None:
    """By a named error, whatever it is."""
    control = b"</serviceType><controlURL>" + answer + b"</controlURL></service>"
    for read in (
        lambda: read_location(answer, HERE),
        lambda: read_description(b"<service><serviceType>" + upnp.SERVICES[0].encode() + control, HERE, AT),
        lambda: read_address(answer.decode("latin-1")),
        lambda: upnp.read_reply(500, b"<errorCode>" + answer + b"</errorCode>"),
    ):
        try:
            read()
        except (RemoteProtocolError, RefusedError):
            continue


@pytest.mark.timeout(30)
@pytest.mark.parametrize("piece", ["<service>", "<errorCode>", "<serviceType>", "&amp;", "<service></service>"])
def test_the_longest_answer_costs_little(piece: str) -> None:
    """Work grows with the length, not with its square: that would take minutes."""
    reply = (piece * (REPLY_BYTES_MAX // len(piece))).encode()
    with pytest.raises(RemoteProtocolError):
        read_description(reply, HERE, AT)
    with pytest.raises(RemoteProtocolError):
        upnp.read_reply(500, reply)
