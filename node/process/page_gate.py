"""The door of the pages on loopback: who is let in, and how they are served.

Only the owner gets in: the address holds a token that becomes a cookie, which no other page can use (SameSite), and
requests must name this very host and origin, so that neither another page in the browser, nor a name that somebody
points at 127.0.0.1, nor another user of the computer is answered. It listens on loopback only.
"""

from __future__ import annotations

import hmac
import json
import secrets
from contextlib import aclosing
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from protocol.base.errors import BadInputError
from protocol.drive.durable import replace_durably
from protocol.drive.process import listening_socket
from protocol.drive.web import serve_app

PORT = 8468
"""The same place at each start where it is free: below the ports of a coordinator (8469 to 8471) and those at which
daemons answer Prometheus (counted up from 8472), of which the third server on a computer had taken it."""
BODY_BYTES_MAX = 16 << 10
BODY_S = 10.0
"""An order is said at once. The server itself sets no time between two bytes of a browser: one that listens to events
says nothing for hours. Whoever has not said what it wants is let go after five seconds (hypercorn's own rule)."""
COOKIE = "barnraise"
"""Its name, with the port after it: browsers keep one jar for all ports of a host, so two lent runs on a computer would
otherwise take each other's."""
COOKIE_S = 400 * 86400
"""As long as browsers keep one: a bookmark of the page opens it after the browser was closed, too."""
PLACE_FILE = "page.json"
OPEN_THE_ADDRESS = "open the address that `barnraise status` shows"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Gate:
    """Answers for one token.

    Args:
        names: the files that a page consists of; the first is its `/`.
        once: another token, which opens it once: whoever starts a browser shows the address to all users of the
            computer, in the list of its processes, and a moment later it is of no use to them.
    """

    def __init__(self, token: str, names: tuple[str, ...], once: str = "") -> None:
        self._token = token
        self._once = once
        self._index = names[0]
        self._texts = {name: files("node.owner.page").joinpath(name).read_text(encoding="utf-8") for name in names}

    def refusal(self, request: Request) -> Response | None:
        """Why this request is not answered, or None: host, origin, and the owner's cookie are looked at."""
        server = request.scope.get("server") or ("", 0)
        hosts = {f"127.0.0.1:{server[1]}", f"localhost:{server[1]}"}
        if request.headers.get("host", "") not in hosts:
            return PlainTextResponse("this page answers on 127.0.0.1 only", 403, HEADERS)
        origin = request.headers.get("origin")
        if origin is not None and origin not in {f"http://{host}" for host in hosts}:
            return PlainTextResponse("another page may not ask this one", 403, HEADERS)
        if not self._opens(request.cookies.get(f"{COOKIE}-{server[1]}", "")):
            return PlainTextResponse(OPEN_THE_ADDRESS, 403, HEADERS)
        return None

    def _opens(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())

    async def enter(self, request: Request) -> Response:
        """The owner's address: the token becomes a cookie, and leaves the address bar. A browser that has it already,
        and loads the address of before once more, is let in by that."""
        given = str(request.path_params["token"])
        _, port = request.scope.get("server") or ("", 0)
        is_first = bool(self._once) and hmac.compare_digest(given.encode(), self._once.encode())
        if not (is_first or self._opens(given) or self._opens(request.cookies.get(f"{COOKIE}-{port}", ""))):
            return PlainTextResponse(OPEN_THE_ADDRESS, 403, HEADERS)
        if is_first:
            self._once = ""
        response = RedirectResponse("/", 303, HEADERS)
        response.set_cookie(f"{COOKIE}-{port}", self._token, COOKIE_S, httponly=True, samesite="strict")
        return response

    async def file(self, request: Request) -> Response:
        name = request.url.path.removeprefix("/") or self._index
        kind = f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        return self.refusal(request) or Response(self._texts[name], 200, HEADERS, kind)

    async def order(self, request: Request) -> dict[str, Any] | Response:
        """What the page orders, or why it is not listened to. Raises `BadInputError`."""
        refused = self.refusal(request)
        if refused is not None:
            return refused
        if request.headers.get("content-type", "") != "application/json" or "origin" not in request.headers:
            return PlainTextResponse("orders come from the page", 403, HEADERS)
        body = b""
        with trio.move_on_after(BODY_S) as patience:
            async with aclosing(request.stream()) as stream:
                async for chunk in stream:
                    body += chunk
                    if len(body) > BODY_BYTES_MAX:
                        raise BadInputError(f"more than {BODY_BYTES_MAX} bytes")
        if patience.cancelled_caught:
            raise BadInputError("not an order: its end did not come")
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"not an order: {error}") from None
        if not isinstance(asked, dict):
            raise BadInputError("not an order")
        return asked


async def serve(nursery: trio.Nursery, app: Any, token: str, *ports: int) -> str:
    """Serves an application below `nursery`; returns the owner's address.

    `ports`: the first of them that is free is taken, before the usual one; 0: none.
    """
    listening = listening_socket("127.0.0.1", (*filter(None, ports), PORT, 0))
    url: str = await nursery.start(partial(serve_app, app, listening, read_s=None))
    return f"{url}/enter/{token}"


class Place(msgspec.Struct, frozen=True):
    """Where a lent run's page was: at the next start it is there again, for its owner's bookmark and open tab."""

    token: str = ""
    port: int = 0
    """Where it first was, which is always tried first: another program may have it once, and be gone the next time."""
    second: int = 0
    """Where it was last when that was not free."""


def kept_place(state: Path) -> Place:
    """What lies in a state folder; nothing where it cannot be read."""
    try:
        return msgspec.json.decode((state / PLACE_FILE).read_bytes(), type=Place)
    except (OSError, msgspec.MsgspecError):
        return Place()


def keep_place(state: Path, address: str) -> None:
    """For this computer's owner alone: the address opens the page. Raises `OSError`."""
    _, _, host, _, token = address.split("/")
    kept, now = kept_place(state), int(host.rpartition(":")[2])
    first = kept.port or now
    place = Place(token, first, kept.second if now == first else now)
    replace_durably(state / PLACE_FILE, msgspec.json.encode(place), 0o600)
