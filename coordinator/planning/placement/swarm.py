"""From a measured network and a model to a placement, and from a placement to routes of single microbatches.

The link between two members of neighbouring stages runs over servers: the sender's back server, then the
receiver's front server, whichever pair is quickest. So the routes of a swarm are searched on the graph of
members alone, and the servers of each hop follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coordinator.planning.placement.cost import Placement
from coordinator.planning.placement.problem import Traffic, World
from coordinator.planning.routes.model import RouteModel, even_visits
from protocol.base.errors import BadInputError
from protocol.schedule.profile import Floats, Network

DEAD_LINE_S = 1e9
"""Seconds per token of a line without any bandwidth, where infinity would turn no tokens at all into no
number.
"""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What a placement needs to know of a model; per layer, all layers alike.

    `held_bytes` stay on a member for one layer (weights and gradients; on a server, the optimizer as well,
    shared by at least two servers: `server_held_bytes`). `kept_bytes` stand for one token of one layer from
    its forward to its backward, `activation_bytes` travel for one token between stages.
    """

    layers: int
    microbatch_tokens: int
    microbatches: int
    forward_flops: float
    backward_flops: float
    held_bytes: float
    server_held_bytes: float
    kept_bytes: float
    activation_bytes: float
    gradient_bytes: float
    in_flight: int = 4
    delayed: bool = True


def world_of(network: Network, sizes: ModelSizes, *, closed: bool = False, may_bench: bool = True) -> World:
    """The placement problem of a network. Raises `BadInputError` when there are no servers or no memory."""
    servers = network.servers
    if servers < 2:
        raise BadInputError(f"machines: {servers} servers; a stage needs two, one in front and one behind")
    power = np.array(
        [
            1.0
            / (sizes.forward_flops / machine.forward_flops_per_s + sizes.backward_flops / machine.backward_flops_per_s)
            for machine in network.machines
        ]
    )
    memory = np.array([machine.memory_bytes for machine in network.machines], dtype=np.float64)
    up = np.array([machine.uplink_bytes_per_s for machine in network.machines], dtype=np.float64)
    down = np.array([machine.downlink_bytes_per_s for machine in network.machines], dtype=np.float64)
    with np.errstate(divide="ignore"):
        to = sizes.activation_bytes / network.to_bytes_per_s
        back = sizes.activation_bytes / network.from_bytes_per_s
        up_s = np.minimum(sizes.activation_bytes / up, DEAD_LINE_S)
        down_s = np.minimum(sizes.activation_bytes / down, DEAD_LINE_S)
    # A member keeps its share of the microbatches in flight; that share is at most its power over what a
    # stage of average power has when there are as many stages as there can be.
    stages = max(1, min(servers // 2, sizes.layers))
    share = np.minimum(1.0, power * stages / power.sum())
    kept = sizes.in_flight * sizes.microbatch_tokens * share * sizes.kept_bytes
    held = np.where(np.arange(len(memory)) < servers, sizes.server_held_bytes, sizes.held_bytes)
    layers = np.floor(memory / (held + kept))
    if not (layers[:servers] >= 1).sum() >= 2:
        raise BadInputError("machines: fewer than two servers have memory for one layer of the model")
    return World(
        server_power=power[:servers],
        volunteer_power=power[servers:],
        server_latency_s=network.to_latency_s[:servers],
        server_slowness=to[:servers],
        front_latency_s=network.from_latency_s[:, servers:].T.copy(),
        front_slowness=back[:, servers:].T.copy(),
        back_latency_s=network.to_latency_s[servers:],
        back_slowness=to[servers:],
        layers=sizes.layers,
        layers_max=sizes.layers,
        tokens=float(sizes.microbatch_tokens),
        microbatches=sizes.microbatches,
        server_layers_max=layers[:servers],
        volunteer_layers_max=layers[servers:],
        traffic=Traffic(
            server_up=up_s[:servers],
            server_down=down_s[:servers],
            volunteer_up=up_s[servers:],
            volunteer_down=down_s[servers:],
            gradient_tokens=sizes.gradient_bytes / sizes.activation_bytes,
            delayed=sizes.delayed,
        ),
        closed=closed,
        may_bench=may_bench,
        may_spare=True,
    )


class SwarmRoutes(NamedTuple):
    """A route problem over the members of a placement: `members[i]` is the machine behind node i."""

    model: RouteModel
    members: tuple[int, ...]


def member_model(
    world: World, placement: Placement, *, skip_stages: int = 0, memory: int = 3, swaps_max: int = 0
) -> SwarmRoutes:
    """The route problem of a placement, members being all its servers and volunteers.

    As many routes are in flight as the tightest stage holds with `memory` routes per member; the rest of the
    microbatches follow on the same routes. Machines are numbered as in the network: servers, then volunteers.
    """
    stages = placement.stages
    members: list[int] = []
    stage_of: list[int] = []
    for k, stage in enumerate(stages):
        members += stage.servers + tuple(world.servers + v for v in sorted(stage.volunteers))
        stage_of += [k] * (len(members) - len(stage_of))
    count = len(stages)
    route_stages = count - skip_stages
    if not 1 <= route_stages <= count:
        raise BadInputError(f"skip: {skip_stages} of {count} stages cannot be skipped")
    sizes = [stage_of.count(k) for k in range(count)]
    others = min(sizes[1:], default=sizes[0]) * memory
    if route_stages > 1:  # each other stage is on (route_stages - 1)/(count - 1) of the routes
        others = others * (count - 1) // (route_stages - 1)
    at_once = max(1, min(sizes[0] * memory, others, world.microbatches))
    while any(
        visits > size * memory
        for visits, size in zip(even_visits(at_once, count, route_stages)[1:], sizes[1:], strict=True)
    ):
        at_once -= 1
    forward_s, backward_s, loss_s = member_work(world, placement, members, stage_of)
    heads_at = sorted(range(sizes[0]), key=lambda node: (forward_s[node], node))
    heads = tuple(heads_at[number % len(heads_at)] for number in range(at_once))
    share, surplus = divmod(world.microbatches, at_once)
    model = RouteModel(
        stage_of_node=tuple(stage_of),
        forward_s=forward_s,
        backward_s=backward_s,
        loss_s=loss_s,
        link_s=member_links(world, placement, members, stage_of),
        heads=heads,
        route_stages=route_stages,
        swaps_max=swaps_max,
        memory=(memory,) * len(members),
        visits=even_visits(at_once, count, route_stages),
        repeats=tuple(share + (number < surplus) for number in range(at_once)),
    )
    return SwarmRoutes(model, tuple(members))


def member_work(
    world: World, placement: Placement, members: Sequence[int], stage_of: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Seconds of forward, backward (twice as long) and loss of a whole microbatch on each member."""
    layers = np.array(placement.layers())[list(stage_of)]
    power = np.concatenate([world.server_power, world.volunteer_power])[list(members)]
    third = world.tokens * layers / power / 3
    return tuple(third.tolist()), tuple((2 * third).tolist()), tuple((third / 4 / np.maximum(1, layers)).tolist())


def member_links(
    world: World,
    placement: Placement,
    members: Sequence[int],
    stage_of: Sequence[int],
    before: Floats | None = None,
    changed: Collection[int] = (),
) -> Floats:
    """Seconds for a microbatch from member to member over back and front servers, (n, n); the return to stage 0 as
    well. A member that is a server of the side in question reaches it at once.

    With `before` (of the first of these members) only links from and to the stages in `changed` are counted.
    """
    tokens = world.tokens
    servers = world.servers
    to_server = np.concatenate(
        [
            world.server_latency_s + tokens * world.server_slowness,
            world.back_latency_s + tokens * world.back_slowness,
        ]
    )
    from_server = np.concatenate(
        [
            (world.server_latency_s + tokens * world.server_slowness).T,
            world.front_latency_s + tokens * world.front_slowness,
        ]
    )
    for matrix in (to_server, from_server):
        matrix[np.arange(servers), np.arange(servers)] = 0.0
    between = world.server_latency_s + tokens * world.server_slowness
    np.fill_diagonal(between, 0.0)
    groups = [np.flatnonzero(np.array(stage_of) == k) for k in range(len(placement.stages))]
    machines = np.array(members)
    link = np.full((len(members), len(members)), math.inf)
    if before is not None:
        link[: len(before), : len(before)] = before
    for a, one in enumerate(placement.stages):
        out = to_server[np.ix_(machines[groups[a]], np.array(one.back))]
        for b, two in enumerate(placement.stages):
            if a == b or (before is not None and a not in changed and b not in changed):
                continue
            across = between[np.ix_(np.array(one.back), np.array(two.front))]
            into = from_server[np.ix_(machines[groups[b]], np.array(two.front))]
            to_front = (out[:, :, None] + across[None]).min(axis=1)  # (members of a, fronts of b)
            best = np.full((len(groups[a]), len(groups[b])), math.inf)
            for column in range(len(two.front)):
                np.minimum(best, to_front[:, column, None] + into[None, :, column], out=best)
            link[np.ix_(groups[a], groups[b])] = best
    return link


class RouteHop(NamedTuple):
    """One hop of a microbatch's route: the stage, who computes, and the servers on either side (machines)."""

    stage: int
    front: int
    member: int
    back: int


def quickest_servers(placement: Placement, one: int, stage: int, two: int, next_stage: int) -> tuple[int, int]:
    """The back server of `stage` and the front server of `next_stage` over which machine `one` reaches `two` soonest.

    Where a machine is itself a server it may be its own front or back.
    """
    world = placement.costs.world
    tokens, servers = world.tokens, world.servers
    back, front = np.array(placement.stages[stage].back), np.array(placement.stages[next_stage].front)

    def delay(latency: Floats, slowness: Floats) -> Floats:
        return np.asarray(latency + tokens * slowness)

    between = delay(world.server_latency_s[np.ix_(back, front)], world.server_slowness[np.ix_(back, front)])
    between[back[:, None] == front[None, :]] = 0.0
    if one < servers:
        out = delay(world.server_latency_s[one, back], world.server_slowness[one, back])
        out[back == one] = 0.0
    else:
        out = delay(world.back_latency_s[one - servers, back], world.back_slowness[one - servers, back])
    if two < servers:
        into = delay(world.server_latency_s[front, two], world.server_slowness[front, two])
        into[front == two] = 0.0
    else:
        into = delay(world.front_latency_s[two - servers, front], world.front_slowness[two - servers, front])
    total = out[:, None] + between + into[None, :]
    b, f = divmod(int(total.argmin()), len(front))
    return int(back[b]), int(front[f])


def hops_of(placement: Placement, swarm: SwarmRoutes, route: tuple[int, ...]) -> list[RouteHop]:
    """Which servers a route passes: for every hop the pair of back and front server that is quickest."""
    order = [swarm.model.stage_of_node[node] for node in route]
    machines = [swarm.members[node] for node in route]
    count = len(route)
    if count == 1:
        only = placement.stages[order[0]]
        return [RouteHop(order[0], only.front[0], machines[0], only.back[0])]
    fronts, backs = [-1] * count, [-1] * count
    for place in range(count):
        after = (place + 1) % count
        backs[place], fronts[after] = quickest_servers(
            placement, machines[place], order[place], machines[after], order[after]
        )
    return [RouteHop(order[i], fronts[i], machines[i], backs[i]) for i in range(count)]
