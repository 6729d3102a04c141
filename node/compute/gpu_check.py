"""Figures of a device, as JSON: `./deploy/gpu-check --out FILE [--device cuda] [--rehearsal]`.

* speed: tokens a second through a stage of 1 B parameters, as a volunteer computes it (the device's own process, fed
  through its pipe, with forms, checks and sums on the grid), over that of torch's own training step on the very same
  blocks; and the share of what the device's matrix products reach;
* shares of time: of kernels, of copies, and of copies under kernels, from a trace that is kept beside the figures;
* repeats: whether a task that is done twice gives the same bits, as we set torch up and as it is by itself;
* forms: whether what the device packs, unpacks and rounds to the grid is what the processor does, bit by bit;
* memory: what the device really holds beside the count, at the peak and per graph;
* recovery: out of memory in the middle of a task, then graphs are dropped and the same task succeeds;
* tolerance: how far results lie from the processor's, for each class of numerics.

`--rehearsal` takes tiny shapes, so that the same code runs on a processor or a small device; its speeds mean nothing.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from torch import Tensor

from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import Device, open_device
from node.compute.forms import packed, q8
from node.compute.layout import StageLayout
from node.compute.model import StageModel
from node.compute.probe import flops_per_token
from node.compute.stage_grid import StageGrid
from node.compute.wire import decode, encode
from node.compute.worker import StageWorker
from node.machine.jobs import Backward, Forward, LoadParameters, SetUpDevice
from node.process.device_lane import DeviceLane
from node.process.device_start import DeviceOptions
from node.process.store import Buffer
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.run.course import Chunk, Course
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import BatchSection, ComputeSection, ModelSection, RunConfig, WireSection

BILLION = ModelSection(layers=22, hidden=2048, heads=32, kv_heads=4, feed_forward=5632, context=2048)
"""TinyLlama's shape: its 44 halves hold 0.97 B parameters."""
TINY = ModelSection(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=176, context=64)
VOCABULARY = 259
REPEATS = 5
MICROBATCHES = 12
ANSWER_S = 300.0
"""For a job of the device's process: the first one loads torch, the second a billion parameters."""
SUM = 1
"""The accumulator of every task."""
VERSIONS, GRAPHS = 2, 2
"""What lies on the device at the peak that is measured."""


def run_config(model: ModelSection, dtype: str) -> RunConfig:
    """Parameters come in bf16: in `p12` a processor takes as long to unpack a billion as the rest of the check does."""
    batch, compute = BatchSection(microbatches=8, samples=1), ComputeSection(dtype=dtype)  # type: ignore[arg-type]
    return RunConfig(model=model, batch=batch, compute=compute, wire=WireSection(parameters="bf16"))


def check(device: Device, choice: DeviceChoice, model: ModelSection, folder: Path) -> dict[str, Any]:
    """All figures of a device; the trace goes into `folder`."""
    config = run_config(model, "bf16")
    layout = halves_of(config)
    return {
        "device": device.label,
        "torch": torch.__version__,
        "is_accelerator": device.is_accelerator,
        "parameters": layout.parameter_count,
        "context": config.model.context,
        "speed": speed(device, choice, layout, folder),
        "repeats": {dtype: repeats(device, model, dtype) for dtype in ("fp32", "bf16")},
        "forms_agree": forms_agree(device, layout),
        "memory": {dtype: memory(device, halves_of(run_config(model, dtype))) for dtype in ("bf16", "fp32")},
        "recovery": recovery(device, layout),
        "tolerance": {dtype: tolerance(device, model, dtype) for dtype in ("fp32", "bf16")},
    }


def halves_of(config: RunConfig) -> StageLayout:
    """A stage of all layers, without embedding and head."""
    return StageLayout(config, VOCABULARY, 1, config.block_count - 1)


