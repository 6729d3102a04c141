"""The course of a run: what is computed. Everything else of a plan says who computes it, where and when.

The model is cut into *chunks*, ranges of sub-layer blocks. A stage is one parameter group with one or more chunks. A
*route* is the sequence of chunks that a microbatch visits; position p of a route is its p-th visit, and the loss stands
at the route's length. Only the course is arithmetic: two runs with the same course have the same weights, whoever does
the work in whatever order, and the reference process needs the course of each step and nothing else.

One list of chunks gives every shape of pipeline: a line; the closed loop, whose head lies with the embedding on stage 0
(so that they can be tied, and so that routes may skip and swap all other stages); chunks dealt out in turns
(interleaved, Narayanan et al. 2021); down the stages and up again (V, Qi et al. 2024). Skips and swaps are SkipPipe's
(Blagoev et al. 2025).
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING

import msgspec

from protocol.base.bounded import Items, Number
from protocol.base.errors import BadInputError

if TYPE_CHECKING:
    from protocol.run.run import RunConfig

ROUTES_MAX = 64
"""Routes of one course: as many as a wave of routes has in the largest published plan, eight times over."""
EVEN, PLANNED = "even", "planned"
"""Words for `stages.cut`; anything else is a list of blocks."""
VALIDATION_FIRST = 1 << 16
"""Microbatches from this number on are of the validation (`RunConfig.validates`): a step trains on those below, and has
at most so many. No gradient is made of them, and they visit the whole model, whatever training skips."""
VISITS_MAX = 1024
"""Visits of one route: a chunk is at least one block, and no run has more layers than this."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Blocks `first_block` to `end_block` (exclusive) of the model, on `stage`."""

    first_block: Number
    end_block: Number
    stage: Number


