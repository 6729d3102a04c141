"""A coordinator on a desk: facts in by hand, effects out as a list, records durable when the test says so."""

from __future__ import annotations

from itertools import islice
from typing import Any

from coordinator.live.core import CoordinatorMachine
from coordinator.live.records import Record, StoredState
from coordinator.live.signals import Helpers
from protocol.base.ids import NodeId
from protocol.base.machine import (
    Count,
    Effect,
    HangUp,
    Input,
    LinkDown,
    LinkUp,
    Log,
    Persist,
    Persisted,
    Received,
    Send,
)
from protocol.messages import DataReady, Join, Message, Ping, Pong, StepReport, Welcome
from protocol.run.plan import Plan
from protocol.run.run import RunConfig, StagesSection
from protocol.trust.membership import Invite

RUN_ID = bytes(range(16))
CONFIG = RunConfig(steps=5, stages=StagesSection(count=2))
"""Two stages of a front and a back server each: four places."""


def join(**facts: Any) -> Join:
    """A server's `Join` with nothing on its disk, unless `facts` say otherwise."""
    fields: dict[str, Any] = {
        "role": "server", "addresses": ("127.0.0.1:1",), "build": "test", "tokens_per_s": 0.0, "memory_bytes": 1 << 30,
        "stage": -1, "shard": -1, "version": -1, "held_generation": -1, "checkpoints": (),
    }  # fmt: skip
    return Join(**{**fields, **facts})


