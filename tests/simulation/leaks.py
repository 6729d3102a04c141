"""Judges memory (L3): every tensor in a host's store is one that its machine still holds, and there are few.

A tensor that no machine, lane or disk knows of is lost for good: a run of days would drown in such. So the objects of
a machine are searched for references, and what they do not reach must not be in the store. And a disk keeps what a
restart needs, but does not grow with the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec

from node.machine.records import StepCommitted
from protocol.base.ids import NodeId, TensorRef
from protocol.run.changes import RunChange
from protocol.run.course import course_of
from protocol.run.run import RunConfig
from tests.simulation.violation import expect
from tests.simulation.world import Host, World

EVERY_STEPS = 97
"""A machine's store is searched at every so many of its inputs; a search costs as much as a hundred inputs."""
LEAVES = (str, bytes, int, float, bool, type(None), Enum)


class Leaks:
    """Watches the stores of all hosts.

    Args:
        shard_count: the most servers that a stage has.
    """

    def __init__(self, config: RunConfig, shard_count: int) -> None:
        self._config, self._shard_count = config, shard_count
        self.most: dict[str, int] = {"server": 0, "volunteer": 0}
        """The most tensors that any host of a role ever held."""
        self._inputs: dict[NodeId, int] = {}
        self.searches = 0
        self.microbatches_are(config.batch.microbatches)

    def microbatches_are(self, count: int) -> None:
        """A step has at most so many."""
        config, shard_count = self._config, self._shard_count
        batch = config.batch
        open_steps = 1 + batch.delay
        course = course_of(config)
        visits = max(
            sum(stage == visited for visited in course.stages_of(route))
            for route in course.routes
            for stage in range(config.stages.count)
        )
        # Inputs, labels, outputs, both gradients, and copies on their way to oneself, of every open microbatch; parts
        # of contributions (a microbatch may be summed up alone, and be doubled by a volunteer that was thought dead).
        self.server_tensors_max = (open_steps + 2) * count * 12 * visits + 16 * shard_count
        # Versions, leases with their inputs, uploads.
        open_visits = (open_steps + 1) * count * visits
        self.volunteer_tensors_max = 4 * shard_count + 3 * open_visits * (1 + shard_count)

    def performed(self, host: Host) -> None:
        count = len(host.store)
        if count > self.most.get(host.role, 0):
            self.most[host.role] = count
            most = self.server_tensors_max if host.role == "server" else self.volunteer_tensors_max
            most = self.server_tensors_max + self.volunteer_tensors_max if host.role == "server" else most
            expect(count <= most or host.lies, "L3", f"{host.node} holds {count} tensors, more than {most}")
        inputs = self._inputs[host.node] = self._inputs.get(host.node, 0) + 1
        if inputs % EVERY_STEPS == 0:
            self.search(host)

    def finish(self, world: World, changes: Sequence[RunChange]) -> None:
        """`changes`: all that the operator made in the run."""
        ordered = [int(change.value) for change in changes if change.key == "limits.snapshot_steps"]
        apart = max([self._config.limits.snapshot_steps, *ordered])
        for host in world.hosts.values():
            if host.machine is not None:
                self.search(host)
                self._expect_pruned(host, apart)

    def _expect_pruned(self, host: Host, apart: int) -> None:
        """Commits lie on the disk from the snapshot that a restart begins with: twice the distance between two, since
        the newer one of them may still be on its way, and what is open."""
        commits = [record.step for record, _ in host.records if isinstance(record, StepCommitted)]
        most = 2 * apart + 2 * (1 + self._config.batch.delay)
        span = max(commits, default=0) - min(commits, default=0)
        expect(span <= most or host.harmed, "L3", f"{host.node} keeps commits of {span} steps, more than {most}")

    def search(self, host: Host) -> None:
        """Raises if the store holds a tensor that nothing leads to."""
        if not host.store or host.machine is None or host.lies:
            return
        self.searches += 1
        held = reachable([host.machine, host.jobs, list(host.inbox), [w[1] for w in host.writing]])
        lost = [key for key in host.store if key not in held]
        expect(not lost, "L3", f"{host.node} has lost {len(lost)} tensors: {lost[:5]}")


def reachable(roots: list[Any]) -> dict[int, None]:
    """Keys of all tensor references that can be found from these objects, through our own types and containers."""
    found: dict[int, None] = {}
    seen: dict[int, None] = {}
    todo = deque(roots)
    while todo:
        thing = todo.popleft()
        kind = type(thing)
        if kind is TensorRef:
            found[thing.key] = None
            continue
        parts = PARTS_OF.get(kind, _unknown)
        if parts is _unknown:
            parts = PARTS_OF[kind] = _parts_of(kind)
        if parts is None or id(thing) in seen:
            continue
        seen[id(thing)] = None
        todo.extend(parts(thing))
    return found


def _unknown(thing: Any) -> Iterable[Any]:
    raise AssertionError("stands for types that were not met yet")


PARTS_OF: dict[type, Callable[[Any], Iterable[Any]] | None] = {}
"""What leads on from an object of a type; None: nothing does. A search meets many objects of few types."""


def _parts_of(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    if issubclass(kind, LEAVES):
        return None
    if issubclass(kind, dict):
        return lambda thing: thing.values()
    if issubclass(kind, (list, tuple, deque)):
        return lambda thing: thing
    if issubclass(kind, msgspec.Struct):
        names = kind.__struct_fields__
        return lambda thing: [getattr(thing, name) for name in names]
    if is_dataclass(kind):
        of_class = [field.name for field in fields(kind)]
        return lambda thing: [*(getattr(thing, n) for n in of_class), *getattr(thing, "__dict__", {}).values()]
    if kind.__module__.split(".")[0] in ("node", "tests"):
        return lambda thing: vars(thing).values()
    return None
