"""Training in whole numbers modulo a prime: sums do not round, so "equal" is exact (state-and-trust 3.5).

A stage is a few parameters; a forward, a loss, a backward and an update have the shape of the real ones: every output
depends on every input and parameter, weight gradients add up, the update has a moment and a global clip factor.
`reference` trains in one process and says what every shard's every version must be.

With `gradients = "gi"` each task's gradient goes to the grid of its step's version before it is added, by a rule that
depends on the task, and sums become gradients again by the same grid (`node.compute.stage_grid`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from node.machine.numbers import clip_factor
from protocol.base.ids import TaskId
from protocol.run.batches import Batches
from protocol.run.course import VALIDATION_FIRST, course_of
from protocol.run.run import RunConfig

PRIME = 2**61 - 1
SHARD_ELEMENTS = 3
"""Parameters of one shard: few, but a contribution must still be cut and put together."""

Vector = tuple[int, ...]


class State(NamedTuple):
    """What a shard goes on from, as it lies in a file."""

    weights: Vector
    moments: Vector
    previous: Vector
    """Weights of the version before, where the next step may run on it."""
    averages: Vector
    previous_averages: Vector


def start_vector(seed: int, stage: int, elements: int) -> Vector:
    """Version 0 of a stage."""
    return tuple(_draw(seed, "weight", stage, index) for index in range(elements))


def sample(seed: int, step: int, microbatch: int) -> tuple[int, int]:
    """(tokens, labels) of a microbatch."""
    return _draw(seed, "tokens", step, microbatch), _draw(seed, "labels", step, microbatch)


def forward(weights: Vector, x: int, chunk: int) -> int:
    """What leaves a chunk. Every chunk of a stage uses all of its weights, each in its own way."""
    return (sum(w * (x + i + 1 + 7 * chunk) for i, w in enumerate(weights)) + x * x) % PRIME


def backward(weights: Vector, x: int, dy: int, chunk: int) -> tuple[int, Vector]:
    """(input gradient, weight gradients)."""
    dx = dy * (sum(weights) + 2 * x) % PRIME
    return dx, tuple(dy * (x + i + 1 + 7 * chunk) % PRIME for i in range(len(weights)))


def route_end(weights: Vector, x: int, label: int, chunk: int) -> tuple[float, int, Vector]:
    """(loss, input gradient, weight gradients) of a route's end; losses are whole numbers of one size."""
    y = forward(weights, x, chunk)
    dx, dw = backward(weights, x, 2 * (y - label) % PRIME, chunk)
    return float(1_000 + (y - label) % 1_009), dx, dw


def segment_of(number: int, segment: int) -> int:
    """A microbatch's tokens, or labels, of one segment."""
    return (number * (segment + 1) + segment) % PRIME


def seen_after(x: int, seen: int) -> int:
    """What the next segment sees of this one and of those before, as of keys and values: a number for all of them."""
    return (3 * seen + x) % PRIME


@dataclass
class Visit:
    """A microbatch in segments in one chunk: inputs as the chunk saw them, what later ones saw, gradients so far."""

    weights: Vector
    chunk: int
    inputs: list[int] = field(default_factory=list)
    seen: int = 0
    later: int = 0
    dw: Vector = ()

    def forward(self, x: int) -> int:
        self.inputs.append((x + self.seen) % PRIME)
        self.seen = seen_after(x, self.seen)
        return forward(self.weights, self.inputs[-1], self.chunk)

    def backward(self, dy: int) -> int:
        """Of the last segment that has not gone back: its input gradient."""
        dx, dw = backward(self.weights, self.inputs.pop(), dy, self.chunk)
        self.dw = add(self.dw, dw) if self.dw else dw
        later, self.later = self.later, (dx + 3 * self.later) % PRIME
        return (dx + later) % PRIME

    def end(self, label: int) -> tuple[float, int]:
        """The same with the loss: (loss, input gradient)."""
        y = forward(self.weights, self.inputs[-1], self.chunk)
        return float(1_000 + (y - label) % 1_009), self.backward(2 * (y - label) % PRIME)


def add(left: Vector, right: Vector) -> Vector:
    return tuple((a + b) % PRIME for a, b in zip(left, right, strict=True))


def norm(total: Vector) -> tuple[float, bool]:
    """(square norm, finite): one sum in 29 counts as not finite, so that skipped steps happen."""
    return float(sum(total) % 1000), not any(total) or sum(total) % 29 != 0


def update(weights: Vector, moments: Vector, total: Vector, clip: float) -> tuple[Vector, Vector]:
    factor = int(clip * 1_000_000)
    moments = tuple((3 * m + g * factor) % PRIME for m, g in zip(moments, total, strict=True))
    return tuple((w - 7 * m) % PRIME for w, m in zip(weights, moments, strict=True)), moments


