"""What the device's own process says before anything begins, and what is said when it says nothing."""

from __future__ import annotations

import pytest

from node.visit import device_facts
from node.visit.device_facts import Question, ask_device
from protocol.base.errors import BadInputError
from protocol.run.run import RunConfig


def test_a_device_that_takes_too_long_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy computer `doctor` showed the command of the process that it had waited for."""
    monkeypatch.setattr(device_facts, "ANSWER_S", 0.01)
    with pytest.raises(BadInputError, match="this computer is very busy, or the device's driver hangs") as said:
        ask_device(Question(RunConfig(), 257, 1, "auto", False))
    assert "probe_process" not in str(said.value)


def test_a_process_that_ends_without_an_answer_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command says nothing to an owner."""
    monkeypatch.setattr(device_facts, "PROBE", "node.compute.no_such_process")
    with pytest.raises(BadInputError, match="the process that tried ended with status 1; --no-benchmark joins without"):
        ask_device(Question(RunConfig(), 257, 1, "auto", False))
