"""What a run takes of memory for each parameter, of a stage's servers and of the devices that work for it.

For plans, refusals, and what owners and operators are told. What else a device holds is counted from the model's shapes
(`node.compute.memory`); what else a server holds, activations and gradients on their way, is bounded by what is free.
Measured beside this: `python -m tests.benchmarks.real_stage`.
"""

from __future__ import annotations

from protocol.run.buddies import copy_bytes, keeps_copies
from protocol.run.run import RunConfig

SUM_BYTES = {"gi": 4}
"""A parameter's part of a sum of weight gradients, by the form that it travels in: int32 on the grid, else fp64."""
VERSION_BYTES = 12
"""fp32 weights and AdamW's two moments."""
SERVED_BYTES = {"p12": 4.5, "bf16": 4.0, "fp32": 0.0}
"""While parameters are put into their form: in `p12` the whole numbers of what changed (4), and these packed (0.5, as
measured); in fp32 they go as they lie there."""
COPIES_HELD = 3
"""Copies of another server's shard, if copies are kept: of a closed version, of the next, and of the one that comes."""


def device_parameter_bytes(config: RunConfig) -> int:
    """Two versions of the weights, a task's gradients, the vector that they are put together in, and their sum."""
    value_bytes = 2 if config.compute.dtype == "bf16" else 4
    return 4 * value_bytes + SUM_BYTES.get(config.wire.gradients, 8)


def host_parameter_bytes(config: RunConfig) -> float:
    """In the processor's memory, beside the device: with `p12` the whole numbers of two versions (8), to which changes
    are added; and what a version or a sum is packed in while it comes or goes (2)."""
    return 10.0 if config.wire.parameters == "p12" else 2.0


def server_parameter_bytes(config: RunConfig) -> float:
    """For each parameter of its shard, at the moment when most is there: a version with its moments and the next one,
    with a delayed update the weights before them and the next step's sum, the sum that is applied or the parameters
    that are put into their form, and where weight decay acts (1)."""
    sum_bytes = SUM_BYTES.get(config.wire.gradients, 8)
    delayed = 4 + sum_bytes if config.batch.delay else 0
    return 2 * VERSION_BYTES + 1 + delayed + max(sum_bytes, SERVED_BYTES[config.wire.parameters])


def own_computing_bytes(config: RunConfig, parameters: int) -> int:
    """What a server that computes while no volunteer does takes for it, beside its shard: of its whole stage, with so
    many parameters, where its device is the processor. 0 where servers never do.

    A third of it stays between tasks.
    """
    if config.stages.collocated == "never":
        return 0
    return int((device_parameter_bytes(config) + host_parameter_bytes(config)) * parameters)


def server_bytes(config: RunConfig, elements: int) -> int:
    """Of a server with a shard of so many parameters, with the copies that it holds of another as large one."""
    copies = COPIES_HELD * copy_bytes(config, elements) if keeps_copies(config, elements) else 0
    return int(server_parameter_bytes(config) * elements) + copies
