"""What links may bring: how much of this machine's memory all of them together, and each by the sizes of the run.

| bound | of whom | arithmetic |
| --- | --- | --- |
| `incoming_bytes` | the process | half of what is free at the start, less what the tensor store holds at the moment |
| `window_bytes` | each link | two of the largest tensors: a contribution's part and an activation under way at once |
| `tensor_bytes_max` | each tensor | a microbatch's hidden states, or a server's part of a stage's vector |
| `elements_max` | each tensor | its values, the same two: packed integers that are zero take next to no bytes |
| `send_queue_bytes` | each link | QUEUED_LARGEST of the largest tensors, waiting to leave |

At 8 B in 16 stages of two servers a part has 0.25 G values: 1.0 GB at most in the packed forms, 0.16 GB as they are
late in training. Before, a link could hold the whole model in fp64 twice: 128 GB.
"""

from __future__ import annotations

import math

from protocol.base.forms import GRID_BLOCK, byte_bounds
from protocol.base.limits import ELEMENTS_MAX, SEND_QUEUE_BYTES, TENSOR_BYTES_MAX, WINDOW_BYTES
from protocol.drive.transport import LinkOptions
from protocol.run.model_spec import ModelSpec, blocks_of
from protocol.run.plan import Plan
from protocol.run.run import RunConfig

VOCABULARY_GUESS = 262_144
"""Rows of the largest published vocabularies, for the bound on tensors before the run's own is known."""
MEMORY_SHARE = 0.5
"""Of what is free when the process starts. A stage's weights and moments, and the device's, need the rest; a run that
does not fit was refused (`node.machine.welcome`)."""

QUEUED_LARGEST = 4
"""Of the largest tensors one peer may have waiting: two whole versions of a part (who joins while a step ends is sent
both), an activation, and one for all that is smaller. They lie in the store once, whoever they wait for. A part of 1 G
values (8 B in 8 stages of one server) takes 1.17 GiB in packed form, so that two were beyond any fixed gibibyte."""


def incoming_bytes(available_bytes: int) -> int:
    """What tensors may take that come from others, or lie in the store, on a machine with so much free."""
    return int(available_bytes * MEMORY_SHARE)


def link_options(config: RunConfig, vocabulary: int = 0, plan: Plan | None = None) -> LinkOptions:
    """Bounds of links from the run's sizes.

    Args:
        vocabulary: 0: not known yet.
        plan: None: not known yet; then a whole model might come in one piece.
    """
    wire, batch, model = config.wire, config.batch, config.model
    hidden = (batch.samples, model.context, model.hidden)
    values = _largest_part(config, vocabulary or VOCABULARY_GUESS, plan)
    forms: list[tuple[tuple[int, ...], str]] = [(hidden, wire.activations_up), (hidden, wire.activations_down)]
    forms += [((values,), wire.gradients), ((values,), wire.parameters)]
    largest = max(TENSOR_BYTES_MAX, *(byte_bounds(shape, form)[1] for shape, form in forms))
    return LinkOptions(
        tensor_bytes_max=largest,
        window_bytes=max(WINDOW_BYTES, 2 * largest),
        elements_max=max(ELEMENTS_MAX, *(math.prod(shape) for shape, _ in forms)),
        send_queue_bytes=max(SEND_QUEUE_BYTES, QUEUED_LARGEST * largest),
    )


def _largest_part(config: RunConfig, vocabulary: int, plan: Plan | None) -> int:
    """Values of the largest part of a stage's vector that a server has."""
    sizes = [block.parameters for block in blocks_of(ModelSpec.of_run(config.model, vocabulary))]
    if plan is None:
        return sum(sizes)
    parts = []
    for number, stage in enumerate(plan.stages):
        chunks = [plan.course.chunks[chunk] for chunk in plan.course.chunks_of(number)]
        stage_values = sum(sum(sizes[chunk.first_block : chunk.end_block]) for chunk in chunks)
        parts.append(-(-stage_values // max(1, len(stage.servers))) + 2 * GRID_BLOCK)  # cut where a grid block ends
    return max(parts)
