"""A server's part of a stage: weights and moments of a range of the stage's vector, by version.

A version never changes once it is made, so an older one can be served, digested or written to disk at any time. Called
from one thread only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from node.compute.export import initial_weights
from node.compute.forms import packed
from node.compute.forms.grid import is_spoilt, spoil
from node.compute.layout import StageLayout
from node.compute.optimizer import PIECE, AdamWShard, square_norm, squares_of
from node.compute.side_by_side import ALONE, SideBySide
from node.compute.stage_grid import StageGrid
from node.compute.wire import decode, encode
from protocol.base.forms import NOT_FINITE


@dataclass(frozen=True)
class _Version:
    params: Tensor
    optimizer: AdamWShard | None
    """None: the version is only served, never updated (it came from a snapshot of its successor)."""
    averages: Tensor | None
    """With `gradients = "gi"`, [blocks] fp64: what the gradient was lately, which makes the grid of the steps that run
    on this version."""


@dataclass(frozen=True)
class StepSum:
    """A step's gradient, summed up and not yet rounded: its floats are made when somebody needs them, a piece at a
    time, so that a shard of 500 M parameters never has them as another 2 GB."""

    exact: Tensor
    """[n] int32 on the grid, else floats."""
    grid: StageGrid | None = None
    steps: Tensor | None = None
    """[blocks] int8: how fine the grid was."""

    def floats(self, inside: slice) -> Tensor:
        """[end - begin] fp32 of some of the elements, rounded once."""
        if self.grid is None or self.steps is None:
            return self.exact[inside].float()
        return self.grid.value(self.exact, self.steps, inside.start, inside.stop)


class ShardWorker:
    """The shard `shard_index` of `shard_count` of a stage: elements `begin` to `end` (exclusive) of its vector.

    Args:
        threads: what works on its pieces; the bits are the same however many there are.
    """

    def __init__(self, layout: StageLayout, shard_index: int, shard_count: int, threads: SideBySide = ALONE) -> None:
        self.layout = layout
        self._threads = threads
        self._config = layout.config
        self.begin, self.end = layout.shard_range(shard_index, shard_count)
        self._grid = StageGrid.of(layout).cut(self.begin, self.end) if self._config.wire.gradients == "gi" else None
        self._decay_mask = layout.decay_mask[self.begin : self.end].clone()
        self._versions: dict[int, _Version] = {}
        self._sums: dict[int, Tensor] = {}
        """Step -> what is folded of its gradient, however many parts: fp64, or int32 on the grid and up to a whole
        block of `packed`."""

    def initial(self) -> bytes:
        """Makes version 0 from `model.start_from`, or from the run's seed. Returns its digest."""
        flat = initial_weights(self.layout)
        zeros = torch.zeros(self.end - self.begin)
        averages = None if self._grid is None else self._grid.first_averages()
        return self.load(0, flat[self.begin : self.end].clone(), zeros, zeros.clone(), averages=averages)

    def load(
        self,
        version: int,
        params: Tensor,
        m: Tensor,
        v: Tensor,
        previous: Tensor | None = None,
        averages: Tensor | None = None,
        previous_averages: Tensor | None = None,
    ) -> bytes:
        """Takes a version as `snapshot` gave it; raises ValueError on a wrong shape. Returns its digest.

        `previous` are the weights of the version before, on which the next step runs when updates are delayed.
        """
        for name, tensor, weights in (
            ("averages", averages, params),
            ("previous_averages", previous_averages, previous),
        ):
            shape = None if self._grid is None or weights is None else (self._grid.block_count,)
            if (None if tensor is None else tuple(tensor.shape)) != shape:
                raise ValueError(f"{name}: {None if tensor is None else tuple(tensor.shape)} where {shape} belongs")
        for name, tensor in (("params", params), ("m", m), ("v", v), ("previous", previous)):
            if tensor is not None and (tensor.shape != (self.end - self.begin,) or tensor.dtype != torch.float32):
                raise ValueError(f"{name}: {tuple(tensor.shape)} {tensor.dtype} for a shard of {self.end - self.begin}")
        self._versions[version] = _Version(params, AdamWShard(self._config, self._decay_mask, m, v), averages)
        if previous is not None:
            self._versions[version - 1] = _Version(previous, None, previous_averages)
        return self.digest(version)

    def versions(self) -> tuple[int, ...]:
        """The versions that are held, oldest first."""
        return tuple(sorted(self._versions))

    def params(self, version: int) -> Tensor:
        """[end - begin] fp32; not to be changed."""
        return self._versions[version].params

    def grid_steps(self, version: int) -> Tensor | None:
        """[blocks] int8: the grid of the steps that run on a version, which is served with it; None without a grid."""
        averages = self._versions[version].averages
        return None if self._grid is None or averages is None else self._grid.steps(averages)

    def measure(self, version: int, form: str, buffer: bytes | bytearray | memoryview) -> float:
        """The square norm of a contribution's part, which was computed on `version`, or, on a grid, a little more;
        infinite where it is not finite, or stands for a gradient that was not."""
        if form != "gi":
            return square_norm(decode(buffer, (self.end - self.begin,), form))
        count, steps = self.end - self.begin, self.grid_steps(version)
        assert self._grid is not None and steps is not None, "a part on a grid, in a run that has none"
        if packed.begins_with(buffer, count, NOT_FINITE):
            return math.inf
        return self._grid.square_norm_most(packed.widest(buffer, count), steps)

    def fold_packed(self, step: int, buffer: bytes | bytearray | memoryview) -> None:
        """Adds a contribution's part in the form `gi` to the step's sum, in int32: exact in any order and grouping.

        A part that stands for a gradient that was not finite makes the sum stand for NaN, and the step is skipped.

        Raises:
            RemoteProtocolError: the bytes are not a packed vector of the shard's length.
        """
        count, total = self.end - self.begin, self._sums.get(step)
        if total is None:
            total = torch.zeros(packed.padded(count), dtype=torch.int32)
        elif is_spoilt(total):
            return  # nothing more can come of it
        packed.add(buffer, total.numpy(), self._threads)
        if packed.begins_with(buffer, count, NOT_FINITE):
            spoil(total)
        self._sums[step] = total

    def fold(self, step: int, part: Tensor) -> None:
        """Adds a contribution's part, [end - begin] floats, to the step's sum, in fp64; `part` stays as it is."""
        if part.shape != (self.end - self.begin,):
            raise ValueError(f"gradient of shape {tuple(part.shape)} for a shard of {self.end - self.begin}")
        if step not in self._sums:
            self._sums[step] = torch.zeros(self.end - self.begin, dtype=torch.float64)
        self._sums[step] += part

    def reduce(self, step: int) -> tuple[StepSum, float, bool]:
        """Ends the step's sum, which is forgotten here: it, its square norm, and whether all of it is finite. Nothing
        folded is a sum of zeros."""
        exact, used = self._sums.pop(step, None), None
        if self._grid is not None:
            exact = torch.zeros(self.end - self.begin, dtype=torch.int32) if exact is None else exact
            exact = exact[: self.end - self.begin]
            used = self.grid_steps(self._config.version_of(step))
            assert used is not None, "every version of a run with a grid has its averages"
        total = StepSum(torch.zeros(self.end - self.begin) if exact is None else exact, self._grid, used)
        squares = self._threads.each(lambda inside: squares_of(total.floats(inside)), self._pieces())
        square_norm = math.fsum(chain.from_iterable(squares))
        return total, square_norm, square_norm < float("inf")  # false for NaN too

    def apply(self, version: int, total: StepSum, step: int, clip_factor: float, rate: float = -1.0) -> bytes:
        """Makes `version` + 1 from `version`, which stays, by the update of `step`. Returns the new one's digest."""
        old = self._versions[version]
        assert old.optimizer is not None, f"of version {version} only the weights are held"
        before, optimizer = old.optimizer, old.optimizer.empty()
        params = torch.empty_like(old.params)

        def update(inside: slice) -> Tensor:
            # Copied here, a piece is still in the cache when it is changed.
            mine = optimizer.part(inside)
            mine.m.copy_(before.m[inside])
            mine.v.copy_(before.v[inside])
            mine.apply(params[inside].copy_(old.params[inside]), total.floats(inside), step, clip_factor, rate)
            return params[inside]

        digest = _digest_of(self._threads.each(update, self._pieces()))
        averages = old.averages
        if self._grid is not None and averages is not None:
            assert total.steps is not None, "a sum of floats in a run with a grid"
            averages = self._grid.next_averages(averages, total.exact, total.steps)
        self._versions[version + 1] = _Version(params, optimizer, averages)
        return digest

    def _pieces(self) -> list[slice]:
        """Elements that are worked on together, from first to last."""
        count = self.end - self.begin
        return [slice(begin, min(begin + PIECE, count)) for begin in range(0, count, PIECE)]

    def skip(self, version: int) -> bytes:
        """Makes `version` + 1 with the content of `version`: a step whose gradient was refused. Returns its digest."""
        self._versions[version + 1] = self._versions[version]
        return self.digest(version + 1)

    def drop_below(self, version: int, closed: int) -> None:
        """Forgets versions below `version`, and of those below `closed` the moments: nobody goes on from them, and what
        they take, 8 bytes a parameter, is wanted for the next version's."""
        for old in [old for old in self._versions if old < version]:
            del self._versions[old]
        for old, held in self._versions.items():
            if old < closed:
                self._versions[old] = replace(held, optimizer=None)

    @property
    def grid_blocks(self) -> int | None:
        """Blocks of the gradient's grid in the shard, each with an average; None without a grid."""
        return None if self._grid is None else self._grid.block_count

    def is_whole(self, version: int) -> bool:
        """Whether a run could go on from what is held of a version: its moments, and what the next step runs on."""
        held = self._versions.get(version)
        runs_on = self._config.version_of(version)
        return held is not None and held.optimizer is not None and runs_on in self._versions

    def snapshot(self, version: int) -> dict[str, Tensor]:
        """`params`, `m` and `v` of a version, as `load` takes them; not to be changed.

        With delayed updates also `previous`, if the version before is held: without it a run cannot go on exactly.
        """
        held = self._versions[version]
        assert held.optimizer is not None, f"version {version} is held without its moments"
        tensors = {"params": held.params, "m": held.optimizer.m, "v": held.optimizer.v}
        if held.averages is not None:
            tensors["averages"] = held.averages
        if self._config.batch.delay and version - 1 in self._versions:
            previous = self._versions[version - 1].params
            # A skipped step shares its weights with the version before, and a file never holds one tensor twice.
            tensors["previous"] = previous.clone() if previous is held.params else previous
            before = self._versions[version - 1].averages
            if before is not None:
                tensors["previous_averages"] = before.clone() if before is held.averages else before
        return tensors

    def digest(self, version: int) -> bytes:
        """BLAKE2b-256 over the weights: equal exactly if they are. Differing moments show in the version after.

        Taken at every step, so it leaves the moments out: hashing them too would triple its time, which is that of
        the update itself.
        """
        return _digest_of([self.params(version)])


def _digest_of(pieces: Iterable[Tensor]) -> bytes:
    """Of a version's weights, as they come."""
    state = hashlib.blake2b(digest_size=32, person=b"br-shard")
    for piece in pieces:
        state.update(encode(piece, "fp32"))
    return state.digest()
