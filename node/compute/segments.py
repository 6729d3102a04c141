"""A stage's arithmetic on a sequence that is cut into segments of tokens (Seq1F1B: Sun et al., arXiv:2406.03488).

Segments go forward in order: attention sees the tokens before its segment by their keys and values, which stay here.
They go backward in reverse order: what a later segment wants changed in the keys and values that it saw is handed on to
the segments that made them. Each segment is a graph of its own, which ends with its backward, so the device holds no
more than it does for the whole sequence, and of a head only one segment's scores.

The whole sequence comes out the same up to rounding: kernels sum over other shapes, and each segment's part of a weight
gradient is a product of its own. The reference computes the same segments, so there every bit is equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from node.compute.blocks import attention_segment, rotary_table
from node.compute.model import StageContext, StageModel
from node.compute.pulled import gradients_of
from protocol.base.ids import TaskId

KeysAndValues = tuple[Tensor, Tensor]
"""[samples, key/value heads, tokens, head width] each."""


@dataclass
class SegmentContext(StageContext):
    """A segment's graph."""

    past: list[KeysAndValues]
    """Leaves: keys and values of the tokens before, by attention half; empty for the first segment."""
    seen: list[KeysAndValues]
    """Those up to the segment's own end, as this graph has made them."""


@dataclass
class Visit:
    """One sequence in one chunk: the graphs of the segments that have gone forward and not yet back."""

    segments: list[SegmentContext] = field(default_factory=list)
    token_count: int = 0
    """Of all that have gone forward."""
    later: list[Tensor] = field(default_factory=list)
    """What the segments that have gone back want changed in keys and values of those that have not: gradients in the
    order of `SegmentContext.seen`."""


class SegmentModel(StageModel):
    """`StageModel` whose calls may be about a segment. The chunk with the head goes forward without its loss."""

    def forward_segment(self, params: Tensor, x: Tensor, visit: Visit) -> Tensor:
        """Hidden states [samples, tokens, hidden] after the chunk's blocks, of the segment that comes next; its graph
        is added to the visit. `x` is as for `StageModel.forward`, of the segment's tokens only."""
        assert not visit.later, "no segment goes forward once one has gone back"
        x = self._input_leaf(x)
        leaves = self._leaves(params, requires_grad=True)
        before = visit.segments[-1].seen if visit.segments else []
        past = [(_leaf(key), _leaf(value)) for key, value in before]
        y, seen = self._run_segment(x, leaves, visit.token_count, past)
        visit.segments.append(SegmentContext(x, y, leaves, past, seen))
        visit.token_count += x.shape[1]
        return y.detach()

    def backward_segment(self, visit: Visit, dy: Tensor, grad_flat: Tensor) -> Tensor | None:
        """Of the last segment that has not gone back: adds the weights' gradients into `grad_flat` and returns the
        input's, None for tokens. The segment's graph ends with it."""
        context = visit.segments.pop()
        return self._segment_back(visit, context, context.y, dy, grad_flat)

    def loss_segment(
        self, visit: Visit, labels: Tensor, scale: float, grad_flat: Tensor
    ) -> tuple[float, int, Tensor | None]:
        """Loss and backward of the last segment that has not gone back, where the chunk has the head.

        `labels` [samples, tokens] are the segment's; the rest is as for `StageModel.loss`.
        """
        context = visit.segments.pop()
        loss = self._loss_of(context.y, labels, context.leaves)
        dx = self._segment_back(visit, context, loss, torch.full_like(loss, scale), grad_flat)
        return loss.item(), labels.numel(), dx

    def _segment_back(
        self, visit: Visit, context: SegmentContext, result: Tensor, gradient: Tensor, grad_flat: Tensor
    ) -> Tensor | None:
        takes_gradient = context.x.requires_grad
        past = [each for pair in context.past for each in pair]
        results, changes = [result], [gradient]
        if visit.later:
            results += [each for pair in context.seen for each in pair]
            changes += visit.later
        wanted = [*context.leaves, *past, *([context.x] if takes_gradient else [])]
        gradients = gradients_of(results, changes, wanted)
        for found, span in zip(gradients, self._spans, strict=False):
            grad_flat[span.offset : span.end].view(span.shape).add_(self._on_grid(found))
        visit.later = list(gradients[len(context.leaves) : len(context.leaves) + len(past)])
        return gradients[-1] if takes_gradient else None

    def _run_segment(
        self, x: Tensor, leaves: list[Tensor], begin: int, past: list[KeysAndValues]
    ) -> tuple[Tensor, list[KeysAndValues]]:
        seen: list[KeysAndValues] = []
        x = self._embedded(x, leaves)
        for places, half in self._halves:
            weights = [leaves[place] for place in places]
            if half == self._attention:
                x, key, value = self._attend(x, weights, begin, past[len(seen)] if past else None)
                seen.append((key, value))
            elif self.keeps_inputs_only:
                x = checkpoint(half, x, weights, use_reentrant=False, preserve_rng_state=False)
            else:
                x = half(x, weights)
        return x, seen

    def _attend(
        self, x: Tensor, weights: list[Tensor], begin: int, past: KeysAndValues | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        gain, qkv, out = weights
        rotary = self._rotary_from(x, begin)
        if not self.keeps_inputs_only:
            return attention_segment(x, gain, qkv, out, rotary, self._model, past)
        found: tuple[Tensor, Tensor, Tensor] = checkpoint(
            attention_segment, x, gain, qkv, out, rotary, self._model, past,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        return found

    def _rotary_from(self, x_BTD: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """The angles of the places that the segment's tokens have in their sequence."""
        context = self._model.context
        key = (context, x_BTD.device, x_BTD.dtype)
        if key not in self._rotary:
            cosine, sine = rotary_table(self._model, context, x_BTD.device)
            self._rotary[key] = cosine.to(x_BTD.dtype), sine.to(x_BTD.dtype)
        cosine, sine = self._rotary[key]
        return cosine[begin : begin + x_BTD.shape[1]], sine[begin : begin + x_BTD.shape[1]]


def _leaf(tensor: Tensor) -> Tensor:
    """The same memory, at which a later segment's graph begins."""
    return tensor.detach().requires_grad_(True)


def graph_of(task: TaskId) -> TaskId:
    """By what the graphs of a sample's segments are kept together."""
    return msgspec.structs.replace(task, op="F", segment=0)
