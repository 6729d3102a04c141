"""Tests of `node.process.own_lanes`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from node.process import own_lanes


@pytest.mark.skipif(sys.platform != "linux", reason="quotas are read from Linux's control groups")
@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 16),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("6400000 100000", 16),
        ("?", 16),
    ],
)
def test_a_server_uses_no_more_cores_than_its_container_may(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a core is one; what cannot be read bounds nothing."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(own_lanes, "_QUOTA", tmp_path / "cpu.max")
    assert own_lanes.usable_cores() == 16, "no control groups"
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert own_lanes.usable_cores() == cores
