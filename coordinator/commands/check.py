"""`barnraise run check | example`: what can be found wrong, and what the run takes, before anybody joins."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import click

from protocol.run.config_file import load_run, run_example
from protocol.run.hugging_face import model_from
from protocol.run.run import RunConfig

CHECKS_GROUP = "barnraise.checks"
"""What the node's side knows of data and weights: (config) -> sentences, and the vocabulary or 0."""
COSTS_GROUP = "barnraise.costs"
"""What it knows of memory, disk and lines: (config, vocabulary) -> lines."""


def checked(config: RunConfig) -> tuple[list[str], int]:
    """What was looked at on this computer, and the vocabulary (0: not known). Raises `BadInputError`."""
    notes: list[str] = []
    vocabulary = 0
    for point in entry_points(group=CHECKS_GROUP):
        more, found = point.load()(config)
        notes += more
        vocabulary = max(vocabulary, found)
    return notes, vocabulary


@click.command()
@click.argument("run_toml", type=click.Path(path_type=Path), metavar="RUN.toml")
def check(run_toml: Path) -> None:
    """Check RUN.toml: keys, data, tokenizer and weights as far as they are here; print what the run takes."""
    config = load_run(run_toml)
    notes, vocabulary = checked(config)
    for note in notes:
        click.echo(note)
    if not vocabulary:
        click.echo("what the run takes depends on the tokenizer, which is not here")
        return
    for point in entry_points(group=COSTS_GROUP):
        for line in point.load()(config, vocabulary):
            click.echo(line)


@click.command()
@click.option(
    "--from", "source", type=click.Path(path_type=Path), metavar="FOLDER",
    help="Take the model from a Hugging Face config.json (a LLaMA's) in this folder.",
)  # fmt: skip
def example(source: Path | None) -> None:
    """Print a commented RUN.toml, with the model of an existing one if you like; its weights: model.start_from."""
    click.echo(run_example(None if source is None else model_from(source)), nl=False)
