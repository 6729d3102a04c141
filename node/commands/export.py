"""`barnraise export`: the model of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from node.commands.found_checkpoints import check_step, on_this_computer, places_of_one_run
from node.commands.link_argument import link_text
from protocol.base.errors import BadInputError
from protocol.drive.folders import check_writable
from protocol.drive.place_argument import PlaceArgument
from protocol.trust.identity import node_id
from protocol.trust.membership import JoinLink


@click.command()
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.argument("checkpoints", type=PlaceArgument(), nargs=-1, required=True)
@click.option("--step", type=click.IntRange(0), help="Which checkpoint [default: the newest that is complete].")
@click.option("--link", help="A join link of the run: only what a server of its coordinator signed is exported.")
def export(out: Path, checkpoints: tuple[Path | str, ...], step: int | None, link: str | None) -> None:
    """Write the model of a run's checkpoint to the folder OUT: config.json, model.safetensors, tokenizer.json.

    CHECKPOINTS is the folder, or the URL, that RUN.toml names as checkpoint.folder. Where the servers share none, each
    has written its own part into its --state folder: bring these folders to one machine and name them all.
    """
    from node.compute.checkpoint import CheckpointError
    from node.compute.export_checkpoint import export_checkpoint, who_vouches
    from node.compute.seals import scan_checkpoints

    key = None if link is None else JoinLink.parse(link_text(link)).coordinator_key
    check_writable("OUT", out, out)
    found = places_of_one_run(checkpoints)
    with tempfile.TemporaryDirectory(prefix=".barnraise-export-", dir=_home(out)) as scratch:
        if step is not None:
            check_step(found, step)
        folder = on_this_computer(found, step, Path(scratch))
        if step is None:
            complete, incomplete = scan_checkpoints(folder)
            if not complete:
                why = "".join(f"\n  {sentence}" for sentence in incomplete).replace(scratch, "…")
                raise BadInputError(
                    "CHECKPOINTS: there is no complete checkpoint; where servers share no folder, name the --state"
                    f" folders of all of them{why}"
                )
            step = complete[0]
        try:
            vouched = who_vouches(folder, step)
            if key is not None and (sentence := vouched.sentence(key)):
                raise BadInputError(f"CHECKPOINTS: {sentence}")
            export_checkpoint(folder, step, out)
        except CheckpointError as error:
            raise BadInputError(f"CHECKPOINTS: {str(error).replace(scratch, '…')}") from error
        except OSError as error:
            raise BadInputError(f"OUT: {out} cannot be written: {error.strerror or error}") from error
    if vouched.manifest is None:
        click.echo(vouched.sentence(None), err=True)
    else:
        click.echo(f"signed by server {vouched.manifest.node}")
        click.echo(f"  of coordinator {node_id(vouched.manifest.coordinator_key)}")
    click.echo(f"{out}: the model after {step} steps")


def _home(out: Path) -> Path:
    """Where OUT will be: parts are linked next to it, so nothing large is copied where that can be avoided."""
    home = out.absolute().parent
    home.mkdir(parents=True, exist_ok=True)
    return home
