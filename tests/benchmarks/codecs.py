"""Small forms on one core: bits, error, and gigabytes of fp32 a second; `python -m tests.benchmarks.codecs`.

The last column is the rate over that of copying the same tensor in memory, measured in turns with it: a ratio that
holds on a busy machine too. Figures are the best of several tries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import click
import numpy as np
import torch
from torch import Tensor

from node.compute.forms import d4, grid, p12, q8
from node.compute.forms.packed import pack, unpack

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
    pair = np.stack((values, values)).astype(np.int32)
    show("gi: folding a part into a shard's sum", total, lambda: np.add(pair[0], pair[1], out=pair[0]))


@click.command()
def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    print(f"{VALUES:,} values, one thread of torch")
    boundaries()
    integers()


if __name__ == "__main__":
    main()
