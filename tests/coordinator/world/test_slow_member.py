"""A volunteer with a slow line joins a run of fast ones, in the simulated world: the run must hardly feel it."""

from __future__ import annotations

from statistics import mean

import pytest
from msgspec.structs import replace

from coordinator.world.churn import Change, Churn
from coordinator.world.members import members
from coordinator.world.swarm import Swarm
from node.server.worth import TOO_LATE
from protocol.run.run import AuditSection, BatchSection, ModelSection, RunConfig, StagesSection
from protocol.schedule.profile import Link, Machine, Network, NetworkFile, build_network

pytestmark = pytest.mark.slow

MBIT = 1e6 / 8
JOINS_S = 100.0
NOTICED_S = 30.0
"""After this the servers have seen what it is worth."""
TOLD_S = 100.0
"""In the middle of its first rest, of two minutes; after that it is tried again."""
CONFIG = RunConfig(
    name="slow",
    steps=10_000,
    model=ModelSection(layers=4, hidden=256, heads=4, kv_heads=4, feed_forward=512, context=128),
    batch=BatchSection(microbatches=16, samples=4),
    stages=StagesSection(count=2, collocated="never"),
    audit=AuditSection(rate=0.0),
)


def network(homes: int, server: float = 1000.0, down: float = 200.0) -> Network:
    """Four servers at 1 Gbit/s, homes at 20/200 Mbit/s, and one volunteer with 2 Mbit/s up; devices alike."""
    lines = {f"server-{n}": (server, server) for n in range(4)}
    lines |= {f"home-{n}": (20.0, down) for n in range(homes)} | {"slow": (2.0, down)}
    machines = tuple(
        Machine(
            name=name, role="server" if name.startswith("server") else "volunteer", forward_flops_per_s=2e10,
            backward_flops_per_s=2e10, memory_bytes=10**10, uplink_bytes_per_s=up * MBIT,
            downlink_bytes_per_s=down * MBIT,
        )
        for name, (up, down) in lines.items()
    )  # fmt: skip
    links = tuple(
        Link(source=a, target=b, latency_s=0.01, bytes_per_s=min(lines[a][0], lines[b][1]) * MBIT)
        for a in lines
        for b in lines
        if a != b and "server" in a + b
    )
    return build_network(NetworkFile(kind="network", machines=machines, links=links))


def test_a_volunteer_with_2_mbit_up_costs_a_run_less_than_a_twentieth() -> None:
    """Once it is known a step takes no twentieth longer than before; until then it has cost less than a twentieth of
    five minutes, and its screen says why it gets nothing."""
    homes = 4
    names = [*(f"home-{n}" for n in range(homes)), "slow"]
    comes = [*(Change(0.0, True, name) for name in names[:-1]), Change(JOINS_S, True, "slow")]
    trace = Churn(tuple(comes), {name: number for number, name in enumerate(names)})
    swarm = Swarm(CONFIG, network(homes), trace, 1, members())
    swarm.run(JOINS_S + TOLD_S)
    slow = swarm.volunteers["slow"].machine
    assert slow is not None and "no work" in slow.waiting_for()  # type: ignore[attr-defined]
    swarm.run(JOINS_S + 150.0)
    steps = [(later.at_s, later.at_s - step.at_s) for step, later in zip(swarm.steps, swarm.steps[1:], strict=False)]
    before = mean(took for at_s, took in steps if 40.0 < at_s < JOINS_S)
    noticed = JOINS_S + NOTICED_S
    after = mean(took for at_s, took in steps if at_s >= noticed)
    lost_s = sum(took - before for at_s, took in steps if JOINS_S <= at_s < noticed)
    assert after < 1.05 * before, (before, after)
    assert lost_s < 0.05 * 300.0, lost_s


def test_a_slow_volunteer_costs_nothing_where_each_of_its_leases_would_cost_a_step_its_time() -> None:
    """Steps of 0.6 s, where its sum alone takes 0.8 s: it had what the others' slots had no room for, and the run was
    half as fast as without it for as long as it stayed. Now it is tried once in minutes."""
    names = [*(f"home-{n}" for n in range(4)), "slow"]
    comes = [*(Change(0.0, True, name) for name in names[:-1]), Change(JOINS_S, True, "slow")]
    trace = Churn(tuple(comes), {name: number for number, name in enumerate(names)})
    small = replace(
        CONFIG,
        model=ModelSection(layers=4, hidden=128, heads=4, kv_heads=4, feed_forward=256, context=128),
        batch=BatchSection(microbatches=8, samples=8),
    )
    swarm = Swarm(small, network(4, 100.0, 80.0), trace, 1, members())
    swarm.run(JOINS_S + 100.0)
    slow = swarm.volunteers["slow"].machine
    assert slow is not None and TOO_LATE in slow.waiting_for()  # type: ignore[attr-defined]
    steps = [(later.at_s, later.at_s - step.at_s) for step, later in zip(swarm.steps, swarm.steps[1:], strict=False)]
    before = mean(took for at_s, took in steps if 40.0 < at_s < JOINS_S)
    after = mean(took for at_s, took in steps if at_s >= JOINS_S)
    assert after < 1.1 * before, (before, after)  # steps have more than one rhythm, some percent apart
