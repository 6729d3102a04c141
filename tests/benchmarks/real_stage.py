"""1.1 B parameters, really built, stepped and saved, a piece at a time: `python -m tests.benchmarks.real_stage`.

Real processes on loopback: a coordinator, and of two stages a server and a volunteer each. Two runs hold every kind of
stage that the model has in eight: `middle`, two stages of three layers of it (the model has 2.75 a stage), and `end`,
where one stage has the embedding of 32,000 tokens beside a layer, and the other one the head. Samples have 2,048
tokens, a step has three of them, there are four steps, and a checkpoint is written after each; `barnraise checkpoints
verify` reads them all.

Printed is the most memory that each process ever had (VmHWM of /proc). Beside it stands what is counted for it
(`node.compute.memory`, `protocol.run.memory`), with as many graphs as it kept at once by the run's trace, and with what
it has in a run of next to nothing, which is Python and torch; exit code 1 where it is more than a tenth beside that.
`--only` names a run; each takes ten to fifteen minutes, 20 GB of memory and 10 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import psutil

from coordinator.commands.asking import post
from coordinator.world.traces import NodeSpans, read_trace
from node.compute.layout import StageLayout
from node.compute.memory import stage_memory
from node.data.tokenizer import make_tokenizer
from protocol.drive.keyfile import load_or_create_identity
from protocol.run.config_file import load_run
from protocol.run.course import course_of
from protocol.run.memory import server_bytes
from tests.integration.swarm import Daemon, Swarm

WIDTH = {"hidden": 2048, "heads": 32, "kv_heads": 4, "feed_forward": 5632, "context": 2048}
NEXT_TO_NOTHING = {"hidden": 32, "heads": 2, "kv_heads": 1, "feed_forward": 64, "context": 16}
LAYERS = {"middle": 6, "end": 2}
VOCABULARY = 32_000
OFF_MAX = 0.1
STEPS = 4
"""With a delayed update the third is the first one that works on a second version, and the fourth on a third."""
TRACE_S, PATIENCE_S = 3600.0, 150.0
"""All of a run is asked for, as `barnraise run trace` waits for it."""
RUN = """
name = "stage-{name}"
steps = {steps}
[model]
{model}
[data]
source = "builtin:grammar"
tokenizer = "{tokenizer}"
[batch]
microbatches = 3
samples = 1
[stages]
count = 2
front_servers = 1
back_servers = 0
collocated = "never"
[audit]
rate = 0.0
first = 0
[checkpoint]
every_steps = 1
folder = "{folder}"
[limits]
lease_s = 600.0
"""


def tokenizer_of(folder: Path) -> Path:
    """A tokenizer of 32,000 tokens, of which text uses the bytes."""
    content = json.loads(make_tokenizer("bytes", []).to_json())
    vocabulary = content["model"]["vocab"]
    end = max([*vocabulary.values(), *(token["id"] for token in content["added_tokens"])]) + 1
    vocabulary.update({f"<{number}>": number for number in range(end, VOCABULARY)})
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def peaks(daemon: Daemon, known: dict[str, int]) -> None:
    """Adds what the processes of a daemon have had at most so far, by command."""
    whole = psutil.Process(daemon.child.pid)
    for number, process in enumerate([whole, *whole.children(recursive=True)]):
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            words = process.cmdline()
        except (OSError, psutil.NoSuchProcess):
            continue  # it has just ended
        most = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
        module = words[words.index("-m") + 1] if "-m" in words else "other"
        what = "daemon" if number == 0 else f"{module} {process.pid}"
        known[what] = max(known.get(what, 0), most)


def run_of(name: str, folder: Path, shape: dict[str, int], layers: int, tokenizer: str) -> str:
    model = "\n".join(f"{key} = {count}" for key, count in {"layers": layers, **shape}.items())
    return RUN.format(name=name, folder=folder / "saved", steps=STEPS, model=model, tokenizer=tokenizer)


@dataclass(frozen=True)
class Role:
    """One daemon of a run."""

    stage: int
    peaks: dict[str, int]
    """Process -> the most bytes that it had."""
    kept_graphs: int
    """Of tasks that had gone forward and not yet back, the most at once."""

    def most(self, what: str) -> int:
        return max((most for process, most in self.peaks.items() if process.startswith(what)), default=0)


def kept_graphs(node: NodeSpans) -> int:
    """How many tasks had gone forward there and not yet back, at most."""
    changes = [(span["start"] + span["seconds"], 1) for span in node.of("forward")]
    changes += [(span["start"] + span["seconds"], -1) for span in node.of("backward")]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def measured(folder: Path, run: str, patience_s: float) -> dict[str, Role]:
    """What each daemon had, when the run has ended and its checkpoint was read again."""
    found: dict[str, dict[str, int]] = {}
    with Swarm(folder, run, server_count=2, more=("--data", str(folder), "--checkpoints", str(folder))) as swarm:
        link = swarm.links["volunteer"]
        daemons = [*swarm.daemons, *(swarm.node(f"volunteer-{number}", "join", link, "--yes") for number in range(2))]
        began, stages, graphs, closed = time.monotonic(), dict[str, int](), Counter[str](), 0
        while (status := swarm.status())["run"]["state"] != "finished":
            stages |= {member["id"]: member["stage"] for member in status["members"]}
            if status["run"]["step"] > closed:
                closed = status["run"]["step"]
                told = post(swarm.links["http"], swarm.state / "links.json", "trace", {"seconds": TRACE_S}, PATIENCE_S)
                for node in read_trace(told).measured.nodes:
                    graphs[node.node] = max(graphs[node.node], kept_graphs(node))
            for daemon in daemons:
                if not daemon.child.running and swarm.status()["run"]["state"] != "finished":
                    raise RuntimeError(f"{daemon.name} has ended: {daemon.child.log_tail()}")
                peaks(daemon, found.setdefault(daemon.name, {}))
            if time.monotonic() - began > patience_s:
                raise RuntimeError(f"not over in {patience_s:.0f} s: {json.dumps(status['run'])}")
            time.sleep(0.5)
        print(f"{STEPS} steps closed and saved after {time.monotonic() - began:.0f} s")
        nodes = {daemon.name: load_or_create_identity(daemon.child.folder / "identity").node for daemon in daemons[1:]}
    said = subprocess.run(
        [sys.executable, "-m", "protocol.cli", "checkpoints", "verify", str(folder / "saved")],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    print(said.stdout.strip())
    return {name: Role(stages.get(nodes[name], -1), found[name], graphs[nodes[name]]) for name in nodes}


def layout_of(folder: Path, stage: int, vocabulary: int) -> StageLayout:
    config = load_run(folder / "RUN.toml")
    chunk = course_of(config).chunks[stage]
    return StageLayout(config, vocabulary, chunk.first_block, chunk.end_block)


def show(name: str, folder: Path, roles: dict[str, Role], empty: dict[str, Role], vocabulary: int) -> bool:
    """Prints a line for each role; whether every device was as near to the formula as it should."""
    near, config = True, load_run(folder / "RUN.toml")
    for daemon, role in sorted(roles.items(), key=lambda item: (item[1].stage, item[0])):
        layout = layout_of(folder, role.stage, vocabulary)
        what = "daemon" if daemon.startswith("server") else "node.compute.device_process"
        most, torch_bytes = role.most(what), empty[daemon].most(what)
        count = layout.parameter_count
        line = f"{name}, stage {role.stage} of {count / 1e6:.0f} M parameters, {daemon}: {most / 1e9:.2f} GB"
        if daemon.startswith("server"):
            counted = torch_bytes + server_bytes(config, count)
            more = f"{(most - torch_bytes) / count:.1f} bytes a parameter"
        else:
            memory = stage_memory(layout)
            lasting = memory.fixed_bytes() + memory.host_bytes
            beside = max(0, role.kept_graphs - 1)  # a task's own is among what lasts
            counted = torch_bytes + lasting + beside * memory.graph_bytes
            more = f"{role.kept_graphs} graphs kept; {role.most('daemon') / 1e9:.2f} its daemon"
        near = near and abs(most / counted - 1) <= OFF_MAX
        print(f"{line}, counted {counted / 1e9:.2f} ({most / counted - 1:+.0%}); {more}")
    return near


def main() -> int:
    """Runs the pieces; 1 where a device took something else than was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(LAYERS))
    parser.add_argument("--patience-s", type=float, default=1800.0)
    arguments = parser.parse_args()
    near = True
    for name, layers in LAYERS.items():
        if arguments.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="real-stage-") as place, tempfile.TemporaryDirectory() as other:
                empty = measured(
                    Path(other), run_of(name, Path(other), NEXT_TO_NOTHING, 2, "bytes"), arguments.patience_s
                )
                folder, vocabulary = Path(place), 257 if name == "middle" else VOCABULARY
                tokenizer = "bytes" if name == "middle" else str(tokenizer_of(folder))
                roles = measured(folder, run_of(name, folder, WIDTH, layers, tokenizer), arguments.patience_s)
                near = show(name, folder, roles, empty, vocabulary) and near
    return int(not near)


if __name__ == "__main__":
    sys.exit(main())
