"""What leaving out stages costs and gains: `python -m tests.benchmarks.skipping FILE [--seeds 3] [--times PREDICTED]`.

SkipPipe's question (section 5): partial pipelines take less time a step and learn less in one; which of them learns
most in an hour? A LLaMA of 2.2 M parameters, 24 sub-layer blocks and two, on the built-in text, with the default forms
on the wire, in four stages with none, one and two of them left out by each microbatch, and in six with none, two and
three. Every arm of a seed sees the same weights at first and the same batches. Training is `train_reference`, whose
weights are those of the distributed run, bit for bit (SHAPES.md).

FILE gets a line for each (arm, seed) as it ends, and what is in it is not trained again. Beside the losses of the steps
there is the validation loss of the weights: *whole*, with nothing left out, and *partial*, with one, two or three
stages of the arm's pipeline left out at evaluation, in turns.

PREDICTED is what `tests.benchmarks.predicted` has measured of the same pipelines with real processes on shaped lines
(cases "4 stages, skip 1" and so on): with it the curves are drawn against time, too, into `skipping.svg` beside FILE.
"""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import click
import torch
from torch import Tensor

from node.compute.layout import StageLayout
from node.compute.reference import train_reference
from node.compute.segments import SegmentModel
from node.compute.wire import round_trip
from node.data.dataset import Dataset
from protocol.run.config_file import change_run
from protocol.run.course import course_of
from protocol.run.run import RunConfig

STEPS = 150
VALIDATION_BATCHES = 24
SMOOTH = 10
"""Steps whose mean loss is one point of a curve."""
ARMS = {
    "4 stages, skip 0": (4, 0.0),
    "4 stages, skip 1": (4, 0.25),
    "4 stages, skip 2": (4, 0.5),
    "6 stages, skip 0": (6, 0.0),
    "6 stages, skip 2": (6, 0.34),
    "6 stages, skip 3": (6, 0.5),
}
MODEL = ("model.layers=12", "model.hidden=128", "model.feed_forward=344")


def config_of(arm: str, seed: int) -> RunConfig:
    """The run of an arm."""
    stages, skip = ARMS[arm]
    keys = (
        f"steps={STEPS}", f"seed={seed}", *MODEL, "batch.microbatches=15", "batch.samples=1",
        f"stages.count={stages}", "stages.back_servers=0", f"routes.skip={skip}",
    )  # fmt: skip
    return change_run(RunConfig(), keys)


def evaluated(config: RunConfig, params: Tensor, dataset: Dataset) -> float:
    """Mean nats a token over validation batches that go the routes of this run, in turns."""
    course = course_of(config)
    layout = StageLayout.whole(config, dataset.vocabulary)
    models = [SegmentModel(layout, (chunk.first_block, chunk.end_block)) for chunk in course.chunks]
    total, count = 0.0, 0
    routes = cycle(course.routes)
    for index in range(VALIDATION_BATCHES):
        x, labels = (torch.from_numpy(array).long() for array in dataset.validation_batch(index))
        *visits, last = (models[chunk] for chunk in next(routes))
        for model in visits:
            x = round_trip(model.outputs(params, x).float(), config.wire.activations_up)
        loss_sum, labels_seen = last.evaluate(params, x, labels)
        total, count = total + loss_sum, count + labels_seen
    return total / count


