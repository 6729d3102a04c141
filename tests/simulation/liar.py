"""A volunteer that works and lies: beside its honest messages it sends what no honest peer would.

What `LIES` and most of `BENDS` hold can be seen to be wrong by looking at it, so it must be refused and harm nobody
but its sender. Wrong numbers in the right shape (`false_…`) can only be found by audits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from node.core import NodeMachine
from protocol.base.ids import TICKET_BYTES, ContributionId, NodeId, TaskId, TensorRef, Ticket
from protocol.base.machine import DropTensors, Effect, Input, LinkUp, Send
from protocol.messages import (
    Commit,
    Contribute,
    FetchInput,
    FetchParameters,
    InputGradient,
    LeaseReturned,
    Message,
    Output,
    Ready,
    StepClosed,
    Verdict,
)
from protocol.run.run import RunConfig
from tests.simulation.arithmetic import PRIME
from tests.simulation.lanes import ANNOUNCED_ELEMENTS
from tests.simulation.world import Host

LIE_SHARE = 0.15
"""Lies for each input."""


FALSE_SHARE = 0.5
"""Results of false numbers among those of a liar that makes some. `test_audits.py` has them found."""
HUGE_SHARE = 0.3
"""Absurd ones among its contributions."""


class Liar:
    """Wraps an honest node's machine. See `protocol.base.machine` for the doors."""

    def __init__(
        self,
        inner: NodeMachine,
        host: Host,
        rng: random.Random,
        names: tuple[str, ...] | None,
        spoilt: dict[TaskId, bool],
        conspire: bool = False,
    ) -> None:
        """
        Args:
            names: of `LIES` and `BENDS`; None for all lies, and absurd contributions.
            spoilt: tasks that a liar of this world, in any of its lives, has once brought a contribution of, and
                whether that was false.
            conspire: what one liar has made up, others confirm, and so does it in its next life.
        """
        self._all = names is None
        names = (*(lie.__name__[1:] for lie in LIES), "absurd") if names is None else names
        self._names = names
        self._lies = tuple(lie for lie in (*LIES, *GRID_LIES) if lie.__name__[1:] in names)
        self._bends = tuple(bend for name, bend in BENDS.items() if name in names)
        self._inner = inner
        self._host = host
        self._rng = rng
        self._number = 0
        self._results: deque[tuple[NodeId, Output | InputGradient, Any]] = deque(maxlen=64)
        """Results of real leases as they were sent, with their values."""
        self._parts: deque[tuple[Contribute, Any]] = deque(maxlen=16)
        """Parts of its contributions as they were sent, with their values, where sums are on a grid."""
        self._huge: dict[ContributionId, bool] = {}
        self._spoilt, self._conspire = spoilt, conspire
        self._false: dict[ContributionId | TaskId, bool] = {}

    def start(self, now: float) -> Sequence[Effect]:
        return self._inner.start(now)

    def handle(self, fact: Input, now: float) -> Sequence[Effect]:
        effects = list(self._inner.handle(fact, now))
        for each in effects:
            if isinstance(each, Send) and isinstance(each.message, Contribute) and each.message.tensors[0].form == "gi":
                self._parts.append((each.message, self._host.store[each.message.tensors[0].key]))
        for bend in self._bends:
            effects = [bend(self, effect) for effect in effects]
        if OLD_RESULTS in self._names:
            effects += self._old_results(effects)
        if not self._lies:
            return effects
        if self._rng.random() < LIE_SHARE or (isinstance(fact, LinkUp) and self._rng.random() < 0.5):
            effects += self._lie()
        return effects

    def wake_at(self) -> float | None:
        return self._inner.wake_at()

    def wake(self, now: float) -> Sequence[Effect]:
        return self._inner.wake(now)

    def check(self) -> None:
        self._inner.check()

    def waiting_for(self) -> str:
        return self._inner.waiting_for()

    def _absurd(self, effect: Effect) -> Effect:
        """Some contributions are false and huge, which a receiver's driver measures.

        Where servers compute, liars conspire: a task that one has spoilt, all spoil, in the same way. Where servers
        compute nothing, two nodes that bring the like confirm each other, since an honest run may diverge too
        (`node.server.doubts`), and no judge of the world could allow for that: what was brought once is honest then.
        """
        if not isinstance(effect, Send) or not isinstance(effect.message, Contribute):
            return effect
        message = effect.message
        if message.contribution not in self._huge:
            known = [self._spoilt[task] for task in message.tasks if task in self._spoilt]
            drawn = self._rng.random() < HUGE_SHARE
            false = any(known) or drawn if self._conspire else not known and drawn
            self._huge[message.contribution] = false
            self._spoilt.update(dict.fromkeys(message.tasks, false))
        if not self._huge[message.contribution]:
            return effect
        value = self._host.store[message.tensors[0].key]
        if message.tensors[0].form == "gi":  # whole numbers are measured where the grid is, by how large they are
            self._host.store[message.tensors[0].key] = tuple(number + 2 * PRIME + 1 for number in value)
            return effect
        self._host.store[message.tensors[0].key] = tuple(number + 1 for number in value)
        return Send(effect.peer, msgspec.structs.replace(message, square_norm=float("inf")))

    def _false_gradient(self, effect: Effect) -> Effect:
        """A part of some contributions is not the sum that it should be, though of its size."""
        if isinstance(effect, Send) and isinstance(effect.message, Contribute) and effect.message.shard == 0:
            self._falsify(effect.message.contribution, effect.message.tensors[0])
        return effect

    def _false_output(self, effect: Effect) -> Effect:
        if isinstance(effect, Send) and isinstance(effect.message, Output):
            self._falsify(effect.message.task, effect.message.tensors[0])
        return effect

    def _false_input_gradient(self, effect: Effect) -> Effect:
        if isinstance(effect, Send) and isinstance(effect.message, InputGradient):
            self._falsify(effect.message.task, effect.message.tensors[0])
        return effect

    def _falsify(self, what: ContributionId | TaskId, ref: TensorRef) -> None:
        """The same when it is sent again."""
        if what not in self._false:
            self._false[what] = self._rng.random() < FALSE_SHARE
            if self._false[what]:
                value = self._host.store[ref.key]
                false = tuple(number + 1 for number in value) if isinstance(value, tuple) else value + 1
                self._host.store[ref.key] = false

    def _another_name(self, effect: Effect) -> Effect:
        """Some contributions, with the tickets of real leases, name somebody else as who made them."""
        if not isinstance(effect, Send) or not isinstance(effect.message, Contribute):
            return effect
        made = effect.message.contribution
        if made.number % 2:
            return effect
        other = msgspec.structs.replace(made, node=NodeId("v7"))
        return Send(effect.peer, msgspec.structs.replace(effect.message, contribution=other))

    def _bent_shape(self, effect: Effect) -> Effect:
        """The result of a real lease, in a shape that no device of the next stage can take."""
        if not isinstance(effect, Send) or not isinstance(effect.message, Output):
            return effect
        (ref,) = effect.message.tensors
        bent = msgspec.structs.replace(ref, shape=(1, *ref.shape))
        return Send(effect.peer, msgspec.structs.replace(effect.message, tensors=(bent,)))

    def _old_results(self, effects: Sequence[Effect]) -> list[Effect]:
        """Results of real leases once more, when their step has been closed long since."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Output | InputGradient):
                value = self._host.store[effect.message.tensors[0].key]
                self._results.append((effect.peer, effect.message, value))
        volunteer = self._inner.volunteer
        if volunteer is None or not self._results or self._results[0][1].task.step > volunteer._closed:
            return []
        peer, message, value = self._results.popleft()
        (ref,) = message.tensors
        tensors = self.tensor(ref.shape, ref.form, value)
        return [Send(peer, msgspec.structs.replace(message, tensors=tensors)), DropTensors((tensors[0].key,))]

    def _lie(self) -> list[Effect]:
        inner = self._inner
        if inner.config is None or inner.plan is None or inner.stage < 0 or inner.volunteer is None:
            return []
        servers = [server.node for server in inner.plan.stages[inner.stage].servers]
        on_grid = inner.config.wire.gradients == "gi"
        lie = self._rng.choice(self._lies + GRID_LIES * (self._all and on_grid))
        message = lie(self, inner.config)
        to = self._rng.choice(servers)
        if on_grid and isinstance(message, Contribute) and message.shard < len(servers):
            to = servers[message.shard]
        effects: list[Effect] = [Send(to, message)]
        keys = tuple(ref.key for ref in getattr(message, "tensors", ()))
        return [*effects, DropTensors(keys)] if keys else effects

    # ---- what to say ---------------------------------------------------------------------------------------------

    def tensor(self, shape: tuple[int, ...], form: Any = "fp32", value: Any = 0) -> tuple[TensorRef, ...]:
        key = next(self._host.keys)
        self._host.store[key] = value
        return (TensorRef(key, shape, form, 64),)

    def part(self, config: RunConfig) -> tuple[TensorRef, ...]:
        """Of a contribution: on the grid of the size that a shard has, else of none."""
        on_grid = config.wire.gradients == "gi"
        return self.tensor((ANNOUNCED_ELEMENTS if on_grid else 3,), config.wire.gradients, (0, 0, 0))

    @property
    def generation(self) -> int:
        assert self._inner.plan is not None
        return self._inner.plan.ledger_generation

    @property
    def stage(self) -> int:
        return self._inner.stage

    @property
    def step(self) -> int:
        """A step that is open, or nearly."""
        assert self._inner.volunteer is not None
        return max(0, self._inner.volunteer._closed + self._rng.randint(1, 3))

    @property
    def forged(self) -> Ticket:
        """A ticket that no server made."""
        return Ticket(self._rng.randint(1, 5), self._rng.randbytes(TICKET_BYTES))

    def task(self, op: Any, **changes: int) -> TaskId:
        return msgspec.structs.replace(TaskId(self.step, 0, self.stage, op), **changes)

    def output(self, task: TaskId, tensors: tuple[TensorRef, ...]) -> Output:
        return Output(ledger_generation=self.generation, task=task, ticket=self.forged, tensors=tensors)

    def contribution(self, config: RunConfig, **changes: Any) -> Contribute:
        task = self.task("B")
        self._number += 1
        honest = Contribute(
            ledger_generation=self.generation,
            contribution=ContributionId(self._host.node, 2**40, self._number),
            step=task.step,
            version=config.version_of(task.step),
            tasks=(task,),
            losses=(),
            tickets=(self.forged,),
            shard=0,
            tensors=self.part(config),
        )
        return msgspec.structs.replace(honest, **changes)


def _activation_shape(config: RunConfig) -> tuple[int, ...]:
    return config.batch.samples, config.model.context, config.model.hidden


def _foreign_stage(liar: Liar, config: RunConfig) -> Message:
    task = liar.task("F", position=liar.stage + 1)
    if task.position >= config.stages.count:
        task = msgspec.structs.replace(task, position=10**6)
    return Output(
        ledger_generation=liar.generation, task=task, ticket=liar.forged, tensors=liar.tensor(_activation_shape(config))
    )


def _stolen_output(liar: Liar, config: RunConfig) -> Message:
    """Looks like the result of a lease that the liar never had."""
    task = liar.task("F", microbatch=liar._rng.randrange(config.batch.microbatches))
    return liar.output(task, liar.tensor(_activation_shape(config), config.wire.output_form(task.position == 0), 7))


def _wrong_shape(liar: Liar, config: RunConfig) -> Message:
    return Output(
        ledger_generation=liar.generation, task=liar.task("F"), ticket=liar.forged, tensors=liar.tensor((1, 1))
    )


def _wrong_form(liar: Liar, config: RunConfig) -> Message:
    tensors = liar.tensor(_activation_shape(config), "int32")
    return InputGradient(ledger_generation=liar.generation, task=liar.task("B"), ticket=liar.forged, tensors=tensors)


def _no_tensor(liar: Liar, config: RunConfig) -> Message:
    return liar.output(liar.task("F"), ())


def _huge_microbatch(liar: Liar, config: RunConfig) -> Message:
    task = liar.task("F", microbatch=2**31)
    return Output(
        ledger_generation=liar.generation, task=task, ticket=liar.forged, tensors=liar.tensor(_activation_shape(config))
    )


def _far_step(liar: Liar, config: RunConfig) -> Message:
    task = liar.task("F", step=2**40)
    return Output(
        ledger_generation=liar.generation, task=task, ticket=liar.forged, tensors=liar.tensor(_activation_shape(config))
    )


def _closed_step(liar: Liar, config: RunConfig) -> Message:
    assert liar._inner.volunteer is not None
    if liar._inner.volunteer._closed < 0:
        return _far_step(liar, config)
    task = liar.task("F", step=liar._inner.volunteer._closed)
    return Output(
        ledger_generation=liar.generation, task=task, ticket=liar.forged, tensors=liar.tensor(_activation_shape(config))
    )


def _sliced(liar: Liar, config: RunConfig) -> Message:
    return FetchInput(ledger_generation=liar.generation, task=liar.task("F", slice=7), ticket=liar.forged)


def _input_of_nothing(liar: Liar, config: RunConfig) -> Message:
    return FetchInput(ledger_generation=liar.generation, task=liar.task("L"), ticket=liar.forged)


def _foreign_name(liar: Liar, config: RunConfig) -> Message:
    return liar.contribution(config, contribution=ContributionId(NodeId("v7"), 1, 1))


def _wrong_shard(liar: Liar, config: RunConfig) -> Message:
    return liar.contribution(config, shard=7)


def _wrong_elements(liar: Liar, config: RunConfig) -> Message:
    return liar.contribution(config, tensors=liar.tensor((2,)))


def _two_tensors(liar: Liar, config: RunConfig) -> Message:
    return liar.contribution(config, tensors=liar.tensor((3,)) + liar.tensor((3,)))


def _wrong_version(liar: Liar, config: RunConfig) -> Message:
    return liar.contribution(config, version=9)


def _tasks_of_two_steps(liar: Liar, config: RunConfig) -> Message:
    return liar.contribution(config, tasks=(liar.task("B"), liar.task("B", step=config.steps - 1)))


def _no_tasks(liar: Liar, config: RunConfig) -> Message:
    return liar.contribution(config, tasks=())


def _tasks_of_another_stage(liar: Liar, config: RunConfig) -> Message:
    task = liar.task("B", position=(liar.stage + 1) % max(2, config.stages.count))
    return liar.contribution(config, step=task.step, version=config.version_of(task.step), tasks=(task,))


def _huge_contribution_step(liar: Liar, config: RunConfig) -> Message:
    return liar.contribution(config, step=2**40)


def _only_half(liar: Liar, config: RunConfig) -> Message:
    """A part that its other shards never get: it waits, counts for nothing, and goes when its step is closed."""
    return liar.contribution(config)


def _a_task_twice(liar: Liar, config: RunConfig) -> Message:
    task = liar.task("B")
    return liar.contribution(config, step=task.step, version=config.version_of(task.step), tasks=(task, task))


def _old_generation(liar: Liar, config: RunConfig) -> Message:
    return Ready(ledger_generation=max(0, liar.generation - 1), hello=True, slots=3)


def _coming_generation(liar: Liar, config: RunConfig) -> Message:
    return Ready(ledger_generation=liar.generation + 7, hello=True, slots=3)


def _greedy(liar: Liar, config: RunConfig) -> Message:
    graphs = tuple(liar.task("F", microbatch=number * 2**20, position=number) for number in range(3))
    return Ready(ledger_generation=liar.generation, hello=True, slots=2, graphs=graphs)


def _foreign_lease(liar: Liar, config: RunConfig) -> Message:
    return LeaseReturned(ledger_generation=liar.generation, tasks=(liar.task("F"), liar.task("B")), reason="no")


def _any_version(liar: Liar, config: RunConfig) -> Message:
    return FetchParameters(ledger_generation=liar.generation, version=2**40)


def _servers_word(liar: Liar, config: RunConfig) -> Message:
    return Commit(ledger_generation=liar.generation, step=liar.step, contributions=(), clip_factor=1.0, skipped=False)


def _ledgers_word(liar: Liar, config: RunConfig) -> Message:
    contribution = ContributionId(NodeId("v7"), 1, 1)
    return Verdict(
        ledger_generation=liar.generation,
        contribution=contribution,
        step=liar.step,
        tasks=(),
        accepted=False,
        number=0,
        reason="",
    )


def _deciders_word(liar: Liar, config: RunConfig) -> Message:
    return StepClosed(ledger_generation=liar.generation, step=config.steps)


def _no_lease(liar: Liar, config: RunConfig) -> Message:
    """Nobody asks for the ticket of a task that leaves no gradient."""
    task = liar.task("F")
    return liar.contribution(
        config, step=task.step, version=config.version_of(task.step), tasks=(task,), tickets=(),
        shard=liar._rng.randrange(2),
    )  # fmt: skip


def _said_again(liar: Liar, config: RunConfig) -> Message:
    """A part of its own once more, perhaps of a step that was closed meanwhile, or of a ledger that is gone."""
    if not liar._parts:
        return _no_lease(liar, config)
    message, value = liar._rng.choice(liar._parts)
    (ref,) = message.tensors
    return msgspec.structs.replace(message, tensors=liar.tensor(ref.shape, ref.form, value))


LIES: tuple[Callable[[Liar, RunConfig], Message], ...] = (
    _foreign_stage, _stolen_output, _wrong_shape, _wrong_form, _no_tensor, _huge_microbatch, _far_step,
    _closed_step, _sliced, _input_of_nothing, _foreign_name, _wrong_shard, _wrong_elements, _two_tensors,
    _wrong_version, _tasks_of_two_steps, _no_tasks,
    _tasks_of_another_stage, _huge_contribution_step, _only_half, _a_task_twice, _old_generation, _coming_generation,
    _greedy, _foreign_lease, _any_version, _servers_word, _ledgers_word, _deciders_word,
)  # fmt: skip

GRID_LIES = (_no_lease, _said_again)
"""Those of a liar that knows all, where sums are on a grid."""

BENDS: dict[str, Callable[[Liar, Effect], Effect]] = {
    "absurd": Liar._absurd,
    "another_name": Liar._another_name,
    "bent_shape": Liar._bent_shape,
    "false_gradient": Liar._false_gradient,
    "false_output": Liar._false_output,
    "false_input_gradient": Liar._false_input_gradient,
}
"""What becomes of a liar's honest messages."""
OLD_RESULTS = "old_results"
