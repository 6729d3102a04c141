"""Somebody who shows another's key and membership, but does not have the key: only the signature tells.

Everything else in such a proof is right: it is sealed under the keys of this very handshake, whoever dials or answers.
Each case is also run against a handshake that never verifies a signature, to show that it can tell the difference.
"""

from __future__ import annotations

from typing import Any

import pytest

import protocol.trust.handshake as handshake
from protocol.base.errors import RemoteProtocolError
from protocol.trust.handshake import Initiator, Responder, Session
from protocol.trust.identity import Identity
from tests.protocol.samples import ALICE, BOB, RUN_ID

EVE = Identity(b"\xee" * 32)


class Impostor:
    """Shows Alice's public key, and signs with Eve's."""

    def __init__(self, shown: Identity, has: Identity) -> None:
        self.public_key, self.node = shown.public_key, shown.node
        self.sign = has.sign


def _options(identity: Any) -> dict[str, Any]:
    admit = lambda key, credential: "volunteer"  # noqa: E731 - the membership is right: it is Alice's, and public
    return {"identity": identity, "credential": b"membership of alice", "run_id": RUN_ID, "admit": admit}


def impostor_dials() -> Session | None:
    """What Bob believes after Eve has dialled him as Alice."""
    initiator = Initiator(**_options(Impostor(ALICE, EVE)), peer=BOB.node, entropy=b"\x0a" * 32)
    responder = Responder(**_options(BOB), entropy=b"\x0b" * 32)
    responder.receive(initiator.data_to_send())
    initiator.receive(responder.data_to_send())
    return responder.receive(initiator.data_to_send())


def impostor_answers() -> Any:
    """What Bob believes after he has dialled Alice and Eve has answered."""
    initiator = Initiator(**_options(BOB), peer=ALICE.node, entropy=b"\x0a" * 32)
    responder = Responder(**_options(Impostor(ALICE, EVE)), entropy=b"\x0b" * 32)
    responder.receive(initiator.data_to_send())
    return initiator.receive(responder.data_to_send())


@pytest.mark.parametrize("attempt", [impostor_dials, impostor_answers])
def test_who_does_not_have_the_key_is_not_believed(attempt: Any) -> None:
    """As the caller and as the one who is called."""
    with pytest.raises(RemoteProtocolError, match="does not own the key") as caught:
        attempt()
    assert caught.value.reason == "signature"


@pytest.mark.parametrize("attempt", [impostor_dials, impostor_answers])
def test_the_rule_it_rests_on_is_the_signature(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake that never verifies takes Eve for Alice: so the test above fails where the check is missing."""
    monkeypatch.setattr(handshake, "verify_signature", lambda key, message, signature: True)
    session = attempt()
    assert session.peer == ALICE.node


@pytest.mark.parametrize("side", ["dials", "answers"])
def test_a_signature_of_another_transcript_or_side_is_not_believed(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alice's own signature, of this handshake but as the other side, or of another one."""
    other = b"I" if side == "answers" else b"R"

    class Replayed(Impostor):
        def __init__(self) -> None:
            super().__init__(ALICE, ALICE)
            label = len(handshake.PROTO)
            self.sign = lambda message: ALICE.sign(message[:label] + other + message[label + 1 :])

    attempt = impostor_dials if side == "dials" else impostor_answers
    monkeypatch.setitem(globals(), "Impostor", lambda shown, has: Replayed())
    with pytest.raises(RemoteProtocolError, match="does not own the key"):
        attempt()
