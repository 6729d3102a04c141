"""Who comes and goes when: a trace like Bamboo's of spot instances, `milliseconds,add|remove,name` a line.

Where every name is that of a volunteer of the network, it is that computer, and volunteers that the trace does not name
are there all the time. Otherwise the trace's computers are the network's volunteers in turn, in the order in which they
first come, and again from the first one where there are more of them: another computer of the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.base.errors import BadInputError

FILE_BYTES_MAX = 64 << 20
"""A million lines: a month of ten thousand computers that come and go three times a day."""
NAME_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class Change:
    """A computer comes or goes."""

    at_s: float
    comes: bool
    name: str


@dataclass(frozen=True)
class Churn:
    """All changes in order of time, and which of the network's volunteers each name stands for, by its number."""

    changes: tuple[Change, ...]
    kind_of: dict[str, int]


def no_churn(volunteers: Sequence[str]) -> Churn:
    """All come at the beginning and stay."""
    changes = tuple(Change(0.0, True, name) for name in volunteers)
    return Churn(changes, {name: number for number, name in enumerate(volunteers)})


def load_churn(path: Path, volunteers: Sequence[str]) -> Churn:
    """A trace for the volunteers of a network, by name. Raises `BadInputError` with file and line."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise BadInputError(f"{path.name}: longer than {FILE_BYTES_MAX} bytes")
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path.name}: not UTF-8 at byte {error.start}") from error
    changes: list[Change] = []
    there: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        change = _change(line, f"{path.name}, line {number}")
        if change.comes == (change.name in there):
            state = "comes, but is there already" if change.comes else "leaves, but is not there"
            raise BadInputError(f"{path.name}, line {number}: {change.name!r} {state}")
        if changes and change.at_s < changes[-1].at_s:
            raise BadInputError(f"{path.name}, line {number}: earlier than the line before")
        (there.add if change.comes else there.discard)(change.name)
        changes.append(change)
    if not changes:
        raise BadInputError(f"{path.name}: says of nobody that he comes")
    names = dict.fromkeys(change.name for change in changes)
    known = {name: number for number, name in enumerate(volunteers)}
    if all(name in known for name in names):
        always = [Change(0.0, True, name) for name in volunteers if name not in names]
        return Churn((*always, *changes), known)
    return Churn(tuple(changes), {name: number % len(volunteers) for number, name in enumerate(names)})


def _change(line: str, where: str) -> Change:
    words = [word.strip() for word in line.split(",")]
    if len(words) != 3 or words[1] not in ("add", "remove") or not words[0].isascii() or not words[0].isdigit():
        raise BadInputError(f"{where}: not like 60000,add,node-1 (milliseconds, add or remove, a name)")
    if not 0 < len(words[2]) <= NAME_CHARS_MAX or len(words[0]) > 15:
        raise BadInputError(f"{where}: a name of 1 to {NAME_CHARS_MAX} characters and at most 15 digits, please")
    return Change(int(words[0]) / 1000, words[1] == "add", words[2])
