"""Tests of `node.compute.memory`, and of a worker on a device that has little of it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from node.compute.attention import Kind
from node.compute.devices.device import SmallDevice
from node.compute.gpu_check import BILLION, halves_of
from node.compute.gpu_check import run_config as gpu_run
from node.compute.layout import StageLayout
from node.compute.memory import stage_memory
from node.compute.model import StageContext, StageModel
from node.compute.segments import SegmentModel, Visit
from node.compute.worker import GRAPHS_WANTED, StageWorker
from protocol.run.run import BatchSection, ComputeSection, ModelSection, RunConfig, WireSection
from protocol.run.segments import segment_ranges
from tests.node.compute.small import VOCABULARY

CONFIG = RunConfig(model=ModelSection(layers=4, hidden=64, heads=4, kv_heads=2, feed_forward=176, context=64))


def run_config(dtype: str, kv_heads: int = 2) -> RunConfig:
    model = msgspec.structs.replace(CONFIG.model, kv_heads=kv_heads)
    return msgspec.structs.replace(CONFIG, model=model, compute=ComputeSection(dtype=dtype))  # type: ignore[arg-type]


def kept_bytes(model: StageModel) -> int:
    """What a graph really keeps: every storage that autograd saves, and the ends, without weights and angles."""
    layout, config = model.layout, model.layout.config
    params = layout.initial(0).to(model.dtype)
    shape = (config.batch.samples, config.model.context)
    tokens = torch.zeros(shape, dtype=torch.int64)
    x = tokens if layout.has_embedding else torch.randn(*shape, config.model.hidden).to(model.dtype)
    model.forward(params, x)  # makes the angles
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        context: StageContext = model.forward(params, x)[1]
    keep(context.x), keep(context.y)
    for tensor in (params, *(angle for angles in model._rotary.values() for angle in angles)):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("blocks", [(0, 5), (1, 2), (2, 3), (1, 3), (2, 4), (3, 9)])
def test_a_graph_takes_what_is_counted(blocks: tuple[int, int], kv_heads: int, dtype: str) -> None:
    """To the byte, for every kind of stage, with and without groups of heads, in both numerics."""
    layout = StageLayout(run_config(dtype, kv_heads), VOCABULARY, *blocks)
    model = StageModel(layout)
    assert kept_bytes(model) == stage_memory(layout).graph_bytes
    model.keeps_inputs_only = True
    assert kept_bytes(model) == stage_memory(layout).light_graph_bytes


def attends(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """As on a device that has a kernel for this form."""
    monkeypatch.setattr("node.compute.attention.attention_kind", lambda *_: kind)


KINDS: list[tuple[Kind, str]] = [("repeated", "fp32"), ("repeated", "bf16"), ("wide", "bf16")]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_copies_of_keys_and_values_are_counted(
    kind: Kind, dtype: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, where a device has no kernel for groups of heads, or none for bf16."""
    attends(monkeypatch, kind)
    layout = StageLayout(run_config(dtype, kv_heads), VOCABULARY, 1, 3)
    model = StageModel(layout)
    assert kept_bytes(model) == stage_memory(layout, attention_kind=kind).graph_bytes
    model.keeps_inputs_only = True
    assert kept_bytes(model) == stage_memory(layout, attention_kind=kind).light_graph_bytes


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", "grouped"), ("fp32", "repeated")])
def test_a_graph_took_on_a_card_what_is_counted(dtype: str, kind: Kind) -> None:
    """On the H200 that was measured: in fp32 it kept 231 MB more than was counted, the copies."""
    found = json.loads((Path(__file__).parents[2] / "benchmarks" / "gpu_h200.json").read_text())["memory"][dtype]
    counted = stage_memory(halves_of(gpu_run(BILLION, dtype)), fused_norm=True, attention_kind=kind).graph_bytes
    assert found["measured_graph_bytes"] == pytest.approx(counted, rel=1e-5)


