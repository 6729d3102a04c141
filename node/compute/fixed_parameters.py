"""A volunteer's parameters in `p12`: whole numbers by version, made from what changed since another version."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from node.compute.forms import p12
from node.process.store import Buffer
from protocol.base.errors import RemoteProtocolError


class FixedParameters:
    """The whole numbers of a stage's parameters, for versions that a server may send the difference to.

    Args:
        bits: binary places, `p12.fixed_bits` of the run.
        ranges: (begin, end) of each shard in the stage's vector, in order.
    """

    def __init__(self, bits: int, ranges: Sequence[tuple[int, int]]) -> None:
        self._bits = bits
        self._ranges = ranges
        self._held: dict[int, Tensor] = {}

    def load(self, version: int, shards: Sequence[Sequence[Buffer]], keep_from: int) -> Tensor:
        """[parameters] fp32 of a version, whose whole numbers are kept; those below `keep_from` are forgotten.

        Args:
            shards: for each shard the whole of it, or what changed in each step since a version that is held.

        Raises:
            RemoteProtocolError: the bytes are no such thing, or their base is not held.
        """
        if len(shards) != len(self._ranges):
            raise RemoteProtocolError("shape", f"{len(shards)} shards where the stage has {len(self._ranges)}")
        fixed = torch.empty(self._ranges[-1][1], dtype=torch.int32)
        for buffers, (begin, end) in zip(shards, self._ranges, strict=True):
            fixed[begin:end] = self._shard(version, buffers, (begin, end))
        self._held[version] = fixed
        # This one, too, when it comes after a newer one: nobody is asked for what changed since it.
        for old in [old for old in self._held if old < keep_from]:
            del self._held[old]
        return p12.from_fixed(fixed, self._bits)

    def _shard(self, version: int, buffers: Sequence[Buffer], inside: tuple[int, int]) -> Tensor:
        begin, end = inside
        fixed: Tensor | None = None
        reached = p12.WHOLE
        for buffer in buffers:
            base = p12.base_of(buffer)
            if fixed is None and base != p12.WHOLE:
                if base not in self._held:
                    raise RemoteProtocolError("version", f"a change of version {base}, which is not here")
                fixed, reached = self._held[base][begin:end], base
            if base != reached:
                raise RemoteProtocolError("version", f"a change of version {base} where {reached} was reached")
            fixed = p12.decode(buffer, end - begin, fixed)
            reached = version if base == p12.WHOLE else base + 1
        if fixed is None or reached != version:
            raise RemoteProtocolError("version", f"parameters of version {reached} where {version} belongs")
        return fixed
