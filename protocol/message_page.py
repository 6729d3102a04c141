"""`python -m protocol.message_page > protocol/MESSAGES.md`: every kind of message on one page, made from the code.

Senders and takers are those of `protocol.kinds`, bounds those of the fields' types: what the codec enforces, no more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
from msgspec.inspect import (
    BytesType,
    DictType,
    Field,
    IntType,
    ListType,
    Metadata,
    SetType,
    StrType,
    StructType,
    TupleType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from protocol.base.limits import MESSAGE_BYTES_MAX, NUMBER_MAX
from protocol.kinds import ALL, DOWN, HANDLERS, KINDS, ROLES, UP, Kind
from protocol.run.plan import Plan
from protocol.run.run import RunConfig

ELSEWHERE = (Plan, RunConfig)
"""Structs that many words would be needed for: their own file has the bounds."""
HEAD = f"""# Every message

Made by `python -m protocol.message_page` from `kinds.py` (who may send what to whom, who takes it) and from the types
of the messages' fields (bounds); a test holds it. The codec refuses what is not here: a kind from or to another role,
a longer list, text or byte string, a number that is not between -1 and 2^63 - 1, a message of more than
{MESSAGE_BYTES_MAX:,} bytes. *From whom on a server*: where in the plan the sender has to stand
(`node/server/senders.py`).
*Tensors*: up to how many travel with it, what their bytes count as, and whether it takes turns with others on the line;
what shapes and how many bytes a role takes stands in `node/server/bounds.py`, `node/volunteer/screening.py`.

Roles: {", ".join(f"{role[0].upper()} {role}" for role in ROLES)}.

| kind | ways | from whom on a server | taken by | bounds: longest list, text, bytes | tensors |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    rows = "".join(f"| {' | '.join(_cells(kind))} |\n" for kind in KINDS)
    takers = "".join(f"| {name} | `{module}` |\n" for name, module in HANDLERS.items())
    return f"{HEAD}{rows}\n| taken by | read on in |\n| --- | --- |\n{takers}"


def _cells(kind: Kind) -> tuple[str, ...]:
    tensors = _tensors_max(kind)
    turns = ", in turns" if kind.is_long else ""
    return (
        f"`{kind.message.__name__}`",
        _ways(kind),
        kind.place or "-",
        ", ".join(kind.handlers),
        ", ".join(bounds_of(kind.message)) or "-",
        f"{tensors} {kind.carries}{turns}" if tensors else "-",
    )


def _ways(kind: Kind) -> str:
    for ways, words in ((ALL, "all to all"), (UP, "S, V, A to C"), (DOWN, "C to S, V, A")):
        if kind.ways == ways:
            return words
    by_sender: dict[str, list[str]] = {}
    for sender, receiver in kind.ways:
        by_sender.setdefault(sender[0].upper(), []).append(receiver[0].upper())
    return "; ".join(f"{sender} to {', '.join(receivers)}" for sender, receivers in by_sender.items())


def _tensors_max(kind: Kind) -> int:
    for field in _fields(kind.message):
        if field.encode_name == "tensors":
            found = field.type
            assert isinstance(found, VarTupleType) and found.max_length is not None
            return found.max_length
    return 0


def bounds_of(message: type[msgspec.Struct]) -> list[str]:
    """`field ≤ n` for everything of the message that can be long, also within what it holds."""
    return list(dict.fromkeys(bound for field in _fields(message) for bound in _bounds(field.type, field.encode_name)))


def _fields(message: type[msgspec.Struct]) -> tuple[Field, ...]:
    found = type_info(message)
    assert isinstance(found, StructType)
    return found.fields


def _bounds(found: Type, path: str) -> Iterator[str]:
    match found:
        case Metadata():
            yield from _bounds(found.type, path)
        case UnionType():
            for each in found.types:
                yield from _bounds(each, path)
        case StrType() | BytesType() if found.max_length is not None:
            yield f"{path} ≤ {found.max_length:,}"
        case DictType() if found.max_length is not None:
            yield f"{path} ≤ {found.max_length:,}"
        case VarTupleType() | ListType() | SetType() if path != "tensors":
            if found.max_length is not None:
                yield f"{path} ≤ {found.max_length:,}"
            yield from _bounds(found.item_type, f"{path}[]")
        case TupleType():
            for each in found.item_types:
                yield from _bounds(each, f"{path}[]")
        case StructType() if found.cls in ELSEWHERE:
            yield f"{path}: see `{found.cls.__name__}`"
        case StructType():
            for field in found.fields:
                yield from _bounds(field.type, f"{path}.{field.encode_name}")
        case IntType() if found.le is not None and found.le != NUMBER_MAX:
            yield f"{path} ≤ {found.le:,}"
        case _:
            pass


if __name__ == "__main__":
    sys.stdout.write(page())
