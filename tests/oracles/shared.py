"""Routes on shared links, simulated with the links of the schedule simulator: slow, and nothing is kept between calls.

What `coordinator.planning.routes.shared` is checked against.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from coordinator.planning.routes.evaluate import steps_of
from coordinator.planning.routes.model import Route, RouteModel
from coordinator.planning.simulator.kernel import EventHeap
from coordinator.planning.simulator.links import Network, SharedLinks


def shared_ends(
    model: RouteModel,
    routes: Sequence[Route],
    network: Network,
    activation_bytes: float,
    bias: Sequence[float] | None = None,
) -> list[float]:
    """When the last microbatch of each route ends, every hop being a transfer of `activation_bytes`.

    `network` is over the nodes of `model`; a hop takes its transfer, then the latency. `model.link_s` is only
    used to rank the work that is left.
    """
    chains = [steps_of(model, route) for route in routes]
    left = list(model.sends)
    extra = [(bias[a] if bias is not None else 0.0) + (left[a] - 1) * chain.alone_s for a, chain in enumerate(chains)]
    links = SharedLinks(network)
    events: EventHeap[tuple[int, int]] = EventHeap()  # (route, step) arrives, or (-1, node) is free
    travelling: dict[int, tuple[int, int]] = {}
    sends: EventHeap[tuple[int, int]] = EventHeap()
    waiting: list[list[tuple[float, int, int]]] = [[] for _ in range(model.nodes)]
    free_at = [0.0] * model.nodes
    ends = [0.0] * len(chains)
    for a in range(len(chains)):
        if left[a]:
            events.push(0.0, (a, 0))
    while True:
        now = min(events.next_s(), links.next_end_s(), sends.next_s())
        if now == float("inf"):
            return ends
        for number in links.take_ended(now):
            a, k = travelling.pop(number)
            source, target = chains[a].nodes[k - 1], chains[a].nodes[k]
            events.push(now + network.latency(source, target), (a, k))
        if sends.next_s() <= now:
            for a, k in sends.pop_instant()[1]:
                number = links.start(now, chains[a].nodes[k - 1], chains[a].nodes[k], activation_bytes)
                travelling[number] = (a, k)
        touched: dict[int, None] = {}
        if events.next_s() <= now:
            for a, k in events.pop_instant()[1]:
                if a < 0:
                    touched[k] = None
                    continue
                node = chains[a].nodes[k]
                heappush(waiting[node], (-chains[a].tail_s[k] - extra[a], a, k))
                touched[node] = None
        for node in touched:
            if not waiting[node] or free_at[node] > now + 1e-12:
                continue
            _, a, k = heappop(waiting[node])
            chain = chains[a]
            done = now + chain.work_s[k]
            free_at[node] = now + chain.busy_s[k]
            events.push(free_at[node], (-1, node))
            if k + 1 < len(chain.nodes):
                if chain.nodes[k + 1] == node:
                    events.push(done, (a, k + 1))
                else:
                    sends.push(done, (a, k + 1))
                continue
            ends[a] = done
            left[a] -= 1
            extra[a] -= chain.alone_s
            if left[a]:
                events.push(done, (a, 0))
