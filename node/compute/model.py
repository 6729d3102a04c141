"""A stage of the model, computed on a flat vector of weights: forward, backward, and loss where the stage ends it.

The model owns no weights. Each call makes autograd leaves that are views of the vector it is given, and a backward adds
to a gradient vector: nothing is copied, and any number of versions may be open at once. One thread gives bit-equal
results for equal calls.

If the run asks for it, weight gradients of a call are rounded to a grid (`wire.gradient_grid_bits`) before they are
added, so that even fp32 sums are exact: however tasks are dealt out, redone and grouped, the step's gradient is the
same to the last bit, which sums in fp64 give without rounding for twice the bytes. Otherwise orders of summation differ
by a rounding; AdamW divides by the size of the gradient, so where the gradient is almost zero that rounding decides the
sign of a whole update. (Pre-rounded sums: Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from node.compute.attention import Kind, attention_kind
from node.compute.blocks import attention_half, feed_forward_half, norm, rotary_table
from node.compute.layout import StageLayout
from node.compute.pulled import gradients_of
from node.compute.split_backward import OwedGradients, input_gradients


class _Span(NamedTuple):
    """A leaf: one weight, or several that lie side by side and are multiplied at once."""

    offset: int
    shape: tuple[int, ...]
    end: int


_Half = Callable[[Tensor, list[Tensor]], Tensor]
"""A layer half as a function of its input and its leaves."""


@dataclass
class StageContext:
    """A kept graph: what `StageModel.backward` needs. It is spent by one backward."""

    x: Tensor
    y: Tensor
    leaves: list[Tensor]


@dataclass
class OwedWeights:
    """What I has left of a backward: gradients of weights, computed (gains) or to be (matrices of layer halves)."""

    computed: list[tuple[_Span, Tensor]]
    spans: list[_Span]
    """Of the matrices."""
    matrices: OwedGradients | None
    """None: there is none."""


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What `[compute] dtype` names."""


