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
from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import BASE_BYTES
from protocol.run.run import RunConfig

WHOLE = -1
"""In place of a base version: the integers themselves."""
MEASURED_BITS, MEASURED_RATE = 12, 1.5e-3
"""At this learning rate these bits cost no loss (−0.005 nats/byte, within noise); changes took 2 to 3.3 bits."""
_MOST = float(2**30)


def fixed_bits(config: RunConfig) -> int:
    """Binary places of the run's parameters: AdamW moves a weight by about the learning rate, so places follow it."""
    places = MEASURED_BITS + round(math.log2(MEASURED_RATE / max(config.optimizer.learning_rate, 1e-9)))
    return min(max(places, 8), 22)


def to_fixed(params: Tensor, bits: int) -> Tensor:
    """[n] int32: to the nearest, even in the middle."""
    return (params.float() * 2.0**bits).round_().clamp_(-_MOST, _MOST).to(torch.int32)


def from_fixed(fixed: Tensor, bits: int) -> Tensor:
    """[n] fp32: exact for magnitudes below 2^24."""
    return fixed.float().mul_(2.0**-bits)


def received(params: Tensor, bits: int) -> Tensor:
    """[n] fp32: what whoever is sent these parameters computes with."""
    return from_fixed(to_fixed(params, bits), bits)


def encode(fixed: Tensor, base: Tensor | None, base_version: int) -> bytearray:
    """Bytes of `fixed` [n] int32: its difference to `base`, the integers of version `base_version`, or itself."""
    values: Ints = fixed.cpu().numpy()
    if base is not None:
        # differences of two magnitudes up to 2^30 fit into 32 bits
        values = values - base.cpu().numpy()
    number = base_version if base is not None else WHOLE
    return bytearray(number.to_bytes(BASE_BYTES, "little", signed=True)) + pack(values)


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
    return torch.from_numpy(values + base.cpu().numpy())
