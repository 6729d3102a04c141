"""Every field that crosses the wire says its bound in its type."""

from __future__ import annotations

import types
from contextlib import suppress
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import TASKS_MAX
from protocol.kinds import MESSAGES
from protocol.link.codec import decode
from protocol.messages import LinkReport, Message, Revoked, Verdict
from protocol.run.config_file import change_run
from protocol.run.run import RunConfig
from tests.protocol.samples import ALICE, sample

_SECTIONS = (RunConfig, *(hint for hint in get_type_hints(RunConfig).values() if issubclass(hint, msgspec.Struct)))


def _unbounded(hint: Any, path: str) -> list[str]:
    """Places below a type where a peer could put in as much as it likes."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bound = next(each for each in inner[1:] if isinstance(each, msgspec.Meta))
        if inner[0] in (str, bytes):
            return [] if bound.max_length else [path]
        if inner[0] is int:
            return [] if bound.ge is not None and (bound.le is not None or bound.lt is not None) else [path]
        if get_origin(inner[0]) in (tuple, dict):
            return ([] if bound.max_length else [path]) + [
                place
                for each in get_args(inner[0])
                if each is not Ellipsis and get_origin(inner[0]) is tuple
                for place in _unbounded(each, path + "[]")
            ]
        return _unbounded(inner[0], path)
    if origin is Literal or hint in (bool, float, NodeId, types.NoneType):
        return []  # a node id has one length, which the codec checks
    if origin in (Union, types.UnionType):
        return [place for each in inner for place in _unbounded(each, path)]
    if origin is tuple and inner[-1] is not Ellipsis:
        return [place for each in inner for place in _unbounded(each, path + "[]")]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = get_type_hints(hint, include_extras=True)
        return [
            place
            for name in hint.__struct_fields__
            if not (hint in _SECTIONS and hints[name] is int)  # see the test below
            for place in _unbounded(hints[name], f"{path}.{name}")
        ]
    return [] if isinstance(hint, type) and issubclass(hint, Enum) else [path]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_has_a_bound_in_its_type(kind: type[Message]) -> None:
    """A list, a text, bytes or a number without one is found here, whatever its name is."""
    assert _unbounded(kind, kind.__name__) == []


def test_a_field_without_a_bound_is_found() -> None:
    """Also inside of a list that has one."""
    assert _unbounded(tuple[Annotated[int, msgspec.Meta(ge=0)], ...], "x") == ["x"]
    assert _unbounded(Annotated[int, msgspec.Meta(ge=0)], "x") == ["x"]
    assert _unbounded(Annotated[tuple[int, ...], msgspec.Meta(max_length=3)], "x") == ["x[]"]
    assert [_unbounded(plain, "x") for plain in (int, str, bytes, dict[str, float])] == [["x"]] * 4


def test_a_run_bounds_its_numbers_itself() -> None:
    """Each whole number of a run's file has its own bounds, since a person is told of them by the key."""
    unbounded = []
    for section in _SECTIONS:
        prefix = next((f"{name}." for name, hint in get_type_hints(RunConfig).items() if hint is section), "")
        for name, hint in get_type_hints(section).items():
            if hint is int and prefix + name != "seed":  # any number is one
                with suppress(BadInputError):
                    change_run(RunConfig(), [f"{prefix}{name}={2**62}"]).validate()
                    unbounded.append(prefix + name)
    assert unbounded == []


def test_a_text_of_a_run_that_would_not_travel_is_refused_where_it_is_written() -> None:
    """The coordinator once found out when the first node had come."""
    with pytest.raises(BadInputError, match=r"data.mixture: has 300 characters; at most 256"):
        change_run(RunConfig(), ["data.mixture=" + "x" * 300])


def test_a_bound_hangs_on_the_field_and_not_on_its_name() -> None:
    """A link's share of lost packets is finite, though a step's loss may not be; lists of nodes hold node ids."""
    report = msgspec.to_builtins(sample(LinkReport))
    report["links"][0]["loss"] = float("nan")
    with pytest.raises(RemoteProtocolError) as caught:
        decode(msgspec.msgpack.encode(report))
    assert caught.value.reason == "not_finite"
    for message in (sample(Revoked), sample(Verdict)):
        name = "nodes" if isinstance(message, Revoked) else "blamed"
        wrong = msgspec.structs.replace(message, **{name: (ALICE.node, "../../etc/passwd")})
        with pytest.raises(RemoteProtocolError) as caught:
            decode(msgspec.msgpack.encode(wrong))
        assert caught.value.reason == "decode"


def test_what_is_too_long_is_refused_as_too_long() -> None:
    """The decoder's own words for it are those that the codec looks for."""
    plain = msgspec.to_builtins(sample(Verdict))
    for field, value in (("reason", "x" * 257), ("tasks", plain["tasks"][:1] * (TASKS_MAX + 1))):
        with pytest.raises(RemoteProtocolError) as caught:
            decode(msgspec.msgpack.encode(plain | {field: value}))
        assert caught.value.reason == "size", field
