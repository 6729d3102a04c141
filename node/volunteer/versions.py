"""A volunteer's parameters: fetched from all servers of the stage at once, put together, kept while steps need them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from node.machine.jobs import DropParameters, LoadParameters
from node.machine.outbox import Outbox
from protocol.base.ids import NodeId, TensorRef
from protocol.messages import FetchParameters, Parameters


@dataclass(slots=True)
class _Version:
    """Parameters that are being fetched, or are with the device."""

    parts: dict[int, tuple[TensorRef, ...]] = field(default_factory=dict)
    """By shard."""
    loading: LoadParameters | None = None
    loaded: bool = False


class Versions:
    """The versions that this volunteer has or waits for."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._generation = -1
        self._servers: tuple[NodeId, ...] = ()
        self._versions: dict[int, _Version] = {}

    def __len__(self) -> int:
        return len(self._versions)

    def reset(self, generation: int, servers: tuple[NodeId, ...]) -> None:
        """Another stage, or other ledgers; `servers` in shard order."""
        self.drop_below(None)
        self._generation, self._servers = generation, servers

    def want(self, number: int, ready: Iterable[NodeId]) -> None:
        """Asks the servers that are ready for a version, once."""
        if number not in self._versions:
            self._versions[number] = _Version()
            for server in ready:
                self._fetch(server, number)

    def server_ready(self, server: NodeId) -> None:
        """It takes questions (again): what it still owes is asked for."""
        shard = self._servers.index(server)
        for number, version in self._versions.items():
            if version.loading is None and shard not in version.parts:
                self._fetch(server, number)

    def _fetch(self, server: NodeId, version: int) -> None:
        self._out.send(server, FetchParameters(ledger_generation=self._generation, version=version))

    def on_parameters(self, message: Parameters) -> None:
        version = self._versions.get(message.version)
        known = version is None or version.loading is not None or message.shard in version.parts
        if version is None or known or not message.tensors or not 0 <= message.shard < len(self._servers):
            self._out.drop(message.tensors)
            return
        version.parts[message.shard] = message.tensors
        if len(version.parts) == len(self._servers):
            parts = [version.parts[shard] for shard in range(len(self._servers))]
            version.parts = {}
            grids = tuple(part[1] for part in parts if len(part) > 1)
            version.loading = LoadParameters(message.version, tuple(part[0] for part in parts), grids)
            self._out.compute(version.loading)

    def loaded(self, job: LoadParameters) -> None:
        self._out.drop((*job.shards, *job.grids))
        version = self._versions.get(job.version)
        if version is not None and version.loading == job:
            version.loaded = True

    def failed(self, job: LoadParameters) -> None:
        """The device cannot use them: they are asked for again with the next lease that needs them."""
        self._out.drop((*job.shards, *job.grids))
        version = self._versions.get(job.version)
        if version is not None and version.loading == job:
            del self._versions[job.version]

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
            if version.loading is not None:
                self._out.compute(DropParameters(each))
