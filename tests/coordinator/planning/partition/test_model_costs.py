"""Seconds and bytes per block, from arithmetic and from measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.planning.partition.model_costs import CostRules, block_costs
from protocol.base.errors import BadInputError
from tests.protocol.run.test_model_spec import GPT2_MEDIUM, TINYLLAMA

PROBLEM = Path(__file__).parents[3] / "data/problems/partition_gpt2_345m_4x8_recompute.json"
#: GPT-2 345M as the problem file has it: the vocabulary is padded to a multiple of 128.
GPT2_345M = replace(GPT2_MEDIUM, vocabulary=50304)


def test_gpt2_costs_are_those_of_the_problem_file() -> None:
    """Millions of operations per token, with recompute: our arithmetic is the file's to the last bit."""
    problem = json.loads(PROBLEM.read_text())
    costs = block_costs(GPT2_345M, CostRules(flops_per_s=1e6, tokens=1, recompute=True))
    assert [cost.forward_s for cost in costs] == problem["forward_s"]
    assert [cost.backward_s for cost in costs] == problem["backward_s"]


def test_recompute_trades_memory_for_time() -> None:
    """Every block but the head keeps its input only, and pays its forward again."""
    kept = block_costs(TINYLLAMA, CostRules(flops_per_s=1e12, tokens=2048))
    recomputed = block_costs(TINYLLAMA, CostRules(flops_per_s=1e12, tokens=2048, recompute=True))
    for before, after in zip(kept[1:-1], recomputed[1:-1], strict=True):
        assert after.backward_s == pytest.approx(before.backward_s + before.forward_s)
        assert after.activation_bytes == 2048 * 2048 * 4 < before.activation_bytes
    assert recomputed[-1] == kept[-1]


@pytest.mark.parametrize("key", ["flops_per_s", "tokens", "value_bytes", "parameter_bytes"])
def test_rules_that_cannot_be_are_refused_by_name(key: str) -> None:
    """Nothing is computed with zero."""

    def rules(flops_per_s: float = 1.0, tokens: int = 1, value_bytes: int = 4, parameter_bytes: int = 8) -> CostRules:
        return CostRules(
            flops_per_s=flops_per_s, tokens=tokens, value_bytes=value_bytes, parameter_bytes=parameter_bytes
        )

    assert rules(**{key: 2}) != rules()
    with pytest.raises(BadInputError, match=f"^{key}: "):
        rules(**{key: 0})
