"""Tensors as bytes on the wire, little-endian and row-major; shape and form travel in the message.

`encode` gives a view of the tensor's own memory where the form allows; `decode` gives a tensor over the received
buffer. What a peer sent is checked here before it is used (`RemoteProtocolError`: "shape", "decode" or "not_finite").
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Final, Literal, cast

import numpy as np
import torch
from torch import Tensor

from node.compute.forms import d4, q8
from node.compute.forms.scales import Upload, here
from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import byte_bounds

Form = Literal["fp64", "fp32", "bf16", "int32", "q8", "d4"]
"""What `encode` and `decode` know; `gi` and `p12` need a grid or a base, and are made in `node.compute.forms`."""

_STORED: Final[dict[str, tuple[torch.dtype, torch.dtype]]] = {
    # form: (type on the wire, type that decode returns)
    "fp64": (torch.float64, torch.float64),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
    "int32": (torch.int32, torch.int64),
}
_SMALL: Final[dict[str, ModuleType]] = {"q8": q8, "d4": d4}
MOST_BYTES: Final = 1 << 34
"""16 GiB: more than any stage's vector that one process can hold twice; stops products of absurd shapes."""

assert sys.byteorder == "little", "tensors are sent in memory order, which must be little-endian"


def check_shape(shape: tuple[int, ...], form: str) -> tuple[int, int]:
    """The fewest and most bytes of `shape` in `form`; refuses unknown forms, negative sizes, more than `MOST_BYTES`."""
    if form not in _STORED and form not in _SMALL:
        raise RemoteProtocolError("shape", f"tensor form {form!r} is not one of {sorted([*_STORED, *_SMALL])}")
    if len(shape) > 4 or any(size < 0 for size in shape):
        raise RemoteProtocolError("shape", f"tensor shape {shape}")
    least, most = byte_bounds(shape, form)
    if least > MOST_BYTES:
        raise RemoteProtocolError("shape", f"tensor of shape {shape} is {least} bytes, more than {MOST_BYTES}")
    return least, most


def encode(tensor: Tensor, form: str) -> memoryview:
    """The bytes of a tensor, which may lie on a device: small forms are made there, to the last bit as anywhere else.

    In its own form this is a view of the tensor's memory: it must not change until it is sent.
    """
    if form in _SMALL:
        return memoryview(cast(bytearray, _SMALL[form].encode(tensor)))
    stored, _ = _STORED[form]
    plain = tensor.detach().to(device="cpu", dtype=stored).contiguous()
    return plain.flatten().view(torch.uint8).numpy().data


def decode(
    buffer: bytes | bytearray | memoryview,
    shape: tuple[int, ...],
    form: str,
    upload: Upload = here,
) -> Tensor:
    """The tensor in `buffer`: fp64 for fp64, int64 for int32, fp32 for all others.

    fp32 and fp64 from a writable buffer shares its memory; the buffer must then belong to the tensor alone. `upload`
    brings what has travelled to the device that works it out; without it that is the processor.

    Raises:
        RemoteProtocolError: the buffer's length is not what shape and form say, or they are out of bounds.
    """
    least, most = check_shape(shape, form)
    view = memoryview(buffer)
    if not least <= view.nbytes <= most:
        raise RemoteProtocolError("shape", f"{view.nbytes} bytes for a {form} tensor of shape {shape}")
    if form in _SMALL:
        return cast(Tensor, _SMALL[form].decode(view, shape, upload))
    stored, wanted = _STORED[form]
    if most == 0:
        return upload(torch.empty(shape, dtype=wanted))
    raw = np.frombuffer(view, dtype=np.uint8)
    # torch has no tensors that cannot be written, and a view into the middle of a frame may lie at an odd address.
    if view.readonly or raw.ctypes.data % stored.itemsize:
        raw = raw.copy()
    return upload(torch.from_numpy(raw).view(stored)).to(wanted).view(shape)


def round_trip(tensor: Tensor, form: str) -> Tensor:
    """What a receiver computes with when this fp32 tensor was sent in `form`; in fp32 itself, on the same device."""
    if form == "fp32":
        return tensor
    return decode(encode(tensor, form), tuple(tensor.shape), form, lambda made: made.to(tensor.device))


def going_up(tensor: Tensor, base: Tensor | None, form: str, at_server: bool = False) -> tuple[Tensor, str]:
    """What goes up of a stage's fp32 output, or input gradient, and in which form, where the run says `form`; with
    `at_server` what the server makes of that, and in which form it goes on.

    Args:
        base: what came down to the stage, in fp32: its input, or its output's gradient. None for tokens and labels,
            from which nothing can be told apart.
    """
    if form != "d4":
        return tensor, form
    if base is None:
        return tensor, "q8"
    part = tensor - base
    return (base + round_trip(part, form), "q8") if at_server else (part, form)


def arrived(tensor: Tensor, base: Tensor | None, form: str) -> Tensor:
    """What the next stage computes with; as `going_up`."""
    return round_trip(*going_up(tensor, base, form, at_server=True))


def check_tokens(tokens: Tensor, vocabulary: int, what: str) -> None:
    """Refuses token numbers outside of the vocabulary, which would read foreign memory or raise deep inside torch."""
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise RemoteProtocolError("decode", f"{what} holds tokens outside of the vocabulary of {vocabulary}")
