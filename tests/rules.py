"""A rule, and the test that must fail where it is taken away: `test_rules_matter.py` and `test_faults_matter.py`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from protocol.drive.metrics import Family, Metrics

Change = Callable[[Any], Any]
"""What stands there, to what stands there instead."""


@dataclass(frozen=True)
class Rule:
    """A test, and what is taken away from under it."""

    point: str
    test: str
    """module:function, below `tests`."""
    takes_away: dict[str, Change]
    """By place: module:name or module:Class.name."""
    given: dict[str, Any] = field(default_factory=dict)
    """The test's parameters; a text that begins with a dot is a value of its module."""

    @property
    def name(self) -> str:
        changed = ", ".join(place.partition(":")[2] for place in self.takes_away)
        return f"{self.point} {changed}: {self.test.partition(':')[2]}"


def always(value: Any) -> Change:
    """A function that answers the same, whatever it is asked."""
    return lambda original: lambda *words, **named: value


def nothing_done(original: Any) -> Any:
    return lambda *words, **named: None


def _run(rule: Rule, folder: Path, others: Mapping[str, Any]) -> None:
    """The rule's test, once, as pytest would call it."""
    module_name, _, function_name = rule.test.partition(":")
    module = importlib.import_module(f"tests.{module_name}")
    function = getattr(module, function_name)
    given = {
        name: getattr(module, value[1:]) if isinstance(value, str) and value.startswith(".") else value
        for name, value in rule.given.items()
    }
    wanted = inspect.signature(function).parameters
    with pytest.MonkeyPatch.context() as own:
        fixtures = {"tmp_path": folder, "monkeypatch": own, "metrics": None, **others}
        if "metrics" in wanted:
            fixtures["metrics"] = Metrics(
                Family("barnraise_run_loss", "gauge", "Loss in nats per token.", {"run": None, "split": ("train",)})
            )
        given |= {name: value for name, value in fixtures.items() if name in wanted and name not in given}
        if inspect.iscoroutinefunction(function):
            trio.run(partial(function, **given))
        else:
            function(**given)


def _take_away(rule: Rule, patch: pytest.MonkeyPatch) -> None:
    for place, change in rule.takes_away.items():
        module_name, _, path = place.partition(":")
        owner: Any = importlib.import_module(module_name)
        *between, name = path.split(".")
        for each in between:
            owner = getattr(owner, each)
        patch.setattr(owner, name, change(getattr(owner, name)))


def fails_without(rule: Rule, folder: Path, **fixtures: Any) -> None:
    """Asserts that the rule's test passes with the rule in its place, and fails when it is taken away.

    Args:
        fixtures: which the test asks for, beside a folder, a patch and metrics.
    """
    for each in ("with", "without"):
        (folder / each).mkdir()
    _run(rule, folder / "with", fixtures)
    with pytest.MonkeyPatch.context() as patch:
        _take_away(rule, patch)
        with pytest.raises((AssertionError, ValueError, pytest.fail.Exception, BaseExceptionGroup)):
            _run(rule, folder / "without", fixtures)
