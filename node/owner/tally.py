"""What this computer has given: tokens, accepted tasks and hours, for this visit, by day, and for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

DAYS_KEPT = 400
"""A year, and then some: 400 rows of 60 bytes."""


@dataclass(frozen=True, slots=True)
class Given:
    """An amount of help."""

    tokens: float = 0.0
    tasks: float = 0.0
    """Accepted by the run's ledgers; a result that nobody wanted is none."""
    working_s: float = 0.0

    def __add__(self, other: Given) -> Given:
        return Given(self.tokens + other.tokens, self.tasks + other.tasks, self.working_s + other.working_s)


class _Kept(msgspec.Struct):
    ever: Given = Given()
    days: dict[str, Given] = {}


@dataclass(slots=True)
class Tally:
    """Counts on from what was kept. `visit`: since this process began."""

    ever: Given = Given()
    days: dict[str, Given] = field(default_factory=dict)
    visit: Given = Given()
    _seen: dict[int, Given] = field(default_factory=dict)
    """Of each device's present life in the run, whose counters begin at 0."""

    def begin_life(self) -> None:
        self._seen = {}

    def count(self, totals: Sequence[Mapping[str, float]], working_s: float, day: str) -> None:
        """`totals`: tokens and accepted tasks of the present life, for each device; `working_s` since the last call."""
        more = Given(working_s=working_s)
        for place, total in enumerate(totals):
            now, seen = Given(total.get("tokens", 0.0), total.get("accepted", 0.0)), self._seen.get(place, Given())
            if now.tokens < seen.tokens or now.tasks < seen.tasks:
                seen = Given()  # the role began anew
            more += Given(now.tokens - seen.tokens, now.tasks - seen.tasks)
            self._seen[place] = now
        self.visit, self.ever = self.visit + more, self.ever + more
        if more != Given():
            self.days[day] = self.days.get(day, Given()) + more
            for old in sorted(self.days)[:-DAYS_KEPT]:
                del self.days[old]

    def today(self, day: str) -> Given:
        return self.days.get(day, Given())

    def to_json(self) -> bytes:
        return msgspec.json.encode(_Kept(self.ever, self.days))

    @classmethod
    def from_json(cls, data: bytes) -> Tally:
        """What `to_json` wrote. Raises `ValueError` when it is something else."""
        try:
            kept = msgspec.json.decode(data, type=_Kept)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from None
        return cls(ever=kept.ever, days=kept.days)


def plural(count: float, one: str, many: str) -> str:
    return f"{count:,.0f} {one if round(count) == 1 else many}"


def in_words(given: Given) -> str:
    """As people read it: 318 tasks, 1.2 M tokens, 3.5 hours."""
    return f"{_amount(given)}, {_time(given)} of work"


def signed_in_words(given: Given, at_least: bool = False) -> str:
    """The same by the run's own count, which knows nothing of the time in which this computer had work: its time is how
    long the steps took that hold at least one of its tasks. `at_least`: those of its device with most of them."""
    return f"{_amount(given)}, in steps of the run that took {'at least ' if at_least else ''}{_time(given)}"


def _amount(given: Given) -> str:
    tokens = given.tokens
    amount = f"{tokens / 1e6:,.1f} M tokens" if tokens >= 1e6 else plural(tokens, "token", "tokens")
    return f"{plural(given.tasks, 'task', 'tasks')} accepted, {amount}"


def _time(given: Given) -> str:
    hours = given.working_s / 3600
    if 0 < given.working_s < 60:
        return "less than a minute"
    return f"{hours:,.1f} hours" if hours >= 1 else plural(given.working_s / 60, "minute", "minutes")


def as_dict(given: Given) -> dict[str, Any]:
    return {"tokens": given.tokens, "tasks": given.tasks, "working_s": given.working_s}


def part_in_words(hour_ratio: float, step: int, step_tasks: int, as_of: str = "") -> str:
    """The run's word on this computer's part of it. `step`: its number, which begins with 0; people count from one.
    `as_of`: when it was said, where that is not now."""
    part = f"{100 * hour_ratio:.1f} %" if hour_ratio >= 0.001 else "less than 0.1 %"
    text = f"You computed {part} of the {f'hour before {as_of}' if as_of else 'last hour'}"
    if step_tasks:
        text += f"; step {step + 1:,} holds {step_tasks:,} of your tasks"
    return f"{text}."
