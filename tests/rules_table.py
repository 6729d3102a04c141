"""Writes the table of all points into `protocol/THREATS.md`: the rule that is taken away, and the test that fails then.

    python -m tests.rules_table

What is taken away stands in `test_rules_matter.py` and in the simulated world's mutants; `test_rules_matter.py` sees to
it that no point is left out and that the table is the one that is written here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tests.simulation.mutants  # noqa: F401 - registers them
from tests.simulation.mutant_registry import MUTANTS
from tests.test_rules_matter import IN_THE_WORLD, NOT_RUN, PLANTED, POINTS, RULES

THREATS = Path(__file__).parents[1] / "protocol" / "THREATS.md"
BEGIN, END = "<!-- rules: made by `python -m tests.rules_table` -->", "<!-- rules end -->"


def _named(test: str) -> str:
    module, _, function = test.partition(":")
    return f"`tests/{module.replace('.', '/')}.py` `{function}`"


def rows() -> list[tuple[str, str, str]]:
    """Point, what is taken away, and the test that then fails; in the order of points."""
    found = []
    for rule in RULES:
        given = ", ".join(
            f"{value}".lstrip(".") for value in rule.given.values() if isinstance(value, int | float | str)
        )
        away = ", ".join(f"`{place.replace(':', '.')}`" for place in rule.takes_away)
        found.append((rule.point, away, _named(rule.test) + (given and f" ({given})")))
    for name, point in IN_THE_WORLD.items():
        assert name in MUTANTS, name
        found.append((point, f"mutant `{name}`", "`tests/simulation/test_mutants.py`, by the world's invariants"))
    for point, (planted, test) in PLANTED.items():
        found.append((point, planted, _named(test)))
    for point, why in NOT_RUN.items():
        found.append((point, "", f"not run: {why}"))
    return sorted(found, key=lambda row: POINTS.index(row[0]))


def table() -> str:
    lines = [BEGIN, "", "| point | taken away, or planted | fails then |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {point} | {away} | {test} |" for point, away, test in rows()), "", END])


def with_table(text: str) -> str:
    """The text with the table in the place of the one that it has."""
    before, _, rest = text.partition(BEGIN)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    THREATS.write_text(with_table(THREATS.read_text()))
    sys.exit()
