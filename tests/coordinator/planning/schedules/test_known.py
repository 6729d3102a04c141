"""Known schedules equal their published orders instruction for instruction, and cost what their papers say."""

from __future__ import annotations

import pytest

from coordinator.planning.schedules import KNOWN, known_design
from coordinator.planning.schedules.design import Design
from coordinator.planning.schedules.interleaved import design as interleaved
from coordinator.planning.schedules.seq1f1b import design as seq1f1b
from coordinator.planning.schedules.seq1f1b_i import design as seq1f1b_i
from coordinator.planning.simulator.graph import Costs
from coordinator.planning.simulator.links import Network
from protocol.base.errors import BadInputError
from protocol.schedule.check import check
from protocol.schedule.ir import Key, Op

#: algorithms.md section 1.5, microbatch.segment.
SEQ1F1B_4_2_4 = [
    "F0.0 F0.1 F1.0 F1.1 F2.0 B0.1 F2.1 B0.0 F3.0 B1.1 F3.1 B1.0 B2.1 B2.0 B3.1 B3.0",
    "F0.0 F0.1 F1.0 F1.1 B0.1 F2.0 B0.0 F2.1 B1.1 F3.0 B1.0 F3.1 B2.1 B2.0 B3.1 B3.0",
    "F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 F2.0 B1.1 F2.1 B1.0 F3.0 B2.1 F3.1 B2.0 B3.1 B3.0",
    "F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 F2.0 B1.0 F2.1 B2.1 F3.0 B2.0 F3.1 B3.1 B3.0",
]


def orders(design: Design) -> list[list[str]]:
    """Every node's order in short form."""
    schedule = design.schedule()
    check(schedule)
    return [[str(instruction.key) for instruction in order] for order in schedule.orders]


def textbook_1f1b(stages: int, microbatches: int, node: int) -> list[str]:
    """stages - node forwards, then one backward and one forward in turn, then the rest of the backwards."""
    first = min(microbatches, stages - node)
    order = [f"{node}F{m}" for m in range(first)]
    for m in range(microbatches):
        order.append(f"{node}B{m}")
        if first + m < microbatches:
            order.append(f"{node}F{first + m}")
    return order


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 8), (4, 2), (8, 16), (3, 7)])
def test_1f1b_is_the_textbooks(stages: int, microbatches: int) -> None:
    """Backward first with P - d in flight is 1F1B."""
    wanted = [textbook_1f1b(stages, microbatches, node) for node in range(stages)]
    assert orders(known_design("1f1b", stages, microbatches)) == wanted


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (3, 5)])
def test_gpipe_runs_all_forwards_first(stages: int, microbatches: int) -> None:
    """Forwards in order, then backwards in order."""
    wanted = [[f"{node}{op}{m}" for op in "FB" for m in range(microbatches)] for node in range(stages)]
    assert orders(known_design("gpipe", stages, microbatches)) == wanted


def test_seq1f1b_is_the_papers() -> None:
    """Four nodes, four microbatches of two segments, with the paper's time and peaks."""
    design = seq1f1b(4, 4, segments=2)
    wanted = [[f"{node}{word.removesuffix('.0')}" for word in line.split()] for node, line in enumerate(SEQ1F1B_4_2_4)]
    assert orders(design) == wanted
    timeline = design.timeline()
    assert timeline.makespan_s == 16.5
    assert [2 * peak for peak in timeline.peaks()] == [5, 4, 3, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(4, 8, 2), (4, 16, 2), (8, 16, 2), (4, 8, 3)])
