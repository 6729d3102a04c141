"""Links with latency and bandwidth, whose uplinks and downlinks parallel transfers share fairly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Network:
    """Delays and rates between nodes; a node talks to itself at no cost.

    Attributes:
        latency_s: `latency_s[a][b]`, seconds from node a to node b; None for no latency.
        link_bytes_per_s: `[a][b]`, the rate of the path itself; None for no limit.
        uplink_bytes_per_s, downlink_bytes_per_s: per node, shared by all its transfers; None for no limit.
        blocking: whether a receiver stands still while it receives (the paper's AutoPipe formulas) instead of
            computing meanwhile. Blocking transfers take their latency and their unshared rate.
    """

    latency_s: Sequence[Sequence[float]] | None = None
    link_bytes_per_s: Sequence[Sequence[float]] | None = None
    uplink_bytes_per_s: Sequence[float] | None = None
    downlink_bytes_per_s: Sequence[float] | None = None
    blocking: bool = False

    @classmethod
    def line(cls, link_s: Sequence[float], blocking: bool = False) -> Network:
        """Nodes in a row, `link_s[n]` between n and n+1 both ways; farther nodes pay for the way between."""
        at = [0.0]
        for seconds in link_s:
            at.append(at[-1] + seconds)
        return cls(latency_s=[[abs(a - b) for b in at] for a in at], blocking=blocking)

    @classmethod
    def uniform(cls, nodes: int, link_s: float, blocking: bool = False) -> Network:
        """Every node `link_s` from every other."""
        rows = [[0.0 if a == b else link_s for b in range(nodes)] for a in range(nodes)]
        return cls(latency_s=rows, blocking=blocking)

    def first(self, nodes: int) -> Network:
        """The same network among the first `nodes` nodes."""

        def matrix(rows: Sequence[Sequence[float]] | None) -> Sequence[Sequence[float]] | None:
            return None if rows is None else [row[:nodes] for row in rows[:nodes]]

        def vector(values: Sequence[float] | None) -> Sequence[float] | None:
            return None if values is None else values[:nodes]

        return Network(
            matrix(self.latency_s),
            matrix(self.link_bytes_per_s),
            vector(self.uplink_bytes_per_s),
            vector(self.downlink_bytes_per_s),
            self.blocking,
        )

    def latency(self, source: int, target: int) -> float:
        """Seconds from one node to another."""
        return self.latency_s[source][target] if self.latency_s is not None and source != target else 0.0

    def alone_s(self, source: int, target: int, size: float) -> float:
        """Seconds that `size` bytes take when nothing else is sent."""
        if source == target:
            return 0.0
        rate = self.path_rate(source, target)
        for rates, node in ((self.uplink_bytes_per_s, source), (self.downlink_bytes_per_s, target)):
            if rates is not None:
                rate = min(rate, rates[node])
        return self.latency(source, target) + (size / rate if size else 0.0)

    def path_rate(self, source: int, target: int) -> float:
        """The rate of the path without its ends."""
        return math.inf if self.link_bytes_per_s is None else self.link_bytes_per_s[source][target]

    @property
    def shares(self) -> bool:
        """Whether any rate is limited, so that transfers must be followed one by one."""
        limits = (self.link_bytes_per_s, self.uplink_bytes_per_s, self.downlink_bytes_per_s)
        return not self.blocking and any(limit is not None for limit in limits)


@dataclass
class _Transfer:
    source: int
    target: int
    left: float
    rate: float = 0.0


@dataclass
class SharedLinks:
    """The transfers under way and the max-min fair rate of each (progressive filling, Bertsekas & Gallager
    6.5)."""

    network: Network
    _now_s: float = 0.0
    _active: dict[int, _Transfer] = field(default_factory=dict)
    _started: int = 0

    def start(self, now_s: float, source: int, target: int, size: float) -> int:
        """Adds a transfer of `size` bytes and returns its number."""
        self._advance(now_s)
        number = self._started
        self._started += 1
        self._active[number] = _Transfer(source, target, size)
        self._share()
        return number

    def next_end_s(self) -> float:
        """When the first transfer ends if nothing changes; infinity when none is under way."""
        return min((self._end_s(t) for t in self._active.values()), default=math.inf)

    def take_ended(self, now_s: float) -> list[int]:
        """Removes and returns, in order of start, the transfers that have ended by `now_s`."""
        self._advance(now_s)
        tolerance = 1e-9
        ended = [
            number
            for number, transfer in self._active.items()
            if transfer.left <= tolerance * max(1.0, transfer.rate * max(now_s, 1.0))
        ]
        for number in ended:
            del self._active[number]
        if ended:
            self._share()
        return ended

    def _end_s(self, transfer: _Transfer) -> float:
        return self._now_s + (transfer.left / transfer.rate if transfer.left > 0 else 0.0)

    def _advance(self, now_s: float) -> None:
        passed = max(0.0, now_s - self._now_s)
        for transfer in self._active.values():
            moved = transfer.rate * passed if math.isfinite(transfer.rate) else transfer.left
            transfer.left = max(0.0, transfer.left - moved)
        self._now_s = max(now_s, self._now_s)

    def _share(self) -> None:
        """Raises all rates together; whoever meets a full link keeps what it has."""
        limits: dict[tuple[str, int, int], float] = {}
        users: dict[tuple[str, int, int], list[int]] = {}
        for number, transfer in self._active.items():
            for used, capacity in self._links(transfer):
                limits[used] = capacity
                users.setdefault(used, []).append(number)
        open_transfers = dict.fromkeys(self._active)
        while open_transfers:
            share = math.inf
            link: tuple[str, int, int] | None = None
            for candidate, numbers in users.items():
                count = sum(number in open_transfers for number in numbers)
                if count and limits[candidate] / count < share:
                    share, link = limits[candidate] / count, candidate
            fixed = users[link] if link is not None else list(open_transfers)
            for number in [n for n in fixed if n in open_transfers]:
                self._active[number].rate = share
                del open_transfers[number]
                for other, _ in self._links(self._active[number]):
                    limits[other] = max(0.0, limits[other] - share)

    def _links(self, transfer: _Transfer) -> list[tuple[tuple[str, int, int], float]]:
        source, target = transfer.source, transfer.target
        found = []
        if self.network.uplink_bytes_per_s is not None:
            found.append((("up", source, 0), self.network.uplink_bytes_per_s[source]))
        if self.network.downlink_bytes_per_s is not None:
            found.append((("down", target, 0), self.network.downlink_bytes_per_s[target]))
        if math.isfinite(rate := self.network.path_rate(source, target)):
            found.append((("path", source, target), rate))
        return found
