"""The tail of a step: when a server has no more work of it, its workers hear so, and send what they have summed up.

A sum of weight gradients is a whole stage's vector, however few tasks are in it; so a volunteer sends one a step, and
must know when its last task has come. Each server tells each worker when nothing of the step is left for it (`Flush`),
and its fellow servers when nothing is left for anybody (`Tail`). Once the whole stage has nothing left, every worker
ought to upload: from then on the pools' clocks of weight gradients run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from node.server.context import StageContext
from node.server.pool import Grant, Pool
from protocol.base.ids import NodeId
from protocol.messages import Flush, StepClosed, Tail

CLOSED_STEPS_MAX = 4
"""A word about a step this far beyond the newest closed one that its hearer knows of from us is none to it: a volunteer
throws away what is about a step that cannot be open (`node.volunteer.tails.OPEN_STEPS_MAX`, eight). Most hear of
closings from the ledger's server alone. That one was started again, and the two servers computed thirty steps by
themselves before volunteers had their links to it; what the other one had said of the newest was thrown away, and they
kept their sums back until `linger_s` was over, one after the other: nine seconds in which no step was closed."""


@dataclass(slots=True)
class _Step:
    """What is known of one open step."""

    given: dict[NodeId, int] = field(default_factory=dict)
    """Leases that each worker was given on its present link."""
    told: dict[NodeId, int] = field(default_factory=dict)
    """Workers that know of their tail, and how many leases they had by then."""
    untold: dict[NodeId, None] = field(default_factory=dict)
    """Workers that do not, or have been given more since."""
    servers: dict[NodeId, None] = field(default_factory=dict)
    """Servers of the stage that have nothing left to give."""


class TailDesk:
    """Watches the pools of one server. `workers` are those with a live link, oldest first."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._steps: dict[int, _Step] = {}
        self._early: dict[int, dict[NodeId, None]] = {}
        """Fellows that have said so of a step before we heard that it is open: by another link, and once only."""
        self._workers: dict[NodeId, int] = {}
        """With the order of their arrival."""
        self._heard: dict[NodeId, None] = {}
        """Those that have said something as workers of this stage."""
        self._arrivals = 0
        self._knows_closed: dict[NodeId, int] = {}
        """The newest closed step that each worker has heard of from us, or will, when it greets us."""

    def open_step(self, step: int) -> None:
        if step not in self._steps:
            self._steps[step] = _Step(untold=dict.fromkeys(self._workers), servers=self._early.pop(step, {}))

    def close_step(self, step: int) -> None:
        for key in [key for key in self._steps if key <= step]:
            del self._steps[key]
        for key in [key for key in self._early if key <= step]:
            del self._early[key]

    def given_of(self, step: int) -> dict[NodeId, None]:
        """Workers that this server has given something of the step or of those before it, on their present links."""
        return {node: None for number, known in self._steps.items() if number <= step for node in known.given}

    def greeted(self, node: NodeId, anew: bool) -> None:
        """It works for the stage, and is told again: at link-up it may still be at another one, and hear nothing of
        ours. Its first word may have come under a plan that we did not have yet, so any word will do. `anew`: it counts
        from nothing."""
        if anew or node not in self._heard:
            self.worker_here(node)
            self._heard[node] = None

    def worker_here(self, node: NodeId) -> None:
        """Its link is new: whatever was counted on an earlier one is void, on the other side too. It is told at once,
        since one whose slots are all taken has nothing to say by itself."""
        self.worker_gone(node)
        self._arrivals += 1
        self._workers[node] = self._arrivals
        self._knows_closed[node] = self._context.closed
        for step in self._steps.values():
            step.untold[node] = None

    def closed_told(self, node: NodeId, step: int) -> None:
        """It was told that the step is closed."""
        if node in self._workers:
            self._knows_closed[node] = step

    def worker_gone(self, node: NodeId) -> None:
        self._workers.pop(node, None)
        self._knows_closed.pop(node, None)
        self._heard.pop(node, None)
        for step in self._steps.values():
            step.given.pop(node, None)
            step.told.pop(node, None)
            step.untold.pop(node, None)

    def granted(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            step = self._steps.get(grant.entry.step)
            if step is not None:
                step.given[grant.worker] = step.given.get(grant.worker, 0) + 1
                if grant.worker in self._workers:
                    step.untold[grant.worker] = None

    def look(self, pools: list[Pool], now: float) -> None:
        """After every change: tells those whose tail has come, or has come again after more work."""
        for number, step in self._steps.items():
            for pool in pools:
                if pool.open_to_all(number):
                    break
            else:
                self._tell(number, step, pools, now)

    def _tell(self, number: int, step: _Step, pools: list[Pool], now: float) -> None:
        """Of a step that has nothing left for whoever asks."""
        if step.untold:
            for node in sorted(step.untold, key=self._workers.__getitem__):
                if not any(pool.has_more_for(node, number) for pool in pools):
                    given = step.told[node] = step.given.get(node, 0)
                    del step.untold[node]
                    self._out_flush(node, number, given)
        if self._context.node not in step.servers and not any(pool.open_count(number) for pool in pools):
            for server in self._context.stage_servers:
                if server != self._context.node:
                    self._context.out.send(server, self._tail(number))
            self.on_tail(self._context.node, number)
        if self._all_have_said(step):
            for pool in pools:
                pool.tail(number, now)

    def on_tail(self, server: NodeId, number: int) -> None:
        """A server of the stage has given all that it had. If a lease comes back to it, this stays: the others' sums
        are on their way by then."""
        step = self._steps.get(number)
        if step is not None:
            step.servers[server] = None
        elif self._context.in_window(number):
            self._early.setdefault(number, {})[server] = None

    def _all_have_said(self, step: _Step) -> bool:
        """Those that have a place now: one that has lost it may have said it, too."""
        servers = self._context.stage_servers
        return len(step.servers) >= len(servers) and all(server in step.servers for server in servers)

    def over(self) -> list[int]:
        """Open steps of which no server of the stage has anything left to give."""
        return [number for number, step in self._steps.items() if self._all_have_said(step)]

    def sync(self, peer: NodeId) -> None:
        """A fellow server is ready: it hears of the tails that it may have missed."""
        if peer in self._context.stage_servers and peer != self._context.node:
            for number, step in self._steps.items():
                if self._context.node in step.servers:
                    self._context.out.send(peer, self._tail(number))

    def _tail(self, step: int) -> Tail:
        return Tail(ledger_generation=self._context.generation, step=step)

    def _out_flush(self, node: NodeId, step: int, leases: int) -> None:
        if step > self._knows_closed[node] + CLOSED_STEPS_MAX:
            closed = self._knows_closed[node] = self._context.closed
            self._context.out.send(node, StepClosed(ledger_generation=self._context.generation, step=closed))
        self._context.out.send(node, Flush(ledger_generation=self._context.generation, step=step, leases=leases))

    def check(self) -> None:
        assert all(step > self._context.closed for step in (*self._steps, *self._early)), "a closed step is kept (L3)"
        assert self._knows_closed.keys() == self._workers.keys(), "somebody is told of a tail and not of closings"
