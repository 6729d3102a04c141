"""Messages to bytes and back: msgpack in one canonical form, decoded straight into the struct it claims to be.

The typed decoder builds nothing that the schema does not ask for, so a bomb of nested or announced-huge arrays is
refused after a few hundred bytes of memory; decoding such a bomb into plain lists first took 80 MB with msgpack's
own limits on. A message that is decoded is encoded again and compared, so each has exactly one form on the wire:
no doubled key, no left-out field, no longer form of a number.
"""

from __future__ import annotations

import math
import operator
from functools import cache, reduce
from typing import Any, get_type_hints

import msgspec

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.base.forms import byte_bounds
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef, Ticket
from protocol.base.limits import (
    ADDRESSES_MAX,
    BYTES_MAX,
    CONTRIBUTIONS_MAX,
    CURVE_MAX,
    FELLOWS_MAX,
    ITEMS_MAX,
    MESSAGE_BYTES_MAX,
    NUMBER_MAX,
    PATH_MAX,
    PUBLIC_NAME_MAX,
    RELAYS_MAX,
    REPORT_COUNTERS,
    SPANS_PIECE,
    TASKS_MAX,
    TENSORS_MAX,
    TEXT_MAX,
)
from protocol.base.printable import is_printable, printable
from protocol.messages import (
    MESSAGES,
    Activation,
    Audited,
    Contribute,
    Gradient,
    InputAnswer,
    InputGradient,
    Labels,
    Lease,
    MeasureData,
    Message,
    Output,
    Parameters,
)
from protocol.run.run import DESCRIPTION_MAX
from protocol.run.spans import RECORD_BYTES
from protocol.speakers import MAY_SEND
from protocol.trust.identity import is_node_id

PROTOCOL_MINOR = 2
"""Grows with every change of a message; the handshake's version is the major number. See CHANGES.md."""

_LIST_MAX = {
    "tasks": TASKS_MAX,
    "graphs": TASKS_MAX,
    "tickets": TASKS_MAX,
    "losses": TASKS_MAX,
    "contributions": CONTRIBUTIONS_MAX,
    "tensors": TENSORS_MAX,
    "addresses": ADDRESSES_MAX,
    "local_addresses": ADDRESSES_MAX,
    "stun": ADDRESSES_MAX,
    "turn": ADDRESSES_MAX,
    "relays": RELAYS_MAX,
    "fellows": FELLOWS_MAX,
    "checkpoints": 16,
    "links": 1024,
    "curve": CURVE_MAX,
}
"""Most items of a list, by its field's name; ITEMS_MAX for others."""

_MAY_BE_NOT_FINITE = frozenset({"loss", "losses", "loss_sum", "gradient_norm", "square_norm"})
"""Fields in which a diverged step honestly holds infinity or NaN; the ledgers look at them and skip the step."""

