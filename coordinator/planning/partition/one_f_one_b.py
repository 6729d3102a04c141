"""1F1B, timed: the makespan of one order for given stages, fast enough to be asked ten thousand times.

Stage d of P starts with min(M, P - d) forwards, then alternates one backward and one forward
(PipeDream-Flush; the order of a `partition` problem in coordinator/README.md). AutoPipe (section III-B, Fig. 6) numbers
what follows the warm-up in *waves*: in wave y stage d runs the forward of microbatch y + P - d - 1 and the
backward of microbatch y. A forward needs only the wave before, a backward only its own wave, so two numbers
per stage carry the whole state. The general simulator gives the same times (and knows the paper's blocking
transfers, which we do not have); a search has no use for its generality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Two times closer than this share of the makespan count as equal when the critical path is traced.
TIE = 1e-9


def makespan_s(
    forward_s: Sequence[float], backward_s: Sequence[float], link_s: Sequence[float], microbatches: int
) -> float:
    """When the last backward of stage 0 ends; sends overlap compute. O(stages · (stages + microbatches)).

    Args:
        forward_s, backward_s: per stage.
        link_s: from stage d to d + 1, and the same back; one less than stages.
        microbatches: at least 1.
    """
    stages = len(forward_s)
    forward_end = _warm_up(forward_s, link_s, microbatches)
    backward_end = [0.0] * stages
    last = stages - 1
    for wave in range(microbatches):
        came = 0.0  # when the gradient from the stage behind arrives
        for d in range(last, -1, -1):
            ready = backward_end[d]
            if wave and wave + last - d < microbatches:
                # The stage before is still one wave behind in this sweep, as the numbering wants it.
                if d:
                    arrival = forward_end[d - 1] + link_s[d - 1]
                    if arrival > ready:
                        ready = arrival
                ready += forward_s[d]
                forward_end[d] = ready
            elif forward_end[d] > ready:
                ready = forward_end[d]
            if came > ready:
                ready = came
            ready += backward_s[d]
            backward_end[d] = ready
            if d:
                came = ready + link_s[d - 1]
    return backward_end[0]


def _warm_up(forward_s: Sequence[float], link_s: Sequence[float], microbatches: int) -> list[float]:
    """Per stage, the end of the last forward before its first backward."""
    stages = len(forward_s)
    ends: list[float] = []
    arrivals = [0.0] * stages
    for d in range(stages):
        now, next_arrivals = 0.0, []
        for i in range(min(microbatches, stages - d)):
            now = max(now, arrivals[i]) + forward_s[d]
            next_arrivals.append(now + (link_s[d] if d + 1 < stages else 0.0))
        ends.append(now)
        arrivals = next_arrivals
    return ends


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on the critical path."""

    op: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All times of one 1F1B run.

    Attributes:
        forward_end_s, backward_end_s: [stage][microbatch].
        critical_path: in time order, without gaps but for links; among equals the one nearest the last stage.
        master_stage: the stage on which the critical path spends the steady phase: it sets the pace of all.
    """

    makespan_s: float
    forward_end_s: list[list[float]]
    backward_end_s: list[list[float]]
    critical_path: list[Step]
    master_stage: int


def timeline(
    forward_s: Sequence[float], backward_s: Sequence[float], link_s: Sequence[float], microbatches: int
) -> Timeline:
    """The run in full, with AutoPipe's critical path and master stage (section III-B, Fig. 4)."""
    stages = len(forward_s)
    forward_end = [[0.0] * microbatches for _ in range(stages)]
    backward_end = [[0.0] * microbatches for _ in range(stages)]
    for wave in range(1 - stages, microbatches):
        for d in range(stages):
            i = wave + stages - 1 - d
            if 0 <= i < microbatches:
                came = forward_end[d - 1][i] + link_s[d - 1] if d else 0.0
                done = i - (stages - d)  # the backward that stands before this forward on the stage
                before = backward_end[d][done] if done >= 0 else forward_end[d][i - 1] if i else 0.0
                forward_end[d][i] = max(came, before) + forward_s[d]
        for d in range(stages - 1, -1, -1):
            if wave >= 0:
                came = backward_end[d + 1][wave] + link_s[d] if d + 1 < stages else 0.0
                newest = min(wave + stages - 1 - d, microbatches - 1)
                before = max(forward_end[d][newest], backward_end[d][wave - 1] if wave else 0.0)
                backward_end[d][wave] = max(came, before) + backward_s[d]
    path = _critical_path(forward_s, backward_s, link_s, forward_end, backward_end)
    return Timeline(backward_end[0][-1], forward_end, backward_end, path, _master_stage(path, stages, microbatches))


def _critical_path(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    link_s: Sequence[float],
    forward_end: list[list[float]],
    backward_end: list[list[float]],
) -> list[Step]:
    """Traced back from the end; where two predecessors bind, the one on the later stage is taken."""
    stages, microbatches = len(forward_s), len(forward_end[0])
    tie_s = backward_end[0][-1] * TIE
    path: list[Step] = []
    op, d, i = "B", 0, microbatches - 1
    while True:
        end = (forward_end if op == "F" else backward_end)[d][i]
        start = end - (forward_s if op == "F" else backward_s)[d]
        path.append(Step(op, d, i, start, end))
        done = i - (stages - d)
        newest = min(i + stages - 1 - d, microbatches - 1)
        candidates: list[tuple[float, str, int, int]] = []  # (when it lets go, op, stage, microbatch)
        if op == "B":
            if d + 1 < stages:
                candidates.append((backward_end[d + 1][i] + link_s[d], "B", d + 1, i))
            candidates.append((forward_end[d][newest], "F", d, newest))
            if i > 0:
                candidates.append((backward_end[d][i - 1], "B", d, i - 1))
        else:
            if done >= 0:
                candidates.append((backward_end[d][done], "B", d, done))
            elif i > 0:
                candidates.append((forward_end[d][i - 1], "F", d, i - 1))
            if d > 0:
                candidates.append((forward_end[d - 1][i] + link_s[d - 1], "F", d - 1, i))
        binding = next((c for c in candidates if c[0] >= start - tie_s), None)
        if binding is None:
            return path[::-1]
        _, op, d, i = binding


def _master_stage(path: list[Step], stages: int, microbatches: int) -> int:
    """The stage where the critical path spends most of the steady phase; ties go to the later stage.

    With so few microbatches that no stage has a steady phase, the whole path counts.
    """
    time_s = [0.0] * stages
    for steady_only in (True, False):
        for step in path:
            if step.op == "F":
                steady = step.microbatch >= stages - 1 - step.stage
            else:
                steady = step.microbatch < microbatches - (stages - 1 - step.stage)
            if steady or not steady_only:
                time_s[step.stage] += step.end_s - step.start_s
        if any(time_s):
            break
    return max(range(stages), key=lambda d: (time_s[d], d))
