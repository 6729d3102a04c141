"""Seeds in which one to three kinds of faults blow, often, and no others: `python -m tests.simulation.few_kinds 17`.

A nightly seed draws two fifths of all kinds, so that what takes two of them within a second, and quiet otherwise, is
rare there; and a lease of 8 s that runs out covers up whatever waits for that. Here half of the runs have leases of
1,000 s, but for those with faults after which only a clock can tell. `python -m tests.simulation.nightly --few-kinds`
goes on with them, one after the other, and counts.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from tests.simulation.run_seed import SeedFailedError, run_seed
from tests.simulation.scene import Scene
from tests.simulation.weather import ASKED_FOR, KINDS

FIRST_SEED = 700_001
LONG_LEASE_S = 1000.0
NOT_HERE = ("database_mislaid", "database_old", "copy_bent", "copy_ahead")
"""Of those that only scenes bring: they need a run of their own to say anything."""
DRAWN = (*KINDS, *(kind for kind in ASKED_FOR if kind not in NOT_HERE))
FOR_CLOCKS = frozenset(
    ("link_silent", "link_slow", "address_moves", "pause", "hang", "folder_hangs", "crew_hangs", "liar")
)
"""What was said is lost, and nobody knows; or who has it is there, and does nothing."""


def scene_of(seed: int) -> Scene:
    """What a seed of these is held to."""
    rng = random.Random(f"few kinds {seed}")
    kinds = tuple(rng.sample(DRAWN, rng.choice((1, 2, 2, 3))))
    drawn: tuple[tuple[str, float, tuple[Any, ...]], ...] = (
        ("steps", 0.5, (12, 16, 24)),
        ("spares", 0.5, (2,)),
        ("snapshot_steps", 0.4, (1, 2, 3)),
        ("checkpoint_every", 0.3, (1, 2, 3)),
        ("delay", 0.3, (0, 1)),
        ("lease_s", 0.0 if FOR_CLOCKS & set(kinds) else 0.5, (LONG_LEASE_S,)),
    )
    return Scene(
        only=kinds,
        gap_s=rng.choice(((0.15, 0.5), (0.3, 1.0), (1.0, 3.0))),
        until_s=(10.0, 20.0),
        disk_losses_max=rng.choice((2, 4, 8)),
        run={name: rng.choice(values) for name, share, values in drawn if rng.random() < share},
    )


def outcome(seed: int) -> str:
    """What is wrong with a seed, or an empty string."""
    try:
        run_seed(seed, scene=scene_of(seed))
    except SeedFailedError as failure:
        said, *more = str(failure).splitlines()
        return f"{said}\n{scene_of(seed)}\n{more[0]}\nreplay: python -m tests.simulation.few_kinds {seed}"
    return ""


def main(words: list[str]) -> int:
    """Replays seeds aloud; returns how many failed."""
    failed = 0
    for seed in map(int, words):
        print(scene_of(seed))
        try:
            print(run_seed(seed, aloud=True, scene=scene_of(seed)))
        except SeedFailedError as failure:
            failed += 1
            print(failure)
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
