"""What volunteers who lie do to a real run, without audits and with them, beside the run that nobody lied to.

    python -m tests.benchmarks.poison [--again] [NAME ...]

A small LLaMA on the built-in grammar, in two stages of one server each, trained by two honest volunteers and one that
is an ordinary volunteer but for one deed (`tests/integration/bad_device.py`). Whoever computes honestly computes the
same weights, so the clean run is one process (`train_reference`). How much runs differ by chance is shown by the same
run with its data in three other orders, and with three other seeds (then it starts from other weights, too). Audits,
where there are any, are those that runs have by default: all of a newcomer's first twenty contributions, one in twenty
after them; *sleeper* lies from its twenty-fifth sum on.

Of each run: the loss of its weights on text that was kept aside; how far they lie from the clean run's (relative, L2);
and, where "t" is right, the chance of "T" that its model sees, which a backdoor teaches. *void*: nobody audits, and in
the middle the operator voids the liar (`barnraise run void`): the weights must be the clean ones, bit for bit.

Rows go into `poison.jsonl` beside this file, one as soon as it is measured; the table is `POISON.md`. A row that stands
there is not measured again, unless `--again` or its name asks for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from node.compute.export import read_model
from node.compute.layout import StageLayout
from node.compute.model import StageModel
from node.compute.reference import train_reference, validation_loss
from node.data.dataset import Dataset
from node.demo.processes import Children
from protocol.run.config_file import load_run
from protocol.run.run import RunConfig
from tests.benchmarks.attacks import volunteers
from tests.integration.bad_device import BACKDOOR, HONEST
from tests.integration.swarm import Daemon, Swarm, eventually
from tests.integration.test_audits import BadChildren, audited, banned_lines, start
from tests.integration.test_bans import order

ROWS = Path(__file__).with_name("poison.jsonl")
TABLE = Path(__file__).with_name("POISON.md")
STEPS, VALIDATED, ORDERS = 150, 16, (2, 3, 4)
RUN = f"""
name = "poisoned"
steps = {STEPS}
[model]
layers = 2
hidden = 64
feed_forward = 176
context = 64
[data]
source = "builtin:grammar"
[stages]
count = 2
back_servers = 0
[checkpoint]
every_steps = 10
folder = "FOLDER"
[audit]
"""
AUDITS, NONE, KEPT = "", "rate = 0\n", "rate = 1e-9\nfirst = 0\n"
"""Those of runs; none at all; none, but checkpoints are kept as for runs with audits."""
_TASKS = re.compile(r'^barnraise_node_microbatches_total\{.*operation="(?:forward|backward)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """One run."""

    words: str
    deed: str = ""
    audits: str = NONE
    sums: int = 3
    """That are honest, before the first that is not."""
    void: bool = False
    order: int = 0
    """Of the data, of a run that nobody lies to."""
    seed: int = 0
    """Of the data and of the weights at first, of such a run."""


LIES = {
    "flips": "gradients that point uphill",
    "scales": "gradients ten times too large",
    "leans": "gradients 1.2 % too long",
    "biases": "1.5 % of each gradient's length added, always the same way",
    "backdoors": "losses for other labels, at routes' ends",
}
CASES = {
    **{f"order {number}": Case("nobody; data in another order", order=number) for number in ORDERS},
    **{f"seed {number}": Case("nobody; another seed", seed=number) for number in ORDERS},
    **{
        f"{deed}{how}": Case(words, deed, audits)
        for deed, words in LIES.items()
        for how, audits in (("", NONE), (", audited", AUDITS))
    },
    "sleeper, audited": Case("gradients that point uphill, from the 25th sum on", "flips", AUDITS, sums=25),
    "void": Case("gradients that point uphill; voided in the middle", "flips", KEPT, void=True),
}


def config_of(folder: Path, audits: str) -> tuple[str, RunConfig]:
    text = RUN.replace("FOLDER", str(folder)) + audits
    path = folder / "RUN.toml"
    path.write_text(text)
    return text, load_run(path)


@cache
def clean() -> tuple[StageLayout, Tensor, Dataset]:
    """The weights of the run that nobody lied to, and the data that losses are measured on."""
    with tempfile.TemporaryDirectory() as name:
        config = config_of(Path(name), NONE)[1]
    found = train_reference(config)
    return found.layout, found.params, found.dataset


def judged(params: Tensor) -> dict[str, float]:
    """Loss, distance from the clean weights, and the chance of the backdoor's letter."""
    layout, reference, dataset = clean()
    model, chances = StageModel(layout), []
    for index in range(VALIDATED):
        tokens, labels = (torch.from_numpy(array).long() for array in dataset.validation_batch(index))
        chances.append(model.logits(params, tokens).softmax(-1)[..., BACKDOOR[1]][labels == BACKDOOR[0]])
    return {
        "loss": validation_loss(layout, params, dataset, VALIDATED),
        "distance": float((params - reference).norm() / reference.norm()),
        "backdoor": float(torch.cat(chances).mean()),
    }


def by_chance(case: Case) -> dict[str, Any]:
    """The clean run, whose samples come as another seed draws them; or all of it as another seed draws it."""
    with tempfile.TemporaryDirectory() as name:
        config = config_of(Path(name), NONE)[1]
    other = msgspec.structs.replace(config, seed=case.order or case.seed)
    found = train_reference(config, dataset=Dataset(other)) if case.order else train_reference(other)
    return judged(found.params)


