"""What members' reports add up to: work of each stage, work done twice, bytes carried for others, time spent idle.

A report holds totals since its process began. What grew between two reports of one link is counted; the first report
of a link counts nothing, since its total was counted on the link before. So a process that was killed takes at most
its last report's interval with it.
"""

from __future__ import annotations

from coordinator.live.outbox import Outbox
from coordinator.live.roster import Member
from protocol.base.ids import NodeId
from protocol.messages import NodeReport
from protocol.run.run import RunConfig


class Reported:
    """Turns reports into counts."""

    def __init__(self, config: RunConfig, outbox: Outbox) -> None:
        self._run = config.name
        self.stages = config.stages.count
        """Known with the first plan, where the run leaves it open."""
        self._outbox = outbox
        self._busy: dict[NodeId, float] = {}
        self._done = 0.0
        self._accepted = 0

    def take(self, member: Member, stage: int, report: NodeReport, now: float) -> None:
        """Before `member.report` is replaced by `report`. `stage`: where the member stands, or -1."""
        before = member.report
        if before is None:
            return

        def grown(counter: str) -> float:
            return max(0.0, report.counters.get(counter, 0.0) - before.counters.get(counter, 0.0))

        if carried := grown("relay_bytes"):
            for direction in ("rx", "tx"):
                self._outbox.count("barnraise_coordinator_relay_bytes_total", carried, direction=direction)
        # Each microbatch has one backward at each stage (at a route's end it is one with the loss): forwards would
        # leave out the last stage.
        if 0 <= stage < self.stages and (done := grown("tasks_backward")):
            name = "barnraise_coordinator_stage_microbatches_total"
            self._outbox.count(name, done, run=self._run, stage=str(stage))
            self._done += done
        for counter, outcome in (("reissued", "reissued"), ("tasks_recomputed", "recomputed")):
            if again := grown(counter):
                self._outbox.count("barnraise_run_microbatches_total", again, run=self._run, outcome=outcome)
        if "compute_s" in report.counters and now > member.report_at:
            self._busy[member.peer] = min(1.0, grown("compute_s") / (now - member.report_at))

    def left(self, peer: NodeId) -> None:
        self._busy.pop(peer, None)

    def accepted(self, microbatches: int) -> None:
        """A step has closed: so many microbatches count at every stage."""
        self._accepted += microbatches * self.stages
        self._outbox.count(
            "barnraise_run_microbatches_total", microbatches * self.stages, run=self._run, outcome="accepted"
        )

    def goodput(self) -> float | None:
        """Share of the work reported since this process began that counted; None before there is any."""
        return min(1.0, self._accepted / self._done) if self._done and self._accepted else None

    def idle_share(self) -> float | None:
        """Share of the time between their newest two reports in which those who compute did not; None: nobody does."""
        busy = [share for share in self._busy.values() if share > 0]
        return 1.0 - sum(busy) / len(busy) if busy else None
