"""Messages to bytes and back: msgpack in one canonical form, decoded straight into the struct it claims to be.

The typed decoder builds nothing that the schema does not ask for, so a bomb of nested or announced-huge arrays is
refused after a few hundred bytes of memory; decoding such a bomb into plain lists first took 80 MB with msgpack's
own limits on. A message that is decoded is encoded again and compared, so each has exactly one form on the wire:
no doubled key, no left-out field, no longer form of a number.
"""

from __future__ import annotations

import math
import operator
from functools import reduce
from typing import Any

import msgspec

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.base.forms import byte_bounds
from protocol.base.ids import TensorRef
from protocol.base.limits import ELEMENTS_MAX, MESSAGE_BYTES_MAX, MESSAGE_PARTS_MAX, TEXT_MAX
from protocol.base.printable import is_printable, printable
from protocol.kinds import MAY_SEND, MESSAGES, OF
from protocol.link.fields import check_fields, sentences
from protocol.messages import Audited, Lease, Message

PROTOCOL_MINOR = 2
"""Grows with every change of a message; the handshake's version is the major number. See CHANGES.md."""

_TOO_LONG = "of length <="
"""In what the decoder says of a text, a list or bytes beyond their bound (a test holds it)."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reduce(operator.or_, MESSAGES))


def encode(message: Message) -> bytes:
    """The one canonical form of `message`. Raises `LocalProtocolError` when we made one that peers would refuse.

    Sentences for people (`protocol.base.bounded.Sentence`) are cut to TEXT_MAX and made printable: they may hold the
    words of an exception.
    """
    try:
        for name in sentences(type(message)):
            sentence = getattr(message, name)
            if not is_printable(sentence):
                sentence = printable(" ".join(sentence.split()))
            message = msgspec.structs.replace(message, **{name: sentence[:TEXT_MAX]})
        data = _encoder.encode(message)
        decoded = _decoder.decode(data)
        data = _encoder.encode(decoded)  # a whole number in a field of floats is a float from here on
        _check_size(data)
        check_fields(decoded)
    except (msgspec.MsgspecError, TypeError, OverflowError, RemoteProtocolError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
    return data


def decode(data: bytes) -> Message:
    """The message in `data`. Raises `RemoteProtocolError` ("size", "decode" or "not_finite"), nothing else."""
    _check_size(data)
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        reason = "size" if _TOO_LONG in str(error) else "decode"
        raise RemoteProtocolError(reason, str(error)[:TEXT_MAX]) from None
    check_fields(message)
    if _encoder.encode(message) != data:
        raise RemoteProtocolError("decode", f"{type(message).__name__} is not in its canonical form")
    return message


def check_allowed(kind: type[Message], sender_role: str, receiver_role: str) -> None:
    """Raises `RemoteProtocolError` ("role") unless the table lets `sender_role` send `kind` to `receiver_role`."""
    if (sender_role, receiver_role) not in MAY_SEND.get(kind, ()):
        raise RemoteProtocolError("role", f"{kind.__name__} from a {sender_role} to a {receiver_role}")


def check_tensors(tensors: tuple[TensorRef, ...], tensor_bytes_max: int, elements_max: int = ELEMENTS_MAX) -> int:
    """Bytes of all tensors of a message on the wire. Raises `RemoteProtocolError` ("shape" or "size")."""
    total = elements = 0
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
        count = math.prod(tensor.shape)
        elements += count
        if count > elements_max or elements > MESSAGE_PARTS_MAX * elements_max:
            raise RemoteProtocolError("size", f"tensors of {elements} values; this run's largest has {elements_max}")
        total += byte_count
    return total


def tensors_of(message: Message) -> tuple[TensorRef, ...]:
    """The tensors that travel with a message; empty for kinds that have none."""
    tensors: tuple[TensorRef, ...] = getattr(message, "tensors", ())
    return tensors


def is_long(message: Message) -> bool:
    """Whether it holds a good part of a stage, or fills the line for a while: the rest takes turns with it."""
    return OF[type(message)].is_long


def traffic_kind(message: Message) -> str:
    """The label `kind` of barnraise_transport_bytes_total that the message's bytes count under."""
    if not tensors_of(message):
        return "control"
    if isinstance(message, Lease):
        return "gradient" if all(task.op == "B" for task in message.tasks) else "activation"
    if isinstance(message, Audited):
        return "gradient" if message.task is None else "activation"
    return OF[type(message)].carries


def _check_size(data: bytes) -> None:
    if len(data) > MESSAGE_BYTES_MAX:
        raise RemoteProtocolError("size", f"a message of {len(data)} bytes")
