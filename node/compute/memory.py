"""What a stage takes of a device's memory: counted from the model's shapes, and checked against measurement by tests.

D hidden width, H query heads, K key/value heads times head width, F feed-forward width, V vocabulary; b bytes of the
run's dtype. Per token, autograd keeps for the backward of

    attention half:      x, normed x, query turned, output of attention                                       4 D b
                         query, key and value before they are turned (value is part of it)                 (D + 2 K) b
                         key turned                                                                            K b
                         the norm's root mean square, and attention's logarithms                          4 + 4 H bytes
    of it, where keys and values are repeated for each query head (`node.compute.attention`), instead of the middle two:
                         these copies                                                                         2 D b
    and where attention is in fp32 beside bf16, instead of all but x and normed x:
                         query, copies of key and value, output; output in bf16                 4 D 4 bytes + D b

    feed-forward half:   x, normed x                                                                          2 D b
                         gate and up, silu of the gate, their product                                         4 F b
                         the norm's root mean square                                                         4 bytes

With `compute.split_backward` a graph lives on until W, and beside it what comes into the two products of each half:

    attention half:      gradients of query, key and value; of the half's output                           (2 D + 2 K) b
    feed-forward half:   gradients of gate and up; of the half's output                                     (2 F + D) b

and of the head's matrix the whole gradient, for as many route ends as may be owed (`OWED_ENDS_MAX`).

And for the loss, which is never kept, x, normed x and three times the scores in fp32 (their logarithms of shares, the
gradient of these, and theirs); it is over before the halves' own backward begins. Where the norm is no kernel of its
own (on the processor) it keeps its value before the gain too, in fp32, and with bf16 the input as fp32.

A sample in segments takes more, per attention half: each segment keeps keys and values of all tokens up to its end (and
their copies, where there are any), and going back each holds what later ones want changed in them. And its weight
gradients stand apart until it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.compute.layout import StageLayout
from node.machine.jobs import OWED_ENDS_MAX
from protocol.run.memory import SUM_BYTES, host_parameter_bytes
from protocol.run.run import ModelSection
from protocol.run.segments import SEGMENT_RUNS_MAX, segment_ranges

if TYPE_CHECKING:  # sizes are asked for where nobody computes, and torch takes seconds to load
    from node.compute.attention import Kind

VERSIONS = 2
"""Versions of the parameters on the device at once: the one that works, and the next one while it arrives."""


WIDE_BYTES = 4
"""Of a value of attention in fp32."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a device, for one microbatch where it depends on that."""

    parameter_bytes: int
    """One version."""
    sum_bytes: int
    """The sum of weight gradients, the vector that a task's are put together in, and what is owed of the head."""
    gradient_bytes: int
    """Gradients of all weights, as autograd hands them over at the end of a backward."""
    graph_bytes: int
    """A kept graph: inputs of layer halves, and what lies inside them."""
    light_graph_bytes: int
    """A graph that keeps inputs of halves only."""
    half_bytes: int
    """The largest half, twice: what a forward or backward has at once beyond the graph."""
    boundary_bytes: int
    """Input, output and their gradients."""
    loss_bytes: int
    """What the head's half takes while a microbatch is at the route's end; 0 without a head."""
    head_gradient_bytes: int
    """Of the head's matrix, which comes while the graph is still whole; 0 without a head."""
    host_bytes: int
    """What lies in the processor's memory beside the device's: in `p12` the whole numbers of both versions, and what a
    version or a sum takes for a moment while it is unpacked, or packed. On a device that is the processor itself, on
    top of the rest."""
    runs: int = 0
    """Graphs beside those that are kept: those of samples in segments that pass through."""
    makes_room: bool = True
    """A backward's graph goes, half by half, while the gradients come: the larger of both counts. Where the weights'
    gradients are computed apart, or a graph is a segment's, one that nobody has kept is among the kept or `runs`."""

    def fixed_bytes(self, light: bool = False) -> int:
        """What lies there whatever the number of kept graphs (`light`: that hold inputs only), when most does: with a
        task's own graph, which nobody has kept where it is computed again, or ends in a loss."""
        return VERSIONS * self.parameter_bytes + self.sum_bytes + self.working_bytes(light)

    def working_bytes(self, light: bool = False) -> int:
        """Of that what a task takes for itself, beside weights and sums."""
        graph = 0
        if self.makes_room:
            graph = self.light_graph_bytes if light else self.graph_bytes
        going = max(graph + self.head_gradient_bytes, self.gradient_bytes)
        # The scores are gone before the halves' gradients come.
        return self.boundary_bytes + max(going + self.half_bytes, graph + self.loss_bytes)

    def graphs(self, usable_bytes: int, light: bool = False) -> int:
        """How many kept graphs fit beside everything else; below 0 when not even that fits."""
        each = self.light_graph_bytes if light else self.graph_bytes
        left = usable_bytes - self.fixed_bytes(light) - self.runs * each
        if left < 0:
            return -1
        return left // max(1, each)

    def best_graphs(self, usable_bytes: int, wanted: int) -> tuple[int, bool]:
        """How many graphs fit, and whether they hold inputs only: where there is no room for `wanted` whole ones."""
        found = self.graphs(usable_bytes)
        return (found, False) if found >= wanted else (self.graphs(usable_bytes, light=True), True)


