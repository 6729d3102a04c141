"""The coordinator's HTTP API: the live page, the run's state as JSON, and its operator's orders. Loopback by default.

GET  /                           the live page (`coordinator.process.page`)
GET  /api                        the addresses below, for people
GET  /api/status                 everything that the machine knows (`coordinator.live.status`)
GET  /api/network                what is measured of the links, as a NETWORK.json for `barnraise plan`
GET  /api/sd                     whom Prometheus should scrape (http_sd_configs)
GET  /api/steps?from=N&count=M   closed steps from N on, at most 1000; steps are numbered from 0
GET  /api/credit                 what members gave, signed (`run credit`)
GET  /api/voided                 what was undone, signed (`run voided`)
POST /api/set                    {"key": KEY, "value": TEXT}: a key of the run changes
POST /api/replan                 {"settings": ["KEY=VALUE", ...]}: a running job is laid out anew, perhaps by a planner
POST /api/pause                  {"paused": BOOL}: no step is opened, or they are again
POST /api/rollback               {"step": N}: the run goes back to a checkpoint
POST /api/void                   {"node": ID, "reason": TEXT, "lineage": BOOL, "from_start": BOOL}: its sums are undone
POST /api/adopt                  {}: what servers know is taken over, though some are missing
POST /api/drain                  {"node": ID, "reason": TEXT}: it goes in peace; not a server with a place
POST /api/name                   {"node": ID, "name": TEXT}: what people call it
POST /api/ban                    {"node": ID, "reason": TEXT, "lineage": BOOL}
POST /api/unban                  {"node": ID}
GET  /api/invites                every invite, how often it was used, and whether it is closed
POST /api/invite                 {"role": "volunteer", "server" or "auditor", "uses": N, "days": D}: a new join link
POST /api/uninvite               {"invite": ID}: nobody joins by it any more
POST /api/trace                  {"seconds": S}: what everybody did in the last seconds, beside what was predicted

All from `/api/credit` on want the header `Authorization: Bearer` with the admin token of links.json; `barnraise run`
sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.live.records import StepRow
from coordinator.process.admin import HEADERS, AdminApi, admin_routes, answer
from coordinator.process.metrics import HTTP_CODES, HTTP_ROUTES
from coordinator.process.page import Page, PageApi
from protocol.base.errors import BadInputError
from protocol.drive.addresses import is_loopback
from protocol.drive.metrics import Metrics
from protocol.schedule.profile import NetworkFile

STEPS_MAX = 1000
"""Rows of one answer, about 250 bytes each."""


class Api(AdminApi, PageApi, Protocol):
    """What the daemon lends to the API. Called on trio's thread."""

    def status(self) -> dict[str, Any]: ...

    def network(self) -> NetworkFile: ...

    def scrape_targets(self) -> list[dict[str, Any]]: ...

    async def steps(self, first: int, count_max: int) -> Sequence[StepRow]: ...


def build_app(api: Api, metrics: Metrics, *, host: str, admin_token: str) -> ASGIApp:
    """The application; `host` is where it listens."""

    async def status(request: Request) -> Response:
        return answer(api.status())

    async def network(request: Request) -> Response:
        try:
            return answer(msgspec.to_builtins(api.network()))
        except BadInputError as error:
            return answer({"error": str(error)}, 404)

    async def discover(request: Request) -> Response:
        return answer(api.scrape_targets())

    async def steps(request: Request) -> Response:
        try:
            first = int(request.query_params.get("from", "0"))
            count = int(request.query_params.get("count", str(STEPS_MAX)))
        except ValueError:
            return answer({"error": "from and count are whole numbers"}, 400)
        if not (0 <= first < 2**62 and 0 < count <= STEPS_MAX):
            return answer({"error": f"from is at least 0, count 1 to {STEPS_MAX}"}, 400)
        return answer({"steps": [msgspec.to_builtins(row) for row in await api.steps(first, count)]})

    async def front(request: Request) -> Response:
        """The module's own list of addresses, and where the metrics are."""
        lines = [line for line in (__doc__ or "").splitlines() if line.startswith(("GET  /api", "POST"))]
        text = "\n".join(["Barnraise coordinator", "", *lines, ""])
        return Response(text, 200, HEADERS, "text/plain; charset=utf-8")

    routes = [
        *Page(api, operator=True).routes(),
        Route("/api", front, methods=["GET"]),
        Route("/api/status", status, methods=["GET"]),
        Route("/api/network", network, methods=["GET"]),
        Route("/api/sd", discover, methods=["GET"]),
        Route("/api/steps", steps, methods=["GET"]),
        *admin_routes(api, admin_token, lambda: metrics.record("barnraise_coordinator_admin_refused_total")),
    ]
    return _Door(Starlette(routes=routes), metrics, loopback_only=is_loopback(host))


def build_public_app(api: PageApi, metrics: Metrics) -> ASGIApp:
    """The page alone, for an address that everybody may read: no orders, no whole ids, no addresses."""
    return _Door(Starlette(routes=Page(api, operator=False).routes()), metrics, loopback_only=False)


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
        path = "/page" if scope["path"].startswith("/page/") else scope["path"]
        route = path if path in HTTP_ROUTES else "other"
        code = "500"
        started = trio.current_time()

        async def note(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
            await send(message)

        try:
            if self._loopback_only and not is_loopback(_host_of(scope)):
                await answer({"error": "ask by a loopback name"}, 403)(scope, receive, note)
            else:
                await self._app(scope, receive, note)
        finally:
            code = code if code in HTTP_CODES else "400"
            self._metrics.record("barnraise_coordinator_http_requests_total", route=route, code=code)
            if scope["path"] != "/page/events":  # a stream lasts as long as its reader looks
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