class Course(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chunks in the order of the model, and the routes through them."""

    chunks: Items[Chunk]
    routes: Items[Items[Number]]
    """Sequences of chunk numbers. Steps take turns in where they begin: see `route`."""

    @property
    def whole_route(self) -> tuple[int, ...]:
        """The way through the whole model, chunk by chunk."""
        return tuple(range(len(self.chunks)))

    def route(self, step: int, microbatch: int) -> tuple[int, ...]:
        """The chunks that a microbatch visits, in order."""
        if microbatch >= VALIDATION_FIRST:
            return self.whole_route
        return self.routes[(step + microbatch) % len(self.routes)]

    def stages_of(self, route: tuple[int, ...]) -> tuple[int, ...]:
        """The stages of a route's visits."""
        return tuple(self.chunks[chunk].stage for chunk in route)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Numbers of the stage's chunks, in the order in which they lie in the stage's vector of parameters."""
        return tuple(number for number, chunk in enumerate(self.chunks) if chunk.stage == stage)

    def share(self, chunk: int) -> float:
        """The share of microbatches that visit a chunk: what its stage's power is divided by (SkipPipe, Eq. 1)."""
        return sum(chunk in route for route in self.routes) / len(self.routes)

    def graph_positions(self, stage: int) -> tuple[int, ...]:
        """Positions at which some route visits the stage and goes on: forwards there leave a graph."""
        return tuple(
            sorted({p for route in self.routes for p, s in enumerate(self.stages_of(route)[:-1]) if s == stage})
        )

    def ends_at(self, stage: int) -> bool:
        """Whether some route ends in the stage."""
        return any(self.chunks[route[-1]].stage == stage for route in self.routes)

    def check(self, block_count: int, stage_count: int) -> None:
        """Raises `BadInputError` unless the chunks are the whole model once, and every route is one that can be run."""
        edges = [chunk.first_block for chunk in self.chunks]
        ends = [chunk.end_block for chunk in self.chunks]
        whole = bool(self.chunks) and [*edges, block_count] == [0, *ends]
        if not whole or any(first >= end for first, end in zip(edges, ends, strict=True)):
            raise BadInputError(
                f"chunks of blocks {list(zip(edges, ends, strict=True))}: not the model's {block_count}"
            )
        if {chunk.stage for chunk in self.chunks} != set(range(stage_count)):
            raise BadInputError(f"chunks on stages {sorted({c.stage for c in self.chunks})}: not on all {stage_count}")
        if not 0 < len(self.routes) <= ROUTES_MAX:
            raise BadInputError(f"{len(self.routes)} routes: a course has 1 to {ROUTES_MAX}")
        last = len(self.chunks) - 1
        for number, route in enumerate(self.routes):
            if not route or len(route) > VISITS_MAX or not all(0 <= chunk <= last for chunk in route):
                raise BadInputError(f"route {number}: {list(route)} names chunks that there are not")
            if len(set(route)) != len(route):
                raise BadInputError(f"route {number}: {list(route)} visits a chunk twice")
            if route[0] != 0 or route[-1] != last:
                raise BadInputError(f"route {number}: {list(route)} does not lead from the embedding to the head")
        if self.chunks[0].stage != 0:
            raise BadInputError(f"chunk 0 is on stage {self.chunks[0].stage}: the data is read by stage 0")


def even_partition(block_count: int, part_count: int) -> tuple[tuple[int, int], ...]:
    """(first, end) blocks of each part; sizes differ by one at most, later parts get the larger ones.

    The late ones, because the first has the embedding, which costs next to nothing.
    """
    cuts = [block_count * part // part_count for part in range(part_count + 1)]
    return tuple(pairwise(cuts))


def cut_edges(config: RunConfig) -> tuple[int, ...]:
    """The blocks at which `stages.cut` has a part begin, but for the first part; none where it is a word.

    Raises `BadInputError` naming the key.
    """
    cut = config.stages.cut
    if cut in (EVEN, PLANNED):
        return ()
    words = cut.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and len(word) <= 6 for word in words):
        raise BadInputError(f'stages.cut: "{cut}" is neither "even" nor "planned" nor a list of blocks like "3 6"')
    return tuple(map(int, words))


def parts_of(config: RunConfig) -> tuple[tuple[int, int], ...]:
    """(first, end) blocks of each chunk, in the order of the model. Raises `BadInputError` naming the key."""
    head_alone = len(chunk_owners(config)) > config.stages.count * config.stages.chunks
    count, blocks = config.stages.count * config.stages.chunks, config.block_count - head_alone
    edges = cut_edges(config)
    if not edges:
        parts = even_partition(blocks, count)
    else:
        if len(edges) != count - 1:
            raise BadInputError(f"stages.cut: {len(edges)} blocks, but {count} parts begin at {count - 1}")
        parts = tuple(pairwise((0, *edges, blocks)))
        if any(first >= end for first, end in parts):
            raise BadInputError(f"stages.cut: {list(edges)} does not rise between 1 and {blocks - 1}")
    return (*parts, (blocks, blocks + 1)) if head_alone else parts


def skipped_stages(config: RunConfig) -> int:
    """Stages that each route leaves out."""
    return round(config.routes.skip * config.stages.count)


def is_closed(config: RunConfig) -> bool:
    """Whether routes must end where they begin: tied embeddings, or stages that some routes leave out or exchange."""
    return config.stages.count > 1 and (
        config.model.tied_embeddings or config.routes.skip > 0 or config.routes.swaps > 0
    )


def chunk_owners(config: RunConfig) -> list[int]:
    """The stage of each chunk, the head's own chunk of a closed loop included."""
    count, chunks = config.stages.count, config.stages.chunks
    owners = []
    for number in range(count * chunks):
        turn, place = divmod(number, count)
        owners.append(count - 1 - place if config.stages.placement == "v" and turn % 2 else place)
    if is_closed(config) and owners[-1] != 0:
        owners.append(0)
    return owners


def line(block_count: int, stage_count: int) -> Course:
    """One chunk a stage, cut evenly, and one route through all of them."""
    chunks = tuple(Chunk(*blocks, stage) for stage, blocks in enumerate(even_partition(block_count, stage_count)))
    return Course(chunks, (tuple(range(stage_count)),))


def course_of(config: RunConfig) -> Course:
    """The course that a run's own words ask for; where its cut is still to be planned, an even one.

    Raises `BadInputError`, naming the key.
    """
    owners = chunk_owners(config)
    course = Course(
        tuple(Chunk(first, end, stage) for (first, end), stage in zip(parts_of(config), owners, strict=True)),
        _routes(config, owners),
    )
    course.check(config.block_count, config.stages.count)
    return course


def is_asked_for(course: Course, config: RunConfig) -> bool:
    """Whether a plan's course computes what the run asks for: the run's words decide it all, once none is open."""
    return not config.is_open and course == course_of(config)


def check_cut_of_auto(config: RunConfig) -> None:
    """Raises `BadInputError` naming the key where the number of stages is open, and the run asks for what needs it."""
    if cut_edges(config):
        raise BadInputError('stages.cut: a list of blocks needs a number of stages; stages.count is "auto"')


def check_course_keys(config: RunConfig) -> None:
    """Raises `BadInputError` naming the key of the run that no course can satisfy."""
    stages, routes = config.stages, config.routes
    if stages.placement == "line" and stages.chunks > 1:
        raise BadInputError('stages.chunks: more than one needs stages.placement = "interleaved" or "v"')
    if stages.count * stages.chunks + is_closed(config) > config.block_count:
        raise BadInputError(
            f"stages.chunks: {stages.count * stages.chunks} chunks of a model of {config.block_count} blocks"
        )
    parts_of(config)
    omitted = skipped_stages(config)
    if routes.skip > 0 and omitted == 0:
        raise BadInputError(f"routes.skip: {routes.skip} of {stages.count} stages is less than half a stage")
    if omitted > stages.count - 1:
        raise BadInputError(f"routes.skip: {omitted} of {stages.count} stages, but stage 0 is never left out")
    if routes.swaps:
        visits = len([o for o in chunk_owners(config)[1:-1] if o != 0]) * (stages.count - 1 - omitted)
        if visits // max(1, stages.count - 1) < 2:
            raise BadInputError("routes.swaps: a route has fewer than two visits that could be exchanged")
    if omitted and not course_of(config).routes[0][1:-1] and stages.count > 2:
        raise BadInputError("routes.skip: nothing is left between the first and the last chunk")


def _routes(config: RunConfig, owners: list[int]) -> tuple[tuple[int, ...], ...]:
    """Each route leaves out the same number of stages, in turns, so that every stage but 0 has equally many visits."""
    last = len(owners) - 1
    others, omitted = config.stages.count - 1, skipped_stages(config)
    turns = others if omitted else 1
    places = 1
    if config.routes.swaps:
        places = max(1, len([c for c in range(1, last) if owners[c] != 0]) * (others - omitted) // others - 1)
    routes: dict[tuple[int, ...], None] = {}
    for turn in range(min(ROUTES_MAX, turns * places // gcd(turns, places))):
        left_out = {1 + (turn * omitted + i) % others for i in range(omitted)}
        between = [chunk for chunk in range(1, last) if owners[chunk] not in left_out]
        for i in range(config.routes.swaps):
            place = (turn + 2 * i) % max(1, len(between) - 1)
            between[place : place + 2] = reversed(between[place : place + 2])
        routes[(0, *between, last) if last else (0,)] = None
    return tuple(routes)
