"""DT-FM's own 64-node networks: `python -m tests.benchmarks.dtfm_cases`.

The cost of our arrangement beside the published genetic search (and its seconds), all by the published cost rule and
with the published sizes. The table prints two decimals; "rule" is the arrangement that it names beside the search, one
node of each site per stage, counted exactly: it must round to the table's figure, and in every case it is what the
search ended with. "bound" is what no arrangement goes below. Exits 1 when a rule does not round to the table, when we
cost more than the rule or than the table's rounding allows, or take 5 s.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from coordinator.planning.placement.arrange import Arrangement, arrange
from coordinator.planning.placement.bound import arrangement_bound
from protocol.schedule.profile import Floats

DATA = Path(__file__).parents[1] / "data"
STAGES, REPLICAS = 8, 8
# A stage of 3 of 24 layers of GPT-3 XL (1.3e9 parameters of 4 bytes); 125,000 tokens of 2,024 (sic) values of 2 bytes.
# The published rule divides the activation by 2^30 and then counts 10^9 bits per Gbit, so that is its size here.
GRADIENT_BYTES = 1.3e9 * 4 * 3 / 24
ACTIVATION_BYTES = 125_000 * 2024 * 2 / 2**30 * 1e9
CASES = (
    ("0 on-demand data centre", "dtfm_case0_ondemand_datacenter_64.json", 3.44, 79),
    ("1 spot data centre", "dtfm_case1_spot_datacenter_64.json", 49.50, 191),
    ("3 four US regions", "dtfm_case3_regional_64.json", 34.80, 45),
)


def network(file: str) -> tuple[Floats, Floats]:
    """Latency in seconds and bytes per second, both (64, 64)."""
    raw = json.loads((DATA / file).read_text())
    return np.array(raw["latency_ms"]) / 1e3, np.array(raw["bandwidth_gbps"]) * 1e9 / 8


def ours(latency: Floats, rate: Floats) -> Arrangement:
    """What our search finds."""
    return arrange(latency, rate, [REPLICAS] * STAGES, ACTIVATION_BYTES, GRADIENT_BYTES)


def one_of_each_site(latency: Floats, rate: Floats) -> Arrangement:
    """The rule: nodes are listed site by site, so dealing them out in turn gives every stage one of each."""
    dealt = [range(stage, STAGES * REPLICAS, STAGES) for stage in range(STAGES)]
    return arrange(latency, rate, [REPLICAS] * STAGES, ACTIVATION_BYTES, GRADIENT_BYTES, start=dealt, rounds=0)


def bound_s(latency: Floats, rate: Floats) -> float:
    """What no arrangement goes below."""
    return arrangement_bound(
        latency + ACTIVATION_BYTES / rate, 2 * (latency + GRADIENT_BYTES / REPLICAS / rate), STAGES
    )


def main() -> int:
    missed = []
    heads = ("table", "its s", "rule", "ours", "data", "pipeline", "bound", "s")
    print(f"{'case':25s} " + " ".join(f"{head:>9s}" for head in heads))
    for name, file, table, their_s in CASES:
        latency, rate = network(file)
        rule = one_of_each_site(latency, rate)
        began = time.perf_counter()
        found = ours(latency, rate)
        seconds = time.perf_counter() - began
        bound = bound_s(latency, rate)
        print(
            f"{name:25s} {table:9.2f} {their_s:9d} {rule.cost_s:9.4f} {found.cost_s:9.4f} {found.data_s:9.4f} "
            f"{found.pipeline_s:9.4f} {bound:9.4f} {seconds:9.2f}  "
            + ("proved optimal" if found.cost_s <= bound * (1 + 1e-9) else f"{bound / found.cost_s:.1%} of the bound"),
            flush=True,
        )
        if round(rule.cost_s, 2) != table:
            missed.append(f"case {name}: the rule costs {rule.cost_s:.4f}, which is not the table's {table:.2f}")
        if found.cost_s > rule.cost_s * (1 + 1e-9) or round(found.cost_s, 2) > table:
            missed.append(f"case {name}: above the published cost")
        if seconds >= 5:
            missed.append(f"case {name}: {seconds:.1f} s")
    print("\n".join(missed) if missed else "pass")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
