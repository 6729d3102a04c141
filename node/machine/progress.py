"""A volunteer's owner sees now and then, in the log, what the computer does for the run."""

from __future__ import annotations

from collections.abc import Mapping

from node.machine.outbox import Outbox

PROGRESS_S = 30.0
"""Between two lines …"""
FIRST_PROGRESS_S = 10.0
"""… and until the first, for which its owner waits."""


class Progress:
    """Says it when it is time."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._said_at = float("-inf")
        self._say_at = float("-inf")
        self._said_tokens = 0.0

    def say(self, stage: int, counters: Mapping[str, float], waiting_for: str, now: float) -> None:
        """`counters`: the volunteer's."""
        if now < self._say_at:
            return
        tokens = counters["tokens"]
        self._say_at = now + PROGRESS_S
        if self._said_at == float("-inf"):
            self._say_at = now + FIRST_PROGRESS_S
        else:
            works = tokens > self._said_tokens
            self._out.log(
                "info", "working" if works else "idle", stage=stage, microbatches=int(counters["microbatches"]),
                tokens_per_s=round(max(0.0, tokens - self._said_tokens) / (now - self._said_at), 1),
                waiting_for="" if works else waiting_for,
            )  # fmt: skip
        self._said_at, self._said_tokens = now, tokens
