"""Documents as streams of pieces: however long a text is, only some of it stands in memory.

Where a piece ends is part of what a text means to a tokenizer, so it is decided by the text alone and is the same
wherever the text is read. Cuts lie between two words at the end of a line, where byte-level tokenizers cut anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

PIECE_CHARACTERS = 1 << 16
"""A tokenizer's answer takes some 200 bytes a token: 64 Ki characters take about 5 MB, and the trainer of a byte-pair
encoding holds 256 pieces at a time, 16 MB."""
_BREAKS = tuple("\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
"""Where `splitlines` ends a line."""


class Piece(NamedTuple):
    """Part of a document, normalised."""

    text: str
    ends: bool
    """The document ends with it."""


def normalise(text: str) -> str:
    """Newlines as \\n, no tabs, no blanks at the ends of lines, no empty lines around."""
    return _lines(text).strip("\n")


def pieces_of(blocks: Iterable[str]) -> Iterator[Piece]:
    """The pieces of one document that comes in `blocks`; joined, they are its normal text. None of an empty one.

    A line longer than a piece is cut at a blank, or anywhere if it has none.
    """
    waiting: str | None = None
    begun, newlines = False, 0
    for part in _cut(blocks):
        text = _whole_characters(_lines(part))
        inner = text.strip("\n")
        if not inner:
            newlines += len(text)
            continue
        newlines += len(text) - len(text.lstrip("\n"))
        if waiting is not None:
            yield Piece(waiting, False)
        # Empty lines beyond all bounds are no text: so many are kept as a piece has characters.
        waiting = "\n" * min(newlines, PIECE_CHARACTERS) + inner if begun else inner
        begun, newlines = True, len(text) - len(text.rstrip("\n"))
    if waiting is not None:
        yield Piece(waiting, True)


def blocks_of(text: str) -> Iterator[str]:
    """A text that is in memory already, in blocks."""
    return (text[begin : begin + PIECE_CHARACTERS] for begin in range(0, len(text), PIECE_CHARACTERS))


def _cut(blocks: Iterable[str]) -> Iterator[str]:
    """The same text in parts of at most `PIECE_CHARACTERS`, cut where it does no harm."""
    rest = ""
    for block in blocks:
        for some in blocks_of(block):
            rest += some
            while len(rest) > PIECE_CHARACTERS:
                end = _place(rest)
                yield rest[:end]
                rest = rest[end:]
    if rest:
        yield rest


def _place(text: str) -> int:
    """Behind the last line's end, in the first `PIECE_CHARACTERS`, that lies between two letters; or before the last
    blank that does; or at their end."""
    for mark, behind in (("\n", 1), (" ", 0)):
        at = text.rfind(mark, 1, PIECE_CHARACTERS)
        while at > 0:
            if not text[at - 1].isspace() and not text[at + 1].isspace():
                return at + behind
            at = text.rfind(mark, 1, at)
    return PIECE_CHARACTERS - (text[PIECE_CHARACTERS - 1 : PIECE_CHARACTERS + 1] == "\r\n")


def _lines(text: str) -> str:
    lines = [line.rstrip() for line in text.expandtabs().splitlines()]
    if text.endswith(_BREAKS):
        lines.append("")
    return "\n".join(lines)


def _whole_characters(text: str) -> str:
    """Half characters, which JSON can hold and UTF-8 cannot, become the mark of a lost one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
