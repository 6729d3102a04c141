"""Tries the choices that a person would have to make for a run, and says why each but the best is not it.

A choice is: how many stages on how many nodes, microbatch size, placement of stages, order policy, split
backward, segments, slices. Each is simulated with the nodes' measured power, memory and links; a bound that
is already worse than the best known, a memory cap, a deadlock or a number that divides nothing ends it
earlier. FlexPipe's tuner (section 6) searches part of this space with unit steps and without memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from time import monotonic

from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pipeline import Timeline
from coordinator.planning.tune.case import Case, Choice, Node, Workload
from protocol.base.errors import BadInputError
from protocol.schedule.check import check_bound


@dataclass(frozen=True)
class Space:
    """What to try. Empty tuples of nodes and sizes stand for what the nodes and the workload suggest.

    Attributes:
        sizes_too: microbatch sizes beside those that the workload suggests.
        slices: how many of 1F1B's first microbatches to halve (AutoPipe's slicer), beside none.
    """

    nodes: tuple[int, ...] = ()
    microbatch_samples: tuple[int, ...] = ()
    placements: tuple[str, ...] = ("one-to-one", "V-shape", "circular", "bidirectional")
    split: tuple[bool, ...] = (False, True)
    segments: tuple[int, ...] = (1, 2, 4)
    slices: tuple[int, ...] = (1, 2, 4)
    sizes_too: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a choice.

    Attributes:
        status: "best"; "kept" for those that need less memory than every faster one; "dominated" by a
            choice that is no slower and needs no more memory; "rejected" when it cannot run or was not tried.
        makespan_s: infinity unless simulated.
        peak_bytes: the most that a node holds, parameters included.
    """

    choice: Choice
    status: str
    reason: str
    makespan_s: float = math.inf
    bound_s: float = 0.0
    peak_bytes: float = math.inf
    timeline: Timeline | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Tuned:
    """All choices, the best first, and why the tuner stopped ("done" or "time")."""

    outcomes: list[Outcome]
    search_s: float
    stopped: str

    @property
    def best(self) -> Outcome:
        return self.outcomes[0]


def tune(
    work: Workload,
    nodes: Sequence[Node],
    network: Network,
    space: Space | None = None,
    budget_s: float = 30.0,
    clock: Callable[[], float] = monotonic,
) -> Tuned:
    """Ranks the choices of a space.

    Args:
        nodes: in pipeline order; a choice with fewer takes the first.
        network: between the nodes, in the same order; parallel transfers share what it limits.
        budget_s: choices that it does not reach, after the first, are listed as not tried.

    Raises:
        BadInputError: naming the value that cannot be, or when no choice can run.
    """
    _check(work, nodes)
    space = space or Space()
    began_s = clock()
    outcomes: list[Outcome] = []
    best_s = math.inf
    stopped = "done"
    for choice in _choices(work, len(nodes), space):
        if outcomes and clock() - began_s > budget_s:
            stopped = "time"
            outcomes.append(Outcome(choice, "rejected", f"not tried: the {budget_s:g} s ended"))
            continue
        outcome = _try(choice, work, nodes, network, best_s)
        best_s = min(best_s, outcome.makespan_s)
        outcomes.append(outcome)
    ranked = _rank(outcomes)
    if ranked[0].status != "best":
        raise BadInputError(f"tune: no choice can run; the first: {ranked[0].choice}: {ranked[0].reason}")
    return Tuned(ranked, clock() - began_s, stopped)


def _check(work: Workload, nodes: Sequence[Node]) -> None:
    if not nodes:
        raise BadInputError("nodes: at least one is needed")
    if work.samples < 1 or not work.blocks:
        raise BadInputError(f"samples: {work.samples} samples of {len(work.blocks)} blocks are no work")
    for number, node in enumerate(nodes):
        if not 0 < node.speed < math.inf:
            raise BadInputError(f"nodes[{number}].speed: {node.speed} is not a finite number above 0")
        if not node.memory_bytes > 0:
            raise BadInputError(f"nodes[{number}].memory_bytes: a cap of {node.memory_bytes} lets nothing run")
    for number, block in enumerate(work.blocks):
        for key in ("forward_s", "backward_s", "parameter_bytes", "activation_bytes"):
            if not 0 <= (value := getattr(block, key)) < math.inf:
                raise BadInputError(f"blocks[{number}].{key}: {value} is not a finite number of at least 0")


