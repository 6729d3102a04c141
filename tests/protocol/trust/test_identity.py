"""Node names, signatures, and what an identity never shows."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.trust.identity import Identity, base32, is_node_id, node_id, unbase32, verify_signature

# RFC 8032, section 7.1, test 1.
_RFC_SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
_RFC_KEY = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
_RFC_SIGNATURE = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
)
_ORDER = 2**252 + 27742317777372353535851937790883648493


def test_rfc_vector() -> None:
    """Keys and signatures are those of RFC 8032."""
    identity = Identity(_RFC_SEED)
    assert identity.public_key == _RFC_KEY
    assert identity.sign(b"") == _RFC_SIGNATURE


def test_node_id_has_its_form() -> None:
    """A node id is 52 letters and digits and depends on the whole key."""
    first, second = node_id(bytes(32)), node_id(bytes(31) + b"\x01")
    assert is_node_id(first) and is_node_id(second) and first != second
    assert not is_node_id(first.upper()) and not is_node_id(first + "a") and not is_node_id(first[:-1] + "\n")


def test_changed_signatures_are_refused() -> None:
    """No flipped bit of a signature verifies, nor a malleated S, nor a key of small order."""
    for bit in range(512):
        changed = bytearray(_RFC_SIGNATURE)
        changed[bit // 8] ^= 1 << bit % 8
        assert not verify_signature(_RFC_KEY, b"", bytes(changed))
    scalar = int.from_bytes(_RFC_SIGNATURE[32:], "little") + _ORDER
    assert not verify_signature(_RFC_KEY, b"", _RFC_SIGNATURE[:32] + scalar.to_bytes(32, "little"))
    assert not verify_signature(b"\x01" + bytes(31), b"", b"\x01" + bytes(63))
    assert not verify_signature(_RFC_KEY, b"", b"short")


def test_the_secret_stays_hidden() -> None:
    """An identity's repr, its attributes' names and pickle give nothing away."""
    identity = Identity(_RFC_SEED)
    assert _RFC_SEED.hex() not in repr(identity) and repr(_RFC_SEED) not in repr(identity)
    with pytest.raises(TypeError):
        pickle.dumps(identity)


@given(st.binary(max_size=80))
def test_base32_round_trip(data: bytes) -> None:
    """`unbase32` reverses `base32`."""
    assert unbase32(base32(data)) == data


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz234567=AZ01 \n", max_size=20))
def test_base32_has_one_form(text: str) -> None:
    """What `unbase32` takes is exactly what `base32` gives."""
    try:
        data = unbase32(text)
    except ValueError:
        return
    assert base32(data) == text
