"""How people read a machine's name: a node id by its first characters, as `barnraise status` has it."""

from __future__ import annotations

from protocol.trust.identity import NODE_ID_PATTERN

SHORT = 8


def short(name: str) -> str:
    """The first characters of a node id; any other name, given by a person, as it is."""
    return name[:SHORT] if NODE_ID_PATTERN.fullmatch(name) else name
