"""Asking a home router to forward a port, in the words of UPnP (Internet Gateway Device, versions 1 and 2). Pure.

Only the router itself is listened to: whatever it points to must be at its own address. What it says is short and is
searched with string functions; no XML parser, hence no entity and no document type, ever sees it. The usual library,
miniupnpc, reads in C whatever any device at home says, in our process and with no bound on its time: it is not used.
"""

from __future__ import annotations

import html
import ipaddress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from protocol.base.errors import RemoteProtocolError

SEARCH_AT = ("239.255.255.250", 1900)
ANSWER_BYTES_MAX = 4096
"""Of an answer to a search: a handful of headers."""
REPLY_BYTES_MAX = 128 << 10
"""Of a description or an answer to a request; descriptions of large home routers take 20 KB."""
SERVICES = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)
"""What forwards ports, best first."""
CONFLICT = 718
"""Somebody else has that port."""

_ERRORS = {
    501: "could not do it",
    606: "does not allow it",
    CONFLICT: "has given that port to another computer",
    725: "forwards only for ever, and nobody would end that after a crash",
    728: "has no room for more",
}
_TEXT_MAX = 512


class RefusedError(Exception):
    """The router answers with an error; `code` is UPnP's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the router {_ERRORS.get(code, f'answers with error {code}')}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Place:
    """Something at the router, reached by HTTP."""

    port: int
    path: str


@dataclass(frozen=True, slots=True)
class Service:
    """What forwards ports."""

    kind: str
    place: Place


def search() -> bytes:
    """Is there a gateway? Version 2 answers to version 1's name, too."""
    return (
        f"M-SEARCH * HTTP/1.1\r\nHOST: {SEARCH_AT[0]}:{SEARCH_AT[1]}\r\n"
        'MAN: "ssdp:discover"\r\nMX: 1\r\nST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n\r\n'
    ).encode()


def read_location(answer: bytes, router: str) -> Place:
    """Where the router describes itself. Raises `RemoteProtocolError`."""
    lines = answer.decode("latin-1").split("\r\n")
    if not lines[0].startswith("HTTP/1.1 200"):
        raise RemoteProtocolError("decode", "an answer to a search that is none")
    for line in lines[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "location":
            return _place(value.strip(), router, None)
    raise RemoteProtocolError("decode", "the router does not say where it describes itself")


def read_description(reply: bytes, router: str, described_at: Place) -> Service:
    """What forwards ports there. Raises `RemoteProtocolError`."""
    text = reply.decode("utf-8", "replace")
    found: dict[str, str] = {}
    for block in text.split("<service>")[1:]:
        inside = block.partition("</service>")[0]
        found.setdefault(_tag(inside, "serviceType"), _tag(inside, "controlURL"))
    for kind in SERVICES:
        if found.get(kind):
            return Service(kind, _place(found[kind], router, described_at))
    raise RemoteProtocolError("unexpected", "the router offers no service that forwards ports")


def order(service: Service, action: str, **fields: str | int) -> tuple[list[tuple[str, str]], bytes]:
    """(headers, body) of a request."""
    inside = "".join(f"<{name}>{html.escape(str(value))}</{name}>" for name, value in fields.items())
    body = (
        '<?xml version="1.0"?>\r\n<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
        f'<u:{action} xmlns:u="{service.kind}">{inside}</u:{action}></s:Body></s:Envelope>\r\n'
    ).encode()
    return [("Content-Type", 'text/xml; charset="utf-8"'), ("SOAPAction", f'"{service.kind}#{action}"')], body


def read_reply(status: int, reply: bytes) -> str:
    """The text of an answer that is no refusal. Raises `RefusedError`, `RemoteProtocolError`."""
    text = reply.decode("utf-8", "replace")
    if status == 200:
        return text
    code = _tag(text, "errorCode")
    if code.isascii() and code.isdecimal() and len(code) <= 5:
        raise RefusedError(int(code))
    raise RemoteProtocolError("unexpected", f"the router answers with HTTP status {status}")


def read_address(text: str) -> ipaddress.IPv4Address:
    """The router's outer address. Raises `RemoteProtocolError`."""
    try:
        return ipaddress.IPv4Address(_tag(text, "NewExternalIPAddress"))
    except ValueError:
        raise RemoteProtocolError("decode", "the router does not say its outer address") from None


def _tag(text: str, name: str) -> str:
    """What stands between <name> and </name>, the first time; nothing when it is too long to be it."""
    rest = text.partition(f"<{name}>")[2]
    inside, end, _ = rest[: _TEXT_MAX + len(name) + 3].partition(f"</{name}>")
    return html.unescape(inside.strip()) if end else ""


def _place(url: str, router: str, base: Place | None) -> Place:
    """A URL of the router, perhaps relative to where it describes itself. Raises `RemoteProtocolError`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    path = (parts.path if parts.path.startswith("/") else f"/{parts.path}") + (f"?{parts.query}" if parts.query else "")
    sound = len(url) <= _TEXT_MAX and url.isascii() and url.isprintable() and " " not in url
    if sound and parts.scheme == "http" and parts.hostname == router:
        return Place(port or 80, path)
    if sound and base is not None and not parts.scheme and not parts.netloc and parts.path:
        return Place(base.port, path)
    raise RemoteProtocolError("unexpected", "the router points to something that is not its own")
