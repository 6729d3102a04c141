"""A pool's entries by all that is asked of them: by task, by holder, what is free for whom, what is open in a step.

Nothing here looks at all entries to find one that is free: they wait in heaps, one for each worker that is preferred
and one for everybody, and what is open is counted by step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from node.server.entries import Entry, Holding
from protocol.base.ids import NodeId, TaskId


class Tables:
    """Whoever changes an entry calls `forget` before and `note` after it."""

    def __init__(self, rank: Callable[[TaskId], tuple[int, ...]] | None = None) -> None:
        """`rank`: what is free goes by it, the smallest first; None: by task."""
        self._rank = _by_task if rank is None else rank
        self.entries: dict[TaskId, Entry] = {}
        """By first task."""
        self.of_task: dict[TaskId, Entry] = {}
        self.holdings: dict[NodeId, Holding] = {}
        self.open: dict[int, dict[NodeId | None, int]] = {}
        """Step -> entries that somebody still has to be given, by who is preferred."""
        self._free: dict[NodeId | None, list[tuple[tuple[int, ...], int, TaskId]]] = {}
        """Heaps of free entries by who is preferred; an item is stale when its entry is not free for that one."""
        self.free_count = 0
        """Entries that are free for everybody."""
        self._serial = 0

    def add(self, entry: Entry) -> None:
        assert entry.tasks[0] not in self.of_task, f"{entry.tasks[0]} is in the pool already"
        self.entries[entry.tasks[0]] = entry
        self.open.setdefault(entry.step, {})
        self.of_task.update(dict.fromkeys(entry.tasks, entry))
        self.note(entry)

    def remove(self, entry: Entry) -> None:
        """After `forget`."""
        del self.entries[entry.tasks[0]]
        for task in entry.tasks:
            del self.of_task[task]

    def forget(self, entry: Entry) -> None:
        key = entry.tasks[0]
        self.free_count -= entry.free and entry.preferred is None
        if entry.open:
            self.open[entry.step][entry.preferred] -= 1
        if entry.worker is not None:
            self.holdings[entry.worker].busy_count -= not entry.waits_for_sum
        for node, table in ((entry.worker, "leased"), (entry.preferred, "preferring")):
            if node is not None:
                holding = self.holdings[node]
                del getattr(holding, table)[key]
                if not holding.leased and not holding.preferring:
                    del self.holdings[node]

    def note(self, entry: Entry) -> None:
        key = entry.tasks[0]
        if entry.open:
            counts = self.open[entry.step]
            counts[entry.preferred] = counts.get(entry.preferred, 0) + 1
        if entry.free:
            self.free_count += entry.preferred is None
            self.wait_free(entry)
        if entry.worker is not None:
            holding = self.holdings.setdefault(entry.worker, Holding())
            holding.leased[key] = entry
            holding.busy_count += not entry.waits_for_sum
        if entry.preferred is not None:
            self.holdings.setdefault(entry.preferred, Holding()).preferring[key] = entry

    def wait_free(self, entry: Entry) -> None:
        self._serial += 1
        key = entry.tasks[0]
        heapq.heappush(self._free.setdefault(entry.preferred, []), (self._rank(key), self._serial, key))

    def first_free(self, preferred: NodeId | None) -> Entry | None:
        heap = self._free.get(preferred, [])
        while heap:
            entry = self.entries.get(heap[0][2])
            if entry is not None and entry.free and entry.preferred == preferred:
                return entry
            heapq.heappop(heap)
        self._free.pop(preferred, None)
        return None

    def pass_over(self) -> None:
        """Takes the first entry that is free for everybody out of the heap; `wait_free` puts it back."""
        heapq.heappop(self._free[None])

    def preferred_nodes(self) -> list[NodeId]:
        """Those for whom something may be free."""
        return [node for node in self._free if node is not None]

    def leased_by(self, node: NodeId) -> list[Entry]:
        holding = self.holdings.get(node)
        return [] if holding is None else list(holding.leased.values())

    def busy_with(self, node: NodeId) -> list[Entry]:
        """Its leases of which the result has not come."""
        return [entry for entry in self.leased_by(node) if not entry.waits_for_sum]

    def busy_count(self, node: NodeId) -> int:
        """How many these are."""
        holding = self.holdings.get(node)
        return 0 if holding is None else holding.busy_count

    def holds(self, node: NodeId) -> bool:
        holding = self.holdings.get(node)
        return holding is not None and bool(holding.leased)

    def preferring(self, node: NodeId) -> list[Entry]:
        holding = self.holdings.get(node)
        return [] if holding is None else list(holding.preferring.values())

    def check(self) -> None:
        free = sum(entry.free and entry.preferred is None for entry in self.entries.values())
        assert self.free_count == free, f"{free} entries are free, not {self.free_count}"
        for node, holding in self.holdings.items():
            assert holding.busy_count == len(self.busy_with(node)), f"{node}: {holding.busy_count} results are awaited"
        for step, counts in self.open.items():
            opened = [entry for entry in self.entries.values() if entry.step == step and entry.open]
            assert sum(counts.values()) == len(opened), f"step {step}: {counts}, but {len(opened)} entries are open"


def _by_task(task: TaskId) -> tuple[int, ...]:
    return task.step, task.microbatch, task.position, task.segment, task.slice
