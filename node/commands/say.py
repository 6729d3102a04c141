"""Prints for whoever is there: on a terminal broken between words to its width, elsewhere as it is."""

from __future__ import annotations

import shutil
import sys

import click

from protocol.base.printable import wrapped


def columns() -> int:
    """The terminal's width; 80 where there is none."""
    return shutil.get_terminal_size().columns


def say(text: str) -> None:
    click.echo(wrapped(text, columns()) if sys.stdout.isatty() else text)
