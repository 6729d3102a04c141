"""The files of tests/golden that freeze the wire; `python -m tests.protocol.golden` writes them anew.

A change of one of them is a change of the protocol: `protocol/CHANGES.md` must tell it, and the printed form hash
goes there.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from protocol.base.ids import ContributionId, TaskId, TensorRef, Ticket
from protocol.kinds import MESSAGES
from protocol.link.candidates import Candidate
from protocol.link.codec import encode
from protocol.link.signal import Answer, Offer, letter_hash, prologue, sign_letter
from protocol.messages import Fellow, LinkFigures, Relay
from protocol.run.course import Chunk, Course
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import RunConfig
from protocol.trust.handshake import CookieJar, Initiator, Responder
from protocol.trust.identity import Identity, base32
from protocol.trust.membership import Invite, JoinLink, Membership, Revocations, sign_statement
from protocol.trust.records import RecordWriter
from tests.protocol.samples import ALICE, BOB, COORDINATOR, RUN_ID, samples

GOLDEN = Path(__file__).parents[1] / "golden"
CHANGES = Path(__file__).parents[2] / "protocol" / "CHANGES.md"


def form_hash() -> str:
    """16 letters over names, order and types of all fields of all messages and of what they hold."""
    sections = [hint for hint in get_type_hints(RunConfig).values() if issubclass(hint, msgspec.Struct)]
    structs = (
        *MESSAGES, LinkFigures, Relay, Fellow, TaskId, Ticket, ContributionId, TensorRef, Plan, StagePlan, ServerPlan,
        Course, Chunk, RunConfig, *sections,
    )  # fmt: skip
    # A type is known by its bare name: which module it lives in is no matter of the wire.
    lines = [
        f"{struct.__name__}.{name}: {re.sub(r'(?:[A-Za-z_]+[.])+', '', str(hint))}"
        for struct in structs
        for name, hint in get_type_hints(struct).items()
        if name in struct.__struct_fields__
    ]
    return base32(hashlib.blake2b("\n".join(lines).encode(), digest_size=10).digest())


def message_lines() -> str:
    """Every kind of message and its sample's bytes."""
    return "".join(f"{type(message).__name__} {encode(message).hex()}\n" for message in samples())


def identity_vectors() -> dict[str, Any]:
    """Seeds, keys, node ids, and one signature each."""
    return {
        seed.hex(): {
            "public_key": Identity(seed).public_key.hex(),
            "node": Identity(seed).node,
            "signature_of_empty": Identity(seed).sign(b"").hex(),
        }
        for seed in (bytes(32), bytes(range(32)), b"\xff" * 32)
    }


def membership_vectors() -> dict[str, str]:
    """Signed statements by the sample coordinator, and a join link."""
    invite = sign_statement(
        Invite(COORDINATOR.public_key, RUN_ID, "volunteer", 1, 2_000_000_000, bytes(16)), COORDINATOR
    )
    return {
        "coordinator_seed": COORDINATOR.seed.hex(),
        "invite": invite.hex(),
        "membership": sign_statement(Membership(ALICE.node, "server", RUN_ID, 3, 17, 2_000_000_000), COORDINATOR).hex(),
        "revocations": sign_statement(Revocations(RUN_ID, 2, (ALICE.node, BOB.node)), COORDINATOR).hex(),
        "join_link": str(JoinLink(("127.0.0.1:7000", "[::1]:7000"), invite)),
    }


