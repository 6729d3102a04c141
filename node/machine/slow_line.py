"""What a transfer takes on the slowest line that the project is for, by the run's own sizes and forms.

Clocks that were learned from others never go below this: those who answer first are the nearest, servers have no line
at all, and a lease that is taken from somebody who is still sending costs its transfer once more.
"""

from __future__ import annotations

from protocol.base.forms import TYPICAL_BITS
from protocol.run.model_spec import ModelSpec, blocks_of
from protocol.run.plan import Plan
from protocol.run.run import RunConfig

SLOWEST_LINE_BYTES_PER_S = 1.25e6
"""10 Mbit/s, half of the line that the project is for: a lease waits behind others of its worker, up and down. At 8 B
(4,096 wide, 4,096 tokens, fp32) one activation has 67 MB and takes 54 s on it; eight of them 430 s beside the 60 s of
`lease_s`. At the demo's size this adds less than a second."""

UPLOAD_TIMES = 2.0
"""A contribution shares its line. At 8 B in 16 stages (0.5 G parameters each, 5 bits) it has 312 MB, which take 250 s
on the slowest line; at 1.1 B in 8 stages 86 MB and 69 s, where `lease_s` alone has 60."""


def transfer_s(config: RunConfig, activations: int, bits: float = 0.0) -> float:
    """Seconds for so many activations of one microbatch. `bits` a value; 0: of the run's own forms, with which one of
    1.1 B parameters (2,048 x 2,048) takes 3.4 s, of 8 B 13.6 s, of the demo 10 ms."""
    batch, model, wire = config.batch, config.model, config.wire
    bits = bits or max(TYPICAL_BITS[wire.activations_up], TYPICAL_BITS[wire.activations_down])
    return activations * batch.samples * model.context * model.hidden * bits / 8 / SLOWEST_LINE_BYTES_PER_S


def upload_s(config: RunConfig, stage_values: int) -> float:
    """Seconds for a contribution beside the next step's activations, of a stage with so many parameters."""
    return UPLOAD_TIMES * stage_values * TYPICAL_BITS[config.wire.gradients] / 8 / SLOWEST_LINE_BYTES_PER_S


def stage_values(config: RunConfig, vocabulary: int, plan: Plan, stage: int) -> int:
    """Parameters of a stage."""
    sizes = [block.parameters for block in blocks_of(ModelSpec.of_run(config.model, vocabulary))]
    chunks = [plan.course.chunks[number] for number in plan.course.chunks_of(stage)]
    return sum(sum(sizes[chunk.first_block : chunk.end_block]) for chunk in chunks)
