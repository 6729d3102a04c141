"""A shard's state as one row of 32-bit words, for its buddy: cut into pieces there, put together here.

The words are those of its tensors, one after the other in the order of `UNITS`: weights and moments in fp32, averages
of the gradient's grid in fp64, which are two words each. How long each is, follows from the shard and from whether the
weights of the version before are among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from node.compute.cut_anew import UNITS as UNITS
from node.process.store import Buffer


class CopyError(Exception):
    """What came is not a shard's state, or not the one that its digest says."""


def words_of(state: Mapping[str, Tensor]) -> list[np.ndarray]:
    """The tensors' own memory, as words; not to be changed."""
    return [state[name].contiguous().view(torch.int32).numpy() for name in UNITS if name in state]


def digest_of(words: Sequence[np.ndarray], version: int) -> bytes:
    """BLAKE2b-256 over a state and the number of its version."""
    found = hashlib.blake2b(version.to_bytes(8, "little"), digest_size=32, person=b"br-copy")
    for row in words:
        found.update(row.data)
    return found.digest()


def piece_of(words: Sequence[np.ndarray], number: int, size: int) -> np.ndarray:
    """Words `number * size` to the next piece's first; only these are copied."""
    begin, end, at, found = number * size, (number + 1) * size, 0, []
    for row in words:
        found.append(row[max(0, begin - at) : max(0, end - at)])
        at += len(row)
    return np.concatenate(found)


def pieces_in(words: Sequence[np.ndarray], size: int) -> int:
    return max(1, -(-sum(len(row) for row in words) // size))


def state_of(
    pieces: Sequence[Buffer], version: int, digest: bytes, elements: int, grid_blocks: int | None
) -> dict[str, Tensor]:
    """The state that `words_of` was given.

    Args:
        elements, grid_blocks: sizes of the shard; no grid: None.

    Raises:
        CopyError: it is another state than the digest says, or none of this shard.
    """
    whole = np.concatenate([np.frombuffer(piece, dtype=np.int32) for piece in pieces])
    if digest_of([whole], version) != digest:
        raise CopyError(f"the state of version {version} does not have the digest that its shard made")
    names = ["params", "m", "v", *(["averages"] if grid_blocks is not None else [])]
    before = ["previous", *(["previous_averages"] if grid_blocks is not None else [])]
    for wanted in (names, [*names, *before]):
        ordered = [name for name in UNITS if name in wanted]
        sizes = [elements if UNITS[name] == 1 else 2 * (grid_blocks or 0) for name in ordered]
        if sum(sizes) == len(whole):
            parts = np.split(whole, np.cumsum(sizes)[:-1])
            return {
                name: torch.from_numpy(part.view(np.float32 if UNITS[name] == 1 else np.float64).copy())
                for name, part in zip(ordered, parts, strict=True)
            }
    raise CopyError(f"{len(whole)} words are no state of a shard of {elements} parameters")
