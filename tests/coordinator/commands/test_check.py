"""`barnraise run check` and the coordinator's start: the same look at the run, before a link is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator.commands import check, orders
from coordinator.commands.coordinator import coordinator
from protocol.base.errors import BadInputError
from protocol.run.run import RunConfig


class Point:
    """An entry point of the node's side."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def load(self) -> Any:
        return self._found


@pytest.fixture
def run_toml(tmp_path: Path) -> str:
    path = tmp_path / "RUN.toml"
    path.write_text('name = "checked"\n')
    return str(path)


def test_the_check_prints_what_was_found_and_what_the_run_takes(run_toml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a vocabulary it says why there are no figures."""
    known = {"barnraise.checks": lambda config: (["data: here"], 7), "barnraise.costs": lambda c, v: [f"{v} tokens"]}
    monkeypatch.setattr(check, "entry_points", lambda group: [Point(known[group])])
    assert CliRunner().invoke(orders.run, ["check", run_toml]).output == "data: here\n7 tokens\n"
    known["barnraise.checks"] = lambda config: ([], 0)
    assert "depends on the tokenizer" in CliRunner().invoke(orders.run, ["check", run_toml]).output


def test_a_coordinator_does_not_start_with_data_that_cannot_be_used(
    run_toml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No state folder, no link: only the sentence."""

    def refuse(config: RunConfig) -> tuple[list[str], int]:
        raise BadInputError("data.text_field: no column 'text'")

    monkeypatch.setattr(check, "entry_points", lambda group: [Point(refuse)])
    done = CliRunner().invoke(coordinator, [run_toml, "--state", str(tmp_path / "state")])
    assert isinstance(done.exception, BadInputError) and not (tmp_path / "state").exists()
