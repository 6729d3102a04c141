"""Who vouches for a file: a server's signature, with the membership by which the coordinator made it a server.

Whoever knows the coordinator's key (it stands in every join link) can check it years later without asking anybody. A
membership that has run out since still says who the server was when it signed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.trust.identity import PUBLIC_KEY_BYTES, Identity, node_id, verify_signature
from protocol.trust.membership import JoinRole, Membership, open_credential

SEAL_LABEL = b"barnraise/seal/1\0"
"""Stands before every sealed statement, so that no other signature of the key can pass for one."""
SEAL_BYTES_MAX = 8192
"""A seal takes about 700."""


class Seal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As it lies beside a file, in JSON; byte strings in base64."""

    coordinator: bytes
    """The key that the membership is signed with."""
    membership: bytes
    public_key: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """Who signed a statement."""

    node: NodeId
    role: JoinRole
    run_id: bytes
    coordinator_key: bytes
    """Whose server it was, by what the seal says: compare it with the one that you know."""


@dataclass(frozen=True)
class Sealer:
    """A server that signs what it writes; `credential` is what it shows at the moment."""

    identity: Identity
    credential: Callable[[], bytes]
    coordinator_key: bytes

    def seal(self, statement: bytes) -> bytes:
        """The seal of a statement that says what it is about."""
        seal = Seal(
            coordinator=self.coordinator_key,
            membership=self.credential(),
            public_key=self.identity.public_key,
            signature=self.identity.sign(SEAL_LABEL + statement),
        )
        return msgspec.json.encode(seal)


def open_seal(data: bytes, statement: bytes, roles: tuple[JoinRole, ...] = ("server",)) -> Sealed:
    """Who signed this statement, being one of `roles`.

    Raises `RemoteProtocolError` ("decode", "size" or "signature"): it is no seal, one of something else, or of
    somebody whom the coordinator that it names did not make a server.
    """
    if len(data) > SEAL_BYTES_MAX:
        raise RemoteProtocolError("size", f"a seal of {len(data)} bytes")
    try:
        seal = msgspec.json.decode(data, type=Seal)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError("decode", f"no seal: {error}") from None
    if len(seal.coordinator) != PUBLIC_KEY_BYTES:
        raise RemoteProtocolError("decode", "a seal without a coordinator's key")
    membership = open_credential(seal.membership, seal.coordinator)
    node = node_id(seal.public_key)
    if not isinstance(membership, Membership) or membership.role not in roles or membership.node != node:
        raise RemoteProtocolError("signature", f"{node} is no {' and no '.join(roles)} by what it shows")
    if not verify_signature(seal.public_key, SEAL_LABEL + statement, seal.signature):
        raise RemoteProtocolError("signature", f"not what {membership.role} {node} signed")
    return Sealed(node, membership.role, membership.run_id, seal.coordinator)
