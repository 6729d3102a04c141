"""A number on the command line that is one: `nan` and `inf` are floats, too, and no time to search."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """As `click.FloatRange`, whose comparisons `nan` passes, each of them, and whose open end lets `inf` through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found
