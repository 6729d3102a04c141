"""The bounds of a node's links, from what the run sends over them."""

from __future__ import annotations

from protocol.base.limits import TENSOR_BYTES_MAX, WINDOW_BYTES
from protocol.drive.transport import LinkOptions
from protocol.run.run import RunConfig

VOCABULARY_GUESS = 262_144
"""Rows of the largest published vocabularies, for the bound on tensors before the run's own is known."""


def link_options(config: RunConfig) -> LinkOptions:
    """Bounds of links from the run's sizes: the largest tensor is a stage's vector or a microbatch of hidden states."""
    model = config.model
    hidden = config.batch.samples * model.context * model.hidden * 4
    layer = model.hidden * (2 * model.hidden + 2 * model.hidden + 3 * model.feed_forward + 2)
    # Gradients travel in fp64. The tokenizer's size is not known yet, so a large one is assumed.
    vectors = 8 * (model.layers * layer + 2 * model.hidden * VOCABULARY_GUESS)
    largest = max(TENSOR_BYTES_MAX, hidden, vectors)
    return LinkOptions(tensor_bytes_max=largest, window_bytes=max(WINDOW_BYTES, 2 * largest))
