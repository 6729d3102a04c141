"""A server's part of a stage: weights and moments of a range of the stage's vector, by version.

A version never changes once it is made, so an older one can be served, digested or written to disk at any time. Called
from one thread only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node.compute.export import initial_weights
from node.compute.layout import StageLayout, shard_range
from node.compute.optimizer import AdamWShard, partial_square_norm
from node.compute.wire import encode


@dataclass(frozen=True)
class _Version:
    params: Tensor
    optimizer: AdamWShard | None
    """None: the version is only served, never updated (it came from a snapshot of its successor)."""


class ShardWorker:
    """The shard `shard_index` of `shard_count` of a stage: elements `begin` to `end` (exclusive) of its vector."""

    def __init__(self, layout: StageLayout, shard_index: int, shard_count: int) -> None:
        self._layout = layout
        self._config = layout.config
        self.begin, self.end = shard_range(layout.parameter_count, shard_index, shard_count)
        self._decay_mask = layout.decay_mask[self.begin : self.end].clone()
        self._versions: dict[int, _Version] = {}

    def initial(self) -> bytes:
        """Makes version 0 from `model.start_from`, or from the run's seed. Returns its digest."""
        flat = initial_weights(self._layout)
        zeros = torch.zeros(self.end - self.begin)
        return self.load(0, flat[self.begin : self.end].clone(), zeros, zeros.clone())

    def load(self, version: int, params: Tensor, m: Tensor, v: Tensor, previous: Tensor | None = None) -> bytes:
        """Takes a version as `snapshot` gave it; raises ValueError on a wrong shape. Returns its digest.

        `previous` are the weights of the version before, on which the next step runs when updates are delayed.
        """
        for name, tensor in (("params", params), ("m", m), ("v", v), ("previous", previous)):
            if tensor is not None and (tensor.shape != (self.end - self.begin,) or tensor.dtype != torch.float32):
                raise ValueError(f"{name}: {tuple(tensor.shape)} {tensor.dtype} for a shard of {self.end - self.begin}")
        self._versions[version] = _Version(params, AdamWShard(self._config, self._decay_mask, m, v))
        if previous is not None:
            self._versions[version - 1] = _Version(previous, None)
        return self.digest(version)

    def versions(self) -> tuple[int, ...]:
        """The versions that are held, oldest first."""
        return tuple(sorted(self._versions))

    def params(self, version: int) -> Tensor:
        """[end - begin] fp32; not to be changed."""
        return self._versions[version].params

    def reduce(self, grads: Sequence[Tensor]) -> tuple[Tensor, float, bool]:
        """The sum in the given order, its square norm, and whether all of it is finite. Inputs stay as they are.

        Summed in fp64 and rounded once: [end - begin] fp32.
        """
        exact = torch.zeros(self.end - self.begin, dtype=torch.float64)
        for grad in grads:
            if grad.shape != exact.shape:
                raise ValueError(f"gradient of shape {tuple(grad.shape)} for a shard of {exact.numel()}")
            exact += grad
        total = exact.float()
        square_norm = partial_square_norm(total)
        return total, square_norm, square_norm < float("inf")  # false for NaN too

    def apply(self, version: int, grad_sum: Tensor, step: int, clip_factor: float) -> bytes:
        """Makes `version` + 1 from `version`, which stays, by the update of `step`. Returns the new one's digest."""
        old = self._versions[version]
        assert old.optimizer is not None, f"version {version} has a successor already"
        params, optimizer = old.params.clone(), old.optimizer.clone()
        optimizer.apply(params, grad_sum, step, clip_factor)
        self._versions[version + 1] = _Version(params, optimizer)
        return self.digest(version + 1)

    def skip(self, version: int) -> bytes:
        """Makes `version` + 1 with the content of `version`: a step whose gradient was refused. Returns its digest."""
        self._versions[version + 1] = self._versions[version]
        return self.digest(version + 1)

    def drop(self, version: int) -> None:
        """Forgets a version."""
        self._versions.pop(version, None)

    def snapshot(self, version: int) -> dict[str, Tensor]:
        """`params`, `m` and `v` of a version, as `load` takes them; views, not to be changed.

        With delayed updates also `previous`, if the version before is held: without it a run cannot go on exactly.
        """
        held = self._versions[version]
        assert held.optimizer is not None, f"version {version} is held without its moments"
        tensors = {"params": held.params, "m": held.optimizer.m, "v": held.optimizer.v}
        if self._config.batch.delay and version - 1 in self._versions:
            tensors["previous"] = self._versions[version - 1].params
        return tensors

    def digest(self, version: int) -> bytes:
        """BLAKE2b-256 over the weights: equal exactly if they are. Differing moments show in the version after.

        Taken at every step, so it leaves the moments out: hashing them too would triple its time, which is that of
        the update itself.
        """
        state = hashlib.blake2b(encode(self.params(version), "fp32"), digest_size=32, person=b"br-shard")
        return state.digest()
