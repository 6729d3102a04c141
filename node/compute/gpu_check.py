"""Figures of a device, as JSON: `./deploy/gpu-check --out FILE [--device cuda] [--rehearsal]`.

* speed: tokens a second through a stage of 1 B parameters, as a volunteer computes it (copies and forms included), over
  that of torch's own training step on the very same blocks; and the share of what the device's matrix products reach;
* overlap: how much of the time of copies lies under kernels, from a trace that is kept beside the figures;
* memory: what the device really holds beside the count, per parameter and per graph;
* recovery: out of memory in the middle of a task, then graphs are dropped and the same task succeeds;
* tolerance: how far results lie from the processor's, for each class of numerics.

`--rehearsal` takes tiny shapes, so that the same code runs on a processor or a small device; its speeds mean nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from torch import Tensor

from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import Device, open_device
from node.compute.forms import q8
from node.compute.layout import StageLayout
from node.compute.model import StageModel
from node.compute.probe import flops_per_token
from node.compute.wire import decode, encode
from node.compute.worker import StageWorker
from protocol.base.errors import BadInputError
from protocol.run.run import BatchSection, ComputeSection, ModelSection, RunConfig

BILLION = ModelSection(layers=22, hidden=2048, heads=32, kv_heads=4, feed_forward=5632, context=2048)
"""TinyLlama's shape: its 44 halves hold 0.97 B parameters."""
TINY = ModelSection(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=176, context=64)
VOCABULARY = 259
REPEATS = 5


def run_config(model: ModelSection, dtype: str) -> RunConfig:
    batch, compute = BatchSection(microbatches=8, samples=1), ComputeSection(dtype=dtype)  # type: ignore[arg-type]
    return RunConfig(model=model, batch=batch, compute=compute)


def check(device: Device, model: ModelSection, folder: Path) -> dict[str, Any]:
    """All figures of a device; the trace goes into `folder`."""
    config = run_config(model, "bf16")
    layout = StageLayout(config, VOCABULARY, 1, config.block_count - 1)
    return {
        "device": device.label,
        "torch": torch.__version__,
        "is_accelerator": device.is_accelerator,
        "parameters": layout.parameter_count,
        "context": config.model.context,
        "speed": speed(device, layout, folder),
        "memory": memory(device, layout),
        "recovery": recovery(device, layout),
        "tolerance": {dtype: tolerance(device, model, dtype) for dtype in ("fp32", "bf16")},
    }


def best_s(device: Device, call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls, after one that warms up."""
    call()
    best = float("inf")
    for _ in range(REPEATS):
        device.synchronize()
        began_s = time.perf_counter()
        call()
        device.synchronize()
        best = min(best, time.perf_counter() - began_s)
    return best


def inputs(layout: StageLayout) -> tuple[Tensor, Tensor]:
    """A microbatch's input and output gradient, on the processor."""
    config = layout.config
    shape = (config.batch.samples, config.model.context, config.model.hidden)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator) * 1e-4


def ready_worker(device: Device, layout: StageLayout) -> StageWorker:
    """A volunteer's worker with weights and a grid, about to do a microbatch of step 0."""
    worker = StageWorker(layout.config, layout.vocabulary, *layout.chunks[0], 1, device)
    worker.set_params(0, [layout.initial(1)])
    return worker


def speed(device: Device, layout: StageLayout, folder: Path) -> dict[str, float | str]:
    """A task as a volunteer does it, against the same blocks in a plain training step of torch."""
    tokens = layout.config.batch.samples * layout.config.model.context
    x, dy = inputs(layout)
    form = layout.config.wire.activations_up
    worker = ready_worker(device, layout)
    arrived_x, arrived_dy = encode(x, form), encode(dy, form)

    def task() -> None:
        y = worker.forward("task", 0, decode(arrived_x, tuple(x.shape), form))
        encode(y, form)
        dx = worker.backward("task", decode(arrived_dy, tuple(dy.shape), form), None)
        assert dx is not None
        encode(dx, form)

    ours_s = best_s(device, task)
    overlap = traced_overlap(device, task, folder / "gpu-check-trace.json")
    worker.close()
    model, where = StageModel(layout), device.torch_device
    params = layout.initial(1).to(device=where, dtype=model.dtype)
    there, gradient = x.to(device=where, dtype=model.dtype), dy.to(device=where, dtype=model.dtype)
    total = torch.zeros_like(params)

    def plain() -> None:
        model.backward(model.forward(params, there)[1], gradient, total.zero_())

    torch_s = best_s(device, plain)
    flops = tokens * flops_per_token(layout)
    product = product_flops_per_s(device, model.dtype, layout.config.model.hidden)
    return {
        "ours_tokens_per_s": tokens / ours_s,
        "torch_tokens_per_s": tokens / torch_s,
        "ours_over_torch": torch_s / ours_s,
        "ours_share_of_matrix_products": flops / ours_s / product,
        "torch_share_of_matrix_products": flops / torch_s / product,
        "copies_under_kernels": overlap,
    }


