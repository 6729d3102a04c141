"""The live page: its files, what it shows, and the stream that keeps it current (server-sent events).

GET /                 the page
GET /page/NAME        its scripts and styles
GET /page/events      a stream: `overview` every second, `members` every five
GET /page/timeline.svg  what everybody did in the last steps, under what was predicted, when the operator last asked
GET /page/curve       the loss over all steps in at most 2,000 pieces, and of the newest 2,000 validations

Everything that others said comes as JSON and is put into the page as text, never as markup; the policy lets the
browser run nothing but the page's own files. All viewers share one picture a second, so a hundred cost what one does
but for their sockets.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

FILES = {
    "app.js": "text/javascript; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
    "uplot.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "uplot.css": "text/css; charset=utf-8",
    "uplot-license.txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
POINTS_MAX = 2000
"""Pieces of the curve: a screen has no more columns."""
VIEWERS_MAX = 200
"""Streams at once on one address; each takes a socket and some 100 KB of buffers."""
READ_S = 30.0
"""hypercorn ends a connection on which nothing was read for so long: callers that send a letter a minute."""
STREAM_S = 20.0
"""A stream ends by itself before that, and its reader comes back at once: browsers do so without a word."""
OVERVIEW_S = 1.0
MEMBERS_S = 5.0
CURVE_S = 5.0
"""A curve is read from the database at most so often, however many ask."""
_FOLDER = Path(__file__).parents[1] / "page"


class PageApi(Protocol):
    """What the daemon lends to the page. Called on trio's thread."""

    def overview(self) -> dict[str, Any]: ...

    def members(self, *, whole_ids: bool) -> list[dict[str, Any]]: ...

    def picture(self) -> bytes:
        """The newest timeline as an SVG document; empty where nobody has asked for one."""
        ...

    async def curve(self, points: int) -> list[Any]: ...

    async def validations(self, count_max: int) -> list[Any]: ...


class Page:
    """The routes of one address. `operator`: whether its reader may be the operator, who gets whole ids and a form."""

    def __init__(self, api: PageApi, *, operator: bool) -> None:
        self._api = api
        self._operator = operator
        self._viewers = 0
        self._pictures: dict[str, tuple[float, bytes]] = {}
        self._reading = trio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/", self._front, methods=["GET"]),
            Route("/page/events", self._events, methods=["GET"]),
            Route("/page/curve", self._curve, methods=["GET"]),
            Route("/page/timeline.svg", self._timeline, methods=["GET"]),
            Route("/page/{name}", self._file, methods=["GET"]),
        ]

    async def _front(self, _: Request) -> Response:
        text = (_FOLDER / "index.html").read_text()
        headers = {**SECURITY, "Cache-Control": "no-store"}
        return Response(text, 200, headers, "text/html; charset=utf-8")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FILES:
            return Response("there is no such file\n", 404, SECURITY, "text/plain; charset=utf-8")
        content = (_FOLDER / name).read_bytes()
        tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
        headers = {**SECURITY, "Cache-Control": "no-cache", "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(b"", 304, headers)
        return Response(content, 200, {**headers, "Content-Type": FILES[name]})

    async def _timeline(self, _: Request) -> Response:
        picture = self._api.picture()
        if not picture:
            return Response("nobody has asked for a trace yet\n", 404, SECURITY, "text/plain; charset=utf-8")
        return Response(picture, 200, {**SECURITY, "Cache-Control": "no-store"}, "image/svg+xml")

    async def _curve(self, _: Request) -> Response:
        async with self._reading:
            made_at, picture = self._pictures.get("curve", (float("-inf"), b""))
            if trio.current_time() - made_at >= CURVE_S:
                pieces, validations = await self._api.curve(POINTS_MAX), await self._api.validations(POINTS_MAX)
                picture = msgspec.json.encode({"pieces": pieces, "validations": validations})
                self._pictures["curve"] = (trio.current_time(), picture)
        return Response(picture, 200, {**SECURITY, "Cache-Control": "no-store"}, "application/json")

    async def _events(self, _: Request) -> Response:
        if self._viewers >= VIEWERS_MAX:
            return Response("too many are looking; come again\n", 503, {**SECURITY, "Retry-After": "30"}, "text/plain")
        headers = {**SECURITY, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._stream(), 200, headers, "text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        self._viewers += 1
        try:
            yield b"retry: 300\n\n"
            members_at = float("-inf")
            end = trio.current_time() + STREAM_S
            while trio.current_time() < end:
                yield self._event("overview", OVERVIEW_S)
                if trio.current_time() - members_at >= MEMBERS_S:
                    members_at = trio.current_time()
                    yield self._event("members", MEMBERS_S)
                await trio.sleep(OVERVIEW_S)
        finally:
            self._viewers -= 1

    def _event(self, kind: str, every_s: float) -> bytes:
        """The picture that all viewers share, made anew when it is old."""
        made_at, picture = self._pictures.get(kind, (float("-inf"), b""))
        if trio.current_time() - made_at >= every_s * 0.9:
            if kind == "overview":
                shown: Any = {**self._api.overview(), "operator": self._operator}
            else:
                shown = self._api.members(whole_ids=self._operator)
            picture = b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(shown))
            self._pictures[kind] = (trio.current_time(), picture)
        return picture
