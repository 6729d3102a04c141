"""`barnraise plan partition`: the JSON of coordinator/README.md, a table for people, one sentence for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from protocol.cli import main

PROBLEM = Path(__file__).parents[2] / "data/problems/partition_gpt2_345m_4x8_recompute.json"
SMALL: dict[str, Any] = {
    "kind": "partition",
    "forward_s": [1, 2, 3],
    "backward_s": [2, 4, 6],
    "link_s": 0.5,
    "stages": 2,
    "microbatches": 4,
}


def run(*arguments: str) -> Result:
    """The command as a person would type it."""
    return CliRunner().invoke(main, ["plan", "partition", *arguments])


def test_the_answer_holds_what_the_format_asks_for() -> None:
    """Within the optimum of the problem file, with the keys of coordinator/README.md and no others."""
    result = run(str(PROBLEM), "--json", "--seed", "7")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    optimum_s = json.loads(PROBLEM.read_text())["known"]["optimum_s"]
    assert answer["makespan_s"] <= 1.02 * optimum_s
    assert answer["lower_bound_s"] <= optimum_s * (1 + 1e-9)
    assert answer["cuts"] == [15, 28, 41]
    assert answer["slices"]["makespan_s"] <= answer["makespan_s"]
    assert (answer["seed"], answer["master_stage"]) == (7, 0)
    assert set(answer) == {
        "cuts",
        "master_stage",
        "slices",
        "makespan_s",
        "lower_bound_s",
        "search_s",
        "stopped",
        "seed",
    }


def test_the_known_optimum_is_not_read(tmp_path: Path) -> None:
    """A wrong `known` changes nothing."""
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(SMALL | {"known": {"optimum_s": 1.0}}))
    with_known = json.loads(run(str(file), "--json").output)
    file.write_text(json.dumps(SMALL))
    without = json.loads(run(str(file), "--json").output)
    assert with_known | {"search_s": 0} == without | {"search_s": 0}


def test_a_budget_is_taken() -> None:
    """However short the time, there is an answer with a valid bound."""
    answer = json.loads(run(str(PROBLEM), "--json", "--budget-s", "1e-9").output)
    assert len(answer["cuts"]) == 3
    assert answer["lower_bound_s"] <= answer["makespan_s"] * (1 + 1e-9)


def test_people_get_a_table() -> None:
    """Stages, their blocks, the master and what ended the search."""
    output = run(str(PROBLEM)).output
    for words in ("50 blocks on 4 stages", "0–14 (15)", "master", "8721.53 s, 100.0% of the bound", "optimal"):
        assert words in output


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stages": 4}, "problem.json: stages: 4 stages cannot share 3 blocks"),
        ({"stages": 0}, "problem.json: stages: 0 is not between"),
        ({"stages": 10**15}, "problem.json: stages: 1000000000000000 is not between"),
        ({"microbatches": 10**15}, "problem.json: microbatches: 1000000000000000 is not between"),
        ({"stages": -1}, "problem.json: stages: -1 is not a finite number"),
        ({"backward_s": [1, 2]}, "problem.json: backward_s: 3 values wanted"),
        ({"forward_s": [1, float("nan"), 3]}, "problem.json: forward_s[1]: nan"),
        ({"link_s": -0.1}, "problem.json: link_s: -0.1"),
        ({"microbatches": 0}, "problem.json: microbatches: 0"),
        ({"linc_s": 1}, "linc_s"),
        ({"kind": "schedule"}, "problem.json: kind: expected 'partition'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    """The sentence names the file and the key; nothing else is printed."""
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(SMALL | change))
    result = run(str(file), "--json")
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    """Also when it is missing altogether."""
    file = tmp_path / "problem.json"
    file.write_text(json.dumps({key: value for key, value in SMALL.items() if key != "stages"}))
    result = run(str(file))
    assert result.exit_code == 2
    assert "stages" in result.stderr
