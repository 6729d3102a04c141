"""Where the checkpoints lie that somebody names on the command line: folders of this computer, or one URL."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.base.errors import BadInputError

if TYPE_CHECKING:
    from node.compute.places import Place

_STEP = "step-" + "[0-9]" * 8
_LAYOUTS = tuple("*/" * depth + _STEP for depth in range(5))
"""Where steps lie below a run's own folder, a folder of checkpoints (one down), a server's state folder (two), a folder
of such (three), and what a user has by default, which has a level for the run's id (four)."""


def places_of_one_run(given: Sequence[Path | str], argument: str = "CHECKPOINTS") -> list[Place]:
    """The places in or below those given that hold steps of the run, each once. `argument`: their name in sentences.

    Raises:
        BadInputError: one is no folder or cannot be read, none holds a checkpoint, they are of several runs, or one of
            several is a URL: what lies in a store is whole by itself.
    """
    from node.compute.checkpoint import runs_in
    from node.compute.places import open_place

    found: dict[Place, None] = {}
    for text in given:
        place = open_place(text, argument)
        if not isinstance(place, Path):
            if len(given) > 1:
                raise BadInputError(f"{argument}: name a URL alone: {place}")
            try:
                found.update(dict.fromkeys(runs_in(place)))
            except OSError as error:
                raise BadInputError(f"{argument}: {error}") from error
            continue
        try:
            if not place.is_dir():
                raise BadInputError(f"{argument}: {place} is no folder")
            os.scandir(place).close()  # a search finds nothing in a folder that may not be read, and says nothing
            for layout in _LAYOUTS:
                found.update(dict.fromkeys(sorted(home.parent.absolute() for home in place.glob(layout))))
        except OSError as error:
            raise BadInputError(f"{argument}: {error.filename or place} cannot be read: {error.strerror}") from error
    if not found:
        raise BadInputError(f"{argument}: there is no checkpoint in {', '.join(map(str, given))}")
    runs = sorted({place.name: str(place) for place in reversed(found)}.values())
    if len(runs) > 1:
        raise BadInputError(f"{argument}: these folders are of several runs: {', '.join(runs)}")
    return list(found)


def check_step(found: Sequence[Place], step: int) -> None:
    """Raises `BadInputError` where no place has that step, whole or not, with those there are."""
    from node.compute.checkpoint import steps_in

    there = sorted({one for place in found for one in steps_in(place)})
    if step not in there:
        are = f"are those of steps {', '.join(map(str, there))}" if len(there) > 1 else f"is that of step {there[0]}"
        raise BadInputError(f"--step: no checkpoint has step {step}; there {are}")


def on_this_computer(found: Sequence[Place], step: int | None, scratch: Path) -> Path:
    """A folder of this computer with a run's checkpoints: of a store, the one of `step`, or the newest whole one.

    Raises:
        BadInputError: the store cannot be read.
    """
    from node.compute.checkpoint import CheckpointError, read_manifest, step_folder
    from node.compute.places import on
    from node.compute.seals import files_of, present_checkpoints, scan_checkpoints

    folders = [place for place in found if isinstance(place, Path)]
    if len(folders) == 1:
        return folders[0]
    if folders:
        return together(folders, scratch)
    (place,) = found
    try:
        for one in present_checkpoints(place) if step is None else (step,):
            home, here = step_folder(place, one), step_folder(scratch, one)
            here.mkdir()
            there = on(home).sizes()
            for name in files_of(home, read_manifest(home).parts):
                if name in there:
                    on(home).fetch(name, here / name)
            if step is not None or scan_checkpoints(scratch)[0]:
                break
            shutil.rmtree(here)
    except (OSError, CheckpointError) as error:
        raise BadInputError(f"CHECKPOINTS: {error}") from error
    return scratch


def together(folders: Sequence[Path], scratch: Path) -> Path:
    """One folder with the files of all; what is there twice under one name is the same, or does not verify later."""
    for folder in folders:
        for file in sorted(folder.glob(f"{_STEP}/*")):
            target = scratch / file.parent.name / file.name
            target.parent.mkdir(exist_ok=True)
            if not target.exists() and not file.is_symlink() and file.is_file():
                try:
                    os.link(file, target)
                except OSError:  # another file system
                    try:
                        shutil.copyfile(file, target)
                    except OSError as error:
                        raise BadInputError(f"CHECKPOINTS: {file} cannot be copied: {error.strerror}") from error
    return scratch
