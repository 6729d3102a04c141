"""The files that coordinator/README.md shows are read by the commands that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.commands.plan import plan
from coordinator.planning.order.pipeline_problem import PipelineProblem
from coordinator.planning.partition.planner import PartitionProblem
from coordinator.planning.placement.problem import PlacementProblem
from coordinator.planning.problems import Problem
from coordinator.planning.routes.model import RoutesProblem

TEXT = (Path(__file__).parents[3] / "coordinator" / "README.md").read_text()
EXAMPLES = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]


def said(tmp_path: Path, kind: str, before: list[str]) -> Result:
    """What a command says of the page's example of a kind."""
    (example,) = (example for example in EXAMPLES if example["kind"] == kind)
    file, run = tmp_path / "example.json", tmp_path / "RUN.toml"
    file.write_text(json.dumps(example))
    run.write_text("")
    arguments = [str(run) if word == "RUN" else str(file) if word == "FILE" else word for word in before]
    return CliRunner().invoke(plan, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("network", ["run", "RUN", "FILE", "--budget-s", "0.2"]),
        ("network", ["tune", "RUN", "FILE", "--segments", "1"]),
        ("schedule", ["schedule", "FILE", "--budget-s", "0.2"]),
    ],
)
def test_the_pages_examples_work(tmp_path: Path, kind: str, command: list[str]) -> None:
    """As they stand, they are planned."""
    found = said(tmp_path, kind, command)
    assert found.exit_code == 0 and "bound" in found.output


@pytest.mark.parametrize(
    ("kind", "struct"),
    [
        ("schedule", PipelineProblem),
        ("partition", PartitionProblem),
        ("routes", RoutesProblem),
        ("placement", PlacementProblem),
    ],
)
def test_the_page_names_every_key_of_every_problem(kind: str, struct: type[Problem]) -> None:
    """One row for each kind, with all the keys that its reader takes."""
    (row,) = (line for line in TEXT.splitlines() if line.startswith(f"| `{kind}` |"))
    named = set(re.findall(r"`(\w+)", row))
    assert set(struct.__struct_fields__) - {"known"} | {kind} == named | {"kind"}
