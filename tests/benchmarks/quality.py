"""What small forms cost in quality, seed by seed against fp32: `python -m tests.benchmarks.quality --out F --seeds 8`.

A LLaMA of 0.9 M parameters on the built-in text, cut at every half layer (as many boundaries as a model can have), 200
steps of 1,024 tokens. Every arm sees the same weights and the same batches for a seed; the figure is its validation
loss in nats a byte (the tokenizer's tokens are bytes) minus that of fp32, as the mean of the last `LOOKS` looks at it:
one training's loss goes up and down from step to step by more than forms cost. Lines are added to F as arms end, and
what is in it is not run again: stop it and start it as often as you like. Without --seeds it prints the table of F.

Arms named "outliers" start from an embedding with two channels a thousand times the others, and are compared with fp32
from there. "fp32, nudged" starts from weights that are a millionth off: what it is off in the end is chance.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import click
import torch
from torch import Tensor

from node.compute.forms import grid, p12
from node.compute.forms.packed import pack
from node.compute.layout import StageLayout
from node.compute.model import StageModel
from node.compute.optimizer import AdamWShard, partial_square_norm
from node.compute.reference import validation_loss
from node.compute.wire import arrived, encode, going_up
from node.data.dataset import Dataset
from node.machine.numbers import clip_factor
from protocol.run.run import BatchSection, RunConfig

STEPS = 200
VALIDATION_BATCHES = 24
LOOKS, LOOK_EVERY_STEPS = 7, 10
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 12: 2.201}
"""97.5 % quantiles of Student's t by number of seeds: the half width of a 95 % interval in standard errors."""


@dataclass(frozen=True)
class Arm:
    """Which forms a training uses. Empty means fp32."""

    boundary: str = ""
    """Of activations and their gradients, up and down: q8, bf16, int8 (no outliers apart), int4; d4: differences up."""
    gradients: bool = False
    """On the grid."""
    parameters: bool = False
    """In fixed point."""
    outliers: bool = False
    nudged: bool = False


ARMS = {
    "fp32": Arm(),
    "fp32, nudged": Arm(nudged=True),
    "default": Arm("q8", gradients=True, parameters=True),
    "bf16": Arm("bf16"),
    "q8": Arm("q8"),
    "gi": Arm(gradients=True),
    "p12": Arm(parameters=True),
    "d4": Arm("d4"),
    "d4, gi, p12": Arm("d4", gradients=True, parameters=True),
    "int4": Arm("int4"),
    "fp32, outliers": Arm(outliers=True),
    "default, outliers": Arm("q8", gradients=True, parameters=True, outliers=True),
    "d4, gi, p12, outliers": Arm("d4", gradients=True, parameters=True, outliers=True),
    "int8 without outliers apart, outliers": Arm("int8", outliers=True),
}


@dataclass
class Bits:
    """Bits that went over the wire, and the values that they stood for."""

    bits: float = 0.0
    values: float = 0.0

    def add(self, byte_count: int, values: int) -> None:
        self.bits += 8.0 * byte_count
        self.values += values

    @property
    def each(self) -> float:
        return self.bits / self.values if self.values else 32.0


@dataclass
class Counts:
    up: Bits = field(default_factory=Bits)
    gradients: Bits = field(default_factory=Bits)
    parameters: Bits = field(default_factory=Bits)


def run_config(seed: int) -> RunConfig:
    config = RunConfig(seed=seed, steps=STEPS, batch=BatchSection(microbatches=8, samples=1))
    config.validate()
    return config


def carry(x: Tensor, form: str, bits: Bits, base: Tensor | None) -> Tensor:
    """What arrives of `x`; `base`: what its stage was given, None for tokens and labels."""
    if form in ("", "fp32"):
        return x
    if form == "bf16":
        return x.bfloat16().float()
    if form in ("int8", "int4"):  # blocks of 64 with a scale of their own, and nothing else
        blocks = x.reshape(-1, 64)
        most = 127 if form == "int8" else 7
        scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30) / most
        return (torch.round(blocks / scale) * scale).view(x.shape)
    bits.add(encode(*going_up(x, base, form)).nbytes, x.numel())
    return arrived(x, base, form)


