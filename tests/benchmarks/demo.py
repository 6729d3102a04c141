"""Tokens per second of the demo over single-process torch on the same cores, and where the rest goes.

`python -m tests.benchmarks.demo [--rounds 3] [--steps 16]` trains the same run without the machinery, with it (real
processes, sockets, disks), and with audits besides, in turn, at a size where one task takes 50 ms or more. The machine
is shared, so only the ratio within one round counts; the median without audits is judged against 0.85. Audits are not
judged: who is new to a stage has its first twenty contributions computed again, here on the same cores, so a run of a
few steps costs nearly twice as much, where a long one costs a twentieth more.
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

from protocol.run.run import AuditSection

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
[audit]
rate = {rate}
"""
BOUND = 0.85
AUDITED = AuditSection().rate


def main() -> int:
    """Runs the rounds; exit code 1 when the median ratio is below the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    ratios: dict[float, list[float]] = {0.0: [], AUDITED: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(options.rounds):
            alone = _train(folder / f"alone-{number}", options.steps, 0.0, "--reference", "--threads", _cores())
            for rate, found in ratios.items():
                demo = _train(folder / f"demo-{number}-{rate}", options.steps, rate, "--volunteers", "2")
                found.append(demo["tokens_per_second"] / alone["tokens_per_second"])
                print(
                    f"round {number}: one process {alone['tokens_per_second']:8.0f} tokens/s,"
                    f" demo {'with' if rate else 'without'} audits {demo['tokens_per_second']:8.0f} tokens/s,"
                    f" ratio {found[-1]:.3f}",
                    flush=True,
                )
                _explain(demo)
    median, audited = (statistics.median(found) for found in ratios.values())
    print(
        f"median ratio {median:.3f}, bound {BOUND}: {'pass' if median >= BOUND else 'FAIL'}; with audits {audited:.3f}"
    )
    return 0 if median >= BOUND else 1


def _cores() -> str:
    return str(os.cpu_count())


def _train(out: Path, steps: int, rate: float, *arguments: str) -> dict[str, Any]:
    out.mkdir()
    run, summary = out / "run.toml", out / "summary.json"
    run.write_text(RUN.format(steps=steps, rate=rate))
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
