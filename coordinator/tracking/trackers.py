"""What a tracker is, and which there are: each takes the rows of closed steps and writes them where its tool looks.

A tracker lives in a process of its own (`coordinator.tracking.child`), so a library that hangs, crashes or leaks costs
the run nothing. After going back to a checkpoint the tracker is opened anew with the first step that comes again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

import msgspec

from protocol.base.errors import BadInputError


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A closed step, as trackers get it. What is not finite is infinite."""

    step: int
    wall_s: float
    """Seconds since 1970."""
    scalars: dict[str, float]
    validations: tuple[tuple[int, dict[str, float]], ...] = ()
    """(version, its scalars), told with this step."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a tracker is opened with."""

    run: str
    run_id: str
    """Hexadecimal."""
    folder: str
    first: int
    """The step of the first row that comes; what the files have from it on counts no longer."""
    config: dict[str, str]
    """The run's keys, as in RUN.toml, for tools that compare runs."""


class Tracker(Protocol):
    """Made with an `About`. Called from one thread; what `log` has returned from is with the operating system."""

    def log(self, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


KINDS = {
    "csv": ("coordinator.tracking.csv_file", "CsvTracker", ""),
    "tensorboard": ("coordinator.tracking.tensorboard_events", "TensorboardTracker", "tensorboard"),
    "wandb": ("coordinator.tracking.wandb_offline", "WandbTracker", "wandb"),
    "mlflow": ("coordinator.tracking.mlflow_store", "MlflowTracker", "mlflow"),
}
"""Kind -> (module, class, the library that it needs)."""


class Target(msgspec.Struct, frozen=True):
    """`KIND:FOLDER` of the command line."""

    kind: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.kind}:{self.folder}"


def parse_target(text: str) -> Target:
    """Raises `BadInputError` for a kind that there is not, or whose library is not installed."""
    kind, _, folder = text.partition(":")
    if kind not in KINDS or not folder:
        raise BadInputError(f"--track: {text!r} is not KIND:FOLDER, where KIND is {', '.join(KINDS)}")
    library = KINDS[kind][2]
    if library and importlib.util.find_spec(library) is None:
        raise BadInputError(f"--track: {kind} needs the library {library}: pip install 'barnraise[trackers]'")
    return Target(kind, Path(folder).expanduser().absolute())


def open_tracker(kind: str, about: About) -> Tracker:
    """The tracker with its files open. Raises whatever its library or the disk does."""
    module, name, _ = KINDS[kind]
    tracker: Tracker = getattr(import_module(module), name)(about)
    return tracker
