"""Several devices of one computer: each is a member of the run of its own, and to their owner they are one.

    Keeper ─▶ Cards ─┬─▶ life of the first device   (its key, its state folder, its links, its device's process)
                     └─▶ life of the next …

Servers and coordinator see so many volunteers, as if they stood in different homes: each has its own place in the run,
and a card that fails or is refused takes none of the others' work along. What the owner says is said to all, what the
owner is shown is added up, and the line and its limits are shared.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from threading import Thread
from typing import Any, Protocol

import msgspec
import structlog
import trio

from protocol.base.machine import Told
from protocol.messages import News


class CardLife(Protocol):
    """One device's membership, while it lives; see `node.process.daemon`."""

    def tell(self, fact: Told) -> None: ...

    def end_device(self) -> None: ...

    def set_share(self, share: float) -> None: ...

    def facts(self) -> dict[str, Any]: ...

    async def run(self) -> str: ...


class Cards:
    """The life of all of them, as the keeper knows one. `names`: of their devices, as the owner chose them."""

    def __init__(self, lives: Sequence[CardLife], names: Sequence[str]) -> None:
        self._lives = tuple(lives)
        self._names = tuple(names)
        self._reasons = [""] * len(self._lives)
        """Why each has ended; empty while it lives."""
        self._heard: list[News | None] = []
        self._news: News | None = None
        self._log = structlog.get_logger("owner")

    # ---- what the owner says -----------------------------------------------------------------------------------------

    def tell(self, fact: Told) -> None:
        for life in self._lives:
            life.tell(fact)

    def end_device(self) -> None:
        """All at once: the system may take its time with one of them, and the owner has been promised a second."""
        ends = [Thread(target=life.end_device, name="device-ends", daemon=True) for life in self._lives]
        for end in ends:
            end.start()
        for end in ends:
            end.join()

    def set_share(self, share: float) -> None:
        for life in self._lives:
            life.set_share(share)

    # ---- how it ends -------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Until all have ended; returns why.

        One that cannot go on leaves the others at work, and is begun again with the next life. Raises what one of them
        raises: then this process cannot go on, and all end.
        """
        if len(self._lives) == 1:
            return await self._lives[0].run()
        errors: list[Exception] = []
        async with trio.open_nursery() as nursery:

            async def live(place: int) -> None:
                structlog.contextvars.bind_contextvars(device=self._names[place])  # on every line of this one's tasks
                try:
                    reason = await self._lives[place].run()
                except Exception as error:
                    errors.append(error)
                    nursery.cancel_scope.cancel()
                    return
                self._reasons[place] = reason
                if not all(self._reasons):
                    self._log.info("one device has ended", device=self._names[place], reason=reason)

            for place in range(len(self._lives)):
                nursery.start_soon(live, place)
        if errors:
            raise errors[0]
        return self._reason()

    def _reason(self) -> str:
        """The pause, where there is one: the next life has all of them again. Else that of the last which was well."""
        suspended = [reason for reason in self._reasons if reason.startswith("suspended: ")]
        well = [reason for reason in self._reasons if reason in ("left", "stopped", "drained", "finished")]
        return (suspended or well or self._reasons)[-1]

    # ---- what the owner is shown -------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """See `node.process.keeper.Life`."""
        each = [life.facts() for life in self._lives]
        if not any(each):
            return {}
        # Who works says where, and who waits says for what only when nobody works.
        foremost = max(each, key=lambda facts: (bool(facts.get("busy")), facts.get("stage", -1) >= 0))
        paths: Counter[str] = Counter()
        for facts in each:
            paths.update(facts.get("paths", {}))
        return {
            "stage": foremost.get("stage", -1),
            "stages": foremost.get("stages", 0),
            "waiting_for": foremost.get("waiting_for", ""),
            "busy": any(facts.get("busy") for facts in each),
            "totals": [facts.get("totals", {}) for facts in each],
            "paths": dict(paths),
            "devices": [facts.get("device") for facts in each],
            "coordinator": any(facts.get("coordinator") for facts in each),
            "news": self._added_up([facts.get("news") for facts in each]),
            "thanks": [news.thanks if (news := facts.get("news")) is not None else None for facts in each],
            "cards": [self._card(place, facts) for place, facts in enumerate(each)] if len(each) > 1 else [],
        }

    def _added_up(self, heard: list[News | None]) -> News | None:
        """The run's news, with all cards' part of it; the same object while nobody has heard anything new."""
        if len(self._heard) == len(heard) and all(map(operator.is_, heard, self._heard)):
            return self._news
        self._heard = heard
        told = [news for news in heard if news is not None]
        if not told:
            self._news = None
        elif len(told) == 1:
            self._news = told[0]
        else:
            newest = max(told, key=lambda news: news.step)
            self._news = msgspec.structs.replace(
                newest,
                hour_ratio=min(1.0, sum(news.hour_ratio for news in told)),
                step_tasks=sum(news.step_tasks for news in told if news.step == newest.step),
            )
        return self._news

    def _card(self, place: int, facts: dict[str, Any]) -> dict[str, Any]:
        """One line of the owner's screens."""
        device = facts.get("device")
        return {
            "device": self._names[place] if device is None else f"{self._names[place]}, {device.label}",
            "stage": facts.get("stage", -1),
            "waiting_for": facts.get("waiting_for", ""),
            "busy": bool(facts.get("busy")),
            "ended": self._reasons[place],
        }
