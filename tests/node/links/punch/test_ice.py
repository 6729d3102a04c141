"""What a node finds out about its own addresses before it offers them."""

from __future__ import annotations

import asyncio
from typing import Any

from aioice.stun import Class, Message, Method, parse_message

from node.links.punch.helper_frames import StunServer
from node.links.punch.ice import LATECOMERS_S, Ice

SEEN = ("203.0.113.9", 7000)


class _SlowStun(asyncio.DatagramProtocol):
    """Answers every question, later than one waits for latecomers."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        request = parse_message(data)
        answer = Message(Method.BINDING, Class.RESPONSE, transaction_id=request.transaction_id)
        answer.attributes["XOR-MAPPED-ADDRESS"] = SEEN
        asyncio.get_running_loop().call_later(LATECOMERS_S + 0.2, self.transport.sendto, bytes(answer), addr)


def test_a_home_with_both_families_learns_its_public_ipv4_address_from_a_slow_server() -> None:
    # An IPv6 socket has nothing to ask; that it is done at once says nothing about the others.
    async def gather() -> list[tuple[str, str, int]]:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(_SlowStun, local_addr=("127.0.0.1", 0))
        ice = Ice(controlling=True, may_reach=lambda ip, port: True)
        try:
            server = StunServer("127.0.0.1", transport.get_extra_info("sockname")[1])
            candidates = await ice.gather(["127.0.0.1", "::1"], [server], [], within_s=10.0)
        finally:
            await ice.close()
            transport.close()
        return [(candidate.kind, str(candidate.ip), candidate.port) for candidate in candidates]

    assert ("srflx", *SEEN) in asyncio.run(gather())
