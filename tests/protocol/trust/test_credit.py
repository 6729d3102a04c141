"""The signed ledger of a run's credit."""

from __future__ import annotations

import json

import pytest

from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.trust.credit import CreditLedger, CreditRow, open_credit, sign_credit
from protocol.trust.identity import Identity

COORDINATOR = Identity(bytes(range(32)))
ROW = CreditRow(
    node=NodeId("v" * 52), tasks=40, tokens=4000, audited=22, credited=40, since_unix_s=1, until_unix_s=9, why=""
)
LEDGER = CreditLedger(run="demo", run_id="00" * 16, written_unix_s=10, rows=(ROW,))


def test_anybody_can_check_it_also_after_another_program_has_written_it_anew() -> None:
    data = sign_credit(LEDGER, COORDINATOR)
    assert open_credit(data) == (LEDGER, COORDINATOR.node)
    assert open_credit(json.dumps(json.loads(data), sort_keys=True).encode()) == (LEDGER, COORDINATOR.node)


@pytest.mark.parametrize("key", ["tasks", "tokens", "audited", "credited"])
def test_a_number_that_was_changed_is_found(key: str) -> None:
    said = json.loads(sign_credit(LEDGER, COORDINATOR))
    said["ledger"]["rows"][0][key] += 1
    with pytest.raises(BadInputError, match="changed"):
        open_credit(json.dumps(said).encode())


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"ledger": 1}'])
def test_what_is_no_ledger_is_refused_in_a_sentence(data: bytes) -> None:
    with pytest.raises(BadInputError, match="no ledger of credit"):
        open_credit(data)
