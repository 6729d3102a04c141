"""What a run takes of memory for each parameter."""

from __future__ import annotations

import msgspec
import pytest

from protocol.run.memory import (
    COPIES_HELD,
    device_parameter_bytes,
    own_computing_bytes,
    server_bytes,
    server_parameter_bytes,
)
from protocol.run.run import BatchSection, CheckpointSection, ComputeSection, RunConfig, StagesSection, WireSection


def test_a_device_holds_ten_to_twenty_bytes_a_parameter() -> None:
    """Less where values and sums are small."""
    found = [
        device_parameter_bytes(RunConfig(compute=ComputeSection(dtype=dtype), wire=WireSection(gradients=gradients)))  # type: ignore[arg-type]
        for dtype, gradients in (("bf16", "gi"), ("fp32", "gi"), ("fp32", "fp64"))
    ]
    assert found == [12, 20, 24]


@pytest.mark.parametrize(
    ("gradients", "parameters", "delay", "expected"),
    [("gi", "p12", 1, 37.5), ("gi", "p12", 0, 29.5), ("fp64", "fp32", 1, 45.0), ("fp64", "bf16", 0, 33.0)],
)
def test_a_server_holds_two_versions_and_two_steps_sums(
    gradients: str, parameters: str, delay: int, expected: float
) -> None:
    """Without a delayed update one sum, and no version before."""
    wire = WireSection(gradients=gradients, parameters=parameters)  # type: ignore[arg-type]
    config = RunConfig(wire=wire, batch=BatchSection(delay=delay))  # type: ignore[arg-type]
    assert server_parameter_bytes(config) == expected


def test_copies_of_another_shard_are_on_top_where_they_are_kept() -> None:
    """16 bytes a parameter each; a shard of 500 M parameters is too large for its buddy."""
    config = RunConfig(checkpoint=CheckpointSection(buddy="always"))
    never = msgspec.structs.replace(config, checkpoint=CheckpointSection(buddy="never"))
    assert server_bytes(config, 10**6) - server_bytes(never, 10**6) == COPIES_HELD * 16 * 10**6
    assert server_bytes(config, 5 * 10**8) == server_bytes(never, 5 * 10**8)


def test_a_server_that_may_compute_takes_what_a_device_does_of_the_whole_stage() -> None:
    """With bf16 12 bytes a parameter of a device, and 10 of the processor's memory; 8 of them were measured at rest."""
    config = RunConfig(compute=ComputeSection(dtype="bf16"))
    assert own_computing_bytes(config, 10**6) == 22 * 10**6
    never = msgspec.structs.replace(config, stages=StagesSection(collocated="never"))
    assert own_computing_bytes(never, 10**6) == 0
