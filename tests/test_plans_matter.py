"""Rules of courses, sums and clocks that the simulated world cannot miss: a test fails where one is taken away.

The others of the same list are mutants of the world (`simulation/mutants_of_courses.py`, `mutants_of_segments.py`); it
counts in whole numbers, so it has neither a loss per token nor scales.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rules import Rule, fails_without

VISITED = 0.75
"""Of a step's tokens, those that a stage sees which one of four routes leaves out."""
TRAINS = "numerics.test_reference:test_stages_and_shards_train_as_the_reference"
WORKER = "node.compute.worker:StageWorker"


def _a_loss_over_the_tokens_that_the_stage_sees(original: Any) -> Any:
    def init(self: Any, *words: Any, **named: Any) -> None:
        original(self, *words, **named)
        self._loss_scale /= VISITED

    return init


def _the_scales_of_the_version_before(original: Any) -> Any:
    def set_grid(self: Any, version: int, shards: Any) -> None:
        before = self._grid_steps.get(version - 1)
        original(self, version, shards)
        if before is not None:
            self._grid_steps[version] = before

    return set_grid


def _a_word_renews_the_clock(original: Any) -> Any:
    def tail(self: Any, step: int, now: float) -> None:
        self._tails.pop(step, None)
        original(self, step, now)

    return tail


RULES = (
    Rule("a loss over visited tokens", TRAINS, {f"{WORKER}.__init__": _a_loss_over_the_tokens_that_the_stage_sees},
         {"cuts": (4,), "form": "bf16", "gradients": "gi", "delay": 0}),
    Rule("scales of the version before", TRAINS, {f"{WORKER}.set_grid": _the_scales_of_the_version_before},
         {"cuts": (4,), "form": "bf16", "gradients": "gi", "delay": 0}),
    Rule("a gradient's clock without progress",
         "node.server.test_pool:test_bytes_that_arrive_renew_the_clock_and_nothing_else_does",
         {"node.server.pool:Pool.tail": _a_word_renews_the_clock}),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.point)
def test_a_test_fails_when_its_rule_is_taken_away(rule: Rule, tmp_path: Path) -> None:
    """And passes with the rule in its place."""
    fails_without(rule, tmp_path)
