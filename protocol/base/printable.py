"""Words of others on a terminal: no escape sequence, no line break, nothing that turns the reading direction around;
and lines that fit it.

A terminal obeys what it shows (ECMA-48): a name with an escape sequence in it can move the cursor over other lines,
set the window's title, or put text into the clipboard (OSC 52). So nothing on the wire may hold such characters, and
whatever is shown is looked at once more, since it may come from a file, an exception or another program.
"""

from __future__ import annotations

import textwrap
from typing import Any

MARK = "\N{REPLACEMENT CHARACTER}"


def is_printable(text: str) -> bool:
    """Whether every character has a shape of its own (Unicode categories other than C and Z, and the space)."""
    return text.isprintable()


def printable(text: str, keep: str = "") -> str:
    """The text with a mark in place of each character that is not printable, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else MARK for letter in text)


def all_printable(value: Any) -> Any:
    """The same for every text in plain data: dicts (keys too), lists, tuples."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {all_printable(key): all_printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_printable(item) for item in value]
    return value


def wrapped(text: str, width: int) -> str:
    """The same lines, none wider than `width` where its words allow that; what goes on is indented by two more."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
        if len(line) > width:
            words = textwrap.TextWrapper(
                width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
            lines += words.wrap(line)
        else:
            lines.append(line)
    return "\n".join(lines)
