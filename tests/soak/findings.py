"""What a soak has done and found, a line of JSON each: it goes on from there, and the table is made from it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any


class Findings:
    """Lines with `fault` are faults, lines with `weights` the ends of runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]

    def add(self, found: dict[str, Any]) -> None:
        """Written before anything else happens."""
        self.lines.append(found)
        with self.path.open("a") as file:
            file.write(json.dumps(found) + "\n")

    @property
    def next_run(self) -> int:
        return 1 + max((int(line["run"]) for line in self.lines), default=0)

    @property
    def faults(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "fault" in line]

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "weights" in line]

    @property
    def unexplained(self) -> list[dict[str, Any]]:
        """What was found and has no explanation beside it (`explained`, which a person writes into the line)."""
        return [line for line in self.lines if line.get("found") and not line.get("explained")]

    def table(self) -> str:
        """By kind and role: how many, how long the run stood still, when the next step closed after the fault."""
        rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for line in self.faults:
            rows[line["fault"], line["role"]].append(line)
        text = [
            "| fault | role | times | stood still, median s | longest s | next step after its end, median s | longest s"
            " | steps done again | unexplained |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for (kind, role), lines in sorted(rows.items()):
            stood, back = [line["stood_s"] for line in lines], [line["back_s"] for line in lines]
            again = sum(max(0, line["lost_steps"]) for line in lines)
            bad = sum(1 for line in lines if line in self.unexplained)
            text.append(
                f"| {kind} | {role} | {len(lines)} | {median(stood):.1f} | {max(stood):.1f} | {median(back):.1f} |"
                f" {max(back):.1f} | {again} | {bad} |"
            )
        ends = self.ends
        equal = sum(line["weights"] == "equal" for line in ends)
        lost, doubled = (sum(line[key] for line in ends) for key in ("samples_lost", "samples_doubled"))
        text.append("")
        text.append(
            f"{len(self.faults)} faults in {len(ends)} runs that were let finish: {equal} with the weights of one"
            " process,"
            f" {lost} samples lost, {doubled} doubled; {len(self.unexplained)} findings unexplained"
        )
        return "\n".join(text)
