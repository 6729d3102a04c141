"""Two builds that speak different minor versions: the older one is told in its own words what to do (CHANGES.md)."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import trio

from protocol.base.errors import DialError
from protocol.drive import transport as transport_module
from protocol.link.codec import PROTOCOL_MINOR, decode
from protocol.link.frames import TOKEN_BYTES, Frame, Hello
from protocol.link.paths import Path
from protocol.messages import Refused
from protocol.trust.handshake import CookieDemanded, Initiator, Session
from tests.protocol.drive.harness import PATIENCE_S, Station, stations
from tests.protocol.samples import ALICE, RUN_ID


async def old_build(station: Station, hello: Hello) -> list[tuple[int, bytes]]:
    """All frames that a caller with this HELLO gets until the end."""
    stream = await trio.open_tcp_stream("127.0.0.1", int(station.address.rpartition(":")[2]))
    handshake = Initiator(
        identity=ALICE,
        credential=b"volunteer",
        run_id=RUN_ID,
        peer=station.identity.node,
        entropy=os.urandom(32),
        admit=lambda key, credential: "coordinator",
    )
    frames: list[tuple[int, bytes]] = []
    async with stream:
        with trio.fail_after(PATIENCE_S):
            await stream.send_all(handshake.data_to_send())
            session: Session | CookieDemanded | None = None
            while session is None:
                session = handshake.receive(bytes(await stream.receive_some(4096)))
            assert isinstance(session, Session)
            path = Path(session, os.urandom(24))
            await stream.send_all(handshake.data_to_send() + path.hello(hello))
            data = handshake.trailing or bytes(await stream.receive_some(4096))
            while data:
                frames += path.feed(data)
                data = b"" if frames and frames[-1][0] == Frame.END else bytes(await stream.receive_some(4096))
    return frames


@pytest.mark.parametrize("token", [b"", b"t" * TOKEN_BYTES], ids=["as 1.0", "as 1.1"])
async def test_an_older_build_reads_what_to_do(token: bytes) -> None:
    """A HELLO of the length that the caller said, then `Refused` with both versions and the remedy, then the end."""
    async with stations("coordinator") as (coordinator,):
        hello, refused, end = await old_build(coordinator, Hello(PROTOCOL_MINOR - 1, 1 << 20, token))
        assert hello[0] == Frame.HELLO and len(hello[1]) == (58 if token else 10)
        message = decode(refused[1])
        assert isinstance(message, Refused) and end[0] == Frame.END
        new, old = PROTOCOL_MINOR, PROTOCOL_MINOR - 1
        assert message.reason == (
            f"the other side speaks version 1.{new} of the protocol and this computer 1.{old}:"
            " install the newest Barnraise on this computer"
        )
        await coordinator.events.until(lambda events: events.rejected)
        assert coordinator.events.rejected[0][0] == "version" and not coordinator.events.up


async def test_a_newer_computer_names_the_older_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever dials finds it in the HELLO: a sentence, at once, and which side needs the newer build."""
    async with stations("coordinator", "volunteer") as (coordinator, volunteer):
        plain = transport_module.Transport._hello

        def older(self: transport_module.Transport, token: bytes) -> Hello:
            hello = plain(self, token)
            return Hello(PROTOCOL_MINOR - 1, hello.window_bytes, token) if self is coordinator.transport else hello

        monkeypatch.setattr(transport_module.Transport, "_hello", older)
        with pytest.raises(DialError, match="install the newest Barnraise on the other side"):
            await volunteer.transport.dial([coordinator.address], coordinator.identity.node)
        assert not volunteer.events.up


async def test_a_server_lets_no_other_version_in() -> None:
    """Members of a run speak one version; a server says so in its log."""
    async with stations("server") as (server,):
        with suppress(trio.BrokenResourceError):
            assert await old_build(server, Hello(PROTOCOL_MINOR - 1, 1 << 20, b"t" * TOKEN_BYTES)) == []
        await server.events.until(lambda events: events.rejected)
        assert server.events.rejected[0][0] == "version" and not server.events.up
