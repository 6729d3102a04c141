"""Fuzzes every decoder, on from where the last run stopped; the count so far lies in `counts.json`.

    python -m tests.fuzz                          # all targets in turn, ten minutes
    python -m tests.fuzz --seconds 36000          # a night
    python -m tests.fuzz --only codec,frames
    python -m tests.fuzz --replay codec 12345     # one input, aloud

Ends with exit code 1 at a find, which it prints with its number and adds to `corpus/NAME`: from then on it is a seed,
and `test_fuzz.py` tries it each time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.fuzz.fuzzer import damaged, fuzz
from tests.fuzz.targets import CORPUS, TARGETS, seeds_of

COUNTS = Path(__file__).parent / "counts.json"
STRETCH = 5000
"""Inputs of one target before the next one's turn."""


def main() -> int:
    """Parses the line, runs, keeps the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "NUMBER"))
    line = parser.parse_args()
    if line.replay:
        (target,) = [one for one in TARGETS if one.name == line.replay[0]]
        data = damaged(int(line.replay[1]), seeds_of(target), target.name)
        print(data.hex())
        target.run(data)
        return 0
    counts = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    chosen = [one for one in TARGETS if not line.only or one.name in line.only.split(",")]
    end, found = time.monotonic() + line.seconds, 0
    while time.monotonic() < end:
        for target in chosen:
            first = counts.get(target.name, 0)
            for find in fuzz(target, first, STRETCH):
                print(find)
                found += 1
                if find.data:
                    with (CORPUS / target.name).open("a") as corpus:
                        corpus.write(f"{find.data.hex()}\n")
            counts[target.name] = first + STRETCH
            COUNTS.write_text(json.dumps(dict(sorted(counts.items())), indent=1) + "\n")
            if time.monotonic() >= end or found:
                break
        if found:
            break
    print(f"{sum(counts.values()):,} inputs so far over {len(TARGETS)} decoders; {found} finds in this run")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
