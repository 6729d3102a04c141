"""Gradients as torch's own, to the last bit."""

from __future__ import annotations

import pytest
import torch

from node.compute.pulled import gradients_of


def test_gradients_are_those_of_torch_to_the_last_bit() -> None:
    torch.manual_seed(3)
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    y = (x @ w).tanh()
    z = x.exp() * 0.3
    given = [torch.randn(5, 4), torch.randn(5, 7)]
    expected = torch.autograd.grad([y, z], [w, x], given, retain_graph=True)
    found = gradients_of([y, z], given, [w, x], keep=True)
    again = gradients_of([y, z], given, [w, x])
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert all(torch.equal(*pair) for pair in zip(expected, again, strict=True))


def test_a_gradient_of_another_shape_than_its_result_is_refused() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    for shape in ((5, 4), (2, 5, 7)):
        with pytest.raises(RuntimeError, match="shape"):
            gradients_of([x.tanh()], [torch.randn(shape)], [x])
