"""Prints the figures that the schedules are held to, each with its bound: `python -m tests.benchmarks.schedules`.

Exits with 1 when one is missed. Times are processor seconds of one core, the best of a few tries: what an idle machine
takes, whatever else runs beside it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.planning.order.pipeline_problem import PipelineProblem
from coordinator.planning.order.policy_grid import grid
from coordinator.planning.order.search import latency_warmup, search
from coordinator.planning.partition.costs import BlockCost
from coordinator.planning.problems import load_problem
from coordinator.planning.schedules import known_design
from coordinator.planning.schedules.design import Design
from coordinator.planning.schedules.interleaved import design as interleaved
from coordinator.planning.simulator.graph import Costs
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pipeline import simulate
from coordinator.planning.tune.case import Node, Workload
from coordinator.planning.tune.tuner import Space, tune
from protocol.schedule.check import check
from tests.oracles.policy_grid import PolicyGrid
from tests.oracles.split_search import Line, search_split

PROBLEMS = sorted((Path(__file__).parents[1] / "data/problems").glob("schedule_*.json"))

#: The ten cases of the latency-aware warm-up: nodes, microbatches, link.
LATENCY_CASES = [
    (4, 8, 0.1),
    (8, 16, 0.1),
    (8, 32, 0.1),
    (16, 64, 0.1),
    (4, 16, 1.0),
    (4, 16, 2.0),
    (8, 32, 1.0),
    (8, 32, 3.0),
    (8, 64, 0.5),
    (16, 64, 1.0),
]


class Figures:
    """Lines of figure, bound and verdict."""

    def __init__(self) -> None:
        self.missed = 0

    def line(self, what: str, value: float, most: float, unit: str = "") -> None:
        """One figure that must not exceed a bound."""
        good = value <= most * (1 + 1e-9)
        self.missed += not good
        print(f"{'pass' if good else 'MISS'}  {what:<70} {value:>9.4g}{unit} (at most {most:g}{unit})")


def timed(work: Callable[[], object], tries: int = 2) -> float:
    """Seconds of the quickest try."""
    seconds = []
    for _ in range(tries):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)


def orders(figures: Figures) -> None:
    """Orders that must equal torch's, counted in nodes that differ (0 wanted)."""
    try:
        from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
    except ImportError:
        print("skip  interleaved 1F1B against torch: torch is not here")
        return
    for nodes, microbatches, chunks in ((4, 8, 2), (4, 16, 2), (8, 16, 2), (4, 8, 3)):
        theirs = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
        theirs.n_local_stages, theirs.pp_group_size, theirs._n_microbatches = chunks, nodes, microbatches
        theirs.microbatches_per_round = nodes
        ours = interleaved(nodes, microbatches, chunks).schedule().orders
        differ = sum(
            [str(a) for a in theirs._calculate_single_rank_operations(node) if a is not None]
            != [str(i.key) for i in ours[node]]
            for node in range(nodes)
        )
        figures.line(f"nodes unlike torch's interleaved 1F1B ({nodes}, {microbatches}, {chunks})", differ, 0)


def problems(figures: Figures) -> None:
    """Every schedule problem: makespan over its optimum, and the time to find it."""
    for path in PROBLEMS:
        optimum_s = json.loads(path.read_bytes())["known"]["optimum_s"]
        problem = load_problem(path, "schedule", PipelineProblem)
        began = time.process_time()
        found = search(problem, budget_s=2.0, seed=0)
        took = time.process_time() - began
        figures.line(f"{path.stem}: of the optimum", found.timeline.makespan_s / optimum_s, 1.02)
        figures.line(f"{path.stem}: search", took, 5, " s")
        figures.line(f"{path.stem}: bound over the optimum", found.bound.value_s / optimum_s, 1)