def one_layer(model: ModelSection, dtype: str) -> StageLayout:
    """A stage that a processor, too, computes in a moment."""
    small = msgspec.structs.replace(model, layers=1, context=min(256, model.context))
    return StageLayout(run_config(small, dtype), VOCABULARY, 1, 3)


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


def first_grid(layout: StageLayout) -> Tensor:
    """The grid that sums of step 0 lie on."""
    grid = StageGrid.of(layout)
    return grid.steps(grid.first_averages())


@lru_cache(maxsize=1)
def _weights(model: ModelSection) -> Tensor:
    """Of a billion they take a processor ten seconds."""
    return halves_of(run_config(model, "fp32")).initial(1)


def weights(layout: StageLayout) -> Tensor:
    """[parameter_count] fp32, the same for all dtypes; not to be changed."""
    return _weights(layout.config.model)


def ready_worker(device: Device, layout: StageLayout, versions: int = 1) -> StageWorker:
    """A volunteer's worker with weights and a grid, about to do a microbatch of step 0."""
    worker = StageWorker(layout.config, layout.vocabulary, *layout.chunks[0], 1, device)
    for version in range(versions):
        worker.set_params(version, [weights(layout)])
        worker.set_grid(version, [first_grid(layout)])
    worker.begin_task(0, 0, 0)
    return worker


def speed(device: Device, choice: DeviceChoice, layout: StageLayout, folder: Path) -> dict[str, Any]:
    """A volunteer's device at work, against the same blocks in a plain training step of torch."""
    tokens = layout.config.batch.samples * layout.config.model.context
    x, dy = inputs(layout)
    process_s = of_a_process(choice, layout, x, dy)
    form = layout.config.wire.activations_up
    worker = ready_worker(device, layout)
    arrived_x, arrived_dy = encode(x, form), encode(dy, form)

    def task() -> None:
        y = worker.forward("task", 0, decode(arrived_x, tuple(x.shape), form, device.upload))
        encode(y, form)
        dx = worker.backward("task", decode(arrived_dy, tuple(dy.shape), form, device.upload), SUM)
        assert dx is not None
        encode(dx, form)

    ours_s = best_s(device, task)
    shares = traced(device, task, folder / "gpu-check-trace.json")
    worker.close()
    model, where = StageModel(layout), device.torch_device
    params = weights(layout).to(device=where, dtype=model.dtype)
    there, gradient = x.to(device=where, dtype=model.dtype), dy.to(device=where, dtype=model.dtype)
    total = torch.zeros_like(params)

    def plain() -> None:
        model.backward(model.forward(params, there)[1], gradient, total)

    with as_torch_is():
        torch_s = best_s(device, plain)
    flops = tokens * flops_per_token(layout)
    product = product_flops_per_s(device, model.dtype, layout.config.model.hidden)
    return {
        "ours_tokens_per_s": tokens / process_s,
        "ours_without_its_process_tokens_per_s": tokens / ours_s,
        "torch_tokens_per_s": tokens / torch_s,
        "ours_over_torch": torch_s / process_s,
        "ours_share_of_matrix_products": flops / process_s / product,
        "torch_share_of_matrix_products": flops / torch_s / product,
        "matrix_products_flops_per_s": product,
        "shares_of_time": shares,
    }


