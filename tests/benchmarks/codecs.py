"""Small forms on one core: bits, error, and gigabytes of fp32 a second; `python -m tests.benchmarks.codecs`.

The last column is the rate over that of copying the same tensor in memory, measured in turns with it: a ratio that
holds on a busy machine too. Figures are the best of several tries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

import click
import torch
from torch import Tensor

from node.compute.forms import d4, grid, p12, q8
from node.compute.forms.packed import pack, unpack
from node.compute.layout import StageLayout
from node.compute.shard import ShardWorker
from node.compute.side_by_side import SideBySide
from node.process.own_lanes import SIDE_BY_SIDE_MAX, usable_cores
from protocol.run.run import ModelSection, RunConfig

Result = TypeVar("Result")

VALUES = 1 << 22
"""16 MiB of fp32: beyond every cache, as a microbatch of 1 B-parameter models is."""
TASKS = 8


def best_s(call: Callable[[], object], copy: Callable[[], object], tries: int = 9) -> tuple[float, float]:
    """Seconds of the fastest of `tries` calls, and of the fastest copy in between."""
    best = [float("inf"), float("inf")]
    call()
    for _ in range(tries):
        for index, each in enumerate((call, copy)):
            began = time.perf_counter()
            each()
            best[index] = min(best[index], time.perf_counter() - began)
    return best[0], best[1]


def show(what: str, tensor: Tensor, call: Callable[[], object], note: str = "") -> None:
    """One line: what, GB/s, share of a copy's speed, and what else is worth knowing."""
    took_s, copy_s = best_s(call, tensor.clone)
    print(f"  {what:<44} {4e-9 * tensor.numel() / took_s:6.2f} GB/s  {copy_s / took_s:5.2f} of a copy  {note}")


def boundaries() -> None:
    """`q8` and `d4` on normal values, with and without a channel a thousand times the others."""
    plain = torch.randn(4, VALUES // 8192, 2048, generator=torch.Generator().manual_seed(1))
    spiked = plain.clone()
    spiked[..., 77] *= 1000
    both = (("", plain), (", an outlier channel", spiked))
    for what, form, x in ((name + of, form, x) for name, form in (("q8", q8), ("d4", d4)) for of, x in both):
        data = form.encode(x)
        error = form.decode(data, tuple(x.shape)) - x
        error[..., 77] = 0.0
        size = plain.clone()
        size[..., 77] = 0.0
        bits = 8 * len(data) / x.numel()
        note = f"{bits:.3f} bits, error {100 * float(error.norm() / size.norm()):.2f} %"
        show(f"{what}: encode", x, lambda x=x, form=form: form.encode(x), note)  # type: ignore[misc]
    for name, form in (("q8", q8), ("d4", d4)):
        data = form.encode(plain)
        show(f"{name}: decode", plain, lambda form=form, data=data: form.decode(data, tuple(plain.shape)))  # type: ignore[misc]
    show("bf16", plain, plain.bfloat16)


def integers() -> None:
    """Weight gradients on the grid, and parameters in fixed point."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.exp2(torch.rand(VALUES // 256, generator=generator) * 6 - 16)
    parts = [(torch.randn(VALUES // 256, 256, generator=generator) * sizes[:, None]).view(-1) for _ in range(2)]
    steps = grid.exponents(sizes.double() * TASKS**0.5, TASKS)
    total = torch.zeros(VALUES, dtype=torch.int32)
    numbers = count()

    def add() -> None:
        grid.add_to_grid(total, parts[0], steps, grid.task_key(1, 0, next(numbers)), 0, TASKS)

    show("gi: a task's gradient added to a sum", total, add)
    pages = range(0, VALUES, 1 << 18)
    keys = [grid.keys_of(b"k" * 32, page, 1 << 18) for page in pages]
    hashes = list(zip(keys, pages, strict=True))
    show("gi: the hash alone, keys apart", total, lambda: [grid.uniform(key, page, 1 << 18) for key, page in hashes])
    total.zero_()
    for task in range(TASKS):
        grid.add_to_grid(total, parts[task % 2].roll(task), steps, grid.task_key(1, 0, task), 0, TASKS)
    values = total.numpy()
    data = pack(values)
    show("gi: packing a sum of 8 tasks", total, lambda: pack(values), f"{8 * len(data) / VALUES:.2f} bits")
    show("gi: unpacking it", total, lambda: unpack(data, VALUES))
    old = torch.randn(VALUES, generator=generator) * 0.02
    new = old + torch.randn(VALUES, generator=generator) * 4e-4
    for name, base in (("whole", None), ("what changed", old)):
        made, held = p12.encode(new, base, 0, 12), None if base is None else p12.to_fixed(base, 12)
        bits = f"{8 * len(made) / VALUES:.2f} bits"
        show(f"p12: {name}: encode", total, lambda base=base: p12.encode(new, base, 0, 12), bits)  # type: ignore[misc]
        show(f"p12: {name}: decode", total, lambda made=made, held=held: p12.decode(made, VALUES, held))  # type: ignore[misc]


def shard(threads: int) -> None:
    """What a server does in a step with a shard of 63 M parameters: seconds a parameter, the best of three steps."""
    model = ModelSection(layers=10, hidden=1024, heads=8, kv_heads=8, feed_forward=2752, context=64)
    config, shared = RunConfig(model=model), SideBySide(threads)
    worker = ShardWorker(StageLayout(config, 257, 1, 21), 0, 2, shared)
    count, best = worker.end - worker.begin, dict[str, float]()
    worker.initial()
    part = pack(torch.randint(-9, 9, (count,), generator=torch.Generator().manual_seed(3), dtype=torch.int32).numpy())

    def timed(what: str, call: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        found = call()
        best[what] = min(best.get(what, float("inf")), (time.perf_counter() - began) / count)
        return found

    for step in range(3):
        timed("measure", lambda step=step: worker.measure(step, "gi", part))  # type: ignore[misc]
        for _ in range(3):
            timed("fold", lambda step=step: worker.fold_packed(step, part))  # type: ignore[misc]
        total = timed("end the sum", lambda step=step: worker.reduce(step)[0])  # type: ignore[misc]
        timed("update", lambda step=step, total=total: worker.apply(step, total, step, 1.0))  # type: ignore[misc]
        new, old = worker.params(step + 1), worker.params(step)
        timed("pack", lambda step=step, new=new, old=old: p12.encode(new, old, step, 12, shared))  # type: ignore[misc]
        worker.drop_below(config.version_of(step + 1), step + 1)
    words = ", ".join(f"{what} {1e9 * spent_s:.1f}" for what, spent_s in best.items())
    print(f"a shard of {count:,} parameters, threads: {threads}; nanoseconds a parameter: {words}")


@click.command()
def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    print(f"{VALUES:,} values, one thread of torch")
    boundaries()
    integers()
    for threads in sorted({1, min(SIDE_BY_SIDE_MAX, usable_cores())}):
        shard(threads)


if __name__ == "__main__":
    main()
