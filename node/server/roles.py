"""The roles that one server has, the peers it is linked with, and what is done with all of them at once.

The roles never call each other: what one has to say to another is a message, also when both live here.
"""

from __future__ import annotations

from typing import Any

from node.server.allowances import tell_allowances
from node.server.back import BackRole
from node.server.buddy import BuddyRole, Copies
from node.server.context import StageContext
from node.server.decider import DeciderRole
from node.server.early import Early
from node.server.front import FrontRole
from node.server.guard import Guard
from node.server.ledger import LedgerRole
from node.server.pins import Pins
from node.server.shard import Phase, ShardRole
from node.server.sums import Sums
from node.server.tails import TailDesk
from protocol.base.ids import NodeId
from protocol.messages import ServerReady, StageKey, StepClosed
from protocol.run.course import VALIDATION_FIRST
from protocol.run.plan import Plan
from protocol.schedule.policies import First


class Roles:
    """Roles that the plan does not give to this server are None. `coordinator` is where step reports go, `copies` what
    this server holds of other servers' shards."""

    def __init__(self, context: StageContext, coordinator: NodeId, copies: Copies) -> None:
        self._context = context
        self._out = context.out
        self.servers: dict[NodeId, bool] = {}
        """Servers with a live link, and whether they have said that they are ready."""
        self.volunteers: dict[NodeId, None] = {}
        self.auditors: dict[NodeId, None] = {}
        """Machines of the operator that compute only what is audited."""
        self._pools_of: Plan | None = None
        self._pools: list[Any] = []
        self._of_training: list[Any] = []
        self.guard = Guard(context, self.pools)
        self.front = FrontRole(context) if context.is_front else None
        self.back = BackRole(context) if context.is_back else None
        self.sums = Sums(context, self.front, self.back)
        self.early = Early(context)
        self.copies = copies
        self.buddy = BuddyRole(context, copies)
        self.shard = ShardRole(context, self.buddy)
        self.tails = TailDesk(context)
        self.ledger = LedgerRole(context, coordinator) if context.ledger == context.node else None
        self.pins = Pins(context, self.front, self.back, self.shard)
        self.decider = DeciderRole(context, coordinator) if context.plan.decider == context.node else None

    @property
    def ready(self) -> bool:
        return self.shard.phase is Phase.READY

    def pools(self) -> list[Any]:
        """Pools of this server's own tasks, those of the front first."""
        self._find_pools()
        return self._pools

    def training_pools(self) -> list[Any]:
        """Those whose work leads to weight gradients."""
        self._find_pools()
        return self._of_training

    def _find_pools(self) -> None:
        """Anew with each plan, which says in which order they are; they are asked for several times at every input."""
        if self._pools_of is not self._context.plan:
            self._pools_of = self._context.plan
            self._pools = [pool for role in (self.front, self.back) if role is not None for pool in role.all_pools]
            fronts = () if self.front is None else self.front.training_pools
            self._of_training = [*fronts, *(() if self.back is None else self.back.all_pools)]

    def clock(self, now: float) -> None:
        """What happens from here on, happens at `now`."""
        for pool in self.pools():
            pool.clock(now)
        if self.ledger is not None:
            self.ledger.desk.clock(now)
        self.pins.clock(now)

    def has_opened(self, step: int) -> bool:
        return any(role is not None and role.has_opened(step) for role in (self.front, self.back))

    def open_step(self, step: int) -> None:
        for role in (self.front, self.back):
            if role is not None:
                role.open_step(step)
        if step < self._context.config.steps:
            self.tails.open_step(step)

    def close_step(self, step: int) -> None:
        """Every role forgets the step and those before it; volunteers and our own device are told to. Each volunteer
        hears it from the ledger's server, and from those that it has work of; not from everybody else of its stage."""
        told = self.volunteers if self.ledger is not None else self.tails.given_of(step)
        self._context.closed = step
        self.guard.close_step(step)
        self.sums.close_step(step)
        self.early.close_step(step)
        self.pins.close_step(step)
        self.copies.close_step(step)
        for role in (self.front, self.back, self.ledger, self.shard, self.tails):
            if role is not None:
                role.close_step(step)
        for peer in (*(peer for peer in told if peer in self.volunteers), *self.auditors):
            self._out.send(peer, StepClosed(ledger_generation=self._context.generation, step=step))
            self.tails.closed_told(peer, step)
        # A fellow server hears it from the ledger, and our own device from us.
        self._out.send(self._context.node, StepClosed(ledger_generation=self._context.generation, step=step))

    def give_leases(self, now: float) -> None:
        """After every change: whoever has a free slot gets work, and hears of tails and allowances. What goes first by
        the plan's order goes first on the line, too."""
        roles = (self.front, self.back)
        for role in roles if self._context.plan.order.first is First.FORWARD else reversed(roles):
            if role is not None:
                grants = role.give_leases(now)
                for grant in grants:
                    self.guard.leased(grant.worker, now)
                self.tails.granted(grant for grant in grants if grant.entry.tasks[0].microbatch < VALIDATION_FIRST)
        self.tails.look(self.training_pools(), now)
        if self.ledger is not None:
            for step in self.tails.over():
                self.ledger.desk.tail(step)
        tell_allowances(self._context, self.pools())

    def check(self) -> None:
        for role in (
            self.front,
            self.back,
            self.shard,
            self.ledger,
            self.decider,
            self.tails,
            self.pins,
            self.sums,
            self.early,
        ):
            if role is not None:
                role.check()

    # ---- what peers are told -------------------------------------------------------------------------------------

    def greet(self, peer: NodeId) -> None:
        """Somebody who computes asks whether this server serves. It hears which step was closed last: at link-up
        it may still have been at another stage, and counts leases and tails only of steps that may be open."""
        self.say_closed(peer)
        self.shard.greet(peer)

    def say_closed(self, peer: NodeId) -> None:
        self._out.send(peer, StepClosed(ledger_generation=self._context.generation, step=self._context.closed))
        self.tails.closed_told(peer, self._context.closed)

    def say_ready(self, peer: NodeId) -> None:
        self._out.send(peer, ServerReady(ledger_generation=self._context.generation, version=self.shard.version))

    def sync(self, peer: NodeId) -> None:
        """Tells a ready server all that it must know; what it knows already changes nothing there."""
        self.tell_key(peer)
        context = self._context
        # The decider knows, unless its disk has lost it. A fellow that was not there when we told it hears it from the
        # ledger: a run that is held has no further step to hear it by.
        fellow = self.ledger is not None and peer in context.stage_servers
        if context.closed >= 0 and peer != context.node and (fellow or peer == context.plan.decider):
            self._out.send(peer, StepClosed(ledger_generation=context.generation, step=context.closed))
        for role in (self.decider, self.ledger, self.shard, self.front, self.back, self.tails):
            if role is not None:
                role.sync(peer)
        if peer == context.plan.buddy_of(context.node):
            self.buddy.buddy_ready()

    def tell_key(self, peer: NodeId) -> None:
        """Only the ledger's server tells it, and only to fellow servers of the stage."""
        tickets, context = self._context.tickets, self._context
        if self.ledger is not None and tickets.open and peer in context.stage_servers and peer != context.node:
            self._out.send(peer, StageKey(ledger_generation=context.generation, key=tickets.key))
