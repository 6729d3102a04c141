"""`barnraise export`: the model of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from node.commands.link_argument import link_text
from protocol.base.errors import BadInputError
from protocol.drive.folders import check_writable
from protocol.trust.identity import node_id
from protocol.trust.membership import JoinLink

_FOLDER = click.Path(path_type=Path, file_okay=False)
_LAYOUTS = tuple("*/" * depth + "step-????????" for depth in range(5))
"""Where steps lie below a run's own folder, a folder of checkpoints (one down), a server's state folder (two), a folder
of such (three), and what a user has by default, which has a level for the run's id (four)."""


@click.command()
@click.argument("out", type=_FOLDER)
@click.argument("checkpoints", type=_FOLDER, nargs=-1, required=True)
@click.option("--step", type=click.IntRange(0), help="Which checkpoint [default: the newest that is complete].")
@click.option("--link", help="A join link of the run: only what a server of its coordinator signed is exported.")
def export(out: Path, checkpoints: tuple[Path, ...], step: int | None, link: str | None) -> None:
    """Write the model of a run's checkpoint to the folder OUT: config.json, model.safetensors, tokenizer.json.

    CHECKPOINTS is the folder that RUN.toml names as checkpoint.folder. Where the servers share none, each has written
    its own part into its --state folder: bring these folders to one machine and name them all.
    """
    from node.compute.checkpoint import CheckpointError
    from node.compute.export_checkpoint import export_checkpoint, who_vouches
    from node.compute.seals import scan_checkpoints

    key = None if link is None else JoinLink.parse(link_text(link)).coordinator_key
    check_writable("OUT", out, out)
    folders = folders_of_one_run(checkpoints)
    with tempfile.TemporaryDirectory(prefix=".barnraise-export-", dir=_home(out)) as scratch:
        folder = folders[0] if len(folders) == 1 else together(folders, Path(scratch))
        if step is None:
            complete, incomplete = scan_checkpoints(folder)
            if not complete:
                why = "".join(f"\n  {sentence}" for sentence in incomplete).replace(scratch, "…")
                raise BadInputError(
                    "CHECKPOINTS: there is no complete checkpoint; where servers share no folder, name the --state"
                    f" folders of all of them{why}"
                )
            step = complete[0]
        elif step not in (there := steps_in(folder)):
            raise BadInputError(
                f"--step: no checkpoint has step {step}; there "
                + (
                    f"are those of steps {', '.join(map(str, there))}"
                    if len(there) > 1
                    else f"is that of step {there[0]}"
                )
            )
        try:
            vouched = who_vouches(folder, step)
            if key is not None and (sentence := vouched.sentence(key)):
                raise BadInputError(f"CHECKPOINTS: {sentence}")
            export_checkpoint(folder, step, out)
        except CheckpointError as error:
            raise BadInputError(f"CHECKPOINTS: {str(error).replace(scratch, '…')}") from error
    if vouched.manifest is None:
        click.echo(vouched.sentence(None), err=True)
    else:
        click.echo(f"signed by server {vouched.manifest.node}")
        click.echo(f"  of coordinator {node_id(vouched.manifest.coordinator_key)}")
    click.echo(f"{out}: the model after {step} steps")


def folders_of_one_run(given: Sequence[Path], argument: str = "CHECKPOINTS") -> list[Path]:
    """The folders below those given that hold steps of the run, each once. `argument`: their name in sentences.

    Raises:
        BadInputError: one is no folder, none holds a checkpoint, or they are of several runs.
    """
    found: dict[Path, None] = {}
    for folder in given:
        if not folder.is_dir():
            raise BadInputError(f"{argument}: {folder} is no folder")
        for layout in _LAYOUTS:
            found.update(dict.fromkeys(sorted(home.parent.absolute() for home in folder.glob(layout))))
    if not found:
        raise BadInputError(f"{argument}: there is no checkpoint in {', '.join(map(str, given))}")
    runs = sorted({folder.name: folder for folder in reversed(found)}.values())
    if len(runs) > 1:
        raise BadInputError(f"{argument}: these folders are of several runs: {', '.join(map(str, runs))}")
    return list(found)


def steps_in(folder: Path) -> list[int]:
    """Those that have a folder there, whole or not."""
    return sorted(int(home.name.removeprefix("step-")) for home in folder.glob("step-????????") if home.is_dir())


def _home(out: Path) -> Path:
    """Where OUT will be: parts are linked next to it, so nothing large is copied where that can be avoided."""
    home = out.absolute().parent
    home.mkdir(parents=True, exist_ok=True)
    return home


def together(folders: Sequence[Path], scratch: Path) -> Path:
    """One folder with the files of all; what is there twice under one name is the same, or does not verify later."""
    for folder in folders:
        for file in sorted(folder.glob("step-????????/*")):
            target = scratch / file.parent.name / file.name
            target.parent.mkdir(exist_ok=True)
            if not target.exists() and not file.is_symlink() and file.is_file():
                try:
                    os.link(file, target)
                except OSError:  # another file system
                    shutil.copyfile(file, target)
    return scratch
