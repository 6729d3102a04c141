"""What a volunteer would do for each stage, in the steps a second that it carries there. Pure.

A member of a stage is bound by its device, its uplink and its downlink: for each microbatch it computes, sends up and
takes down; once in a step it sends its sum of gradients and takes the new parameters. The device is what was measured
when it came, lines what its servers have seen since, else its own measurement. What the *ledgers* count corrects that:
whoever does less of its stage's tasks than its fellows, against what all of them promised, is worth so much less in
every choice, and nobody's own word raises what was counted. Where all of them together promise far more steps than are
seen, something takes time that no promise knows of, and it takes it of everybody (`left_out_s`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from coordinator.live.plan_builder import model_work
from coordinator.live.roster import Member
from protocol.base.forms import TYPICAL_BITS
from protocol.base.ids import NodeId
from protocol.run.course import Course
from protocol.run.model_spec import ModelSpec, blocks_of
from protocol.run.run import RunConfig

FLOPS_PER_S = 1e11
"""Where nobody's device was measured: only the relation counts then, and all are equal."""
HOME_UP_BYTES_PER_S, HOME_DOWN_BYTES_PER_S = 2.5e6, 12.5e6
"""20/100 Mbit/s, where nobody's line was measured yet: the line that the project is for. Whoever has one sends twice as
much for a stage in the middle as for one at an end, and lines bind, not devices: by devices
alone, of 32 volunteers for eight equal stages four went to the last one and three to some in the middle."""
MEMORY = 0.9
"""What of the counts is kept from step to step: after ten steps a third of what it was."""
PRIOR_TASKS = 4.0
"""Tasks as promised that everybody is credited with, so that the luck of single tasks moves nobody."""
DELIVERS_MIN, DELIVERS_MAX = 1 / 16, 4.0
DELIVERS_ENOUGH = 1 / 4
"""Whoever delivers less than this of its promise is no measure for its fellows: beside one that takes work and does
nothing, two honest members would seem to do half as much again as they promised, and be moved for it."""

PROMISED_MAX = 2.0
"""What the slowest stage's members may promise together, in the steps a second that are seen. A run that is bound by
devices and lines is within it: steps begin and end with nothing to do for somebody, and uploads are not quite even. Two
stages of two volunteers on one computer promised hundreds of times what was seen. What told them apart was the noise of
measuring a line, twofold and more, and one was moved where it made every step take twice as long."""
HALVINGS = 12
"""Brings what is left out of promises to within 1/4096 of what it can be at most."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a stage takes of its members: per visit of a microbatch, and once a step."""

    visits: float
    """Of a step, over all its chunks; 0 where every route leaves it out."""
    flops: float
    up_bytes: float
    down_bytes: float
    contribution_bytes: float
    version_bytes: float


@dataclass(frozen=True, slots=True)
class Means:
    """What a volunteer has. 0: it does not bind."""

    flops_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float


def needs_of(config: RunConfig, course: Course, vocabulary: int) -> tuple[Needs, ...]:
    """Of every stage, in the bytes of the run's wire forms."""
    spec = ModelSpec.of_run(config.model, vocabulary)
    blocks = blocks_of(spec)
    tokens, microbatches = config.batch.samples * config.model.context, config.batch.microbatches
    wire = config.wire
    down_bits, gradient_bits, parameter_bits = (
        TYPICAL_BITS[form] for form in (wire.activations_down, wire.gradients, wire.parameters)
    )
    found = []
    for stage in range(config.stages.count):
        visits = flops = parameters = 0.0
        for number in course.chunks_of(stage):
            chunk, share = course.chunks[number], course.share(number)
            own = blocks[chunk.first_block : chunk.end_block]
            visits += share
            flops += share * tokens * sum(block.forward_flops + block.backward_flops for block in own)
            parameters += sum(block.parameters for block in own)
        boundaries = up_bits = 0.0
        for route in course.routes:
            stages = course.stages_of(route)
            last = len(stages) - 1
            for place in (place for place, s in enumerate(stages) if s == stage):
                gradient = TYPICAL_BITS[wire.input_gradient_form(place == last)] if place > 0 else 0.0
                output = TYPICAL_BITS[wire.output_form(place == 0)] if place < last else 0.0
                up_bits += (gradient + output) / len(course.routes)
                boundaries += ((place > 0) + (place < last)) / len(course.routes)
        per_visit = spec.boundary_values * tokens / 8 / visits if visits else 0.0
        found.append(
            Needs(
                visits=visits * microbatches,
                flops=flops / visits if visits else 0.0,
                up_bytes=per_visit * up_bits,
                down_bytes=per_visit * boundaries * down_bits,
                contribution_bytes=parameters * gradient_bits / 8,
                version_bytes=parameters * parameter_bits / 8,
            )
        )
    return tuple(found)


def steps_per_s(means: Means, needs: Needs, step_s: float) -> float:
    """The steps a second that one volunteer alone would carry through a stage, where steps are `step_s` apart.

    A sum and a version that take longer than a step go with every second step or so: the time that they have is at
    least twice what they take.
    """
    return _in_a_step(means, needs, step_s)[0]


def beside_visits(means: Means, needs: Needs, step_s: float) -> tuple[float, float]:
    """(by what factor it would carry more steps than `steps_per_s` says if it did nothing but visits, the seconds of
    each step in which it does none): its sum goes up, or the version comes down, over the line that binds it.

    These seconds stay as they are where steps become shorter, and every member of a stage has them. So the steps that a
    stage would make with one more or one less do not follow from what each carries at the present pace.
    """
    _, span_s, pause_s = _in_a_step(means, needs, step_s)
    return span_s / (span_s - pause_s), pause_s


