"""Connecting: several addresses of both families are raced, and a useless winner costs only itself (RFC 8305)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from protocol.base.errors import BadInputError
from protocol.base.limits import CONNECT_S
from protocol.drive.tcp import Candidate, interleaved, open_all_listeners, open_listeners, racing
from protocol.drive.transport import DialError
from tests.protocol.drive.harness import PATIENCE_S, stations


def _candidates(families: str) -> list[Candidate]:
    return [
        Candidate(number, f"a{number}:1", socket.AF_INET if family == "4" else socket.AF_INET6, (f"a{number}", 1))
        for number, family in enumerate(families)
    ]


@pytest.mark.parametrize(
    ("given", "order"),
    [("", ""), ("444", "012"), ("4466", "0213"), ("6444", "0123"), ("66446", "02134"), ("46644", "01324")],
)
def test_the_families_take_turns(given: str, order: str) -> None:
    """Whichever family comes first begins; within a family the given order stays; nobody is lost."""
    assert "".join(str(candidate.rank) for candidate in interleaved(_candidates(given))) == order


@contextlib.contextmanager
def _deaf() -> Iterator[str]:
    """An address where connecting neither works nor fails: its queue of callers is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nowhere() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        return f"127.0.0.1:{nobody.getsockname()[1]}"


async def test_an_address_that_does_not_answer_holds_nobody_up() -> None:
    """Long before the first address is given up, the second is tried and wins."""
    with _deaf() as deaf:
        async with stations("server", "server") as (one, two):
            with trio.fail_after(CONNECT_S - 1):
                link = await two.transport.dial([deaf, one.address], one.identity.node)
            assert link.address == one.address and link.path == "tcp"


class _Names(trio.abc.HostnameResolver):
    """Knows one name, which stands for an address of each family where only the second one answers."""

    async def getaddrinfo(self, host: Any, port: Any, family: int = 0, *rest: int, **more: int) -> Any:
        await trio.lowlevel.checkpoint()
        if host != b"both.example":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)),
        ]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


async def test_addresses_of_both_families_and_names(nowhere: str) -> None:
    """One peer may be given as IPv4, IPv6 and a name; what answers first wins, and what fails is told."""
    trio.socket.set_custom_hostname_resolver(_Names())
    async with stations("server", "server") as (one, two):
        port = one.address.rpartition(":")[2]
        addresses = [nowhere, f"[::1]:{port}", "nobody.example:1", f"both.example:{port}"]
        with pytest.raises(DialError) as told:
            await two.transport.dial(addresses[:3], one.identity.node)
        assert all(f"{address}: no connection" in str(told.value) for address in addresses[:3])
        link = await two.transport.dial(addresses, one.identity.node)
        assert link.address == addresses[3]


async def test_a_winner_that_is_somebody_else_leaves_the_others_their_chance() -> None:
    """The first connection leads to another node: the handshake says so, and the race goes on without it."""
    async with stations("server", "server", "server") as (one, two, three):
        link = await three.transport.dial([one.address, two.address], two.identity.node)
        assert (link.peer, link.address) == (two.identity.node, two.address)
        assert [reason for reason, _ in three.events.rejected] == ["identity"]


async def test_a_race_gives_every_connection_once_and_then_none(nowhere: str) -> None:
    """Each address that answers is won once, best first; attempts that were stopped are made again."""
    async with trio.open_nursery() as nursery:

        async def hang_up(stream: trio.SocketStream) -> None:
            await stream.aclose()

        listeners = [listener for _ in range(3) for listener in await open_listeners("127.0.0.1", 0)]
        nursery.start_soon(trio.serve_listeners, hang_up, listeners)
        addresses = [f"127.0.0.1:{listener.socket.getsockname()[1]}" for listener in listeners]
        found: list[Any] = []
        with trio.fail_after(PATIENCE_S):
            async with racing([addresses[0], nowhere, *addresses[1:]]) as race:
                while (winner := await race.next()) is not None:
                    found.append(winner[1].address)
                    await winner[0].aclose()
        assert found == addresses and [failure.partition(":")[0] for failure in race.failures] == ["127.0.0.1"]
        nursery.cancel_scope.cancel()


async def test_a_star_listens_for_both_families_at_one_port() -> None:
    """Where IPv6 is to be had; without it IPv4 alone is no error."""
    listeners = await open_listeners("*", 0)
    families = [listener.socket.family for listener in listeners]
    assert families[0] == socket.AF_INET and set(families[1:]) <= {socket.AF_INET6}
    assert len({listener.socket.getsockname()[1] for listener in listeners}) == 1
    for listener in listeners:
        await listener.aclose()


async def test_sockets_are_opened_all_or_none() -> None:
    """A port that is taken is named, and the ones before it are free again."""
    (first,), (port,) = await open_all_listeners([("127.0.0.1", 0)])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        await first.aclose()
        with pytest.raises(BadInputError, match=f"--listen 127.0.0.1:{busy}: "):
            await open_all_listeners([("127.0.0.1", port), ("127.0.0.1", busy)])
    (again, other), ports = await open_all_listeners([("127.0.0.1", port), ("127.0.0.1", 0)])
    assert ports[0] == port != ports[1] == other.socket.getsockname()[1]
    await again.aclose()
    await other.aclose()
