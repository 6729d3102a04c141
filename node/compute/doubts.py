"""Checkpoints of an object store that did not read as they were written when a server began from them.

A start looks only which parts of a store's checkpoints are there. One that was found damaged is written down in the
state folder, and from then on it counts only if all of it verifies: no server names it again and again to a run that
cannot begin from it, and one that was written anew counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from node.compute.checkpoint import Check, Manifest, verify_parts
from node.compute.places import on

FILE = "doubted"
_LINES_MAX = 16
_BYTES_MAX = 64 << 10


def doubt(state: Path, home: Any) -> None:
    """Writes down that the checkpoint there is not whole; the newest of these are kept."""
    known = [line for line in _read(state) if line != str(home)]
    on(state).put(FILE, "".join(f"{line}\n" for line in [*known, str(home)][-_LINES_MAX:]).encode())


def doubted(state: Path) -> Check:
    """A check for `checkpoint.present_checkpoints`: reads all of what this server has found damaged once."""
    known = _read(state)

    def check(home: Any, manifest: Manifest) -> None:
        if str(home) in known:
            verify_parts(home, manifest.parts)

    return check


def _read(state: Path) -> list[str]:
    try:
        return on(state).read(FILE, _BYTES_MAX).decode().splitlines()
    except (OSError, ValueError):
        return []
