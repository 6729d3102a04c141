"""Whole runs on home lines, in simulated time: `python -m tests.benchmarks.home_runs [ROW ...]`.

The machines of production in the world that measures (`coordinator.world`): two servers a stage, volunteers at 20/200
Mbit/s with 10 TFLOP/s and 12 GB (7 B parameters: 24 GB), eight stages, 256 microbatches of 2,048 tokens a step, the
default forms, where a row does not say otherwise. A row per case, with what the lines alone would need for a step
beside what steps took, and what the first one, from nothing, takes at least. With churn everybody stays 20 minutes in
the mean (24 volunteers: more than one departure a minute), goes without a word, and another computer comes a minute
later. Simulated seconds are the same on every machine; a row takes ten seconds to a minute of a processor, the largest
five.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from dataclasses import dataclass

from coordinator.live.throughput import needs_of
from coordinator.world.churn import Change, Churn, no_churn
from coordinator.world.predicted import predicted
from coordinator.world.swarm import Swarm
from node.world.lanes import WHOLE_P12_BITS
from node.world.member import Members
from protocol.base.forms import TYPICAL_BITS
from protocol.run.course import course_of
from protocol.run.run import (
    BatchSection,
    BoundaryForm,
    DataSection,
    LimitsSection,
    RunConfig,
    StagesSection,
    WireSection,
)
from tests.benchmarks.home_lines import MODELS, home_lines

VOCABULARY = 32_000
UP_BYTES_PER_S = 20e6 / 8
FOUR_BITS = 4.0
"""What `4-bit` is the share of: a line that carries activations and their gradients with four bits an element alone."""
STAY_S, AWAY_S = 1200.0, 60.0


@dataclass(frozen=True)
class Row:
    """One run; `up`: the form of activations from volunteers to servers; `cut`: as `stages.cut` has it."""

    name: str
    model: str
    volunteers: int
    steps: int
    gigabytes: int = 12
    churn: bool = False
    up: BoundaryForm = "q8"
    stages: int = 8
    microbatches: int = 256
    cut: str = "even"


ROWS = (
    Row("1.1B-24", "1.1 B", 24, 4),
    Row("1.1B-32", "1.1 B", 32, 4),
    Row("1.1B-200", "1.1 B", 200, 6),
    Row("1.1B-24-churn", "1.1 B", 24, 4, churn=True),
    Row("1.1B-32-d4", "1.1 B", 32, 12, up="d4"),
    Row("1.1B-32-d4-planned", "1.1 B", 32, 12, up="d4", cut="planned"),
    Row("7B-24", "7 B", 24, 3, gigabytes=24),
    Row("7B-32", "7 B", 32, 3, gigabytes=24),
    Row("7B-64-d4", "7 B", 64, 3, gigabytes=24, up="d4", stages=16, microbatches=1024),
    Row("7B-24-churn", "7 B", 24, 3, gigabytes=24, churn=True),
)


def config_of(row: Row) -> RunConfig:
    """The run of a row, in the default forms but for what it says; as many servers in any case."""
    fronts, backs = (2, 0) if row.up == "d4" else (1, 1)
    return RunConfig(
        model=MODELS[row.model],
        steps=row.steps,
        data=DataSection(tokenizer=f"bpe:{VOCABULARY}"),
        batch=BatchSection(microbatches=row.microbatches, samples=1),
        stages=StagesSection(count=row.stages, cut=row.cut, front_servers=fronts, back_servers=backs),
        wire=WireSection(activations_up=row.up),
        limits=LimitsSection(lease_s=600.0),
    )


def line_s(config: RunConfig, volunteers: int) -> float:
    """Seconds a step of the slowest stage's uplinks, if as many work for each and none is ever idle."""
    needs = needs_of(config, course_of(config), VOCABULARY)
    crew = volunteers / config.stages.count
    return max((n.visits * n.up_bytes / crew + n.contribution_bytes) / UP_BYTES_PER_S for n in needs)


