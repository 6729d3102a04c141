"""What the person at the demo sees: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protocol.run.run import RunConfig

_BARS = "▁▂▃▄▅▆▇█"
_NEWS_SHOWN = 8
_SPARK_WIDTH = 60
_EVERY_MAX = 10


class View(Protocol):
    """Both kinds."""

    def __enter__(self) -> View: ...

    def __exit__(self, *_: object) -> None: ...

    def news(self, line: str) -> None:
        """Something happened that a person wants to read: a kill, a restart, a wait."""

    def step(self, step: int, loss: float, tokens_per_s: float) -> None:
        """A step was closed."""

    def status(self, status: dict[str, Any], volunteers: int) -> None:
        """The coordinator's newest status; `volunteers` are processes that live."""


class PlainView:
    """One line for each step, news in between: for pipes, files and NO_COLOR.

    With `sparse` only every so many, and the first and the last: for logs that nobody has asked to be complete.
    """

    def __init__(self, config: RunConfig, sparse: bool = False) -> None:
        self._config = config
        self._every = min(_EVERY_MAX, max(1, config.steps // 20)) if sparse else 1
        self._shown_any = False
        self._started = time.monotonic()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def news(self, line: str) -> None:
        click.echo(f"{clock(time.monotonic() - self._started)} {line}")

    def step(self, step: int, loss: float, tokens_per_s: float) -> None:
        total = self._config.steps
        if self._shown_any and step + 1 != total and (step + 1) % self._every:
            return
        self._shown_any = True
        click.echo(
            f"step {step + 1:0{len(str(total))}d}/{total} loss {loss:.4f} "
            f"tok/s {tokens_per_s:.0f} eta {time_left(self._config, step + 1, tokens_per_s)}"
        )

    def status(self, status: dict[str, Any], volunteers: int) -> None:
        return None


class LiveView:
    """A table of stages, the curve of the loss, and the last news, redrawn in place."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self._config = config
        self._started = time.monotonic()
        self._losses: list[float] = []
        self._done = 0
        self._tokens_per_s = 0.0
        self._news: list[str] = []
        self._status: dict[str, Any] = {}
        self._volunteers = 0
        self._live = Live(self._draw(), console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(self._draw(), refresh=True)
        self._live.stop()

    def news(self, line: str) -> None:
        self._news = [*self._news, f"{clock(time.monotonic() - self._started)} {line}"][-_NEWS_SHOWN:]
        self._live.update(self._draw())

    def step(self, step: int, loss: float, tokens_per_s: float) -> None:
        self._losses.append(loss)
        self._done = step + 1
        self._tokens_per_s = tokens_per_s

    def status(self, status: dict[str, Any], volunteers: int) -> None:
        self._status, self._volunteers = status, volunteers
        self._live.update(self._draw())

    def _draw(self) -> Group:
        done, total = self._done, self._config.steps
        head = Table.grid(padding=(0, 2))
        loss = f"loss {self._losses[-1]:.3f}" if self._losses else "loss -"
        head.add_row(
            f"run {self._config.name}",
            ProgressBar(total=total, completed=done, width=24),
            f"step {done}/{total}",
            loss,
            f"{self._tokens_per_s / 1000:.1f}k tok/s",
            f"eta {time_left(self._config, done, self._tokens_per_s)}",
        )
        parts: list[Any] = [head, Text(f"loss  {sparkline(self._losses, _SPARK_WIDTH)}")]
        parts.append(self._stage_table())
        waiting = (self._status.get("run") or {}).get("waiting_for")
        if waiting:
            parts.append(Text(str(waiting)))
        parts += [Text(line) for line in self._news]
        return Group(*parts)

    def _stage_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("STAGE", "BLOCKS", "SERVERS", "VOLUNTEERS", "QUEUE", "LEASED", "RE-ISSUED"):
            table.add_column(name, justify="left" if name == "BLOCKS" else "right")
        members = {member["id"]: member.get("counters") or {} for member in self._status.get("members", ())}
        for stage in self._status.get("stages", ()):
            counters = [members.get(server["id"], {}) for server in stage["servers"]]
            table.add_row(
                str(stage["stage"]),
                str(stage["blocks"]),
                str(sum(bool(server["linked"]) for server in stage["servers"])),
                str(stage["volunteers"]),
                *(f"{sum(each.get(name, 0.0) for each in counters):.0f}" for name in ("queue", "leased", "reissued")),
            )
        return table


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a row of at most `width` bars, each the mean of its share of them."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / span * len(_BARS)))] for mean in means)


def time_left(config: RunConfig, done: int, tokens_per_s: float) -> str:
    """How long the steps after the first `done` take at this speed; a dash while the speed is not known."""
    return clock((config.steps - done) * config.step_tokens / tokens_per_s) if tokens_per_s else "-"


def clock(seconds: float) -> str:
    """Minutes and seconds, as a person reads them."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