def split(figures: Figures) -> None:
    """Split backwards: P=4, m=8 with its caps, and 8 x 32 on slow links."""
    for caps, most in (([4, 4, 4, 4], 27), ([4, 3, 2, 1], 30)):
        problem = PipelineProblem(
            kind="schedule",
            stages=4,
            microbatches=8,
            forward_s=[1] * 4,
            backward_input_s=[1] * 4,
            backward_weight_s=[1] * 4,
            link_s=[0] * 3,
            split_backward=True,
            activations_max=caps,
        )
        found = search(problem, 2.0, 0).timeline
        figures.line(f"P=4, m=8, F=I=W=1, caps {caps}", found.makespan_s, most)
        figures.line("  its peak", max(found.peaks()), max(caps))
    for peak, segments, most_s in ((8.0, (1,), 102.8), (4.75, (4,), 98.45)):
        found_split = search_split(Line(8, 32, link_s=0.1), peak, segments, budget_s=6)
        figures.line(
            f"8 x 32, link 0.1, {segments[0]} segments: {found_split.words}", found_split.timeline.makespan_s, most_s
        )
        figures.line("  its peak", max(found_split.timeline.peaks()), peak)
        check(found_split.timeline.schedule(16 if segments == (1,) else 8))


def latency(figures: Figures) -> None:
    """The latency-aware warm-up against the bound that it must reach."""
    for nodes, microbatches, link_s in LATENCY_CASES:
        warmup = latency_warmup([1.0] * nodes, [2.0] * nodes, [link_s] * (nodes - 1))
        design = Design.of(nodes, microbatches).order("interleaved", wait_turn=True).warm_up(warmup.__getitem__)
        timeline = design.timeline(network=Network.line([link_s] * (nodes - 1)))
        bound_s = (nodes - 1) * (3 + 2 * link_s) + 3 * microbatches
        figures.line(f"latency-aware 1F1B, {nodes} x {microbatches}, link {link_s:g}", timeline.makespan_s, bound_s)


def speed(figures: Figures) -> None:
    """Search and simulation times."""

    def whole_grid() -> None:
        explored = PolicyGrid(32, 128)
        for point in grid(32):
            explored.run(point)

    figures.line(f"the grid's {len(list(grid(32)))} points at 32 nodes, 128 microbatches", timed(whole_grid), 10, " s")
    nodes = 32
    work = Workload(
        [BlockCost(1.0, 2.0, 1e9, 1e8) for _ in range(98)],
        samples=128,
        tokens=2048,
        boundary_bytes=1e6,
        attention_share=0.2,
        overhead_s=0.02,
    )
    network = Network(
        latency_s=[[0.05 * (a != b) for b in range(nodes)] for a in range(nodes)],
        uplink_bytes_per_s=[1e7] * nodes,
        downlink_bytes_per_s=[1e7] * nodes,
    )
    space = Space(microbatch_samples=(1,))
    began = time.process_time()
    tuned = tune(work, [Node(1.0, 2e10)] * nodes, network, space, budget_s=25)
    figures.line(
        f"a plan for 32 nodes x 128 microbatches under 20 GB ({tuned.stopped}, {tuned.best.choice})",
        time.process_time() - began,
        30,
        " s",
    )
    figures.line("  its peak", tuned.best.peak_bytes, 2e10, " bytes")
    schedule = known_design("1f1b", 64, 1024).schedule()
    costs = Costs.equal(64, 1, 1, 1)
    figures.line("64 nodes x 1,024 microbatches simulated", timed(lambda: simulate(schedule, costs)), 5, " s")
    figures.line(
        "  the schedule made by policies", timed(lambda: known_design("1f1b", 64, 1024).schedule(), 1), 10, " s"
    )


def main() -> int:
    """All figures; 1 when one is missed."""
    figures = Figures()
    for part in (orders, problems, split, latency, speed):
        part(figures)
    print(f"{figures.missed} missed")
    return 1 if figures.missed else 0


if __name__ == "__main__":
    sys.exit(main())
