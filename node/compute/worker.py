"""What owns the device: a stage's weights by version, kept graphs by task, sums of gradients by number.

Called from one thread only, and knows nothing of sockets or of time. Keys are opaque; whoever calls keeps them apart.
Everything that is kept is kept until the caller says that it can go: the bounds on it are the caller's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import Device, open_device
from node.compute.layout import StageLayout
from node.compute.memory import stage_memory
from node.compute.model import OwedWeights, StageContext, StageModel
from node.compute.segments import SegmentModel, Visit
from node.compute.stage_grid import StageGrid
from node.compute.tolerance import Edges, grid_difference, relative_difference
from protocol.run.run import RunConfig

GRAPHS_WANTED = 2
"""One that is worked on, and one that waits for its gradient: the least, where nobody says how many the plan wants."""


@dataclass(slots=True)
class _OpenVisit:
    """A microbatch in segments on its way through one chunk."""

    model: SegmentModel
    visit: Visit
    gradient: Tensor | None = None
    """Its weight gradients so far, in fp32 as the reference's: they are rounded once, when the last segment is done."""


class StageWorker:
    """Computes tasks of the stage that holds blocks `first_block` to `end_block` (exclusive) and `further` such chunks.

    Tasks name their chunk by its place among the stage's, from 0.

    The arithmetic happens on `device`, the processor if there is none. Tensors may come from anywhere; a task's results
    stay there in fp32, so that they can be put into their form where that is fast. `threads` sets torch's threads,
    which are one number for the whole process. Where `graphs_wanted` whole graphs do not fit, they
    keep inputs only: a third more to compute, where a pipeline over home lines would stand still (1.1 B parameters in
    eight stages at 20 Mbit/s: a tenth of a second more a microbatch, beside 3.4 s on the line).
    """

    def __init__(
        self,
        config: RunConfig,
        vocabulary: int,
        first_block: int,
        end_block: int,
        threads: int = 1,
        device: Device | None = None,
        further: Sequence[tuple[int, int]] = (),
        graphs_wanted: int = GRAPHS_WANTED,
    ) -> None:
        torch.set_num_threads(threads)
        self.layout = StageLayout(config, vocabulary, first_block, end_block, further)
        self._models = [SegmentModel(self.layout, chunk) for chunk in self.layout.chunks]
        self._device = open_device(DeviceChoice("cpu")) if device is None else device
        self._loss_scale = 1.0 / config.step_tokens
        self._params: dict[int, Tensor] = {}
        self._graphs: dict[Hashable, tuple[StageModel, StageContext]] = {}
        self._visits: dict[Hashable, _OpenVisit] = {}
        """Of samples in segments: what has begun here and not ended."""
        self._owed: dict[Hashable, tuple[StageModel, OwedWeights]] = {}
        """What backwards have left for `finish`."""
        self._sums: dict[Hashable, Tensor] = {}
        """int32 on the run's grid, or fp64: the sum comes out the same whoever adds what to what first."""
        self._grid = StageGrid.of(self.layout) if config.wire.gradients == "gi" else None
        self._grid_steps: dict[int, Tensor] = {}
        """By version, [blocks] int8."""
        self._edges: dict[Hashable, Edges] = {}
        """Of sums that are made for an audit, on a grid."""
        self._for_audit = False
        self._rounding = (0, 0, 0)
        """Version, step and microbatch of the task that is computed: what its gradient's rounding depends on."""
        self._beside = ThreadPoolExecutor(1, "keys") if self._grid is not None and self._device.is_accelerator else None
        """Makes the keys of that rounding while torch, without Python's lock, gives a device its backward to do."""
        self._keys: tuple[tuple[int, int, int], Future[list[Tensor]]] | None = None
        """The rounding that they are for, and they."""
        self._claims: dict[Hashable, int] = {}
        """What each kept graph takes of the device."""
        attention = self._models[0].attention_on(self._device.torch_device)
        self.memory = stage_memory(self.layout, self._device.fuses_norms, attention)
        self.graphs_max = self._find_room(max(GRAPHS_WANTED, graphs_wanted))
        """How many graphs fit beside everything else, as counted before the first."""
        self._task_gradient = torch.zeros(
            self.layout.parameter_count, dtype=self._models[0].dtype, device=self._device.torch_device
        )
        """One task's weight gradients, before they are added to a sum."""

    def _find_room(self, wanted: int) -> int:
        """Claims what lies on the device whatever the number of graphs, and counts the graphs that fit beside it.

        Where there is no room for `wanted` whole ones, graphs keep inputs only. Raises `torch.OutOfMemoryError`.
        """
        usable_bytes = self._device.usable_bytes()
        if not self._device.is_accelerator:
            usable_bytes = max(0, usable_bytes - self.memory.host_bytes)
        found, light = self.memory.best_graphs(usable_bytes, wanted)
        if light:
            # Torch's checkpointing loads its compiler in the first forward: not while the clock of a lease runs.
            import_module("torch._dynamo")
            for model in self._models:
                model.keeps_inputs_only = True
        if found < 1:
            needed_bytes = self.memory.fixed_bytes(light) + (1 + self.memory.runs) * self.memory.light_graph_bytes
            raise torch.OutOfMemoryError(
                f"out of memory: this stage needs {needed_bytes / 2**20:,.0f} MB of the device, where"
                f" {usable_bytes / 2**20:,.0f} MB are free"
            )
        self._claims[None] = self.memory.fixed_bytes(light)
        self._device.claim(self._claims[None])
        return found

    def close(self) -> None:
        """Gives everything back; the worker is of no use after it."""
        self._params, self._graphs, self._visits, self._owed, self._sums = {}, {}, {}, {}, {}
        self._edges = {}
        self._task_gradient = torch.empty(0)
        if self._beside is not None:
            self._beside.shutdown(wait=False, cancel_futures=True)
        for key in list(self._claims):
            self._release(key)
        self._device.tidy()

    @property
    def keeps_inputs_only(self) -> bool:
        """Graphs hold inputs of halves, and compute the rest again: whole ones did not fit."""
        return self._models[0].keeps_inputs_only

    def upload(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, as it is."""
        return self._device.upload(tensor)

    def wait(self) -> None:
        """Until the device has done what it was told: what comes next is timed apart."""
        self._device.synchronize()

    def _release(self, key: Hashable) -> None:
        self._device.release(self._claims.pop(key, 0))

    # ---- weights ----

    def set_params(self, version: int, shards: Sequence[Tensor]) -> None:
        """Keeps a version, put together from its shards in order; raises ValueError if they do not fill the stage."""
        whole = shards[0] if len(shards) == 1 else torch.cat(list(shards))
        flat = self._device.upload(whole, self._models[0].dtype)
        if flat.shape != (self.layout.parameter_count,):
            raise ValueError(f"shards hold {flat.numel()} weights, the stage {self.layout.parameter_count}")
        self._params[version] = flat

    def set_grid(self, version: int, shards: Sequence[Tensor]) -> None:
        """The grid of the steps that run on a version, from its shards in order; ValueError if they do not fit."""
        steps = torch.cat(list(shards)) if shards else torch.empty(0, dtype=torch.int8)
        if self._grid is None or steps.shape != (self._grid.block_count,):
            raise ValueError(f"shards hold {steps.numel()} grid blocks, the stage another number")
        self._grid_steps[version] = steps

    def begin_task(self, version: int, step: int, microbatch: int, for_audit: bool = False) -> None:
        """The weight gradients that come next are of this task. Of an audit's sum on a grid more is kept, until it is
        dropped, on the processor: 2 bytes a parameter."""
        self._rounding, self._for_audit = (version, step, microbatch), for_audit

    def drop_params(self, version: int) -> None:
        """Forgets a version; graphs made with it stay usable."""
        self._params.pop(version, None)
        self._grid_steps.pop(version, None)

    # ---- tasks ----

    def forward(self, key: Hashable, version: int, x: Tensor, chunk: int = 0) -> Tensor:
        """The chunk's output for `x`; the graph is kept under `key` for `backward`."""
        model = self._models[chunk]
        self._claim_graph(model, key)
        try:
            y, graph = model.forward(self._params[version], self._device.upload(x, model.dtype))
            found = y.float()
        except BaseException:
            self._release(key)
            raise
        self._graphs[key] = model, graph
        return found

    def _claim_graph(self, model: StageModel, key: Hashable) -> None:
        graph_bytes = self.memory.light_graph_bytes if model.keeps_inputs_only else self.memory.graph_bytes
        self._device.claim(graph_bytes)
        self._claims[key] = graph_bytes

    def has_graph(self, key: Hashable) -> bool:
        return key in self._graphs or key in self._visits

    def drop_graph(self, key: Hashable) -> None:
        """Forgets a kept graph, or what a backward has left for `finish`."""
        if any(table.pop(key, None) is not None for table in (self._graphs, self._visits, self._owed)):
            self._release(key)

    def backward(self, key: Hashable, dy: Tensor, into: Hashable | None) -> Tensor | None:
        """Backward through the kept graph, which ends with it; returns the input's gradient, None for tokens.

        Weight gradients are added to the sum `into`, which begins at zero; None throws them away.
        """
        model, context = self._graphs.pop(key)
        try:
            return self._backward(model, context, dy, into)
        finally:
            self._release(key)

    def recompute_backward(
        self, version: int, x: Tensor, dy: Tensor, into: Hashable | None, chunk: int = 0
    ) -> Tensor | None:
        """As `backward`, for whoever has not done the forward: does it again from the chunk's input."""
        model = self._models[chunk]
        _, context = model.forward(self._params[version], self._device.upload(x, model.dtype))
        return self._backward(model, context, dy, into)

    # A backward in two parts: I returns the input's gradient and leaves those of the weights for `finish`. Where graphs
    # keep inputs only, all is done at once, and nothing is left: it would have to be computed a third time.

    def backward_input(self, key: Hashable, dy: Tensor, into: Hashable, later: Hashable) -> Tensor | None:
        """The first part of `backward`; the weights' gradients are left under `later`."""
        if self._graphs[key][0].keeps_inputs_only:
            return self.backward(key, dy, into)
        model, context = self._graphs.pop(key)
        self._claims[later] = self._claims.pop(key)
        try:
            return self._backward_input(model, context, dy, later)
        except BaseException:
            self._release(later)
            raise

    def recompute_backward_input(
        self, version: int, x: Tensor, dy: Tensor, into: Hashable, later: Hashable, chunk: int = 0
    ) -> Tensor | None:
        """As `backward_input`, for whoever has not done the forward."""
        model = self._models[chunk]
        if model.keeps_inputs_only:
            return self.recompute_backward(version, x, dy, into, chunk)
        self._claim_graph(model, later)
        try:
            _, context = model.forward(self._params[version], self._device.upload(x, model.dtype))
            return self._backward_input(model, context, dy, later)
        except BaseException:
            self._release(later)
            raise

    def _backward_input(self, model: StageModel, context: StageContext, dy: Tensor, later: Hashable) -> Tensor:
        dx, owed = model.input_gradient(context, self._device.upload(dy, model.dtype))
        self._owed[later] = model, owed
        return dx.float()

    def finish(self, key: Hashable, into: Hashable) -> None:
        """The second part: adds what was left under `key`, if anything was, to the sum `into`."""
        if key not in self._owed:
            return
        model, owed = self._owed.pop(key)
        try:
            gradient = self._fresh_gradient(into)
            assert gradient is not None
            model.weight_gradients(owed, gradient)
            self._add(into, gradient)
        finally:
            self._release(key)

    def tail(
        self, version: int, x: Tensor, labels: Tensor, into: Hashable | None, chunk: int = 0
    ) -> tuple[float, Tensor | None]:
        """Forward, loss and backward of the chunk with the head: (loss sum in nats, the input's gradient or None).

        Gradients are those of the loss sum over the labels of a whole step's batch.
        """
        loss_sum, _, dx = self._models[chunk].loss(
            self._params[version],
            self._device.upload(x, self._models[0].dtype),
            self._device.upload(labels),
            self._loss_scale,
            self._fresh_gradient(into),
        )
        self._add(into, self._task_gradient)
        return loss_sum, _in_fp32(dx)

    def tail_input(
        self, version: int, x: Tensor, labels: Tensor, into: Hashable, later: Hashable, chunk: int = 0
    ) -> tuple[float, Tensor | None]:
        """The same of `tail`."""
        model = self._models[chunk]
        if model.keeps_inputs_only:
            return self.tail(version, x, labels, into, chunk)
        self._claim_graph(model, later)
        try:
            loss_sum, dx, owed = model.loss_input_gradient(
                self._params[version],
                self._device.upload(x, model.dtype),
                self._device.upload(labels),
                self._loss_scale,
            )
            found = dx.float()
        except BaseException:
            self._release(later)
            raise
        self._owed[later] = model, owed
        return loss_sum, found

    # ---- samples in segments ----

    def forward_segment(self, key: Hashable, version: int, x: Tensor, chunk: int = 0) -> Tensor:
        """The chunk's output for the segment that comes next; its graph joins those kept under `key`. The chunk with
        the head goes forward here, too, and computes its loss as it goes back."""
        model = self._models[chunk]
        if key not in self._visits:
            self._claim_graph(model, key)
            self._visits[key] = _OpenVisit(model, Visit())
        y = model.forward_segment(self._params[version], self._device.upload(x, model.dtype), self._visits[key].visit)
        return y.float()

    def backward_segment(self, key: Hashable, dy: Tensor, into: Hashable | None) -> Tensor | None:
        """Backward of the last segment under `key` that has not gone back; returns its input's gradient.

        With the first segment the visit ends, and its weight gradients are added to the sum `into`, or thrown away.
        """
        opened = self._visits[key]
        gradient = self._visit_gradient(opened)
        dx = opened.model.backward_segment(opened.visit, self._device.upload(dy, opened.model.dtype), gradient)
        self._end_segment(key, opened, into)
        return _in_fp32(dx)

    def tail_segment(self, key: Hashable, labels: Tensor, into: Hashable | None) -> tuple[float, Tensor | None]:
        """The same where the chunk has the head: (loss sum of the segment in nats, its input's gradient or None)."""
        opened = self._visits[key]
        gradient = self._visit_gradient(opened)
        loss_sum, _, dx = opened.model.loss_segment(
            opened.visit, self._device.upload(labels), self._loss_scale, gradient
        )
        self._end_segment(key, opened, into)
        return loss_sum, _in_fp32(dx)

    def _visit_gradient(self, opened: _OpenVisit) -> Tensor:
        if opened.gradient is None:
            opened.gradient = torch.zeros_like(self._task_gradient, dtype=torch.float32)
        return opened.gradient

    def _end_segment(self, key: Hashable, opened: _OpenVisit, into: Hashable | None) -> None:
        if opened.visit.segments:
            return
        if into is not None and opened.gradient is not None:
            self._add(into, opened.gradient)
        self.drop_graph(key)

    def evaluate(self, version: int, x: Tensor, labels: Tensor | None, chunk: int = 0) -> Tensor | float:
        """Forward without a graph: the chunk's output, or with `labels`, where the head is, the loss sum in nats."""
        model, params = self._models[chunk], self._params[version]
        x = self._device.upload(x, model.dtype)
        if labels is None:
            return model.outputs(params, x).float()
        return model.evaluate(params, x, self._device.upload(labels))[0]

    # ---- sums of weight gradients ----

    def take_gradient(self, into: Hashable) -> Tensor:
        """The sum, which is forgotten here; zeros if nothing was added. [parameter_count] fp64, or int32 on a grid."""
        total = self._sums.pop(into, None)
        return torch.zeros(self.layout.parameter_count, dtype=self._sum_type) if total is None else total.cpu()

    def weights(self, version: int) -> Tensor:
        """[parameter_count] fp32 of a version, as tasks were computed with them."""
        return self._params[version].float().cpu()

    def grid_steps(self, version: int) -> Tensor:
        """[blocks] int8: the grid of a version's sums."""
        return self._grid_steps[version]

    def sum_value(self, version: int, total: Tensor) -> Tensor:
        """What a sum of a version's steps, [parameter_count] int32 on its grid, stands for, in fp32.

        Raises:
            ValueError: not a sum of this stage, or the run or version has no grid.
        """
        if self._grid is None or version not in self._grid_steps or total.shape != (self.layout.parameter_count,):
            raise ValueError(f"{total.numel()} numbers are no sum of a step on version {version}")
        return self._grid.value(total, self._grid_steps[version])

    def sums_differ(self, version: int, key: Hashable, computed: Tensor, claimed: Tensor) -> float:
        """How far a claimed sum, [parameter_count] int32, is from the one that was made under `key` for an audit."""
        far = relative_difference(self.sum_value(version, computed), self.sum_value(version, claimed))
        if self._grid is None or key not in self._edges:
            return far
        units = self._grid.value(torch.ones_like(computed), self._grid_steps[version])
        return grid_difference(computed, claimed, units, self._edges[key], far)

    @property
    def _sum_type(self) -> torch.dtype:
        return torch.float64 if self._grid is None else torch.int32

    def drop_gradient(self, into: Hashable) -> None:
        self._sums.pop(into, None)
        self._edges.pop(into, None)

    def _backward(self, model: StageModel, context: StageContext, dy: Tensor, into: Hashable | None) -> Tensor | None:
        dx = model.backward(context, self._device.upload(dy, model.dtype), self._fresh_gradient(into))
        self._add(into, self._task_gradient)
        return _in_fp32(dx)

    def _fresh_gradient(self, into: Hashable | None) -> Tensor | None:
        """Zeros, for the weight gradients of a task; None if nobody wants them."""
        if into is None:
            return None
        if self._beside is not None and self._grid is not None:
            _, step, microbatch = self._rounding
            self._keys = self._rounding, self._beside.submit(self._grid.keys, step, microbatch)
        return self._task_gradient.zero_()

    def _add(self, into: Hashable | None, gradient: Tensor) -> None:
        """Adds the task's gradient to its sum. A task that failed half-way never gets here."""
        if into is None:
            return
        # A device without fp64 (Apple's) leaves the sum to the processor.
        gradient = gradient.cpu() if self._device.torch_device.type == "mps" else gradient
        if self._grid is not None:
            if into not in self._sums:
                self._sums[into] = torch.zeros_like(gradient, dtype=torch.int32)
            version, step, microbatch = self._rounding
            edges = self._edges_of(into)
            near = None if edges is None else edges.nearest
            made, self._keys = self._keys, None
            keys = made[1].result() if made is not None and made[0] == self._rounding else None
            self._grid.add(self._sums[into], gradient, self._grid_steps[version], step, microbatch, near, keys)
        elif into in self._sums:
            self._sums[into] += gradient
        else:
            self._sums[into] = gradient.double()

    def _edges_of(self, into: Hashable) -> Edges | None:
        """With the task that comes next counted; None where the sum is none of an audit's."""
        if not self._for_audit:
            return None
        edges = self._edges.setdefault(into, Edges.none_yet(self.layout.parameter_count))
        edges.tasks += 1
        return edges


def _in_fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()
