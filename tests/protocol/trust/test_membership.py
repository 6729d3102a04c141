"""Who is admitted: every rule of `Trust.admit`, and what damage to a credential or a join link does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.base.limits import CREDENTIAL_BYTES_MAX
from protocol.trust.identity import Identity
from protocol.trust.membership import (
    AWAY_S,
    CLOCK_SKEW_S,
    CREDENTIAL_LABEL,
    RENEWAL_S,
    Invite,
    JoinLink,
    Membership,
    Revocations,
    Trust,
    check_not_over,
    open_credential,
    sign_statement,
)
from tests.protocol.samples import ALICE, BOB, COORDINATOR, RUN_ID

_NOW = 1_700_000_000.0
_LATER = int(_NOW) + 3600


def _invite(**changes: object) -> bytes:
    terms = Invite(COORDINATOR.public_key, RUN_ID, "volunteer", 1, _LATER, bytes(16))
    return sign_statement(msgspec.structs.replace(terms, **changes), COORDINATOR)


def _membership(**changes: object) -> bytes:
    terms = Membership(ALICE.node, "server", RUN_ID, 1, 7, _LATER)
    return sign_statement(msgspec.structs.replace(terms, **changes), COORDINATOR)


def _refusal(trust: Trust, credential: bytes, identity: Identity = ALICE, now: float = _NOW) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        trust.admit(identity.public_key, credential, now)
    return caught.value.reason


def test_roles_come_from_credentials() -> None:
    """The coordinator's key needs no paper, a membership gives its role, an invite its role at the coordinator."""
    servers, coordinators = Trust(RUN_ID, COORDINATOR.public_key), Trust(RUN_ID, COORDINATOR.public_key, issuer=True)
    assert servers.admit(COORDINATOR.public_key, b"", _NOW) == "coordinator"
    assert servers.admit(ALICE.public_key, _membership(), _NOW) == "server"
    assert coordinators.admit(BOB.public_key, _invite(), _NOW) == "volunteer"


def test_refusals() -> None:
    """Nothing, a stranger's paper, another run's, another node's, and an invite shown to a server are refused."""
    trust = Trust(RUN_ID, COORDINATOR.public_key)
    assert _refusal(trust, b"") == "credential"
    assert _refusal(trust, _invite()) == "credential"
    assert _refusal(trust, sign_statement(Membership(ALICE.node, "server", RUN_ID, 1, 7, _LATER), BOB)) == "signature"
    assert _refusal(trust, _membership(run_id=bytes(16))) == "run"
    assert _refusal(trust, _membership(), BOB) == "identity"
    assert _refusal(trust, bytes(CREDENTIAL_BYTES_MAX + 1)) == "size"
    assert _refusal(trust, _membership(), COORDINATOR) == "credential"


def test_expiry() -> None:
    """Papers run out by the wall clock that is handed in, with room for skew; the coordinator renews old ones."""
    servers, coordinators = Trust(RUN_ID, COORDINATOR.public_key), Trust(RUN_ID, COORDINATOR.public_key, issuer=True)
    at_the_edge = _LATER + CLOCK_SKEW_S
    assert servers.admit(ALICE.public_key, _membership(), at_the_edge) == "server"
    assert _refusal(servers, _membership(), now=at_the_edge + 1) == "credential"
    assert coordinators.admit(ALICE.public_key, _membership(), at_the_edge + RENEWAL_S) == "server"
    assert _refusal(coordinators, _membership(), now=at_the_edge + RENEWAL_S + 1) == "credential"
    assert _refusal(coordinators, _invite(), now=at_the_edge + 1) == "credential"


def test_while_the_coordinator_is_away_a_membership_counts_for_another_day_and_no_longer() -> None:
    """Nobody can renew it then; a ban that is known still counts."""
    servers, away = Trust(RUN_ID, COORDINATOR.public_key), True
    servers.coordinator_away = lambda: away
    at_the_edge = _LATER + CLOCK_SKEW_S + AWAY_S
    assert servers.admit(ALICE.public_key, _membership(), at_the_edge) == "server"
    assert _refusal(servers, _membership(), now=at_the_edge + 1) == "credential"
    away = False
    assert _refusal(servers, _membership(), now=at_the_edge) == "credential"
    away = True
    servers.revoke(sign_statement(Revocations(RUN_ID, 1, (ALICE.node,)), COORDINATOR))
    assert _refusal(servers, _membership(), now=at_the_edge) == "credential"


