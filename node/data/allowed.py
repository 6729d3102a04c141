"""What a run may read and write on a server: its operator says so on the command line, the run cannot.

Paths stand in the run's configuration, which the coordinator sends. Without leave a run reads nothing but what comes
with Barnraise and Python, and writes nothing outside the server's state folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from node.data.tokenizer import BYTES, PREPARED
from protocol.base.errors import BadInputError
from protocol.run.places import is_url, lies_below, local_folder
from protocol.run.run import RunConfig


@dataclass(frozen=True)
class Allowed:
    """Folders (or single files) of this machine that its operator lends to the run."""

    data: tuple[Path, ...] = ()
    """May be read: data, tokenizers, weights to start from."""
    checkpoints: tuple[Path | str, ...] = ()
    """May be written: checkpoints, and what lies there of other servers may be read. A folder, or a store's URL."""

    def check(self, config: RunConfig) -> None:
        """Raises `BadInputError` for the first path that the run names and the operator does not lend."""
        for field, path in _read_paths(config):
            if not _lies_in(path, self.data):
                raise BadInputError(
                    f"{field}: the run wants to read {path} on this computer; if that is right, say so with"
                    f" `--data {_suggestion(path)}`"
                )
        if not self.may_write(config):
            folder = config.checkpoint.folder
            where = "with this computer's keys" if is_url(folder) else "on this computer"
            raise BadInputError(
                f"checkpoint.folder: the run wants to write to {folder} {where}; if that is right, say so"
                f" with `--checkpoints {folder}`"
            )

    def may_write(self, config: RunConfig) -> bool:
        """Whether the run's checkpoints go where they may: below the state folder, or where the operator says."""
        folder = local_folder(config.checkpoint.folder)
        if folder is None:
            return any(lies_below(config.checkpoint.folder, str(url)) for url in self.checkpoints)
        if folder.is_absolute():
            lent = [local_folder(str(place)) for place in self.checkpoints]
            return _lies_in(str(folder), tuple(place for place in lent if place is not None))
        return ".." not in folder.parts


def named_paths(config: RunConfig) -> tuple[str, ...]:
    """What an operator who wants exactly this run has to name with `--data`."""
    return tuple(_suggestion(path) for _, path in _read_paths(config))


def _read_paths(config: RunConfig) -> list[tuple[str, str]]:
    """(field, path) of all that the run reads of a server's machine."""
    tokenizer = config.data.tokenizer
    paths = [
        ("data.source", "" if config.data.source.startswith("builtin:") else config.data.source),
        ("data.tokenizer", "" if tokenizer in (BYTES, PREPARED) or tokenizer.startswith("bpe:") else tokenizer),
        ("model.start_from", config.model.start_from),
        ("validation.source", config.validation.source),
    ]
    return [(field, path) for field, path in paths if path]


def _lies_in(path: str, folders: tuple[Path, ...]) -> bool:
    """Links and `..` are followed first; of a pattern with stars as far as it names folders that exist."""
    try:
        whole = Path(path).expanduser().resolve()
        return any(whole.is_relative_to(folder.expanduser().resolve()) for folder in folders)
    except (OSError, RuntimeError, ValueError):  # a loop of links, somebody's unknown home, a NUL
        return False


def _suggestion(path: str) -> str:
    """The folder to name: of a pattern, the part before the first star."""
    parts: list[str] = []
    for part in Path(path).parts:
        if any(letter in part for letter in "*?["):
            break
        parts.append(part)
    return str(Path(*parts)) if parts else "."
