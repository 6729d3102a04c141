"""What an operator reads when a coordinator begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.process.papers import announce
from protocol.run.run import RunConfig


def test_sentences_fit_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """All but links and addresses, which nobody can break. (One word of 81 columns stood alone on a line.)"""
    config = RunConfig()
    batches = SimpleNamespace(now=SimpleNamespace(steps=config.steps), tokens=lambda _: 0)
    history = SimpleNamespace(newest_step=-1, batches=batches)
    machine: Any = SimpleNamespace(config=config, history=history)
    papers = {name: name for name in ("state", "page", "http", "metrics")}
    papers |= {role: f"barnraise://127.0.0.1:1/{role}" for role in ("server", "volunteer")}
    announce(papers, as_json=False, machine=machine)
    lines = capsys.readouterr().out.splitlines()
    assert any("this computer only" in line for line in lines) and all(len(line) <= 80 for line in lines)