#: Orders per placement, the most promising first.
_ORDERS = {
    "one-to-one": ("1F1B", "latency-aware 1F1B", "all memory"),
    "circular": ("interleaved 1F1B", "interleaved by memory"),
    "V-shape": ("forward first", "backward first"),
    "bidirectional": ("interleaved", "forward first"),
}


def _choices(work: Workload, nodes: int, space: Space) -> Iterator[Choice]:
    """Every point, ordered so that a short budget has seen the usual ones."""
    counts = space.nodes or (nodes,)
    for segments, count in product(space.segments, counts):
        for samples, placement, split in product(_sizes(work, count, space), space.placements, space.split):
            for order in _ORDERS.get(placement, ("1F1B",)):
                yield Choice(count, samples, placement, order, split, segments)
    for count in counts:
        for samples, slices in product(_sizes(work, count, space), space.slices):
            if slices:
                yield Choice(count, samples, "one-to-one", "1F1B", False, 1, slices)


def _sizes(work: Workload, count: int, space: Space) -> list[int]:
    """Microbatch sizes for so many nodes: powers of two that leave each node a microbatch, and those asked for."""
    if space.microbatch_samples:
        return list(space.microbatch_samples)
    powers = [2**power for power in range(work.samples.bit_length()) if work.samples // 2**power >= count]
    return sorted({*powers, *space.sizes_too}) or [1]


def _try(
    choice: Choice,
    work: Workload,
    nodes: Sequence[Node],
    network: Network,
    best_s: float,
) -> Outcome:
    """Simulates a choice, or says why not."""
    try:
        case = Case(choice, work, nodes, network)
        if (bound_s := case.bound_s()) > best_s * (1 + 1e-9):
            reason = f"even its lower bound of {bound_s:.4g} s is above the best"
            return Outcome(choice, "dominated", reason, bound_s=bound_s)
        timeline = case.run()
    except BadInputError as error:
        return Outcome(choice, "rejected", str(error))
    peaks = [peak + held for peak, held in zip(timeline.peaks(), case.parameter_bytes, strict=True)]
    for number, peak in enumerate(peaks):
        if peak > nodes[number].memory_bytes * (1 + 1e-9):
            return Outcome(
                choice,
                "rejected",
                f"memory: node {number} needs {peak:.4g} of {nodes[number].memory_bytes:.4g} bytes",
                bound_s=bound_s,
            )
    # A bound that is reached may be above by a rounding (transfers that share lines end within a billionth of each
    # other at once); one that is above by more is wrong.
    check_bound(timeline.makespan_s * (1 + 1e-6), bound_s)
    bound_s = min(bound_s, timeline.makespan_s)
    return Outcome(choice, "kept", "", timeline.makespan_s, bound_s, max(peaks), timeline)


def _rank(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Simulated ones by time, then the others; a run that something beats in time and memory is dominated."""
    ran = sorted((o for o in outcomes if o.timeline is not None), key=lambda o: (o.makespan_s, o.peak_bytes))
    ranked: list[Outcome] = []
    front: list[Outcome] = []
    for outcome in ran:
        better = next((o for o in front if o.peak_bytes <= outcome.peak_bytes * (1 + 1e-9)), None)
        if better is None:
            status = "best" if not front else "kept"
            reason = "the shortest step" if not front else f"{1 - outcome.peak_bytes / front[-1].peak_bytes:.0%} less"
            reason += (
                "" if not front else f" memory than the next faster, {outcome.makespan_s / front[0].makespan_s:.3f}"
            )
            reason += "" if not front else " of the best time"
            front.append(outcome)
        else:
            status = "dominated"
            reason = f"{outcome.makespan_s / better.makespan_s:.3f} of the time of: {better.choice}"
        ranked.append(
            Outcome(
                outcome.choice,
                status,
                reason,
                outcome.makespan_s,
                outcome.bound_s,
                outcome.peak_bytes,
                outcome.timeline,
            )
        )
    return ranked + [o for o in outcomes if o.timeline is None]
