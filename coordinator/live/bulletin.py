"""What volunteers are told of the run now and then: the loss so far, what the model writes, what they have given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from coordinator.live.giving import Giving
from coordinator.live.history import History
from coordinator.live.outbox import Outbox
from coordinator.live.roster import Member
from protocol.base.limits import CURVE_MAX
from protocol.messages import News
from protocol.trust.thanks import Thanks

NEWS_S = 30.0
"""Between two pieces of news for one volunteer. Each is a signature (0.05 ms) and 1.5 kB."""

LAST_NEWS_S = 1.0
"""… and for one that says that it is about to leave, which it does every two seconds for a minute at most."""


class LossCurve:
    """The mean loss of at most CURVE_MAX even pieces of the run; two become one when they would be more. The first
    point is the first step's own loss, so that where it began stays where it was."""

    def __init__(self, pieces: Iterable[tuple[int, float]] = ()) -> None:
        """`pieces`: (first step, mean loss) from before, oldest first; the first is the first step's own."""
        self._width = 1
        self._newest = -1
        self._sums: dict[int, tuple[int, float]] = {}
        self._first: tuple[int, float] | None = None
        for step, loss in pieces:
            self.add(step, loss)

    def add(self, step: int, loss: float) -> None:
        """A step has closed. What is not finite is left out."""
        if step <= self._newest:
            self._go_back(step)
        self._newest = step
        if not math.isfinite(loss):
            return
        if self._first is None:
            self._first = (step, loss)
        while step // self._width >= CURVE_MAX:
            before, self._sums, self._width = self._sums, {}, 2 * self._width
            for piece, (count, total) in before.items():
                self._put(piece // 2, count, total)
        self._put(step // self._width, 1, loss)

    def _put(self, piece: int, count: int, total: float) -> None:
        had = self._sums.get(piece, (0, 0.0))
        self._sums[piece] = (had[0] + count, had[1] + total)

    def _go_back(self, first: int) -> None:
        """Steps from `first` on are computed again; a piece that also holds earlier ones stays."""
        for piece in [piece for piece in self._sums if piece * self._width >= first]:
            del self._sums[piece]
        if self._first is not None and self._first[0] >= first:
            self._first = None

    def points(self) -> tuple[tuple[int, float], ...]:
        means = [
            (piece * self._width, total / count)
            for piece, (count, total) in sorted(self._sums.items())
            if math.isfinite(total)
        ]
        return tuple(means) if self._first is None else (self._first, *means[1:])


class Bulletin:
    """Writes `News`. `sign` is the coordinator's signature of thanks."""

    def __init__(
        self,
        run_id: bytes,
        run: str,
        giving: Giving,
        curve: LossCurve,
        outbox: Outbox,
        sign: Callable[[Thanks], bytes],
    ) -> None:
        self._run_id = run_id
        self.build = ""
        """This program's, for the owners of older ones."""
        self._run = run
        self._giving = giving
        self._outbox = outbox
        self._sign = sign
        self.curve = curve
        self.sample, self.sample_step = "", -1

    def wrote(self, sample: str, step: int) -> None:
        """A server has let the model of a checkpoint write."""
        if step >= self.sample_step:
            self.sample, self.sample_step = sample, step

    def tell(self, member: Member, history: History, now: float) -> None:
        """News for one volunteer."""
        member.news_at = now
        validated = history.validations[-1] if history.validations else None
        self._outbox.send(
            member.peer,
            News(
                step=history.newest_step,
                curve=self.curve.points(),
                sample=self.sample,
                sample_step=self.sample_step,
                hour_ratio=self._giving.hour_ratio(member.peer, now),
                step_tasks=self._giving.newest[member.peer],
                thanks=self._thanks(member, now),
                build=self.build,
                validated_step=-1 if validated is None else validated.version,
                validation_loss=0.0 if validated is None else validated.loss,
            ),
        )

    def tell_if_due(self, member: Member, history: History, now: float) -> None:
        if now >= member.news_at + NEWS_S:
            self.tell(member, history, now)

    def _thanks(self, member: Member, now: float) -> bytes:
        credit = self._giving.of(member.peer)
        if credit is None:
            return b""
        return self._sign(
            Thanks(
                run_id=self._run_id,
                run=self._run,
                node=member.peer,
                name=member.join.name if member.join is not None else "",
                tasks=credit.tasks,
                tokens=credit.tokens,
                working_s=int(credit.working_s),
                since_unix_s=int(credit.since_s),
                until_unix_s=int(self._outbox.wall_s(now)),
            )
        )
