"""Whoever carries the letters, and whoever answers them, is an attacker here (S2, S3, S8)."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio
from aioice.stun import Class, Message, Method

from node.links.punch.helper import Connection
from node.links.punch.helper_frames import Connect
from node.links.punch.ice import REMOTES_MAX, Ice
from node.links.punch.punched import IceServers, Puncher, PunchError, PunchOptions
from protocol.base.errors import RemoteProtocolError
from protocol.link.candidates import Candidate, CandidateKind, IpAddress, Reach, acceptable_address
from protocol.link.signal import (
    Answer,
    Correspondent,
    Offer,
    Way,
    letter_hash,
    open_answer,
    open_offer,
    prologue,
    sign_letter,
)
from protocol.trust.handshake import ENTROPY_BYTES, Initiator, Responder
from protocol.trust.identity import Identity
from tests.node.links.punch.punch_pair import PunchPair, helper_is_idle, punch_pair, settled
from tests.protocol.golden import GOLDEN
from tests.protocol.samples import ALICE, BOB, COORDINATOR, RUN_ID

MALLORY = Identity(b"\x0d" * 32)
Change = Callable[[bytes], bytes]


# ---- in the signalling path (S2) ------------------------------------------------------------------------------------


def _in_place(old: Callable[[Any], bytes], new: bytes) -> Change:
    """Put `new` where the letter holds `old(letter)`, and leave the signature."""

    def change(signed: bytes) -> bytes:
        letter = msgspec.msgpack.decode(signed[:-64])
        found = old(letter)
        assert found in signed and len(new) == len(found)
        return signed.replace(found, new)

    return change


def _resigned(**changes: Any) -> Change:
    """Changed, and signed by the attacker, in the victim's name."""

    def change(signed: bytes) -> bytes:
        letter = msgspec.msgpack.decode(signed[:-64], type=Offer | Answer)
        body = msgspec.msgpack.encode(msgspec.structs.replace(letter, **changes))
        return body + MALLORY.sign(b"br-sdp-1\0" + body)

    return change


