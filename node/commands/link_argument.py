"""The join link of `barnraise server`, `join` and `netcheck`: on the line, in a file, in the environment, or asked for.

What stands on a command line is shown to every user of the computer by the process list, and kept by the shell's
history. A volunteers' link is often public; a servers' link is a secret, so there are ways without the line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from protocol.base.errors import BadInputError
from protocol.trust.membership import LINK_CHARACTERS_MAX, LINK_SCHEME, JoinLink

NAME_MAX = 100
"""What is longer is no name of a file that is missing, but a damaged link: a secret that no screen shows."""
LINK_VARIABLE = "BARNRAISE_LINK"
"""The environment variable that is read when no link stands on the line; a process removes it once it is read."""


def link_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """The argument LINK of a command; hand it to `parse_link`, which also looks where else a link may be."""
    return click.argument("link", required=False, metavar="LINK")(command)


def parse_link(given: str | None, role: str) -> JoinLink:
    """The link of the command line; raises `BadInputError` when it is damaged or for the other kind of node."""
    link = JoinLink.parse(link_text(given))
    if link.role != role:
        command = {"server": "barnraise server", "volunteer": "barnraise join", "auditor": "barnraise audit"}[link.role]
        where = (
            "`barnraise run invite --role auditor` prints" if role == "auditor" else "the coordinator prints beside it"
        )
        raise BadInputError(
            f"join link: this one is for {link.role}s (`{command}`); here the one for {role}s is needed, which {where}"
        )
    return link


def link_text(given: str | None) -> str:
    """The text of the link: what was `given`, or the first line of the file of that name, or of standard input for
    `-`; without it `BARNRAISE_LINK`, and on a terminal a question. Raises `BadInputError`."""
    if given is None:
        given = os.environ.pop(LINK_VARIABLE, None)
        if given is None and sys.stdin.isatty():
            given = str(click.prompt("The join link", prompt_suffix=": ", hide_input=True))
        if given is None:
            raise BadInputError(
                f"join link: none is given; name it, or a file that holds it, or `-` to read it from standard input, "
                f"or set {LINK_VARIABLE}"
            )
    if given == "-":
        return sys.stdin.readline(LINK_CHARACTERS_MAX + 1)
    if given.startswith(LINK_SCHEME):
        return given
    if not _is_file(given):
        if not given or len(given) > NAME_MAX:
            return given
        raise BadInputError(
            f"join link: there is no file {given!r} here; a link itself starts with {LINK_SCHEME}, as the coordinator "
            "prints it"
        )
    try:
        with Path(given).open(encoding="utf-8") as file:
            return file.readline(LINK_CHARACTERS_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadInputError(f"join link: {given} cannot be read: {reason}") from None


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a NUL in it
        return False
