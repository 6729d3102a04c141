"""Who a node is: an Ed25519 key, and the name that follows from it (state-and-trust 2.1).

The private half leaves this module only as the 32-byte seed that `protocol.drive.keyfile` writes; nothing here has
a repr, an equality or a pickle that could show it.
"""

from __future__ import annotations

import base64
import hashlib
import re

import nacl.bindings
import nacl.exceptions

from protocol.base.ids import NodeId

NODE_ID_LABEL = b"barnraise-node-id-1"
NODE_ID_PATTERN = re.compile(r"[a-z2-7]{52}")
SEED_BYTES = 32
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64


def base32(data: bytes) -> str:
    """RFC 4648 base32 in lower case without padding: safe in file names, URLs and shells."""
    return base64.b32encode(data).decode("ascii").lower().rstrip("=")


def unbase32(text: str) -> bytes:
    """The reverse of `base32`; only the one text that `base32` gives is taken. Raises `ValueError`."""
    if not re.fullmatch(r"[a-z2-7]*", text):
        raise ValueError("not base32")
    data = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    if base32(data) != text:
        raise ValueError("not base32")
    return data


def node_id(public_key: bytes) -> NodeId:
    """The name of the node that owns `public_key`: base32 of BLAKE2b-256 over a label and the key, 52 characters."""
    return NodeId(base32(hashlib.blake2b(NODE_ID_LABEL + public_key, digest_size=32).digest()))


def is_node_id(text: str) -> bool:
    """Whether `text` has the form of a node id; names of files and tables are made only from such."""
    return NODE_ID_PATTERN.fullmatch(text) is not None


class Identity:
    """A key pair. Signing is all it does; there is no way to read the private half but `seed`."""

    __slots__ = ("_secret", "node", "public_key")

    def __init__(self, seed: bytes) -> None:
        """`seed`: 32 bytes from the system's generator or from a key file."""
        if len(seed) != SEED_BYTES:
            raise ValueError(f"an identity's seed has {SEED_BYTES} bytes, not {len(seed)}")
        self.public_key, self._secret = nacl.bindings.crypto_sign_seed_keypair(seed)
        self.node = node_id(self.public_key)

    @property
    def seed(self) -> bytes:
        """The secret itself, for the key file and nothing else."""
        return self._secret[:SEED_BYTES]

    def sign(self, message: bytes) -> bytes:
        """A 64-byte Ed25519 signature (RFC 8032). `message` starts with a label that says what is signed."""
        return nacl.bindings.crypto_sign(message, self._secret)[:SIGNATURE_BYTES]

    def __repr__(self) -> str:
        return f"Identity(node={self.node!r})"

    def __reduce__(self) -> str:
        raise TypeError("an identity is not serialized")


def verify_signature(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` over `message` is by `public_key`; libsodium refuses small orders and malleated S."""
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        nacl.bindings.crypto_sign_open(signature + message, public_key)
    except nacl.exceptions.BadSignatureError:
        return False
    return True
