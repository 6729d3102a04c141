"""Where the parts of one node's machine put their effects, and where its numbers come from.

One outbox belongs to one machine; the parts are its only writers, so the order of effects is the order of calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from node.machine.jobs import Job
from node.machine.records import Record
from node.machine.stalls import Stalls
from protocol.base.ids import NodeId, TensorRef
from protocol.base.machine import Compute, Count, DropTensors, Effect, Log, Persist, Prune, Send, ShareTensor
from protocol.messages import Message


class Outbox:
    """Collects effects; numbers tensors and records.

    Args:
        node: the machine's own id. A message to oneself comes back as an input, with its tensors shared.
        keys: numbers for tensors, shared with the driver that numbers received ones.
        stalls: hears of everything that a lane or the disk is given.
    """

    def __init__(self, node: NodeId, keys: count[int], stalls: Stalls | None = None) -> None:
        self.node = node
        self._stalls = stalls
        self._keys = keys
        self._records = count(1)
        self._effects: list[Effect] = []
        self._to_self: list[Message] = []
        self.unwritten: dict[int, Record] = {}
        """Records whose `Persisted` has not come yet, by number."""

    def key(self) -> int:
        """A number for a tensor that a job will make."""
        return next(self._keys)

    def send(self, peer: NodeId, message: Message) -> None:
        if peer == self.node:
            tensors: tuple[TensorRef, ...] = getattr(message, "tensors", ())
            if tensors:
                message = _with_tensors(message, tuple(self.share(ref) for ref in tensors))
            self._to_self.append(message)
        else:
            self._effects.append(Send(peer, message))

    def share(self, ref: TensorRef) -> TensorRef:
        """A second reference on the same bytes; both must be dropped."""
        copy = self.key()
        self._effects.append(ShareTensor(ref.key, copy))
        return TensorRef(copy, ref.shape, ref.form, ref.byte_count)

    def drop(self, refs: Iterable[TensorRef]) -> None:
        keys = tuple(ref.key for ref in refs)
        if keys:
            self._effects.append(DropTensors(keys))

    def compute(self, job: Job) -> None:
        if self._stalls is not None:
            self._stalls.ordered(job)
        self._effects.append(Compute(job))

    def persist(self, record: Record) -> None:
        number = next(self._records)
        self.unwritten[number] = record
        if self._stalls is not None:
            self._stalls.writing()
        self._effects.append(Persist(number, record))

    def written(self, number: int) -> Record:
        """The record of this number is durable."""
        if self._stalls is not None:
            self._stalls.written()
        return self.unwritten.pop(number)

    def prune(self, step: int) -> None:
        self._effects.append(Prune(step))

    def log(self, level: str, event: str, **fields: Any) -> None:
        self._effects.append(Log(level, event, fields))

    def count(self, metric: str, value: float = 1.0, **labels: str) -> None:
        self._effects.append(Count(metric, value, tuple(sorted(labels.items()))))

    def add(self, effect: Effect) -> None:
        self._effects.append(effect)

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def take_to_self(self) -> list[Message]:
        messages, self._to_self = self._to_self, []
        return messages


def _with_tensors(message: Message, tensors: tuple[TensorRef, ...]) -> Message:
    import msgspec

    return msgspec.structs.replace(message, tensors=tensors)
