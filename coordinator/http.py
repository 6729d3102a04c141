"""The coordinator's HTTP API: the run's state as JSON, its steps, and the operator's ban. Loopback by default.

GET  /                           the addresses below, for people
GET  /api/status                 everything that the machine knows (`coordinator.status`)
GET  /api/network                what is measured of the links, as a NETWORK.json for `barnraise plan`
GET  /api/steps?from=N&count=M   closed steps from N on, at most 1000; steps are numbered from 0
POST /api/ban                    {"node": ID, "reason": TEXT}; header `Authorization: Bearer` and the admin token
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.metrics import HTTP_CODES, HTTP_ROUTES
from coordinator.records import StepRow
from protocol.drive.addresses import is_loopback
from protocol.drive.metrics import Metrics
from protocol.errors import BadInputError
from protocol.identity import is_node_id
from protocol.limits import TEXT_MAX
from protocol.profile import NetworkFile

STEPS_MAX = 1000
"""Rows of one answer, about 250 bytes each."""
BODY_BYTES_MAX = 4096
"""A ban is one id and one sentence."""


_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Api(Protocol):
    """What the daemon lends to the API. Called on trio's thread."""

    def status(self) -> dict[str, Any]: ...

    def network(self) -> NetworkFile: ...

    async def steps(self, first: int, count_max: int) -> Sequence[StepRow]: ...

    def ban(self, node: str, reason: str) -> None: ...


class _Ban(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    reason: str = ""


def build_app(api: Api, metrics: Metrics, *, host: str, admin_token: str) -> ASGIApp:
    """The application; `host` is where it listens."""

    async def status(request: Request) -> Response:
        return _json(api.status())

    async def network(request: Request) -> Response:
        try:
            return _json(msgspec.to_builtins(api.network()))
        except BadInputError as error:
            return _json({"error": str(error)}, 404)

    async def steps(request: Request) -> Response:
        try:
            first = int(request.query_params.get("from", "0"))
            count = int(request.query_params.get("count", str(STEPS_MAX)))
        except ValueError:
            return _json({"error": "from and count are whole numbers"}, 400)
        if not (0 <= first < 2**62 and 0 < count <= STEPS_MAX):
            return _json({"error": f"from is at least 0, count 1 to {STEPS_MAX}"}, 400)
        return _json({"steps": [msgspec.to_builtins(row) for row in await api.steps(first, count)]})

    async def ban(request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {admin_token}".encode()):
            return _json({"error": "the admin token of links.json is needed"}, 401)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_BYTES_MAX:
                return _json({"error": f"more than {BODY_BYTES_MAX} bytes"}, 400)
        try:
            order = msgspec.json.decode(body, type=_Ban)
        except msgspec.DecodeError as error:
            return _json({"error": str(error)}, 400)
        if not is_node_id(order.node) or len(order.reason) > TEXT_MAX:
            return _json({"error": "node is no node id, or the reason is too long"}, 400)
        api.ban(order.node, " ".join(order.reason.split()))
        return _json({"banned": order.node})

    async def front(request: Request) -> Response:
        """The module's own list of addresses, and where the metrics are."""
        lines = [line for line in (__doc__ or "").splitlines() if line.startswith(("GET  /api", "POST"))]
        text = "\n".join(["Barnraise coordinator", "", *lines, ""])
        return Response(text, 200, _HEADERS, "text/plain; charset=utf-8")

    routes = [
        Route("/", front, methods=["GET"]),
        Route("/api/status", status, methods=["GET"]),
        Route("/api/network", network, methods=["GET"]),
        Route("/api/steps", steps, methods=["GET"]),
        Route("/api/ban", ban, methods=["POST"]),
    ]
    return _Door(Starlette(routes=routes), metrics, loopback_only=is_loopback(host))


def _json(content: Any, code: int = 200) -> Response:
    # msgspec writes NaN and infinity as null, which is what a reader of JSON can take.
    return Response(msgspec.json.encode(content), code, _HEADERS, "application/json")


class _Door:
    """Counts and times every request, and keeps other sites' pages out of a loopback API.

    A page on the web can make the reader's browser ask 127.0.0.1 under the page's own host name (DNS rebinding), so
    on loopback only loopback's names are answered.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, *, loopback_only: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in HTTP_ROUTES else "other"
        code = "500"
        started = trio.current_time()

        async def note(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
            await send(message)

        try:
            if self._loopback_only and not is_loopback(_host_of(scope)):
                await _json({"error": "ask by a loopback name"}, 403)(scope, receive, note)
            else:
                await self._app(scope, receive, note)
        finally:
            code = code if code in HTTP_CODES else "400"
            self._metrics.record("barnraise_coordinator_http_requests_total", route=route, code=code)
            self._metrics.record(
                "barnraise_coordinator_http_request_duration_seconds", trio.current_time() - started, route=route
            )


def _host_of(scope: Scope) -> str:
    """The name in the Host header, without port and brackets."""
    for name, value in scope["headers"]:
        if name == b"host":
            host: str = value.decode("latin-1")
            if host.startswith("["):
                return host[1:].partition("]")[0]
            return host.partition(":")[0]
    return ""
