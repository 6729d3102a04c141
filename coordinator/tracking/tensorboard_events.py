"""TensorBoard's event files, written by its own library; no TensorFlow and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordinator.tracking.trackers import About, Row


class TensorboardTracker:
    """`FOLDER/RUN/events.out.tfevents.…`: a new file for each start, which voids what others have from there on.

    It does so with the first row that comes. A run that is over gets none, and the validation of its last version
    stands behind all its steps: a coordinator that is started once more would take that away for good.
    """

    def __init__(self, about: About) -> None:
        # The library is an extra: the coordinator without it never comes here.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(Path(about.folder) / about.run))
        self._began: Event | None = Event(step=about.first, session_log=SessionLog(status=SessionLog.START))

    def log(self, rows: Sequence[Row]) -> None:
        if self._began is not None:
            self._writer.add_event(self._began)
            self._began = None
        for row in rows:
            self._add(row.step, row.wall_s, {f"train/{name}": value for name, value in row.scalars.items()})
            for version, scalars in row.validations:
                self._add(version, row.wall_s, {f"validation/{name}": value for name, value in scalars.items()})
        self._writer.flush()

    def _add(self, step: int, wall_s: float, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._event(step=step, wall_time=wall_s, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()