class Desk:
    """Drives one machine; `done` holds every effect but logs and counts, `logs` and `counts` the rest."""

    def __init__(
        self,
        config: RunConfig = CONFIG,
        *,
        stored: StoredState | None = None,
        generation: int = 1,
        invites: dict[bytes, Invite] | None = None,
        durable: bool = True,
        helpers: Helpers | None = None,
    ) -> None:
        self.machine = CoordinatorMachine(
            config,
            RUN_ID,
            generation,
            stored or StoredState(),
            sign_membership=lambda membership: b"membership %d" % membership.serial,
            sign_revocations=lambda revocations: b"list %d" % revocations.number,
            sign_thanks=lambda thanks: b"%d tasks" % thanks.tasks,
            wall_offset_s=1e9,
            read_invite=(invites or {}).get,
            helpers=helpers,
        )
        self.now = 100.0
        self.durable = durable
        """Whether records become durable at once; else `settle` does it."""
        self.answers = True
        """Whether nodes answer a ping that a fact has caused; those of silence (`pass_time`) are never answered."""
        self.records: list[Record] = []
        self.waiting: list[int] = []
        self.done: list[Effect] = []
        self.logs: list[Log] = []
        self.counts: list[Count] = []
        self._take(self.machine.start(self.now))

    # ---- driving

    def feed(self, fact: Input) -> list[Effect]:
        """One fact; the effects that it caused, without logs and counts (those of durable records included)."""
        before = len(self.done)
        self._take(self.machine.handle(fact, self.now))
        if self.answers:
            self._answer(before)
        return self.done[before:]

    def answer(self, since: int) -> None:
        """What was held back while `answers` was off: everybody answers the pings among the effects from there on."""
        self._answer(since)

    def _answer(self, since: int, *nodes: str) -> None:
        """Pongs for the pings among the effects from number `since` on: of all nodes, or of those named. What an answer
        makes the machine ask is answered too."""
        for effect in islice(self.done, since, None):  # which grows meanwhile
            if isinstance(effect, Send) and isinstance(effect.message, Ping) and (not nodes or effect.peer in nodes):
                self._take(self.machine.handle(Received(effect.peer, Pong(number=effect.message.number)), self.now))

    def _take(self, effects: Any) -> None:
        self.machine.check()
        for effect in effects:
            if isinstance(effect, Log):
                self.logs.append(effect)
            elif isinstance(effect, Count):
                self.counts.append(effect)
            elif isinstance(effect, Persist):
                self.records.append(effect.record)
                self.waiting.append(effect.record_number)
            else:
                self.done.append(effect)
        if self.durable:
            self.settle()

    def settle(self) -> list[Effect]:
        """All written records become durable, in order."""
        before = len(self.done)
        while self.waiting:
            self.settle_one()
        return self.done[before:]

    def pass_time(self, seconds: float) -> list[Effect]:
        """The clock goes on; the machine is woken whenever it asked to be."""
        before = len(self.done)
        end = self.now + seconds
        while (wake_at := self.machine.wake_at()) is not None and wake_at <= end:
            self.now = wake_at
            self._take(self.machine.wake(self.now))
        self.now = end
        return self.done[before:]

    def settle_one(self) -> None:
        """The oldest written record becomes durable."""
        before = len(self.done)
        self._take(self.machine.handle(Persisted(self.waiting.pop(0)), self.now))
        if self.answers:
            self._answer(before)

    def stay(self, seconds: float, *nodes: str) -> list[Effect]:
        """Time passes while these nodes give signs of life every second."""
        effects: list[Effect] = []
        end = self.now + seconds
        while self.now < end:
            before = len(self.done)
            effects += self.pass_time(min(1.0, end - self.now))
            self._answer(before, *nodes)
            for node in nodes:
                self.say(node, Pong(number=10**9))
        return effects

    # ---- what nodes do

    def link(self, node: str, role: str = "server", credential: bytes = b"") -> list[Effect]:
        return self.feed(LinkUp(NodeId(node), role, public_key=node.encode(), credential=credential))

    def say(self, node: str, message: Message) -> list[Effect]:
        return self.feed(Received(NodeId(node), message))

    def drop(self, node: str, reason: str = "reset") -> list[Effect]:
        return self.feed(LinkDown(NodeId(node), reason))

    def server(self, node: str, credential: bytes = b"", **facts: Any) -> list[Effect]:
        """Links and joins a server that can be reached at an address of its own."""
        self.link(node, "server", credential)
        return self.say(node, join(**{"addresses": (f"{node}:1",), **facts}))

    def volunteer(self, node: str, **facts: Any) -> list[Effect]:
        self.link(node, "volunteer")
        return self.say(node, join(**{"role": "volunteer", "addresses": (), **facts}))

    def staff(self) -> Plan:
        """Four servers s0 to s3 without anything on their disks; the plan they get."""
        for number in range(4):
            self.server(f"s{number}")
        return self.plan

    def train(self) -> Plan:
        """The same, with the data read by stage 0."""
        plan = self.staff()
        self.say("s0", DATA)
        return plan

    def report(self, step: int, ledger_generation: int | None = None, node: str = "s0", **facts: Any) -> list[Effect]:
        generation = self.plan.ledger_generation if ledger_generation is None else ledger_generation
        return self.say(node, step_report(step, generation, **facts))

    # ---- what came of it

    @property
    def plan(self) -> Plan:
        plan = self.machine.placement.plan
        assert plan is not None
        return plan

    def sent(self, node: str, kind: type[Message], effects: list[Effect] | None = None) -> list[Any]:
        """Messages of a kind sent to a node, of all effects or of those given."""
        chosen = self.done if effects is None else effects
        return [e.message for e in chosen if isinstance(e, Send) and e.peer == node and isinstance(e.message, kind)]

    def hung_up(self, effects: list[Effect]) -> list[tuple[str, str]]:
        return [(e.peer, e.reason) for e in effects if isinstance(e, HangUp)]

    def written(self, kind: type[Record]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def counted(self, metric: str, **labels: str) -> float:
        wanted = tuple(sorted(labels.items()))
        return sum(count.value for count in self.counts if count.metric == metric and count.labels == wanted)

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [log.fields for log in self.logs if log.event == event]


DATA = DataReady(vocabulary=259, data_hash="d" * 64, token_count=1000)


def step_report(step: int, ledger_generation: int, **facts: Any) -> StepReport:
    fields: dict[str, Any] = {
        "loss": 5.0 - step / 10, "tokens": 2048, "gradient_norm": 1.0, "clip_factor": 1.0, "skipped": False,
        "learning_rate": 1e-3, "duration_s": 0.5,
    }  # fmt: skip
    return StepReport(step=step, ledger_generation=ledger_generation, **{**fields, **facts})


def welcome(desk: Desk, serial: int, vocabulary: int) -> Welcome:
    """The `Welcome` that a desk's coordinator sends with its serial's membership."""
    config = desk.machine.config
    return Welcome(
        membership=b"membership %d" % serial, config=config, config_hash=config.config_hash(), vocabulary=vocabulary
    )
