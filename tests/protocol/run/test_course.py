"""Courses: chunks that are the whole model once, routes that can be run, and one sentence for those that cannot."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from protocol.base.errors import BadInputError
from protocol.run.course import Chunk, Course, course_of, line
from protocol.run.run import ModelSection, RoutesSection, RunConfig, StagesSection


def run(layers: int = 4, tied: bool = False, skip: float = 0.0, swaps: int = 0, **stages: object) -> RunConfig:
    """A run with these words about its course."""
    return RunConfig(
        model=ModelSection(layers=layers, tied_embeddings=tied),
        stages=StagesSection(**stages),  # type: ignore[arg-type]
        routes=RoutesSection(skip=skip, swaps=swaps),
    )


def stages_of(config: RunConfig) -> list[tuple[int, ...]]:
    course = course_of(config)
    return [course.stages_of(route) for route in course.routes]


def test_shapes_of_pipelines() -> None:
    """A line, the closed loop, chunks in turns, and down and up again, as sequences of stages."""
    assert stages_of(run(count=3)) == [(0, 1, 2)]
    assert stages_of(run(count=3, tied=True)) == [(0, 1, 2, 0)]
    assert stages_of(run(count=2, chunks=2, placement="interleaved")) == [(0, 1, 0, 1)]
    assert stages_of(run(count=2, chunks=2, placement="v")) == [(0, 1, 1, 0)]
    assert stages_of(run(count=1, tied=True)) == [(0,)]
    closed = course_of(run(count=3, tied=True))
    assert closed.chunks[-1] == Chunk(9, 10, 0) and closed.chunks_of(0) == (0, 3)


def test_routes_leave_out_and_exchange_in_turns() -> None:
    """One of four stages: each of the other three is left out once in three routes. Swaps exchange neighbours."""
    assert stages_of(run(count=4, skip=0.25)) == [(0, 2, 3, 0), (0, 1, 3, 0), (0, 1, 2, 0)]
    course = course_of(run(count=6, layers=8, skip=1 / 3))
    assert len(course.routes) == 5 and {course.share(chunk) for chunk in range(1, 6)} == {3 / 5}
    assert stages_of(run(count=3, swaps=1)) == [(0, 2, 1, 0)]
    assert stages_of(run(count=4, swaps=1)) == [(0, 2, 1, 3, 0), (0, 1, 3, 2, 0)]


@given(
    st.integers(1, 8), st.integers(1, 3), st.sampled_from(["line", "interleaved", "v"]),
    st.sampled_from([0.0, 0.25, 0.34, 0.5, 0.8]), st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_every_run_that_is_valid_has_a_course_that_can_be_run(
    count: int, chunks: int, placement: str, skip: float, swaps: int, tied: bool
) -> None:
    """`validate` and `course_of` agree; every stage but 0 has as many visits as the next."""
    config = run(12, tied, skip, swaps, count=count, chunks=chunks, placement=placement)
    try:
        config.validate()
    except BadInputError:
        assume(False)
    course = course_of(config)
    course.check(config.block_count, count)
    if skip:
        others = {
            sum(stages.count(stage) for stages in map(course.stages_of, course.routes)) for stage in range(1, count)
        }
        assert len(others) <= 1 or chunks > 1 or swaps
    if tied:
        assert {course.chunks[0].stage, course.chunks[-1].stage} == {0}


@pytest.mark.parametrize(("config", "key"), [
    (run(count=4, chunks=2), "stages.chunks"),
    (run(count=6, chunks=2, placement="v"), "stages.chunks"),
    (run(count=4, skip=0.1), "routes.skip"),
    (run(count=4, skip=1.0), "routes.skip"),
    (run(count=2, swaps=1), "routes.swaps"),
    (run(count=3, skip=0.34, swaps=1), "routes.swaps"),
])  # fmt: skip
def test_what_no_course_can_satisfy_is_refused_by_its_key(config: RunConfig, key: str) -> None:
    """One sentence, before anybody joins."""
    with pytest.raises(BadInputError, match=key):
        config.validate()


@pytest.mark.parametrize(("change", "sentence"), [
    ({"routes": ((0, 1, 1),)}, "visits a chunk twice"),
    ({"routes": ((0, 1),)}, "does not lead from the embedding to the head"),
    ({"routes": ((0, 7, 2),)}, "names chunks that there are not"),
    ({"routes": ()}, "0 routes"),
    ({"chunks": (Chunk(0, 3, 0), Chunk(4, 6, 1), Chunk(6, 10, 2))}, "not the model's 10"),
    ({"chunks": (Chunk(0, 3, 0), Chunk(3, 6, 1), Chunk(6, 10, 1))}, "not on all 3"),
    ({"chunks": (Chunk(0, 3, 1), Chunk(3, 6, 0), Chunk(6, 10, 2))}, "read by stage 0"),
])  # fmt: skip
def test_a_course_that_cannot_be_run_is_refused(change: dict[str, object], sentence: str) -> None:
    """What a plan from elsewhere could say."""
    course = line(10, 3)
    course.check(10, 3)
    with pytest.raises(BadInputError, match=sentence):
        msgspec.structs.replace(course, **change).check(10, 3)
    assert isinstance(course, Course)


def test_a_cut_that_a_run_names_is_its_course() -> None:
    """Blocks that begin each part but the first, for a line, for chunks, and beside the head's own chunk of a loop."""
    assert [c.first_block for c in course_of(run(count=3, cut="2 7")).chunks] == [0, 2, 7]
    assert [c.first_block for c in course_of(run(count=2, chunks=2, placement="v", cut="1,2,8")).chunks] == [0, 1, 2, 8]
    loop = course_of(run(count=2, tied=True, cut="8"))
    assert [(c.first_block, c.end_block, c.stage) for c in loop.chunks] == [(0, 8, 0), (8, 9, 1), (9, 10, 0)]


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ({"count": 3, "cut": "2"}, "stages.cut: 1 blocks, but 3 parts begin at 2"),
        ({"count": 3, "cut": "7 2"}, "stages.cut: [7, 2] does not rise between 1 and 9"),
        ({"count": 3, "cut": "5 10"}, "stages.cut: [5, 10] does not rise between 1 and 9"),
        ({"count": 2, "cut": "half"}, 'stages.cut: "half" is neither "even" nor "planned" nor a list of blocks'),
        ({"count": 0, "cut": "5"}, "stages.cut: a list of blocks needs a number of stages"),
        ({"count": 0, "chunks": 64}, 'stages.count: "auto", but no number of stages fits the other keys'),
    ],
)
def test_a_cut_that_cannot_be_is_refused_by_its_key(stages: dict[str, object], sentence: str) -> None:
    """Before anybody joins, in one sentence."""
    with pytest.raises(BadInputError) as refusal:
        run(**stages).validate()  # type: ignore[arg-type]
    assert str(refusal.value).startswith(sentence)
