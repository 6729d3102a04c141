"""Notices when a lane or the disk of a server makes no progress: work is there, and none of it ends.

A disk that hangs in a write, or a thread that never comes back, raises nothing and breaks no link. So everything that
is ordered is counted until it ends, and whoever waits longest is named. Time counts only while this process is awake:
a computer that was suspended has not failed at anything.
"""

from __future__ import annotations

from collections import deque

from node.machine.jobs import (
    DEVICE_JOBS,
    STORE_JOBS,
    SUM_JOBS,
    Apply,
    FindCheckpoints,
    Job,
    LoadBatch,
    LoadSnapshot,
    PrepareData,
    SetUpServer,
    StartShard,
    WriteCheckpoint,
    WriteManifest,
    WriteSnapshot,
)

NAMED_S = 10.0
"""What takes longer is named: a fsync of a home disk takes 0.03 s, and the arithmetic of a server's job a second."""
STATE_BYTES_PER_S = 50e6
"""A job may move the whole state of a shard, and a slow hard disk does it at this rate: 16 GB of a billion parameters
take 320 s, 5 M parameters under two. So much is taken off before a lane counts as stalled."""
STATE_BYTES = 16
"""A parameter's: fp32 weights, two moments, and the weights before."""
PREPARE_S = 30.0
"""Who reads and tokenizes a run's data says every second that it goes on, and longer when a part of it begins that says
nothing (`WorkGoesOn`): a piece is 64 KiB of text, and of a table 128 MB at once, 3 s of a slow disk."""
SILENT_S_MAX = 3600.0
LOOK_S = 4.0
"""Looks are two seconds apart; of a longer time between two of them only so much counts."""
_WORDS: dict[type[Job], str] = {
    Apply: "the update of its parameters",
    FindCheckpoints: "a look at the checkpoints",
    LoadBatch: "the reading of a batch",
    LoadSnapshot: "the reading of its snapshot",
    PrepareData: "the reading of the data",
    StartShard: "the start of its parameters",
    WriteCheckpoint: "the writing of a checkpoint",
    WriteManifest: "the writing of a checkpoint",
    WriteSnapshot: "the writing of a snapshot",
}


class Stalls:
    """Of one server: what its device, its server lane and its disk were given and have not ended."""

    def __init__(self) -> None:
        self._jobs: dict[str, deque[Job]] = {"device": deque(), "server": deque(), "sums": deque()}
        self._writes = 0
        self._moved = {"device": True, "server": True, "sums": True, "disk": True}
        """Whether something has ended there since the last look, or there was nothing to do."""
        self._lasted_s = dict.fromkeys(self._moved, 0.0)
        self._looked_at: float | None = None
        self._silent_s = 0.0
        """For how long what the server lane does now may say nothing, by its own word."""
        self._slow_s = 0.0

    def ordered(self, job: Job) -> None:
        if not isinstance(job, STORE_JOBS):  # training waits for none of these
            self._jobs[_lane(job)].append(job)

    def writing(self) -> None:
        """A record is on its way to the disk."""
        self._writes += 1

    def ended(self, job: Job, result: object = None) -> None:
        """A lane does its jobs in order, so it is the first."""
        if isinstance(job, STORE_JOBS):
            return
        lane = _lane(job)
        if self._jobs[lane]:
            self._jobs[lane].popleft()
        self._has_moved(lane)
        self._silent_s = 0.0
        if isinstance(job, SetUpServer) and isinstance(result, int):  # the parameters of its shard
            self._slow_s = result * STATE_BYTES / STATE_BYTES_PER_S

    def goes_on(self, job: Job, silent_s: float) -> None:
        """A job that is not ended is not stuck either."""
        self._has_moved(_lane(job))
        self._silent_s = min(silent_s, SILENT_S_MAX)

    def written(self) -> None:
        self._writes -= 1
        self._has_moved("disk")

    def _has_moved(self, lane: str) -> None:
        """What lasted is over now, not at the next look: whoever asks in between would hear of a job that has ended."""
        self._moved[lane] = True
        self._lasted_s[lane] = 0.0

    def look(self, now: float) -> None:
        """Called every two seconds."""
        passed_s = 0.0 if self._looked_at is None else min(LOOK_S, now - self._looked_at)
        self._looked_at = now
        for lane in self._moved:
            busy = self._writes > 0 if lane == "disk" else bool(self._jobs[lane])
            self._lasted_s[lane] = self._lasted_s[lane] + passed_s if busy and not self._moved[lane] else 0.0
            self._moved[lane] = not busy

    @property
    def seconds(self) -> float:
        """For how long the slowest has stood still, beyond what its work may honestly take; 0: none does."""
        return max(0.0, *(lasted - self._allowed_s(lane) for lane, lasted in self._lasted_s.items()))

    def sentence(self) -> str:
        """What stands still, since when; or nothing. It reads after "waits for"."""
        lane = max(self._lasted_s, key=lambda lane: self._lasted_s[lane] - self._allowed_s(lane))
        lasted_s = self._lasted_s[lane]
        if lasted_s - self._allowed_s(lane) < NAMED_S:
            return ""
        if lane == "disk":
            return f"its disk, which has written nothing for {lasted_s:.0f} s"
        what = "its device" if lane == "device" else _WORDS.get(type(self._jobs[lane][0]), "its arithmetic")
        return f"{what}, which has not come to an end for {lasted_s:.0f} s"

    def _allowed_s(self, lane: str) -> float:
        jobs = self._jobs.get(lane)
        return PREPARE_S + self._silent_s if jobs and isinstance(jobs[0], PrepareData) else self._slow_s


def _lane(job: Job) -> str:
    return "device" if isinstance(job, DEVICE_JOBS) else "sums" if isinstance(job, SUM_JOBS) else "server"