def stage_memory(layout: StageLayout, fused_norm: bool = False, attention_kind: Kind = "grouped") -> StageMemory:
    """What a stage of `layout` takes, for the run's microbatches, where the norm is a kernel of its own or not, and
    attention has the form that the device has a kernel for."""
    config, model = layout.config, layout.config.model
    value_bytes = 2 if config.compute.dtype == "bf16" else 4
    tokens = config.batch.samples * model.context
    hidden, wide = model.hidden, model.feed_forward
    kv_width = hidden // model.heads * model.kv_heads
    # A norm keeps its input, but where it is made of parts and the input is bf16: then a copy in fp32 instead.
    copies = not fused_norm and value_bytes == 2
    norm = 4 + (8 * hidden if copies else value_bytes * hidden + (0 if fused_norm else 4 * hidden))
    attention = tokens * (_attention_bytes(model, value_bytes, attention_kind) + norm + 4 * model.heads)
    feed_forward = tokens * (value_bytes * (hidden + 4 * wide) + norm)
    owed_attention = owed_feed_forward = owed_head = 0
    if config.compute.split_backward:
        owed_attention = tokens * value_bytes * (2 * hidden + 2 * kv_width)
        owed_feed_forward = tokens * value_bytes * (2 * wide + hidden)
        owed_head = OWED_ENDS_MAX * layout.vocabulary * hidden * value_bytes if layout.has_head else 0
    # Of a stage with several chunks, the graph of its largest.
    halves = max((range(max(a, 1), min(b, config.block_count - 1)) for a, b in layout.chunks), key=len)
    graph = sum(attention + owed_attention if block % 2 else feed_forward + owed_feed_forward for block in halves)
    boundary = tokens * hidden * value_bytes
    apart = copies_seen = 0
    if config.batch.segments > 1:
        ranges = segment_ranges(config)
        seen = config.batch.samples * sum(end for _, end in ranges)
        attentions = sum(block % 2 for block in halves)
        apart = attentions * 2 * kv_width * value_bytes * (seen + tokens) + layout.parameter_count * 4
        # Of copies those of its own tokens are counted with a half. The values of the first segment are a part of one
        # tensor with queries and keys: it stays whole for who comes after.
        copied_bytes = _copied_bytes(model, value_bytes, attention_kind)
        first = config.batch.samples * ranges[0][1] * (hidden + kv_width) * value_bytes if copied_bytes else 0
        copies_seen = attentions * (copied_bytes * (seen - tokens) + first)
    ends = 2 if copies and not layout.has_embedding else 1  # the output, and the input where no norm keeps it
    # Then the gradients of the scores and of the head's matrix.
    loss = tokens * (layout.vocabulary * 3 * 4 + 2 * hidden * value_bytes)
    loss = max(loss, layout.vocabulary * (tokens + hidden) * value_bytes)
    count = layout.parameter_count
    sum_bytes = count * (value_bytes + SUM_BYTES.get(config.wire.gradients, 8))
    return StageMemory(
        parameter_bytes=count * value_bytes,
        sum_bytes=sum_bytes + owed_head,
        gradient_bytes=count * value_bytes,
        graph_bytes=graph + apart + copies_seen + ends * boundary + (tokens * 8 if layout.has_embedding else 0),
        light_graph_bytes=boundary * (len(halves) + 1) + apart + (tokens * 8 if layout.has_embedding else 0),
        half_bytes=2 * max(attention, feed_forward) if len(halves) else 0,
        boundary_bytes=4 * boundary,
        loss_bytes=loss if layout.has_head else 0,
        head_gradient_bytes=layout.vocabulary * hidden * value_bytes if layout.has_head else 0,
        host_bytes=int(host_parameter_bytes(config) * count),
        runs=SEGMENT_RUNS_MAX if config.batch.segments > 1 else 0,
        makes_room=not config.compute.split_backward and config.batch.segments == 1,
    )


def _copied_bytes(model: ModelSection, value_bytes: int, kind: Kind) -> int:
    """Of a token, the copies of its key and value that attention takes in their place."""
    if kind == "wide":
        return 2 * model.hidden * WIDE_BYTES
    return 2 * model.hidden * value_bytes if kind == "repeated" and model.kv_heads < model.heads else 0


def _attention_bytes(model: ModelSection, value_bytes: int, kind: Kind) -> int:
    """Of a token, what an attention half keeps beside what its norm does and attention's logarithms."""
    copied = _copied_bytes(model, value_bytes, kind)
    if kind == "wide":
        return 2 * model.hidden * value_bytes + 2 * model.hidden * WIDE_BYTES + copied
    kv_width = model.hidden // model.heads * model.kv_heads
    return 3 * model.hidden * value_bytes + (copied or (model.hidden + 3 * kv_width) * value_bytes)