def _in_a_step(means: Means, needs: Needs, step_s: float) -> tuple[float, float, float]:
    """(steps a second, the span that was looked at, what of it is no time for visits where the volunteer is bound)."""
    if not needs.visits:
        return 0.0, 1.0, 0.0
    compute_s = needs.flops / means.flops_per_s
    up_s, sum_s = (
        (needs.up_bytes / means.up_bytes_per_s, needs.contribution_bytes / means.up_bytes_per_s)
        if means.up_bytes_per_s
        else (0.0, 0.0)
    )
    down_s, version_s = (
        (needs.down_bytes / means.down_bytes_per_s, needs.version_bytes / means.down_bytes_per_s)
        if means.down_bytes_per_s
        else (0.0, 0.0)
    )
    span_s = max(step_s, 2 * sum_s, 2 * version_s, compute_s, 1e-9)
    done, pause_s = span_s / compute_s if compute_s else float("inf"), 0.0
    for visit_s, once_s in ((up_s, sum_s), (down_s, version_s)):
        if visit_s and (span_s - once_s) / visit_s < done:
            done, pause_s = (span_s - once_s) / visit_s, once_s
    return done / span_s / needs.visits, span_s, pause_s


def with_left_out(steps_per_s: float, needs: Needs, left_out_s: float) -> float:
    """The steps a second of somebody's promise, where each visit takes `left_out_s` longer than it says."""
    return steps_per_s / (1.0 + steps_per_s * needs.visits * left_out_s)


def left_out_s(crews: Sequence[Sequence[float]], needs: Sequence[Needs], seen_steps_per_s: float) -> float:
    """Seconds of each visit that promises leave out: the least with which the members of the slowest stage promise
    together no more than `PROMISED_MAX` times the steps a second that are seen.

    Args:
        crews: of each stage, the steps a second that each of its members promises.
        needs: of each stage.
        seen_steps_per_s: 0: not known; then nothing is left out.
    """
    there = [(crew, need) for crew, need in zip(crews, needs, strict=True) if crew and need.visits]
    most = PROMISED_MAX * seen_steps_per_s

    def too_much(seconds: float) -> bool:
        return min(sum(with_left_out(each, need, seconds) for each in crew) for crew, need in there) > most

    if not there or most <= 0 or not too_much(0.0):
        return 0.0
    enough, less = min(len(crew) / (need.visits * most) for crew, need in there), 0.0
    for _ in range(HALVINGS):
        middle = (less + enough) / 2
        less, enough = (middle, enough) if too_much(middle) else (less, middle)
    return enough


def reload_s(means: Means, needs: Needs) -> float:
    """What it costs a volunteer to begin at a stage: its parameters, whole."""
    return needs.version_bytes / means.down_bytes_per_s if means.down_bytes_per_s else 0.0


def typical_of(known: Iterable[Means]) -> Means:
    """What counts for whoever was not measured: the median of what is known of the others, each by itself.

    Where lines of 2.5 Gbit/s were taken for home lines until they were measured, six that came within a minute seemed
    to do next to nothing, and all went to the one stage that had least: [4, 4, 3, 4] became [4, 4, 9, 4].
    """
    there = list(known)
    flops, up, down = (
        [value for each in there if (value := getattr(each, name)) > 0]
        for name in ("flops_per_s", "up_bytes_per_s", "down_bytes_per_s")
    )
    return Means(
        median(flops) if flops else FLOPS_PER_S,
        median(up) if up else HOME_UP_BYTES_PER_S,
        median(down) if down else HOME_DOWN_BYTES_PER_S,
    )


class Delivered:
    """What volunteers do against what they promised, by the ledgers' count of tasks."""

    def __init__(self) -> None:
        self._counts: dict[NodeId, tuple[float, float]] = {}
        """(tasks done, tasks that its promise is worth), both fading."""

    def count(self, tasks: Mapping[NodeId, int], crews: Iterable[Mapping[NodeId, float]]) -> None:
        """A step is over. `crews`: the members of each stage that were there for all of it, with what each promised
        (in any unit, the same within a stage)."""
        compared: set[NodeId] = set()
        for crew in crews:
            measure = [node for node in crew if self.share(node) >= DELIVERS_ENOUGH]
            total = sum(tasks.get(node, 0) for node in measure)
            promised = sum(crew[node] for node in measure)
            if len(crew) < 2 or not total or not promised:
                continue  # alone it does whatever there is to do
            compared.update(crew)
            for node, promise in crew.items():
                done, due = self._counts.get(node, (0.0, 0.0))
                self._counts[node] = (
                    MEMORY * done + tasks.get(node, 0),
                    MEMORY * due + total * promise / promised,
                )
        # More than was promised is so much more than the fellows did, and says nothing where there are none. Less is
        # kept: a member that does nothing is not worth more for having driven the others away.
        for node, (done, due) in self._counts.items():
            if done > due and node not in compared:
                self._counts[node] = MEMORY * done, MEMORY * due

    def left(self, node: NodeId) -> None:
        self._counts.pop(node, None)

    def share(self, node: NodeId) -> float:
        """What a volunteer delivers of what it promised, 1 where nothing is known."""
        done, due = self._counts.get(node, (0.0, 0.0))
        return min(DELIVERS_MAX, max(DELIVERS_MIN, (done + PRIOR_TASKS) / (due + PRIOR_TASKS)))


def benchmarked_flops_per_s(member: Member, config: RunConfig, vocabulary: int) -> float:
    """A member's power by its own benchmark, 0 where there was none.

    The benchmark's tokens went through an even share of the blocks, as the run's file counts stages: a multiply and an
    add for each of the forward's, and the same twice for the backward.
    """
    work = model_work(config.model, vocabulary)
    tokens_per_s = member.join.tokens_per_s if member.join is not None else 0.0
    return tokens_per_s * 6 * work / max(1, config.stages.count)