def test_a_worker_counts_with_the_form_that_its_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the processor's."""
    monkeypatch.setattr("node.compute.model.attention_kind", lambda *_: "wide")
    config = run_config("bf16")
    worker = StageWorker(config, VOCABULARY, 1, 9, device=SmallDevice(1 << 30))
    assert worker.memory == stage_memory(StageLayout(config, VOCABULARY, 1, 9), attention_kind="wide")
    assert worker.memory.graph_bytes > stage_memory(worker.layout).graph_bytes


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("segments", [2, 4])
@pytest.mark.parametrize(("kind", "dtype"), [("grouped", "fp32"), *KINDS])
def test_samples_in_segments_take_no_more_than_is_counted(
    kind: Kind, dtype: str, segments: int, light: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values that each segment keeps of all tokens before it are counted, and not twice."""
    attends(monkeypatch, kind)
    config = run_config(dtype)
    batch = msgspec.structs.replace(config.batch, segments=segments)
    layout = StageLayout(msgspec.structs.replace(config, batch=batch), VOCABULARY, 3, 9)
    model, visit = SegmentModel(layout), Visit()
    model.keeps_inputs_only = light
    params = layout.initial(0).to(model.dtype)
    x = torch.randn(config.batch.samples, config.model.context, config.model.hidden).to(model.dtype)
    model.forward_segment(params, x, Visit())  # makes the angles
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for first, end in segment_ranges(layout.config):
            model.forward_segment(params, x[:, first:end], visit)
    for context in visit.segments:
        for tensor in (context.x, context.y, *(each for pair in context.seen for each in pair)):
            keep(tensor)
    for tensor in (params, *(angle for angles in model._rotary.values() for angle in angles)):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    memory = stage_memory(layout, attention_kind=kind)
    counted = (memory.light_graph_bytes if light else memory.graph_bytes) - 4 * layout.parameter_count
    assert 0.7 * counted < sum(kept.values()) <= counted
    whole = stage_memory(StageLayout(config, VOCABULARY, 3, 9), attention_kind=kind)
    assert memory.graphs(10**9) < whole.graphs(10**9)


def test_bf16_takes_twelve_bytes_a_parameter() -> None:
    """Two versions, the gradients of a backward, the vector they are put together in, and the sum in int32: 12, where
    fp32 with sums in fp64 takes 24."""
    for dtype, gradients, expected in (("bf16", "gi", 12), ("fp32", "gi", 20), ("fp32", "fp64", 24)):
        wire = WireSection(gradients=gradients)  # type: ignore[arg-type]
        layout = StageLayout(msgspec.structs.replace(run_config(dtype), wire=wire), VOCABULARY, 1, 9)
        memory = stage_memory(layout)
        lasting = 2 * memory.parameter_bytes + memory.sum_bytes + memory.gradient_bytes
        assert lasting == expected * layout.parameter_count


def test_graphs_that_do_not_fit_keep_inputs_only_and_change_no_bit() -> None:
    """A device with room for one whole graph and a half gets light ones; the gradients stay the same."""
    config = msgspec.structs.replace(CONFIG, wire=WireSection(gradients="fp64"))  # a sum that needs no grid
    layout = StageLayout(config, VOCABULARY, 1, 9)
    memory = stage_memory(layout)
    room = int((memory.fixed_bytes() + 1.5 * memory.graph_bytes) / 0.9) + 1
    workers = [StageWorker(config, VOCABULARY, 1, 9, device=SmallDevice(size)) for size in (1 << 30, room)]
    assert [worker._models[0].keeps_inputs_only for worker in workers] == [False, True]
    assert workers[0].graphs_max >= workers[1].graphs_max >= GRAPHS_WANTED
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for worker in workers:
        worker.set_params(0, [layout.initial(3)])
        y = worker.forward("task", 0, x)
        dx = worker.backward("task", torch.ones_like(y), "sum")
        assert dx is not None
        found.append((y, dx, worker.take_gradient("sum")))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_device_never_holds_more_than_it_has() -> None:
    """Forwards up to the count pass, the next one fails as on a GPU, and a dropped graph makes room again."""
    layout = StageLayout(CONFIG, VOCABULARY, 1, 9)
    memory = stage_memory(layout)
    device = SmallDevice(int((memory.fixed_bytes() + 3.2 * memory.graph_bytes) / 0.9))
    worker = StageWorker(CONFIG, VOCABULARY, 1, 9, device=device)
    worker.set_params(0, [layout.initial(3)])
    x = torch.zeros(2, 64, 64)
    assert worker.graphs_max == 3
    for count in range(3):
        worker.forward(count, 0, x)
    taken = device.free_bytes()
    device.claim(taken)  # what was left alone is taken by somebody else
    with pytest.raises(torch.OutOfMemoryError):
        worker.forward(3, 0, x)
    assert not worker.has_graph(3)
    worker.drop_graph(0)
    worker.backward(1, torch.zeros_like(x), None)
    worker.forward("again", 0, x)
    worker.close()
    assert device.used_bytes() == taken and device.peak_bytes() <= device.total_bytes()


def test_a_stage_that_does_not_fit_at_all_says_what_it_needs() -> None:
    """In megabytes, before anything is taken."""
    device = SmallDevice(1 << 20)
    with pytest.raises(torch.OutOfMemoryError, match=r"needs \d+ MB of the device, where 1 MB are free"):
        StageWorker(CONFIG, VOCABULARY, 1, 9, device=device)
    assert device.used_bytes() == 0


def test_batches_of_any_size_are_counted() -> None:
    """Graphs grow with the samples of a microbatch, what lies beside them does not but for the work at hand."""
    small, large = (
        stage_memory(
            StageLayout(msgspec.structs.replace(CONFIG, batch=BatchSection(samples=samples)), VOCABULARY, 1, 9)
        )
        for samples in (1, 4)
    )
    assert large.graph_bytes == 4 * small.graph_bytes and large.sum_bytes == small.sum_bytes