_SENTENCES = frozenset({"reason", "waiting_for", "alert", "sample"})
_TEXT_MAX = {
    "source": PATH_MAX, "start_from": PATH_MAX, "tokenizer": PATH_MAX, "folder": PATH_MAX,
    "description": DESCRIPTION_MAX, "name": PUBLIC_NAME_MAX,
}  # fmt: skip
"""Most characters of a text, by its field's name; TEXT_MAX for others."""
_BYTES_MAX = {"spans": SPANS_PIECE * RECORD_BYTES}
"""Most bytes of a byte string, by its field's name; BYTES_MAX for others."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reduce(operator.or_, MESSAGES))


def encode(message: Message) -> bytes:
    """The one canonical form of `message`. Raises `LocalProtocolError` when we made one that peers would refuse.

    Sentences for people (`reason`, `waiting_for`, `alert`, `sample`) are cut to TEXT_MAX and made printable: they
    may hold the words of an exception.
    """
    try:
        for name in message.__struct_fields__:
            if name in _SENTENCES:
                sentence = getattr(message, name)
                if not is_printable(sentence):
                    sentence = printable(" ".join(sentence.split()))
                message = msgspec.structs.replace(message, **{name: sentence[:TEXT_MAX]})
        data = _encoder.encode(message)
        decoded = _decoder.decode(data)
        data = _encoder.encode(decoded)  # a whole number in a field of floats is a float from here on
        _check_size(data)
        _check_fields(decoded)
    except (msgspec.MsgspecError, TypeError, OverflowError, RemoteProtocolError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
    return data


def decode(data: bytes) -> Message:
    """The message in `data`. Raises `RemoteProtocolError` ("size", "decode" or "not_finite"), nothing else."""
    _check_size(data)
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise RemoteProtocolError("decode", str(error)[:TEXT_MAX]) from None
    _check_fields(message)
    if _encoder.encode(message) != data:
        raise RemoteProtocolError("decode", f"{type(message).__name__} is not in its canonical form")
    return message


def check_allowed(kind: type[Message], sender_role: str, receiver_role: str) -> None:
    """Raises `RemoteProtocolError` ("role") unless the table lets `sender_role` send `kind` to `receiver_role`."""
    if (sender_role, receiver_role) not in MAY_SEND.get(kind, ()):
        raise RemoteProtocolError("role", f"{kind.__name__} from a {sender_role} to a {receiver_role}")


def check_tensors(tensors: tuple[TensorRef, ...], tensor_bytes_max: int) -> int:
    """Bytes of all tensors of a message on the wire. Raises `RemoteProtocolError` ("shape" or "size")."""
    total = 0
    for index, tensor in enumerate(tensors):
        if tensor.key != index:
            raise RemoteProtocolError("shape", f"tensor {index} has the key {tensor.key}")
        least, most = byte_bounds(tensor.shape, tensor.form)
        byte_count = tensor.byte_count
        if not least <= byte_count <= most or byte_count == 0:
            raise RemoteProtocolError("shape", f"{tensor.form}{list(tensor.shape)} in {tensor.byte_count} bytes")
        if byte_count > tensor_bytes_max:
            raise RemoteProtocolError(
                "size", f"a tensor of {byte_count} bytes; this run's largest has {tensor_bytes_max}"
            )
        total += byte_count
    return total


def tensors_of(message: Message) -> tuple[TensorRef, ...]:
    """The tensors that travel with a message; empty for kinds that have none."""
    tensors: tuple[TensorRef, ...] = getattr(message, "tensors", ())
    return tensors


def with_keys(message: Message, keys: tuple[int, ...]) -> Message:
    """The message with its tensors' keys replaced: 0, 1, … for the wire, the store's numbers for a machine."""
    tensors = tensors_of(message)
    if len(keys) != len(tensors):
        raise LocalProtocolError(f"{type(message).__name__}: {len(keys)} keys for {len(tensors)} tensors")
    renamed = tuple(msgspec.structs.replace(tensor, key=key) for tensor, key in zip(tensors, keys, strict=True))
    return msgspec.structs.replace(message, tensors=renamed) if tensors else message


_TRAFFIC = {
    Activation: "activation",
    Output: "activation",
    InputAnswer: "activation",
    InputGradient: "gradient",
    Gradient: "gradient",
    Contribute: "gradient",
    Parameters: "weights",
    MeasureData: "measuring",
    Labels: "data",
}


def is_long(message: Message) -> bool:
    """Whether it holds a good part of a stage, or fills the line for a while: the rest takes turns with it."""
    return isinstance(message, (Contribute, Parameters, MeasureData))


def traffic_kind(message: Message) -> str:
    """The label `kind` of barnraise_transport_bytes_total that the message's bytes count under."""
    if not tensors_of(message):
        return "control"
    if isinstance(message, Lease):
        return "gradient" if all(task.op == "B" for task in message.tasks) else "activation"
    if isinstance(message, Audited):
        return "gradient" if message.task is None else "activation"
    return _TRAFFIC.get(type(message), "control")


def _check_size(data: bytes) -> None:
    if len(data) > MESSAGE_BYTES_MAX:
        raise RemoteProtocolError("size", f"a message of {len(data)} bytes")


@cache
def _node_fields(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(name for name, hint in get_type_hints(struct).items() if hint is NodeId)


def _check_fields(struct: msgspec.Struct) -> None:
    """Bounds that the decoder did not check: lengths, ranges and finiteness of a message's own fields."""
    nodes = _node_fields(type(struct))
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if name in nodes:
            _check_node(name, value)
        _check_value(name, value)


def _check_value(name: str, value: Any) -> None:
    if isinstance(value, int):
        if not -1 <= value <= NUMBER_MAX:
            raise RemoteProtocolError("decode", f"{name} is out of range")
    elif isinstance(value, str):
        if len(value) > _TEXT_MAX.get(name, TEXT_MAX):
            raise RemoteProtocolError("size", f"{name} has {len(value)} characters")
        if not is_printable(value):
            raise RemoteProtocolError("decode", f"{name} holds control characters")
    elif isinstance(value, bytes):
        if len(value) > _BYTES_MAX.get(name, BYTES_MAX):
            raise RemoteProtocolError("size", f"{name} has {len(value)} bytes")
    elif isinstance(value, float):
        if not math.isfinite(value) and name not in _MAY_BE_NOT_FINITE:
            raise RemoteProtocolError("not_finite", f"{name} is {value}")
    elif isinstance(value, tuple):
        if len(value) > _LIST_MAX.get(name, ITEMS_MAX):
            raise RemoteProtocolError("size", f"{name} has {len(value)} items")
        if value and not isinstance(value[0], TaskId | TensorRef | Ticket):
            for item in value:
                _check_value(name, item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in REPORT_COUNTERS:
                raise RemoteProtocolError("decode", f"{name} has an unknown key")
            _check_value(key, item)
    elif isinstance(value, ContributionId):
        _check_node(name, value.node)
    elif isinstance(value, msgspec.Struct) and not isinstance(value, TaskId | TensorRef | Ticket):
        _check_fields(value)


def _check_node(name: str, value: str) -> None:
    if not is_node_id(value):
        raise RemoteProtocolError("decode", f"{name} is not a node id")