def train(arm: str, seed: int) -> dict[str, Any]:
    """One line of the file."""
    config = config_of(arm, seed)
    result = train_reference(config)
    stages = ARMS[arm][0]
    partial = {
        str(left_out): evaluated(
            change_run(config, (f"routes.skip={left_out / stages:.3f}",)), result.params, result.dataset
        )
        for left_out in range(stages // 2 + 1)
    }
    return {"arm": arm, "seed": seed, "losses": result.losses, "left out at evaluation": partial}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(rows: list[dict[str, Any]], times: dict[str, float]) -> None:
    """The table of all arms."""
    print("arm                seeds  s/step  loss, last 10 steps  validation: whole, 1, 2, 3 left out")
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        if not mine:
            continue
        ends = [mean(row["losses"][-SMOOTH:]) for row in mine]
        spread = stdev(ends) if len(ends) > 1 else 0.0
        parts = [
            mean(row["left out at evaluation"][left_out] for row in mine)
            for left_out in mine[0]["left out at evaluation"]
        ]
        print(
            f"{arm:18} {len(mine):>5} {times.get(arm, UNKNOWN):>7.2f}  {mean(ends):>8.3f} +- {spread:.3f}"
            f"      {', '.join(f'{loss:.3f}' for loss in parts)}"
        )
    for stages in (4, 6):
        arms = [arm for arm in ARMS if arm.startswith(str(stages)) and arm in times]
        if not arms or not all(any(row["arm"] == arm for row in rows) for arm in arms):
            continue
        end_s = STEPS * min(times[arm] for arm in arms)
        found = {arm: loss_at([row for row in rows if row["arm"] == arm], end_s / times[arm]) for arm in arms}
        words = "; ".join(f"{arm} {loss:.3f}" for arm, loss in found.items())
        print(f"{stages} stages after {end_s:.0f} s, when the quickest is done: {words}")


def curve(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(steps done, mean loss of the last SMOOTH over all seeds)."""
    return [
        (end, mean(mean(row["losses"][end - SMOOTH : end]) for row in rows)) for end in range(SMOOTH, STEPS + 1, SMOOTH)
    ]


def loss_at(rows: list[dict[str, Any]], steps: float) -> float:
    """The curve's last point that is reached after so many steps."""
    reached = [loss for end, loss in curve(rows) if end <= steps + 1e-6]
    return reached[-1] if reached else float("nan")


# ---- the picture ----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP = 400, 260, 46, 46
BEGIN = 30
"""Steps that no curve shows: everybody falls from 5 to 3.5 there, and what is to be seen is a tenth of that."""
UNKNOWN = float("nan")
COLOURS = {"skip 0": "#4c72b0", "skip 1": "#dd8452", "skip 2": "#55a868", "skip 3": "#c44e52"}


def picture(rows: list[dict[str, Any]], times: dict[str, float]) -> str:
    """Loss against steps (left) and against measured time (right); four stages above, six below."""
    panels = []
    for line, stages in enumerate((4, 6)):
        arms = [arm for arm in ARMS if arm.startswith(str(stages)) and any(row["arm"] == arm for row in rows)]
        curves = {
            arm: [point for point in curve([row for row in rows if row["arm"] == arm]) if point[0] >= BEGIN]
            for arm in arms
        }
        timed = {
            arm: [(end * times[arm], loss) for end, loss in points] for arm, points in curves.items() if arm in times
        }
        panels.append(panel(0, line, f"{stages} stages: loss against steps", "steps", curves))
        panels.append(panel(1, line, f"{stages} stages: loss against time, measured on shaped lines", "s", timed))
    columns = 2 if any(arm in times for arm in ARMS) else 1
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * (WIDTH + 70) + 10}" height="{2 * (HEIGHT + 80)}"'
        ' font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(panels)}</svg>\n"
    )


def panel(column: int, line: int, title: str, unit: str, curves: dict[str, list[tuple[float, float]]]) -> str:
    """One diagram with its axes, curves and names."""
    points = [point for each in curves.values() for point in each]
    if not points:
        return ""
    most_x = max(x for x, _ in points)
    least, most = min(y for _, y in points), max(y for _, y in points)
    left, top = LEFT + column * (WIDTH + 70), TOP + line * (HEIGHT + 80)

    def place(x: float, y: float) -> str:
        return f"{left + x / most_x * WIDTH:.1f},{top + (most - y) / (most - least) * HEIGHT:.1f}"

    parts = [
        f'<text x="{left}" y="{top - 14}" font-weight="bold">{title}</text>',
        f'<path d="M{left},{top} v{HEIGHT} h{WIDTH}" fill="none" stroke="#888"/>',
    ]
    for i in range(5):
        y = least + (most - least) * i / 4
        parts.append(f'<text x="{left - 6}" y="{top + HEIGHT * (1 - i / 4) + 4:.0f}" text-anchor="end">{y:.2f}</text>')
        x = left + WIDTH * i / 4
        number = f"{most_x * i / 4:.0f}" + (f" {unit}" if i == 4 else "")
        parts.append(f'<text x="{x:.0f}" y="{top + HEIGHT + 18}" text-anchor="middle">{number}</text>')
    for place_in_list, (arm, each) in enumerate(curves.items()):
        name = arm.split(", ")[1]
        drawn = " ".join(place(x, y) for x, y in each)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts.append(
            f'<text x="{left + WIDTH - 60}" y="{top + 16 + 16 * place_in_list}" fill="{COLOURS[name]}">{name}</text>'
        )
    return "".join(parts)


@click.command(help=__doc__)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--seeds", type=int, default=0, help="How many of each arm are to be there.")
@click.option(
    "--times", "predicted", type=click.Path(path_type=Path, exists=True), help="Rows of tests.benchmarks.predicted."
)
def main(file: Path, seeds: int, predicted: Path | None) -> None:
    rows = read(file)
    for seed in range(1, seeds + 1):
        for arm in ARMS:
            if any(row["arm"] == arm and row["seed"] == seed for row in rows):
                continue
            rows.append(train(arm, seed))
            with file.open("a") as out:
                out.write(json.dumps(rows[-1]) + "\n")
    measured = json.loads(predicted.read_text()) if predicted else []
    times = {row["name"]: row["measured_s"] for row in measured if row["name"] in ARMS}
    show(rows, times)
    file.with_name("skipping.svg").write_text(picture(rows, times))


if __name__ == "__main__":
    main()
