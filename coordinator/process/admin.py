"""What only the operator may ask of the API: changes of the run, bans, invites. Each request shows the admin token of
links.json."""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.live.orders import Adopt, CloseInvite, Order, Unban
from coordinator.live.tracing import SECONDS_MAX
from coordinator.process.store import StoredInvite
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.limits import TEXT_MAX
from protocol.run.changes import RunChange
from protocol.trust.identity import base32, is_node_id
from protocol.trust.membership import JoinLink, JoinRole

BODY_BYTES_MAX = 4096
"""An order is an id and a sentence."""
USES_MAX = 100_000
DAYS_MAX = 3660.0
WRONG_MAX = 10
"""Wrong tokens within `WRONG_S` after which further ones are sent away unread."""
WRONG_S = 60.0
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class AdminApi(Protocol):
    """What the daemon lends to these routes. Called on trio's thread."""

    async def order(self, order: Order) -> None:
        """Orders something; returns when it survives a crash. Raises `BadInputError`."""
        ...

    async def ban(self, node: NodeId, reason: str, lineage: bool) -> tuple[NodeId, ...]:
        """Orders that nobody believes a node any more, or who came by the same invite; returns whom. Raises
        `BadInputError`."""
        ...

    async def change(self, key: str, value: str) -> RunChange:
        """Orders a change of the run; returns when its plan is durable. Raises `BadInputError`."""
        ...

    async def pause(self, paused: bool) -> None:
        """Orders that no step is opened, or that they are again. Raises `BadInputError`."""
        ...

    async def replan(self, settings: list[str]) -> tuple[RunChange, str]:
        """Orders another layout; returns when the run is held for it, and why it is so if a planner was asked. Raises
        `BadInputError`."""
        ...

    def drain(self, node: NodeId, reason: str) -> str:
        """Orders that a member ends what it has and goes. Returns why not, or nothing."""
        ...

    async def name(self, node: NodeId, name: str) -> str:
        """Orders that a node is called so; returns the name as it stands. Raises `BadInputError`."""
        ...

    async def roll_back(self, step: int) -> int:
        """Sends the run back to a checkpoint; returns how many steps are done again. Raises `BadInputError`."""
        ...

    async def void(self, node: NodeId, reason: str, lineage: bool, from_start: bool) -> dict[str, Any]:
        """Bans a member (or all who came by its invite) and goes back to before it came. Raises `BadInputError`."""
        ...

    async def voided(self) -> bytes:
        """What was undone so far, signed (`protocol.trust.voided`)."""
        ...

    async def trace(self, seconds: float) -> dict[str, Any]:
        """What everybody did in the last seconds, and what was predicted. Raises `BadInputError`."""
        ...

    def credit(self) -> bytes:
        """The ledger of credit, signed (`protocol.trust.credit`)."""
        ...

    async def invites(self) -> Sequence[StoredInvite]: ...

    async def invite(self, role: JoinRole, uses: int, days: float) -> tuple[StoredInvite, JoinLink]: ...


class _Ban(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    reason: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)] = ""
    lineage: bool = False


class _Void(_Ban, forbid_unknown_fields=True):
    from_start: bool = False


class _Drain(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    reason: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)] = ""


class _Name(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    name: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]


class _Unban(msgspec.Struct, forbid_unknown_fields=True):
    node: str


class _Invite(msgspec.Struct, forbid_unknown_fields=True):
    role: JoinRole = "volunteer"
    uses: Annotated[int, msgspec.Meta(ge=1, le=USES_MAX)] = 1
    days: Annotated[float, msgspec.Meta(gt=0, le=DAYS_MAX)] = 7.0


class _Uninvite(msgspec.Struct, forbid_unknown_fields=True):
    invite: str


class _Set(msgspec.Struct, forbid_unknown_fields=True):
    key: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
    value: Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]


class _Replan(msgspec.Struct, forbid_unknown_fields=True):
    settings: Annotated[list[Annotated[str, msgspec.Meta(max_length=1024)]], msgspec.Meta(min_length=1, max_length=16)]


class _Pause(msgspec.Struct, forbid_unknown_fields=True):
    paused: bool


class _Adopt(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _RollBack(msgspec.Struct, forbid_unknown_fields=True):
    step: Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class _Trace(msgspec.Struct, forbid_unknown_fields=True):
    seconds: Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX)] = 30.0


_Order = TypeVar(
    "_Order", _Ban, _Void, _Drain, _Name, _Unban, _Invite, _Uninvite, _Set, _Replan, _Pause, _RollBack, _Adopt, _Trace
)


def answer(content: Any, code: int = 200) -> Response:
    """JSON; msgspec writes NaN and infinity as null, which is what a reader of JSON can take."""
    return Response(msgspec.json.encode(content), code, HEADERS, "application/json")


class Guard:
    """Knows the token, compares in constant time, and reads no more of those who guess.

    The token has 128 random bits: the limit keeps guessing cheap for us, and visible. The right token always counts,
    so nobody can lock the operator out.
    """

    def __init__(self, token: str, refused: Callable[[], None]) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refused = refused
        self._wrong: deque[float] = deque(maxlen=WRONG_MAX)

    def refusal(self, request: Request) -> Response | None:
        """The answer to who may not; None for the operator."""
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), self._expected):
            return None
        self._refused()
        now = trio.current_time()
        if len(self._wrong) == WRONG_MAX and now - self._wrong[0] < WRONG_S:
            return answer({"error": "too many wrong tokens; try again in a minute"}, 429)
        self._wrong.append(now)
        return answer({"error": "the admin token of links.json is needed"}, 401)


