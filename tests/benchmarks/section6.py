"""The published SkipPipe settings 18/4/25 and 20/6/33, rebuilt from the region table with the same rules."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
LOCATIONS = [
    "Sofia",
    "Singapore",
    "Ireland",
    "Sydney",
    "Frankfurt",
    "Seoul",
    "Oregon",
    "Ohio",
    "Tokyo",
    "Amsterdam",
    "Virginia",
]  # node i sits in location i mod 11
ACTIVATION_BYTES = 16_777_324  # per sample
GRADIENT_BYTES = 1_346_446_748  # per node
GIB = 2**30
HOP_S = 0.35  # added to every transfer
DEFAULT_LATENCY_MS, DEFAULT_RATE = 10.0, 0.80  # inside a location, and for pairs the table lacks
LAYER_S = 0.095  # forward of one layer and one sample
REST_FORWARD_S, REST_BACKWARD_S = 0.09, 0.13
MEMORY = 3
MICROBATCHES_PER_HEAD = 6


@dataclass(frozen=True)
class Setting:
    """One block of three rows; `published` and `no_skip_mended` by samples per microbatch, in seconds."""

    name: str
    sizes: tuple[int, ...]
    route_stages: int
    layers_per_node: int
    swaps_max: int
    published_s: dict[int, float]
    no_skip_mended_s: dict[int, float]
    gain_at_least: float

    @property
    def nodes(self) -> int:
        return sum(self.sizes)

    @property
    def microbatches(self) -> int:
        return self.sizes[0] * MICROBATCHES_PER_HEAD


SETTINGS = (
    Setting(
        "18/4/25",
        (6, 4, 4, 4),
        3,
        6,
        1,
        {1: 21.2, 2: 34.8, 4: 65.2},
        {1: 36.7, 2: 59.8, 4: 108.0},
        0.40,
    ),
    Setting(
        "20/6/33",
        (5, 3, 3, 3, 3, 3),
        4,
        4,
        2,
        {1: 18.5, 2: 31.2, 4: 53.9},
        {1: 39.1, 2: 62.4, 4: 105.6},
        0.50,
    ),
)


def pair_table() -> dict[frozenset[str], tuple[float, float]]:
    """{two locations: (latency in ms, rate in the table's unit)}"""
    rows = csv.DictReader((DATA / "skippipe_v1_regions.csv").read_text().splitlines())
    return {
        frozenset((row["a"], row["b"])): (float(row["latency_ms"]), float(row["bandwidth_as_written"])) for row in rows
    }


def latency_and_rate(nodes: int) -> tuple[list[list[float]], list[list[float]]]:
    """Latency in seconds and bytes per second between all nodes, as the published simulator counts them."""
    table = pair_table()
    places = [LOCATIONS[node % len(LOCATIONS)] for node in range(nodes)]
    default = (DEFAULT_LATENCY_MS, DEFAULT_RATE)
    pairs = [[table.get(frozenset((a, b)), default) for b in places] for a in places]
    latency = [[pair[0] / 1000 + HOP_S for pair in row] for row in pairs]
    rate = [[GIB * pair[1] / 2 for pair in row] for row in pairs]
    return latency, rate


def transfer_s(nodes: int, size_bytes: float) -> list[list[float]]:
    """Seconds to send `size_bytes` between all pairs; 0 from a node to itself."""
    latency, rate = latency_and_rate(nodes)
    return [[0.0 if i == j else latency[i][j] + size_bytes / rate[i][j] for j in range(nodes)] for i in range(nodes)]