def of_a_process(choice: DeviceChoice, layout: StageLayout, x: Tensor, dy: Tensor) -> float:
    """Seconds of the fastest microbatch, as of everything here, forward and backward, in a process as a daemon has one,
    a task at a time."""
    form = layout.config.wire.activations_up
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    lane = DeviceLane(
        DeviceOptions(1, choice, low_priority=False),
        lambda job, done, _: answers.put((job, done)),
        lambda sentence: answers.put((None, sentence)),
    )

    def answered(count: int) -> None:
        for _ in range(count):
            job, done = answers.get(timeout=ANSWER_S)
            reason = done if job is None or isinstance(done, str) else done.reason
            if reason is not None:
                raise RuntimeError(f"the device's process: {reason}")

    try:
        for job, buffers in first_jobs(layout):
            lane.submit(job, buffers)
        answered(2)
        shape = tuple(x.shape)
        bodies: dict[int, Buffer] = {1: encode(x, form), 2: encode(dy, form)}
        refs = [TensorRef(key, shape, form, memoryview(body).nbytes) for key, body in bodies.items()]

        def forward(microbatch: int) -> None:
            lane.submit(Forward(TaskId(0, microbatch, 1, "F"), 0, refs[0], 3), {1: bodies[1]})

        def backward(microbatch: int) -> None:
            task = TaskId(0, microbatch, 1, "B")
            lane.submit(Backward(task, 0, refs[1], None, 4, SUM), {2: bodies[2]})

        best = float("inf")
        for microbatch in range(MICROBATCHES):
            began_s = time.perf_counter()
            forward(microbatch)
            answered(1)
            backward(microbatch)
            answered(1)
            best = min(best, time.perf_counter() - began_s)
        return best
    finally:
        lane.kill()


def first_jobs(layout: StageLayout) -> Iterator[tuple[Any, dict[int, Buffer]]]:
    """What a volunteer's device is told before its first task: its stage, the middle one of three, and the weights."""
    config, end = layout.config, layout.config.block_count - 1
    server = ServerPlan(node=NodeId("front"), role="both", addresses=())
    chunks = (Chunk(0, 1, 0), Chunk(1, end, 1), Chunk(end, end + 1, 2))
    stages = (StagePlan(servers=(server,)),) * len(chunks)
    plan = Plan(generation=1, ledger_generation=1, restore_step=-1, stages=stages, course=Course(chunks, ((0, 1, 2),)))
    yield SetUpDevice(config, layout.vocabulary, plan, 1), {}
    whole, grid = weights(layout), first_grid(layout)
    bodies: dict[int, Buffer] = {1: encode(whole, "bf16"), 2: packed.pack(grid.to(torch.int32).numpy())}
    parts = TensorRef(1, tuple(whole.shape), "bf16", memoryview(bodies[1]).nbytes)
    steps = TensorRef(2, tuple(grid.shape), "gi", memoryview(bodies[2]).nbytes)
    yield LoadParameters(0, (parts,), (steps,)), bodies


