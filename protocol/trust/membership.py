"""Who may take part: invites, memberships and revocations, signed by the coordinator's key (state-and-trust 2.4).

Anybody who knows the coordinator's public key (it stands in the join link) can check them without asking anybody,
so servers go on admitting volunteers while the coordinator is down. Time is handed in.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec

from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import ADDRESSES_MAX, CREDENTIAL_BYTES_MAX, ITEMS_MAX, NUMBER_MAX
from protocol.trust.identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    base32,
    node_id,
    unbase32,
    verify_signature,
)

CREDENTIAL_LABEL = b"barnraise/credential/1\0"
"""Stands before every signed body, so that no other signature of the key can pass for a credential."""
RUN_ID_BYTES = 16
NONCE_BYTES = 16
CLOCK_SKEW_S = 300.0
"""Wall clocks of two honest machines may differ by so much; lifetimes are hours."""
MEMBERSHIP_S = 3600.0
"""Life of a membership: a server that no list of revocations reaches goes on believing a banned member for this long.
The coordinator renews at half of it: 200 members are 400 signatures an hour, of 0.05 ms each."""
AWAY_S = 86400.0
"""While the coordinator is away a membership that ran out less than this long ago still counts: training goes on
through a weekend's night without it, and a member that was never renewed is out after a day."""
LISTED_S = MEMBERSHIP_S + AWAY_S + 2 * CLOCK_SKEW_S
"""A banned member stands in the list for so long: after that none of its memberships counts anywhere."""
RENEWAL_S = 30 * 86400.0
"""The coordinator renews a membership that ran out less than this long ago: the computer was off for a month."""

JoinRole = Literal["server", "volunteer", "auditor"]
"""An auditor is a machine of the operator that computes others' work again, and nothing else."""
_RunId = Annotated[bytes, msgspec.Meta(min_length=RUN_ID_BYTES, max_length=RUN_ID_BYTES)]
_Key = Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
_Node = Annotated[NodeId, msgspec.Meta(pattern=r"^[a-z2-7]{52}\Z")]


