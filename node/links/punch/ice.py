"""Interactive Connectivity Establishment (RFC 8445) by aioice, fenced: what goes out, what comes in, who may speak.

Runs in the helper process, on asyncio. This is the one file that leans on attributes of aioice that are not its
public interface; `check_version` refuses a version that this was not tested with.

After the checks both sides may hold several good pairs. They settle on one: the controlling side says READY on its
pair until the other answers ACK, then GO. From then on only datagrams of that pair are looked at, so nobody can slip
a DTLS hello of its own in. The three words carry a keyed hash over both ICE passwords.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import socket
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, cast

import aioice.candidate
import aioice.stun
import aioice.turn
from aioice.ice import CandidatePair, Connection, StunProtocol
from aioice.stun import Message

from node.links.punch.helper_frames import StunServer, TurnServer
from protocol.link.candidates import Candidate, CandidateKind, IpAddress

TESTED_VERSIONS = ("0.13.",)
ADDRESSES_MAX = 6
"""Own addresses that get a socket: a computer with containers has dozens, and each pair costs 20 ms of pacing."""
REMOTES_MAX = 32
"""Remote addresses known at once: sixteen announced, and some that a NAT made up (peer-reflexive)."""
SOCKET_BUFFER_BYTES = 4 << 20
"""Asked of the system; QUIC and SCTP lose datagrams with its small default."""
QUEUED_DATAGRAMS_MAX = 1024
"""Datagrams that wait for DTLS, above which the newest are dropped as a full socket would: 1.2 MB."""
LATECOMERS_S = 0.4
"""After the first public address is known, how long others (a relay takes a second round trip) are waited for."""
HAIL_EVERY_S = 0.1
REPEATS_MAX = 3
"""Checks of one pair that are sent early because the peer was heard; more would let it drive us."""
CLOSE_S = 2.0
"""For telling a TURN server that the allocation can go; it expires by itself."""

_STUN_FIRST_BYTE_MAX = 3  # RFC 7983: what shares a socket is told apart by its first byte
_HAIL = b"\xb0br1"
_READY, _ACK, _GO = b"R", b"A", b"G"
_HAIL_BYTES = len(_HAIL) + 2 + 16


class PunchError(Exception):
    """No way to the peer; the text says how far it came."""


def check_version() -> None:
    """Raises `RuntimeError` for an aioice whose insides were never looked at."""
    found = version("aioice")
    if not found.startswith(TESTED_VERSIONS):
        raise RuntimeError(f"aioice {found}: punching was tested with {', '.join(TESTED_VERSIONS)}*")


class _FencedStun(StunProtocol):
    """One socket. STUN goes to aioice; anything else only when its sender is the settled pair."""

    receiver: Ice

    def datagram_received(self, data: bytes | str, addr: tuple[Any, ...]) -> None:
        assert isinstance(data, bytes)
        self.receiver.count_down(data)
        if not data:
            return
        if data[0] > _STUN_FIRST_BYTE_MAX:
            self.receiver.datagram(self, data, (addr[0], addr[1]))
            return
        # A parser's surprise is the packet's fault: it must cost no traceback in the log.
        with contextlib.suppress(Exception):
            super().datagram_received(data, addr)

    def send_stun(self, message: Message, addr: tuple[str, int]) -> None:
        self.receiver.count_up(bytes(message))
        super().send_stun(message, addr)


class Ice(Connection):
    """One connection: sockets, candidates, checks, and at the end one settled pair.

    Args:
        may_reach: whether packets may be sent to (address, port); asked for every address, however it was learnt.
    """

    def __init__(self, *, controlling: bool, may_reach: Callable[[IpAddress, int], bool]) -> None:
        super().__init__(ice_controlling=controlling)
        self._may_reach = may_reach
        self._pair: CandidatePair | None = None
        self._hail_key = b""
        self._heard: set[bytes] = set()
        self._hail_flags = 0
        self._peer_flags = 0
        self._hailed = asyncio.Event()
        self._inbox: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._ended = False
        self._repeats: dict[int, int] = {}
        self._up_bytes = 0
        self._down_bytes = 0

    # ---- candidates --------------------------------------------------------------------------------------------------

    async def gather(
        self, addresses: Sequence[str], stun: Sequence[StunServer], turn: Sequence[TurnServer], within_s: float
    ) -> tuple[Candidate, ...]:
        """Open a socket at each address and ask the servers what they see. Takes at most `within_s`."""
        self._local_candidates_start = True
        loop = asyncio.get_running_loop()
        for address in addresses[:ADDRESSES_MAX]:
            with contextlib.suppress(OSError):  # an address that just went away, or cannot be bound
                _, stun_protocol = await loop.create_datagram_endpoint(
                    lambda: _FencedStun(self), local_addr=(address, 0)
                )
                _tune(stun_protocol.transport)
                name = stun_protocol.transport.get_extra_info("sockname")
                stun_protocol.local_candidate = _internal("host", name[0], name[1])
                self._protocols.append(stun_protocol)
        self._local_candidates = [protocol.local_candidate for protocol in self._protocols]
        # IPv6 has no NAT worth the name: there, what a socket is bound to is what others see.
        translated = [protocol for protocol in self._protocols if ":" not in protocol.local_candidate.host]
        tasks = [asyncio.create_task(self._reflect(host, server)) for host in translated for server in stun]
        tasks += [asyncio.create_task(self._allocate(server)) for server in turn]
        try:
            await _first_then_latecomers(tasks, within_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._local_candidates_end = True
        return tuple(_external(candidate) for candidate in self._local_candidates)

    async def _reflect(self, host: StunProtocol, server: StunServer) -> None:
        """Learn the public address of an IPv4 socket."""
        address = await _resolve(server.host, server.port, socket.SOCK_DGRAM)
        request = Message(message_method=aioice.stun.Method.BINDING, message_class=aioice.stun.Class.REQUEST)
        response, _ = await host.request(request, address)
        seen = response.attributes["XOR-MAPPED-ADDRESS"]
        candidate = _internal("srflx", seen[0], seen[1])
        if not any((known.host, known.port) == (seen[0], seen[1]) for known in self._local_candidates):
            self._local_candidates.append(candidate)

    async def _allocate(self, server: TurnServer) -> None:
        """Get an address at a relay."""
        kind = socket.SOCK_STREAM if server.tcp else socket.SOCK_DGRAM
        address = await _resolve(server.host, server.port, kind)
        candidate, protocol = await aioice.ice.relayed_candidate(
            component=1,
            hide_related_address=False,
            protocol_factory=lambda: _FencedStun(self),
            turn_server=address,
            turn_username=server.username,
            turn_password=server.password,
            turn_ssl=False,
            turn_transport="tcp" if server.tcp else "udp",
        )
        self._protocols.append(protocol)
        self._local_candidates.append(candidate)

    # ---- checks ------------------------------------------------------------------------------------------------------

    async def punch(self, ufrag: str, password: str, candidates: Sequence[Candidate]) -> bool:
        """Find a pair and settle on it; whether its datagrams pass through a relay of ours or the peer's.

        The caller sets the deadline. Raises `PunchError`.
        """
        self.remote_username, self.remote_password = ufrag, password
        passwords = (self.local_password, password) if self.ice_controlling else (password, self.local_password)
        self._hail_key = hashlib.blake2b(":".join(passwords).encode(), digest_size=32, person=b"br-hail").digest()
        for candidate in candidates:
            if self._may_reach(candidate.ip, candidate.port):
                await self.add_remote_candidate(_internal(candidate.kind, str(candidate.ip), candidate.port))
        await self.add_remote_candidate(None)
        checks = asyncio.create_task(self.connect())
        hailed = asyncio.create_task(self._hailed.wait())  # the peer may settle before our own checks are through
        try:
            await asyncio.wait((checks, hailed), return_when=asyncio.FIRST_COMPLETED)
            if checks.done() and not self._hailed.is_set():
                try:
                    checks.result()
                except ConnectionError as error:
                    raise PunchError(f"no pair of addresses worked ({error})") from None
                if self.ice_controlling:
                    self._settle(self._nominated[1])
            await self._agree()
        finally:
            for task in (checks, hailed):
                task.cancel()
            await asyncio.gather(checks, hailed, return_exceptions=True)
        return self.relayed

    def request_received(self, message: Message, addr: tuple[str, int], protocol: StunProtocol) -> None:
        """A check by the peer. Whoever cannot sign it gets no answer and leaves no trace (RFC 8445 would answer)."""
        attributes = message.attributes
        signed = (
            message.message_method == aioice.stun.Method.BINDING
            and "MESSAGE-INTEGRITY" in attributes
            and "PRIORITY" in attributes
            and self._valid_username(attributes.get("USERNAME", ""))
            and message.check_message_integrity(self.local_password.encode())
        )
        known = any((remote._network_host, remote.port) == addr for remote in self._remote_candidates)
        if not signed or (not known and len(self._remote_candidates) >= REMOTES_MAX):
            return
        if not known and not self._may_reach(ipaddress.ip_address(addr[0]), addr[1]):
            return
        self._try_again(protocol, addr)
        super().request_received(message, addr, protocol)

    def _try_again(self, protocol: StunProtocol, addr: tuple[str, int]) -> None:
        """Send a check that is under way once more, now that the peer's gateway is open (RFC 8445 section 7.3.1.4).

        Ours was probably dropped there because it came first, and aioice repeats it only after half a second.
        """
        for pair in self._check_list:
            if pair.protocol is protocol and pair.remote_addr == addr:
                tried = self._repeats.get(id(pair), 0)
                if pair.state == CandidatePair.State.IN_PROGRESS and pair.task is not None and tried < REPEATS_MAX:
                    self._repeats[id(pair)] = tried + 1
                    pair.task.cancel()
                    pair.task = None
                    self.check_state(pair, CandidatePair.State.WAITING)  # what a check by the peer sets off
                return

    # ---- settling on a pair ------------------------------------------------------------------------------------------

    @property
    def relayed(self) -> bool:
        """Whether the settled pair passes through a TURN server."""
        assert self._pair is not None
        kinds = (self._pair.local_candidate.type, self._pair.remote_candidate.type)
        return "relay" in kinds or bool(self._peer_flags & 1)

    @property
    def remote(self) -> tuple[str, int]:
        """Where the settled pair leads."""
        assert self._pair is not None
        return self._pair.remote_addr

    @property
    def both_own_sockets(self) -> bool:
        """Whether each side's half of the pair is a socket of its own, which it can hand over."""
        assert self._pair is not None
        return self._pair.local_candidate.type != "relay" and not self._peer_flags & 1

    def _settle(self, pair: CandidatePair) -> None:
        self._pair = pair
        self._hail_flags = 1 if pair.local_candidate.type == "relay" else 0

    async def _agree(self) -> None:
        """READY until ACK, then GO; or wait for READY, then ACK until GO or anything else that comes by the pair."""
        awaited = _ACK if self.ice_controlling else _GO
        while awaited not in self._heard:
            if self._pair is not None:
                self._say(_READY if self.ice_controlling else _ACK)
            self._hailed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hailed.wait(), HAIL_EVERY_S)
        if self.ice_controlling:
            self._say(_GO)
            self._say(_GO)  # one may get lost; when both do, the first real datagram says the same

    def _say(self, word: bytes) -> None:
        assert self._pair is not None
        head = _HAIL + word + bytes((self._hail_flags,))
        self.count_up(bytes(_HAIL_BYTES))
        self._transport_of(self._pair).sendto(head + self._seal(head), self._pair.remote_addr)

    def _seal(self, head: bytes) -> bytes:
        return hashlib.blake2b(head, key=self._hail_key, digest_size=16).digest()

    def datagram(self, protocol: StunProtocol, data: bytes, addr: tuple[str, int]) -> None:
        """What is not STUN."""
        if self._pair is not None and (protocol is not self._pair.protocol or addr != self._pair.remote_addr):
            return
        if data.startswith(_HAIL):
            self._hear(protocol, data, addr)
        elif self._pair is not None:
            if not self.ice_controlling and _GO not in self._heard:
                self._heard.add(_GO)
                self._hailed.set()
            if len(self._inbox) < QUEUED_DATAGRAMS_MAX:
                self._inbox.append(data)
                self._arrived.set()

    def _hear(self, protocol: StunProtocol, data: bytes, addr: tuple[str, int]) -> None:
        head, seal = data[:-16], data[-16:]
        if not self._hail_key or len(data) != _HAIL_BYTES or not hmac.compare_digest(self._seal(head), seal):
            return
        word = head[-2:-1]
        if (word == _ACK) != self.ice_controlling:
            return  # an echo of our own word
        if self._pair is None:
            pair = self._pair_of(protocol, addr)
            if self.ice_controlling or pair is None:
                return
            self._settle(pair)
        self._peer_flags = head[-1]
        if word == _ACK and _ACK in self._heard:
            self._say(_GO)  # it did not hear the first
        if word == _READY and _GO in self._heard:
            self._say(_ACK)
        self._heard.add(word)
        self._hailed.set()

    def _pair_of(self, protocol: StunProtocol, addr: tuple[str, int]) -> CandidatePair | None:
        """A pair on which a signed check has passed: the peer really is there."""
        for pair in self._check_list:
            if pair.protocol is protocol and pair.remote_addr == addr:
                proven = pair.state == CandidatePair.State.SUCCEEDED or pair.remote_nominated
                return pair if proven else None
        return None

    # ---- after that --------------------------------------------------------------------------------------------------

    async def receive(self) -> bytes:
        """The next datagram of the settled pair. Raises `ConnectionError` when the connection has been closed."""
        while not self._inbox:
            if self._ended:
                raise ConnectionError("closed")
            self._arrived.clear()
            await self._arrived.wait()
        return self._inbox.popleft()

    async def transmit(self, data: bytes) -> None:
        """Send a datagram by the settled pair; one that the system does not take is lost, as datagrams are."""
        if self._ended or self._pair is None:
            raise ConnectionError("closed")
        self.count_up(data)
        self._transport_of(self._pair).sendto(data, self._pair.remote_addr)

    def count_up(self, datagram: bytes) -> None:
        self._up_bytes += len(datagram)

    def count_down(self, datagram: bytes) -> None:
        self._down_bytes += len(datagram)

    def take_traffic(self) -> tuple[int, int]:
        """Bytes up and down since the last call, checks included (what a TURN server's frames add is not known)."""
        traffic = self._up_bytes, self._down_bytes
        self._up_bytes = self._down_bytes = 0
        return traffic

    def take_socket(self) -> socket.socket:
        """The settled pair's socket, out of asyncio's hands: from here on what arrives waits for its next owner."""
        assert self._pair is not None and self._pair.local_candidate.type != "relay"
        transport = self._transport_of(self._pair)
        handle = cast(socket.socket, transport.get_extra_info("socket").dup())
        transport.close()
        return handle

    async def end(self) -> None:
        """Close every socket. Allocations are given back if their server answers soon."""
        self._ended = True
        self._arrived.set()
        protocols = list(self._protocols)
        for protocol in protocols:
            protocol.transport.close()  # at once: `close` below has other things to wait for first
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(super().close(), CLOSE_S)
        for protocol in protocols:
            inner = getattr(protocol.transport, "_TurnTransport__inner_protocol", None)
            if inner is not None:
                inner.transport.abort()

    @staticmethod
    def _transport_of(pair: CandidatePair) -> asyncio.DatagramTransport:
        return pair.protocol.transport