@contextmanager
def as_torch_is() -> Iterator[None]:
    """Without what makes a device repeat itself."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def repeats(device: Device, model: ModelSection, dtype: str) -> dict[str, bool]:
    """Whether ten times the same task give the same bits: as we set torch up, and as it is by itself."""
    layout = halves_of(run_config(msgspec.structs.replace(model, layers=2), dtype))
    x, dy = inputs(layout)

    worker = ready_worker(device, layout)

    def once() -> list[Tensor]:
        y = worker.forward("task", 0, x)
        dx = worker.backward("task", dy, SUM)
        assert dx is not None
        return [y, dx, worker.take_gradient(SUM)]

    def alike() -> bool:
        first = once()
        return all(torch.equal(a, b) for _ in range(9) for a, b in zip(first, once(), strict=True))

    found = {"ours": alike()}
    with as_torch_is():
        found["torch_by_itself"] = alike()
    worker.close()
    return found


def product_flops_per_s(device: Device, dtype: torch.dtype, width: int) -> float:
    """What a large matrix product reaches: the ceiling of the device as torch can use it."""
    size = max(256, 4 * width)
    left, right = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(2))
    return 2 * size**3 / best_s(device, lambda: left @ right)


def traced(device: Device, task: Callable[[], None], path: Path) -> dict[str, float]:
    """Shares of the time of three tasks that kernels and copies take, and of the copies' time that lies under kernels.

    Empty where nothing can be traced: only CUDA's copies are, where the driver allows it.
    """
    if device.torch_device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(3):
            task()
        device.synchronize()
    found.export_chrome_trace(str(path))
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e.get("cat") == "kernel")
    copies = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e.get("cat") == "gpu_memcpy")
    if not kernels or not copies:
        return {}  # a container may not be allowed to look
    whole = max(end for _, end in kernels + copies) - min(begin for begin, _ in kernels + copies)
    copied = sum(end - begin for begin, end in copies)
    covered = sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in copies for start, stop in kernels)
    return {
        "kernels": sum(end - begin for begin, end in kernels) / whole,
        "copies": copied / whole,
        "copies_under_kernels": covered / copied,
    }


def forms_agree(device: Device, layout: StageLayout) -> dict[str, bool]:
    """Of a tensor with some values that are sent apart, and of a gradient with many sizes."""
    x, _ = inputs(layout)
    x.view(-1)[:: 64 * 37] *= 400.0
    there, found = device.upload(x), dict[str, bool]()
    for form in ("q8", "d4", "bf16", "fp32"):
        made = encode(x, form)
        same = bytes(encode(there, form)) == bytes(made)
        back = decode(made, tuple(x.shape), form, device.upload).cpu()
        found[form] = same and torch.equal(back, decode(made, tuple(x.shape), form))
    one = one_layer(layout.config.model, "fp32")
    gradient = one.initial(2) * torch.logspace(-6, 0, one.parameter_count)
    sums = []
    for where in (gradient, device.upload(gradient)):
        sums.append(torch.zeros_like(where, dtype=torch.int32))
        for microbatch in range(3):
            StageGrid.of(one).add(sums[-1], where, first_grid(one), 0, microbatch)
    found["gi"] = torch.equal(sums[0], sums[1].cpu())
    return found


def memory(device: Device, layout: StageLayout) -> dict[str, float]:
    """Counted bytes beside those that the device's allocator has had: two versions, a sum, two graphs, and a backward
    of one of them. MPS tells no peak: 0."""
    before = device.used_bytes()
    worker = ready_worker(device, layout, VERSIONS)
    x, dy = inputs(layout)
    worker.forward("first", 0, x)
    worker.backward("first", dy, SUM)  # from here on there is a sum
    device.forget_peak()
    worker.forward(0, 0, x)
    device.synchronize()
    held = device.used_bytes()
    for graph in range(1, GRAPHS):
        worker.forward(graph, 0, x)
    device.synchronize()
    graph_bytes = (device.used_bytes() - held) / (GRAPHS - 1)
    for graph in range(GRAPHS):
        worker.backward(graph, dy, SUM)
    counted, light = worker.memory, worker.keeps_inputs_only
    counted_graph = counted.light_graph_bytes if light else counted.graph_bytes
    lasting = VERSIONS * counted.parameter_bytes + counted.sum_bytes + counted.gradient_bytes
    found = {
        "counted_bytes_per_parameter": lasting / layout.parameter_count,
        "counted_graph_bytes": float(counted_graph),
        "measured_graph_bytes": graph_bytes,
        "counted_peak_bytes": float(counted.fixed_bytes(light) + (GRAPHS - 1) * counted_graph),
        "measured_peak_bytes": float(max(0, device.peak_bytes() - before)),
        "graphs_max": float(worker.graphs_max),
    }
    worker.close()
    return found


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
    layout = one_layer(model, dtype)
    x, dy = inputs(layout)
    found = []
    for where in (device, open_device(DeviceChoice("cpu"))):
        worker = ready_worker(where, layout)
        y = worker.forward("task", 0, x)
        dx = worker.backward("task", dy, None)
        assert dx is not None
        found.append((y.cpu(), dx.cpu()))
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
        choice = DeviceChoice.parse(text)
        device = open_device(choice)
    except BadInputError as error:
        raise click.UsageError(f"{error}. Nothing was measured.") from None
    found = check(device, choice, TINY if rehearsal else BILLION, out.absolute().parent)
    found["rehearsal"] = rehearsal
    out.write_text(json.dumps(found, indent=1) + "\n")
    click.echo(out.read_text())


if __name__ == "__main__":
    main()
