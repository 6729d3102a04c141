"""Parts of checkpoints that did not read as they were written when a server began from them.

A look says only which parts are there: reading all would take minutes. One that was found damaged is written down in
the state folder, and from then on its checkpoint counts for this server only if that part verifies: no server names it
again and again to a run that cannot begin from it, and one that was written anew counts. A server reads and doubts no
parts but those that it begins from; the other parts are their own servers' to find.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from node.compute.checkpoint import Check, Manifest
from node.compute.places import on
from node.compute.seals import verify

FILE = "doubted"
_LINES_MAX = 256
"""Of some 100 bytes each; a server with another cut reads up to some tens of parts of one checkpoint."""
_BYTES_MAX = 1 << 20


def doubt(state: Path, home: Any, files: Iterable[str]) -> None:
    """Writes down that not all of these parts of the checkpoint there are whole; the newest are kept."""
    doubtful = [str(home / file) for file in files]
    _write(state, [*(line for line in _read(state) if line not in doubtful), *doubtful])


def trust(state: Path, home: Any, files: Iterable[str]) -> None:
    """Strikes out what this server has now read in full: a disk may have been away, or a part was written anew."""
    known = _read(state)
    whole = {str(home), *(str(home / file) for file in files)}
    if not whole.isdisjoint(known):
        _write(state, [line for line in known if line not in whole])


def doubted(state: Path) -> Check:
    """A check for `seals.look_at_checkpoints`: reads what this server has found damaged once, and its seal."""
    known = _read(state)

    def check(home: Any, manifest: Manifest) -> None:
        whole = str(home) in known  # as an older build wrote it
        parts = [part for part in manifest.parts if whole or str(home / part.file) in known]
        if parts:
            verify(home, manifest, parts)

    return check


def _write(state: Path, lines: list[str]) -> None:
    on(state).put(FILE, "".join(f"{line}\n" for line in lines[-_LINES_MAX:]).encode())


def _read(state: Path) -> list[str]:
    try:
        return on(state).read(FILE, _BYTES_MAX).decode().splitlines()
    except (OSError, ValueError):
        return []
