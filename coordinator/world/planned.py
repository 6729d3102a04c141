"""A simulated run whose cut is open: the planner's answer to the network that is simulated, before time begins.

Real servers measure the network first; here it is known, so the survey is left out and its answer is exact.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from coordinator.live.plan_builder import Guidance
from coordinator.live.problem import Problem
from coordinator.process.planner import solve
from protocol.base.errors import BadInputError
from protocol.run.run import RunConfig
from protocol.schedule.profile import Link, Network, NetworkFile


def planned(config: RunConfig, network: Network) -> tuple[RunConfig, list[int], Guidance | None]:
    """The run with nothing open, the servers by number in the order of their seats, spares last, and the planner's
    guidance.

    Raises `BadInputError` where the planner finds no plan.
    """
    if not config.asks_planner:
        return config, list(range(network.servers)), None
    answer = solve(Problem(config=config, network=file_of(network)))
    if answer.proposal is None:
        raise BadInputError(answer.sentence)
    number = {machine.name: place for place, machine in enumerate(network.machines[: network.servers])}
    seated = [number[server] for server in chain.from_iterable(answer.proposal.servers)]
    spares = [place for place in range(network.servers) if place not in seated]
    settled = config.settled(len(answer.proposal.servers), answer.proposal.edges)
    return settled, seated + spares, answer.proposal.guidance


def file_of(network: Network) -> NetworkFile:
    """A network as a survey would have found it."""
    links = []
    names = [machine.name for machine in network.machines]
    for place, name in enumerate(names):
        for server in range(network.servers):
            to_s, from_s = network.to_latency_s[place, server], network.from_latency_s[server, place]
            if place != server and np.isfinite(to_s):
                rate = float(network.to_bytes_per_s[place, server])
                links.append(Link(source=name, target=names[server], latency_s=float(to_s), bytes_per_s=rate))
            if place >= network.servers and np.isfinite(from_s):
                rate = float(network.from_bytes_per_s[server, place])
                links.append(Link(source=names[server], target=name, latency_s=float(from_s), bytes_per_s=rate))
    return NetworkFile(kind="network", machines=network.machines, links=tuple(links))
