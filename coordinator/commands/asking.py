"""How a command asks a running coordinator's API for what only its operator may: with the admin token."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import click

from coordinator.commands.status import ANSWER_S, DEFAULT_URL, answer_to, fetch
from protocol.base.errors import BadInputError
from protocol.drive.addresses import is_loopback

ANSWER_BYTES_MAX = 64 << 20
"""200,000 spans of 32 bytes as base64, measured and predicted, are 17 MB."""


def asking(command: Any) -> Any:
    """The options of every order: where the coordinator is, and the file that proves the operator."""
    command = click.option(
        "--links", type=click.Path(path_type=Path, dir_okay=False),
        help="The coordinator's links.json, which holds the admin token. [default: asked of a local coordinator]",
    )(command)  # fmt: skip
    return click.option(
        "--url", default=DEFAULT_URL, show_default=True, metavar="URL", help="The coordinator's status API."
    )(command)


def base_of(url: str) -> str:
    """The API's address without what people paste behind it."""
    return url.rstrip("/").removesuffix("/api/status")


def token_of(base: str, links: Path | None) -> str:
    """The admin token, from the file that the coordinator wrote for its owner. Raises `BadInputError`.

    Whoever answers at an address may name any file of this computer. Its token goes to the coordinator that wrote it
    alone: to this computer, and to the very address that stands in the file.
    """
    status = fetch(f"{base}/api/status")  # also says what is wrong with the address
    named = None
    if links is None:
        named = status.get("links_file")
        if not named or not is_loopback(urllib.parse.urlsplit(base).hostname or ""):
            raise BadInputError(f"{base}: this coordinator is not on this computer; name its links.json with --links")
        links = Path(str(named))
    try:
        papers = json.loads(links.read_text())
        token, home = str(papers["admin_token"]), papers["http"] if named is not None else base
    except OSError as error:
        raise BadInputError(f"{links}: {error.strerror or error}; the coordinator's owner can read it") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{links}: not a coordinator's links.json") from error
    if home != base:
        raise BadInputError(
            f"{base}: what answers there names {links}, which is of the coordinator at {home}: ask that with --url, or"
            " name the file with --links"
        )
    return token


def post(
    base: str, links: Path | None, what: str, order: dict[str, Any], patience_s: float = ANSWER_S
) -> dict[str, Any]:
    """Orders something. Raises `BadInputError` with what the API says."""
    return ask(base, links, what, json.dumps(order).encode(), patience_s)


def ask(base: str, links: Path | None, what: str, body: bytes | None, patience_s: float = ANSWER_S) -> dict[str, Any]:
    """The API's answer to an order (with `body`) or a question. Raises `BadInputError` with what it says."""
    url = f"{base}/api/{what}"
    headers = {"Authorization": f"Bearer {token_of(base, links)}"}
    request = urllib.request.Request(url, data=body, headers=headers)  # noqa: S310 - `fetch` checked the scheme
    text = answer_to(request, patience_s, ANSWER_BYTES_MAX)
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise BadInputError(f"{url}: the answer is none of a coordinator") from error
    return found
