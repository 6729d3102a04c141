"""What a volunteer has done, and what became of it: numbers for its owner, the reports and the metrics."""

from __future__ import annotations

from node.machine.numbers import task_count
from node.machine.outbox import Outbox
from protocol.base.ids import TaskId
from protocol.messages import Verdict
from protocol.run.course import VALIDATION_FIRST
from protocol.run.run import RunConfig


class Tally:
    """Of one machine's life."""

    def __init__(self, config: RunConfig, out: Outbox) -> None:
        self._out = out
        self._task_tokens = config.batch.samples * config.model.context
        self.totals = {"microbatches": 0.0, "tokens": 0.0, "accepted": 0.0, "rejected": 0.0, "validated": 0.0}

    def done(self, task: TaskId) -> None:
        """The device has computed it."""
        self.totals["validated" if task.microbatch >= VALIDATION_FIRST else "microbatches"] += 1
        if task.op == "B":
            self.totals["tokens"] += self._task_tokens
            self._out.count("barnraise_node_tokens_total", self._task_tokens)

    def judged(self, verdict: Verdict) -> None:
        """A ledger has accepted or refused a contribution."""
        outcome, tasks = "accepted" if verdict.accepted else "rejected", task_count(verdict.tasks)
        self.totals[outcome] += tasks
        self._out.count("barnraise_node_work_results_total", tasks, outcome=outcome)

    def given(self) -> dict[str, float]:
        """What the ledgers have accepted of it: tasks, and their tokens."""
        return {"accepted": self.totals["accepted"], "tokens": self.totals["accepted"] * self._task_tokens}
