"""Tests of `node.compute.layout`."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from node.compute.layout import StageLayout, block_weights
from protocol.base.forms import GRID_BLOCK
from protocol.run.model_spec import ModelSpec, blocks_of
from protocol.run.run import ModelSection, RunConfig
from tests.node.compute.small import VOCABULARY, small_run


def test_slices_fill_the_vector_without_holes() -> None:
    """Each slice begins where the one before ends, and the last ends the vector."""
    layout = StageLayout.whole(small_run(), VOCABULARY)
    assert layout.slices[0].offset == 0
    for before, after in itertools.pairwise(layout.slices):
        assert before.end == after.offset
    assert layout.parameter_count == layout.slices[-1].end == layout.initial(1).numel()


def test_parameter_count_is_the_formula() -> None:
    """The count is that of a LLaMA with these sizes, counted by hand."""
    config = small_run()
    attention = 32 + 32 * 32 + 2 * 16 * 32 + 32 * 32
    feed_forward = 32 + 3 * 32 * 48
    expected = 2 * VOCABULARY * 32 + 32 + 3 * (attention + feed_forward)
    assert StageLayout.whole(config, VOCABULARY).parameter_count == expected


@pytest.mark.parametrize("cuts", [(1,), (4,), (2, 5), (1, 2, 3, 4, 5, 6, 7)])
def test_any_partition_starts_from_the_same_weights(cuts: tuple[int, ...]) -> None:
    """The stages' first weights, one after the other, are the whole model's."""
    config = small_run()
    edges = (0, *cuts, config.block_count)
    stages = [StageLayout(config, VOCABULARY, first, end) for first, end in itertools.pairwise(edges)]
    whole = StageLayout.whole(config, VOCABULARY)
    assert [part.name for stage in stages for part in stage.slices] == [part.name for part in whole.slices]
    assert torch.equal(torch.cat([stage.initial(7) for stage in stages]), whole.initial(7))
    assert torch.equal(torch.cat([stage.decay_mask for stage in stages]), whole.decay_mask)


def test_first_weights_have_the_documented_spread() -> None:
    """Matrices have deviation 0.02, those into the residual stream less, norms are one; seeds differ."""
    config = small_run()
    layout = StageLayout.whole(config, VOCABULARY)
    views = layout.views(layout.initial(1))
    assert float(views["model.layers.0.mlp.gate_proj.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert float(views["model.layers.0.mlp.down_proj.weight"].std()) == pytest.approx(0.02 / math.sqrt(6), rel=0.1)
    assert bool((views["model.norm.weight"] == 1).all())
    assert not torch.equal(layout.initial(1), layout.initial(2))
    equal_shapes = views["model.layers.0.self_attn.q_proj.weight"], views["model.layers.1.self_attn.q_proj.weight"]
    assert not torch.equal(*equal_shapes)


def test_first_weights_are_these_numbers() -> None:
    """The seeded start never changes between versions of the program: two values are written down here."""
    layout = StageLayout.whole(small_run(), VOCABULARY)
    views = layout.views(layout.initial(1))
    assert float(views["model.embed_tokens.weight"][0, 0]) == 0.016066255047917366
    assert float(views["lm_head.weight"][-1, -1]) == 0.0133656682446599


def test_norms_do_not_decay_and_matrices_do() -> None:
    """The mask is false exactly on the gains of norms."""
    layout = StageLayout.whole(small_run(), VOCABULARY)
    for name, mask in layout.views(layout.decay_mask).items():
        assert bool(mask.all()) == ("norm" not in name)
        assert bool(mask.any()) == bool(mask.all())


def test_tied_embeddings_hold_one_matrix() -> None:
    """With tied embeddings the head is only the norm, and embedding and head cannot be parted."""
    config = small_run(model=ModelSection(layers=1, hidden=32, heads=4, kv_heads=2, tied_embeddings=True))
    names = [part.name for part in StageLayout.whole(config, VOCABULARY).slices]
    assert "lm_head.weight" not in names
    with pytest.raises(ValueError, match="one stage"):
        StageLayout(config, VOCABULARY, 0, 2)


@pytest.mark.parametrize(("first", "end"), [(-1, 2), (3, 3), (5, 4), (0, 9)])
def test_ranges_outside_of_the_model_are_refused(first: int, end: int) -> None:
    """A stage holds at least one block, and none that the model has not."""
    with pytest.raises(ValueError, match="blocks"):
        StageLayout(small_run(), VOCABULARY, first, end)


def test_shards_cut_evenly_and_whole_and_at_the_edges_of_the_grid() -> None:
    """Shards follow each other, cover everything, differ by at most a grid block and begin where one does."""
    layout = StageLayout(small_run(), VOCABULARY, 1, 6)
    edges = {place for _, begin, end in layout.block_ranges() for place in range(begin, end, GRID_BLOCK)}
    for shards in (1, 2, 3, 7):
        ranges = [layout.shard_range(index, shards) for index in range(shards)]
        assert ranges[0][0] == 0 and ranges[-1][1] == layout.parameter_count
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        assert all(begin in edges for begin, _ in ranges)
        sizes = [end - begin for begin, end in ranges]
        assert max(sizes) - min(sizes) <= 2 * GRID_BLOCK
    with pytest.raises(ValueError, match="shard 3 of 3"):
        layout.shard_range(3, 3)
    with pytest.raises(ValueError, match="too small for"):
        [layout.shard_range(index, 5000) for index in range(5000)]


def test_every_block_of_the_default_run_has_weights() -> None:
    """`RunConfig.block_count`, the planner's model and the layout agree on what a block is and how much it holds."""
    for tied in (False, True):
        config = RunConfig(model=ModelSection(tied_embeddings=tied))
        counts = [
            sum(math.prod(shape) for _, shape, _ in block_weights(config.model, 257, block))
            for block in range(config.block_count)
        ]
        assert counts == [block.parameters for block in blocks_of(ModelSpec.of_run(config.model, 257))]
        assert sum(counts) == StageLayout.whole(config, 257).parameter_count
