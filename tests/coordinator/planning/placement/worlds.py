"""Made-up placement problems for tests."""

from __future__ import annotations

import random

import numpy as np

from coordinator.planning.placement.problem import World


def random_world(rng: random.Random, servers: int, volunteers: int, layers: int = 12) -> World:
    """Machines in three regions with slow links between them; every number drawn from `rng`."""
    draw = np.random.default_rng(rng.randrange(2**32))
    region = draw.integers(0, 3, servers + volunteers)
    apart = region[:, None] != region[None, :servers]
    latency = np.where(apart, draw.uniform(0.05, 0.15, apart.shape), draw.uniform(0.001, 0.02, apart.shape))
    rate = np.where(apart, draw.uniform(1500, 4000, apart.shape), draw.uniform(5000, 25000, apart.shape))
    np.fill_diagonal(latency[:servers], 0.0)
    return World(
        server_power=draw.uniform(5000, 20000, servers),
        volunteer_power=draw.uniform(1000, 9000, volunteers),
        server_latency_s=latency[:servers],
        server_slowness=1 / rate[:servers],
        front_latency_s=latency[servers:],
        front_slowness=1 / rate[servers:],
        back_latency_s=latency[servers:],
        back_slowness=2 / rate[servers:],
        layers=layers,
        layers_max=layers,
        tokens=256.0,
        microbatches=16,
    )
