"""Numbers that are none, in every option that takes one."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from protocol.cli import main


def numbers_of(command: click.Command, words: str = "") -> Iterator[tuple[str, click.Parameter]]:
    """All options below a command that take a number within bounds."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from numbers_of(below, f"{words} {name}".strip())
    for option in command.params:
        if isinstance(option.type, click.FloatRange):
            yield f"{words} {option.opts[-1]}", option


NUMBERS = dict(numbers_of(main))


@pytest.mark.parametrize("option", NUMBERS)
def test_nan_and_infinity_are_no_numbers(option: str) -> None:
    """They pass every comparison of a range, or its open end, and were a traceback wherever one was counted with."""
    for text in ("nan", "-nan", "inf", "1e999"):
        with pytest.raises(click.BadParameter, match=r"is not (a finite number|in the range)"):
            NUMBERS[option].type.convert(text, NUMBERS[option], None)


def test_the_command_line_names_the_option() -> None:
    """With the exit code of all bad input."""
    done = CliRunner().invoke(main, ["plan", "compare", "NETWORK.json", "--budget-s", "nan"])
    assert done.exit_code == 2 and "'--budget-s': nan is not a finite number" in done.output, done.output
