"""A run's spans, measured and predicted, as one Chrome trace, as tables, and as a picture. Pure.

Both come in one form (`read_trace`), so whatever is computed of one is computed of the other by the same lines. Open
the file in Perfetto or chrome://tracing: `measured` and `predicted` are two processes there, each with a row per node
and what it does, and both begin with the close of a step.
"""

from __future__ import annotations

import base64
import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.run.spans import CONTENTS, KINDS, Records, Spans, read_spans

DEVICE = ("forward", "backward", "loss", "validation", "gradient", "load", "set up")
"""What a device does; `wait` is what it does between."""
TASKS = ("forward", "backward", "loss")
GROUPS = {
    **dict.fromkeys((*DEVICE, "wait"), "device"),
    **dict.fromkeys(("fold", "sum", "optimizer", "checkpoint", "data", "serve", "other"), "lane"),
    "receive": "receive", "send": "send", "task": "tasks", "plan": "plan", "decision": "decisions",
    "database": "database",
}  # fmt: skip
"""Rows of a node, by kind of span."""
MICROSECONDS = 1e6


@dataclass(frozen=True)
class NodeSpans:
    """One node: `records` in seconds since `Side.origin_s`."""

    node: str
    role: str
    stage: int
    uncertain_s: float
    names: tuple[str, ...]
    records: Records
    lost: int = 0

    @property
    def label(self) -> str:
        where = f"stage {self.stage} " if self.stage >= 0 else ""
        return self.node if self.role == "coordinator" else f"{where}{self.role} {self.node[:8]}"

    def of(self, *kinds: str) -> Records:
        """The spans of these kinds."""
        wanted = [KINDS.index(kind) for kind in kinds]
        kept: Records = self.records[np.isin(self.records["kind"], wanted)]
        return kept


@dataclass(frozen=True)
class Side:
    """What was measured, or what was predicted: times from the close of its first step on."""

    nodes: tuple[NodeSpans, ...]
    steps: tuple[tuple[int, float], ...]
    """(number, when it closed)"""

    @property
    def window_s(self) -> float:
        """Between the closes of the first and the last step: everything that is counted lies in it."""
        return self.steps[-1][1] - self.steps[0][1] if self.steps else 0.0

    @property
    def step_s(self) -> float:
        """The mean time from close to close; 0 before two steps have closed."""
        return self.window_s / (len(self.steps) - 1) if len(self.steps) > 1 else 0.0

    def computing(self) -> list[NodeSpans]:
        """Nodes whose device did anything."""
        return [node for node in self.nodes if len(node.of(*TASKS))]

    def bubble(self) -> float:
        """Share of the window in which those devices did nothing, in the mean; 0 where nobody computes."""
        busy = [busy_s(node.of(*DEVICE), self.window_s) for node in self.computing()]
        return 1.0 - sum(busy) / (len(busy) * self.window_s) if busy and self.window_s > 0 else 0.0


@dataclass(frozen=True)
class Trace:
    """Both sides of one run."""

    run: str
    stages: int
    measured: Side
    predicted: Side | None
    cost_step_s: float
    """By the planners' cost of pools; 0: not known."""
    no_prediction: str


def read_trace(told: dict[str, Any]) -> Trace:
    """What `POST /api/trace` answers. Raises `BadInputError` where it cannot be read."""
    try:
        steps = sorted((int(number), float(at_s)) for number, at_s, _ in told["steps"])
        guess = told["predicted"]
        predicted = None
        if guess is not None:
            closed = tuple((int(number), float(at_s)) for number, at_s in guess["steps"])
            predicted = Side(tuple(_node(node, 0.0) for node in guess["nodes"]), closed)
        origin = steps[0][1] if steps else float(told["now_s"])
        measured = Side(
            tuple(_node(node, origin) for node in told["nodes"]),
            tuple((number, at_s - origin) for number, at_s in steps),
        )
        cost_step_s = 0.0 if guess is None else float(guess["cost_step_s"])
        return Trace(told["run"], int(told["stages"]), measured, predicted, cost_step_s, told["no_prediction"])
    except (KeyError, TypeError, ValueError, IndexError, RemoteProtocolError) as error:
        raise BadInputError(f"the coordinator's answer is no trace: {error}") from None