def admin_routes(api: AdminApi, admin_token: str, refused: Callable[[], None]) -> list[Route]:
    """Routes that answer 401 without the token (`refused` counts it), 400 with a sentence to what they cannot read."""

    guard = Guard(admin_token, refused)

    def taking(kind: type[_Order], do: Callable[[_Order], Awaitable[Response]]) -> Any:
        async def route(request: Request) -> Response:
            if no := guard.refusal(request):
                return no
            body = b""
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES_MAX:
                    return answer({"error": f"more than {BODY_BYTES_MAX} bytes"}, 400)
            try:
                order = msgspec.json.decode(body, type=kind)
            except msgspec.DecodeError as error:
                return answer({"error": str(error)}, 400)
            if isinstance(order, _Ban | _Unban | _Drain | _Name) and not is_node_id(order.node):
                return answer({"error": "node is no node id"}, 400)
            try:
                return await do(order)
            except BadInputError as error:
                return answer({"error": str(error)}, 400)

        return route

    async def ban(order: _Ban) -> Response:
        reason = " ".join(order.reason.split()) or "by the operator"
        nodes = await api.ban(NodeId(order.node), reason, order.lineage)
        return answer({"banned": nodes})

    async def drain(order: _Drain) -> Response:
        reason = " ".join(order.reason.split()) or "by the operator"
        if no := api.drain(NodeId(order.node), reason):
            return answer({"error": f"{order.node[:8]}: {no}"}, 400)
        return answer({"drained": order.node})

    async def name(order: _Name) -> Response:
        taken = await api.name(NodeId(order.node), order.name)
        return answer({"node": order.node, "name": taken})

    async def unban(order: _Unban) -> Response:
        await api.order(Unban(NodeId(order.node)))
        return answer({"unbanned": order.node})

    async def credit(request: Request) -> Response:
        return guard.refusal(request) or Response(api.credit(), 200, HEADERS, "application/json")

    async def invites(request: Request) -> Response:
        if no := guard.refusal(request):
            return no
        return answer({"invites": [_shown(invite) for invite in await api.invites()]})

    async def invite(order: _Invite) -> Response:
        made, link = await api.invite(order.role, order.uses, order.days)
        return answer({**_shown(made), "link": str(link)})

    async def uninvite(order: _Uninvite) -> Response:
        found = [one for one in await api.invites() if base32(one.nonce) == order.invite]
        if not found:
            return answer({"error": "there is no such invite"}, 404)
        await api.order(CloseInvite(found[0].nonce))
        return answer({"closed": order.invite})

    async def set_key(order: _Set) -> Response:
        change = await api.change(order.key, order.value)
        return answer({"key": change.key, "value": change.value})

    async def replan(order: _Replan) -> Response:
        change, reason = await api.replan(order.settings)
        return answer({"key": change.key, "value": change.value, "reason": reason})

    async def pause(order: _Pause) -> Response:
        await api.pause(order.paused)
        return answer({"paused": order.paused})

    async def roll_back(order: _RollBack) -> Response:
        lost_steps = await api.roll_back(order.step)
        return answer({"step": order.step, "lost_steps": lost_steps})

    async def void(order: _Void) -> Response:
        reason = " ".join(order.reason.split()) or "by the operator: what it gave is void"
        done = await api.void(NodeId(order.node), reason, order.lineage, order.from_start)
        return answer(done)

    async def voided(request: Request) -> Response:
        return guard.refusal(request) or Response(await api.voided(), 200, HEADERS, "application/json")

    async def adopt(order: _Adopt) -> Response:
        await api.order(Adopt())
        return answer({"adopting": True})

    async def trace(order: _Trace) -> Response:
        found = await api.trace(order.seconds)
        return answer(found)

    return [
        Route("/api/adopt", taking(_Adopt, adopt), methods=["POST"]),
        Route("/api/trace", taking(_Trace, trace), methods=["POST"]),
        Route("/api/replan", taking(_Replan, replan), methods=["POST"]),
        Route("/api/rollback", taking(_RollBack, roll_back), methods=["POST"]),
        Route("/api/void", taking(_Void, void), methods=["POST"]),
        Route("/api/voided", voided, methods=["GET"]),
        Route("/api/set", taking(_Set, set_key), methods=["POST"]),
        Route("/api/pause", taking(_Pause, pause), methods=["POST"]),
        Route("/api/drain", taking(_Drain, drain), methods=["POST"]),
        Route("/api/name", taking(_Name, name), methods=["POST"]),
        Route("/api/ban", taking(_Ban, ban), methods=["POST"]),
        Route("/api/unban", taking(_Unban, unban), methods=["POST"]),
        Route("/api/credit", credit, methods=["GET"]),
        Route("/api/invites", invites, methods=["GET"]),
        Route("/api/invite", taking(_Invite, invite), methods=["POST"]),
        Route("/api/uninvite", taking(_Uninvite, uninvite), methods=["POST"]),
    ]


def _shown(invite: StoredInvite) -> dict[str, Any]:
    """An invite as the API shows it; without the link, which is a secret until somebody has come by it."""
    return {
        "invite": base32(invite.nonce),
        "role": invite.role,
        "uses": invite.uses,
        "used": invite.spent,
        "not_after": invite.not_after,
        "closed": invite.closed,
    }