_OWN = Candidate("host", b"\x08\x08\x08\x08", 50000)
CHANGES: dict[str, Change] = {
    "dtls fingerprint": _in_place(lambda letter: letter[6], b"\x55" * 32),
    "quic fingerprint": _in_place(lambda letter: letter[7], b"\x55" * 32),
    "sender": _in_place(lambda letter: letter[3], MALLORY.public_key),
    "receiver": _in_place(lambda letter: letter[4].encode(), MALLORY.node.encode()),
    "candidate": _in_place(lambda letter: letter[10][0][1], b"\x08\x08\x08\x08"),
    "candidates, signed anew": _resigned(candidates=(_OWN,)),
    "fingerprints, signed anew": _resigned(dtls_fingerprint=b"\x55" * 32, quic_fingerprint=b"\x55" * 32),
    "its own letter": _resigned(sender=MALLORY.public_key),
    "signature": lambda signed: signed[:-1] + bytes((signed[-1] ^ 1,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("in_answer", [False, True], ids=["offer", "answer"])
async def test_a_changed_letter_leads_to_no_link(in_answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprint, candidates, ids swapped in either direction: refused before a packet leaves for the peer."""
    monkeypatch.setattr("node.links.punch.punched.ANSWERS_PER_PEER", len(CHANGES))
    async with punch_pair("quic", "channel") as pair:
        for name, change in CHANGES.items():

            async def carry(offer: bytes, change: Change = change) -> bytes:
                if in_answer:
                    return change(await pair.exchange(offer))
                return await pair.exchange(change(offer))

            with pytest.raises(RemoteProtocolError) as caught:
                await pair.alice.call(BOB.node, carry)
            assert caught.value.reason in ("identity", "signature", "decode"), name
        if in_answer:
            assert pair.finish is not None
            with pytest.raises(PunchError):  # Bob waited for an Alice who had turned away
                await pair.finish()
        await settled(lambda: helper_is_idle(pair.alice))


async def test_old_letters_do_not_count_again() -> None:
    """An offer, an answer and a pair of them, recorded from an honest link, are played back."""
    async with punch_pair("quic") as pair:
        answers: list[bytes] = []

        async def record(offer: bytes) -> bytes:
            answers.append(await pair.exchange(offer))
            return answers[0]

        alices = await pair.alice.call(BOB.node, record)
        assert pair.finish is not None
        bobs = await pair.finish()
        for punched in (alices, bobs):
            await trio.aclose_forcefully(punched.stream)

        with pytest.raises(RemoteProtocolError, match="replay"):
            await pair.bob.answer(ALICE.node, pair.offers[0])

        async def old_answer(_offer: bytes) -> bytes:
            return answers[0]

        with pytest.raises(RemoteProtocolError, match="replay"):
            await pair.alice.call(BOB.node, old_answer)

        async def reflect(offer: bytes) -> bytes:
            return offer

        with pytest.raises(RemoteProtocolError):
            await pair.alice.call(BOB.node, reflect)


@pytest.mark.slow
async def test_an_old_offer_for_a_restarted_node_leads_nowhere() -> None:
    """Bob's memory of offers is gone; whoever replays one cannot do the checks, which want a password of Alice's."""
    async with punch_pair("quic", "channel") as pair:
        alices, bobs = await pair.link()
        for punched in (alices, bobs):
            await trio.aclose_forcefully(punched.stream)
        restarted = Puncher(
            pair.nursery,
            identity=BOB,
            run_id=RUN_ID,
            generation=lambda: 3,
            servers=IceServers,
            options=PunchOptions(loopback=True),
        )
        _, finish = await restarted.answer(ALICE.node, pair.offers[0])
        with pytest.raises(PunchError):
            await finish()


async def test_offers_are_answered_only_so_many_at_once() -> None:
    """A member that asks and asks holds two places; others still find one."""
    async with punch_pair("channel") as pair:
        await pair.bob.start_helper()
        vector = bytes.fromhex(msgspec.json.decode((GOLDEN / "signal.json").read_bytes())["offer"])
        template = open_offer(vector, Correspondent(RUN_ID, 3, BOB.node, ALICE.node))
        for number in range(4):
            offer = sign_letter(msgspec.structs.replace(template, nonce=bytes((number,)) * 16), ALICE)
            if number < 2:
                await pair.bob.answer(ALICE.node, offer)
            else:
                with pytest.raises(RemoteProtocolError, match="busy"):
                    await pair.bob.answer(ALICE.node, offer)
        other = msgspec.structs.replace(template, sender=COORDINATOR.public_key)
        await pair.bob.answer(COORDINATOR.node, sign_letter(other, COORDINATOR))


# ---- a certificate that is not the signed one (S3) ------------------------------------------------------------------


def _with_other_fingerprints(signed: bytes, identity: Identity) -> bytes:
    """The letter as its owner would have signed it about another certificate."""
    letter = msgspec.msgpack.decode(signed[:-64], type=Offer | Answer)
    return sign_letter(
        msgspec.structs.replace(letter, dtls_fingerprint=b"\x55" * 32, quic_fingerprint=b"\x55" * 32), identity
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["quic", "channel"])
async def test_the_answerers_certificate_must_be_the_one_it_signed(way: Way) -> None:
    async with punch_pair(way) as pair:

        async def exchange(offer: bytes) -> bytes:
            return _with_other_fingerprints(await pair.exchange(offer), BOB)

        with pytest.raises(PunchError):
            await pair.alice.call(BOB.node, exchange)
        assert pair.finish is not None
        with pytest.raises(PunchError):
            await pair.finish()


@pytest.mark.slow
async def test_the_offerers_certificate_must_be_the_one_it_signed() -> None:
    """On a data channel both show one; Bob turns away from another than was signed."""
    async with punch_pair("channel") as pair:

        async def exchange(offer: bytes) -> bytes:
            changed = _with_other_fingerprints(offer, ALICE)
            answer = await pair.exchange(changed)
            letter = msgspec.msgpack.decode(answer[:-64], type=Answer)
            return sign_letter(msgspec.structs.replace(letter, offer_hash=letter_hash(offer)), BOB)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_call_and_fail, pair, exchange)
            while pair.finish is None:
                await trio.sleep(0.01)
            with pytest.raises(PunchError, match="certificate"):
                await pair.finish()


async def _call_and_fail(pair: PunchPair, exchange: Callable[[bytes], Awaitable[bytes]]) -> None:
    with pytest.raises(PunchError):
        await pair.alice.call(BOB.node, exchange)


def _handshake(responder: Identity, initiators_prologue: bytes, responders_prologue: bytes) -> None:
    """Alice dials Bob by a stream that ends at `responder`."""
    alice = Initiator(
        identity=ALICE,
        credential=b"",
        run_id=RUN_ID,
        peer=BOB.node,
        entropy=os.urandom(ENTROPY_BYTES),
        admit=lambda _key, _credential: "server",
        prologue=initiators_prologue,
    )
    other = Responder(
        identity=responder,
        credential=b"",
        run_id=RUN_ID,
        entropy=os.urandom(ENTROPY_BYTES),
        admit=lambda _key, _credential: "server",
        prologue=responders_prologue,
    )
    other.receive(alice.data_to_send())
    assert alice.receive(other.data_to_send()) is not None
    assert other.receive(alice.data_to_send()) is not None


def test_a_stolen_certificate_key_and_a_recorded_letter_do_not_authenticate() -> None:
    """With both the attacker gets through DTLS; the handshake in it asks for Bob's own key, and for this session."""
    vectors = msgspec.json.decode((GOLDEN / "signal.json").read_bytes())
    signed = bytes.fromhex(vectors["offer"])
    offer = open_offer(signed, Correspondent(RUN_ID, 3, BOB.node, ALICE.node))
    answer = open_answer(bytes.fromhex(vectors["answer"]), Correspondent(RUN_ID, 3, ALICE.node, BOB.node), signed)
    bound = prologue("channel", offer, answer)
    _handshake(BOB, bound, bound)
    with pytest.raises(RemoteProtocolError, match="identity"):
        _handshake(MALLORY, bound, bound)
    for other in (
        prologue("quic", offer, answer),
        prologue("channel", msgspec.structs.replace(offer, dtls_fingerprint=b"\x55" * 32), answer),
        prologue("channel", offer, msgspec.structs.replace(answer, dtls_fingerprint=b"\x55" * 32)),
        b"tcp",
    ):
        with pytest.raises(RemoteProtocolError, match="signature"):
            _handshake(BOB, bound, other)


# ---- candidates that lead elsewhere (S8) ----------------------------------------------------------------------------

INSIDE = ("127.0.0.1", "169.254.169.254", "10.1.2.3", "192.168.7.7", "100.100.100.200", "224.0.0.251", "::1", "fe80::9")


def _candidate(host: str, port: int = 40000, kind: CandidateKind = "host") -> Candidate:
    return Candidate(kind, ipaddress.ip_address(host).packed, port)


async def test_the_helper_is_sent_to_no_address_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member names addresses of the owner's network, of this computer and of a cloud, and calls them its own."""
    orders: list[object] = []
    tell = Connection.tell

    def spy(self: Connection, order: Any) -> None:
        if isinstance(order, Connect):
            orders.append(self._process)
        tell(self, order)

    monkeypatch.setattr(Connection, "tell", spy)
    async with punch_pair("channel") as pair:
        victim = Puncher(
            pair.nursery,
            identity=ALICE,
            run_id=RUN_ID,
            generation=lambda: 3,
            servers=IceServers,
            options=PunchOptions(ways=("channel",)),
        )
        for extra in ((), (_candidate("203.0.113.77", 443),)):

            async def exchange(offer: bytes, extra: tuple[Candidate, ...] = extra) -> bytes:
                answer, _ = await pair.bob.answer(ALICE.node, offer)
                letter = msgspec.msgpack.decode(answer[:-64], type=Answer)
                hosts = tuple(_candidate(host) for host in INSIDE)
                return sign_letter(msgspec.structs.replace(letter, candidates=hosts + extra), BOB)

            with pytest.raises(PunchError, match="no address that we may send to"):
                await victim.call(BOB.node, exchange)
        assert pair.bob._helper._process in orders, "the spy sees orders"
        assert victim._helper._process not in orders


class _Spy:
    """Sees every datagram that this process sends, and to where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[str, int]] = []
        spy, sendto = self, socket.socket.sendto

        def watched(sock: socket.socket, data: bytes, *arguments: Any) -> int:
            spy.sent.append(arguments[-1][:2])
            return sendto(sock, data, *arguments)

        monkeypatch.setattr(socket.socket, "sendto", watched)


def _strict(ip: IpAddress, port: int) -> bool:
    return acceptable_address(ip, port, Reach())


def test_no_packet_leaves_for_an_address_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the daemon's filter had let it through: the helper looks again. The spy sees what would go out."""

    async def attacked() -> None:
        spy = _Spy(monkeypatch)
        victim = Ice(controlling=True, may_reach=_strict)
        await victim.gather(["127.0.0.1"], (), (), 0.1)
        hosts = [_candidate(host) for host in INSIDE] + [_candidate("8.8.8.8", 53)]
        with pytest.raises(Exception, match="no pair"):
            await asyncio.wait_for(victim.punch("abcd", "x" * 22, hosts), 3)
        await victim.end()
        assert spy.sent == []

        control = Ice(controlling=True, may_reach=lambda _ip, _port: True)  # the spy does see packets
        await control.gather(["127.0.0.1"], (), (), 0.1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(control.punch("abcd", "x" * 22, [_candidate("127.0.0.1", 40001)]), 0.3)
        await control.end()
        assert ("127.0.0.1", 40001) in spy.sent

    asyncio.run(attacked())


def _check(username: str, password: str, *, priority: bool = True) -> bytes:
    message = Message(message_method=Method.BINDING, message_class=Class.REQUEST)
    message.attributes["USERNAME"] = username
    if priority:
        message.attributes["PRIORITY"] = 1
    message.attributes["ICE-CONTROLLED"] = 1
    message.add_message_integrity(password.encode())
    return bytes(message)


def test_strangers_get_no_answer_and_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsigned, wrongly signed or unreadable checks by the thousand; and signed ones from where we may not answer."""

    async def attacked() -> None:
        spy = _Spy(monkeypatch)
        victim = Ice(controlling=True, may_reach=_strict)
        await victim.gather(["127.0.0.1"], (), (), 0.1)
        (protocol,) = victim._protocols
        name = f"{victim.local_username}:abcd"
        unsigned = bytes(Message(message_method=Method.BINDING, message_class=Class.REQUEST))
        for number in range(1000):
            source = ("203.0.113.7", 2000 + number)
            for packet in (
                unsigned,
                _check(f"u{number:04}:abcd", victim.local_password),
                _check(name, "wrong" * 5),
                _check(name, victim.local_password, priority=False),
                b"\x00\x01" + bytes(18) + b"\xff" * 9,
                b"\x00",
            ):
                protocol.datagram_received(packet, source)
        for source in (("127.0.0.1", 40000), ("10.0.0.1", 40000), ("203.0.113.7", 80)):
            protocol.datagram_received(_check(name, victim.local_password), source)
        assert spy.sent == [] and victim._early_checks == type(victim._early_checks)()
        assert victim.remote_candidates == []
        for number in range(3 * REMOTES_MAX):  # somebody who knows the password, from everywhere
            victim._early_checks_done, victim.remote_password = True, "y" * 22
            protocol.datagram_received(_check(name, victim.local_password), ("203.0.113.7", 2000 + number))
        assert len(victim.remote_candidates) == REMOTES_MAX
        await victim.end()

    asyncio.run(attacked())


def test_only_the_settled_pair_can_speak_dtls() -> None:
    """A hello from elsewhere, sent before the peer's own, is not looked at."""

    async def attacked() -> None:
        alice, bob = (Ice(controlling=flag, may_reach=lambda _ip, _port: True) for flag in (True, False))
        alices = await alice.gather(["127.0.0.1"], (), (), 0.1)
        bobs = await bob.gather(["127.0.0.1"], (), (), 0.1)
        racer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        target = (str(bobs[0].ip), bobs[0].port)
        racer.sendto(b"\x16 before", target)
        await asyncio.gather(
            alice.punch(bob.local_username, bob.local_password, bobs),
            bob.punch(alice.local_username, alice.local_password, alices),
        )
        for number in range(100):
            racer.sendto(b"\x16 race %d" % number, target)
            racer.sendto(b"\xb0br1G\0" + bytes(16), target)
        await alice.transmit(b"\x16 honest")
        assert await bob.receive() == b"\x16 honest"
        racer.close()
        await asyncio.gather(alice.end(), bob.end())

    asyncio.run(attacked())
