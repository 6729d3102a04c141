"""Every alert fires when it should and keeps quiet when it should, by Prometheus's own evaluation (promtool)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coordinator.monitoring.files import rules_file, runbook
from coordinator.monitoring.rules import alerts
from tests.coordinator.monitoring.alert_cases import MINUTES, Case, cases, healthy

EVERY = "4m"
"""Of the evaluations: seldom, since each case is three hours of them."""
RUNBOOK = Path(__file__).parents[3] / "deploy" / "RUNBOOK.md"


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed, so NO alert is tried here: ./deploy/test-deps installs it")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def as_test(case: Case) -> dict[str, Any]:
    """promtool's form of a case: at the end exactly these alerts fire."""
    series = {name: values for name, values in {**healthy(), **case.differs}.items() if values is not None}
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(case.fires)]
    return {
        "name": case.title,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES - 1}m",
                "exp_samples": expected,
            }
        ],
    }


@pytest.mark.slow
def test_each_alert_fires_in_its_case_and_no_other_does(tmp_path: Path) -> None:
    """The healthy run is quiet; each fault raises its alert alone; near misses raise nothing. In virtual time."""
    (tmp_path / "rules.yml").write_text(rules_file())
    tests = {"rule_files": ["rules.yml"], "evaluation_interval": EVERY, "tests": [as_test(case) for case in cases()]}
    (tmp_path / "test.yml").write_text(json.dumps(tests))  # JSON is YAML
    promtool("test", "rules", str(tmp_path / "test.yml"))


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    """A rule that is added needs its fault; every case without it is one in which it must keep quiet."""
    known = {alert.name for alert in alerts()}
    assert set().union(*(case.fires for case in cases())) == known
    assert [case.title for case in cases() if not case.fires] != []


def test_every_alert_says_what_to_do_and_the_runbook_is_what_the_rules_say() -> None:
    """deploy/RUNBOOK.md is made: `barnraise monitoring write` writes the same text."""
    names = [alert.name for alert in alerts()]
    assert len(set(names)) == len(names)
    for alert in alerts():
        assert (
            alert.summary and alert.meaning.endswith(".") and alert.look.endswith((".", "?")) and alert.do.endswith(".")
        )
        assert (alert.severity == "page") <= (alert.hold_s <= 600), f"{alert.name}: a page must come soon"
    assert RUNBOOK.read_text() == runbook()
