"""Speed of the arithmetic alone, without any network: `python -m tests.benchmarks.compute [--steps N]`.

Prints tokens a second of single-process training at the default run on one thread and on two, milliseconds of each kind
of task by stage, of the optimizer, and the codec's throughput. Figures are the best of several tries: on a machine that
does other things too, the best one is nearest to the truth.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import click
import torch

from node.compute.layout import StageLayout
from node.compute.optimizer import AdamWShard, partial_square_norm
from node.compute.probe import probe
from node.compute.reference import train_reference
from node.compute.shard import ShardWorker, StepSum
from node.compute.wire import decode, encode
from node.compute.worker import StageWorker
from node.data.dataset import Dataset
from protocol.run.run import RunConfig


def best_s(call: Callable[[], object], tries: int = 20) -> float:
    """Seconds of the fastest of `tries` calls, after one that warms up."""
    call()
    best = float("inf")
    for _ in range(tries):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def show(what: str, seconds: float, unit: str = "") -> None:
    print(f"  {what:<44} {seconds * 1e3:9.3f} ms  {unit}")


def time_training(config: RunConfig, dataset: Dataset, steps: int) -> None:
    print(f"training, single process, {steps} steps of {config.step_tokens} tokens")
    for threads in (1, 2):
        rates = [train_reference(config, steps, dataset=dataset, threads=threads).tokens_per_second for _ in range(3)]
        print(f"  {threads} thread{'s' * (threads > 1):<43} {max(rates):9.0f} tokens/s")


def time_tasks(config: RunConfig, dataset: Dataset) -> None:
    """One microbatch through each of two stages, as volunteers compute it."""
    middle = config.block_count // 2
    front = StageWorker(config, dataset.vocabulary, 0, middle)
    back = StageWorker(config, dataset.vocabulary, middle, config.block_count)
    for worker in (front, back):
        worker.set_params(0, [worker.layout.initial(1)])
    tokens, labels = (torch.from_numpy(array).long() for array in dataset.batch(0, 0))
    y = front.forward("task", 0, tokens)
    _, dx = back.tail(0, y, labels, 0)
    assert dx is not None
    forward_s = best_s(lambda: front.forward("task", 0, tokens))
    both_s = best_s(lambda: (front.forward("task", 0, tokens), front.backward("task", dx, 0)))
    print(f"tasks, one thread, microbatch of {tokens.numel()} tokens, two stages of {middle} blocks")
    show("first stage, forward", forward_s)
    show("first stage, backward", both_s - forward_s)
    show("first stage, backward with recomputation", best_s(lambda: front.recompute_backward(0, tokens, dx, 0)))
    show("last stage, forward, loss and backward", best_s(lambda: back.tail(0, y, labels, 0)))
    found = probe(config, dataset.vocabulary)
    print(f"  {'probe of one layer':<44} {found.flops_per_s / 1e9:9.1f} Gflop/s, {found.tokens_per_s:.0f} tokens/s")


def sum_up(shard: ShardWorker, gradient: torch.Tensor) -> None:
    for _ in range(4):
        shard.fold(0, gradient)
    shard.reduce(0)


def time_servers(config: RunConfig, dataset: Dataset) -> None:
    layout = StageLayout.whole(config, dataset.vocabulary)
    count = layout.parameter_count
    params, gradient = layout.initial(1), torch.randn(count)
    optimizer = AdamWShard(config, layout.decay_mask)
    shard = ShardWorker(layout, 0, 1)
    shard.initial()
    print(f"server, one shard of {count} parameters")
    show("sum of 4 contributions and its norm", best_s(lambda: sum_up(shard, gradient)))
    show("square norm", best_s(lambda: partial_square_norm(gradient)))
    show("AdamW in place", best_s(lambda: optimizer.apply(params, gradient, 5, 0.5)))
    show("new version with its digest", best_s(lambda: shard.apply(0, StepSum(gradient), 0, 0.5)))
    show("a microbatch of data", best_s(lambda: dataset.batch(3, 1)))


def time_codec() -> None:
    tensor = torch.randn(16 << 20)
    print("codec, one thread, MB/s of fp32 values (64 MiB)")
    for form in ("fp32", "bf16"):
        data = bytearray(encode(tensor, form))
        for what, call in (
            ("encode and copy once", lambda form=form: bytes(encode(tensor, form))),
            ("decode", lambda form=form, data=data: decode(data, (tensor.numel(),), form)),
        ):
            print(f"  {form} {what:<39} {tensor.nbytes / 1e6 / best_s(call, 5):9.0f} MB/s")


@click.command()
@click.option("--steps", default=10, show_default=True, help="Steps of each timed training.")
def main(steps: int) -> None:
    """Time the arithmetic at the default run."""
    config = RunConfig()
    began = time.perf_counter()
    dataset = Dataset(config)
    print(f"data read and tokenized in {time.perf_counter() - began:.1f} s: {dataset.describe()}")
    time_training(config, dataset, steps)
    torch.set_num_threads(1)
    time_tasks(config, dataset)
    time_servers(config, dataset)
    time_codec()


if __name__ == "__main__":
    main()
