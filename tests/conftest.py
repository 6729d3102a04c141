"""What all tests share: async tests run on trio, property tests are judged by what they find, not by their time, and
tests that share a swarm of processes run one after the other."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from pytest_trio.enable_trio_mode import *  # noqa: F403  (the plug-in's own way to switch it on)

settings.register_profile("barnraise", deadline=None, print_blob=True)
settings.load_profile("barnraise")


@pytest.fixture
def power_cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Leaves of a file what a power cut right after its renaming may: nothing, unless its bytes were synced before."""
    synced: set[int] = set()
    sync = os.fsync

    def note(handle: int) -> None:
        sync(handle)
        synced.add(os.fstat(handle).st_ino)

    def cut(path: Path) -> None:
        if path.stat().st_ino not in synced:
            os.truncate(path, 0)

    monkeypatch.setattr(os, "fsync", note)
    return cut


_GROUP = re.compile(r"xdist_group\(\"(\w+)\"\)")


@cache
def group_of(file: Path) -> str:
    """The group of all tests of a file, or nothing."""
    found = _GROUP.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return found.group(1) if found else ""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadgroup` by the marks in the files. pytest-xdist 3.8 writes a test's group into a field that pytest 9.2
    does not read any more: it runs a group's tests anywhere, each worker with a swarm of its own, and says nothing."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

    class ByFile(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            group: str = group_of(Path(config.rootpath, nodeid.partition("::")[0]))
            return group or nodeid

    return ByFile(config, log)
