"""What all roles of one server share: its place in the plan, the run, the open steps, the outbox."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from node.machine.outbox import Outbox
from node.machine.readable import ReadableCheckpoints
from node.machine.slow_line import transfer_s, upload_s
from node.server.tickets import TicketOffice
from protocol.base.ids import NodeId, TaskId
from protocol.messages import Held
from protocol.run.batches import Batches
from protocol.run.course import VALIDATION_FIRST
from protocol.run.plan import Plan
from protocol.run.run import RunConfig
from protocol.schedule.policies import Policy

Place = tuple[int, int, int]
"""(microbatch, position along its route, segment): what one activation of a step belongs to; tokens have one."""

RUN_SLOTS_MAX = 2
"""Backwards, or route ends, that a volunteer asks for ahead: one runs, one is on its way."""
CLOSED_LAG_STEPS = 2
"""How far this server's `closed` can lag behind the decider's while a neighbour already sends work of a newer step:
the word that a step is closed comes by another link than the work. A third cannot close without our own commit."""


def named(places: Mapping[Place, None], step: int, message: Held, ahead: int = 0) -> Iterable[Place]:
    """The visits that a neighbour's word on what it holds is about: all of the step's, if what it does not name it has
    not; else those that its tasks name, `ahead` positions after theirs. That is most often one of thousands."""
    if message.complete:
        return places
    told = ((task.microbatch, task.position + ahead, task.segment) for task in message.tasks if task.step == step)
    return [place for place in told if place in places]


@dataclass(slots=True)
class StageContext:
    """Changed only by the server machine: the plan when a new one comes, the steps when they open and close."""

    node: NodeId
    config: RunConfig
    """The run as it is now, with what the operator has changed (`protocol.run.changes.running`); given as its file has
    it. How many microbatches a step has, `batches` knows."""
    plan: Plan
    stage: int
    shard: int
    out: Outbox
    tickets: TicketOffice
    opened: int = -1
    """Newest step that this server knows open."""
    closed: int = -1
    """Newest step that every stage has committed."""
    computing: dict[NodeId, None] = field(default_factory=dict)
    """Servers of the stage that are linked here and have a device, as they say at once."""
    memory_bytes: int = 0
    """Free on this computer when the process began; 0: not known."""
    readable: ReadableCheckpoints | None = None
    """Checkpoints that this server was told of, also under earlier ledgers."""
    alerts: dict[str, str] = field(default_factory=dict)
    """What is wrong on this server while training goes on, as a sentence, by what it is about."""
    written: RunConfig = field(init=False)
    """The run as its file has it: what its hash is of."""
    batches: Batches = field(init=False)
    chunks: tuple[int, ...] = field(init=False)
    """Of the stage."""
    stage_servers: tuple[NodeId, ...] = field(init=False)
    """Of the stage, in shard order."""

    def __post_init__(self) -> None:
        self.written = self.config
        self.chunks = self.plan.course.chunks_of(self.stage)
        self.take_plan(self.plan)

    def take_plan(self, plan: Plan) -> None:
        """A new plan of the same ledgers: addresses may have changed, or the run."""
        self.plan = plan
        self.stage_servers = tuple(server.node for server in plan.stages[self.stage].servers)
        self.batches = Batches.of(self.written, plan.changes)
        self.config = self.batches.now

    @property
    def generation(self) -> int:
        """The ledger generation: what all work is fenced with."""
        return self.plan.ledger_generation

    @property
    def is_front(self) -> bool:
        return any(server.node == self.node for server in self.plan.stages[self.stage].fronts)

    @property
    def is_back(self) -> bool:
        return any(server.node == self.node for server in self.plan.stages[self.stage].backs)

    @property
    def reads_data(self) -> bool:
        """Whether routes begin at this stage: its fronts load the data, and send the labels to where routes end."""
        return self.stage == 0

    @property
    def ledger(self) -> NodeId:
        return self.plan.ledger_of(self.stage)

    @property
    def servers_judge(self) -> bool:
        """Whether what is doubted is computed by a server before a second volunteer's word counts."""
        return bool(self.computing) and self.config.stages.collocated != "never"

    @property
    def result_s(self) -> float:
        """Seconds from a grant until the result must be held by a server, transfers both ways included."""
        return self.config.limits.lease_s + transfer_s(self.config, 2 * self.plan.in_flight_max, bits=32.0)

    @property
    def transfer_s(self) -> float:
        """Seconds that a lease's tensors take on a slow line, behind those of the worker's other leases."""
        return transfer_s(self.config, 2 * self.plan.in_flight_max)

    def upload_s(self, shard_elements: int) -> float:
        """Seconds that a contribution may take on a slow line, beside the next step's activations."""
        return upload_s(self.config, shard_elements * len(self.stage_servers))

    def rank(self, by: Callable[[Policy, TaskId, int], tuple[int, ...]], task: TaskId) -> tuple[int, ...]:
        """Where a task stands among those that are free in a pool, as the plan's order has it."""
        chunk = self.plan.chunk_at(task.step, task.microbatch, task.position)
        return by(self.plan.order, task, self.chunks.index(chunk))

    def in_window(self, step: int) -> bool:
        """Whether a message about `step` can be of use: not closed, and not further than any step can be open."""
        newest = self.closed + CLOSED_LAG_STEPS + 1 + self.config.batch.delay
        return self.closed < step <= newest and self.config.has_step(step)

    def front_places(self, step: int) -> Iterator[Place]:
        """Places whose input this server keeps, in order."""
        plan = self.plan
        for microbatch in self.batches.microbatches_of(step):
            for position in range(plan.length(step, microbatch)):
                if plan.front_of(step, microbatch, position) == self.node:
                    for segment in range(self.input_segments(microbatch, position)):
                        yield microbatch, position, segment

    def back_places(self, step: int) -> Iterator[Place]:
        """Places whose output this server keeps, in order: a route's end has none."""
        plan = self.plan
        for microbatch in self.batches.microbatches_of(step):
            for position in range(plan.length(step, microbatch) - 1):
                if plan.back_of(step, microbatch, position) == self.node:
                    for segment in range(self.segments_of(microbatch)):
                        yield microbatch, position, segment

    def segments_of(self, microbatch: int) -> int:
        """Parts in which it goes through the stages: the validation goes in one."""
        return 1 if microbatch >= VALIDATION_FIRST else self.config.batch.segments

    def input_segments(self, microbatch: int, position: int) -> int:
        """Parts in which what comes into a visit comes: tokens come at once."""
        return 1 if position == 0 else self.segments_of(microbatch)


def stage_tasks(context: StageContext, step: int) -> Iterator[TaskId]:
    """The tasks of a step that leave weight gradients in this stage, in order."""
    plan = context.plan
    for microbatch in range(context.batches.count(step)):
        end = plan.length(step, microbatch)
        for position in range(end):
            if plan.stage_at(step, microbatch, position) == context.stage:
                yield TaskId(step, microbatch, position, "B")
        if plan.stage_at(step, microbatch, end) == context.stage:
            yield TaskId(step, microbatch, end, "L")
