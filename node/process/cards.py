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
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import msgspec
import structlog
import trio

from node.process.ends import GOOD_ENDS, is_pause
from node.process.keeper import Life
from protocol.base.machine import Told
from protocol.messages import News

FOLLOW_S = 0.5
"""Between two looks whether the first card is a member, where the others come after it."""
AGAIN_S = 300.0
"""After it has failed beside others that work, a card is begun again: as soon as a service manager's patience with a
program that fails would be over …"""
AGAIN_MAX_S = 3600.0
"""… and each time twice as long after, up to this: a card that has fallen off its bus does not come back by itself."""


class Cards:
    """The life of all of them, as the keeper knows one.

    Args:
        make: a life of the device at a place, whose facts are of that one alone (`node.process.daemon`).
        names: of the devices, as the owner chose them.
        leads: whether the first one is a member already. The others follow it: of an invite with one use it takes that,
            and has it also when it is lent alone.
    """

    def __init__(
        self, make: Callable[[int], Life], names: Sequence[str], leads: Callable[[], bool] = lambda: True
    ) -> None:
        self._make = make
        self._names = tuple(names)
        self._leads = leads
        self._lives = [make(place) for place in range(len(self._names))]
        self._reasons = [""] * len(self._names)
        """Why each has ended; empty while it lives."""
        self._last = ""
        """The newest of them."""
        self._share = 1.0
        self._ends = trio.Event()
        """The owner, or the end of the run, wants all to end: none is begun again."""
        self._heard: list[News | None] = []
        self._news: News | None = None
        self._log = structlog.get_logger("owner")

    # ---- what the owner says -----------------------------------------------------------------------------------------

    def tell(self, fact: Told) -> None:
        self._ends.set()
        for life in self._living():
            life.tell(fact)

    def end_device(self) -> None:
        """All at once: the system may take its time with one of them, and the owner has been promised a second."""

        def end(place: int) -> None:
            structlog.contextvars.bind_contextvars(**self._bound(place))
            self._lives[place].end_device()

        places = [place for place, reason in enumerate(self._reasons) if not reason]
        threads = [Thread(target=end, args=(place,), name="device-ends", daemon=True) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def set_share(self, share: float) -> None:
        self._share = share
        for life in self._living():
            life.set_share(share)

    def _living(self) -> list[Life]:
        return [life for life, reason in zip(self._lives, self._reasons, strict=True) if not reason]

    def _bound(self, place: int) -> dict[str, str]:
        """What stands on every line of a card's log; nothing where there is one."""
        return {"device": self._names[place]} if len(self._names) > 1 else {}

    # ---- how it ends -------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Until all have ended; returns why.

        One that cannot go on leaves the others at work, and is begun again later, and with the next life. Raises what
        one of them raises: then this process cannot go on, and all end.
        """
        if len(self._lives) == 1:
            return await self._lives[0].run()
        errors: list[Exception] = []
        async with trio.open_nursery() as nursery:

            async def live(place: int) -> None:
                structlog.contextvars.bind_contextvars(**self._bound(place))
                try:
                    await self._live(place)
                except Exception as error:
                    errors.append(error)
                    nursery.cancel_scope.cancel()

            for place in range(len(self._lives)):
                nursery.start_soon(live, place)
        if errors:
            raise errors[0]
        return self._reason()

    async def _live(self, place: int) -> None:
        """Lives of one card, until it or what it belongs to has ended."""
        while place and not self._leads() and not self._reasons[0] and not self._ends.is_set():
            await trio.sleep(FOLLOW_S)
        again_s = AGAIN_S
        while True:
            reason = self._reasons[place] = self._last = await self._lives[place].run()
            others = self._living()
            if reason == "finished":  # the run has nothing left for anybody
                self.tell(Told("drain"))
            well = reason in GOOD_ENDS or is_pause(reason)
            if others:
                tell = self._log.info if well else self._log.warning
                tell("one device has ended", reason=reason, detail="" if well else f"tried again after {again_s:.0f} s")
            if well or not others:
                self._ends.set()  # also for those that would be tried again
                return
            with trio.move_on_after(again_s):
                await self._ends.wait()
            if self._ends.is_set():
                return
            again_s = min(2 * again_s, AGAIN_MAX_S)
            self._lives[place] = self._make(place)
            self._lives[place].set_share(self._share)
            self._reasons[place] = ""

    def _reason(self) -> str:
        """That of a pause, where there is one: the next life has all of them again. Else a good one, where somebody was
        told to end: what failed meanwhile would only bring back what its owner has ended. Else the last."""
        paused = [reason for reason in self._reasons if is_pause(reason)]
        well = [reason for reason in self._reasons if reason in GOOD_ENDS]
        return (paused or well or [self._last])[-1]

    # ---- what the owner is shown -------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """See `node.process.keeper.Life`. Of a card that has ended only what it has given counts."""
        each = [life.facts() for life in self._lives]
        if not any(each):
            return {}
        present = [facts for facts, reason in zip(each, self._reasons, strict=True) if not reason] or [{}]
        # Who works says where, and who waits says for what only when nobody works.
        foremost = max(present, key=lambda facts: (bool(facts.get("busy")), facts.get("stage", -1) >= 0))
        paths: Counter[str] = Counter()
        for facts in present:
            paths.update(facts.get("paths", {}))
        return {
            "stage": foremost.get("stage", -1),
            "stages": foremost.get("stages", 0),
            "waiting_for": foremost.get("waiting_for", ""),
            "busy": any(facts.get("busy") for facts in present),
            "totals": [facts.get("totals", {}) for facts in each],
            "paths": dict(paths),
            "devices": [facts.get("device") for facts in each],
            "coordinator": any(facts.get("coordinator") for facts in present),
            "news": self._added_up([facts.get("news") for facts in each]),
            "thanks": [news.thanks if (news := facts.get("news")) is not None else None for facts in each],
            "cards": [self._card(place, facts) for place, facts in enumerate(each)] if len(each) > 1 else [],
        }

    def _added_up(self, heard: list[News | None]) -> News | None:
        """The run's news, with all present cards' part of it; the same object while nobody has heard anything new. The
        last word of all that have ended counts until there is another life."""
        if any(not reason for reason in self._reasons):
            heard = [None if reason else news for news, reason in zip(heard, self._reasons, strict=True)]
        if len(self._heard) == len(heard) and all(map(operator.is_, heard, self._heard)):
            return self._news
        self._heard = heard
        told = [news for news in heard if news is not None]
        if len(told) < 2:
            self._news = told[0] if told else None
            return self._news
        newest = max(told, key=lambda news: news.step)
        self._news = msgspec.structs.replace(
            newest,
            hour_ratio=min(1.0, sum(news.hour_ratio for news in told)),
            step_tasks=sum(news.step_tasks for news in told if news.step == newest.step),
        )
        return self._news

    def _card(self, place: int, facts: dict[str, Any]) -> dict[str, Any]:
        """One line of the owner's screens."""
        device, reason = facts.get("device"), self._reasons[place]
        return {
            "device": self._names[place] if device is None else f"{self._names[place]}, {device.label}",
            "stage": -1 if reason else facts.get("stage", -1),
            "waiting_for": "" if reason else facts.get("waiting_for", ""),
            "busy": not reason and bool(facts.get("busy")),
            "ended": reason.removeprefix("suspended: "),
        }
