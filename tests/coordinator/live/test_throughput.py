"""What a stage needs of its volunteers' lines, beside the tensors that its tasks make."""

from __future__ import annotations

import pytest

from coordinator.live.throughput import PROMISED_MAX, Needs, left_out_s, needs_of, with_left_out
from coordinator.planning.placement.run_sizes import pool_sizes
from protocol.base.forms import byte_bounds
from protocol.run.course import course_of
from protocol.run.run import (
    BatchSection,
    BoundaryForm,
    ModelSection,
    RoutesSection,
    RunConfig,
    StagesSection,
    WireSection,
)


def run_of(up: BoundaryForm, count: int, swaps: int = 0) -> RunConfig:
    config = RunConfig(
        model=ModelSection(layers=8, hidden=256, heads=4, kv_heads=2, feed_forward=512, context=128),
        batch=BatchSection(microbatches=12),
        stages=StagesSection(count=count, back_servers=0),
        routes=RoutesSection(swaps=swaps),
        wire=WireSection(activations_up=up),
    )
    config.validate()
    return config


@pytest.mark.parametrize("up", ["q8", "d4"])
@pytest.mark.parametrize(("count", "swaps"), [(1, 0), (2, 0), (4, 0), (5, 1)])
def test_a_stage_sends_up_what_its_visits_make(up: BoundaryForm, count: int, swaps: int) -> None:
    """Where a route begins or ends one tensor a microbatch, whole; elsewhere two. Who thought that the ends of a line
    send four bits, too, gave them half of the volunteers that they need."""
    config = run_of(up, count, swaps)
    course = course_of(config)
    shape = (config.batch.samples, config.model.context, config.model.hidden)
    for stage, need in enumerate(needs_of(config, course, 259)):
        expected = 0
        for microbatch in range(12):
            stages = course.stages_of(course.route(0, microbatch))
            for place in (place for place, owner in enumerate(stages) if owner == stage):
                if place > 0:
                    form = config.wire.input_gradient_form(place == len(stages) - 1)
                    expected += byte_bounds(shape, form)[0]
                if place < len(stages) - 1:
                    expected += byte_bounds(shape, config.wire.output_form(place == 0))[0]
        assert need.visits * need.up_bytes == pytest.approx(expected, rel=3e-3)


def test_planners_count_the_ends_of_a_line_whole() -> None:
    """As much as two differences, nearly; without differences as everything else."""
    sizes = pool_sizes(run_of("d4", 4))
    middle, first, last = sizes.up_bytes(True, True), sizes.up_bytes(False, True), sizes.up_bytes(True, False)
    assert sum(middle) == pytest.approx(sum(first), rel=0.02) and sum(first) == sum(last)
    assert sizes.up_bytes(False, False) == (0, 0)
    plain = pool_sizes(run_of("q8", 4))
    assert plain.up_bytes(True, False) == (plain.activation_up_bytes, 0)


def needs(visits: float) -> Needs:
    return Needs(visits, flops=1.0, up_bytes=0.0, down_bytes=0.0, contribution_bytes=0.0, version_bytes=0.0)


def test_promises_that_are_near_what_is_seen_leave_nothing_out() -> None:
    """Nor where nothing is seen yet, or nobody promises anything; a stage that nobody visits does not count."""
    two = [needs(4.0), needs(4.0)]
    assert left_out_s([[1.0, 1.0], [3.0, 4.0]], two, 1.0) == 0.0
    assert left_out_s([[1.0, 1.1], [3.0, 4.0]], two, 1.0) > 0.0
    assert left_out_s([[9.0], [9.0]], two, 0.0) == left_out_s([[], []], two, 1.0) == 0.0
    assert left_out_s([[9.0, 9.0], []], [needs(4.0), needs(0.0)], 10.0) == 0.0


def test_what_promises_leave_out_brings_the_slowest_stage_to_what_is_seen() -> None:
    """Lines measured within one computer, fourfold apart: what is left is a few percent, as it is in what members do.
    Where one is really ten times as slow, and slow enough to be seen, it is still the slower one."""
    crews, stages = [[400.0, 100.0], [900.0, 1600.0, 800.0]], [needs(4.0), needs(4.0)]
    beyond_s = left_out_s(crews, stages, 2.0)
    carried = [sum(with_left_out(each, stages[0], beyond_s) for each in crew) for crew in crews]
    assert min(carried) == pytest.approx(PROMISED_MAX * 2.0, rel=1e-3)
    fast, slow = (with_left_out(each, stages[0], beyond_s) for each in crews[0])
    assert fast < 1.02 * slow
    slow_s = left_out_s([[40.0, 2.0], [40.0, 40.0]], stages, 2.0)
    assert with_left_out(40.0, stages[0], slow_s) > 1.9 * with_left_out(2.0, stages[0], slow_s)
