"""Before the first plan a server links to its fellows, so that their links are measured, and measures itself. Pure.

The links are measured by whoever watches them (`node.measure.measuring`), which reports to the coordinator by itself.
"""

from __future__ import annotations

from node.machine.jobs import Benchmark
from node.machine.outbox import Outbox
from protocol.base.ids import NodeId
from protocol.messages import Survey
from protocol.run.model_spec import ModelSpec, blocks_of
from protocol.run.run import RunConfig


class SurveyDesk:
    """What one server does of a survey."""

    def __init__(self, node: NodeId, out: Outbox) -> None:
        self._node = node
        self._out = out
        self._fellows: dict[NodeId, tuple[str, ...]] = {}
        self._flops_per_s = 0.0
        self._measuring = False

    def take(self, survey: Survey, config: RunConfig, computes: bool) -> None:
        """The coordinator asks; `computes`: whether this server has a device that could work."""
        self._fellows = {fellow.node: fellow.addresses for fellow in survey.fellows if fellow.node != self._node}
        if computes and not self._measuring and not self._flops_per_s:
            self._measuring = True
            self._out.compute(Benchmark(config))

    def over(self) -> None:
        """There is a plan: it says who is linked to whom."""
        self._fellows = {}

    def measured(self, flops_per_s: float) -> None:
        """The benchmark has ended; 0: it failed."""
        self._measuring, self._flops_per_s = False, flops_per_s

    def peers(self) -> dict[NodeId, tuple[tuple[str, ...], bool]]:
        """Whom the survey wants links to: (addresses, whether this node dials)."""
        return {peer: (addresses, self._node < peer) for peer, addresses in self._fellows.items()}

    def tokens_per_s(self, config: RunConfig | None) -> float:
        """What `Join` says of the benchmark: tokens a second, forward and backward, through an even share of the
        model; 0 where nothing was measured."""
        if config is None or not self._flops_per_s:
            return 0.0
        blocks = blocks_of(ModelSpec.of_run(config.model, 1))
        whole = sum(block.forward_flops + block.backward_flops for block in blocks)
        return self._flops_per_s * max(1, config.stages.count) / whole
