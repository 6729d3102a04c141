"""One CSV file a run: a line for each closed step, with the validation told with it."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from coordinator.tracking.trackers import About, Row

COLUMNS = (
    "step", "wall_s", "loss", "gradient_norm", "clip_factor", "learning_rate", "tokens", "duration_s", "skipped",
    "validation_version", "validation_loss", "validation_perplexity",
)  # fmt: skip


class CsvTracker:
    """`FOLDER/RUN.csv`. Steps that come again after going back to a checkpoint replace those that were there."""

    def __init__(self, about: About) -> None:
        folder = Path(about.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{about.run}.csv"
        _keep_before(path, about.first)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="")
        if not path.stat().st_size:
            self._writer.writeheader()

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            line = {"step": row.step, "wall_s": row.wall_s, **row.scalars}
            # With the last step come two, its own version's and the last one's: the newer has the line's last columns.
            for version, scalars in row.validations:
                line |= {"validation_version": version}
                line |= {f"validation_{name}": value for name, value in scalars.items()}
            self._writer.writerow(line)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _keep_before(path: Path, first: int) -> None:
    """Leaves the lines of steps before `first` alone, and no half line that a power cut left."""
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except FileNotFoundError:
        return
    named = bool(lines) and lines[0].endswith("\n")  # else what comes behind half of the columns' names has none
    kept = lines[:1] + [line for line in lines[1:] if line.endswith("\n") and _step_of(line) < first] if named else []
    if kept == lines:
        return
    new = path.with_suffix(".new")
    with new.open("w", newline="", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _step_of(line: str) -> float:
    number = line.partition(",")[0]
    return float(number) if number.isdigit() else float("inf")
