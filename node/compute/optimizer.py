"""AdamW on a slice of a stage's vector, such that cutting the vector into slices changes no bit of the result.

Only operations that IEEE 754 rounds correctly on their own are used (sum, product, quotient, root), one per kernel. The
fused kernels (`addcmul`, `lerp`) may round once or twice depending on where in the vector an element lies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from node.machine.numbers import learning_rate
from protocol.run.run import RunConfig

_CHUNK = 1 << 16
"""Elements worked on at a time: a chunk of all six vectors stays in a core's second-level cache."""
PIECE = 4 * _CHUNK
"""Elements of which a gradient is made at a time, where it is not there as a whole: a megabyte, of which each thread
has some. (Eight threads took 135 MB with pieces four times as large, and the allocator never gave them back.)"""


class AdamWShard:
    """Optimizer state of a slice: the moments `m` and `v` (Loshchilov and Hutter, arXiv:1711.05101).

    Args:
        config: the run; its optimizer section and its number of steps count.
        decay_mask: [n] bool, true where weight decay acts.
        m, v: [n] fp32 to start from; zeros without.
    """

    def __init__(self, config: RunConfig, decay_mask: Tensor, m: Tensor | None = None, v: Tensor | None = None) -> None:
        self._config = config
        self._decay_mask = decay_mask
        self.m = torch.zeros(decay_mask.shape) if m is None else m
        self.v = torch.zeros(decay_mask.shape) if v is None else v
        assert self.m.shape == self.v.shape == decay_mask.shape

    def empty(self) -> AdamWShard:
        """A second state of the same elements, with nothing in it yet."""
        return AdamWShard(self._config, self._decay_mask, torch.empty_like(self.m), torch.empty_like(self.v))

    def part(self, inside: slice) -> AdamWShard:
        """The state of some of the elements: the same memory."""
        return AdamWShard(self._config, self._decay_mask[inside], self.m[inside], self.v[inside])

    def apply(self, params: Tensor, grad: Tensor, step: int, clip_factor: float, rate: float = -1.0) -> None:
        """Changes `params` [n] and the moments in place by the update of `step` (from 0); `grad` [n] stays as it is.

        Args:
            rate: the learning rate; below 0: the one that the run's file has for the step.
        """
        assert params.shape == grad.shape == self.m.shape
        section = self._config.optimizer
        rate = learning_rate(self._config, step) if rate < 0 else rate
        correction_m = 1.0 - section.beta1 ** (step + 1)
        correction_v = 1.0 - section.beta2 ** (step + 1)
        update_scale = -rate / correction_m
        root_scale = 1.0 / math.sqrt(correction_v)
        chunk = min(_CHUNK, max(1, params.numel()))
        first, second = torch.empty(chunk), torch.empty(chunk)
        for begin in range(0, params.numel(), chunk):
            part = slice(begin, min(begin + chunk, params.numel()))
            p, m, v, mask = params[part], self.m[part], self.v[part], self._decay_mask[part]
            g, scratch = first[: p.numel()], second[: p.numel()]
            torch.mul(grad[part], clip_factor, out=g)
            # m = beta1 m + (1 - beta1) g
            m.mul_(section.beta1).add_(torch.mul(g, 1.0 - section.beta1, out=scratch))
            # v = beta2 v + (1 - beta2) g g
            v.mul_(section.beta2).add_(torch.mul(g, g, out=scratch).mul_(1.0 - section.beta2))
            # p = (1 - rate decay) p - rate m^ / (sqrt(v^) + eps), with m^ and v^ corrected for their start at zero
            p.mul_(torch.mul(mask, -rate * section.weight_decay, out=scratch).add_(1.0))
            torch.sqrt(v, out=scratch).mul_(root_scale).add_(section.eps)
            p.add_(torch.mul(m, update_scale, out=g).div_(scratch))


def square_norm(tensor: Tensor) -> float:
    """The sum of squares of a tensor's values; infinite if one of them is not finite."""
    total = partial_square_norm(tensor.flatten())
    return total if math.isfinite(total) else math.inf


def mean_size(tensor: Tensor) -> float:
    """The root mean square of a tensor's values; infinite if one of them is not finite."""
    return math.sqrt(square_norm(tensor) / max(1, tensor.numel()))


def partial_square_norm(grad: Tensor) -> float:
    """The sum of squares of a slice of the gradient, in fp64, chunk by chunk in order; not finite iff the slice is not.

    fp32 values squared cannot overflow fp64, so one bad element always shows.
    """
    return math.fsum(squares_of(grad))


def squares_of(grad: Tensor) -> list[float]:
    """What `partial_square_norm` adds up, chunk by chunk: fsum comes to the same in any order."""
    return [float(part.double().square().sum()) for part in torch.split(grad, _CHUNK)]
