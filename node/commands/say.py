"""Prints for whoever is there: on a terminal broken between words to its width, elsewhere as it is."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from protocol.base.printable import wrapped


def columns() -> int:
    """The terminal's width; 80 where there is none."""
    return shutil.get_terminal_size().columns


def shown_path(path: Path) -> str:
    """As people write it: a terminal of 80 columns breaks `/home/somebody/.local/state/…` in two."""
    home = Path.home()
    if os.name == "posix" and path != home and path.is_relative_to(home):
        return f"~/{path.relative_to(home)}"
    return str(path)


def say(text: str) -> None:
    click.echo(wrapped(text, columns()) if sys.stdout.isatty() else text)