def _node(told: dict[str, Any], origin: float) -> NodeSpans:
    names = tuple(told["names"])
    spans = base64.b64decode(told["spans"], validate=True)
    records = read_spans(Spans(number=0, clock_s=0.0, first=0, left=0, names=names, spans=spans)).copy()
    records["start"] -= origin
    return NodeSpans(
        str(told["node"]),
        str(told["role"]),
        int(told["stage"]),
        float(told["uncertain_s"]),
        names,
        records,
        told["lost"],
    )


# ---- Chrome's format ------------------------------------------------------------------------------------------------


def chrome(trace: Trace) -> dict[str, Any]:
    """Chrome's trace-event JSON: process 1 is measured, 2 predicted; spans that overlap are on rows of their own."""
    events: list[dict[str, Any]] = []
    for pid, name, side in ((1, "measured", trace.measured), (2, "predicted", trace.predicted)):
        if side is None:
            continue
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{trace.run}: {name}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        events += _steps(pid, side)
        row = 1
        for node in sorted(side.nodes, key=lambda node: (node.stage, node.role, node.node)):
            row = _rows(events, pid, row, node)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": trace.run}}


def _steps(pid: int, side: Side) -> list[dict[str, Any]]:
    named = {"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": "steps"}}
    pairs = zip(side.steps, side.steps[1:], strict=False)
    return [
        named,
        *(
            _span(pid, 0, f"step {number + 1}", "step", before, at_s - before, {"step": number})
            for (_, before), (number, at_s) in pairs
        ),
    ]


def _span(
    pid: int, tid: int, name: str, category: str, start: float, seconds: float, more: dict[str, Any]
) -> dict[str, Any]:
    ts, dur = round(start * MICROSECONDS, 3), round(seconds * MICROSECONDS, 3)
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": more}


def _rows(events: list[dict[str, Any]], pid: int, row: int, node: NodeSpans) -> int:
    """Adds a node's spans; returns the next free row."""
    by_group: dict[str, list[Any]] = defaultdict(list)
    for record in node.records[np.argsort(node.records["start"], kind="stable")]:
        by_group[GROUPS[KINDS[record["kind"]]]].append(record)
    for group in dict.fromkeys(GROUPS.values()):
        if group not in by_group:
            continue
        free: list[tuple[float, int]] = []
        rows = 0
        for record in by_group[group]:
            start, seconds = float(record["start"]), float(record["seconds"])
            if free and free[0][0] <= start + 1e-9:
                _, tid = heapq.heappop(free)
            else:
                tid, rows = row + rows, rows + 1
            heapq.heappush(free, (start + seconds, tid))
            events.append(_event(pid, tid, node, record, start, seconds))
        for number in range(rows):
            name = f"{node.label} {group}" + (f" {number + 1}" if rows > 1 else "")
            tid = row + number
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
            events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            )  # fmt: skip
        row += rows
    return row


def _event(pid: int, tid: int, node: NodeSpans, record: Any, start: float, seconds: float) -> dict[str, Any]:
    kind, content, name = KINDS[record["kind"]], CONTENTS[record["content"]], node.names[record["name"]]
    step, microbatch = int(record["step"]), int(record["microbatch"])
    more: dict[str, Any] = {"node": node.node}
    if step >= 0:
        more["step"] = step
    if microbatch >= 0:
        more["microbatch"] = microbatch
    if record["bytes"] > 0:
        more["bytes"] = int(record["bytes"])
    if name:
        more["peer" if kind in ("receive", "send", "task") else "what"] = name
    title = content or kind
    if kind in ("wait", "decision", "plan", "database") and name:
        title = f"{kind}: {name}" if kind != "decision" else name
    elif microbatch >= 0:
        title = f"{title} {microbatch}"
    return _span(pid, tid, title, kind, start, seconds, more)


# ---- tables ---------------------------------------------------------------------------------------------------------


