"""The planner at work for a coordinator: in a process of its own, so that links and API are answered meanwhile.

    ask_planner ─▶ python -m coordinator.process.planner < msgpack of a `Problem` > msgpack of an `Answer`

A search is arithmetic without a pause: in a thread it would hold the interpreter for tens of milliseconds at a time.
It touches neither disk nor network, ends by itself after `BUDGET_S` and `ORDER_BUDGET_S`, and is killed if it does not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import trio

from coordinator.live.plan_builder import Guidance, in_flight_of
from coordinator.live.problem import Problem, Proposal
from coordinator.planning.placement.seat_search import search_seats
from coordinator.planning.tune.live_order import choose_live
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.run.run import TUNED

BUDGET_S = 10.0
ORDER_BUDGET_S = 5.0
"""For what nodes do first and how much is in flight, once seats and cut are known; one look takes about a second."""
KILL_S = 30.0
"""After this a planner is ended: it has hung, or the computer swaps."""


_A = TypeVar("_A", bound=msgspec.Struct)


class Answer(msgspec.Struct, frozen=True):
    """What a planner says: a proposal, or a sentence why there is none."""

    proposal: Proposal | None
    sentence: str = ""


def solve(problem: Problem, clock: Callable[[], float] = time.perf_counter) -> Answer:
    """The planner itself. `clock` in seconds; one that stands makes the answer depend on the problem alone."""
    try:
        best = search_seats(problem.config, problem.network, BUDGET_S, clock=clock, keeps_seats=problem.keeps_seats)
    except BadInputError as error:
        return Answer(None, str(error))
    began, found = clock(), best.worthwhile
    live = choose_live(
        found.seats, found.plan, in_flight_of(len(found.servers)), problem.config.stages.order == TUNED,
        expired=lambda: clock() - began > ORDER_BUDGET_S,
    )  # fmt: skip
    proposal = Proposal(
        servers=tuple(tuple(map(NodeId, stage)) for stage in found.servers),
        edges=found.edges,
        step_s=found.step_s,
        even_step_s=found.even_step_s,
        bound_s=found.bound_s,
        reason=f"{found.reason}; {live.reason}" if live.reason else found.reason,
        guidance=Guidance(live.policy, live.in_flight_max),
    )
    return Answer(proposal)


async def ask_planner(problem: Problem) -> Answer:
    """Has a process solve the problem; whatever goes wrong with it is an answer with a sentence."""
    answer = await ask_process(__name__, "planner", problem, Answer, KILL_S)
    return Answer(None, answer) if isinstance(answer, str) else answer


async def ask_process(module: str, what: str, question: msgspec.Struct, kind: type[_A], patience_s: float) -> _A | str:
    """What `python -m module` answers to a question on its standard input, or a sentence why there is no answer."""
    with trio.move_on_after(patience_s) as patience:
        try:
            done = await trio.run_process(
                [sys.executable, "-m", module], stdin=msgspec.msgpack.encode(question), capture_stdout=True,
                capture_stderr=True, check=False,
            )  # fmt: skip
        except OSError as error:
            return f"the {what} cannot be started: {error.strerror}"
    if patience.cancelled_caught:
        return f"the {what} has not ended within {patience_s:g} s"
    if done.returncode != 0:
        words = bytes(done.stderr).decode(errors="replace").strip().splitlines()
        return f"the {what} ended with code {done.returncode}: {words[-1] if words else 'no word'}"
    try:
        return msgspec.msgpack.decode(done.stdout, type=kind)
    except msgspec.MsgspecError as error:
        return f"the {what}'s answer cannot be read: {error}"


if __name__ == "__main__":
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Problem)
    sys.stdout.buffer.write(msgspec.msgpack.encode(solve(asked)))
