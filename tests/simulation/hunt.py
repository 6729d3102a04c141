"""The hunt for mutants: `python -m tests.simulation.hunt [NAME ...]`.

Says which seed caught which mutant, and by what, and keeps the seed in `caught.json`, with which the tests begin: all
twenty seeds take a minute where the last one catches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

import tests.simulation.mutants  # noqa: F401 - registers them
from tests.simulation.mutant_registry import EQUIVALENT, MUTANTS
from tests.simulation.run_seed import SeedFailedError, run_seed

CAUGHT = Path(__file__).parent / "caught.json"
"""Mutant -> the first seed that caught it, under whatever code there was at the time."""


def caught_by() -> dict[str, int]:
    """What `CAUGHT` says."""
    return msgspec.json.decode(CAUGHT.read_bytes(), type=dict[str, int]) if CAUGHT.exists() else {}


def hunt(name: str, likely: int | None = None) -> tuple[int, str] | None:
    """The first seed that catches a mutant, and what it says; None when none does. `likely` goes before the others."""
    wanted = MUTANTS[name]
    seeds = list(wanted.seeds)
    if likely in seeds:
        seeds.remove(likely)
        seeds.insert(0, likely)
    with wanted.patch():
        for seed in seeds:
            try:
                run_seed(seed, scene=wanted.scene)
            except SeedFailedError as failure:
                if isinstance(failure.__cause__, (TypeError, AttributeError)):
                    raise  # a mutant that does not fit the code any more proves nothing
                return seed, str(failure).splitlines()[0]
    return None


def survives(name: str, seeds: Iterable[int]) -> None:
    """Raises `SeedFailedError` if a change that is called equivalent can be told apart after all."""
    patch, _ = EQUIVALENT[name]
    with patch():
        for seed in seeds:
            run_seed(seed)


def main() -> int:
    """Hunts, and keeps what it finds."""
    missed = 0
    for word in sys.argv[1:] or MUTANTS:
        caught = hunt(word, caught_by().get(word))
        print(f"{word}: " + ("NOT CAUGHT" if caught is None else f"seed {caught[0]}: {caught[1]}"), flush=True)
        if caught is None:
            missed += 1
        else:
            kept = dict(sorted({**caught_by(), word: caught[0]}.items()))
            CAUGHT.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
