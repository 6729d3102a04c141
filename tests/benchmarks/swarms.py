"""Made-up swarms for benchmarks and tests: servers and volunteers on sites around the world, drawn from a
seed.
"""

from __future__ import annotations

import math
import random

from coordinator.planning.placement.swarm import ModelSizes
from protocol.schedule.profile import Link, Machine, Network, NetworkFile, SiteLink, build_network

SITES = 20
LAYER_PARAMETERS = 202_383_360


def swarm(servers: int, volunteers: int, seed: int = 0, measured_links: int = 2_000) -> Network:
    """A network on `SITES` sites: latency by distance, data-centre servers, home uplinks of 50 to 1,000
    Mbit/s.

    Servers have little compute (that is what volunteers are for) and most of the bandwidth.
    """
    rng = random.Random(seed)
    spots = [(rng.random(), rng.random()) for _ in range(SITES)]
    sites = [
        SiteLink(
            a=f"site-{a}",
            b=f"site-{b}",
            latency_s=0.002 + 0.12 * math.dist(spots[a], spots[b]),
            bytes_per_s=1.2e9 if a == b else 1.2e8 / (1 + 4 * math.dist(spots[a], spots[b])),
        )
        for a in range(SITES)
        for b in range(a + 1)
    ]
    machines = []
    for number in range(servers + volunteers):
        server = number < servers
        flops = rng.choice((1e12, 2e12)) if server else rng.choice((5e12, 1e13, 2e13, 4e13))
        machines.append(
            Machine(
                name=f"{'server' if server else 'volunteer'}-{number}",
                role="server" if server else "volunteer",
                forward_flops_per_s=flops,
                backward_flops_per_s=flops,
                memory_bytes=rng.choice((24, 48)) * 10**9 if server else rng.choice((8, 12, 16, 24)) * 10**9,
                uplink_bytes_per_s=1.25e9 if server else 6e6 * 20 ** rng.random(),
                downlink_bytes_per_s=1.25e9 if server else rng.uniform(12e6, 125e6),
                site=f"site-{rng.randrange(SITES)}",
            )
        )
    links = []
    for _ in range(min(measured_links, volunteers * servers)):
        machine = machines[rng.randrange(servers, servers + volunteers)]
        links.append(
            Link(
                source=machine.name,
                target=machines[rng.randrange(servers)].name,
                latency_s=rng.uniform(0.01, 0.2),
                bytes_per_s=machine.uplink_bytes_per_s * rng.uniform(0.5, 1.0),
            )
        )
    return build_network(NetworkFile(kind="network", machines=tuple(machines), sites=tuple(sites), links=tuple(links)))


def seven_billion(microbatches: int = 256) -> ModelSizes:
    """A LLaMA of 7 billion parameters: 32 layers of 202 million, hidden 4,096, microbatches of 65,536 tokens.

    Gradients travel in bf16; a step of 16 million tokens lets them hide behind the work of many machines.
    """
    layer = LAYER_PARAMETERS
    return ModelSizes(
        layers=32,
        microbatch_tokens=65_536,
        microbatches=microbatches,
        forward_flops=2.0 * layer,
        backward_flops=4.0 * layer,
        held_bytes=8.0 * layer,
        server_held_bytes=12.0 * layer,
        kept_bytes=2.0 * 4096,
        activation_bytes=2.0 * 4096,
        gradient_bytes=2.0 * layer,
    )
