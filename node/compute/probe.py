"""What this machine can do: a short benchmark of the very blocks it will be given, and the memory that is free.

The figure is for placing nodes and for the person at the screen; nothing depends on it being exact.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import torch
from msgspec.structs import replace

from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import Device, open_device
from node.compute.forms import grid
from node.compute.layout import StageLayout
from node.compute.memory import StageMemory, stage_memory
from node.compute.model import StageModel
from node.compute.worker import GRAPHS_WANTED
from protocol.run.model_spec import ModelSpec, blocks_of
from protocol.run.run import RunConfig

SMALL_VOCABULARY = 257
FEW_TOKENS = 128
WHOLE_S_MAX = 5.0
"""A microbatch that would take longer is not computed whole: one of a middle stage of 1.1 B parameters in eight
(2,048 tokens) takes a graphics card a tenth of a second, and a processor a minute and a half. Two of those are longer
than anybody waits for an answer about the device."""


@dataclass(frozen=True)
class Probe:
    """Result of `probe`."""

    tokens_per_s: float
    """Tokens a second through forward and backward of the measured blocks."""
    flops_per_s: float
    """Floating point operations a second by `protocol.run.model_spec`: matrix products and attention."""
    microbatch_s: float
    """Forward and backward of one microbatch."""
    memory_free_bytes: int
    """Of the device: what can be taken now without swapping."""


def probe(
    config: RunConfig,
    vocabulary: int,
    first_block: int = 1,
    end_block: int | None = None,
    threads: int = 1,
    device: Device | None = None,
    budget_s: float = 0.5,
    whole_s_max: float = WHOLE_S_MAX,
) -> Probe:
    """Measures blocks `first_block` to `end_block` (default: one whole layer) for about `budget_s` on the device that
    will work (the processor without one).

    The best of all repetitions counts: others only ever make a machine look slower than it is. Where a microbatch would
    take longer than `whole_s_max`, or has no room on the device, one of a few tokens counts. Graphs are kept as a stage
    will keep them there. Raises what torch raises where not even a few tokens have room.
    """
    torch.set_num_threads(threads)
    device = open_device(DeviceChoice("cpu")) if device is None else device
    blocks = (first_block, first_block + 2 if end_block is None else end_block)
    layout = StageLayout(config, vocabulary, *blocks)
    ways = _ways(layout, device)
    # What is measured is a backward at once, of whole samples.
    plain = replace(
        config, batch=replace(config.batch, segments=1), compute=replace(config.compute, split_backward=False)
    )
    few = replace(
        plain,
        model=replace(config.model, context=min(FEW_TOKENS, config.model.context)),
        batch=replace(plain.batch, samples=1),
    )
    microbatch_tokens = config.batch.samples * config.model.context
    with _claimed(device, _memory(layout, device).parameter_bytes):
        params = layout.initial(0).to(device=device.torch_device, dtype=StageModel(layout).dtype)
        few_s = _best_s(StageLayout(few, vocabulary, *blocks), params, device, 0.0, light=False not in ways)
        best_s = few_s * microbatch_tokens / few.model.context
        if best_s <= whole_s_max:
            whole = StageLayout(plain, vocabulary, *blocks)
            best_s = _first_with_room(whole, params, device, budget_s, ways) or best_s
    return Probe(
        tokens_per_s=microbatch_tokens / best_s,
        flops_per_s=microbatch_tokens * flops_per_token(layout) / best_s,
        microbatch_s=best_s,
        memory_free_bytes=device.free_bytes(),
    )


def _memory(layout: StageLayout, device: Device) -> StageMemory:
    return stage_memory(layout, device.fuses_norms, StageModel(layout).attention_on(device.torch_device))


def _ways(layout: StageLayout, device: Device) -> tuple[bool, ...]:
    """Whether graphs of a stage hold inputs only there, as `StageWorker` will decide by what is free; then what may
    have room where that has none. Empty: not one graph fits."""
    memory, usable_bytes = _memory(layout, device), device.usable_bytes()
    if not device.is_accelerator:
        usable_bytes = max(0, usable_bytes - memory.host_bytes)
    fit, light = memory.best_graphs(usable_bytes, GRAPHS_WANTED)
    if fit < 1:
        return ()
    return (True,) if light else (False, True)


def _first_with_room(
    layout: StageLayout, params: torch.Tensor, device: Device, budget_s: float, ways: Sequence[bool]
) -> float | None:
    """`_best_s` of the first of `ways` that the device has room for; None: of none."""
    for light in ways:
        try:
            return _best_s(layout, params, device, budget_s, light)
        except (RuntimeError, MemoryError) as error:
            if not device.is_out_of_memory(error):
                raise
        device.tidy()  # after the error has gone, and with it all that its frames held
    return None


@contextmanager
def _claimed(device: Device, byte_count: int) -> Iterator[None]:
    device.claim(byte_count)
    try:
        yield
    finally:
        device.release(byte_count)


def _best_s(layout: StageLayout, params: torch.Tensor, device: Device, budget_s: float, light: bool = False) -> float:
    """The least that a microbatch of the layout's configuration takes, of two at least, with a graph that is `light` or
    whole. `params`: on the device."""
    memory = _memory(layout, device)
    with _claimed(device, memory.working_bytes(light) + 4 * layout.parameter_count):
        return _measured_s(layout, params, device, budget_s, light)


def _measured_s(layout: StageLayout, params: torch.Tensor, device: Device, budget_s: float, light: bool) -> float:
    config, where, model = layout.config, device.torch_device, StageModel(layout)
    model.keeps_inputs_only = light
    gradient = torch.zeros_like(params, dtype=torch.float32)
    shape = (config.batch.samples, config.model.context)
    tokens = torch.zeros(shape, dtype=torch.int64, device=where)
    hidden = torch.ones((*shape, config.model.hidden), device=where, dtype=model.dtype)
    x = tokens if layout.has_embedding else hidden

    def microbatch() -> float:
        began_s = time.perf_counter()
        if layout.has_head:
            model.loss(params, x, tokens, 1.0, gradient)
        else:
            model.backward(model.forward(params, x)[1], hidden, gradient)
        device.synchronize()
        return time.perf_counter() - began_s

    deadline_s = time.perf_counter() + budget_s
    microbatch()  # the first one pays for allocations and the choice of kernels
    best_s = microbatch()
    while time.perf_counter() < deadline_s:
        best_s = min(best_s, microbatch())
    return best_s


def warmed_up(device: Device, config: RunConfig) -> Device:
    """The device, after it has computed a little of everything once.

    An accelerator chooses its kernels, and what starts in the middle of a graph, as a W does, makes torch load five
    hundred modules (0.6 s on a computer with nothing else to do, many seconds on one that is busy): that shall not
    happen while the clock of a lease runs.
    """
    if device.torch_device.type == "cuda":
        # The thread of torch's backwards has no context of the device, and says so, until it has run a kernel.
        one = torch.ones(1, device=device.torch_device, requires_grad=True)
        torch.autograd.grad(one * one, one)
    small = RunConfig(compute=config.compute)
    layout = StageLayout(small, SMALL_VOCABULARY, 1, small.block_count)
    where, model = device.torch_device, StageModel(layout)
    params = layout.initial(0).to(device=where, dtype=model.dtype)
    tokens = torch.zeros((1, small.model.context), dtype=torch.int64, device=where)
    hidden = torch.ones((1, small.model.context, small.model.hidden), device=where, dtype=model.dtype)
    gradient = torch.zeros_like(params, dtype=torch.float32)
    if config.compute.split_backward:
        model.weight_gradients(model.loss_input_gradient(params, hidden, tokens, 1.0)[2], gradient)
    else:
        model.loss(params, hidden, tokens, 1.0, gradient)
    if where.type == "cuda" and config.wire.gradients == "gi":
        grid.one_pass(where)
    if config.batch.segments > 1:
        import_module("torch.nn.attention.bias")  # the attention of segments brings torch's compiler along
    device.synchronize()
    return device


def flops_per_token(layout: StageLayout) -> int:
    """Forward and backward of a token through the stage's blocks, as the planner counts them."""
    blocks = blocks_of(ModelSpec.of_run(layout.config.model, layout.vocabulary))
    blocks = [block for first, end in layout.chunks for block in blocks[first:end]]
    return sum(block.forward_flops + block.backward_flops for block in blocks)