def real(case: Case) -> dict[str, Any]:
    """A run of real processes with a liar in it, to its end."""
    os.environ[HONEST] = str(case.sums)
    with tempfile.TemporaryDirectory(prefix="poison-") as name:
        folder = Path(name) / "checkpoints"
        folder.mkdir()
        text, _ = config_of(folder, case.audits)
        with Swarm(Path(name), text, server_count=0) as swarm, Children() as children, BadChildren() as bad:
            for number in range(2):
                link = swarm.links["server"]
                words = ("server", link, "--listen", "127.0.0.1:0", "--checkpoints", str(folder))
                swarm.servers.append(swarm.node(f"server-{number}", *words))
            eventually(lambda: swarm.step() >= 0, "the first step, by the servers")
            order(swarm, "pause")
            link = str(swarm.links["volunteer"])
            honest = [start(children, Path(name), f"honest-{number}", "join", link) for number in range(2)]
            eventually(lambda: len(volunteers(swarm)) == 2, "the honest volunteers")
            known = set(volunteers(swarm))
            liar = start(bad, Path(name), "liar", case.deed, "join", order(swarm, "invite"))
            (node,) = eventually(lambda: [one for one in volunteers(swarm) if one not in known], "the liar")
            began = swarm.step()
            order(swarm, "resume")
            row = watch(swarm, [*honest, liar], node, case.void) | {"began": began}
            row["banned"] = [line["reason"][:160] for line in banned_lines(swarm)]
        command = [sys.executable, "-m", "protocol.cli", "export", f"{name}/model", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        params = read_model(Path(name) / "model", clean()[0])
    return row | judged(params) | {"equal": torch.equal(params, clean()[1])}


def watch(swarm: Swarm, members: Sequence[Daemon], node: str, void: bool) -> dict[str, Any]:
    """To the end of the run: each member's tasks, and the step at which the liar was out."""
    tasks = [0.0] * len(members)
    out_at: int | None = None
    lost, audits = 0, dict[str, float]()
    while True:
        status = swarm.status()
        with suppress(OSError):  # whoever ends answers no more
            audits = audited(swarm)
        for number, member in enumerate(members):
            with suppress(OSError):
                tasks[number] = sum(map(float, _TASKS.findall(member.metrics())))
        if out_at is None and not members[-1].child.running:
            out_at = status["run"]["step"]
        if void and status["run"]["step"] >= STEPS // 2:
            before, void = swarm.step(), False
            order(swarm, "void", node, "--reason", "its gradients point uphill")
            eventually(lambda before=before: swarm.step() < before, "the way back")  # type: ignore[misc]
            lost = before - swarm.step()
        if status["run"]["state"] == "finished":
            share = tasks[-1] / sum(tasks)
            return {"tasks": tasks, "share": share, "out_at": out_at, "lost": lost, "audits": audits}
        time.sleep(0.2)


def write_table(rows: dict[str, dict[str, Any]]) -> None:
    lines = [
        "# What liars do to a run",
        "",
        f"`python -m tests.benchmarks.poison`: {STEPS} steps, two honest volunteers and a liar; without audits, and"
        " with those that runs have by default. Loss on text that was kept aside, in nats a byte; the distance of all"
        ' weights from the clean run\'s (relative, L2); the chance of "T" where "t" is right.',
        "",
        "| liar | audits | its share of tasks | out at step | loss | distance | backdoor |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    if "clean" in rows:
        lines.append(
            f"| nobody (the clean run) | | | | {rows['clean']['loss']:.4f} | 0 | {rows['clean']['backdoor']:.2g} |"
        )
    for name, case in CASES.items():
        row = rows.get(name)
        if row is None:
            lines.append(f"| {case.words} | | not measured | | | | |")
            continue
        audits = "" if not case.deed else "yes" if case.audits == AUDITS else "no"
        share = f"{row['share']:.0%}" if "share" in row else ""
        out = "never" if row.get("out_at") is None else str(row["out_at"])
        equal = " (equal, bit for bit)" if row.get("equal") else ""
        lines.append(
            f"| {case.words} | {audits} | {share} | {out if case.deed else ''} | {row['loss']:.4f} "
            f"| {row['distance']:.2g}{equal} | {row['backdoor']:.2g} |"
        )
    for what, words in (("order", "other orders of the data"), ("seed", "other seeds")):
        chance = [rows[f"{what} {number}"] for number in ORDERS if f"{what} {number}" in rows]
        if chance and "clean" in rows:
            most = max(abs(row["loss"] - rows["clean"]["loss"]) for row in chance)
            far = max(row["distance"] for row in chance)
            lines += ["", f"By chance ({words}) the loss differs by up to {most:.4f}, the weights by {far:.2g}."]
    TABLE.write_text("\n".join(lines) + "\n")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], metavar="NAME")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rows = {}
    if ROWS.exists():
        rows = {row["case"]: row for row in map(json.loads, ROWS.read_text().splitlines())}
    todo = options.names or [name for name in CASES if options.again or name not in rows]
    for name in ("clean", *todo) if "clean" not in rows else todo:
        begun = time.monotonic()
        case = CASES.get(name)
        if case is None:
            found = judged(clean()[1])
        else:
            found = by_chance(case) if not case.deed else real(case)
        rows[name] = {"case": name, "commit": commit, **found, "took_s": round(time.monotonic() - begun, 1)}
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
        write_table(rows)
        print(rows[name], flush=True)
    return int("void" in rows and not rows["void"]["equal"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
