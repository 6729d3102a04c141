"""`p12`: parameters in fixed point, whole the first time, and from then on as what changed.

A parameter is round(W · 2^bits), a function of the servers' master weights alone: whoever comes late, or missed a
version, computes with the same numbers as everybody else. What changed between two versions are small integers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from node.compute.forms.packed import Ints, pack, unpack
from node.compute.side_by_side import ALONE, SideBySide
from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import BASE_BYTES
from protocol.run.run import RunConfig

WHOLE = -1
"""In place of a base version: the integers themselves."""
MEASURED_BITS, MEASURED_RATE = 12, 1.5e-3
"""At this learning rate these bits cost no loss (−0.005 nats/byte, within noise); changes took 2 to 3.3 bits."""
_MOST = float(2**30)
_PIECE = 1 << 18
"""Parameters worked on at a time: of a whole shard there is nothing but the result."""


def fixed_bits(config: RunConfig) -> int:
    """Binary places of the run's parameters: AdamW moves a weight by about the learning rate, so places follow it."""
    places = MEASURED_BITS + round(math.log2(MEASURED_RATE / max(config.optimizer.learning_rate, 1e-9)))
    return min(max(places, 8), 22)


def to_fixed(params: Tensor, bits: int) -> Tensor:
    """[n] int32: to the nearest, even in the middle."""
    return _change(params, None, bits)


def _change(params: Tensor, before: Tensor | None, bits: int, threads: SideBySide = ALONE) -> Tensor:
    found = torch.empty(params.shape, dtype=torch.int32, device=params.device)

    def put(begin: int) -> None:
        piece = slice(begin, begin + _PIECE)
        found[piece] = _fixed(params[piece], bits)
        if before is not None:
            found[piece] -= _fixed(before[piece], bits)  # of two magnitudes up to 2^30 it fits into 32 bits

    threads.all(put, range(0, params.numel(), _PIECE))
    return found


def _fixed(piece: Tensor, bits: int) -> Tensor:
    return (piece.float() * 2.0**bits).round_().clamp_(-_MOST, _MOST).to(torch.int32)


def from_fixed(fixed: Tensor, bits: int) -> Tensor:
    """[n] fp32: exact for magnitudes below 2^24."""
    return fixed.float().mul_(2.0**-bits)


def received(params: Tensor, bits: int) -> Tensor:
    """[n] fp32: what whoever is sent these parameters computes with."""
    return from_fixed(to_fixed(params, bits), bits)


def encode(
    params: Tensor, before: Tensor | None, before_version: int, bits: int, threads: SideBySide = ALONE
) -> bytearray:
    """Bytes of `params` [n]: as what changed since `before`, which are those of `before_version`, or whole."""
    values: Ints = _change(params, before, bits, threads).cpu().numpy()
    number = before_version if before is not None else WHOLE
    return bytearray(number.to_bytes(BASE_BYTES, "little", signed=True)) + pack(values, threads)


def base_of(buffer: bytes | bytearray | memoryview) -> int:
    """The version that the bytes are the difference to, or `WHOLE`. Raises `RemoteProtocolError`."""
    head = bytes(memoryview(buffer)[:BASE_BYTES])
    number = int.from_bytes(head, "little", signed=True)
    if len(head) < BASE_BYTES or number < WHOLE:
        raise RemoteProtocolError("decode", "parameters without a base")
    return number


def decode(buffer: bytes | bytearray | memoryview, count: int, base: Tensor | None) -> Tensor:
    """[count] int32. `base` are the integers of `base_of(buffer)`, None for `WHOLE`. Raises `RemoteProtocolError`."""
    values = unpack(memoryview(buffer)[BASE_BYTES:], count)
    if base is None:
        return torch.from_numpy(np.ascontiguousarray(values))
    if base.numel() != count:
        raise RemoteProtocolError("shape", f"a change of {count} parameters to a base of {base.numel()}")
    return torch.from_numpy(np.add(values, base.cpu().numpy(), out=values))
