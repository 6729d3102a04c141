"""Hands a shard's parameters out: each version is put into wire form once, and whoever asked for it gets that."""

from __future__ import annotations

from node.machine.jobs import ServeParameters
from node.server.context import StageContext
from protocol.base.ids import NodeId, TensorRef
from protocol.messages import FetchParameters, Parameters

AHEAD = 2
"""Versions after the newest that somebody may wait for: the next step's, and with a delayed update the one after."""


class Serving:
    """Versions in wire form, and who waits for which."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._out = context.out
        self._served: dict[int, tuple[TensorRef, ...]] = {}
        self._serving: dict[int, None] = {}
        """Versions that the lane is putting into wire form."""
        self._asked: dict[int, list[NodeId]] = {}

    def on_fetch(self, peer: NodeId, message: FetchParameters, oldest: int, newest: int) -> None:
        """Answers at once, or as soon as the version is there when it is the next one.

        Args:
            oldest, newest: versions that the shard has.
        """
        if oldest <= message.version <= newest:
            self._serve(peer, message.version)
        elif newest < message.version <= newest + AHEAD:
            waiting = self._asked.setdefault(message.version, [])
            if peer not in waiting and len(waiting) < self._context.config.limits.volunteers_max:
                waiting.append(peer)
        else:
            self._send(peer, message.version, ())

    def new_version(self, version: int) -> None:
        """The shard has it now: those who wait for it are served."""
        for peer in self._asked.pop(version, []):
            self._serve(peer, version)

    def _serve(self, peer: NodeId, version: int) -> None:
        served = self._served.get(version)
        if served is not None:
            self._send(peer, version, served)
            return
        waiting = self._asked.setdefault(version, [])
        if peer not in waiting:
            waiting.append(peer)
        if version not in self._serving:
            self._serving[version] = None
            grid = self._out.key() if self._context.config.wire.gradients == "gi" else None
            self._out.compute(ServeParameters(version, self._out.key(), grid))

    def served(self, job: ServeParameters, tensors: tuple[TensorRef, ...], oldest: int) -> None:
        """The lane has made it; if nobody can want it any more (it is older than `oldest`), it is dropped."""
        del self._serving[job.version]
        if job.version < oldest:
            self._out.drop(tensors)
            return
        self._served[job.version] = tensors
        self.new_version(job.version)

    def _send(self, peer: NodeId, version: int, tensors: tuple[TensorRef, ...]) -> None:
        self._out.send(
            peer,
            Parameters(
                ledger_generation=self._context.generation,
                version=version,
                shard=self._context.shard,
                tensors=tensors,
            ),
        )

    def drop_below(self, oldest: int) -> None:
        """Nobody asks for versions below this any more."""
        for version in [version for version in self._served if version < oldest]:
            self._out.drop(self._served.pop(version))
        for version in [version for version in self._asked if version < oldest]:
            del self._asked[version]

    def worker_gone(self, peer: NodeId) -> None:
        for waiting in self._asked.values():
            if peer in waiting:
                waiting.remove(peer)

    def end(self) -> None:
        """Lets go of every tensor."""
        for tensors in self._served.values():
            self._out.drop(tensors)
        self._served = {}
