"""What the demo learns from outside: the coordinator's status, and a volunteer's own counters."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

ANSWER_S = 2.0
"""A loopback answer takes milliseconds; who takes longer is asked again at the next look."""
_STATUS_BYTES_MAX = 16 << 20
_QUEUE = re.compile(rb'^barnraise_node_queue_items\{queue="(leases|unsent_tasks)"\} ([0-9.e+]+)$', re.MULTILINE)
# Straight to loopback, whatever proxy the environment names.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch_status(base: str) -> dict[str, Any] | None:
    """The coordinator's `/api/status`, or None while it does not answer."""
    try:
        with _opener.open(f"{base}/api/status", timeout=ANSWER_S) as answer:
            found = json.loads(answer.read(_STATUS_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def held_work(port: int) -> int | None:
    """Leases and unsent tasks that the volunteer behind this metrics port holds now; None without an answer."""
    try:
        with _opener.open(f"http://127.0.0.1:{port}/metrics", timeout=ANSWER_S) as answer:
            text = answer.read(_STATUS_BYTES_MAX)
    except OSError:
        return None
    found = {name: float(value) for name, value in _QUEUE.findall(text)}
    return int(sum(found.values())) if len(found) == 2 else None


class Tally:
    """Sums counters over all processes there ever were, from reports that begin at 0 with each process."""

    def __init__(self) -> None:
        self._newest: dict[str, dict[str, float]] = {}
        self._ended: dict[str, float] = {}

    def take(self, status: dict[str, Any]) -> None:
        """Takes the members' last reports; a counter that went down belongs to a new process."""
        for member in status.get("members", ()):
            counters = member.get("counters") or {}
            if not counters:
                continue
            before = self._newest.get(member["id"], {})
            if any(counters.get(name, 0.0) < value for name, value in before.items() if _is_total(name)):
                for name, value in before.items():
                    self._ended[name] = self._ended.get(name, 0.0) + value
            self._newest[member["id"]] = counters

    def total(self, name: str) -> float:
        """The sum of one counter."""
        return self._ended.get(name, 0.0) + sum(counters.get(name, 0.0) for counters in self._newest.values())

    def by_prefix(self, prefix: str) -> dict[str, float]:
        """Sums of all counters whose names begin with `prefix`, by the rest of their names."""
        names = sorted({name for counters in self._newest.values() for name in counters} | set(self._ended))
        return {name.removeprefix(prefix): self.total(name) for name in names if name.startswith(prefix)}


def _is_total(name: str) -> bool:
    """Whether a counter only grows; the others say what is at the moment."""
    return name.startswith(("bytes_", "tasks_")) or name in ("reissued", "microbatches", "tokens", "accepted")
