"""Reads a planning problem (coordinator/README.md): strict keys, finite non-negative numbers, exit code 2.

Each planner declares its problem as a frozen struct that inherits `Problem` and checks lengths in `validate`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from protocol.base.errors import BadInputError


class Problem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every problem file has. `known` holds the best known value; a planner must never read it."""

    kind: str
    known: Any = None

    def validate(self) -> None:
        """Raises `BadInputError` naming the key whose length or value cannot be."""


P = TypeVar("P", bound=Problem)


def load_problem(path: Path, kind: str, struct: type[P]) -> P:
    """The problem in `path`, checked. Raises `BadInputError` with the file's name and the key's."""
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path.name}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise BadInputError(f"{path.name}: a problem is one JSON object")
    if raw.get("kind") != kind:
        raise BadInputError(f"{path.name}: kind: expected {kind!r}, got {raw.get('kind')!r}")
    raw.pop("known", None)
    try:
        for key, value in raw.items():
            _check_numbers(path.name, key, value)
    except RecursionError as error:
        raise BadInputError(f"{path.name}: a key's value is nested too deeply") from error
    try:
        problem = msgspec.convert(raw, struct)
        problem.validate()
    except msgspec.ValidationError as error:
        raise BadInputError(f"{path.name}: {error}") from error
    except BadInputError as error:
        raise BadInputError(f"{path.name}: {error}") from error
    return problem


def _check_numbers(file: str, key: str, value: Any) -> None:
    """Refuses negative, infinite and not-a-number values wherever they stand below `key`."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_numbers(file, f"{key}[{index}]", item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and not (0 <= value < math.inf):
        raise BadInputError(f"{file}: {key}: {value} is not a finite number of at least 0")