def train(config: RunConfig, arm: Arm, dataset: Dataset) -> tuple[float, Counts]:
    """Mean validation loss of the last looks, and what went over the wire."""
    layout = StageLayout.whole(config, dataset.vocabulary)
    # A stage for each layer half: the embedding lies with the first one, the head with the last one.
    cuts = [0, *range(2, config.block_count - 1), config.block_count]
    stages = [StageModel(StageLayout(config, dataset.vocabulary, *each)) for each in pairwise(cuts)]
    weights = layout.initial(config.seed)
    if arm.outliers:
        weights[: layout.blocks[0][0].count].view(layout.blocks[0][0].shape)[:, [5, 77]] += 20.0
    if arm.nudged:
        weights *= 1.0 + 1e-6 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(config.seed))
    optimizer, counts = AdamWShard(config, layout.decay_mask), Counts()
    count, tasks = layout.parameter_count, config.batch.microbatches
    averages = grid.first_averages(count, count)
    versions, losses = [weights], []
    before: Tensor | None = None
    places = p12.fixed_bits(config)
    steps_of = [grid.exponents(averages, tasks)] * 2
    for step in range(config.steps):
        params = versions[0]
        if arm.parameters:
            if before is not None:
                counts.parameters.add(len(p12.encode(params, before, step, places)), count)
            before, params = params, p12.received(params, places)
        total, exact = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.float64)
        for microbatch in range(tasks):
            tokens, labels = (torch.from_numpy(array).long() for array in dataset.batch(step, microbatch))
            gradient = torch.zeros(count)
            one_microbatch(config, stages, params, tokens, labels, gradient, arm, counts.up)
            if arm.gradients:
                key = grid.task_key(config.seed, step, microbatch)
                assert grid.add_to_grid(total, gradient, steps_of[0], key, 0, tasks)
            else:
                exact += gradient
        gradient = grid.from_grid(total, steps_of[0]) if arm.gradients else exact.float()
        if arm.gradients:
            counts.gradients.add(len(pack(total.numpy())), count)
            averages = grid.next_averages(averages, total, steps_of[0], count)
        factor = clip_factor([partial_square_norm(gradient)], config.optimizer.clip_norm)
        newest = versions[-1].clone()
        optimizer.apply(newest, gradient, step, factor)
        # Delay 1: the next step runs on the version before this one, and on its grid.
        versions = [versions[-1], newest]
        steps_of = [steps_of[-1], grid.exponents(averages, tasks)]
        to_go = config.steps - 1 - step
        if to_go < LOOKS * LOOK_EVERY_STEPS and to_go % LOOK_EVERY_STEPS == 0:
            losses.append(validation_loss(layout, versions[-1], dataset, VALIDATION_BATCHES))
    return statistics.fmean(losses), counts


def one_microbatch(
    config: RunConfig,
    stages: list[StageModel],
    params: Tensor,
    tokens: Tensor,
    labels: Tensor,
    gradient: Tensor,
    arm: Arm,
    up: Bits,
) -> None:
    """Forward and backward through all stages, each boundary in the arm's forms; adds to `gradient`."""
    parts, offset = [], 0
    for stage in stages:
        parts.append(slice(offset, offset + stage.layout.parameter_count))
        offset = parts[-1].stop
    x, contexts = tokens, []
    for stage, part in zip(stages[:-1], parts[:-1], strict=True):
        y, context = stage.forward(params[part], x)
        contexts.append(context)
        x = carry(y, arm.boundary, up, x if len(contexts) > 1 else None)
    _, _, dx = stages[-1].loss(params[parts[-1]], x, labels, 1.0 / config.step_tokens, gradient[parts[-1]])
    assert dx is not None
    dy = carry(dx, arm.boundary, up, None)
    for index in reversed(range(len(stages) - 1)):
        dx = stages[index].backward(contexts[index], dy, gradient[parts[index]])
        if dx is not None:
            dy = carry(dx, arm.boundary, up, dy)


def read(path: Path) -> dict[tuple[str, int], dict[str, float]]:
    """Results by (arm, seed)."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    return {(line["arm"], line["seed"]): line for line in lines}


def show(results: dict[tuple[str, int], dict[str, float]]) -> None:
    """The table: gap to fp32, its interval, and bits."""
    print(f"{'arm':<40} {'seeds':>5} {'loss':>7} {'gap':>8} {'95 %':>8}  bits: up, gradient, parameter")
    for arm in ARMS:
        base = "fp32, outliers" if ARMS[arm].outliers else "fp32"
        seeds = sorted(seed for name, seed in results if name == arm and (base, seed) in results)
        if not seeds:
            continue
        gaps = [results[arm, seed]["loss"] - results[base, seed]["loss"] for seed in seeds]
        loss = statistics.fmean(results[arm, seed]["loss"] for seed in seeds)
        if len(gaps) > 1:
            width = STUDENT.get(len(gaps), 2.0) * statistics.stdev(gaps) / math.sqrt(len(gaps))
        else:
            width = math.nan
        bits = [
            statistics.fmean(results[arm, seed][name] for seed in seeds) for name in ("up", "gradients", "parameters")
        ]
        print(
            f"{arm:<40} {len(seeds):>5} {loss:>7.3f} {statistics.fmean(gaps):>+8.4f} {width:>8.4f}  "
            + "  ".join(f"{each:6.3f}" for each in bits)
        )


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File of results.")
@click.option("--seeds", type=int, default=0, help="Seeds to bring it to.")
@click.option("--arm", "arms", multiple=True, type=click.Choice(list(ARMS)), help="Only these; may be repeated.")
@click.option("--first", type=int, default=1, help="The first seed.")
def main(out: Path, seeds: int, arms: tuple[str, ...], first: int) -> None:
    """Runs what is missing, one arm and seed after the other, and prints the table."""
    torch.set_num_threads(1)
    run: Callable[[RunConfig, Arm, Dataset], tuple[float, Counts]] = train
    for seed in range(first, first + seeds):
        config = run_config(seed)
        dataset: Dataset | None = None
        for name in arms or tuple(ARMS):
            if (name, seed) in read(out):
                continue
            dataset = dataset or Dataset(config)
            began = time.perf_counter()
            loss, counts = run(config, ARMS[name], dataset)
            line = {
                "arm": name, "seed": seed, "loss": loss, "up": counts.up.each, "gradients": counts.gradients.each,
                "parameters": counts.parameters.each, "seconds": time.perf_counter() - began,
            }  # fmt: skip
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"seed {seed} {name}: {loss:.4f} in {line['seconds']:.0f} s", flush=True)
    show(read(out))


if __name__ == "__main__":
    main()
