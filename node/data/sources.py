"""Where documents come from: the installed Python's own prose, and text files."""

from __future__ import annotations

import ast
import functools
import glob
import importlib
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from protocol.base.errors import BadInputError
from protocol.run.run import DataSection

BUILTIN_PYTHON = "builtin:python"
BUILTIN_GRAMMAR = "builtin:grammar"

_SUFFIXES = (".txt", ".md", ".jsonl")
_SHORTEST_DOCSTRING = 120
"""Characters; shorter docstrings are signatures and remarks rather than prose."""
_NOT_PROSE = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "_bundled"})
"""Folders of the standard library that hold no documentation of it, or code that is not part of it."""
_MOST_TEXT_BYTES = 1 << 32
"""4 GiB: all text of a run stands in memory while it is tokenized."""


def read_documents(section: DataSection) -> list[str]:
    """All documents of `section.source` (not of the grammar, which has no end), in an order that never varies.

    Raises:
        BadInputError: nothing is there, or it cannot be read; the sentence names the field.
    """
    source = section.source
    if source == BUILTIN_PYTHON:
        return list(python_documents())
    if source.startswith("builtin:"):
        raise BadInputError(f"data.source: there is no {source!r}; use {BUILTIN_PYTHON}, {BUILTIN_GRAMMAR} or a path")
    documents: list[str] = []
    left = _MOST_TEXT_BYTES
    for path in _find_files(source):
        left -= path.stat().st_size
        if left < 0:
            raise BadInputError(f"data.source: {source} holds more than {_MOST_TEXT_BYTES} bytes of text")
        documents.extend(text for text in _read_file(path, section.text_field) if text)
    if not documents:
        raise BadInputError(f"data.source: {source} holds no text")
    return documents


# ---- the installed Python -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def python_documents() -> tuple[str, ...]:
    """The language reference that `help()` shows, then the standard library's docstrings; each text once.

    About 1.9 MB of English; a few seconds. Builds of Python differ, so the hash of the tokens belongs to the run.
    """
    documents = dict.fromkeys(normalise(text) for text in (*_topics(), *_docstrings()))
    return tuple(text for text in documents if text)


def normalise(text: str) -> str:
    """Newlines as \\n, no tabs, no blanks at the ends of lines, no empty lines around."""
    return "\n".join(line.rstrip() for line in text.expandtabs().splitlines()).strip("\n")


def _topics() -> Iterator[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise BadInputError(
            f"data.source: {BUILTIN_PYTHON} needs this Python's help texts (pydoc_data), which it lacks; "
            f"use {BUILTIN_GRAMMAR} or a path"
        ) from error
    for name in sorted(topics):
        yield topics[name]


def _docstrings() -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in _library_files(Path(sysconfig.get_path("stdlib"))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library are not our reader's concern
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, OSError):
                continue  # templates and data with the suffix .py
        for node in ast.walk(tree):
            if isinstance(node, documented):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= _SHORTEST_DOCSTRING:
                    yield text


def _library_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _NOT_PROSE and not name.startswith("config-"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


# ---- files ----------------------------------------------------------------------------------------------------


def _find_files(source: str) -> list[Path]:
    """A file, every text file below a folder, or what a pattern matches; sorted by path."""
    path = Path(source).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.is_file() and each.suffix in _SUFFIXES)
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
    if not found:
        raise BadInputError(f"data.source: no {', '.join(_SUFFIXES)} file at {source!r}")
    for each in found:
        if each.suffix not in _SUFFIXES:
            raise BadInputError(f"data.source: {each} is not a {', '.join(_SUFFIXES)} file")
    return found


def _read_file(path: Path, text_field: str) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"data.source: {path} cannot be read as UTF-8 text: {error}") from error
    if path.suffix != ".jsonl":
        yield normalise(text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"data.source: {path}:{number} is not JSON: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get(text_field), str):
            raise BadInputError(f"data.text_field: {path}:{number} has no text in the field {text_field!r}")
        yield normalise(entry[text_field])
