"""The same routes where parallel transfers share uplinks and downlinks: a cost to judge and to search by.

Ten times slower than `Evaluator`, because a transfer that starts or ends changes the rates of others; so a search
begins without sharing and goes on with it (`search_shared`). Only the transfers that hang together with the one that
changed get new rates. Nodes choose by the same rule as without sharing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from coordinator.planning.routes.evaluate import Evaluator
from coordinator.planning.routes.model import Route, RouteModel
from coordinator.planning.simulator.kernel import SAME_INSTANT
from coordinator.planning.simulator.links import Network

Legs = Callable[[int, int], Sequence[tuple[int, int]]]
"""From node to node as transfers from machine to machine, one after the other."""


@dataclass(frozen=True)
class Sharing:
    """What the transfers of a route model share.

    `network` is over the model's nodes, or over machines where `legs` say by which of them a hop goes. Every leg is a
    transfer of `activation_bytes` and then its latency; alone on the network a hop must take what `link_s` says.
    """

    network: Network
    activation_bytes: float
    legs: Legs | None = None


class SharedEvaluator(Evaluator):
    """Simulates routes of one model with shared links; a drop-in for `Evaluator`."""

    def __init__(self, model: RouteModel, sharing: Sharing) -> None:
        super().__init__(model)
        self.sharing = sharing
        self._legs: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        self._flows = _Flows(sharing)

    def _way(self, source: int, target: int) -> tuple[tuple[int, int], ...]:
        if self.sharing.legs is None:
            return ((source, target),)
        found = self._legs.get((source, target))
        if found is None:
            legs = [leg for leg in self.sharing.legs(source, target) if leg[0] != leg[1]]
            found = self._legs[source, target] = tuple(legs)
        return found

    def ends(
        self,
        routes: Sequence[Route],
        bias: Sequence[float] | None = None,
        record: list[list[list[float]]] | None = None,
        limit_s: float = math.inf,
    ) -> list[float]:
        """When the last microbatch of each route ends; the arguments are those of `Evaluator.ends`."""
        self.evaluations += 1
        chains = [self.steps(route) for route in routes]
        left = list(self.model.sends)
        extra = [
            (bias[a] if bias is not None else 0.0) + (left[a] - 1) * chain.tail_s[0] for a, chain in enumerate(chains)
        ]
        flows = self._flows  # empty again at the end of every simulation
        # (at, number, route, step, leg): leg -1 arrives at its node, others start on their way; route -1: node `step`
        # is free.
        events: list[tuple[float, int, int, int, int]] = [(0.0, a, a, 0, -1) for a in range(len(chains)) if left[a]]
        number = len(events)
        waiting: list[list[tuple[float, int, int]] | None] = [None] * self.model.nodes
        free_at = [0.0] * self.model.nodes
        ends = [0.0] * len(chains)
        latency = self.sharing.network.latency
        while True:
            now = min(events[0][0] if events else math.inf, flows.next_s())
            if now == math.inf:
                return ends
            for a, k, leg, source, target in flows.ended(now):
                way = self._way(chains[a].nodes[k - 1], chains[a].nodes[k])
                after = leg + 1 if leg + 1 < len(way) else -1
                heappush(events, (now + latency(source, target), number, a, k, after))
                number += 1
            until = now + now * SAME_INSTANT
            touched: dict[int, None] = {}
            while events and events[0][0] <= until:
                _, _, a, k, leg = heappop(events)
                if a < 0:
                    touched[k] = None
                elif leg >= 0:
                    source, target = self._way(chains[a].nodes[k - 1], chains[a].nodes[k])[leg]
                    flows.add(now, source, target, (a, k, leg))
                else:
                    node = chains[a].nodes[k]
                    queue = waiting[node]
                    if queue is None:
                        queue = waiting[node] = []
                    heappush(queue, (-chains[a].tail_s[k] - extra[a], a, k))
                    touched[node] = None
            flows.share(now)
            for node in touched:
                queue = waiting[node]
                if not queue or free_at[node] > now + 1e-12:
                    continue
                _, a, k = heappop(queue)
                chain = chains[a]
                if now + chain.tail_s[k] + (left[a] - 1) * chain.tail_s[0] > limit_s:
                    flows.clear()
                    return [math.inf] * len(chains)
                if record is not None:
                    if k == 0:
                        record[a].append([])
                    record[a][-1].append(now)
                done = now + chain.work_s[k]
                free_at[node] = now + chain.busy_s[k]
                heappush(events, (free_at[node], number, -1, node, -1))
                number += 1
                k += 1
                if k < len(chain.nodes):
                    here = chain.nodes[k - 1]
                    stays = chain.nodes[k] == here or not self._way(here, chain.nodes[k])
                    heappush(events, (done, number, a, k, -1 if stays else 0))
                else:
                    ends[a] = done
                    left[a] -= 1
                    extra[a] -= chain.tail_s[0]
                    if left[a]:
                        heappush(events, (done, number, a, 0, -1))
                number += 1


class _Flow:
    """One transfer under way; `left` bytes at `since`."""

    __slots__ = ("left", "links", "rate", "since", "source", "tag", "target", "version")

    def __init__(
        self, source: int, target: int, left: float, since: float, links: tuple[int, ...], tag: tuple[int, int, int]
    ) -> None:
        self.source, self.target, self.left, self.since = source, target, left, since
        self.links, self.tag = links, tag
        self.rate = 0.0
        self.version = 0


class _Flows:
    """Max-min fair rates (progressive filling), counted anew only for transfers that hang together with a change."""

    def __init__(self, sharing: Sharing) -> None:
        self.network = sharing.network
        self.size = sharing.activation_bytes
        self._number: dict[tuple[str, int, int], int] = {}
        self._capacity: list[float] = []
        self._users: list[dict[_Flow, None]] = []
        self._changed: dict[int, None] = {}
        self._heap: list[tuple[float, int, int, _Flow]] = []
        self._pushed = 0
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}

    def _links(self, source: int, target: int) -> tuple[int, ...]:
        """The numbers of the limited links on the way."""
        found = self._known.get((source, target))
        if found is None:
            network = self.network
            limits = []
            if network.uplink_bytes_per_s is not None:
                limits.append((("up", source, 0), network.uplink_bytes_per_s[source]))
            if network.downlink_bytes_per_s is not None:
                limits.append((("down", target, 0), network.downlink_bytes_per_s[target]))
            limits.append((("path", source, target), network.path_rate(source, target)))
            numbers = []
            for key, capacity in limits:
                if key not in self._number:
                    self._number[key] = len(self._capacity)
                    self._capacity.append(float(capacity))
                    self._users.append({})
                numbers.append(self._number[key])
            found = self._known[source, target] = tuple(numbers)
        return found

    def clear(self) -> None:
        """Forgets all transfers under way."""
        for users in self._users:
            users.clear()
        self._changed.clear()
        self._heap.clear()

    def add(self, now: float, source: int, target: int, tag: tuple[int, int, int]) -> None:
        """A transfer starts; its rate follows with `share`."""
        links = self._links(source, target)
        flow = _Flow(source, target, self.size, now, links, tag)
        for link in links:
            self._users[link][flow] = None
        self._changed.update(dict.fromkeys(links))

    def next_s(self) -> float:
        """When the next transfer ends if nothing changes."""
        heap = self._heap
        while heap and heap[0][2] != heap[0][3].version:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def ended(self, now: float) -> list[tuple[int, int, int, int, int]]:
        """Removes the transfers that have ended by `now`: tag, source and target of each."""
        found = []
        until = now + now * SAME_INSTANT
        while self.next_s() <= until:
            _, _, _, flow = heappop(self._heap)
            flow.version += 1
            for link in flow.links:
                del self._users[link][flow]
            self._changed.update(dict.fromkeys(flow.links))
            found.append((*flow.tag, flow.source, flow.target))
        return found

    def share(self, now: float) -> None:
        """New rates for all transfers that share a link, directly or through others, with a changed one."""
        todo = [link for link in self._changed if self._users[link]]
        self._changed = {}
        seen = dict.fromkeys(todo)
        flows: dict[_Flow, None] = {}
        while todo:
            for flow in self._users[todo.pop()]:
                if flow in flows:
                    continue
                flows[flow] = None
                for link in flow.links:
                    if link not in seen:
                        seen[link] = None
                        todo.append(link)
        if not flows:
            return
        room = {link: self._capacity[link] for link in seen}
        users = {link: len(self._users[link]) for link in seen if self._users[link]}
        open_flows = dict(flows)
        while open_flows:
            share = math.inf
            tight = -1
            for link, count in users.items():
                if count and room[link] < share * count:
                    share, tight = room[link] / count, link
            fixed = [f for f in self._users[tight] if f in open_flows] if tight >= 0 else list(open_flows)
            for flow in fixed:
                del open_flows[flow]
                for link in flow.links:
                    room[link] = max(0.0, room[link] - share)
                    users[link] -= 1
                self._set(flow, share, now)

    def _set(self, flow: _Flow, rate: float, now: float) -> None:
        if rate == flow.rate:
            return
        flow.left = max(0.0, flow.left - flow.rate * (now - flow.since)) if flow.rate < math.inf else 0.0
        flow.since, flow.rate = now, rate
        flow.version += 1
        self._pushed += 1
        if rate > 0:
            heappush(self._heap, (now + flow.left / rate, self._pushed, flow.version, flow))