class Invite(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Lets whoever holds it join; the coordinator counts its uses by `nonce`."""

    issuer: _Key
    """The coordinator's public key."""
    run_id: _RunId
    role: JoinRole
    uses: _Number
    not_after: _Number
    """Seconds since 1970, by the wall clock."""
    nonce: _Nonce


class Membership(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Says that a node takes part in a run, and as what."""

    node: _Node
    role: JoinRole
    run_id: _RunId
    generation: _Number
    """The plan's generation when it was issued."""
    serial: _Number
    """Never given twice: two memberships of one node are told apart by it."""
    not_after: _Number
    """Seconds since 1970, by the wall clock."""


class Revocations(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The members that count no longer, whatever they show; a list with a higher number replaces the one before."""

    run_id: _RunId
    number: _Number
    nodes: Annotated[tuple[_Node, ...], msgspec.Meta(max_length=ITEMS_MAX)]
    """Who was banned within `LISTED_S`, the newest first."""


Credential = Invite | Membership
_Statement = TypeVar("_Statement", Invite, Membership, Revocations)
_encoder = msgspec.msgpack.Encoder()
_credential_decoder: msgspec.msgpack.Decoder[Credential] = msgspec.msgpack.Decoder(Invite | Membership)
_revocations_decoder = msgspec.msgpack.Decoder(Revocations)
_REVOCATIONS_BYTES_MAX = 256 << 10
"""ITEMS_MAX (4,096) nodes of 54 bytes are 221 kB."""


def sign_statement(statement: Invite | Membership | Revocations, coordinator: Identity) -> bytes:
    """The statement's canonical bytes followed by the coordinator's signature over label and bytes."""
    body = _encoder.encode(statement)
    return body + coordinator.sign(CREDENTIAL_LABEL + body)


def join_revocations(run_id: bytes, number: int, nodes: tuple[NodeId, ...], signature: bytes) -> bytes:
    """What `sign_statement` gave, from the parts that travel."""
    return _encoder.encode(Revocations(run_id, number, nodes)) + signature


def open_credential(signed: bytes, coordinator_key: bytes) -> Credential:
    """What `sign_statement` made of an invite or a membership; only the signature and the form are checked.

    Raises `RemoteProtocolError` with the reason "signature", "decode" or "size".
    """
    return _open(signed, coordinator_key, _credential_decoder, CREDENTIAL_BYTES_MAX)


def open_revocations(signed: bytes, coordinator_key: bytes) -> Revocations:
    """The same for a list of revocations."""
    return _open(signed, coordinator_key, _revocations_decoder, _REVOCATIONS_BYTES_MAX)


_Opened = TypeVar("_Opened")


def _open(signed: bytes, key: bytes, decoder: msgspec.msgpack.Decoder[_Opened], bytes_max: int) -> _Opened:
    if not SIGNATURE_BYTES < len(signed) <= bytes_max:
        raise RemoteProtocolError("size", f"a credential of {len(signed)} bytes")
    body, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    if not verify_signature(key, CREDENTIAL_LABEL + body, signature):
        raise RemoteProtocolError("signature", "a credential that the coordinator did not sign")
    try:
        statement = decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("decode", f"a credential that cannot be read: {error}") from None
    if _encoder.encode(statement) != body:
        raise RemoteProtocolError("decode", "a credential that is not in its canonical form")
    return statement


class Trust:
    """What one node believes: the run, the coordinator's key, and the newest revocations."""

    def __init__(self, run_id: bytes, coordinator_key: bytes, *, issuer: bool = False) -> None:
        """`issuer`: this is the coordinator, which also admits invites and memberships that ran out lately."""
        self.run_id = run_id
        self.coordinator_key = coordinator_key
        self._issuer = issuer
        self.revocations = Revocations(run_id, 0, ())
        self.revocations_signed = b""
        """As `revoke` got the newest list; empty before the first."""
        self._revoked: frozenset[NodeId] = frozenset()
        self.coordinator_away: Callable[[], bool] = lambda: False
        """Whether nobody can renew memberships at present (`node.machine.revocation` says how that is found)."""

    def revoke(self, signed: bytes) -> bool:
        """Take a list of revocations; False when a newer one is known. Raises `RemoteProtocolError`."""
        revocations = open_revocations(signed, self.coordinator_key)
        if revocations.run_id != self.run_id:
            raise RemoteProtocolError("run", "revocations of another run")
        if revocations.number <= self.revocations.number:
            return False
        self.revocations, self.revocations_signed = revocations, signed
        self._revoked = frozenset(revocations.nodes)
        return True

    def is_revoked(self, node: NodeId) -> bool:
        """Whether the newest list names `node`."""
        return node in self._revoked

    def admit(self, public_key: bytes, credential: bytes, wall_s: float) -> str:
        """The role of the peer that proved to own `public_key` and showed `credential`.

        Whether an invite is spent only the coordinator's database knows; it asks that after this. Raises
        `RemoteProtocolError` with the reason signature, decode, size, run, identity or credential.
        """
        if public_key == self.coordinator_key:
            if credential:
                raise RemoteProtocolError("credential", "the coordinator's key needs no credential")
            return "coordinator"
        if not credential:
            raise RemoteProtocolError("credential", "no invite and no membership")
        statement = open_credential(credential, self.coordinator_key)
        if statement.run_id != self.run_id:
            raise RemoteProtocolError("run", "a credential of another run")
        late_s = wall_s - statement.not_after - CLOCK_SKEW_S
        if isinstance(statement, Invite):
            if not self._issuer:
                raise RemoteProtocolError("credential", "an invite is for the coordinator only")
            if statement.issuer != self.coordinator_key:
                raise RemoteProtocolError("credential", "an invite that names another issuer")
            if late_s > 0:
                ran_out = f"the invite {_ago(late_s)}"
                raise RemoteProtocolError("credential", ran_out)
            return statement.role
        if statement.node != node_id(public_key):
            raise RemoteProtocolError("identity", "a membership of another node")
        if statement.node in self._revoked:
            raise RemoteProtocolError("credential", f"{statement.node} is banned")
        if late_s > (RENEWAL_S if self._issuer else AWAY_S if self.coordinator_away() else 0):
            raise RemoteProtocolError("credential", f"the membership {_ago(late_s)}")
        return statement.role


def _ago(late_s: float) -> str:
    """How long ago something ran out, for people; who finds that may also have a wrong clock."""
    hours = late_s / 3600
    since = f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.1f} hours"
    return f"ran out {since} ago by this computer's clock (is it right?)"


def check_not_over(invite: Invite, wall_s: float) -> None:
    """Raises `BadInputError` when an invite counts no longer, by this computer's clock."""
    if wall_s > invite.not_after + CLOCK_SKEW_S:
        raise BadInputError(f"join link: it {_ago(wall_s - invite.not_after)}; ask for a new one")


# ---- join link ----------------------------------------------------------------------------------------------------


LINK_SCHEME = "barnraise://"
LINK_CHARACTERS_MAX = 8192
"""Far more than eight addresses of 260 characters and an invite of 2 KiB in base32 take."""
_CHECK_BYTES = 4
_ADDRESS = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


def check_address(text: str) -> None:
    """Raises `BadInputError` unless `text` is HOST:PORT or [IPV6]:PORT with a port of 1 to 65535."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match.group(1)) <= 65535:
        raise BadInputError(f"address: {text[:80]!r} is not HOST:PORT")


class JoinLink(msgspec.Struct, frozen=True):
    """All that a computer needs to join: where the coordinator is, which key it has, which run, and an invite.

    As text: `barnraise://HOST:PORT,HOST:PORT/LETTERS`, shown in single quotes, since zsh reads the brackets of an IPv6
    address, and PowerShell the comma, as its own. The letters are the signed invite (which names key and run) and a
    check over the whole link.
    """

    addresses: tuple[str, ...]
    invite: bytes
    """As `sign_statement` gives it."""

    @property
    def statement(self) -> Invite:
        """The invite, its signature checked against the key that it names: the key to pin. Raises `BadInputError`."""
        try:
            body = self.invite[:-SIGNATURE_BYTES]
            claimed = _credential_decoder.decode(body)
            if not isinstance(claimed, Invite):
                raise BadInputError("join link: it holds no invite")
            opened = open_credential(self.invite, claimed.issuer)
            assert isinstance(opened, Invite)
            return opened
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, RemoteProtocolError) as error:
            raise BadInputError(f"join link: the invite in it is damaged ({error})") from None

    @property
    def coordinator_key(self) -> bytes:
        return self.statement.issuer

    @property
    def coordinator(self) -> NodeId:
        return node_id(self.statement.issuer)

    @property
    def run_id(self) -> bytes:
        return self.statement.run_id

    @property
    def role(self) -> JoinRole:
        return self.statement.role

    def __str__(self) -> str:
        host = ",".join(self.addresses)
        return f"{LINK_SCHEME}{host}/{base32(self.invite + _check(host, self.invite))}"

    def __repr__(self) -> str:
        return f"JoinLink(addresses={self.addresses!r})"  # whoever has the invite may use it: no log shows it

    @classmethod
    def parse(cls, text: str) -> JoinLink:
        """The link in `text`. Raises `BadInputError` when a part is missing or a character was lost or changed."""
        text = text.strip().strip("'\"")  # the Windows prompt hands the quotes on that other shells take off
        if not text.startswith(LINK_SCHEME):
            raise BadInputError(f"join link: it starts with {LINK_SCHEME}, as the coordinator prints it")
        host, slash, letters = text[len(LINK_SCHEME) :].partition("/")
        if not slash or len(text) > LINK_CHARACTERS_MAX:
            raise BadInputError("join link: it is not complete; copy it again, to the end")
        addresses = tuple(host.split(","))
        if len(addresses) > ADDRESSES_MAX:
            raise BadInputError(f"join link: more than {ADDRESSES_MAX} addresses")
        for address in addresses:
            check_address(address)
        try:
            data = unbase32(letters)
        except ValueError:
            raise BadInputError("join link: it is damaged; copy it again") from None
        invite, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if _check(host, invite) != check:
            raise BadInputError("join link: it is damaged; copy it again")
        link = cls(addresses, invite)
        _ = link.statement
        return link


def _check(host: str, invite: bytes) -> bytes:
    content = host.encode() + b"\0" + invite
    return hashlib.blake2b(content, digest_size=_CHECK_BYTES, person=b"br-join-link").digest()
