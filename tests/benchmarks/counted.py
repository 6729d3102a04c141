"""Seconds and calls of chosen functions inside an ordinary daemon, for benchmarks that ask what a part of it costs.

The counting itself (two readings of a clock for each call) is counted with them, so a share errs upwards.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Counter:
    """Of one process. `spent` holds [seconds, calls] by kind."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._inside = threading.local()

    def counted(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose seconds count; what it calls of its own kind is in them already."""
        entry = self.spent.setdefault(kind, [0.0, 0.0])

        @functools.wraps(original)
        def call(*words: Any, **named: Any) -> Any:
            inside: set[str] = self._inside.__dict__.setdefault("kinds", set())
            if kind in inside:
                return original(*words, **named)
            inside.add(kind)
            begun = time.perf_counter()
            try:
                return original(*words, **named)
            finally:
                entry[0] += time.perf_counter() - begun
                entry[1] += 1
                inside.discard(kind)

        return call

    def count(self, kind: str, owner: Any, *names: str) -> None:
        """Functions of a class or module are counted from now on."""
        for name in names:
            setattr(owner, name, self.counted(kind, getattr(owner, name)))

    def write_each_second(self, folder: Path, file: str) -> None:
        """Into a state folder, from a thread: {"seconds": how long the process has run, kind: [seconds, calls]}."""
        threading.Thread(target=self._write, args=(folder, file), daemon=True).start()

    def _write(self, folder: Path, file: str) -> None:
        begun = time.monotonic()
        while True:
            time.sleep(1.0)
            if folder.is_dir():
                draft = folder / f".{file}"
                draft.write_text(json.dumps({"seconds": time.monotonic() - begun, **self.spent}))
                draft.replace(folder / file)
