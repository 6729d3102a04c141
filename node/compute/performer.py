"""What both lanes share: a job becomes an outcome, tensors become bytes and back, with the time that it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from node.compute.forms import packed
from node.compute.forms.scales import Upload, here
from node.compute.lane import Buffers, Outcome
from node.compute.wire import decode, encode, going_up
from node.process.store import Buffer
from protocol.base.ids import TaskId, TensorRef
from protocol.base.machine import Computed, ComputeFailed
from protocol.run.audits import AUDIT_SLICE


class Performer:
    """The state of one lane and its jobs' methods, chosen by the job's class."""

    def __init__(self) -> None:
        self._codec_s = 0.0
        self._made: list[tuple[TensorRef, Buffer]] = []
        self.deliver: Callable[[Outcome], None] = lambda outcome: None
        """Where a job says that it goes on; from any thread."""

    def perform(self, job: Any, buffers: Buffers) -> Outcome:
        """Does a job. An error of its data, of the device or of the disk becomes `ComputeFailed`."""
        self._made, self._codec_s = [], 0.0
        kind = "other"
        start = time.monotonic()
        try:
            kind, method = self._methods()[type(job)]
            fact: Computed | ComputeFailed = Computed(job, method(job, buffers))
        except Exception as error:  # whatever it is, the machine must know that the job will not end
            fact, self._made = ComputeFailed(job, self._reason(error)), []
        return Outcome(fact, self._made, kind, time.monotonic() - start, self._codec_s)

    def _reason(self, error: Exception) -> str:
        """What the machine reads of a job that failed."""
        return str(error) or type(error).__name__

    def _methods(self) -> dict[type, tuple[str, Callable[[Any, Buffers], Any]]]:
        raise NotImplementedError

    def _decode(self, ref: TensorRef, buffers: Buffers, upload: Upload = here) -> Tensor:
        start = time.monotonic()
        tensor = decode(buffers[ref.key], ref.shape, ref.form, upload)
        self._codec_s += time.monotonic() - start
        return tensor

    def _pack(self, key: int, integers: Tensor) -> TensorRef:
        """A vector of whole numbers in the form `gi`."""
        start = time.monotonic()
        buffer = packed.pack(integers.to(torch.int32).numpy())
        self._codec_s += time.monotonic() - start
        ref = TensorRef(key, tuple(integers.shape), "gi", len(buffer))
        self._made.append((ref, buffer))
        return ref

    def _unpack(self, ref: TensorRef, buffers: Buffers) -> Tensor:
        start = time.monotonic()
        integers = torch.from_numpy(packed.unpack(buffers[ref.key], ref.shape[0]))
        self._codec_s += time.monotonic() - start
        return integers

    def _encode(self, key: int, tensor: Tensor, form: str) -> TensorRef:
        start = time.monotonic()
        buffer = encode(tensor, form)
        self._codec_s += time.monotonic() - start
        ref = TensorRef(key, tuple(tensor.shape), form, buffer.nbytes)  # type: ignore[arg-type]
        self._made.append((ref, buffer))
        return ref

    def _encode_up(self, key: int, tensor: Tensor, base: Tensor | None, form: str, task: TaskId) -> TensorRef:
        """A task's result as it goes up, or for an audit as what a server has made of that, which it compares with."""
        start = time.monotonic()
        tensor, form = going_up(tensor, base, form, at_server=task.slice == AUDIT_SLICE)
        self._codec_s += time.monotonic() - start
        return self._encode(key, tensor, form)
