"""The owner's page, on loopback: what the computer does, why not more, and what may be changed, with one click.

Only the owner gets in: the address holds a token that becomes a cookie, which no other page can use (SameSite), and
requests must name this very host and origin, so that neither another page in the browser, nor a name that somebody
points at 127.0.0.1, nor another user of the computer is answered. It listens on loopback only.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from importlib.resources import files
from typing import Any

import hypercorn
import hypercorn.trio
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from node.owner.limits import KEYS
from node.process.keeper import Keeper
from protocol.base.errors import BadInputError

PORT = 8475
"""The same place at each start where it is free."""
EVERY_S = 1.0
BODY_BYTES_MAX = 16 << 10
COOKIE = "barnraise"
ORDERS = ("pause", "resume", "finish", "limits", "leave")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_FILES = {"index.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
MEANINGS = {key.name: f"{key.meaning} For example {key.example}." for key in KEYS}


def build_page(keeper: Keeper, token: str) -> Starlette:
    """The application. `token`: what the owner's address holds."""
    texts = {name: files("node.owner.page").joinpath(name).read_text(encoding="utf-8") for name in _FILES}

    def refusal(request: Request) -> Response | None:
        """Why this request is not answered, or None: host, origin, and the owner's cookie are looked at."""
        server = request.scope.get("server") or ("", 0)
        hosts = {f"127.0.0.1:{server[1]}", f"localhost:{server[1]}"}
        if request.headers.get("host", "") not in hosts:
            return PlainTextResponse("this page answers on 127.0.0.1 only", 403, _HEADERS)
        origin = request.headers.get("origin")
        if origin is not None and origin not in {f"http://{host}" for host in hosts}:
            return PlainTextResponse("another page may not ask this one", 403, _HEADERS)
        if not hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), token.encode()):
            return PlainTextResponse("open the address that `barnraise status` shows", 403, _HEADERS)
        return None

    def now() -> dict[str, Any]:
        return {**keeper.status(), "meanings": MEANINGS}

    async def enter(request: Request) -> Response:
        """The owner's address: the token becomes a cookie, and leaves the address bar."""
        if not hmac.compare_digest(str(request.path_params["token"]).encode(), token.encode()):
            return PlainTextResponse("open the address that `barnraise status` shows", 403, _HEADERS)
        response = RedirectResponse("/", 303, _HEADERS)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response

    async def file(request: Request) -> Response:
        name = request.url.path.removeprefix("/") or "index.html"
        return refusal(request) or Response(texts[name], 200, _HEADERS, f"{_FILES[name]}; charset=utf-8")

    async def status(request: Request) -> Response:
        return refusal(request) or JSONResponse(now(), headers=_HEADERS)

    async def events(request: Request) -> Response:
        async def stream() -> AsyncIterator[str]:
            while True:
                yield f"data: {json.dumps(now())}\n\n"
                await trio.sleep(EVERY_S)

        return refusal(request) or StreamingResponse(stream(), 200, _HEADERS, "text/event-stream")

    async def order(request: Request) -> Response:
        refused = refusal(request)
        if refused is not None:
            return refused
        if request.headers.get("content-type", "") != "application/json" or "origin" not in request.headers:
            return PlainTextResponse("orders come from the page", 403, _HEADERS)
        body = b""
        async with aclosing(request.stream()) as stream:
            async for chunk in stream:
                body += chunk
                if len(body) > BODY_BYTES_MAX:
                    return JSONResponse({"error": f"more than {BODY_BYTES_MAX} bytes"}, 400, _HEADERS)
        try:
            asked = json.loads(body)
            if not isinstance(asked, dict) or asked.get("verb") not in ORDERS:
                raise BadInputError("not an order")
            return JSONResponse({**keeper.order(asked), "meanings": MEANINGS}, 200, _HEADERS)
        except (BadInputError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 400, _HEADERS)

    routes = [
        Route("/enter/{token}", enter, methods=["GET"]),
        *(Route(f"/{name}" if name != "index.html" else "/", file, methods=["GET"]) for name in _FILES),
        Route("/api/status", status, methods=["GET"]),
        Route("/api/events", events, methods=["GET"]),
        Route("/api/order", order, methods=["POST"]),
    ]
    return Starlette(routes=routes)


async def serve_page(nursery: trio.Nursery, keeper: Keeper) -> str:
    """Serves it below `nursery`; returns the owner's address."""
    token = secrets.token_urlsafe(24)
    app: Any = build_page(keeper, token)
    settings = hypercorn.Config()
    settings.bind = [f"127.0.0.1:{_free_port()}"]
    settings.errorlog = None
    settings.include_server_header = False
    settings.read_timeout = 10
    settings.graceful_timeout = 0.2
    bound = await nursery.start(partial(hypercorn.trio.serve, app, settings))
    return f"{bound[0]}/enter/{token}"


def _free_port() -> int:
    """The usual port, or 0 (any) where somebody has it, say another lent run's page."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return 0
    return PORT
