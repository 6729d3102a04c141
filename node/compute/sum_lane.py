"""Performs `node.machine.jobs.SUM_JOBS`: a lane without any state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from node.compute.lane import Buffers
from node.compute.performer import Performer
from node.machine import jobs
from protocol.base.ids import TensorRef


class SumPerformer(Performer):
    """Lane `sums`. `threads` is torch's, which every thread has that asks for it later, too."""

    def __init__(self, threads: int = 1) -> None:
        super().__init__()
        torch.set_num_threads(threads)

    def _methods(self) -> dict[type, tuple[str, Callable[[Any, Buffers], Any]]]:
        return {jobs.AddUp: ("other", self._add_up)}

    def _add_up(self, job: jobs.AddUp, buffers: Buffers) -> TensorRef:
        """As `node.compute.wire.going_up` has it in the reference."""
        whole = self._decode(job.base, buffers) + self._decode(job.part, buffers)
        return self._encode(job.sum, whole, job.base.form)
