"""The placement search: the paper's recipe, then annealing on the true cost, with a bound and a reason to
stop.

Moves: exchange or move servers, flip or exchange roles, exchange two stages in the order, move or exchange
volunteers, and (where the world allows it) leave a volunteer or a server out. Half of them start at the stage
that sets the pace. Large swarms first even out their stages in bulk, since one volunteer more or less changes little.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coordinator.planning.placement.balance import even_out
from coordinator.planning.placement.bound import lower_bound
from coordinator.planning.placement.cost import Costs, Placement, Stage, joined
from coordinator.planning.placement.problem import World
from coordinator.planning.placement.recipe import recipe, recipe_with
from coordinator.planning.placement.spares import (
    FEW_SERVERS,
    exchanged,
    propose_spare,
    settle,
    spare_servers,
    starts_with_spares,
    varied,
)
from protocol.base.errors import BadInputError
from protocol.schedule.check import check_bound

ROUNDS_PER_SECOND = 12_000
"""How many moves count as a second, so that equal seeds do equal work; large stages count more."""
SMALL_SERVERS = 20
"""Up to here every number of stages is tried."""
SMALL_WALKS = 6
"""Walks of the annealing there; where there are fewer starts, the later walks begin from shaken ones."""
SHAKES = 30
LARGE_COUNTS = 8
"""Beyond, so many numbers of stages between the least and the most."""
COUNTED_S = 2.5
"""Without a budget a search does what takes about so long on one idle core, whatever the clock says."""
CLEARLY = 0.8
"""Of many servers a start that leaves some out must be so much better: single ones the walks leave out themselves."""
SPARE_MOVES = 0.1
"""Share of moves that leave servers out or take them in; less where there are many."""
HOT, COLD = 0.05, 0.0005


@dataclass(frozen=True)
class PlacementAnswer:
    """The best placement found; `benched` volunteers and `spares` (servers) stand in no stage."""

    placement: Placement
    recipe_s: float
    lower_bound_s: float
    search_s: float
    stopped: str
    benched: tuple[int, ...]
    spares: tuple[int, ...]

    @property
    def batch_s(self) -> float:
        return self.placement.cost_s

    @property
    def fraction_of_bound(self) -> float:
        """1.0 where no placement is faster."""
        return self.lower_bound_s / self.batch_s if self.batch_s > 0 else 1.0


def search_placement(
    world: World,
    seed: int = 0,
    budget_s: float | None = None,
    *,
    stages: int | None = None,
    start: Placement | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PlacementAnswer:
    """The best placement found in `budget_s`, with `stages` stages if given.

    Without a budget the work is counted (`COUNTED_S`), so that every machine gives the same answer.

    Raises `BadInputError` saying what is missing when no placement exists.
    """
    world.check()
    if stages is not None and not world.stages_min <= stages <= world.stages_max:
        raise BadInputError(
            f"stages: {stages}, but the layers and servers allow {world.stages_min} to {world.stages_max}"
        )
    began = clock()
    deadline = math.inf if budget_s is None else began + budget_s
    work_s = COUNTED_S if budget_s is None else budget_s

    def expired() -> bool:
        return clock() >= deadline

    def part(share: float) -> Callable[[], float]:
        """How much of so large a share of the time that is left has been spent, from now on."""
        start = clock()
        end = start + share * (deadline - start)
        return lambda: (clock() - start) / max(end - start, 1e-9) if math.isfinite(end) else 0.0

    rng = random.Random(seed)
    costs = Costs(world)
    if stages is None:
        starts = recipe(world, costs, rng)
    else:
        starts = [recipe_with(world, costs, stages, rng)]
    recipe_s = starts[-1].cost_s
    starts = _with_others(world, costs, starts, rng, stages)
    thinned: list[Placement] = []
    if world.may_spare:
        promising = [len(placement.stages) for placement in sorted(starts, key=lambda placement: placement.score)]
        thinned = starts_with_spares(world, costs, promising, rng, expired)

    def prepared(found: list[Placement]) -> list[Placement]:
        evened = [even_out(placement, expired) for placement in found]
        return evened + ([_alone(placement) for placement in evened] if world.may_bench and world.volunteers else [])

    starts = prepared(starts)
    thinned = prepared(thinned)
    if start is not None:
        starts.append(start)
    if world.may_spare:
        clearly = CLEARLY * min(placement.score for placement in starts) if world.servers > FEW_SERVERS else math.inf
        starts += [placement for placement in thinned if placement.score < clearly]
        starts = list({tuple(placement.stages): placement for placement in starts}.values())
    starts.sort(key=lambda placement: placement.score)
    best = starts[0]
    if world.may_spare and world.servers <= FEW_SERVERS:
        starts = varied(starts)
    bound = lower_bound(world, stages)
    settles = world.may_spare and world.servers <= SMALL_SERVERS
    largest = max(world.volunteers, 10) / len(best.stages)
    rounds = max(100, int(ROUNDS_PER_SECOND * work_s / (1 + largest / 100)))
    if world.servers <= SMALL_SERVERS:
        kept = (starts[:SMALL_WALKS] * SMALL_WALKS)[:SMALL_WALKS]
    else:
        kept = starts[:2]
    for number, placement in enumerate(kept):  # the best starts get a walk each, the best walk a second one
        if number >= len(starts):
            placement = _shaken(placement, rng)
        own = 0.7 / len(kept)
        tried = anneal(placement, rng, int(own * rounds), part(own / (1 - number * own)), 1.0)
        if settles:
            tried = settle(tried, expired)
        if tried.score < best.score:
            best = tried
    best = anneal(best, rng, int(0.3 * rounds), part(1.0), 0.3)
    if settles:
        best = settle(best, expired)
    if not math.isfinite(best.cost_s):
        raise BadInputError(_nothing_fits(world))
    placed = {volunteer for stage in best.stages for volunteer in stage.volunteers}
    check_bound(best.cost_s * (1 + 1e-6), bound)  # both end a bisection
    if best.cost_s <= bound * (1 + 1e-9):
        stopped = "proved optimal"
    elif expired():
        stopped = f"time budget of {budget_s:g} s"
    else:
        stopped = "planned search done"
    return PlacementAnswer(
        best,
        recipe_s,
        min(bound, best.cost_s),
        clock() - began,
        stopped,
        tuple(volunteer for volunteer in range(world.volunteers) if volunteer not in placed),
        spare_servers(best),
    )


def _with_others(
    world: World, costs: Costs, found: list[Placement], rng: random.Random, stages: int | None
) -> list[Placement]:
    """The recipe's choice and others: every number of stages when there are few servers, else some of each
    size.
    """
    if stages is not None:
        return found
    counts = range(world.stages_min, world.stages_max + 1)
    if world.servers > SMALL_SERVERS:
        spread = {round(counts[0] * (counts[-1] / counts[0]) ** (i / LARGE_COUNTS)) for i in range(LARGE_COUNTS + 1)}
        counts_tried = sorted(spread)
        found = found[-1:]
    else:
        counts_tried = list(counts)
    done = {len(placement.stages) for placement in found}
    return found + [recipe_with(world, costs, count, rng) for count in counts_tried if count not in done]


def _nothing_fits(world: World) -> str:
    if world.server_layers_max is not None:
        room = int(np.sort(world.server_layers_max)[::-1].sum())
        return (
            f"memory_bytes: no placement found whose members hold all {world.layers} layers; "
            f"the servers together hold {room}"
        )
    return "server_latency_s: no placement found whose stages can all reach each other"


def anneal(start: Placement, rng: random.Random, rounds: int, spent: Callable[[], float], heat: float) -> Placement:
    """The best placement on a walk of `rounds` moves from `start`, or of fewer when the time for it is spent (1.0).

    It cools with whichever runs out first, or a walk that the clock cuts short would end hot.
    """
    current = best = start
    timed = 0.0
    for number in range(rounds):
        if number % 16 == 0:
            timed = spent()
            if timed >= 1:
                break
        changes = propose(current, rng)
        if changes is None:
            continue
        tried = current.replaced(changes)
        if not math.isfinite(tried.cost_s) and math.isfinite(current.cost_s):
            continue
        temperature = best.score * heat * HOT * (COLD / HOT) ** max(number / rounds, timed)
        if tried.score <= current.score or rng.random() < math.exp((current.score - tried.score) / temperature):
            current = tried
            if tried.score < best.score:
                best = tried
    return best


def walk(start: Placement, seed: int, budget_s: float, *, clock: Callable[[], float] = time.perf_counter) -> Placement:
    """The best placement on a cool walk of `budget_s` from `start`: small moves only, its layers kept if fixed."""
    began = clock()
    rounds = max(100, int(ROUNDS_PER_SECOND * budget_s))
    return anneal(start, random.Random(seed), rounds, lambda: (clock() - began) / budget_s, 0.1)


def _alone(placement: Placement) -> Placement:
    """The servers without volunteers: where links are poor, the best placement has few, and is far from one
    with all.
    """
    changes = {k: Stage(s.front, s.back, ()) for k, s in enumerate(placement.stages) if s.volunteers}
    return placement.replaced(changes) if changes else placement


def _shaken(placement: Placement, rng: random.Random) -> Placement:
    """The placement after some random moves, good or bad."""
    for _ in range(SHAKES):
        changes = propose(placement, rng)
        if changes is not None:
            placement = placement.replaced(changes)
    return placement


def propose(placement: Placement, rng: random.Random) -> dict[int, Stage] | None:
    """A random move as the stages that it changes, or None when it leads nowhere."""
    stages = placement.stages
    count = len(stages)
    world = placement.costs.world
    pace = rng.random() < 0.5 and math.isfinite(placement.cost_s)
    a = placement.worst if pace else rng.randrange(count)
    b = rng.randrange(count)
    one, two = stages[a], stages[b]
    if world.may_spare and rng.random() < SPARE_MOVES / max(1.0, world.servers / FEW_SERVERS):
        return propose_spare(placement, rng, a)
    kind = rng.random()
    if world.volunteers and kind < 0.35:
        return _move_volunteer(placement, rng, a, b)
    if a == b:
        return {a: flipped} if (flipped := _flip(one, rng)) else None
    if kind < 0.45:
        if rng.random() < 0.5:
            return {a: two, b: one}
        return {  # the servers change places, the volunteers stay
            a: Stage(two.front, two.back, one.volunteers),
            b: Stage(one.front, one.back, two.volunteers),
        }
    if kind < 0.85:
        x, y = rng.choice(one.front + one.back), rng.choice(two.front + two.back)
        return {a: exchanged(one, x, y), b: exchanged(two, y, x)}
    if kind < 0.95:
        return _move_server(one, two, a, b, rng)
    return {a: flipped} if (flipped := _flip(one, rng)) else None


def _flip(stage: Stage, rng: random.Random) -> Stage | None:
    """A server changes its role, or two exchange theirs."""
    if rng.random() < 0.5:
        x, y = rng.choice(stage.front), rng.choice(stage.back)
        front = tuple(sorted(y if j == x else j for j in stage.front))
        back = tuple(sorted(x if j == y else j for j in stage.back))
        return Stage(front, back, stage.volunteers)
    server = rng.choice(stage.front + stage.back)
    if server in stage.front:
        if len(stage.front) < 2:
            return None
        front = tuple(j for j in stage.front if j != server)
        return Stage(front, tuple(sorted((*stage.back, server))), stage.volunteers)
    if len(stage.back) < 2:
        return None
    back = tuple(j for j in stage.back if j != server)
    return Stage(tuple(sorted((*stage.front, server))), back, stage.volunteers)


def _move_server(one: Stage, two: Stage, a: int, b: int, rng: random.Random) -> dict[int, Stage] | None:
    """A server of stage a joins stage b in a random role."""
    options = (one.front if len(one.front) > 1 else ()) + (one.back if len(one.back) > 1 else ())
    if not options:
        return None
    server = rng.choice(options)
    front = tuple(j for j in one.front if j != server)
    back = tuple(j for j in one.back if j != server)
    return {a: Stage(front, back, one.volunteers), b: joined(two, server, rng.random() < 0.5)}


def _move_volunteer(placement: Placement, rng: random.Random, a: int, b: int) -> dict[int, Stage] | None:
    """A volunteer of stage a (often the one with the longest transfers) moves, is exchanged, or is left out."""
    one, two = placement.stages[a], placement.stages[b]
    world = placement.costs.world
    if world.may_bench and rng.random() < 0.2:
        return _bench(placement, rng, a)
    if a == b:
        return None
    if not one.volunteers:
        return None
    if rng.random() < 0.5:
        slowest = int(placement.costs.member_s(one, placement.power[a]).argmax())
        mover = one.volunteers[slowest]
    else:
        mover = rng.choice(one.volunteers)
    rest = tuple(v for v in one.volunteers if v != mover)
    if two.volunteers and rng.random() < 0.4:
        other = rng.choice(two.volunteers)
        return {
            a: Stage(one.front, one.back, (*rest, other)),
            b: Stage(two.front, two.back, (*(v for v in two.volunteers if v != other), mover)),
        }
    return {a: Stage(one.front, one.back, rest), b: Stage(two.front, two.back, (*two.volunteers, mover))}


def _bench(placement: Placement, rng: random.Random, a: int) -> dict[int, Stage] | None:
    stage = placement.stages[a]
    if rng.random() < 0.6 and stage.volunteers:
        slowest = int(placement.costs.member_s(stage, placement.power[a]).argmax())
        rest = stage.volunteers[:slowest] + stage.volunteers[slowest + 1 :]
        return {a: Stage(stage.front, stage.back, rest)}
    placed = {v for s in placement.stages for v in s.volunteers}
    out = [v for v in range(placement.costs.world.volunteers) if v not in placed]
    if not out:
        return None
    return {a: Stage(stage.front, stage.back, (*stage.volunteers, rng.choice(out)))}
