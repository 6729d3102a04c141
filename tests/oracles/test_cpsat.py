"""The oracle is judged first: it must prove again what was proven before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.planning.order.pipeline_problem import PipelineProblem
from coordinator.planning.problems import load_problem
from tests.oracles.cpsat import solve_pipeline

PROBLEMS = sorted((Path(__file__).parents[1] / "data/problems").glob("schedule_*.json"))


@pytest.mark.parametrize("path", PROBLEMS, ids=lambda path: path.stem)
def test_the_solver_proves_the_known_optimum_again(path: Path) -> None:
    """Each stored problem's optimum is what the solver finds and proves."""
    solved = solve_pipeline(load_problem(path, "schedule", PipelineProblem))
    assert solved.proven
    assert solved.makespan_s == json.loads(path.read_text())["known"]["optimum_s"]


def test_there_are_problems_to_prove() -> None:
    """An empty folder would make the test above say nothing."""
    assert len(PROBLEMS) == 15
