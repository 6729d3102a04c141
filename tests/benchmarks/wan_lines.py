"""A model of 107 M parameters over home lines, beside its roofline: `python -m tests.benchmarks.wan_lines FILE` (root).

Real processes in network namespaces, as in `tests.benchmarks.predicted`: four stages, a server and a volunteer each; a
volunteer has a home line with a delay of 25 ms one way, a server a fast one. At 20/100 Mbit/s two cores set the pace,
at 1/5 Mbit/s the lines do, and at 2/10 both; each with the default forms, and some with others, side by side.
`--only` names rows; FILE gets a line for each as it ends, and what stands there is not run again. A row takes five to
twenty minutes on a computer that does nothing else.

*Roofline* (a step, of the slowest stage): the longest of its uplink's bytes over the line, of its downlink's, and of
what its device computed, as the trace says with all processes running. The bytes are the forms' (activations and their
gradients by bits an element; a sum and a version by the bits that were counted, since they depend on the values).
*Counted* is what left the volunteers' network devices in the same steps over what the formula says: with everything,
and without the heads of packets (66 bytes each: Ethernet 14, IP 20, TCP with its time stamps 32): the latter is ours.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from coordinator.live.throughput import needs_of
from coordinator.world.traces import Side, inside, read_trace, stage_rows
from protocol.base.forms import TYPICAL_BITS
from protocol.run.config_file import load_run
from protocol.run.course import course_of
from protocol.run.run import RunConfig
from protocol.run.spans import CONTENTS
from tests.benchmarks.predicted import PREFIX, Case, Running, running

LAYERS, HIDDEN, CONTEXT, SAMPLES, MICROBATCHES = 18, 768, 512, 1, 16
VOCABULARY = 259
STAGES = 4
SERVER = (1000.0, 1000.0)
HOME, SLOW, SLOWEST = (20.0, 100.0), (2.0, 10.0), (1.0, 5.0)
DELAY_MS = 25.0
OF_ROOFLINE_MIN, BYTES_OFF_MAX = 0.85, 0.03
HEAD_BYTES = 66
NOTICED_S = 5.0
"""So long after a step is closed a wait for it has ended; no step here is so short."""
FORMS = {
    "defaults": {},
    "d4 up": {"activations_up": "d4"},
    "bf16": {"activations_up": "bf16", "activations_down": "bf16", "gradients": "bf16", "parameters": "bf16"},
    "fp32": {"activations_up": "fp32", "activations_down": "fp32", "gradients": "fp64", "parameters": "fp32"},
}
ROWS = {
    f"{up:g}/{down:g} Mbit/s, {name}": ((up, down), forms)
    for (up, down) in (HOME, SLOW, SLOWEST)
    for name, forms in FORMS.items()
    if (up, down) == HOME or name == "defaults" or (up, down, name) == (*SLOW, "d4 up")
}


def case_of(name: str) -> Case:
    """One server a stage, front and back in one, and one volunteer with a core to share with the others."""
    line, forms = ROWS[name]
    wire = "".join(f'{key} = "{form}"\n' for key, form in forms.items())
    return Case(
        f"wan {name}", (SERVER,) * STAGES, (line,) * STAGES, STAGES, layers=LAYERS, hidden=HIDDEN, samples=SAMPLES,
        context=CONTEXT, microbatches=MICROBATCHES, shares=(2.0,) * STAGES, delay_ms=DELAY_MS,
        more=f"front_servers = 1\nback_servers = 0\n[limits]\nlease_s = 600.0\n{'[wire]' if wire else ''}\n{wire}",
    )  # fmt: skip


def sent(run: Running) -> list[tuple[int, ...]]:
    """Bytes up and down and packets up and down, of each volunteer's network device so far."""
    found = []
    for number in range(2 + STAGES, 2 + 2 * STAGES):
        shown = subprocess.run(
            ["ip", "netns", "exec", f"{PREFIX}v{number}", "cat", "/proc/net/dev"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        words = next(line for line in shown.splitlines() if "line0" in line).split(":")[1].split()
        found.append(tuple(int(words[place]) for place in (8, 0, 9, 1)))
    return found


def by_content(side: Side, role: str) -> dict[str, float]:
    """Bytes a step that nodes of a role received, by kind of message."""
    steps, found = max(1, len(side.steps) - 1), dict.fromkeys(CONTENTS, 0.0)
    for node in [node for node in side.nodes if node.role == role]:
        received = inside(node.of("receive"), side.window_s)
        for number, content in enumerate(CONTENTS):
            found[content] += float(received["bytes"][received["content"] == number].sum()) / steps
    return {content: count for content, count in found.items() if count}


def measure(name: str, steps: int, patience_s: float) -> dict[str, Any]:
    """A run whose first two steps are not counted, and the next ones are."""
    folder = Path(tempfile.mkdtemp(prefix="wan-lines-"))
    try:
        with running(case_of(name), folder) as run, run.last_words():
            run.steps(2, 2 * patience_s)
            before, began = sent(run), time.monotonic()
            run.steps(steps, patience_s * steps)
            after, seconds = sent(run), time.monotonic() - began
            # From the close before the first of them on, which was noticed a moment after it happened: sums get smaller
            # from step to step, so what the trace counts and what the devices count must be the same steps.
            side = read_trace(run.ask("trace", {"seconds": seconds + NOTICED_S})).measured
            config = load_run(folder / "RUN.toml")
            rows = stage_rows(side, STAGES)
            scale = 1.0 / max(1, len(side.steps) - 1)
            counted = [
                [(a - b) * scale for a, b in zip(*each, strict=True)] for each in zip(after, before, strict=True)
            ]
            return {
                "name": name,
                "steps": len(side.steps) - 1,
                "step_s": side.step_s,
                "step_tokens": config.batch.microbatches * config.batch.samples * config.model.context,
                "device_s": [row.busy * side.step_s for row in rows],
                "task_s": [(row.forward_s, row.backward_s) for row in rows],
                "sums_bytes": by_content(side, "server").get("Contribute", 0.0),
                "versions_bytes": by_content(side, "volunteer").get("Parameters", 0.0),
                "by_content": {role: by_content(side, role) for role in ("server", "volunteer")},
                "up_bytes": [each[0] for each in counted],
                "down_bytes": [each[1] for each in counted],
                "up_packets": [each[2] for each in counted],
                "down_packets": [each[3] for each in counted],
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judged(row: dict[str, Any]) -> dict[str, float]:
    """What a row's figures come to.

    A step's sums and versions are as large as they were counted (their bits depend on the values) and the same in all
    stages, which are even but for the embedding and the head.
    """
    (up, down), _ = ROWS[row["name"]]
    config = config_of(row["name"])
    needs = needs_of(config, course_of(config), VOCABULARY)
    parameters = sum(need.contribution_bytes for need in needs) * 8 / TYPICAL_BITS[config.wire.gradients]
    share = [need.contribution_bytes / sum(each.contribution_bytes for each in needs) for need in needs]
    ups = [n.visits * n.up_bytes + part * row["sums_bytes"] for n, part in zip(needs, share, strict=True)]
    downs = [n.visits * n.down_bytes + part * row["versions_bytes"] for n, part in zip(needs, share, strict=True)]
    lines_s = [max(u * 8e-6 / up, d * 8e-6 / down) for u, d in zip(ups, downs, strict=True)]
    roofline_s = max(max(line_s, device_s) for line_s, device_s in zip(lines_s, row["device_s"], strict=True))
    return {
        "line_s": max(lines_s),
        "device_s": max(row["device_s"]),
        "of_roofline": roofline_s / row["step_s"],
        "tokens_per_s": row["step_tokens"] / row["step_s"],
        "bits_of_sums": 8 * row["sums_bytes"] / parameters,
        "bits_of_versions": 8 * row["versions_bytes"] / parameters,
        "up_off": sum(row["up_bytes"]) / sum(ups) - 1,
        "down_off": sum(row["down_bytes"]) / sum(downs) - 1,
        "up_ours_off": (sum(row["up_bytes"]) - _heads_bytes(row, "up_packets")) / sum(ups) - 1,
        "down_ours_off": (sum(row["down_bytes"]) - _heads_bytes(row, "down_packets")) / sum(downs) - 1,
    }


def _heads_bytes(row: dict[str, Any], packets: str) -> float:
    """Not known of rows that are older than this count."""
    return HEAD_BYTES * sum(row[packets]) if packets in row else float("nan")


def config_of(name: str) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "RUN.toml"
        path.write_text(case_of(name).toml(path.parent))
        return load_run(path)


def main() -> int:
    """Runs what is missing, then prints the table; 1 where a row of the default forms misses a bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--patience-s", type=float, default=900.0, help="for a step")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as at Ctrl-C: nothing is left behind
    rows = [json.loads(line) for line in arguments.file.read_text().splitlines()] if arguments.file.exists() else []
    for name in [name for name in arguments.only if all(row["name"] != name for row in rows)]:
        print(f"{name} …", file=sys.stderr, flush=True)
        rows.append(measure(name, arguments.steps, arguments.patience_s))
        with arguments.file.open("a") as out:
            out.write(json.dumps(rows[-1]) + "\n")
    missed = 0
    print("row                      step s   line s   device s   of roofline   tokens/s   bits of sums, versions"
          "   counted over formula up, down   without heads")  # fmt: skip
    for row in rows:
        found = judged(row)
        missed += "defaults" in row["name"] and (
            found["of_roofline"] < OF_ROOFLINE_MIN or abs(found["up_ours_off"]) > BYTES_OFF_MAX
        )
        print(
            f"{row['name']:24} {row['step_s']:>6.1f} {found['line_s']:>8.1f} {found['device_s']:>10.1f}"
            f" {found['of_roofline']:>13.2f} {found['tokens_per_s']:>10.1f} {found['bits_of_sums']:>14.2f},"
            f" {found['bits_of_versions']:>4.2f} {found['up_off']:>+24.1%}, {found['down_off']:>+.1%}"
            f" {found['up_ours_off']:>+12.1%}, {found['down_ours_off']:>+.1%}"
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
