"""How a run's samples are cut, and what is refused in words."""

from __future__ import annotations

import pytest

from protocol.base.errors import BadInputError
from protocol.run.run import AuditSection, BatchSection, ModelSection, RunConfig
from protocol.run.segments import segment_ranges


def run_in(segments: int, **sections: object) -> RunConfig:
    values = {"batch": BatchSection(segments=segments), "audit": AuditSection(rate=0.0), **sections}
    return RunConfig(**values)  # type: ignore[arg-type]


def test_segments_cost_the_same_and_cover_the_sample() -> None:
    """Of a long sample later segments are shorter, since their tokens see more before them."""
    model = ModelSection(layers=24, hidden=2048, heads=16, kv_heads=4, feed_forward=5632, context=32768)
    lengths = [end - first for first, end in segment_ranges(run_in(4, model=model))]
    assert sum(lengths) == 32768 and lengths == sorted(lengths, reverse=True) and lengths[0] > 1.3 * lengths[-1]
    assert segment_ranges(run_in(1)) == ((0, 128),)
    assert [end - first for first, end in segment_ranges(run_in(128))] == [1] * 128


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (run_in(9, model=ModelSection(context=8)), "batch.segments: 9 segments of samples of 8 tokens"),
        (run_in(0), "batch.segments: 0 is not between 1 and 64"),
        (run_in(65), "batch.segments: 65 is not between 1 and 64"),
        (run_in(2, audit=AuditSection()), "batch.segments: audits compute whole samples again"),
    ],
)
def test_what_segments_cannot_be_combined_with_is_said(config: RunConfig, sentence: str) -> None:
    """Before anybody joins, with the key."""
    with pytest.raises(BadInputError, match=f"^{sentence}"):
        config.validate()
