"""What the types of a message's fields cannot say: node ids, printable texts, finite numbers, known counters.

The bounds are in the types themselves (`protocol.base.bounded`), where the decoder sees them. Here the types of each
kind are read once, and made into the checks that its fields need; most need none.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from protocol.base.bounded import MAY_BE_NOT_FINITE, SENTENCE
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import NUMBER_MAX, REPORT_COUNTERS
from protocol.base.printable import is_printable
from protocol.trust.identity import is_node_id

_Check = Callable[[str, Any], None]
"""(name of the field, its value); raises `RemoteProtocolError` ("decode" or "not_finite")."""


def check_fields(struct: msgspec.Struct) -> None:
    """Raises `RemoteProtocolError` ("decode" or "not_finite") for a field that holds what its type allows and no honest
    peer sends."""
    for name, check in _checks(type(struct)):
        check(name, getattr(struct, name))


@cache
def sentences(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names of a message's fields that hold words for people."""
    hints = get_type_hints(struct, include_extras=True)
    return tuple(name for name in struct.__struct_fields__ if _says(hints[name], SENTENCE))


@cache
def _checks(struct: type[msgspec.Struct]) -> tuple[tuple[str, _Check], ...]:
    hints = get_type_hints(struct, include_extras=True)
    found = ((name, _check_of(hints[name])) for name in struct.__struct_fields__)
    return tuple((name, check) for name, check in found if check is not None)


def _says(hint: Any, word: str) -> bool:
    if get_origin(hint) is not Annotated:
        return False
    return any(isinstance(m, msgspec.Meta) and bool(m.extra and m.extra.get(word)) for m in get_args(hint)[1:])


def _check_of(hint: Any) -> _Check | None:
    """The check that a value of this type needs, or none."""
    if hint is NodeId:
        return _check_node
    if _says(hint, MAY_BE_NOT_FINITE):
        return None
    if get_origin(hint) is Annotated:
        bound = any(isinstance(m, msgspec.Meta) and m.le is not None for m in get_args(hint)[1:])
        return None if bound and get_args(hint)[0] is int else _check_of(get_args(hint)[0])
    plain: dict[Any, _Check] = {int: _check_number, float: _check_finite, str: _check_printable}
    if hint in plain:
        return plain[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _check_struct if _checks(hint) else None
    origin, inner = get_origin(hint), get_args(hint)
    if origin is dict:
        return _check_counters
    if origin in (Union, types.UnionType):
        (kind,) = (each for each in inner if each is not types.NoneType)
        return _unless_none(_check_of(kind))
    if origin is tuple and inner[-1] is Ellipsis:
        return _of_each(_check_of(inner[0]))
    if origin is tuple:
        return _of_all(tuple(_check_of(each) for each in inner))
    return None  # true or false, bytes, or one of a few words


def _unless_none(check: _Check | None) -> _Check | None:
    return None if check is None else lambda name, value: None if value is None else check(name, value)


def _of_each(check: _Check | None) -> _Check | None:
    if check is None:
        return None

    def check_each(name: str, values: Any) -> None:
        for value in values:
            check(name, value)

    return check_each


def _of_all(checks: tuple[_Check | None, ...]) -> _Check | None:
    if not any(checks):
        return None

    def check_all(name: str, values: Any) -> None:
        for check, value in zip(checks, values, strict=True):
            if check is not None:
                check(name, value)

    return check_all


def _check_struct(_: str, value: Any) -> None:
    check_fields(value)


def _check_node(name: str, value: Any) -> None:
    if not is_node_id(value):
        raise RemoteProtocolError("decode", f"{name} is not a node id")


def _check_number(name: str, value: Any) -> None:
    """Of a run's configuration, whose own bounds `RunConfig.validate` knows."""
    if not -1 <= value <= NUMBER_MAX:
        raise RemoteProtocolError("decode", f"{name} is out of range")


def _check_finite(name: str, value: Any) -> None:
    if not math.isfinite(value):
        raise RemoteProtocolError("not_finite", f"{name} is {value}")


def _check_printable(name: str, value: Any) -> None:
    if not is_printable(value):
        raise RemoteProtocolError("decode", f"{name} holds control characters")


def _check_counters(name: str, value: Any) -> None:
    for key, number in value.items():
        if key not in REPORT_COUNTERS:
            raise RemoteProtocolError("decode", f"{name} has an unknown key")
        _check_finite(key, number)
