"""Log lines for a person at a terminal: local time, what happened, its details, none wider than the screen."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TextIO

from structlog.typing import EventDict

from protocol.trust.identity import NODE_ID_PATTERN

WIDTH_MIN, WIDTH_USUAL = 40, 80
INDENT = 9
"""What `23:58:33 ` takes: everything that goes on stands below the event."""
NODE_LETTERS = 8
_LEVEL_COLOURS = {"warning": "33", "error": "31", "critical": "31"}


class HumanLines:
    """A structlog renderer. A day's first line is preceded by its date.

    Args:
        stream: where the lines go; its width is asked anew for each line, since windows are resized.
        hidden: fields that say the same on every line; where they do, they are left out.
        clock: the local time.
    """

    def __init__(self, stream: TextIO, hidden: Mapping[str, Any], clock: Callable[[], datetime] = datetime.now) -> None:
        self._stream = stream
        self._hidden = hidden
        self._clock = clock
        self._colour = stream.isatty() and not os.environ.get("NO_COLOR")
        self._day = ""

    def __call__(self, _logger: Any, _method: str, event: EventDict) -> str:
        now = self._clock()
        level, name, trace = event.pop("level", "info"), str(event.pop("event", "")), event.pop("exception", "")
        head = f"{level.upper()}: {name}" if level in _LEVEL_COLOURS else name
        fields = [f"{key}={_shown(value)}" for key, value in event.items() if not self._is_known(key, value)]
        lines = textwrap.wrap(
            f"{now:%H:%M:%S} {'  '.join([head, *fields])}", self._width(), subsequent_indent=" " * INDENT,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        if self._colour and lines[0].startswith(head, INDENT):
            rest = lines[0][INDENT + len(head) :]
            lines[0] = f"{lines[0][:INDENT]}\x1b[{_LEVEL_COLOURS.get(level, '1')}m{head}\x1b[0m{rest}"
        day = f"{now:%Y-%m-%d}"
        if day != self._day:
            self._day = day
            lines.insert(0, day)
        return "\n".join([*lines, *([trace] if trace else [])])

    def _is_known(self, key: str, value: Any) -> bool:
        """Nothing to read: empty, or as on every line."""
        return value == "" or (key in self._hidden and self._hidden[key] == value)

    def _width(self) -> int:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):  # no terminal, or none any more
            columns = WIDTH_USUAL
        return max(columns, WIDTH_MIN)


def _shown(value: Any) -> str:
    """Text without quotes where it is one word, so that addresses can be copied; of a node's id the letters by which
    `barnraise status` calls it."""
    if isinstance(value, str):
        if NODE_ID_PATTERN.fullmatch(value):
            return value[:NODE_LETTERS]
        return value if value and " " not in value else f'"{value}"'
    return str(value)