def first_least_s(swarm: Swarm) -> float:
    """Seconds at least until the first step can be closed by those crews, beside what servers and the ledgers do.

    A stage begins when its members have their parameters, which its servers' lines and their own carry, and when a
    microbatch has come to it; then it sends all that it has to, and in the end each a sum. What it sends last is an
    input gradient, whose way back goes through all stages before it, and then the first stage sends its sums.
    """
    config, network = swarm.config, swarm.network
    needs = needs_of(config, course_of(config), VOCABULARY)
    machine = network.machines[network.servers]
    up, down = machine.uplink_bytes_per_s, machine.downlink_bytes_per_s
    crews = Counter(member.stage for member in swarm.machine.roster.volunteers())
    servers = config.stages.front_servers + config.stages.back_servers
    begins_s, latest_s, back_s = 0.0, 0.0, 0.0
    way_s = 2 * float(network.to_latency_s[network.servers, 0])
    for stage, need in enumerate(needs):
        whole_bytes = need.version_bytes * WHOLE_P12_BITS / TYPICAL_BITS[config.wire.parameters]
        server_up = servers * network.machines[0].uplink_bytes_per_s
        begins_s = max(begins_s, whole_bytes / down, whole_bytes * crews[stage] / server_up)
        sent_s = begins_s + need.visits * need.up_bytes / crews[stage] / up
        latest_s = max(latest_s, sent_s + need.contribution_bytes / up)
        latest_s = max(latest_s, sent_s + back_s + needs[0].contribution_bytes / up if stage else 0.0)
        tensors = 2 if 0 < stage < config.stages.count - 1 else 1
        hop_s = way_s + need.up_bytes / tensors / up
        begins_s += hop_s + need.flops / 3 / machine.forward_flops_per_s
        back_s += (hop_s if stage else 0.0) + 2 * need.flops / 3 / machine.backward_flops_per_s
    return latest_s


def come_and_go(names: list[str], until_s: float, seed: int) -> Churn:
    """Everybody is there from the beginning and stays for an exponential time; a minute later another one comes."""
    rng, changes, kinds = random.Random(seed), [], {}
    for number, name in enumerate(names):
        at_s, life = 0.0, 0
        while at_s < until_s:
            kinds[f"{name}.{life}"] = number
            changes.append(Change(at_s, True, f"{name}.{life}"))
            at_s += rng.expovariate(1 / STAY_S)
            changes.append(Change(at_s, False, f"{name}.{life}"))
            at_s, life = at_s + AWAY_S, life + 1
    return Churn(tuple(sorted(changes, key=lambda change: change.at_s)), kinds)


def run(row: Row, seed: int = 1) -> Swarm:
    """Until all steps are closed, or eight times as long as the lines would need."""
    config = config_of(row)
    network = home_lines(None, 2 * row.stages, row.volunteers, row.gigabytes)
    names = [machine.name for machine in network.machines[network.servers :]]
    until_s = 8 * row.steps * line_s(config, row.volunteers)
    churn = come_and_go(names, until_s, seed) if row.churn else no_churn(names)
    swarm = Swarm(config, network, churn, seed, Members)
    swarm.run(until_s)
    return swarm


def main() -> int:
    """Prints a row per case; 1 where steps are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="names of rows; all without any")
    names = parser.parse_args().rows
    missing = 0
    print(
        "row                  line s   planned   first at   at least   later s   of line   tasks   left   tok/s   4-bit"
    )
    for row in [row for row in ROWS if not names or row.name in names]:
        swarm = run(row)
        config, steps = swarm.config, swarm.steps
        missing += len(steps) < row.steps
        if not steps:
            print(f"{row.name:18}  no step closed in {swarm.world.now:,.0f} s", flush=True)
            continue
        need_s = line_s(config, row.volunteers)
        plan = predicted(swarm)
        later_s = (steps[-1].at_s - steps[0].at_s) / max(1, len(steps) - 1)
        # Forwards and backwards in every stage but the last, where the route's end is one task.
        needed = row.microbatches * (2 * row.stages - 1) * len(steps)
        done = sum(swarm.members.executed[step.number] for step in steps)
        tokens_per_s = len(steps) * config.step_tokens / steps[-1].at_s / (row.volunteers / row.stages)
        four_bit = UP_BYTES_PER_S * 8 / (2 * config.model.hidden * FOUR_BITS)
        print(
            f"{row.name:18} {need_s:>8.0f} {plan.step_s if plan else float('nan'):>9.0f} {steps[0].at_s:>10.0f}"
            f" {first_least_s(swarm):>9.0f} {later_s:>9.0f} {len(steps) * need_s / steps[-1].at_s:>8.2f}"
            f" {done / needed:>7.3f} {swarm.departures:>5} {tokens_per_s:>7.0f} {tokens_per_s / four_bit:>7.2f}",
            flush=True,
        )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