class StageModel:
    """The arithmetic of one chunk of a stage: of the blocks `chunk` = (first, end), by default the layout's only chunk.

    Inputs `x` are int64 tokens [samples, context] for the chunk that holds block 0, else hidden states [samples,
    context, hidden]. `params` and `grad_flat` are vectors of `layout.parameter_count` values on one device. All floats
    are of the run's `dtype`, but `grad_flat` is fp32, and so are norms inside, rotary angles and the loss.

    With `keeps_inputs_only` a graph holds the input of each layer half and nothing else: the half is computed again
    when its gradient is wanted, by the same kernels, so no bit of the result changes (Chen et al., arXiv:1604.06174).
    """

    def __init__(self, layout: StageLayout, chunk: tuple[int, int] | None = None) -> None:
        self.layout = layout
        self.dtype = DTYPES[layout.config.compute.dtype]
        self.keeps_inputs_only = False
        if chunk is None:
            (chunk,) = layout.chunks
        self._blocks = range(*chunk)
        self._takes_tokens = 0 in self._blocks
        self._has_head = layout.config.block_count - 1 in self._blocks
        self._model = layout.config.model
        bits = layout.config.wire.gradient_grid_bits
        # An fp32 number of this size has its last bit at 2^-bits, and so has its sum with anything smaller.
        self._rounder = 1.5 * 2.0 ** (23 - bits) if bits else None
        self._rotary: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._halves: list[tuple[range, _Half]] = []
        self._spans: list[_Span] = []
        self._embedding: int | None = None
        self._head: tuple[int, int] | None = None
        self._place_leaves()

    def attention_on(self, device: torch.device) -> Kind:
        """The form of attention that is computed there."""
        return attention_kind(device, self.dtype, self._model.hidden // self._model.heads)

    def forward(self, params: Tensor, x: Tensor) -> tuple[Tensor, StageContext]:
        """Hidden states [samples, context, hidden] after the stage's blocks, and the graph for `backward`.

        For a stage without the head; the one with the head calls `loss`.
        """
        assert not self._has_head, "the chunk with the head computes the loss"
        x = self._input_leaf(x)
        leaves = self._leaves(params, requires_grad=True)
        y = self._run_blocks(x, leaves)
        return y.detach(), StageContext(x, y, leaves)

    def backward(self, context: StageContext, dy: Tensor, grad_flat: Tensor | None) -> Tensor | None:
        """Adds the weights' gradients into `grad_flat`; returns the input's, or None for tokens.

        Without `grad_flat` only the input's gradient is computed.
        """
        takes_gradient = context.x.requires_grad
        if grad_flat is None:
            return gradients_of([context.y], [dy], [context.x])[0] if takes_gradient else None
        assert grad_flat.shape == (self.layout.parameter_count,), f"gradient of shape {tuple(grad_flat.shape)}"
        wanted = [*context.leaves, context.x] if takes_gradient else context.leaves
        gradients = gradients_of([context.y], [dy], wanted)
        for gradient, span in zip(gradients, self._spans, strict=False):
            grad_flat[span.offset : span.end].view(span.shape).add_(self._on_grid(gradient))
        return gradients[-1] if takes_gradient else None

    def input_gradient(self, context: StageContext, dy: Tensor) -> tuple[Tensor, OwedWeights]:
        """I: the input's gradient, as `backward` gives it. What it leaves is for `weight_gradients`, once.

        A graph of inputs only has nothing to leave: its halves would have to be computed a third time.
        """
        assert not self.keeps_inputs_only, "a graph of inputs only goes backward at once"
        assert context.x.requires_grad, "tokens have no gradient"
        if context.y is context.x:  # no halves
            return dy, OwedWeights([], [], None)
        now = [places[0] for places, _ in self._halves]  # gains
        later = [place for places, _ in self._halves for place in places[1:]]
        wanted = [context.x, *(context.leaves[place] for place in now)]
        found, owed = input_gradients(context.y, dy, wanted, [context.leaves[place] for place in later])
        computed = [(self._spans[place], gradient) for place, gradient in zip(now, found[1:], strict=True)]
        return found[0], OwedWeights(computed, [self._spans[place] for place in later], owed)

    def weight_gradients(self, owed: OwedWeights, grad_flat: Tensor) -> None:
        """W: adds to `grad_flat` what `backward` would have, to the last bit."""
        matrices = [] if owed.matrices is None else owed.matrices.finish()
        for span, gradient in (*owed.computed, *zip(owed.spans, matrices, strict=True)):
            grad_flat[span.offset : span.end].view(span.shape).add_(self._on_grid(gradient))

    def loss_input_gradient(
        self, params: Tensor, x: Tensor, labels: Tensor, scale: float
    ) -> tuple[float, Tensor, OwedWeights]:
        """F, L and I of the stage that holds the head: as `loss`, but weights are left for `weight_gradients`.

        The head's own are computed here: to keep what they follow from would be samples x context x vocabulary values.
        """
        assert self._head is not None, "this stage does not hold the head"
        x = self._input_leaf(x)
        leaves = self._leaves(params, requires_grad=True)
        y = self._run_blocks(x, leaves)
        y_leaf = y.detach().requires_grad_()
        loss = self._loss_of(y_leaf, labels, leaves)
        head = [leaves[place] for place in self._head]
        dy, *gradients = gradients_of([loss], [torch.full_like(loss, scale)], [y_leaf, *head])
        dx, owed = self.input_gradient(StageContext(x, y, leaves), dy)
        owed.computed += [(self._spans[place], each) for place, each in zip(self._head, gradients, strict=True)]
        return loss.item(), dx, owed

    def loss(
        self, params: Tensor, x: Tensor, labels: Tensor, scale: float, grad_flat: Tensor | None
    ) -> tuple[float, int, Tensor | None]:
        """Forward, loss and backward of the stage that holds the head, at once.

        `labels` are int64 [samples, context]. Returns the cross-entropy summed over the labels in nats, their number,
        and the input's gradient (None for tokens). All gradients are those of `scale` times the sum; `scale` is one
        over the labels of the whole batch, so that sums over microbatches are gradients of the batch's mean.
        """
        x = self._input_leaf(x)
        leaves = self._leaves(params, requires_grad=True)
        loss = self._cross_entropy(x, labels, leaves)
        dx = self.backward(StageContext(x, loss, leaves), torch.full_like(loss, scale), grad_flat)
        return loss.item(), labels.numel(), dx

    def outputs(self, params: Tensor, x: Tensor) -> Tensor:
        """As `forward`, without a graph."""
        assert not self._has_head, "the chunk with the head computes the loss"
        with torch.no_grad():
            return self._run_blocks(self._plain_input(x), self._leaves(params, requires_grad=False))

    def evaluate(self, params: Tensor, x: Tensor, labels: Tensor) -> tuple[float, int]:
        """The loss sum in nats and the number of labels, without any gradient."""
        with torch.no_grad():
            loss = self._cross_entropy(self._plain_input(x), labels, self._leaves(params, requires_grad=False))
        return loss.item(), labels.numel()

    def logits(self, params: Tensor, x: Tensor) -> Tensor:
        """[samples, context, vocabulary] scores of the next token, without gradients."""
        with torch.no_grad():
            return self._logits(x, self._leaves(params, requires_grad=False))

    # ---- leaves ----

    def _place_leaves(self) -> None:
        """Decides which slices become one leaf, and which function takes which leaves."""
        for block in self._blocks:
            parts = self.layout.blocks[block]
            first = len(self._spans)
            if block == 0:
                self._embedding = self._add_span(block, 0, 1)
            elif block == self.layout.config.block_count - 1:
                gain = self._add_span(block, 0, 1)
                matrix = self._add_span(block, 1, 2) if len(parts) > 1 else self._embedding
                if matrix is None:  # tied to the embedding of another chunk: the layout keeps both on one stage
                    matrix = self._add_span(0, 0, 1)
                self._head = (gain, matrix)
            elif block % 2 == 1:
                for begin, end in ((0, 1), (1, 4), (4, 5)):  # gain; query, key, value; output
                    self._add_span(block, begin, end)
                self._halves.append((range(first, first + 3), self._attention))
            else:
                for begin, end in ((0, 1), (1, 3), (3, 4)):  # gain; gate, up; down
                    self._add_span(block, begin, end)
                self._halves.append((range(first, first + 3), self._feed_forward))

    def _add_span(self, block: int, begin: int, end: int) -> int:
        parts = self.layout.blocks[block][begin:end]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        self._spans.append(_Span(parts[0].offset, shape, parts[-1].end))
        return len(self._spans) - 1

    def _leaves(self, params: Tensor, requires_grad: bool) -> list[Tensor]:
        assert params.shape == (self.layout.parameter_count,), f"weights of shape {tuple(params.shape)}"
        return [
            params[span.offset : span.end].view(span.shape).detach().requires_grad_(requires_grad)
            for span in self._spans
        ]

    def _input_leaf(self, x: Tensor) -> Tensor:
        return x if self._takes_tokens else x.detach().to(self.dtype).requires_grad_(True)

    def _plain_input(self, x: Tensor) -> Tensor:
        return x if self._takes_tokens else x.to(self.dtype)

    # ---- arithmetic ----

    def _embedded(self, x: Tensor, leaves: list[Tensor]) -> Tensor:
        return x if self._embedding is None else functional.embedding(x, leaves[self._embedding])

    def _run_blocks(self, x: Tensor, leaves: list[Tensor]) -> Tensor:
        x = self._embedded(x, leaves)
        for places, half in self._halves:
            weights = [leaves[place] for place in places]
            if self.keeps_inputs_only and torch.is_grad_enabled():
                x = checkpoint(half, x, weights, use_reentrant=False, preserve_rng_state=False)
            else:
                x = half(x, weights)
        return x

    def _attention(self, x_BTD: Tensor, leaves: list[Tensor]) -> Tensor:
        gain, qkv, out = leaves
        return attention_half(x_BTD, gain, qkv, out, self._rotary_for(x_BTD), self._model)

    def _feed_forward(self, x_BTD: Tensor, leaves: list[Tensor]) -> Tensor:
        gain, gate_up, down = leaves
        return feed_forward_half(x_BTD, gain, gate_up, down, self._model)

    def _logits(self, x: Tensor, leaves: list[Tensor]) -> Tensor:
        return self._scores(self._run_blocks(x, leaves), leaves)

    def _scores(self, y: Tensor, leaves: list[Tensor]) -> Tensor:
        """[samples, tokens, vocabulary] of what the blocks before the head have made."""
        assert self._head is not None, "this stage does not hold the head"
        gain, matrix = self._head
        return functional.linear(norm(y, leaves[gain], self._model.norm_eps), leaves[matrix])

    def _cross_entropy(self, x: Tensor, labels: Tensor, leaves: list[Tensor]) -> Tensor:
        return self._loss_of(self._run_blocks(x, leaves), labels, leaves)

    def _loss_of(self, y: Tensor, labels: Tensor, leaves: list[Tensor]) -> Tensor:
        logits_BTV = self._scores(y, leaves)
        return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), labels.flatten(), reduction="sum")

    def _on_grid(self, gradient: Tensor) -> Tensor:
        """In fp32, to even where a value lies in the middle; what is beyond the rounder stays nearly as is."""
        return gradient if self._rounder is None else gradient.float().add_(self._rounder).sub_(self._rounder)

    def _rotary_for(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        key = (x_BTD.shape[1], x_BTD.device, x_BTD.dtype)
        if key not in self._rotary:
            cosine, sine = rotary_table(self._model, x_BTD.shape[1], x_BTD.device)
            self._rotary[key] = cosine.to(x_BTD.dtype), sine.to(x_BTD.dtype)
        return self._rotary[key]
