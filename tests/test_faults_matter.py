"""Each of the fifteen violations in `simulation/VIOLATIONS.md` has a rule that, taken away, is missed.

Most are taken away in the simulated world (`simulation/mutants.py`), and seeds of it find that. Here are those that one
machine or one file shows: a test fails without them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tests.simulation.mutants  # noqa: F401 - registers them
from node.machine.records import StepDone
from tests.rules import Rule, always, fails_without, nothing_done
from tests.simulation.mutant_registry import MUTANTS

VIOLATIONS = Path(__file__).parent / "simulation" / "VIOLATIONS.md"


def _only_what_has_its_end_on_record(original: Any) -> Any:
    """That a checkpoint has the step proves nothing."""

    def start(self: Any, records: list[Any], now: float) -> str:
        missing: str = original(self, records, now)
        ended = {record.step for record in records if isinstance(record, StepDone)}
        self._reports = {step: report for step, report in self._reports.items() if step in ended}
        return missing

    return start


def _a_checkpoint_vouches_for_nothing(original: Any) -> Any:
    def audit_stage(verdict: Any, *words: Any) -> None:
        verdict.vouched = 0
        original(verdict, *words)

    return audit_stage


def _ages(original: Any) -> int:
    return 10**9


RULES = (
    Rule("3", "node.server.test_conduct:test_a_bad_worker_costs_no_more_than_a_killed_one",
         {"node.server.conduct:Conduct.overtaken_by_others": always(None)}, {"bad": "hangs"}),
    Rule("5", "coordinator.live.test_seating:test_a_server_whose_fellows_reach_it_is_not_given_up",
         {"coordinator.live.spares:seen_by_fellows": always(False)}),
    Rule("6", "node.machine.test_kept_plan:test_a_server_restarts_without_its_coordinator",
         {"node.machine.kept_plan:Resumption.take": always(None)}),
    Rule("12", "node.server.test_decider:"
               "test_a_step_that_a_checkpoint_kept_is_reported_though_its_end_was_never_durable",
         {"node.server.decider:DeciderRole.start": _only_what_has_its_end_on_record}),
    Rule("13", "node.test_audit:test_a_deciders_folder_that_was_deleted_or_rolled_back_is_no_loss",
         {"node.audit:_audit_stage": _a_checkpoint_vouches_for_nothing}),
    Rule("14", "node.server.test_shard:test_pruning_keeps_the_snapshot_that_a_restart_needs",
         {"node.server.saves:Saves.snapshot_durable": nothing_done}),
    Rule("14", "node.process.test_journal:test_what_a_ledger_wrote_is_kept_for_a_while_only",
         {"node.process.journal:KEPT_STEPS": _ages}),
    Rule("15", "node.server.test_worth:test_a_slow_worker_helps_where_work_piles_up_and_nowhere_else",
         {"node.server.worth:Worth.in_time": always(True)}, {"tasks": 4, "gets": 0}),
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_test_fails_when_its_rule_is_taken_away(
    rule: Rule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And passes with the rule in its place."""
    fails_without(rule, tmp_path, capsys=capsys)


def _lines() -> dict[str, str]:
    """The table of violations: number -> its line."""
    table = VIOLATIONS.read_text().partition("\n\n| | before | now | shown by |\n")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| (\d+) (\|.*)$", table, re.MULTILINE))


def test_every_violation_has_a_rule_that_is_taken_away() -> None:
    """In the world or here, and every mutant that its line names is there."""
    lines = _lines()
    assert sorted(map(int, lines)) == list(range(1, 16))
    here = {rule.point for rule in RULES}
    for number, line in lines.items():
        named = set(re.findall(r"`([a-z]+(?:_[a-z]+){2,})`", line))
        assert not named - set(MUTANTS) - {"server_gone_s"}, f"violation {number} names no mutants: {named}"
        assert named & set(MUTANTS) or number in here, f"violation {number}: nothing of it is ever taken away"
        assert (number in here) == ("test_faults_matter.py" in line), f"violation {number}"