def test_revocation() -> None:
    """A banned member is refused at once, whatever it shows; older lists, other runs' and signers' change nothing."""
    trust = Trust(RUN_ID, COORDINATOR.public_key)
    assert trust.revoke(sign_statement(Revocations(RUN_ID, 2, (ALICE.node,)), COORDINATOR))
    assert _refusal(trust, _membership()) == _refusal(trust, _membership(serial=8)) == "credential"
    assert not trust.revoke(sign_statement(Revocations(RUN_ID, 1, ()), COORDINATOR))
    assert _refusal(trust, _membership()) == "credential"
    for bad in (Revocations(bytes(16), 9, ()), Revocations(RUN_ID, 9, ())):
        with pytest.raises(RemoteProtocolError):
            trust.revoke(sign_statement(bad, COORDINATOR if bad.run_id != RUN_ID else BOB))
    assert trust.revoke(sign_statement(Revocations(RUN_ID, 3, ()), COORDINATOR)), "a ban that was lifted"
    assert trust.admit(ALICE.public_key, _membership(), _NOW) == "server"


def test_no_other_signature_passes() -> None:
    """A body that the coordinator signed under another label, or in a longer form, is no credential."""
    body = msgspec.msgpack.encode(Membership(ALICE.node, "server", RUN_ID, 1, 7, _LATER))
    with pytest.raises(RemoteProtocolError, match="signature"):
        open_credential(body + COORDINATOR.sign(body), COORDINATOR.public_key)
    longer = body.replace(b"\x01\x07", b"\x01\xcc\x07")
    assert longer != body
    with pytest.raises(RemoteProtocolError, match="decode"):
        open_credential(longer + COORDINATOR.sign(CREDENTIAL_LABEL + longer), COORDINATOR.public_key)
    coordinator_role = body.replace(b"\xa6server", b"\xabcoordinator")
    with pytest.raises(RemoteProtocolError, match="decode"):
        open_credential(
            coordinator_role + COORDINATOR.sign(CREDENTIAL_LABEL + coordinator_role), COORDINATOR.public_key
        )


def test_every_bit_of_a_credential_counts() -> None:
    """No flipped bit, cut or added byte of a membership is accepted."""
    good = _membership()
    for bit in range(8 * len(good)):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            open_credential(bytes(changed), COORDINATOR.public_key)
    for changed_bytes in (*(good[:end] for end in range(len(good))), good + b"\0", b"\0" + good):
        with pytest.raises(RemoteProtocolError):
            open_credential(changed_bytes, COORDINATOR.public_key)


def test_join_link_round_trip() -> None:
    """A link holds addresses, key, run and invite, survives spaces around it, and needs no quotes in a shell."""
    link = JoinLink(("127.0.0.1:7000", "example.org:443", "[::1]:7000"), _invite())
    text = str(link)
    assert JoinLink.parse(f"  {text}\n") == link
    assert link.coordinator_key == COORDINATOR.public_key and link.coordinator == COORDINATOR.node
    assert link.run_id == RUN_ID and link.role == "volunteer"
    assert not set(text) & set(" \t'\"$&;|<>()*?!`\\#~{}")
    assert link.invite.hex() not in repr(link) and text not in repr(link)


@given(st.data())
def test_damaged_join_links(data: st.DataObject) -> None:
    """A changed, lost or added character is noticed, and the error is one for the person at the keyboard."""
    text = str(JoinLink(("127.0.0.1:7000",), _invite()))
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz234567:/.,[]=A "))
    how = data.draw(st.sampled_from(("change", "lose", "add")))
    damaged = text[:place] + ("" if how == "lose" else other) + text[place + (how != "add") :]
    if damaged.strip() != text:
        with pytest.raises(BadInputError):
            JoinLink.parse(damaged)


@given(st.text(max_size=200).map(lambda text: "barnraise://" + text))
def test_any_text_as_join_link(text: str) -> None:
    """Whatever is typed, nothing but `BadInputError` comes out."""
    with pytest.raises(BadInputError):
        JoinLink.parse(text)


def test_who_finds_something_expired_is_asked_about_the_clock() -> None:
    """A computer whose clock is a month ahead finds everything expired, and its owner cannot guess why."""
    trust = Trust(RUN_ID, COORDINATOR.public_key)
    with pytest.raises(
        RemoteProtocolError, match=r"the membership ran out 31 days ago by this computer's clock \(is it"
    ):
        trust.admit(ALICE.public_key, _membership(), _LATER + 31 * 86400 + CLOCK_SKEW_S)
    invite = open_credential(_invite(), COORDINATOR.public_key)
    assert isinstance(invite, Invite)
    check_not_over(invite, _LATER)
    with pytest.raises(BadInputError, match=r"^join link: it ran out 2\.0 hours ago .*; ask for a new one$"):
        check_not_over(invite, _LATER + 7200)
