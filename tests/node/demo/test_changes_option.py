"""`demo --reference --changes FILE`: what a run was changed by, done again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.demo.options import DemoOptions
from protocol.base.errors import BadInputError
from protocol.run.changes import RunChange
from protocol.run.run import RunConfig

CHANGE = {"key": "optimizer.learning_rate", "value": "0.1", "from_step": 40}


def made(folder: Path, content: str, reference: bool = True) -> tuple[RunChange, ...]:
    path = folder / "changes.json"
    path.write_text(content)
    return DemoOptions(changes=path, reference=reference).changes_made(RunConfig())


def test_what_run_changes_prints_is_read(tmp_path: Path) -> None:
    """As a list in its order; without the option there is none."""
    assert made(tmp_path, json.dumps([CHANGE])) == (RunChange("optimizer.learning_rate", "0.1", 40),)
    assert DemoOptions(reference=True).changes_made(RunConfig()) == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no json", "is not what `run changes --json` prints"),
        (json.dumps({"key": 1}), "is not what `run changes --json` prints"),
        (json.dumps([{**CHANGE, "from_step": -1}]), "without its step"),
        (json.dumps([{**CHANGE, "key": "steps"}]), "expected a whole number"),
        (json.dumps([{**CHANGE, "key": "model.hidden"}]), "cannot be changed"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, says: str) -> None:
    """In a sentence; so is the option without --reference, and a file that is not there."""
    with pytest.raises(BadInputError, match=says):
        made(tmp_path, content)
    with pytest.raises(BadInputError, match="only --reference"):
        made(tmp_path, "[]", reference=False)
    with pytest.raises(BadInputError, match="cannot be read"):
        DemoOptions(changes=tmp_path / "nothing", reference=True).changes_made(RunConfig())
