"""What everybody did, for the operator: collects spans from all nodes, adds this process's own, and has it predicted.

    POST /api/trace ─▶ Timeline.trace ─▶ machine asks nodes (`coordinator.live.tracing`) ─▶ `Timed`

Nothing is collected unless an operator asks. The newest picture stays for the page.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import structlog
import trio

from coordinator.live.core import CoordinatorMachine
from coordinator.live.orders import FetchTrace
from coordinator.live.tracing import Traced
from coordinator.process.predictor import ask_prediction
from coordinator.world.prediction import Prediction, setting_of
from coordinator.world.trace_picture import trace_svg
from coordinator.world.traces import read_trace
from protocol.base.errors import BadInputError
from protocol.base.machine import Log, Ordered
from protocol.drive.pump import Pump
from protocol.run.spans import SpanRing

TRACE_S = 20.0
"""For all nodes to answer: 512 KB of one of them take 2 s on a line of 2 Mbit/s, beside work; who is later is left
out."""
OWN_MAX = 4096
"""Of the coordinator's own spans."""
DECISIONS = frozenset({"plan", "volunteer assigned", "run waits", "run changed", "rolled back", "step"})
"""Lines of the log that are decisions, or what they are measured by."""


class Timeline:
    """The coordinator's own spans, and everybody's when they are asked for."""

    def __init__(self, machine: CoordinatorMachine, pump: Pump) -> None:
        self._machine = machine
        self._pump = pump
        self._asking = trio.Lock()
        self.ring = SpanRing()
        self.picture = b""
        """The newest trace as an SVG document, for the page: ids in it are cut to eight letters. Empty: none yet."""
        self.pictured_wall_s: float | None = None

    def ended(self, kind: str, name: str, began_s: float) -> None:
        """Something of this process has ended now."""
        self.ring.add(kind, began_s, trio.current_time(), name=name)

    def said(self, line: Log) -> None:
        """The machine has logged a line; decisions have no length."""
        if line.event in DECISIONS:
            now = trio.current_time()
            words = " ".join(str(line.fields[key]) for key in ("detail", "reason", "step") if key in line.fields)
            name = line.event if line.event == "step" else f"{line.event}: {words}"
            self.ring.add("decision", now, now, name=name)

    async def trace(self, seconds: float) -> dict[str, Any]:
        """Everybody's spans of the last seconds and a prediction beside them, as `read_trace` reads them."""
        async with self._asking:
            return await self._trace(seconds)

    async def _trace(self, seconds: float) -> dict[str, Any]:
        machine = self._machine
        if machine.placement.plan is None:
            raise BadInputError("the run has no plan yet, so nobody has done anything")
        asked_at = trio.current_time()
        self._pump.put(Ordered(FetchTrace(seconds)))
        with trio.move_on_after(TRACE_S):
            await trio.sleep(0.05)
            while not machine.tracing.done:
                await trio.sleep(0.02)
        nodes = machine.tracing.take_all()
        now = trio.current_time()
        _, own = self.ring.newest(self.ring.since(asked_at - seconds), OWN_MAX)
        nodes.append(Traced("the coordinator", "coordinator", -1, 0.0, self.ring.names, own, 0))
        closed = [(row.step, row.wall_s - machine.outbox.wall_offset_s, row.duration_s) for row in machine.history.tail]
        prediction = await self._predict(nodes, now)
        told = {
            "run": machine.config.name,
            "now_s": now,
            "wall_offset_s": machine.outbox.wall_offset_s,
            "steps": [step for step in closed if asked_at - seconds <= step[1] <= asked_at],
            "stages": machine.placement.running.stages.count,
            "nodes": [_told(node) for node in nodes],
            "predicted": None if prediction.sentence else _predicted(prediction),
            "no_prediction": prediction.sentence,
        }
        # The picture takes a tenth of a second of 200,000 spans.
        self.picture = await trio.to_thread.run_sync(lambda: trace_svg(read_trace(told)).encode())
        self.pictured_wall_s = round(machine.outbox.wall_s(now), 3)
        return told

    async def _predict(self, nodes: Sequence[Traced], now: float) -> Prediction:
        try:
            setting = setting_of(self._machine, nodes, now)
        except BadInputError as error:
            return Prediction(sentence=str(error))
        answer = await ask_prediction(setting)
        if answer.sentence:
            structlog.get_logger().warning("no prediction", detail=answer.sentence)
        return answer


def _told(node: Traced) -> dict[str, Any]:
    return {
        "node": node.node,
        "role": node.role,
        "stage": node.stage,
        "uncertain_s": node.uncertain_s,
        "names": node.names,
        "lost": node.lost,
        "spans": base64.b64encode(node.records.tobytes()).decode(),
    }


def _predicted(prediction: Prediction) -> dict[str, Any]:
    return {
        "steps": prediction.steps,
        "cost_step_s": prediction.cost_step_s,
        "nodes": [
            {
                "node": node.node, "role": node.role, "stage": node.stage, "uncertain_s": 0.0, "names": node.names,
                "lost": 0, "spans": base64.b64encode(node.spans).decode(),
            }
            for node in prediction.nodes
        ],
    }  # fmt: skip
