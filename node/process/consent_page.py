"""The question before anything begins, on a page: what the run is, what it costs, the limits, yes and no by click.

For a computer without a terminal, and for people who do not use one. The page waits until it is answered; the status
page takes over its address and its cookie, so that the browser just goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from node.owner.limits import read_limits, shown, with_values, write_limits
from node.process.page import MEANINGS
from node.process.page_gate import HEADERS, Gate, Place, new_token, serve
from protocol.base.errors import BadInputError

NAMES = ("consent.html", "consent.js", "limits.js", "page.css")
LAST_WORDS_S = 0.5
"""So long the answer has to reach the browser before the page is gone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the owner clicked. `token`, `port`: for the page that comes after a yes."""

    yes: bool
    token: str
    port: int


def ask_on_page(
    run: str, text: str, settings: Path, tell: Callable[[str, str], None], kept: Place | None = None
) -> Answer:
    """Asks, and waits until it is answered. `tell` is given the address, and one that opens the page once, for a
    browser's command line; `kept`: where the page was the last time."""
    return trio.run(_ask, run, text, settings, tell, kept or Place())


async def _ask(run: str, text: str, settings: Path, tell: Callable[[str, str], None], kept: Place) -> Answer:
    token, once = kept.token or new_token(), new_token()
    answered = trio.Event()
    answers: list[bool] = []

    def answer(yes: bool) -> None:
        answers.append(yes)
        answered.set()

    async with trio.open_nursery() as nursery:
        page = build_consent_page(run, text, settings, Gate(token, NAMES, once), answer)
        address = await serve(nursery, page, token, kept.port, kept.second)
        tell(address, f"{address.removesuffix(token)}{once}")
        await answered.wait()
        await trio.sleep(LAST_WORDS_S)
        nursery.cancel_scope.cancel()
    return Answer(answers[0], token, int(address.split("/")[2].rpartition(":")[2]))


def build_consent_page(run: str, text: str, settings: Path, gate: Gate, answer: Callable[[bool], None]) -> Starlette:
    """The application. `text`: what the owner is asked about; `answer` is called with the first yes or no."""
    said: list[bool] = []

    def now() -> dict[str, Any]:
        return {"run": run, "text": text, "limits": shown(read_limits(settings)), "meanings": MEANINGS}

    async def offer(request: Request) -> Response:
        return gate.refusal(request) or JSONResponse(now(), headers=HEADERS)

    async def order(request: Request) -> Response:
        try:
            asked = await gate.order(request)
            if isinstance(asked, Response):
                return asked
            if asked.get("verb") == "limits":
                values = asked.get("values")
                if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
                    raise BadInputError("limits: a name and a text for each")
                write_limits(settings, with_values(read_limits(settings), values))
            elif asked.get("verb") in ("yes", "no"):
                if not said:
                    said.append(asked["verb"] == "yes")
                    answer(said[0])
            else:
                raise BadInputError("not an order")
            return JSONResponse(now(), 200, HEADERS)
        except BadInputError as error:
            return JSONResponse({"error": str(error)}, 400, HEADERS)

    routes = [
        Route("/enter/{token}", gate.enter, methods=["GET"]),
        *(Route(f"/{name}" if name != NAMES[0] else "/", gate.file, methods=["GET"]) for name in NAMES),
        Route("/api/offer", offer, methods=["GET"]),
        Route("/api/order", order, methods=["POST"]),
    ]
    return Starlette(routes=routes)