def product_flops_per_s(device: Device, dtype: torch.dtype, width: int) -> float:
    """What a large matrix product reaches: the ceiling of the device as torch can use it."""
    size = max(256, 4 * width)
    left, right = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(2))
    return 2 * size**3 / best_s(device, lambda: left @ right)


def traced_overlap(device: Device, task: Callable[[], None], path: Path) -> float | str:
    """Share of the time of copies during which a kernel ran; a sentence where there is nothing to trace."""
    if device.torch_device.type != "cuda":
        return "no trace: only CUDA's copies are traced"
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            task()
        device.synchronize()
    found.export_chrome_trace(str(path))
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e.get("cat") == "kernel")
    copies = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e.get("cat") == "gpu_memcpy"]
    whole = sum(end - begin for begin, end in copies)
    covered = sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in copies for start, stop in kernels)
    return covered / whole if whole else 0.0


def memory(device: Device, layout: StageLayout) -> dict[str, float]:
    """Counted bytes beside those that the device's allocator has."""
    before = device.used_bytes()
    worker = ready_worker(device, layout)
    x, _ = inputs(layout)
    held = device.used_bytes() - before
    worker.forward("task", 0, x)
    device.synchronize()
    graph = device.used_bytes() - before - held
    counted = worker.memory
    whole = 2 * counted.parameter_bytes + counted.sum_bytes + counted.gradient_bytes
    worker.close()
    return {
        "counted_bytes_per_parameter": whole / layout.parameter_count,
        "counted_graph_bytes": float(counted.graph_bytes),
        "measured_graph_bytes": float(graph),
        "graphs_max": float(worker.graphs_max),
    }


def recovery(device: Device, layout: StageLayout) -> dict[str, bool | int]:
    """Keeps graphs until the device is full, drops one, and does the task that failed."""
    worker = ready_worker(device, layout)
    x, _ = inputs(layout)
    ballast: list[Tensor] = []
    claimed = max(0, device.free_bytes() - 3 * worker.memory.graph_bytes)
    if device.torch_device.type == "cpu":
        device.claim(claimed)  # a processor's memory is not ours to fill
    else:
        ballast.append(torch.empty(claimed, dtype=torch.uint8, device=device.torch_device))
    kept, failed = 0, False
    while not failed and kept < 64:
        try:
            worker.forward(kept, 0, x)
            kept += 1
        except RuntimeError as error:
            if not device.is_out_of_memory(error):
                raise
            failed = True
    worker.drop_graph(0)
    device.tidy()
    worker.forward("again", 0, x)
    ballast.clear()
    if device.torch_device.type == "cpu":
        device.release(claimed)
    worker.close()
    return {"graphs_kept": kept, "ran_out": failed, "went_on": True}


def tolerance(device: Device, model: ModelSection, dtype: str) -> dict[str, float]:
    """Relative distance of a layer's results from the processor's, and the share of `q8` codes that differ."""
    config = msgspec.structs.replace(
        run_config(model, dtype), model=msgspec.structs.replace(model, layers=1, context=min(256, model.context))
    )
    layout = StageLayout(config, VOCABULARY, 1, 3)
    x, dy = inputs(layout)
    found = []
    for where in (device, open_device(DeviceChoice("cpu"))):
        worker = ready_worker(where, layout)
        y = worker.forward("task", 0, x)
        dx = worker.backward("task", dy, None)
        assert dx is not None
        found.append((y, dx))
        worker.close()
    (y, dx), (expected_y, expected_dx) = found
    codes = [torch.frombuffer(q8.encode(each), dtype=torch.uint8) for each in (y, expected_y)]
    same = codes[0].numel() == codes[1].numel()
    return {
        "output": float((y - expected_y).norm() / expected_y.norm()),
        "input_gradient": float((dx - expected_dx).norm() / expected_dx.norm()),
        "codes_that_differ": float((codes[0] != codes[1]).float().mean()) if same else 1.0,
    }


@click.command()
@click.option("--device", "text", default="cuda", show_default=True, help="As of `barnraise join`.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("gpu-check.json"))
@click.option("--rehearsal", is_flag=True, help="Tiny shapes: tries the check itself, on any machine.")
def main(text: str, out: Path, rehearsal: bool) -> None:
    """Measures a device and writes what was found."""
    try:
        device = open_device(DeviceChoice.parse(text))
    except BadInputError as error:
        raise click.UsageError(f"{error}. Nothing was measured.") from None
    found = check(device, TINY if rehearsal else BILLION, out.absolute().parent)
    found["rehearsal"] = rehearsal
    out.write_text(json.dumps(found, indent=1) + "\n")
    click.echo(out.read_text())


if __name__ == "__main__":
    main()
