"""A volunteer's parameters: fetched from all servers of the stage at once, put together, kept while steps need them.

With `[wire] parameters = "p12"` the device keeps the whole numbers of the newest version that it was given, and servers
are asked for what has changed since. Whatever goes wrong with such a base, the next question is for the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from node.machine.jobs import DropParameters, LoadParameters
from node.machine.outbox import Outbox
from protocol.base.ids import NodeId, TensorRef
from protocol.messages import FetchParameters, Parameters

NO_BASE = -1


@dataclass(slots=True)
class _Version:
    """Parameters that are being fetched, or are with the device."""

    base: int
    """What the servers are told that we have; `NO_BASE`: nothing."""
    parts: dict[int, tuple[TensorRef, ...]] = field(default_factory=dict)
    """By shard, without grids."""
    grids: dict[int, TensorRef] = field(default_factory=dict)
    loading: LoadParameters | None = None
    loaded: bool = False


class Versions:
    """The versions that this volunteer has or waits for.

    Args:
        by_changes: whether the run's parameters travel as what changed.
    """

    def __init__(self, out: Outbox, by_changes: bool = False) -> None:
        self._out = out
        self._by_changes = by_changes
        self._generation = -1
        self._servers: tuple[NodeId, ...] = ()
        self._versions: dict[int, _Version] = {}
        self._newest = NO_BASE
        """The newest version that the device was given: its jobs go in order, so the next one can start from it."""

    def __len__(self) -> int:
        return len(self._versions)

    def reset(self, generation: int, servers: tuple[NodeId, ...]) -> None:
        """Another stage, or other ledgers; `servers` in shard order."""
        self.drop_below(None)
        self._generation, self._servers = generation, servers
        self._newest = NO_BASE

    def want(self, number: int, ready: Iterable[NodeId]) -> None:
        """Asks the servers that are ready for a version, once."""
        if number not in self._versions:
            base = self._newest if self._by_changes and self._newest < number else NO_BASE
            self._versions[number] = _Version(base)
            for server in ready:
                self._fetch(server, number)

    def server_ready(self, server: NodeId) -> None:
        """It takes questions (again): what it still owes is asked for."""
        shard = self._servers.index(server)
        for number, version in self._versions.items():
            if version.loading is None and shard not in version.parts:
                self._fetch(server, number)

    def _fetch(self, server: NodeId, version: int) -> None:
        base = self._versions[version].base
        self._out.send(server, FetchParameters(ledger_generation=self._generation, version=version, base=base))

    def on_parameters(self, message: Parameters) -> None:
        version = self._versions.get(message.version)
        known = version is None or version.loading is not None or message.shard in version.parts
        if version is None or known or not message.tensors or not 0 <= message.shard < len(self._servers):
            self._out.drop(message.tensors)
            return
        if message.base not in (NO_BASE, version.base):  # to a question of before: the newer one's answer comes, too
            self._out.drop(message.tensors)
            return
        count = 1 if message.base == NO_BASE else message.version - message.base
        version.parts[message.shard] = message.tensors[:count]
        for grid in message.tensors[count:]:
            version.grids[message.shard] = grid
        if len(version.parts) == len(self._servers):
            self._load(message.version, version)

    def _load(self, number: int, version: _Version) -> None:
        parts = [version.parts[shard] for shard in range(len(self._servers))]
        grids = tuple(version.grids[shard] for shard in sorted(version.grids))
        version.parts, version.grids = {}, {}
        self._newest = max(self._newest, number)
        fetched = [v.base for v in self._versions.values() if v.loading is None and v is not version]
        version.loading = LoadParameters(
            number,
            tuple(ref for part in parts for ref in part),
            grids,
            tuple(len(part) for part in parts) if self._by_changes else (),
            min([self._newest, *(base for base in fetched if base != NO_BASE)]) if self._by_changes else 0,
        )
        self._out.compute(version.loading)

    def loaded(self, job: LoadParameters) -> None:
        self._out.drop((*job.shards, *job.grids))
        version = self._versions.get(job.version)
        if version is not None and version.loading == job:
            version.loaded = True

    def failed(self, job: LoadParameters) -> None:
        """The device cannot use them: they are asked for again, whole, with the next lease that needs them."""
        self._out.drop((*job.shards, *job.grids))
        version = self._versions.get(job.version)
        if version is not None and version.loading == job:
            del self._versions[job.version]
            self._newest = NO_BASE

    def has(self, number: int) -> bool:
        """Whether the device has it."""
        version = self._versions.get(number)
        return version is not None and version.loaded

    def drop_below(self, number: int | None) -> None:
        """Versions below `number` (None: all) are not needed any more."""
        for each in [each for each in self._versions if number is None or each < number]:
            version = self._versions.pop(each)
            for part in version.parts.values():
                self._out.drop(part)
            self._out.drop(version.grids.values())
            if version.loading is not None:
                self._out.compute(DropParameters(each))