def busy_s(records: Records, window_s: float) -> float:
    """Seconds of [0, window_s] in which at least one of these spans goes on."""
    if not len(records) or window_s <= 0:
        return 0.0
    order = np.argsort(records["start"], kind="stable")
    start = np.clip(records["start"][order], 0.0, window_s)
    end = np.clip(records["start"][order] + records["seconds"][order], 0.0, window_s)
    reach = np.concatenate([[0.0], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(0.0, end - np.maximum(start, reach)).sum())


def inside(records: Records, window_s: float) -> Records:
    """Spans that ended within [0, window_s]."""
    ends = records["start"] + records["seconds"]
    kept: Records = records[(ends >= 0.0) & (ends <= window_s)]
    return kept


@dataclass(frozen=True)
class StageRow:
    """What the devices of one stage did: seconds a task (means), and shares of the window."""

    stage: int
    devices: int
    tasks: float
    """A step: forwards, backwards and route ends."""
    forward_s: float
    backward_s: float
    busy: float
    wait: float


@dataclass(frozen=True)
class LinkRow:
    """What one kind of way carried: from the receivers' spans."""

    name: str
    ways: int
    megabytes: float
    """A step, all ways together."""
    rate: float
    """Bytes a second of one way while anything was under way on it; the median of the ways."""
    busy: float
    """Share of the window in which anything was under way; the busiest way's."""


def stage_rows(side: Side, stages: int) -> list[StageRow]:
    """A row per stage."""
    rows = []
    steps = max(1, len(side.steps) - 1)
    for stage in range(stages):
        nodes = [node for node in side.computing() if node.stage == stage]
        done = [inside(node.of(*TASKS), side.window_s) for node in nodes]
        busy = [busy_s(node.of(*DEVICE), side.window_s) for node in nodes]
        waits = [busy_s(node.of("wait"), side.window_s) for node in nodes]
        whole = max(1e-9, side.window_s * len(nodes))
        rows.append(
            StageRow(
                stage=stage,
                devices=len(nodes),
                tasks=sum(map(len, done)) / steps,
                forward_s=_mean(done, ("forward",)),
                backward_s=_mean(done, ("backward", "loss")),
                busy=sum(busy) / whole,
                wait=sum(waits) / whole,
            )
        )
    return rows


def _mean(parts: Iterable[Records], kinds: Sequence[str]) -> float:
    numbers = [KINDS.index(kind) for kind in kinds]
    seconds = [part["seconds"][np.isin(part["kind"], numbers)] for part in parts]
    together = np.concatenate(seconds) if seconds else np.empty(0)
    return float(together.mean()) if len(together) else 0.0


def link_rows(side: Side, *, each: bool = False) -> list[LinkRow]:
    """A row per kind of way (stage 0 volunteers → front servers, …), or per way with `each`."""
    known = {node.node: node for node in side.nodes}
    ways: dict[tuple[str, str], list[Any]] = {}
    for node in side.nodes:
        received = inside(node.of("receive"), side.window_s)
        received = received[received["content"] != CONTENTS.index("MeasureData")]
        for name in np.unique(received["name"]):
            source = known.get(node.names[name])
            if source is not None:
                ways[source.node, node.node] = [source, node, received[received["name"] == name]]
    grouped: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for source, target, records in ways.values():
        busy = busy_s(records, side.window_s)
        name = f"{source.label} → {target.label}" if each else f"{_group(source)} → {_group(target)}"
        grouped[name].append((float(records["bytes"].sum()), busy, float(records["bytes"].sum()) / max(busy, 1e-9)))
    steps, window_s = max(1, len(side.steps) - 1), max(side.window_s, 1e-9)
    return [
        LinkRow(
            name=name,
            ways=len(found),
            megabytes=sum(byte_count for byte_count, _, _ in found) / steps / 1e6,
            rate=median(rate for _, _, rate in found),
            busy=max(busy for _, busy, _ in found) / window_s,
        )
        for name, found in sorted(grouped.items())
    ]


def _group(node: NodeSpans) -> str:
    return f"stage {node.stage} {node.role}s"
