"""A sample in segments against the whole one, and volunteers in segments against the reference."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from node.compute.layout import StageLayout
from node.compute.reference import along_route_in_segments
from node.compute.segments import SegmentModel, Visit
from node.compute.wire import round_trip
from node.compute.worker import StageWorker
from protocol.run.course import course_of
from protocol.run.run import AuditSection, BatchSection, ComputeSection, ModelSection, RunConfig, StagesSection
from protocol.run.segments import segment_ranges
from tests.node.compute.small import VOCABULARY, random_batch, small_run

SCALE = 1 / 96


def in_segments(count: int, **sections: object) -> RunConfig:
    """The small run, in so many segments."""
    batch = BatchSection(microbatches=3, samples=2, delay=1, segments=count)
    config = small_run(**{"batch": batch, "audit": AuditSection(rate=0.0), **sections})
    config.validate()
    return config


def strong_weights(layout: StageLayout) -> Tensor:
    """Far from their small start, so that no term hides behind another."""
    return layout.initial(3) * 5


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("count", [2, 3, 16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("light", [False, True])
def test_segments_are_the_whole_sample_up_to_rounding(count: int, tied: bool, light: bool) -> None:
    """Loss, every weight's gradient and the output, up to segments of one token; also where graphs keep inputs only."""
    model = ModelSection(
        layers=3, hidden=32, heads=4, kv_heads=2, feed_forward=48, context=16, tied_embeddings=tied, norm_eps=1e-3
    )
    config = in_segments(count, model=model)
    layout = StageLayout.whole(config, VOCABULARY)
    params = strong_weights(layout)
    tokens, labels = random_batch(config)
    whole = torch.zeros_like(params)
    loss, _, _ = SegmentModel(layout).loss(params, tokens, labels, SCALE, whole)

    stage, visit, gradient, found = SegmentModel(layout), Visit(), torch.zeros_like(params), 0.0
    stage.keeps_inputs_only = light
    for first, end in segment_ranges(config):
        stage.forward_segment(params, tokens[:, first:end], visit)
    for first, end in reversed(segment_ranges(config)):
        found += stage.loss_segment(visit, labels[:, first:end], SCALE, gradient)[0]
    assert found == pytest.approx(loss, rel=1e-6)
    assert difference(gradient, whole) < 1e-5
    assert not visit.segments and not visit.later, "nothing is left to go back"


def test_what_a_later_segment_saw_of_an_earlier_one_is_told_to_it() -> None:
    """Without the gradients of its keys and values the first segment's weight gradients are far off."""
    config = in_segments(2)
    layout = StageLayout(config, VOCABULARY, 1, 7)
    params = strong_weights(layout)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    whole, told, untold = (torch.zeros_like(params) for _ in range(3))
    stage = SegmentModel(layout)
    y, graph = stage.forward(params, x)
    dx = stage.backward(graph, torch.ones_like(y), whole)
    assert dx is not None
    for gradient, forgets in ((told, False), (untold, True)):
        visit, parts = Visit(), []
        for first, end in segment_ranges(config):
            stage.forward_segment(params, x[:, first:end], visit)
        for first, end in reversed(segment_ranges(config)):
            parts.append(stage.backward_segment(visit, torch.ones_like(y[:, first:end]), gradient))
            visit.later = [] if forgets else visit.later
        found = torch.cat([part for part in reversed(parts) if part is not None], dim=1)
        assert (difference(found, dx) < 1e-5) is not forgets
    assert difference(told, whole) < 1e-5
    assert difference(untold, whole) > 1e-2


def test_no_token_sees_the_future_through_a_segment() -> None:
    """A changed token changes no output before it, in whatever segment it lies."""
    config = in_segments(3)
    layout = StageLayout(config, VOCABULARY, 0, 7)
    params = strong_weights(layout)
    tokens, _ = random_batch(config)

    def outputs(tokens: Tensor) -> Tensor:
        visit, stage = Visit(), SegmentModel(layout)
        parts = [stage.forward_segment(params, tokens[:, a:b], visit) for a, b in segment_ranges(config)]
        return torch.cat(parts, dim=1)

    before = outputs(tokens)
    for place in (0, 5, 9, 15):
        other = tokens.clone()
        other[:, place] = (other[:, place] + 1) % VOCABULARY
        after = outputs(other)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place], before[:, place])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("form", ["fp32", "q8"])
def test_volunteers_compute_the_references_segments_bit_for_bit(dtype: str, form: str) -> None:
    """Two stages that have several visits open at once, ending them in another order, with one that is begun again."""
    wire = msgspec.structs.replace(small_run().wire, activations_up=form, activations_down=form)
    compute = ComputeSection(dtype=dtype)  # type: ignore[arg-type]
    config = in_segments(3, stages=StagesSection(count=2), wire=wire, compute=compute)
    course, ranges = course_of(config), segment_ranges(config)
    whole = StageLayout.whole(config, VOCABULARY)
    models = [SegmentModel(whole, (chunk.first_block, chunk.end_block)) for chunk in course.chunks]
    flat = strong_weights(whole)
    batches = [random_batch(config, seed) for seed in range(2)]
    expected = torch.zeros_like(flat, dtype=torch.float64)
    losses = []
    for tokens, labels in batches:
        loss, terms = along_route_in_segments(config, models, flat.to(models[0].dtype), tokens, labels)
        losses.append(loss)
        for term in terms:
            expected += term

    first, last = (StageWorker(config, VOCABULARY, c.first_block, c.end_block) for c in course.chunks)
    cut = first.layout.parameter_count
    first.set_params(0, [flat[:cut]])
    last.set_params(0, [flat[cut:]])
    for number, (tokens, _) in enumerate(batches):
        for a, b in ranges[: 2 if number == 0 else None]:
            y = first.forward_segment(number, 0, tokens[:, a:b])
            last.forward_segment(number, 0, round_trip(y, form))
    first.drop_graph(0)  # whoever had it is gone: it begins anew, and so does what stands behind it
    last.drop_graph(0)
    for a, b in ranges:
        last.forward_segment(0, 0, round_trip(first.forward_segment(0, 0, batches[0][0][:, a:b]), form))
    found = [0.0, 0.0]
    for index in reversed(range(len(ranges))):
        for number in (1, 0):
            a, b = ranges[index]
            into = "sum" if index == 0 else None
            loss, dx = last.tail_segment(number, batches[number][1][:, a:b], into)
            found[number] += loss
            assert dx is not None
            assert first.backward_segment(number, round_trip(dx, form), into) is None
    assert found == losses
    assert torch.equal(torch.cat([first.take_gradient("sum"), last.take_gradient("sum")]), expected)
    assert not first.has_graph(0) and not last.has_graph(1)
