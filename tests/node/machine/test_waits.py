"""What a node says that it waits for, as a person reads it."""

from __future__ import annotations

import pytest

from node.machine.waits import Wait, listed, sentence, work_name
from protocol.base.ids import TaskId


def test_waits_are_put_by_step_counted_from_one() -> None:
    """The oldest step first, each thing once, and nothing where nothing is waited for."""
    waits = [Wait(250, "6 weight gradients"), None, Wait(249, "a"), Wait(249, "b"), Wait(249, "a")]
    assert sentence(waits) == "step 250: a; b; step 251: 6 weight gradients"
    assert sentence([None]) == ""


@pytest.mark.parametrize(
    ("ops", "name"),
    [("F", "forward"), ("B", "backward"), ("FLB", "forward and backward"), ("L", "forward"), ("W", "backward")],
)
def test_work_is_named_without_codes(ops: str, name: str) -> None:
    """By what is computed and for which microbatch."""
    tasks = [TaskId(249, 3, 1, op) for op in ops]  # type: ignore[arg-type]
    assert work_name(tasks) == f"{name} of microbatch 3"


@pytest.mark.parametrize(
    ("names", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_names_are_listed_as_one_speaks(names: list[str], text: str) -> None:
    """With an "and" before the last."""
    assert listed(names) == text
