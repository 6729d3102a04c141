"""Gradients of results whose own gradients are given, without what torch loads for the check of their shapes.

`torch.autograd.grad(results, wanted, gradients)` loads `torch.fx.experimental.symbolic_shapes` in a process's first
backward, and with it sympy: five hundred modules and 0.4 to 0.6 s of a processor that does nothing else, in which a
volunteer that has started again does no work. The check is for shapes that are symbols; there are none here. A scalar
that pulls at the results with the given gradients needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Pull(torch.autograd.Function):
    """A scalar, whatever the results are; the gradient of each result is the one that was given for it."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[count:])
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> Any:
        given = ctx.saved_tensors
        return None, *given, *(None for _ in given)


def gradients_of(
    results: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[Tensor], *, keep: bool = False
) -> tuple[Tensor, ...]:
    """As `torch.autograd.grad(results, wanted, gradients)`, to the last bit.

    Args:
        results: made from all of `wanted`.
        gradients: one for each result, of its shape.
        keep: the graph, for another pass.

    Raises:
        RuntimeError: a gradient has not the shape of its result. (Torch would sum one that is larger.)
    """
    for result, gradient in zip(results, gradients, strict=True):
        if result.shape != gradient.shape:
            raise RuntimeError(f"a gradient of shape {tuple(gradient.shape)} for a result of {tuple(result.shape)}")
    pulled = _Pull.apply(len(results), *results, *gradients)  # type: ignore[no-untyped-call]
    found: tuple[Tensor, ...] = torch.autograd.grad(pulled, wanted, retain_graph=keep)
    return found