def handshake_vectors() -> dict[str, str]:
    """Alice dials Bob: every message, and what comes out."""
    initiator = Initiator(
        identity=ALICE,
        credential=b"credential of alice",
        run_id=RUN_ID,
        peer=BOB.node,
        entropy=b"\x0a" * 32,
        admit=lambda key, credential: "volunteer",
    )
    responder = Responder(
        identity=BOB,
        credential=b"",
        run_id=RUN_ID,
        entropy=b"\x0b" * 32,
        admit=lambda key, credential: "volunteer",
    )
    m1 = initiator.data_to_send()
    assert responder.receive(m1) is None
    m2 = responder.data_to_send()
    ours = initiator.receive(m2)
    m3 = initiator.data_to_send()
    theirs = responder.receive(m3)
    assert theirs is not None and not isinstance(ours, type(None))
    return {
        "initiator_seed": ALICE.seed.hex(),
        "initiator_credential": b"credential of alice".hex(),
        "initiator_entropy": (b"\x0a" * 32).hex(),
        "responder_seed": BOB.seed.hex(),
        "responder_credential": "",
        "responder_entropy": (b"\x0b" * 32).hex(),
        "run_id": RUN_ID.hex(),
        "prologue": b"tcp".hex(),
        "m1": m1.hex(),
        "m2": m2.hex(),
        "m3": m3.hex(),
        "session_id": theirs.session_id.hex(),
        "initiator_to_responder_key": theirs.receive_key.hex(),
        "responder_to_initiator_key": theirs.send_key.hex(),
        "cookie_of_127.0.0.1_at_0_with_zero_secret": CookieJar(bytes(32)).cookies("127.0.0.1", 0.0)[0].hex(),
    }


def signal_vectors() -> dict[str, str]:
    """Alice offers, Bob answers: both letters, and what the handshake inside the link is bound to."""
    candidates = (
        Candidate("host", b"\xc0\xa8\x01\x14", 50000),
        Candidate("srflx", b"\xcb\x00\x71\x09", 50001),
        Candidate("relay", bytes.fromhex("26064700000000000000000000000001"), 50002),
    )
    offer = Offer(
        run_id=RUN_ID,
        generation=3,
        sender=ALICE.public_key,
        receiver=BOB.node,
        nonce=b"\x0a" * 16,
        dtls_fingerprint=b"\x0b" * 32,
        quic_fingerprint=b"\x0c" * 32,
        ufrag="abcd",
        password="abcdefghijklmnopqrstuv",
        candidates=candidates,
        ways=("quic", "channel"),
        lifetime_s=60,
    )
    signed = sign_letter(offer, ALICE)
    answer = Answer(
        run_id=RUN_ID,
        generation=4,
        sender=BOB.public_key,
        receiver=ALICE.node,
        nonce=b"\x1a" * 16,
        dtls_fingerprint=b"\x1b" * 32,
        quic_fingerprint=b"\x1c" * 32,
        ufrag="efgh",
        password="0123456789+/ABCDEFGHIJ",
        candidates=candidates[1:],
        ways=("channel",),
        lifetime_s=30,
        offer_hash=letter_hash(signed),
    )
    return {
        "offer": signed.hex(),
        "offer_hash": letter_hash(signed).hex(),
        "answer": sign_letter(answer, BOB).hex(),
        "prologue_quic": prologue("quic", offer, answer).hex(),
        "prologue_channel": prologue("channel", offer, answer).hex(),
    }


def record_vectors() -> dict[str, Any]:
    """Four records of one direction: plain, with a new key, after it, and the end."""
    writer = RecordWriter(b"\x11" * 32, b"\x33" * 24)
    records = [writer.seal(2, b"first")]
    writer.rekey()
    records += [writer.seal(5, b"with a new key"), writer.seal(2, b""), writer.seal(7, b"", final=True)]
    return {
        "key": (b"\x11" * 32).hex(),
        "header": writer.header.hex(),
        "kinds": [2, 5, 2, 7],
        "plain": [b"first".hex(), b"with a new key".hex(), "", ""],
        "records": [record.hex() for record in records],
    }


def golden_files() -> dict[str, str]:
    """File name -> content, as it should lie in tests/golden."""
    vectors = {
        "identity.json": identity_vectors(),
        "membership.json": membership_vectors(),
        "handshake.json": handshake_vectors(),
        "records.json": record_vectors(),
        "signal.json": signal_vectors(),
    }
    return {"messages.txt": message_lines()} | {
        name: json.dumps(vector, indent=1) + "\n" for name, vector in vectors.items()
    }


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file_name, content in golden_files().items():
        (GOLDEN / file_name).write_text(content)
    print(f"form hash for {CHANGES.name}: {form_hash()}")
