"""A decision that would blow the step up is refused, whoever decides."""

from __future__ import annotations

import pytest

from node.server.bounds import check_bounds
from protocol.base.errors import RemoteProtocolError
from protocol.messages import Commit, Decision
from tests.node.setting import make_context


@pytest.mark.parametrize("factor", [1.0000001, 1e9, -0.5])
def test_a_clip_factor_only_makes_smaller(factor: float) -> None:
    """Above one it would scale the whole batch's gradient up; below zero it would turn it around."""
    context = make_context("f0")
    for message in (
        Decision(ledger_generation=1, step=0, clip_factor=factor, skipped=False),
        Commit(ledger_generation=1, step=0, contributions=(), clip_factor=factor, skipped=False),
    ):
        with pytest.raises(RemoteProtocolError, match="clipping only makes smaller"):
            check_bounds(context, message)
    for fine in (0.0, 0.5, 1.0):
        check_bounds(context, Decision(ledger_generation=1, step=0, clip_factor=fine, skipped=False))
