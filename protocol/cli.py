"""The one command, `barnraise`: a click group that finds its subcommands by entry point.

Nothing of `coordinator` or `node` is imported here; a subcommand is loaded only when it is asked for, so
`barnraise plan` starts without torch and `barnraise --help` without either side.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from protocol.base.errors import BadInputError
from protocol.base.loading import loading
from protocol.base.printable import printable

ENTRY_POINT_GROUP = "barnraise.commands"


class _EntryPointGroup(click.Group):
    """A group whose commands are the entry points of `barnraise.commands`, loaded lazily."""

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._entry_points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        point = self._entry_points().get(cmd_name)
        if point is None:
            return None
        with loading():
            command = point.load()
        assert isinstance(command, click.Command), f"{point.value} is not a click command"
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BadInputError as error:
            raise _BadInputExit(str(error)) from error


class _BadInputExit(click.ClickException):
    """The sentence of a `BadInputError`, printed bare, with the exit code of a usage error."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        text = printable(self.message, keep="\n")
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns
            text = "\n".join(
                textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
                for line in text.split("\n")
            )
        click.echo(text, err=True)


@click.command(cls=_EntryPointGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="barnraise", prog_name="barnraise")
def main() -> None:
    """Train large language models on computers that people lend."""


if __name__ == "__main__":
    main()