def first_averages(elements: int) -> Vector:
    """Of version 0: what the gradient was lately, from which a version's grid is made."""
    return (11,) * elements


def grid_of(averages: Vector) -> Vector:
    """The grid of the steps that run on a version with these averages."""
    return tuple((5 * average + 1) % PRIME for average in averages)


def on_grid(dw: Vector, grid: Vector, task: TaskId) -> Vector:
    """A task's gradient as it is summed up: what is added depends on the grid, and on the task alone."""
    drawn = 1_000_003 * task.step + 1_009 * task.microbatch + 31 * task.position + 7
    return tuple((g + drawn * unit) % PRIME for g, unit in zip(dw, grid, strict=True))


def from_grid(total: Vector, grid: Vector) -> Vector:
    """The gradient that a sum stands for."""
    return tuple(n * (unit + 3) % PRIME for n, unit in zip(total, grid, strict=True))


def next_averages(averages: Vector, total: Vector, grid: Vector) -> Vector:
    """Of the version after one with `averages`, made from a sum on `grid`."""
    return tuple((3 * a + n + unit) % PRIME for a, n, unit in zip(averages, total, grid, strict=True))


def digest(weights: Vector, moments: Vector) -> bytes:
    return hashlib.blake2b(repr((weights, moments)).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Reference:
    """What one process computes."""

    versions: list[list[Vector]]
    """[version][stage]: parameters."""
    moments: list[list[Vector]]
    """[version][stage]."""
    averages: list[list[Vector]]
    """[version][stage]; empty vectors where sums are on no grid."""
    digests: list[list[list[bytes]]]
    """[version][stage][shard]."""
    gradients: list[list[dict[tuple[int, int], Vector]]]
    """[step][stage][microbatch, position]: weight gradients as they are added up."""
    losses: list[float]
    skipped: list[bool]
    clips: list[float]
    """By step; 0 where it is skipped."""
    validations: dict[int, float]
    """By version that is validated: mean loss a token."""

    def state(self, version: int, runs_on: int, stage: int, shard: int) -> State:
        """Of a shard; `runs_on`: the version that the next step runs on."""

        def part(of: list[list[Vector]], number: int) -> Vector:
            vector = of[number][stage]
            return shards(vector)[shard] if vector else ()

        held = (part(self.versions, version), part(self.moments, version))
        before = (part(self.versions, runs_on), part(self.averages, runs_on)) if runs_on < version else ((), ())
        return State(*held, before[0], part(self.averages, version), before[1])


def recut(whole: Vector, shard_count: int) -> Vector:
    """All stages' vectors, one after the other, when the model is cut into so many shards: another size, as stages here
    have no blocks, but a fixed one for each number."""
    return tuple(whole[place % len(whole)] for place in range(shard_count * SHARD_ELEMENTS))


def _split(whole: Vector, shard_counts: list[int]) -> list[Vector]:
    found, at = [], 0
    for count in shard_counts:
        found.append(whole[at : at + count * SHARD_ELEMENTS])
        at += count * SHARD_ELEMENTS
    return found


def reference(
    config: RunConfig,
    shard_counts: list[int],
    layouts: Mapping[int, tuple[RunConfig, list[int]]] | None = None,
    batches: Batches | None = None,
) -> Reference:
    """Trains the run in one process, with the delayed update of design section 3. `layouts`: by step, what the run is
    laid out as from there on; digests are of the last one, and of the versions since. `batches`: how many microbatches
    each step has, where that was changed."""
    batches = batches or Batches.of(config)
    stages = range(len(shard_counts))
    course = course_of(config)
    versions = [[start_vector(config.seed, s, shard_counts[s] * SHARD_ELEMENTS) for s in stages]]
    moments = [[tuple(0 for _ in vector) for vector in versions[0]]]
    on_a_grid = config.wire.gradients == "gi"
    averages = [[first_averages(len(vector)) if on_a_grid else () for vector in versions[0]]]
    gradients: list[list[dict[tuple[int, int], Vector]]] = []
    losses, skips, clips = [], [], []
    for step in range(config.steps):
        if layouts is not None and step in layouts:
            config, shard_counts = layouts[step]
            stages, course = range(len(shard_counts)), course_of(config)
            for kept in (versions, moments, averages) if on_a_grid else (versions, moments):
                for number in (step, step - 1) if kept is not moments and step else (step,):
                    kept[number] = _split(recut(sum(kept[number], ()), sum(shard_counts)), shard_counts)
        weights = versions[config.version_of(step)]
        gradients.append([{} for _ in stages])
        loss_sum = 0.0
        for microbatch in range(batches.count(step)):
            x, label = sample(config.seed, step, microbatch)
            *visits, end = course.route(step, microbatch)
            if config.batch.segments > 1:
                opened = [Visit(weights[course.chunks[chunk].stage], chunk) for chunk in (*visits, end)]
                loss_sum += _in_segments(config, opened, x, label)
                for position, visit in enumerate(opened):
                    gradients[step][course.chunks[visit.chunk].stage][microbatch, position] = visit.dw
                continue
            inputs = [x]
            for chunk in visits:
                inputs.append(forward(weights[course.chunks[chunk].stage], inputs[-1], chunk))
            loss, dx, dw = route_end(weights[course.chunks[end].stage], inputs.pop(), label, end)
            loss_sum += loss
            gradients[step][course.chunks[end].stage][microbatch, len(visits)] = dw
            for position, chunk in reversed(list(enumerate(visits))):
                stage = course.chunks[chunk].stage
                dx, dw = backward(weights[stage], inputs[position], dx, chunk)
                gradients[step][stage][microbatch, position] = dw
        used = [grid_of(vector) for vector in averages[config.version_of(step)]]
        if on_a_grid:
            for grid, of_tasks in zip(used, gradients[step], strict=True):
                for (microbatch, position), dw in of_tasks.items():
                    of_tasks[microbatch, position] = on_grid(dw, grid, TaskId(step, microbatch, position, "B"))
        exact = totals = [sum_up(list(gradients[step][s].values()), len(weights[s])) for s in stages]
        if on_a_grid:
            totals = [from_grid(total, grid) for total, grid in zip(exact, used, strict=True)]
        norms = [[norm(part) for part in shards(total)] for total in totals]
        skipped = not all(finite for parts in norms for _, finite in parts)
        scale = batches.scale(step)
        clip = clip_factor([sum(square for square, _ in parts) for parts in norms], config.optimizer.clip_norm, scale)
        pairs, newest = [(versions[-1][s], moments[-1][s]) for s in stages], averages[-1]
        if not skipped:
            pairs = [update(*pairs[s], totals[s], scale * clip) for s in stages]
            newest = [next_averages(*of) for of in zip(newest, exact, used, strict=True)] if on_a_grid else newest
        versions.append([weights for weights, _ in pairs])
        moments.append([moment for _, moment in pairs])
        averages.append(newest)
        losses.append(loss_sum / batches.tokens(step))
        skips.append(skipped)
        clips.append(0.0 if skipped else clip)
    digests = [
        [_shard_digests(v[s], m[s]) for s in range(min(len(v), len(m), len(stages)))]
        for v, m in zip(versions, moments, strict=True)
    ]
    validations = {
        config.version_of(step): _validation(config, versions[config.version_of(step)])
        for step in range(config.final_step + 1)
        if config.validates(step)
    }
    return Reference(versions, moments, averages, digests, gradients, losses, skips, clips, validations)


def _in_segments(config: RunConfig, visits: list[Visit], tokens: int, labels: int) -> float:
    """Forward in order, then backward in reverse order: the loss; the visits have the gradients."""
    for segment in range(config.batch.segments):
        x = segment_of(tokens, segment)
        for visit in visits:
            x = visit.forward(x)
    loss_sum = 0.0
    for segment in reversed(range(config.batch.segments)):
        loss, dx = visits[-1].end(segment_of(labels, segment))
        loss_sum += loss
        for visit in reversed(visits[:-1]):
            dx = visit.backward(dx)
    return loss_sum


def _validation(config: RunConfig, weights: list[Vector]) -> float:
    """Forwards of text that no step trains on, through the whole model."""
    course, total = course_of(config), 0.0
    *visits, end = course.chunks
    for microbatch in range(VALIDATION_FIRST, VALIDATION_FIRST + config.validation.batches):
        x, label = sample(config.seed, -1, microbatch)
        for number, chunk in enumerate(visits):
            x = forward(weights[chunk.stage], x, number)
        total += route_end(weights[end.stage], x, label, len(visits))[0]
    return total / (config.validation.batches * config.batch.samples * config.model.context)


def sum_up(vectors: list[Vector], elements: int) -> Vector:
    total: Vector = (0,) * elements
    for vector in vectors:
        total = add(total, vector)
    return total


def shards(vector: Vector) -> list[Vector]:
    """The shards of a stage's vector, in order."""
    return [vector[i : i + SHARD_ELEMENTS] for i in range(0, len(vector), SHARD_ELEMENTS)]


def _shard_digests(weights: Vector, moments: Vector) -> list[bytes]:
    return [digest(w, m) for w, m in zip(shards(weights), shards(moments), strict=False)]


def _draw(seed: int, what: str, a: int, b: int) -> int:
    text = f"{seed}/{what}/{a}/{b}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % PRIME
