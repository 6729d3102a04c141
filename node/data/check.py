"""What can be said of a run's data, weights and place for checkpoints on this computer before anybody joins: the
coordinator asks, by the entry points of `barnraise.checks`. No torch, and no more of a text than its first piece."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec

from node.compute.object_store import EXTRA
from node.data.dataset import TEXT_CHARACTERS_MAX, Dataset
from node.data.files import file_pieces, find_files, kind_of
from node.data.prepared import is_prepared
from node.data.tokenizer import BYTES, PREPARED, make_tokenizer
from protocol.base.errors import BadInputError
from protocol.run.run import RunConfig, ValidationSection

FILES_MAX = 1000
"""Files whose beginning is read: a second or so."""
_BYTES_A_CHARACTER = 4
"""Of UTF-8 at most: a file of more has more characters than this share of it."""
_PLAIN = (".txt", ".md")


def check_data(config: RunConfig) -> tuple[list[str], int]:
    """Sentences about what was looked at or is not here, and the vocabulary (0: only the data can tell).

    Raises:
        BadInputError: it is here and cannot be used.
    """
    notes = _place_of_checkpoints(config)
    own = config.validation.source
    elsewhere = bool(own) and not own.startswith("builtin:") and not _is_here(own)
    if elsewhere:
        notes.append(_absent("validation.source", own))
    source, choice = config.data.source, config.data.tokenizer
    if is_prepared(source):
        # What only servers have is theirs to look at: nothing is validated in this look.
        seen = msgspec.structs.replace(config, validation=ValidationSection()) if elsewhere else config
        found = Dataset(seen).describe()
        notes.append(f"data.source: {source} has {found.token_count:,} tokens")
        return [*notes, *_start_from(config)], found.vocabulary
    if choice == PREPARED or config.data.mixture:
        if source.startswith("builtin:") or _is_here(source):
            raise BadInputError(
                f"data.source: {source} was not made by `barnraise data prepare`, which data.tokenizer = "
                f'"{PREPARED}" and data.mixture need'
            )
        return [*notes, _absent("data.source", source), *_start_from(config)], 0
    if source.startswith("builtin:") or _is_here(source):
        notes += _look_at_text(config)
    else:
        notes.append(_absent("data.source", source))
    vocabulary = 0
    if choice == BYTES or choice.startswith("bpe:") or _is_here(choice):
        # A choice that is trained is tried on a few letters: whether it can be is all that is asked.
        small = choice if not choice.startswith("bpe:") else _tried(choice)
        vocabulary = int(choice.removeprefix("bpe:")) if choice != small else make_tokenizer(choice, []).vocabulary
    else:
        notes.append(_absent("data.tokenizer", choice))
    return [*notes, *_start_from(config)], vocabulary


def _place_of_checkpoints(config: RunConfig) -> list[str]:
    """A store is asked nothing here: the keys for it are with the servers."""
    folder = config.checkpoint.folder
    if not config.checkpoint.is_url:
        return []
    notes = [
        f"checkpoint.folder: {folder} is written by the servers, each with the keys in its own environment and"
        f" `--checkpoints {folder}`; one that cannot write there says so in `barnraise status`"
    ]
    if find_spec("obstore") is None:
        notes.append(f"checkpoint.folder: here it could not be read: export and verify need {EXTRA}")
    return notes


def _tried(choice: str) -> str:
    make_tokenizer(choice, ["a few letters"])
    return BYTES


def _look_at_text(config: RunConfig) -> list[str]:
    source = config.data.source
    if source.startswith("builtin:"):
        if source not in ("builtin:python", "builtin:grammar"):
            raise BadInputError(f"data.source: there is no {source!r}; use builtin:python, builtin:grammar or a path")
        return []
    files = find_files(source)
    plain = sum(path.stat().st_size for path in files if path.suffix in _PLAIN and kind_of(path))
    if plain > _BYTES_A_CHARACTER * TEXT_CHARACTERS_MAX:
        raise BadInputError(
            f"data.source: {source} holds {plain / 1e9:.1f} GB of text, which a run does not tokenize in memory; say"
            f" `barnraise data prepare {source} --out FOLDER` and name that folder"
        )
    texts = sum(next(file_pieces(path, config.data.text_field), None) is not None for path in files[:FILES_MAX])
    if not texts:
        raise BadInputError(f"data.source: {source} holds no text")
    return [f"data.source: {source} is {len(files)} file{'' if len(files) == 1 else 's'}, and begins as it should"]


def _start_from(config: RunConfig) -> list[str]:
    folder = config.model.start_from
    if not folder:
        return []
    if not _is_here(folder):
        return [_absent("model.start_from", folder)]
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise BadInputError(f"model.start_from: there is no config.json in {folder}")
    return [f"model.start_from: {folder} is here"]


def _is_here(path: str) -> bool:
    """Whether a path, or of a pattern the part before its first star, is on this computer."""
    try:
        parts = Path(path).expanduser().parts
        fixed = (number for number, part in enumerate(parts) if any(letter in part for letter in "*?["))
        return bool(path) and Path(*parts[: next(fixed, len(parts))]).exists()
    except (OSError, RuntimeError, ValueError):  # somebody's unknown home, above all
        return False


def _absent(field: str, path: str) -> str:
    return f"{field}: {path or 'nothing'} is not on this computer; the servers that read it will say if it is missing"
