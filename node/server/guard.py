"""What a server does not take from volunteers at their word: how much they say, and activations that are absurd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from node.machine.jobs import MeasureResult
from node.server.context import StageContext
from node.server.pool import Pool
from node.server.rates import Rates
from node.server.sizes import Sizes
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId, TaskId
from protocol.messages import InputGradient, Output, Verdict


class Guard:
    """Stands before the roles of one server; `pools` gives those whose leases it may take away."""

    def __init__(self, context: StageContext, pools: Callable[[], Sequence[Pool]]) -> None:
        self._context = context
        self._out = context.out
        self._pools = pools
        self._rates = Rates()
        self._outputs, self._gradients = Sizes("its output"), Sizes("its input gradient")

    def check_message(self, peer: NodeId, now: float) -> None:
        """Counts a message of a volunteer; raises `RemoteProtocolError` ("busy") for one too many."""
        if not self._rates.may_speak(peer, now):
            raise RemoteProtocolError("busy", "more messages than its leases can bring about")

    def check_fetch(self, peer: NodeId, newest: int, now: float) -> None:
        """Counts a volunteer's question for parameters, of which `newest` is the newest version; raises as above."""
        if not self._rates.may_fetch(peer, newest, now):
            raise RemoteProtocolError("busy", "parameters asked for over and over")

    def leased(self, worker: NodeId, now: float) -> None:
        """It has been given work, and will speak of it, and of each segment."""
        for _ in range(self._context.config.batch.segments):
            self._rates.leased(worker, now)

    def is_used(self, peer: NodeId, message: Output | InputGradient, size: float) -> bool:
        """Whether a result that is waited for goes on. What is absurd does not: it is dropped, and its lease goes to
        somebody else, here at once, elsewhere when it runs out.

        Args:
            size: as in `protocol.base.machine.Received`.
        """
        sizes = self._outputs if isinstance(message, Output) else self._gradients
        task, trusted = message.task, peer in self._context.stage_servers
        doubt = sizes.look(task, peer, message.ticket.fence, size, trusted, self._context.servers_judge)
        if doubt:
            self._out.drop(message.tensors)
            self._out.log("warning", "result doubted", task=str(task), worker=peer, reason=doubt)
            for pool in self._pools():
                self._give_to_others(pool, (task.whole,), peer)
            return False
        if not (trusted and size == 0.0 and sizes.is_doubted(task)):
            self._judge(sizes, task, peer, size)
        elif message.tensors:
            # What servers make is not measured as it comes. Here it tells who lied, so its size has to be known.
            kind: Literal["F", "B"] = "F" if sizes is self._outputs else "B"
            self._out.compute(MeasureResult(task, kind, peer, self._out.share(message.tensors[0])))
        return True

    def measured(self, job: MeasureResult, size: float) -> None:
        """What a server made is so large: it judges what was put aside for this task."""
        self._out.drop((job.result,))
        self._judge(self._outputs if job.kind == "F" else self._gradients, job.task, job.node, size)

    def not_measured(self, job: MeasureResult) -> None:
        """Its bytes hold no numbers: nobody is judged by them."""
        self._out.drop((job.result,))

    def _judge(self, sizes: Sizes, task: TaskId, node: NodeId, size: float) -> None:
        for liar in sizes.accepted(task, node, size):
            self._out.log("warning", "a false result", blamed=liar, tasks=[str(task)])
            for pool in self._pools():
                pool.blame(liar)

    def on_verdict(self, verdict: Verdict) -> None:
        """The ledger's word on a contribution: its tasks are covered or given to others, and who lied gets nothing."""
        for pool in self._pools():
            if verdict.accepted:
                pool.covered(verdict.tasks, verdict.contribution.node)
            elif verdict.doubted:
                self._give_to_others(pool, verdict.tasks, verdict.contribution.node)
            else:
                pool.give_back(verdict.tasks, verdict.contribution.node)
            for node in verdict.blamed:
                pool.blame(node)

    def _give_to_others(self, pool: Pool, tasks: Sequence[TaskId], node: NodeId) -> None:
        """What the node brought for these is doubted."""
        pool.give_back(tasks, node, doubted=True)
        if self._context.servers_judge:
            pool.reserve(tasks)

    def close_step(self, step: int) -> None:
        self._outputs.close_step(step)
        self._gradients.close_step(step)
