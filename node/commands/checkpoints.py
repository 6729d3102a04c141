"""`barnraise checkpoints verify`: reads checkpoints as a restart would, and says which are whole."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import click

from node.commands.found_checkpoints import check_step, places_of_one_run, together
from protocol.drive.place_argument import PlaceArgument


@click.group()
def checkpoints() -> None:
    """What the servers have saved of a run."""


@checkpoints.command()
@click.argument("places", type=PlaceArgument(), nargs=-1, required=True, metavar="FOLDER…|URL")
@click.option("--step", type=click.IntRange(0), help="Only this one [default: all that are there].")
def verify(places: tuple[Path | str, ...], step: int | None) -> None:
    """Read every byte of a run's checkpoints and compare it with their manifests.

    FOLDER or URL is what RUN.toml names as checkpoint.folder, or, where the servers share none, the --state folders of
    all of them. Ends with 0 when there is a checkpoint and all are whole, else with 1. What has no manifest is no
    checkpoint yet, or none any more: it is only named. Changes nothing.
    """
    from node.compute.checkpoint import (
        CheckpointError,
        NoManifestError,
        read_manifest,
        step_folder,
        steps_in,
        verify_parts,
    )

    found = places_of_one_run(places, "FOLDER")
    whole: list[int] = []
    broken: list[int] = []
    folders = [place for place in found if isinstance(place, Path)]
    # Parts of several servers are joined by links beside the first of them: nothing large is copied where that can be.
    beside = folders[0].parent if len(folders) > 1 else None
    with TemporaryDirectory(prefix=".barnraise-verify-", dir=beside) as scratch:
        folder = found[0] if len(found) == 1 else together(folders, Path(scratch))
        if step is not None:
            check_step([folder], step)
        for number in [step] if step is not None else reversed(steps_in(folder)):
            home = step_folder(folder, number)
            try:
                manifest = read_manifest(home)
                verify_parts(home, manifest.parts)
            except NoManifestError:
                click.echo(f"step {number:>8}  no checkpoint: without a manifest it is being written, or deleted")
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
