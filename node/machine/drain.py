"""How a node leaves in peace: it waits for verdicts on what it sent, then for the coordinator's last news of it."""

from __future__ import annotations

from protocol.messages import News

DRAIN_S = 60.0
"""A node that drains waits so long for verdicts on what it sent (state-and-trust 4.5)."""
LAST_NEWS_S = 2.0
"""… and then so long for the run's signed word on what it gave, which its owner is about to read."""


class Drain:
    """`until_s`: when it leaves whatever has not come; None while it does not drain."""

    def __init__(self) -> None:
        self.until_s: float | None = None
        self.reason = "drained"
        self._asked = False
        self._known: News | None = None

    def begin(self, reason: str, now: float) -> None:
        self.until_s, self.reason, self._asked = now + DRAIN_S, reason, False

    def end(self) -> None:
        self.until_s = None

    def asks_for_news(self, known: News | None, now: float) -> bool:
        """Everything is finished: whether the coordinator shall be asked for its last word now. One that only pauses
        comes back for it."""
        if self._asked or self.reason != "drained":
            return False
        self._asked, self._known, self.until_s = True, known, now + LAST_NEWS_S
        return True

    def waits_for_news(self, newest: News | None) -> bool:
        return self._asked and newest is self._known

    @property
    def time_over(self) -> str:
        """The reason to leave when `until_s` has come."""
        return "drain time is over" if self.reason == "drained" and not self._asked else self.reason
