"""The wire is frozen by three witnesses that must agree: the code, tests/golden, and protocol/CHANGES.md."""

from __future__ import annotations

import hashlib
import json
import re

import nacl.bindings as sodium
import pytest

from protocol.kinds import MAY_SEND, MESSAGES
from protocol.link.codec import PROTOCOL_MINOR, decode
from protocol.trust.handshake import VERSION
from tests.protocol.golden import CHANGES, GOLDEN, form_hash, golden_files
from tests.protocol.samples import samples

_NEWEST = CHANGES.read_text().split("\n## ")[1]


@pytest.mark.parametrize("name", sorted(golden_files()))
def test_golden_files(name: str) -> None:
    """Ids, credentials, handshakes, records and messages have the bytes that were frozen."""
    assert (GOLDEN / name).read_text() == golden_files()[name], "run: python -m tests.protocol.golden"


def test_no_golden_file_is_left_over() -> None:
    """tests/golden of the wire holds nothing that the code no longer writes."""
    assert {path.name for path in GOLDEN.iterdir() if path.is_file()} >= set(golden_files())


def test_golden_messages_decode() -> None:
    """The frozen bytes of each kind decode to its sample, and every kind has some."""
    lines = dict(line.split() for line in (GOLDEN / "messages.txt").read_text().splitlines())
    assert list(lines) == [kind.__name__ for kind in MESSAGES]
    assert [decode(bytes.fromhex(data)) for data in lines.values()] == samples()


def test_changes_names_the_version_in_force() -> None:
    """The newest section of CHANGES.md is the version that this code speaks."""
    assert _NEWEST.splitlines()[0] == f"{VERSION}.{PROTOCOL_MINOR}"


def test_changes_names_the_form_in_force() -> None:
    """No field changes without a line in CHANGES.md: its form hash would not fit."""
    assert re.search(r"Form: `([a-z2-7]+)`", _NEWEST).group(1) == form_hash()  # type: ignore[union-attr]


def test_changes_names_every_kind() -> None:
    """CHANGES.md lists all kinds, in the order of messages.py, and each has an entry in the role table."""
    kinds = re.search(r"Kinds: ([^.]+)\.", _NEWEST).group(1).replace("\n", " ").split(", ")  # type: ignore[union-attr]
    assert kinds == [kind.__name__ for kind in MESSAGES] == [kind.__name__ for kind in MESSAGES if MAY_SEND[kind]]


def test_handshake_vectors_follow_the_text() -> None:
    """The golden handshake is what protocol/README.md describes, computed here from that text alone."""
    vector = {name: bytes.fromhex(value) for name, value in json.loads((GOLDEN / "handshake.json").read_text()).items()}

    def lp(content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + content

    def h(content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=32).digest()

    def kdf(content: bytes, key: bytes, person: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=32, key=key, person=person).digest()

    def proof(side: bytes, seed: bytes, credential: bytes, transcript: bytes) -> bytes:
        public, secret = sodium.crypto_sign_seed_keypair(seed)
        signed = b"barnraise/hs/1\0" + side + transcript + lp(public) + lp(credential)
        return lp(public) + lp(credential) + lp(sodium.crypto_sign(signed, secret)[:64])

    e_i, secret_i = sodium.crypto_kx_seed_keypair(vector["initiator_entropy"])
    e_r, _ = sodium.crypto_kx_seed_keypair(vector["responder_entropy"])
    h0 = h(b"barnraise/hs/1\0" + lp(vector["prologue"]) + lp(vector["run_id"]))
    m1 = b"\x01" + vector["run_id"] + e_i + bytes(16)
    h2 = h(h(h0 + m1) + e_r)
    to_initiator, to_responder = sodium.crypto_kx_client_session_keys(e_i, secret_i, e_r)
    seal = sodium.crypto_aead_xchacha20poly1305_ietf_encrypt
    proof_r = proof(b"R", vector["responder_seed"], vector["responder_credential"], h2)
    m2 = e_r + seal(proof_r, h2, bytes(24), kdf(h2, to_responder, b"br-hs-r"))
    h3 = h(h2 + m2)
    proof_i = proof(b"I", vector["initiator_seed"], vector["initiator_credential"], h3)
    m3 = seal(proof_i, h3, bytes(24), kdf(h3, to_initiator, b"br-hs-i"))
    h4 = h(h3 + m3)
    assert [vector["m1"], vector["m2"], vector["m3"]] == [lp(m1), lp(m2), lp(m3)]
    assert vector["session_id"] == kdf(h4, b"", b"br-session-id")
    assert vector["initiator_to_responder_key"] == kdf(h4, to_responder, b"br-traffic")
    assert vector["responder_to_initiator_key"] == kdf(h4, to_initiator, b"br-traffic")
