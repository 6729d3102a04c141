"""The clocks of a pool follow its workers, but leave the bytes their time."""

from __future__ import annotations

from node.server.conduct import PATIENCE, PATIENCE_MIN_S, SAMPLES_MIN, Conduct
from node.server.patience import Patience
from protocol.base.ids import NodeId

LEASE_S = 600.0
TRANSFER_S, UPLOAD_S = 27.0, 138.0
"""Of 1.1 B parameters in eight stages, on a line of 10 Mbit/s up."""


def answered(seconds: float) -> Conduct:
    conduct = Conduct()
    for _ in range(SAMPLES_MIN):
        conduct.answered(NodeId("near"), "result", seconds, 0.0)
        conduct.answered(NodeId("near"), "gradient", seconds, 0.0)
    return conduct


def test_those_who_answer_at_once_take_no_time_from_those_who_send() -> None:
    """A server computes and keeps; a volunteer sends an activation, perhaps behind a contribution, or the contribution
    itself: it has the time that this takes on a slow line."""
    patience = Patience(LEASE_S, LEASE_S, TRANSFER_S)
    patience.allow_upload(UPLOAD_S)
    assert patience.learn(answered(0.01)) == (True, True)
    assert (patience.result_s, patience.gradient_s) == (TRANSFER_S + UPLOAD_S, UPLOAD_S)
    assert patience.late_result_s(1) == 2 * (TRANSFER_S + UPLOAD_S)
    assert patience.late_result_s(10) == LEASE_S


def test_without_bytes_that_count_workers_alone_set_the_clocks() -> None:
    """As in a demo: a hung worker is found out within seconds; and no clock follows every small change."""
    patience = Patience(LEASE_S, LEASE_S, 0.1)
    patience.allow_upload(0.2)
    patience.learn(answered(0.01))
    assert (patience.result_s, patience.gradient_s) == (PATIENCE_MIN_S, PATIENCE_MIN_S)
    assert patience.learn(answered(1.1 * PATIENCE_MIN_S / PATIENCE)) == (False, False)
    assert patience.learn(answered(2 * PATIENCE_MIN_S / PATIENCE)) == (True, True)
    assert patience.result_s == 2 * PATIENCE_MIN_S


def test_nobody_has_longer_than_the_run_says() -> None:
    """However slow the line that the sizes ask for."""
    patience = Patience(8.0, 20.0, TRANSFER_S)
    patience.learn(answered(1.0))
    assert patience.result_s == 8.0
