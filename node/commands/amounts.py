"""Amounts on the command line: what cannot be is refused in one sentence that names the option and what it takes."""

from __future__ import annotations

import re

import click

from protocol.base.errors import BadInputError

RATE_MBIT_MIN = 1.0
"""Slower than this a record of 64 KiB takes longer than half a second, and links would time out in each other's way."""
_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))\s*(\S*)")


class Amount(click.ParamType[float]):
    """A number of `unit`, which may stand behind it: `5`, `5Mbit/s`, `'5 Mbit/s'`."""

    def __init__(self, unit: str, least: float) -> None:
        self.name = unit
        self._least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not isinstance(value, str):  # a default of ours
            assert isinstance(value, int | float)
            return float(value)
        found = _NUMBER.fullmatch(value.strip())
        if found is None or found[2].lower() not in ("", self.name.lower()) or float(found[1]) < self._least:
            takes = f"a number of {self.name}, {self._least:g} or more"
            raise BadInputError(f"{_option(param)}: {value!r} cannot be; it takes {takes}")
        return float(found[1])


class WholeNumber(click.ParamType[int]):
    """A whole number from `least` to `most`."""

    name = "number"

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):  # a default of ours
            return value
        text = str(value).strip()
        if not re.fullmatch(r"[0-9]{1,9}", text) or not self._least <= int(text) <= self._most:
            takes = f"a whole number from {self._least} to {self._most}"
            raise BadInputError(f"{_option(param)}: {value!r} cannot be; it takes {takes}")
        return int(text)


def _option(param: click.Parameter | None) -> str:
    return param.opts[0] if param is not None else "amount"


def plain(number: float) -> str:
    """As people write it, and as limits are read: never with an exponent."""
    return f"{number:.6f}".rstrip("0").rstrip(".")
