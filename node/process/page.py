"""The owner's page, on loopback: what the computer does, why not more, and what may be changed, with one click.

Who is let in is for `node.process.page_gate` to say. What comes from the run (its name, what the model writes) is text.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from node.owner.limits import KEYS
from node.process.keeper import Keeper
from node.process.page_gate import HEADERS, Gate, new_token, serve
from protocol.base.errors import BadInputError

EVERY_S = 1.0
ORDERS = ("pause", "resume", "finish", "limits", "leave")
NAMES = ("index.html", "page.js", "limits.js", "page.css")
MEANINGS = {key.name: f"{key.meaning} For example {key.example}." for key in KEYS}


def build_page(keeper: Keeper, token: str) -> Starlette:
    """The application. `token`: what the owner's address holds."""
    gate = Gate(token, NAMES)

    def now() -> dict[str, Any]:
        return {**keeper.status(), "meanings": MEANINGS}

    async def status(request: Request) -> Response:
        return gate.refusal(request) or JSONResponse(now(), headers=HEADERS)

    async def events(request: Request) -> Response:
        async def stream() -> AsyncIterator[str]:
            with keeper.watched():
                while True:
                    yield f"data: {json.dumps(now())}\n\n"
                    if keeper.over.is_set():
                        return  # that was the last word
                    with trio.move_on_after(EVERY_S):
                        await keeper.over.wait()

        return gate.refusal(request) or StreamingResponse(stream(), 200, HEADERS, "text/event-stream")

    async def order(request: Request) -> Response:
        try:
            asked = await gate.order(request)
            if isinstance(asked, Response):
                return asked
            if asked.get("verb") not in ORDERS:
                raise BadInputError("not an order")
            return JSONResponse({**keeper.order(asked), "meanings": MEANINGS}, 200, HEADERS)
        except BadInputError as error:
            return JSONResponse({"error": str(error)}, 400, HEADERS)

    routes = [
        Route("/enter/{token}", gate.enter, methods=["GET"]),
        *(Route(f"/{name}" if name != NAMES[0] else "/", gate.file, methods=["GET"]) for name in NAMES),
        Route("/api/status", status, methods=["GET"]),
        Route("/api/events", events, methods=["GET"]),
        Route("/api/order", order, methods=["POST"]),
    ]
    return Starlette(routes=routes)


async def serve_page(nursery: trio.Nursery, keeper: Keeper, token: str = "", *ports: int) -> str:
    """Serves it below `nursery`; returns the owner's address. `token`: of the page on which the owner said yes, or of
    the visit before; `ports`: where the owner's browser looks for it, the likeliest first."""
    token = token or new_token()
    return await serve(nursery, build_page(keeper, token), token, *ports)
