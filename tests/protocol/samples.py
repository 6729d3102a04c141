"""One message of every kind, built from its type hints: the same on every machine, and never out of date."""

from __future__ import annotations

import types
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from protocol.base.ids import TICKET_BYTES, NodeId, TensorRef, Ticket
from protocol.base.limits import REPORT_COUNTERS
from protocol.kinds import MAY_SEND, MESSAGES
from protocol.link.codec import tensors_of
from protocol.link.framing import Framing, FramingLimits
from protocol.messages import Message
from protocol.trust.handshake import Session
from protocol.trust.identity import Identity, node_id

ALICE = Identity(b"\x01" * 32)
BOB = Identity(b"\x02" * 32)
COORDINATOR = Identity(b"\x03" * 32)
RUN_ID = bytes(range(16))


@cache
def sample(kind: type[Message]) -> Message:
    """A message of this kind with every list filled."""
    message: Message = _value(kind, "")
    return message


def samples() -> list[Message]:
    """One of each kind, in the order of `MESSAGES`."""
    return [sample(kind) for kind in MESSAGES]


def buffers_for(message: Message) -> list[bytes]:
    """Bytes of the right lengths for the message's tensors."""
    return [bytes([7 + tensor.key]) * tensor.byte_count for tensor in tensors_of(message)]


def allowed_pair(kind: type[Message]) -> tuple[str, str]:
    """A (sender, receiver) pair of roles that may exchange this kind."""
    return MAY_SEND[kind][0]


def framing_pair(
    sender_role: str = "server",
    receiver_role: str = "server",
    limits: FramingLimits | None = None,
    **options: Any,
) -> tuple[Framing, Framing]:
    """Two ends of one link that have not said anything yet."""
    one, two = b"\x11" * 32, b"\x22" * 32
    first = Session(b"", BOB.node, BOB.public_key, b"", receiver_role, one, two)
    second = Session(b"", ALICE.node, ALICE.public_key, b"", sender_role, two, one)
    return (
        Framing(first, role=sender_role, header=b"\x33" * 24, limits=limits, **options),
        Framing(second, role=receiver_role, header=b"\x44" * 24, limits=limits, **options),
    )


def _value(hint: Any, name: str) -> Any:
    if hint is NodeId:
        return node_id(name.encode())
    if hint is TensorRef:
        return TensorRef(0, (2, 3), "fp32", 24)
    if hint is Ticket:
        return Ticket(len(name), bytes(range(TICKET_BYTES)))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = get_type_hints(hint, include_extras=True)
        return hint(**{field: _value(hints[field], field) for field in hint.__struct_fields__})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _value(args[0], name)
    if origin is Literal:
        return args[0]
    if origin in (Union, types.UnionType):
        return _value(args[0], name)
    if origin is tuple and args[0] is TensorRef:
        return (TensorRef(0, (2, 3), "fp32", 24), TensorRef(1, (4,), "bf16", 8))
    if origin is tuple:
        kinds = (args[0], args[0]) if args[-1] is Ellipsis else args
        return tuple(_value(kind, f"{name}{index}") for index, kind in enumerate(kinds))
    if origin is dict:
        return {REPORT_COUNTERS[0]: 1.5}
    plain: dict[Any, Any] = {bool: True, int: len(name), float: len(name) + 0.5, str: name, bytes: name.encode()}
    return plain[hint]
