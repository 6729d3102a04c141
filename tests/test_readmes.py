"""The maps in the READMEs are true: a file or folder that one of them names in a table's first column exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture import ROOT

READMES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "*/README.md")
    for path in ROOT.glob(pattern)
    if not path.parent.name.startswith(".")
)
_NAME = re.compile(r"`([\w./]+(?:\.py|/))`")


def named(text: str) -> list[str]:
    """Files and folders in the first cells of tables, and files with a folder before them anywhere."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return [name for cell in cells for name in _NAME.findall(cell)] + [
        name for name in _NAME.findall(text) if "/" in name.rstrip("/")
    ]


def missing(text: str, folder: Path) -> list[str]:
    """Names of `text` that are neither below its folder nor below the repository's root."""
    return [name for name in named(text) if not (folder / name).exists() and not (ROOT / name).exists()]


@pytest.mark.parametrize("readme", READMES)
def test_what_a_map_names_is_there(readme: str) -> None:
    """Whoever follows a README finds the file."""
    assert not missing((ROOT / readme).read_text(), (ROOT / readme).parent)


def test_a_file_that_is_gone_is_found() -> None:
    """The test itself can fail."""
    assert missing("| `gone.py` | a file |", ROOT) == ["gone.py"]
    assert missing("see `node/gone.py`", ROOT) == ["node/gone.py"]
    assert not missing("| `node/core.py`, `deploy/` | `what.py` |", ROOT)
