"""The texts are true where a machine can see it: files that they name exist, and so do commands and their options."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from protocol.cli import main
from tests.architecture import ROOT

READMES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "*/README.md")
    for path in ROOT.glob(pattern)
    if not path.parent.name.startswith(".")
)
TEXTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", *(f"{folder}/**/*.md" for folder in ("protocol", "coordinator", "node", "deploy", "tests")))
    for path in (*ROOT.glob(pattern), *ROOT.glob(f".github/{pattern}"))
)
_NAME = re.compile(r"`([\w./]+(?:\.py|/))`")
_PATH = re.compile(r"(?<![\w/.-])((?:[\w.]+/)+[\w.]+\.(?:py|md|json|jsonl|toml|svg|c|service))\b")
_IN_WORDS = re.compile(r"`(?:\.venv/bin/)?barnraise ([^`]+)`")
_IN_BLOCKS = re.compile(r"(?m)^    (?:[^#\n]*\s)?barnraise ([^#\n]+)")
_MODULE = re.compile(r"python -m ((?:tests|node|protocol|coordinator)(?:\.[a-z]\w*)*)")
MADE = {"STATE/metrics.json", "FOLDER/README.md"}
"""What a text says that a command writes."""


def named(text: str) -> list[str]:
    """Files and folders in the first cells of tables, and files with a folder before them anywhere."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return [name for cell in cells for name in _NAME.findall(cell)] + [
        name for name in _NAME.findall(text) if "/" in name.rstrip("/")
    ]


def missing(text: str, folder: Path) -> list[str]:
    """Names of `text` that are neither below its folder nor below the repository's root."""
    return [name for name in named(text) if not (folder / name).exists() and not (ROOT / name).exists()]


def missing_paths(text: str, folder: Path) -> list[str]:
    """Paths anywhere in a text that lead nowhere from its folder, its package or the repository's root."""
    places = (folder, ROOT, *(ROOT / name for name in ("protocol", "coordinator", "node", "node/compute", "tests")))
    names = sorted(set(_PATH.findall(text)) - MADE)
    return [name for name in names if not any((place / name).exists() for place in places)]


def commands(text: str) -> list[list[str]]:
    """The words behind `barnraise` of each command line that a text shows."""
    whole = re.sub(r"\s*\n\s*", " ", text)
    lines = _IN_WORDS.findall(whole) + _IN_BLOCKS.findall(text)
    return [line.replace("'", "").replace("[", "").replace("]", "").split() for line in lines]


def unknown(words: list[str]) -> str:
    """The first word of a command line that is no command or no option, or an empty string. A name in capitals stands
    for something else, and what stands behind an ellipsis or a bar is another way to say it."""
    command: click.Command = main
    context, words = click.Context(main), list(words)
    while isinstance(command, click.Group) and words and re.fullmatch("[a-z]+", words[0]):
        found = command.get_command(context, words[0])
        if found is None:
            return words[0] if command is main or not command.invoke_without_command else ""
        command = found
        del words[0]
    if isinstance(command, click.Group) and command.name == "audit":  # `audit LINK` is `audit run LINK`
        command = command.commands["run"]
    options = {"--help", "--version", *(option for parameter in command.params for option in parameter.opts)}
    given = [word.partition("=")[0].strip(".,;:()") for word in words if word.startswith("--")]
    return next((word for word in given if word not in options), "")


@pytest.mark.parametrize("readme", READMES)
def test_what_a_map_names_is_there(readme: str) -> None:
    """Whoever follows a README finds the file."""
    assert not missing((ROOT / readme).read_text(), (ROOT / readme).parent)


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_text_names_is_there(text: str) -> None:
    """Files, commands with their options, and modules that somebody is told to run."""
    content = (ROOT / text).read_text()
    assert not missing_paths(content, (ROOT / text).parent)
    assert not [(words, wrong) for words in commands(content) if (wrong := unknown(words))]
    modules = {ROOT / name.replace(".", "/") for name in _MODULE.findall(content)}
    assert not [path for path in modules if not path.with_suffix(".py").exists() and not path.is_dir()]


def test_a_file_that_is_gone_is_found() -> None:
    """The test itself can fail."""
    assert missing("| `gone.py` | a file |", ROOT) == ["gone.py"]
    assert missing("see `node/gone.py`", ROOT) == ["node/gone.py"]
    assert not missing("| `node/core.py`, `deploy/` | `what.py` |", ROOT)
    assert missing_paths("see tests/node/gone.py, and tests/rules.py", ROOT) == ["tests/node/gone.py"]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("run set KEY VALUE", ""),
        ("run sett KEY", "sett"),
        ("joi LINK", "joi"),
        ("join LINK --divice cuda", "--divice"),
        ("join LINK --device=cuda", ""),
        ("audit LINK --threads 2", ""),
        ("audit verify FILE", ""),
        ("run invite --rule auditor", "--rule"),
        ("--version", ""),
    ],
)
def test_a_command_that_is_gone_is_found(line: str, wrong: str) -> None:
    """In a sentence, across lines, and in a block."""
    assert commands(f"say `barnraise {line}`") == [line.split()]
    assert commands(f"so:\n\n    X=1 barnraise {line}   # well") == [line.split()]
    assert unknown(line.split()) == wrong
