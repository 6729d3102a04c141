"""Hands a shard's parameters out: each version is put into wire form once, and whoever asked for it gets that.

With `[wire] parameters = "p12"` what changed is made with every version, as long as the one before is in memory, and
kept for a few versions: who has one of these gets the changes since, anybody else the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.machine.jobs import ServeParameters
from node.server.context import StageContext
from protocol.base.forms import DIFFERENCES_MAX
from protocol.base.ids import NodeId, TensorRef
from protocol.messages import FetchParameters, Parameters

AHEAD = 2
"""Versions after the newest that somebody may wait for: the next step's, and with a delayed update the one after."""
CHANGE_BYTES_MAX = 2
"""A parameter's, over all changes that are sent at once: when training moves weights by that much, the whole (10 bits)
is smaller. It bounds a message too: half of what the plain forms take."""


@dataclass(slots=True)
class _Change:
    """What a version has changed; empty while the lane makes it."""

    tensors: tuple[TensorRef, ...] = ()


class Serving:
    """Versions in wire form, and who waits for which."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._out = context.out
        self._served: dict[int, tuple[TensorRef, ...]] = {}
        self._serving: dict[int, None] = {}
        """Versions that the lane is putting into wire form, whole."""
        self._changes: dict[int, _Change] = {}
        """By version, what changed since the one before: of the newest `DIFFERENCES_MAX` at most."""
        self._asked: dict[int, dict[NodeId, int]] = {}
        """Version -> who waits for it, and from which base on."""

    def on_fetch(self, peer: NodeId, message: FetchParameters, oldest: int, newest: int) -> None:
        """Answers at once, or as soon as the version is there when it is the next one.

        Args:
            oldest, newest: versions that the shard has.
        """
        if oldest <= message.version <= newest:
            self._serve(peer, message.version, message.base)
        elif newest < message.version <= newest + AHEAD:
            waiting = self._asked.setdefault(message.version, {})
            if peer in waiting or len(waiting) < self._context.config.limits.volunteers_max:
                waiting[peer] = message.base
        else:
            self._send(peer, message.version, ())

    def new_version(self, version: int, made_from_here: bool = True) -> None:
        """The shard has it now: what changed is made, and those who wait for it are served.

        `made_from_here`: the version before is in memory.
        """
        if made_from_here and self._context.config.wire.parameters == "p12":
            self._changes[version] = _Change()
            for old in [old for old in self._changes if old <= version - DIFFERENCES_MAX]:
                self._out.drop(self._changes.pop(old).tensors)
            self._order(version, version - 1)
        self._serve_waiting(version)

    def _serve_waiting(self, version: int) -> None:
        for peer, base in self._asked.pop(version, {}).items():
            self._serve(peer, version, base)

    def _serve(self, peer: NodeId, version: int, base: int) -> None:
        changes = self._changes_since(base, version)
        if changes and all(change.tensors for change in changes):
            # A grid belongs to its version alone, so only the last one's goes with it.
            tensors = (*(change.tensors[0] for change in changes), *changes[-1].tensors[1:])
            self._send(peer, version, tensors, base)
            return
        if not changes and version in self._served:
            self._send(peer, version, self._served[version])
            return
        self._asked.setdefault(version, {})[peer] = base
        if not changes and version not in self._serving:
            self._serving[version] = None
            self._order(version, None)

    def _changes_since(self, base: int, version: int) -> list[_Change]:
        """What leads from `base` to `version`, made or being made; empty when only the whole does, or is smaller."""
        if base < 0 or not 0 < version - base <= DIFFERENCES_MAX:
            return []
        changes = [self._changes.get(each) for each in range(base + 1, version + 1)]
        found = [change for change in changes if change is not None]
        made = [change.tensors[0] for change in found if change.tensors]
        large = bool(made) and sum(ref.byte_count for ref in made) > CHANGE_BYTES_MAX * made[0].shape[0]
        return [] if len(found) < len(changes) or large else found

    def _order(self, version: int, base: int | None) -> None:
        grid = self._out.key() if self._context.config.wire.gradients == "gi" else None
        self._out.compute(ServeParameters(version, self._out.key(), grid, base))

    def served(self, job: ServeParameters, tensors: tuple[TensorRef, ...], oldest: int) -> None:
        """The lane has made it; if nobody can want it any more (it is older than `oldest`), it is dropped."""
        if job.base is not None:
            change = self._changes.get(job.version)
            if change is None:
                self._out.drop(tensors)
            else:
                change.tensors = tensors
        else:
            del self._serving[job.version]
            if job.version < oldest:
                self._out.drop(tensors)
            else:
                self._served[job.version] = tensors
        # A change also leads to the versions after it.
        for version in [each for each in self._asked if each == job.version or each in self._changes]:
            self._serve_waiting(version)

    def _send(self, peer: NodeId, version: int, tensors: tuple[TensorRef, ...], base: int = -1) -> None:
        self._out.send(
            peer,
            Parameters(
                ledger_generation=self._context.generation,
                version=version,
                shard=self._context.shard,
                base=base,
                tensors=tensors,
            ),
        )

    def drop_below(self, oldest: int) -> None:
        """Nobody asks for versions below this any more; changes that lead to later ones stay."""
        for version in [version for version in self._served if version < oldest]:
            self._out.drop(self._served.pop(version))
        for version in [version for version in self._asked if version < oldest]:
            del self._asked[version]

    def worker_gone(self, peer: NodeId) -> None:
        for waiting in self._asked.values():
            waiting.pop(peer, None)

    def end(self) -> None:
        """Lets go of every tensor."""
        for tensors in self._served.values():
            self._out.drop(tensors)
        for change in self._changes.values():
            self._out.drop(change.tensors)
        self._served, self._changes = {}, {}
