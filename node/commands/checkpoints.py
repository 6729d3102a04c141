"""`barnraise checkpoints verify`: reads checkpoints from disk as a restart would, and says which are whole."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import click

from node.commands.export import folders_of_one_run, steps_in, together
from protocol.base.errors import BadInputError


@click.group()
def checkpoints() -> None:
    """What the servers have saved of a run."""


@checkpoints.command()
@click.argument("folders", type=click.Path(path_type=Path, file_okay=False), nargs=-1, required=True, metavar="FOLDER…")
@click.option("--step", type=click.IntRange(0), help="Only this one [default: all that are there].")
def verify(folders: tuple[Path, ...], step: int | None) -> None:
    """Read every byte of a run's checkpoints and compare it with their manifests.

    FOLDER is the folder that RUN.toml names as checkpoint.folder, or, where the servers share none, the --state folders
    of all of them. Ends with 0 when there is a checkpoint and all are whole, else with 1. Changes nothing.
    """
    from node.compute.checkpoint import CheckpointError, read_manifest, step_folder, verify_parts

    found = folders_of_one_run(folders, "FOLDER")
    whole: list[int] = []
    broken: list[int] = []
    # Parts of several servers are joined by links beside the first of them: nothing large is copied where that can be.
    with TemporaryDirectory(prefix=".barnraise-verify-", dir=found[0].parent if len(found) > 1 else None) as scratch:
        folder = found[0] if len(found) == 1 else together(found, Path(scratch))
        if step is not None and step not in (there := steps_in(folder)):
            raise BadInputError(
                f"--step: no checkpoint has step {step}; there are folders of {', '.join(map(str, there))}"
            )
        homes = [step_folder(folder, step)] if step is not None else sorted(folder.glob("step-????????"), reverse=True)
        for home in homes:
            number = int(home.name.removeprefix("step-"))
            try:
                manifest = read_manifest(home)
                verify_parts(home, manifest.parts)
            except CheckpointError as error:
                broken.append(number)
                click.echo(f"step {number:>8}  NOT WHOLE: {str(error).replace(scratch, '…')}")
            else:
                whole.append(number)
                size = sum(part.byte_count for part in manifest.parts)
                click.echo(f"step {number:>8}  whole: {len(manifest.parts)} parts, {size / 1e9:.3f} GB")
    if not whole:
        raise click.ClickException("no checkpoint is whole: a run whose servers are lost would begin anew")
    if broken:
        raise click.ClickException(f"the newest whole checkpoint is of step {max(whole)}; not whole: {len(broken)}")
    click.echo(f"all whole; a restart would go on from step {max(whole)}")
