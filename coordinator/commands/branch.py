"""`barnraise run branch`: another run that begins where a checkpoint of this one stands, with another configuration."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.commands.written import write_file
from protocol.base.errors import BadInputError
from protocol.drive.folders import check_writable
from protocol.drive.place_argument import PlaceArgument
from protocol.run.config_file import change_run, load_run, run_example
from protocol.run.run import RunConfig

EXPORT_GROUP = "barnraise.commands"
"""Where the command of the node's side stands that reads checkpoints."""
_TOKENIZER = "tokenizer.json"
"""In an exported folder and in a prepared one."""


@click.command()
@click.argument("run_toml", type=click.Path(path_type=Path, dir_okay=False), metavar="RUN.toml")
@click.argument("new_toml", type=click.Path(path_type=Path, dir_okay=False), metavar="NEW.toml")
@click.argument("checkpoints", type=PlaceArgument(), nargs=-1, required=True)
@click.option("--step", type=click.IntRange(0), help="Which checkpoint [default: the newest that is complete].")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE",
    help="What is other in the new run, as in RUN.toml; its name at least. May be repeated.",
)  # fmt: skip
@click.option(
    "--model", type=click.Path(path_type=Path, file_okay=False),
    help="The folder for the weights; it must be new. [default: the new run's name, beside NEW.toml]",
)  # fmt: skip
@click.pass_context
def branch(
    ctx: click.Context,
    run_toml: Path,
    new_toml: Path,
    checkpoints: tuple[Path | str, ...],
    step: int | None,
    settings: tuple[str, ...],
    model: Path | None,
) -> None:
    """Write NEW.toml: a run that begins with the weights of a checkpoint of RUN.toml's, and is another one else.

    CHECKPOINTS is what `barnraise export` takes. Batches, stages, data, wire: all may be other but the model's shape
    and its tokenizer; one that was trained on RUN.toml's text (bpe:SIZE) is kept for other text. The optimizer's
    moments begin anew, so leave the new run a warm-up; and its data begins at the first sample, so give it another
    seed (--set seed=2) where it is the same.
    """
    old = load_run(run_toml)
    new = branched(old, settings)
    folder = (new_toml.parent / new.name if model is None else model).absolute()
    check_writable("NEW.toml", new_toml, new_toml.parent)  # before some minutes are spent on the weights
    check_writable("--model", folder, folder.parent)
    if new_toml.exists():
        raise BadInputError(f"NEW.toml: {new_toml} is there already, and is not written over")
    if folder.exists():
        raise BadInputError(f"--model: {folder} is there already, and is not written over")
    new = with_weights(old, new, folder)
    export = next(point for point in entry_points(group=EXPORT_GROUP) if point.name == "export").load()
    ctx.invoke(export, out=folder, checkpoints=checkpoints, step=step, link=None)
    write_file("NEW.toml", new_toml, run_example(values=new), makes_folder=True)
    click.echo(f"{new_toml}: the run {new.name}, which begins with these weights")
    click.echo(f"servers of stage 0 must be lent the folder: barnraise server --data {folder} LINK")
    if new.data.tokenizer == "prepared" and _tokenizer_in(new.data.source) is None:
        click.echo(
            f"{new.data.source} is not here: it must be prepared with these weights' tokenizer, barnraise data prepare"
            f" --tokenizer {folder / _TOKENIZER}"
        )
    if new.seed == old.seed and new.data == old.data:
        click.echo("its data begins at the first sample again, in the same order: --set seed=N gives it another order")


def with_weights(old: RunConfig, new: RunConfig, folder: Path) -> RunConfig:
    """The new run with the weights of the old one in `folder`, and with the tokenizer that they have learned.

    Raises:
        BadInputError: the new run's data was prepared with another one.
    """
    new = msgspec.structs.replace(new, model=msgspec.structs.replace(new.model, start_from=str(folder)))
    text, other_text = (old.data.source, old.data.text_field), (new.data.source, new.data.text_field)
    if text != other_text and new.data.tokenizer.startswith("bpe:"):
        # The same key would train another one on the other text: as large, and its numbers mean other letters.
        new = msgspec.structs.replace(new, data=msgspec.structs.replace(new.data, tokenizer=str(folder / _TOKENIZER)))
    if text != other_text and new.data.tokenizer == "prepared":
        learned, others = _tokenizer_in(old.data.source), _tokenizer_in(new.data.source)
        if None not in (learned, others) and learned != others:
            raise BadInputError(
                f"--set data.source: {new.data.source} was prepared with another tokenizer than {old.data.source};"
                f" prepare it again with --tokenizer {Path(old.data.source) / _TOKENIZER}"
            )
    new.validate()
    return new


def _tokenizer_in(source: str) -> Any:
    """What a prepared folder's tokenizer is; None where it is not on this computer."""
    try:
        return json.loads((Path(source).expanduser() / _TOKENIZER).read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError, RecursionError):
        return None


def branched(old: RunConfig, settings: tuple[str, ...]) -> RunConfig:
    """The new run, before its weights are there. Raises `BadInputError` for what a branch cannot have."""
    new = change_run(old, settings)
    if new.name == old.name:
        raise BadInputError(
            f"--set name=NAME: the new run needs a name of its own; {old.name} names the checkpoints of the old one"
        )
    for name in old.model.__struct_fields__:
        before, now = getattr(old.model, name), getattr(new.model, name)
        if before != now and name != "start_from":
            raise BadInputError(
                f"--set model.{name}: the weights have the model's shape ({before}), so a branch has the same model;"
                " another one begins from nothing, or from a folder with weights of its own (model.start_from)"
            )
    if new.model.start_from != old.model.start_from:
        raise BadInputError("--set model.start_from: a branch begins with the weights of the checkpoint")
    if new.data.tokenizer != old.data.tokenizer:
        raise BadInputError(
            f"--set data.tokenizer: the model has learned {old.data.tokenizer}; another one makes other tokens"
        )
    new.validate()
    return new
