"""A model of 107 M parameters over home lines, beside its roofline: `python -m tests.benchmarks.wan_lines FILE` (root).

Real processes in network namespaces, as in `tests.benchmarks.predicted`: four stages, a server and a volunteer each; a
volunteer has a home line with a delay of 25 ms one way, a server a fast one. At 20/100 Mbit/s two cores set the pace,
at 1/5 Mbit/s the lines do, and at 2/10 both; each with the default forms, and some with others, side by side.
`--only` names rows; FILE gets a line for each as it ends, and what stands there is not run again. A row takes five to
twenty minutes on a computer that does nothing else.

*Roofline* (a step, of the slowest stage): the longest of its uplink's bytes over the line, of its downlink's, and of
what its device computed, as the trace says with all processes running. The bytes are the forms' (activations and their
gradients by bits an element; a sum and a version by the bits that were counted, since they depend on the values).
*Counted* is what went through the volunteers' network devices, from their first packet to their last: when the steps
have closed, volunteers are asked to go, and finish what they have begun. So nothing is half over, and every byte that
was counted belongs to a message that came. Beside it stands the *formula*: each result by the bits of its form, each
sum and version as large as it was, in packets with their heads (IP 20 and TCP with time stamps 32 of 1,500 bytes; the
devices have no Ethernet), and an acknowledgement for every second packet of the other direction (RFC 9293, 3.8.6.3).
What volunteers send to measure lines, most of it before the first step, is left out of both, and shown. A task that is
done twice is in both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.live.throughput import Needs, needs_of
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
PACKET_BYTES, HEAD_BYTES, PACKETS_OF_AN_ACK = 1500, 52, 2
NOTICED_S = 5.0
"""So long after a step is closed a wait for it has ended; no step here is so short."""
COUNTED = ("up_bytes", "down_bytes")
DRAIN_S = 1200.0
"""What a volunteer has begun and not sent: a sum and some results, 26 MB, take 210 s of the slowest line."""
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
    """Bytes up and down, of each volunteer's network device so far."""
    found = []
    for number in range(2 + STAGES, 2 + 2 * STAGES):
        shown = subprocess.run(
            ["ip", "netns", "exec", f"{PREFIX}v{number}", "cat", "/proc/net/dev"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        words = next(line for line in shown.splitlines() if "line0" in line).split(":")[1].split()
        found.append(tuple(int(words[place]) for place in (8, 0)))  # in the order of `COUNTED`
    return found


def by_content(side: Side, role: str) -> dict[str, float]:
    """Bytes a step that nodes of a role received, by kind of message."""
    steps, found = max(1, len(side.steps) - 1), dict.fromkeys(CONTENTS, 0.0)
    for node in [node for node in side.nodes if node.role == role]:
        received = inside(node.of("receive"), side.window_s)
        for number, content in enumerate(CONTENTS):
            found[content] += float(received["bytes"][received["content"] == number].sum()) / steps
    return {content: count for content, count in found.items() if count}


def moved(side: Side, volunteers: frozenset[str]) -> dict[str, list[dict[str, tuple[int, float]]]]:
    """What servers received of volunteers (`up`) and sent them (`down`), of each stage: by kind of message how many,
    and their bytes."""
    found: dict[str, list[dict[str, tuple[int, float]]]] = {"up": [], "down": []}
    for stage in range(STAGES):
        for direction, kind in (("up", "receive"), ("down", "send")):
            sums = dict.fromkeys(CONTENTS, (0, 0.0))
            for node in [node for node in side.nodes if (node.role, node.stage) == ("server", stage)]:
                theirs = np.isin(np.array(node.names), sorted(volunteers))
                records = node.of(kind)
                records = records[theirs[records["name"]]]
                for content in CONTENTS:
                    these = records["bytes"][records["content"] == CONTENTS.index(content)]
                    count, byte_count = sums[content]
                    sums[content] = count + len(these), byte_count + float(these.sum(dtype=np.float64))
            found[direction].append(sums)
    return found


def drained(run: Running) -> None:
    """Asks the volunteers to go, and waits until each has finished what it had begun."""
    for child in run.volunteers:
        os.kill(child.pid, signal.SIGTERM)
    until = time.monotonic() + DRAIN_S
    while any(child.running for child in run.volunteers):
        if time.monotonic() > until:
            raise RuntimeError(f"volunteers have not gone within {DRAIN_S:.0f} s")
        time.sleep(1.0)


def measure(name: str, steps: int, patience_s: float) -> dict[str, Any]:
    """A run whose first two steps have no pace that counts, and the next ones do."""
    folder, began = Path(tempfile.mkdtemp(prefix="wan-lines-")), time.monotonic()
    try:
        with running(case_of(name), folder) as run, run.last_words():
            run.steps(2, 2 * patience_s)
            paced = time.monotonic()
            run.steps(steps, patience_s * steps)
            # From the close before the first of them on, which was noticed a moment after it happened: sums get smaller
            # from step to step.
            side = read_trace(run.ask("trace", {"seconds": time.monotonic() - paced + NOTICED_S})).measured
            volunteers = frozenset(node.node for node in side.nodes if node.role == "volunteer")
            drained(run)
            whole = read_trace(run.ask("trace", {"seconds": time.monotonic() - began})).measured
            if lost := [node.label for node in whole.nodes if node.lost]:
                raise RuntimeError(f"spans of {lost} are lost: too many for a ring")
            config = load_run(folder / "RUN.toml")
            rows = stage_rows(side, STAGES)
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
                "moved": moved(whole, volunteers),
                "counted": dict(zip(COUNTED, map(sum, zip(*sent(run), strict=True)), strict=True)),
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
    formula, counted = formula_bytes(row["moved"], needs), counted_bytes(row)
    return {
        "line_s": max(lines_s),
        "device_s": max(row["device_s"]),
        "of_roofline": roofline_s / row["step_s"],
        "tokens_per_s": row["step_tokens"] / row["step_s"],
        "bits_of_sums": 8 * row["sums_bytes"] / parameters,
        "bits_of_versions": 8 * row["versions_bytes"] / parameters,
        "up_off": counted[0] / formula[0] - 1,
        "down_off": counted[1] / formula[1] - 1,
        "measuring": in_packets(*measuring_bytes(row["moved"]))[0] / row["counted"]["up_bytes"],
    }


def in_packets(up_bytes: float, down_bytes: float) -> tuple[float, float]:
    """What these bytes of messages are on a line, each direction with what acknowledges the other one."""
    packets = [each / (PACKET_BYTES - HEAD_BYTES) for each in (up_bytes, down_bytes)]
    up_heads, down_heads = (HEAD_BYTES * (own + other / PACKETS_OF_AN_ACK) for own, other in (packets, packets[::-1]))
    return up_bytes + up_heads, down_bytes + down_heads


def formula_bytes(moved: dict[str, Any], needs: Sequence[Needs]) -> tuple[float, float]:
    """Up and down: of results and their inputs by the forms, and of sums and versions."""
    up_bytes = down_bytes = 0.0
    for stage, need in enumerate(needs):
        up, down = moved["up"][stage], moved["down"][stage]
        visits = (up["Output"][0] + up["InputGradient"][0]) / _boundaries(stage)
        up_bytes += visits * need.up_bytes + up["Contribute"][1]
        inputs = down["Lease"][0] + down["InputAnswer"][0]
        if stage == 0:
            inputs -= up["Output"][0]  # came with tokens: nothing to speak of
        down_bytes += inputs / _boundaries(stage) * need.down_bytes + down["Parameters"][1]
    return in_packets(up_bytes, down_bytes)


def _boundaries(stage: int) -> int:
    """Of a stage: both, but where a route begins or ends."""
    return 1 if stage in (0, STAGES - 1) else 2


def measuring_bytes(moved: dict[str, Any]) -> tuple[float, float]:
    """Up and down, of messages that measure lines."""
    up_bytes, down_bytes = (sum(stage["MeasureData"][1] for stage in moved[way]) for way in ("up", "down"))
    return up_bytes, down_bytes


def counted_bytes(row: dict[str, Any]) -> tuple[float, float]:
    """Up and down, on the devices, without what measured the lines."""
    up_bytes, down_bytes = in_packets(*measuring_bytes(row["moved"]))
    return row["counted"]["up_bytes"] - up_bytes, row["counted"]["down_bytes"] - down_bytes


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
          "   counted over formula up, down   measuring, of up")  # fmt: skip
    for row in rows:
        found = judged(row)
        missed += "defaults" in row["name"] and (
            found["of_roofline"] < OF_ROOFLINE_MIN or max(abs(found["up_off"]), abs(found["down_off"])) > BYTES_OFF_MAX
        )
        print(
            f"{row['name']:24} {row['step_s']:>6.1f} {found['line_s']:>8.1f} {found['device_s']:>10.1f}"
            f" {found['of_roofline']:>13.2f} {found['tokens_per_s']:>10.1f} {found['bits_of_sums']:>14.2f},"
            f" {found['bits_of_versions']:>4.2f} {found['up_off']:>+24.1%}, {found['down_off']:>+.1%}"
            f" {found['measuring']:>10.1%}"
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
