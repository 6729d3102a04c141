"""Tokens per second of the demo over single-process torch on the same cores, and where the rest goes.

`python -m tests.benchmarks.demo [--pairs 3] [--steps 16]` trains the same run with the machinery (real processes,
sockets, disks) and without, in turn, at a size where one task takes 50 ms or more. The machine is shared, so only the
ratio within one pair counts; the median of the pairs is judged against 0.75.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RUN = """name = "bench"
steps = {steps}
[model]
layers = 6
hidden = 256
heads = 4
kv_heads = 2
feed_forward = 704
context = 256
[data]
source = "builtin:grammar"
[batch]
microbatches = 12
samples = 4
delay = 1
[stages]
collocated = "when_empty"
[checkpoint]
every_steps = 0
"""
BOUND = 0.75


def main() -> int:
    """Runs the pairs; exit code 1 when the median ratio is below the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "RUN.toml"
        run.write_text(RUN.format(steps=options.steps))
        for pair in range(options.pairs):
            alone = _train(run, Path(folder) / f"alone-{pair}", "--reference", "--threads", str(os.cpu_count()))
            demo = _train(run, Path(folder) / f"demo-{pair}", "--volunteers", "2")
            ratio = demo["tokens_per_second"] / alone["tokens_per_second"]
            ratios.append(ratio)
            print(
                f"pair {pair}: one process {alone['tokens_per_second']:8.0f} tokens/s, demo "
                f"{demo['tokens_per_second']:8.0f} tokens/s, ratio {ratio:.3f}"
            )
            _explain(demo)
    median = statistics.median(ratios)
    print(f"median ratio {median:.3f}, bound {BOUND}: {'pass' if median >= BOUND else 'FAIL'}")
    return 0 if median >= BOUND else 1


def _train(run: Path, out: Path, *arguments: str) -> dict[str, Any]:
    summary = out / "summary.json"
    # The one process gets every core, as anybody would run it; the demo's volunteers have one thread each.
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "protocol.cli", "demo", "--config", str(run), "--plain", "--out", str(out)]
    subprocess.run(
        [*command, "--summary", str(summary), *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    content: dict[str, Any] = json.loads(summary.read_text())
    return content


def _explain(demo: dict[str, Any]) -> None:
    """Seconds of all processes together, by what they were spent on."""
    total = sum(demo["seconds"].values())
    for name, seconds in sorted(demo["seconds"].items(), key=lambda item: -item[1]):
        print(f"    {name:<14} {seconds:8.1f} s  {seconds / max(total, 1e-9):6.1%}")
    kinds = ", ".join(f"{kind} {count / 1e6:.1f}" for kind, count in demo["bytes"].items())
    print(f"    moved          {sum(demo['bytes'].values()) / 1e6:8.1f} MB: {kinds}")


if __name__ == "__main__":
    sys.exit(main())
