"""Tests that share processes run in one worker, one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import group_of

TESTS = """
import os
from pathlib import Path
import pytest
pytestmark = pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_a(number):
    Path(__file__).with_name(f"{number}.txt").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


@pytest.mark.slow
def test_a_group_is_one_workers(tmp_path: Path) -> None:
    """Each worker had some of a group's tests, and started the whole run that they share for itself: with the versions
    that are pinned the marks meant nothing, and nobody was told."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler\n")
    root = Path(__file__).parents[1]
    words = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "--rootdir", "."]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
    workers = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert len(workers) == 8 and len(set(workers)) == 1, workers


def test_each_mark_of_a_group_is_read() -> None:
    """By the text of its file: one for all tests there."""
    here = Path(__file__).parent
    marked = [file for file in here.rglob("test_*.py") if "mark.xdist_group(" in file.read_text(encoding="utf-8")]
    assert len(marked) > 5 and all(group_of(file) for file in marked)
    assert group_of(here / "conftest.py") == group_of(here / "no.py") == ""