def test_interleaved_1f1b_is_torchs(stages: int, microbatches: int, chunks: int) -> None:
    """FlexPipe's priorities with waiting turns give torch's own generator's order."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    theirs = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)  # its constructor wants live process groups
    theirs.n_local_stages, theirs.pp_group_size, theirs._n_microbatches = chunks, stages, microbatches
    theirs.microbatches_per_round = stages
    wanted = [
        [str(action) for action in theirs._calculate_single_rank_operations(rank) if action is not None]
        for rank in range(stages)
    ]
    assert orders(interleaved(stages, microbatches, chunks)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (8, 16)])
def test_torchs_own_1f1b_but_for_its_defect(stages: int, microbatches: int) -> None:
    """torch 2.13 numbers the last rank's microbatches from 1; every other rank is equal, and ours starts at 0."""
    from torch.distributed.pipelining.schedules import Schedule1F1B

    theirs = Schedule1F1B.__new__(Schedule1F1B)
    theirs._n_microbatches, theirs._num_stages = microbatches, stages
    order = theirs._get_pipeline_order()
    assert order is not None
    ours = orders(known_design("1f1b", stages, microbatches))
    for rank in range(stages - 1):
        actions = [str(action) for action in order[rank] if action is not None]
        assert actions == [*ours[rank], f"{rank}REDUCE_GRAD"]
    assert ours[-1][0] == f"{stages - 1}F0"


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "link_s", "makespan", "peak"),
    [
        ("gpipe", 8, 32, 0.1, 118.4, 32),
        ("1f1b", 8, 32, 0.1, 123.8, 8),
        ("interleaved-1f1b", 8, 32, 0.1, 109.5, 11.5),
        ("looped-bfs", 8, 32, 0.1, 107.9, 32),
        ("looped-bfs", 4, 8, 0.0, 28.5, 8),
        ("v-shape", 4, 8, 0.0, 25.5, 4),
        ("v-shape", 8, 32, 0.0, 99.5, 8),
        ("zero-bubble-h1", 4, 8, 0.0, 27, 4),
        ("zero-bubble-h1", 8, 32, 0.0, 103, 8),
        ("seq1f1b", 4, 8, 0.1, 31.05, 1.75),
        ("seq1f1b", 8, 32, 0.1, 124.25, 2.75),
        ("seq1f1b-i", 8, 32, 0.0, 98.625, 3.25),
    ],
)
def test_costs_are_those_of_the_literature(
    name: str, stages: int, microbatches: int, link_s: float, makespan: float, peak: float
) -> None:
    """Makespan and peak of algorithms.md section 3, F=1, B=2 per node and microbatch."""
    timeline = known_design(name, stages, microbatches).timeline(network=Network.uniform(stages, link_s))
    assert timeline.makespan_s == pytest.approx(makespan)
    assert max(timeline.peaks()) == pytest.approx(peak)


def test_chimera_takes_its_ten_steps() -> None:
    """2m + P - 2 unit steps for as many microbatches as nodes."""
    assert known_design("chimera", 4, 4).timeline(Costs.equal(4, 1, 1, 0)).makespan_s == 10


def test_distmm_pipe_waits_for_both_modalities() -> None:
    """No backward of a last stage starts before every forward of its group, of text and images, has ended."""
    timeline = known_design("distmm-pipe", 4, 8).timeline(Costs.equal(4, 1, 1, 1))
    task_of = {key: task for task, key in enumerate(timeline.graph.keys)}
    for microbatch in range(16):
        group = microbatch % 8 // 2 * 2
        start = timeline.start_s[task_of[Key(Op.B, microbatch, 1)]]
        for other in (group, group + 1, 8 + group, 8 + group + 1):
            assert timeline.end_s[task_of[Key(Op.F, other, 1)]] <= start


@pytest.mark.parametrize("name", list(KNOWN))
@pytest.mark.parametrize(("stages", "microbatches", "link_s"), [(4, 8, 0.0), (4, 8, 2.5), (2, 4, 0.1)])
def test_every_known_schedule_runs_and_is_valid(name: str, stages: int, microbatches: int, link_s: float) -> None:
    """Each example, also on slow links, gives a schedule that holds all invariants."""
    design = known_design(name, stages, microbatches)
    check(design.schedule(network=Network.uniform(stages, link_s)))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 6, 8])
def test_the_general_warm_up_of_seq1f1b_i_never_deadlocks(nodes: int) -> None:
    """Whenever segments and nodes divide each other and groups are full; Eq. 6 of the paper fails for k > P."""
    for segments in range(1, 9):
        for microbatches in range(1, 9):
            for chunks in (1, 2, 3):
                fits = (nodes % segments == 0 or segments % nodes == 0) and microbatches * segments % nodes == 0
                if fits:
                    seq1f1b_i(nodes, microbatches, segments, chunks).timeline()
                else:
                    with pytest.raises(BadInputError, match="segments: "):
                        seq1f1b_i(nodes, microbatches, segments, chunks)


def test_groups_that_are_not_full_are_refused() -> None:
    """Interleaved 1F1B names the number that does not fit."""
    with pytest.raises(BadInputError, match="microbatches: interleaved 1F1B needs a multiple of 4, got 6"):
        interleaved(4, 6)


def test_a_name_that_nobody_knows_lists_the_known() -> None:
    """The sentence helps."""
    with pytest.raises(BadInputError, match="NAME: 'zb' is not one of gpipe, 1f1b"):
        known_design("zb", 4, 8)
