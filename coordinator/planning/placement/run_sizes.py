"""A run's model, batch and wire forms as its members feel them: what a planner costs plans with."""

from __future__ import annotations

from coordinator.planning.placement.pools import PoolSizes
from protocol.base.forms import TYPICAL_BITS
from protocol.run.memory import device_parameter_bytes, server_parameter_bytes
from protocol.run.model_spec import ModelSpec, blocks_of
from protocol.run.run import RunConfig

VOCABULARY_DEFAULT = 32_000


def vocabulary_of(tokenizer: str) -> int:
    """The vocabulary as far as the config tells it; a tokenizer file counts as `VOCABULARY_DEFAULT`."""
    if tokenizer == "bytes":
        return 259
    if tokenizer.startswith("bpe:") and tokenizer[4:].isdigit():
        return max(1, int(tokenizer[4:]))
    return VOCABULARY_DEFAULT


def wire_bytes(config: RunConfig) -> tuple[float, float, float, float]:
    """Bytes a value takes on the wire: activations up, activations down, weight gradients, parameters."""
    wire = config.wire
    forms = (wire.activations_up, wire.activations_down, wire.gradients, wire.parameters)
    return tuple(TYPICAL_BITS[form] / 8 for form in forms)  # type: ignore[return-value]


def passed_bytes(config: RunConfig) -> float:
    """Bytes a value takes between two stages, for planners that have one number for all of them and both ways: the
    larger, in which with `d4` everything comes down, and what begins a route, or comes back from its end, goes up."""
    return max(wire_bytes(config)[:2])


def pool_sizes(config: RunConfig, recompute: bool = False) -> PoolSizes:
    """A run's model, batch and wire forms as its members feel them; bytes are those on the wire."""
    spec = ModelSpec.of_run(config.model, vocabulary_of(config.data.tokenizer))
    tokens = config.batch.samples * config.model.context
    up_bytes, down_bytes, gradient_bytes, parameter_bytes = wire_bytes(config)
    return PoolSizes(
        blocks=tuple(blocks_of(spec)),
        microbatch_tokens=tokens,
        microbatches=config.batch.microbatches,
        activation_up_bytes=up_bytes * spec.boundary_values * tokens,
        activation_down_bytes=down_bytes * spec.boundary_values * tokens,
        activation_end_bytes=down_bytes * spec.boundary_values * tokens if config.wire.activations_up == "d4" else 0.0,
        gradient_bytes=gradient_bytes,
        parameter_bytes=parameter_bytes,
        contribution_tasks=config.limits.contribution_tasks,
        held_bytes=device_parameter_bytes(config),
        server_held_bytes=server_parameter_bytes(config),
        boundary_values=spec.boundary_values,
        recompute=recompute,
        delayed=config.batch.delay == 1,
        collocated=config.stages.collocated,
    )