async def _first_then_latecomers(tasks: Sequence[asyncio.Task[None]], within_s: float) -> None:
    """Wait for all; once one has succeeded, not much longer for the others."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    pending = set(tasks)
    succeeded = False
    while pending and loop.time() < deadline:
        done, pending = await asyncio.wait(pending, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
        if not succeeded and any(task.exception() is None for task in done):
            succeeded = True
            deadline = min(deadline, loop.time() + LATECOMERS_S)


async def _resolve(host: str, port: int, kind: int) -> tuple[str, int]:
    """The address of a server that the operator named. Raises `OSError`."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host)), port
    found = await asyncio.get_running_loop().getaddrinfo(host, port, family=socket.AF_INET, type=kind)
    return str(found[0][4][0]), port


def _internal(kind: CandidateKind, host: str, port: int) -> aioice.candidate.Candidate:
    return aioice.candidate.Candidate(
        foundation=aioice.candidate.candidate_foundation(kind, "udp", host),
        component=1,
        transport="udp",
        priority=aioice.candidate.candidate_priority(1, kind),
        host=host,
        port=port,
        type=kind,
    )


def _external(candidate: aioice.candidate.Candidate) -> Candidate:
    return Candidate(cast(CandidateKind, candidate.type), ipaddress.ip_address(candidate.host).packed, candidate.port)


def _tune(transport: asyncio.BaseTransport) -> None:
    handle = transport.get_extra_info("socket")
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        with contextlib.suppress(OSError):
            handle.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
