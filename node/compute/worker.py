"""What owns the device: a stage's weights by version, kept graphs by task, sums of gradients by number.

Called from one thread only, and knows nothing of sockets or of time. Keys are opaque; whoever calls keeps them apart.
Everything that is kept is kept until the caller says that it can go: the bounds on it are the caller's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from node.compute.layout import StageLayout
from node.compute.model import StageContext, StageModel
from protocol.run import RunConfig


class StageWorker:
    """Computes tasks of the stage that holds blocks `first_block` to `end_block` (exclusive).

    Tensors come and go on the CPU; `device` is where the arithmetic happens. `threads` sets torch's threads, which are
    one number for the whole process.
    """

    def __init__(
        self,
        config: RunConfig,
        vocabulary: int,
        first_block: int,
        end_block: int,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        torch.set_num_threads(threads)
        self.layout = StageLayout(config, vocabulary, first_block, end_block)
        self._model = StageModel(self.layout)
        self._device = torch.device(device)
        self._loss_scale = 1.0 / config.step_tokens
        self._params: dict[int, Tensor] = {}
        self._graphs: dict[Hashable, StageContext] = {}
        self._sums: dict[Hashable, Tensor] = {}
        """fp64: the sum of fp32 gradients comes out the same whoever adds what to what first."""
        self._task_gradient = torch.zeros(self.layout.parameter_count, device=self._device)
        """One task's weight gradients, before they are added to a sum."""

    # ---- weights ----

    def set_params(self, version: int, shards: Sequence[Tensor]) -> None:
        """Keeps a version, put together from its shards in order; raises ValueError if they do not fill the stage."""
        flat = torch.cat(list(shards)).to(self._device)
        if flat.shape != (self.layout.parameter_count,):
            raise ValueError(f"shards hold {flat.numel()} weights, the stage {self.layout.parameter_count}")
        self._params[version] = flat

    def has_params(self, version: int) -> bool:
        return version in self._params

    def drop_params(self, version: int) -> None:
        """Forgets a version; graphs made with it stay usable."""
        self._params.pop(version, None)

    # ---- tasks ----

    def forward(self, key: Hashable, version: int, x: Tensor) -> Tensor:
        """The stage's output for `x`; the graph is kept under `key` for `backward`."""
        y, self._graphs[key] = self._model.forward(self._params[version], x.to(self._device))
        return y.cpu()

    def has_graph(self, key: Hashable) -> bool:
        return key in self._graphs

    def drop_graph(self, key: Hashable) -> None:
        self._graphs.pop(key, None)

    def backward(self, key: Hashable, dy: Tensor, into: Hashable | None) -> Tensor | None:
        """Backward through the kept graph, which ends with it; returns the input's gradient, None for tokens.

        Weight gradients are added to the sum `into`, which begins at zero; None throws them away.
        """
        return self._backward(self._graphs.pop(key), dy, into)

    def recompute_backward(self, version: int, x: Tensor, dy: Tensor, into: Hashable | None) -> Tensor | None:
        """As `backward`, for whoever has not done the forward: does it again from the stage's input."""
        _, context = self._model.forward(self._params[version], x.to(self._device))
        return self._backward(context, dy, into)

    def tail(self, version: int, x: Tensor, labels: Tensor, into: Hashable | None) -> tuple[float, Tensor | None]:
        """Forward, loss and backward of the stage with the head: (loss sum in nats, the input's gradient or None).

        Gradients are those of the loss sum over the labels of a whole step's batch.
        """
        loss_sum, _, dx = self._model.loss(
            self._params[version],
            x.to(self._device),
            labels.to(self._device),
            self._loss_scale,
            self._fresh_gradient(into),
        )
        self._add(into)
        return loss_sum, _to_cpu(dx)

    # ---- sums of weight gradients ----

    def take_gradient(self, into: Hashable) -> Tensor:
        """The sum, which is forgotten here; zeros if nothing was added. [parameter_count] fp64."""
        total = self._sums.pop(into, None)
        return torch.zeros(self.layout.parameter_count, dtype=torch.float64) if total is None else total.cpu()

    def drop_gradient(self, into: Hashable) -> None:
        self._sums.pop(into, None)

    def _backward(self, context: StageContext, dy: Tensor, into: Hashable | None) -> Tensor | None:
        dx = self._model.backward(context, dy.to(self._device), self._fresh_gradient(into))
        self._add(into)
        return _to_cpu(dx)

    def _fresh_gradient(self, into: Hashable | None) -> Tensor | None:
        return None if into is None else self._task_gradient.zero_()

    def _add(self, into: Hashable | None) -> None:
        """Adds the task's gradient to its sum. A task that failed half-way never gets here."""
        if into is None:
            return
        if into in self._sums:
            self._sums[into] += self._task_gradient
        else:
            self._sums[into] = self._task_gradient.double()


def _to_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()
