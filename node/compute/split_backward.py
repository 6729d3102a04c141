"""A backward in two parts: I, the gradient of the input, which somebody waits for, and W, those of the matrices.

    y ◀─ add ◀─ mm ◀─ … ◀─ norm ◀─ x     I follows these edges back to x, and writes down what comes into each `mm`;
                └─ matrix                W goes on from there to the matrix, later, with what was written down

Both walk the graph that autograd made, so each number is the one that a whole backward computes, by the same kernel
from the same operands. Gains of norms are a by-product of I and a few numbers; W is matrices alone. Until W the graph
lives on, and beside it what was written down (`memory.stage_memory` counts both).

(Qi et al., "Zero Bubble Pipeline Parallelism", 2023; their B is our I.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from node.compute.pulled import gradients_of


class OwedGradients:
    """The gradients of matrices that I has left: `finish` computes them, once."""

    def __init__(self, matrices: Sequence[Tensor], nodes: Sequence[Node]) -> None:
        self._matrices = matrices
        self._nodes = nodes
        self._into: list[Tensor | None] = [None] * len(nodes)
        """The gradient that comes into each node."""

    def _note(self, place: int, gradients: tuple[Tensor, ...]) -> None:
        self._into[place] = gradients[0]

    @property
    def noted(self) -> list[Tensor]:
        """What was written down: it stays on the device beside the graph."""
        return [into for into in self._into if into is not None]

    def finish(self) -> list[Tensor]:
        """One for each matrix, in order."""
        found: list[Tensor] = []
        for matrix, node, into in zip(self._matrices, self._nodes, self._into, strict=True):
            assert into is not None, "I has passed every matrix"
            found += torch.autograd.grad(GradientEdge(node, 0), matrix, into)
        return found


def input_gradients(
    y: Tensor, dy: Tensor, wanted: Sequence[Tensor], matrices: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], OwedGradients]:
    """I: the gradients of `wanted`, and what is owed for `matrices`.

    Args:
        y: made from all of these; each of the matrices is multiplied once.
        dy: the gradient of y.
        wanted: leaves, the first of them the input.
    """
    owed = OwedGradients(matrices, _users(y, wanted[0], matrices))

    def noting(place: int) -> Any:
        return lambda gradients: owed._note(place, gradients)

    handles = [node.register_prehook(noting(place)) for place, node in enumerate(owed._nodes)]
    try:
        found = gradients_of([y], [dy], wanted, keep=True)
    finally:
        for handle in handles:
            handle.remove()
    return found, owed


def _users(y: Tensor, x: Tensor, matrices: Sequence[Tensor]) -> list[Node]:
    """For each matrix the node where it meets what comes from x: the last one on the way back to both."""
    assert y.grad_fn is not None, "y was computed from x"
    leads_to_x: dict[Node, bool] = {}
    found: dict[int, Node] = {}
    for node in _children_first(y.grad_fn):
        children = [child for child, _ in node.next_functions if child is not None]
        leads_to_x[node] = getattr(node, "variable", None) is x or any(leads_to_x[child] for child in children)
        for child in children if leads_to_x[node] else ():
            leaf = None if leads_to_x[child] else _leaf_behind(child)
            if leaf is not None:
                found[id(leaf)] = node
    return [found[id(matrix)] for matrix in matrices]


def _children_first(root: Node) -> Iterable[Node]:
    """Every node once, after all that its edges lead to."""
    done: dict[Node, None] = {}
    stack = [root]
    while stack:
        waiting = [child for child, _ in stack[-1].next_functions if child is not None and child not in done]
        if waiting:
            stack.append(waiting[0])
        else:
            done[stack.pop()] = None
    return done


def _leaf_behind(node: Node) -> Tensor | None:
    """The leaf at the end of a chain (a matrix is turned before it is multiplied)."""
    while node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf
