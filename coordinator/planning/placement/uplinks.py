"""What the routes of a swarm share: every hop goes over a back and a front server, and each machine has one line.

Counted in tokens instead of bytes, as the placement does. A machine sends all that it sends over its uplink and gets
all that it gets over its downlink, so a server that relays for many volunteers slows them all down.
"""

from __future__ import annotations

import numpy as np

from coordinator.planning.placement.cost import Placement
from coordinator.planning.placement.swarm import SwarmRoutes, quickest_servers
from coordinator.planning.routes.shared import Sharing
from coordinator.planning.simulator.links import Network
from protocol.schedule.profile import Floats


def swarm_sharing(placement: Placement, swarm: SwarmRoutes) -> Sharing:
    """The shared lines under the routes of `swarm`; alone on them a hop takes what the route model says."""
    world = placement.costs.world
    servers, machines = world.servers, world.servers + world.volunteers

    def whole(between: Floats, back: Floats, front: Floats, none: float) -> Floats:
        """From any machine to any other; volunteers never talk to each other."""
        matrix = np.full((machines, machines), none)
        matrix[:servers, :servers] = between
        matrix[servers:, :servers] = back
        matrix[:servers, servers:] = front.T
        return matrix

    latency = whole(world.server_latency_s, world.back_latency_s, world.front_latency_s, 0.0)
    slowness = whole(world.server_slowness, world.back_slowness, world.front_slowness, np.inf)
    with np.errstate(divide="ignore"):
        rate = 1.0 / slowness
    up = down = None
    if world.traffic is not None:
        up = (1.0 / np.concatenate([world.traffic.server_up, world.traffic.volunteer_up])).tolist()
        down = (1.0 / np.concatenate([world.traffic.server_down, world.traffic.volunteer_down])).tolist()
    stage_of = swarm.model.stage_of_node

    def legs(source: int, target: int) -> list[tuple[int, int]]:
        one, two = swarm.members[source], swarm.members[target]
        back, front = quickest_servers(placement, one, stage_of[source], two, stage_of[target])
        return [(one, back), (back, front), (front, two)]

    return Sharing(Network(latency.tolist(), rate.tolist(), up, down), world.tokens, legs)
