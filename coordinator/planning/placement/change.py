"""When a machine of a placed swarm drops, joins or slows down: one role finds somebody, everybody else stays.

Layers stay in their stages, because moving a layer moves its parameters and optimizer state. A server that drops
leaves a role: the other servers of its side carry it, or one of the stage changes sides, or the last one plays both;
or a spare server or one that its own stage can do without takes it. Each way is judged by the cost of the placement
and by what has to be loaded (`moved`). Machines are numbered as in the network: servers, then volunteers; one that
joins later is part of the world from the start, as gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from coordinator.planning.placement.cost import Costs, Placement, Stage, joined
from coordinator.planning.placement.problem import World
from coordinator.planning.placement.search import search_placement, walk
from protocol.base.errors import BadInputError

HORIZON_STEPS = 100
"""A move is worth what it saves over so many steps, less the time in which a machine loads its new state."""
GAIN_AT_LEAST = 0.02
"""Somebody who could stay moves only when a step becomes so much shorter."""

Changes = dict[int, Stage]


@dataclass(frozen=True)
class StateBytes:
    """What a layer weighs: `parameters` on everybody who computes it, `optimizer_state` (parameters and moments) once
    per stage, divided over its servers; `activation` is what one token sends between stages.
    """

    parameters: float
    optimizer_state: float
    activation: float

    @classmethod
    def adamw(cls, parameters: float, activation_bytes: float) -> StateBytes:
        """`parameters` per layer in 4 bytes each, and as much again for each of the two moments."""
        return cls(4.0 * parameters, 12.0 * parameters, activation_bytes)


@dataclass(frozen=True)
class Moved:
    """What machines load because of a change: bytes of each, and how long the slowest of them takes alone."""

    bytes_of: dict[int, float]
    seconds: float

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes_of.values())


@dataclass(frozen=True)
class PlacementRepair:
    """A placement (its layers fixed) after a change, who is gone, what it costs to get there, and in words."""

    placement: Placement
    gone: frozenset[int]
    moved: Moved
    changed: frozenset[int]
    """The stages whose members, roles or layers are not what they were."""
    sentence: str


def as_it_is(placement: Placement) -> Placement:
    """The placement with the layers that it has now fixed."""
    return Placement(placement.costs, placement.stages, placement.layers())


def stage_of_machine(placement: Placement, machine: int) -> int | None:
    """The stage in which a machine works, or None for one that is spare or left out."""
    servers = placement.costs.world.servers
    for k, stage in enumerate(placement.stages):
        if machine in stage.servers if machine < servers else machine - servers in stage.volunteers:
            return k
    return None


def drop(placement: Placement, gone: frozenset[int], machine: int, state: StateBytes) -> PlacementRepair:
    """The placement after `machine` left; the stages of all others stay unless one has to help out.

    Raises `BadInputError` naming the stage when nobody can take the role.
    """
    _known(placement, machine)
    gone = gone | {machine}
    k = stage_of_machine(placement, machine)
    if k is None:
        return _kept(placement, gone, f"{_name(placement, machine)} left; it stood in no stage")
    stage = placement.stages[k]
    servers = placement.costs.world.servers
    if machine >= servers:
        rest = tuple(v for v in stage.volunteers if v != machine - servers)
        near: list[Changes] = [{k: Stage(stage.front, stage.back, rest)}]
        far: list[Changes] = []
    else:
        near, far = _without_server(placement, gone, k, machine)
    best = _nearest(placement, near, far, gone, state)
    if best is None:  # layers have to move as well: the same ways with layers cut anew
        best = _best(Placement(placement.costs, placement.stages), near + far, gone, state, placement)
    if best is None:
        raise BadInputError(
            f"stage {k}: nobody can stand in for {_name(placement, machine)}: {len(_spare(placement, gone))} servers "
            f"are spare, and no other stage can give one away within the memory and the links that there are"
        )
    after, moved = best
    return PlacementRepair(after, gone, moved, _changed(placement, after), _in_words(placement, after, machine, moved))


def join(placement: Placement, gone: frozenset[int], machine: int, state: StateBytes) -> PlacementRepair:
    """The placement after `machine` came (back).

    A server takes a place where that pays for loading and for cutting the shards anew, else it is spare, which is
    worth something too. A volunteer goes where it helps most, even where one alone does not move the slowest stage,
    unless a step took longer with it.
    """
    _known(placement, machine)
    gone = gone - {machine}
    if stage_of_machine(placement, machine) is not None:
        return _kept(placement, gone, f"{_name(placement, machine)} is in its place already")
    places = list(_places(placement, machine))
    if machine >= placement.costs.world.servers:
        places.sort(key=lambda place: placement.replaced(place).score)
        best = _best(placement, places[:1], gone, state)
        helps = best is not None and best[0].cost_s <= placement.cost_s * (1 + 1e-9)
    else:
        best = _best(placement, places, gone, state)
        helps = best is not None and _pays(placement, *best)
    if best is None or not helps:
        return _kept(placement, gone, f"{_name(placement, machine)} came and is spare: no stage gains by it")
    after, moved = best
    return PlacementRepair(after, gone, moved, _changed(placement, after), _in_words(placement, after, machine, moved))


def slow_down(
    placement: Placement,
    gone: frozenset[int],
    machine: int,
    state: StateBytes,
    power_factor: float = 1.0,
    link_factor: float = 1.0,
) -> PlacementRepair:
    """The placement after `machine` turned out to compute and send by these factors slower (below 1: faster).

    Others take its place only where a step becomes clearly shorter by it.
    """
    _known(placement, machine)
    for key, factor in (("power_factor", power_factor), ("link_factor", link_factor)):
        if not 0 < factor < math.inf:
            raise BadInputError(f"{key}: {factor} must be above 0")
    costs = Costs(placement.costs.world.slower(machine, power_factor, link_factor))
    slower = Placement(costs, placement.stages, placement.fixed)
    k = stage_of_machine(placement, machine)
    stays = f"{_name(placement, machine)} is slower and keeps its place: no change pays"
    if k is None:
        return _kept(slower, gone, stays)
    stage = placement.stages[k]
    servers = placement.costs.world.servers
    far: list[Changes] = []
    if machine < servers:
        options, far = _without_server(slower, gone | {machine}, k, machine)
    else:
        rest = tuple(v for v in stage.volunteers if v != machine - servers)
        out: Changes = {k: Stage(stage.front, stage.back, rest)}
        elsewhere = [{**out, **place} for place in _places(slower, machine) if k not in place]
        options = [out, *elsewhere] if placement.costs.world.may_bench else elsewhere
    best = _nearest(slower, options, far, gone, state)
    if best is None or not _pays(slower, *best):
        return PlacementRepair(slower, gone, Moved({}, 0.0), frozenset((k,)), stays)
    after, moved = best
    return PlacementRepair(after, gone, moved, _changed(slower, after) | {k}, _in_words(slower, after, machine, moved))


def improve(
    placement: Placement, gone: frozenset[int], state: StateBytes, seed: int, budget_s: float
) -> PlacementRepair | None:
    """A better placement of everybody who is there, or None when none pays for its moves; for the background.

    Two ways are tried: small moves from the present one, layers staying, and a search from scratch.
    """
    world = placement.costs.world
    servers = [j for j in range(world.servers) if j not in gone]
    volunteers = [v for v in range(world.volunteers) if world.servers + v not in gone]
    there = world.part(servers, volunteers)
    stages = _renumbered(placement.stages, _places_in(servers), _places_in(volunteers))
    now = Placement(Costs(there), stages, placement.fixed)
    found = [walk(now, seed, 0.3 * budget_s)]
    with suppress(BadInputError):  # with too few servers for a search, the small moves remain
        found.append(search_placement(there, seed, 0.7 * budget_s, start=now).placement)
    tried = [Placement(placement.costs, _renumbered(one.stages, servers, volunteers), one.layers()) for one in found]
    best: tuple[Placement, Moved] | None = None
    for after in tried:
        moved = what_moves(placement, after, gone, state)
        if _pays(placement, after, moved) and (best is None or _value(after, moved) < _value(*best)):
            best = after, moved
    if best is None:
        return None
    after, moved = best
    return PlacementRepair(
        after,
        gone,
        moved,
        _changed(placement, after),
        f"a step takes {after.cost_s:.4g} s instead of {placement.cost_s:.4g} s{_loading(moved)}",
    )


def _places_in(numbers: Sequence[int]) -> dict[int, int]:
    return {number: place for place, number in enumerate(numbers)}


def _renumbered(
    stages: Sequence[Stage], servers: Sequence[int] | dict[int, int], volunteers: Sequence[int] | dict[int, int]
) -> list[Stage]:
    return [
        Stage(
            tuple(sorted(servers[j] for j in stage.front)),
            tuple(sorted(servers[j] for j in stage.back)),
            tuple(volunteers[v] for v in stage.volunteers),
        )
        for stage in stages
    ]


def what_moves(before: Placement, after: Placement, gone: frozenset[int], state: StateBytes) -> Moved:
    """What every machine has to load. Old holders, or for a stage without any the checkpoint's keeper, send it.

    A server that stays keeps its share of each layer and loads what its share grows by; the layers themselves are
    whole on everybody. The only server of a stage has what the other held already, mirrored. Transfers to one machine
    add up; those to different machines are taken as undisturbed.
    """
    world = before.costs.world
    old, new = _holdings(before), _holdings(after)
    holders: list[list[int]] = [[] for _ in range(world.layers)]
    for machine, (layers, _) in old.items():
        if machine < world.servers and machine not in gone:
            for layer in layers:
                holders[layer].append(machine)
    anybody = [j for j in range(world.servers) if j not in gone]
    loads: dict[int, float] = {}
    slowest = 0.0
    for machine, (layers, share) in new.items():
        had, had_share = old.get(machine, (range(0), 0.0))
        fresh = [layer for layer in layers if layer not in had]
        kept = len(layers) - len(fresh)
        size = state.parameters * len(fresh) + state.optimizer_state * (
            share * len(fresh) + max(0.0, share - had_share) * kept
        )
        if size <= 0:
            continue
        loads[machine] = size
        sources = (holders[(fresh or list(layers))[0]] or anybody) or [machine]
        if machine < world.servers:
            rates = [world.server_slowness[j, machine] for j in sources if j != machine]
        else:
            rates = [world.front_slowness[machine - world.servers, j] for j in sources]
        slowest = max(slowest, size / state.activation * float(min(rates, default=0.0)))
    return Moved(loads, slowest)


def _holdings(placement: Placement) -> dict[int, tuple[range, float]]:
    """Machine -> its layers and its share of their optimizer state."""
    found: dict[int, tuple[range, float]] = {}
    servers = placement.costs.world.servers
    first = 0
    for stage, count in zip(placement.stages, placement.layers(), strict=True):
        layers = range(first, first + count)
        first += count
        for j in stage.servers:
            found[j] = (layers, 1 / len(stage.servers))
        for v in stage.volunteers:
            found[servers + v] = (layers, 0.0)
    return found


def _without_server(
    placement: Placement, gone: frozenset[int], k: int, server: int
) -> tuple[list[Changes], list[Changes]]:
    """The ways in which stage k goes on without `server`: those that touch no other stage, and the others."""
    stage = placement.stages[k]

    def replaced_by(helper: int) -> Stage:
        front, back = (tuple(sorted(helper if j == server else j for j in side)) for side in (stage.front, stage.back))
        return Stage(front, back, stage.volunteers)

    near: list[Changes] = [{k: left} for left in _left_by(stage, server)]
    near += [{k: replaced_by(j)} for j in _spare(placement, gone)]
    far: list[Changes] = [
        {m: left, k: replaced_by(j)}
        for m, other in enumerate(placement.stages)
        if m != k
        for j in other.servers
        for left in _left_by(other, j)
    ]
    return near, far


def _left_by(stage: Stage, server: int) -> Iterator[Stage]:
    """What a stage can be without one of its servers; nothing when that was its only one."""
    front = tuple(j for j in stage.front if j != server)
    back = tuple(j for j in stage.back if j != server)
    if front and back:
        yield Stage(front, back, stage.volunteers)
        return
    others = front or back
    if len(others) == 1:
        yield Stage(others, others, stage.volunteers)
    for other in others if len(others) > 1 else ():
        rest = tuple(j for j in others if j != other)
        yield Stage(rest, (other,), stage.volunteers) if front else Stage((other,), rest, stage.volunteers)


def _spare(placement: Placement, gone: frozenset[int]) -> list[int]:
    placed = {j for stage in placement.stages for j in stage.servers}
    return [j for j in range(placement.costs.world.servers) if j not in gone and j not in placed]


def _places(placement: Placement, machine: int) -> Iterator[Changes]:
    """Every place that an unplaced machine could take."""
    servers = placement.costs.world.servers
    for k, stage in enumerate(placement.stages):
        if machine >= servers:
            yield {k: Stage(stage.front, stage.back, (*stage.volunteers, machine - servers))}
        else:
            yield {k: joined(stage, machine, True)}
            yield {k: joined(stage, machine, False)}


def _nearest(
    base: Placement, near: Sequence[Changes], far: Sequence[Changes], gone: frozenset[int], state: StateBytes
) -> tuple[Placement, Moved] | None:
    """The best of the ways that leave other stages alone, or of the others where they are clearly better."""
    here, there = (_best(base, options, gone, state) for options in (near, far))
    if here is None or there is None:
        return here or there
    return there if _value(*there) <= _value(*here) * (1 - GAIN_AT_LEAST) else here


def _best(
    base: Placement,
    options: Sequence[Changes],
    gone: frozenset[int],
    state: StateBytes,
    before: Placement | None = None,
) -> tuple[Placement, Moved] | None:
    """The best feasible option applied to `base`, its layers fixed, and what moves; None when none is feasible."""
    found: tuple[Placement, Moved] | None = None
    for changes in options:
        after = base.replaced(changes)
        if not math.isfinite(after.cost_s):
            after = base.replaced(_reached(base, changes))
        if not math.isfinite(after.cost_s):
            continue
        if found is not None and after.cost_s >= _value(*found):
            continue  # whatever it moves
        after.fixed = after.layers()
        moved = what_moves(before or base, after, gone, state)
        if found is None or _value(after, moved) < _value(*found):
            found = after, moved
    return found


def _reached(base: Placement, changes: Changes) -> Changes:
    """The same stages without the volunteers that no longer reach any server of either side."""
    kept: Changes = {}
    for k, stage in changes.items():
        if not stage.volunteers:
            kept[k] = stage
            continue
        delay = base.costs.member_s(stage, base.costs.power(stage))
        there = tuple(v for v, seconds in zip(stage.volunteers, delay, strict=True) if math.isfinite(seconds))
        kept[k] = Stage(stage.front, stage.back, there)
    return kept


def _value(after: Placement, moved: Moved) -> float:
    """Seconds per step over the horizon, loading included."""
    return after.cost_s + moved.seconds / HORIZON_STEPS


def _pays(before: Placement, after: Placement, moved: Moved) -> bool:
    return after.cost_s <= before.cost_s * (1 - GAIN_AT_LEAST) and _value(after, moved) < before.cost_s


def _kept(placement: Placement, gone: frozenset[int], sentence: str) -> PlacementRepair:
    return PlacementRepair(placement, gone, Moved({}, 0.0), frozenset(), sentence)


def _changed(before: Placement, after: Placement) -> frozenset[int]:
    """Stages that are not the same; all of them when there are more or fewer."""
    if len(before.stages) != len(after.stages):
        return frozenset(range(max(len(before.stages), len(after.stages))))
    layers = zip(before.layers(), after.layers(), strict=True)
    pairs = zip(before.stages, after.stages, layers, strict=True)
    return frozenset(k for k, (one, two, (m, n)) in enumerate(pairs) if one != two or m != n)


def _known(placement: Placement, machine: int) -> None:
    world: World = placement.costs.world
    if not 0 <= machine < world.servers + world.volunteers:
        raise BadInputError(f"machine: {machine} is not one of the {world.servers + world.volunteers} that are known")


def _name(placement: Placement, machine: int) -> str:
    servers = placement.costs.world.servers
    return f"server {machine}" if machine < servers else f"volunteer {machine - servers}"


def _in_words(before: Placement, after: Placement, machine: int, moved: Moved) -> str:
    """Who moved, and what it costs."""
    world = before.costs.world
    was, now = _roles(before), _roles(after)
    moves = []
    for other in sorted(set(was) | set(now)):
        if was.get(other) == now.get(other) or (other == machine and other not in now):
            continue
        if other not in now:
            moves.append(f"{_name(before, other)} leaves {was[other]}")
        elif other not in was:
            moves.append(f"{_name(before, other)} joins {now[other]}")
        else:
            moves.append(f"{_name(before, other)} goes from {was[other]} to {now[other]}")
    left = "" if machine in now else f"{_name(before, machine)} left {was.get(machine, 'no stage')}; "
    if before.layers() != after.layers():
        moves.append("layers are cut anew")
    text = "; ".join(moves[:6]) + (f"; and {len(moves) - 6} more" if len(moves) > 6 else "")
    others = "the others of its side carry on" if machine < world.servers else "its stage carries on"
    return f"{left}{text or others}{_loading(moved)}"


def _roles(placement: Placement) -> dict[int, str]:
    servers = placement.costs.world.servers
    roles: dict[int, str] = {}
    for k, stage in enumerate(placement.stages):
        for j in stage.front:
            roles[j] = f"stage {k} front"
        for j in stage.back:
            roles[j] = f"stage {k} front and back" if j in stage.front else f"stage {k} back"
        for v in stage.volunteers:
            roles[servers + v] = f"stage {k}"
    return roles


def _loading(moved: Moved) -> str:
    if not moved.bytes_of:
        return ""
    who = "1 machine loads" if len(moved.bytes_of) == 1 else f"{len(moved.bytes_of)} machines load"
    return (
        f"; {who} {moved.total_bytes / 1e9:.3g} GB of parameters and optimizer state, "
        f"the slowest in {moved.seconds:.3g} s"
    )
