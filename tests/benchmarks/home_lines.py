"""Plans for home lines: `python -m tests.benchmarks.home_lines [--networks 10] [--budget-s 8]`.

Sixteen servers with 1 Gbit/s and 200 volunteers, a LLaMA of 1.1 and one of 7 billion parameters, 256 microbatches of
one sample of 2,048 tokens, 2 bytes a value on the wire. The first network has equal volunteers at 20/200 Mbit/s; the
others are drawn from a seed: uplinks of 5 to 80 Mbit/s, downlinks of 50 to 400, devices of 3 to 60 TFLOP/s, 8 to 24 GB.
A row per network: seconds a step of the plan found and of the even plan (8 stages, as the file asks) by the same cost,
the best even plan of any number of stages, the fraction of the proven bound, and how many are idle. Fails where an even
plan is faster, or a search takes 20 s of processor time.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass

from coordinator.planning.placement.pool_search import even_plan, search_pools
from coordinator.planning.placement.pools import Pools
from coordinator.planning.placement.run_sizes import pool_sizes
from protocol.run.run import BatchSection, DataSection, ModelSection, RunConfig, StagesSection, WireSection
from protocol.schedule.profile import Machine, Network, NetworkFile, SiteLink, build_network

SERVERS, VOLUNTEERS = 16, 200
MBIT = 1e6 / 8
LIMIT_S = 20.0
MODELS = {
    "1.1 B": ModelSection(layers=22, hidden=2048, heads=32, kv_heads=4, feed_forward=5632, context=2048),
    "7 B": ModelSection(layers=32, hidden=4096, heads=32, kv_heads=32, feed_forward=11008, context=2048),
}


@dataclass(frozen=True)
class Line:
    """Of a volunteer and of a server, and how far they are from each other."""

    up_mbit: float = 20.0
    down_mbit: float = 200.0
    latency_s: float = 0.025
    server_mbit: float = 1000.0


def home_lines(
    seed: int | None,
    servers: int = SERVERS,
    volunteers: int = VOLUNTEERS,
    device_gigabytes: int = 12,
    line: Line = Line(),
) -> Network:
    """Servers at one site, volunteers each at its own; all alike without a seed, with devices of that size and that
    line."""
    rng = random.Random(seed)
    machines = [
        Machine(
            name=f"server-{number}",
            role="server",
            site="dc",
            forward_flops_per_s=1e11,
            backward_flops_per_s=1e11,
            memory_bytes=128 * 10**9,
            uplink_bytes_per_s=line.server_mbit * MBIT,
            downlink_bytes_per_s=line.server_mbit * MBIT,
        )
        for number in range(servers)
    ]
    sites = [SiteLink(a="dc", b="dc", latency_s=0.001, bytes_per_s=max(1e9, line.server_mbit * MBIT))]
    for number in range(volunteers):
        up, down, flops, gigabytes = line.up_mbit, line.down_mbit, 1e13, device_gigabytes
        if seed is not None:
            up, down = rng.uniform(5, 80), rng.uniform(50, 400)
            flops, gigabytes = rng.choice((3e12, 1e13, 3e13, 6e13)), rng.choice((8, 12, 16, 24))
        machines.append(
            Machine(
                name=f"home-{number}",
                role="volunteer",
                site=f"home-{number}",
                forward_flops_per_s=flops,
                backward_flops_per_s=flops,
                memory_bytes=gigabytes * 10**9,
                uplink_bytes_per_s=up * MBIT,
                downlink_bytes_per_s=down * MBIT,
            )
        )
        sites.append(SiteLink(a="dc", b=f"home-{number}", latency_s=line.latency_s, bytes_per_s=1e9))
    return build_network(NetworkFile(kind="network", machines=tuple(machines), sites=tuple(sites)))


def run_of(model: ModelSection) -> RunConfig:
    """A run with bf16 on the wire, eight stages asked for."""
    return RunConfig(
        model=model,
        data=DataSection(tokenizer="bpe:32000"),
        batch=BatchSection(microbatches=256, samples=1),
        stages=StagesSection(count=8),
        wire=WireSection(activations_up="bf16", activations_down="bf16", gradients="bf16", parameters="bf16"),
    )


def main() -> int:
    """Prints a row per model and network; 1 where a demand is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=10, help="random networks beside the equal one")
    parser.add_argument("--budget-s", type=float, default=8.0)
    arguments = parser.parse_args()
    missed = 0
    print("model   network   step s   even 8   best even   stages   of bound   idle   cpu s")
    for name, model in MODELS.items():
        for seed in (None, *range(arguments.networks)):
            pools = Pools(home_lines(seed), pool_sizes(run_of(model), recompute=True))
            began = time.process_time()
            found = search_pools(pools, 0, arguments.budget_s, even_stages=8)
            spent_s = time.process_time() - began
            visits = float(pools.sizes.microbatches)
            evens = [even_plan(pools, count, [visits] * count).step_s for count in range(1, SERVERS // 2 + 1)]
            bad = found.step_s > min(evens) or spent_s > LIMIT_S
            missed += bad
            label = "equal" if seed is None else f"seed {seed}"
            print(
                f"{name:6}  {label:8}{found.step_s:>8.1f} {found.even.step_s:>8.1f} "
                f"{min(evens):>11.1f} {len(found.plan.stages):>8} {found.fraction_of_bound:>10.0%} "
                f"{len(found.idle):>6} {spent_s:>7.1f}{'   MISSED' if bad else ''}",
                flush=True,
            )
    print("all as demanded" if not missed else f"{missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
