"""Tests of `node.data.files`: packed text and tables."""

from __future__ import annotations

import gzip
import importlib
import struct
from pathlib import Path
from typing import Any

import pytest

from node.data import files
from node.data.files import file_pieces
from protocol.base.errors import BadInputError

WORDS = ["one", "two words", "three\n  lines\nof it"]


def texts(path: Path, field: str = "text") -> list[str]:
    return [piece.text for piece in file_pieces(path, field)]


@pytest.fixture
def arrow() -> Any:
    return pytest.importorskip("pyarrow", reason="tables need pyarrow: pip install 'barnraise[data]'")


def test_packed_files_read_as_plain_ones(tmp_path: Path) -> None:
    """A .txt.gz is one document and a .jsonl.gz as many as it has lines."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some\r\ntext \n"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n\n{"text": "y"}'))
    assert texts(tmp_path / "a.txt.gz") == ["some\ntext"]
    assert texts(tmp_path / "b.jsonl.gz") == ["x", "y"]


def test_zstandard_reads_as_plain(tmp_path: Path, arrow: Any) -> None:
    """A .md.zst is the text; one that is cut off is refused."""
    path = tmp_path / "a.md.zst"
    with arrow.output_stream(str(path), compression="zstd") as file:
        file.write(b"some text " * 1000)
    assert texts(path) == [("some text " * 1000).strip()]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInputError, match=r"^data\.source: .*a\.md\.zst"):
        texts(path)


def write_table(arrow: Any, path: Path, columns: dict[str, list[Any]]) -> None:
    table = arrow.table(columns)
    if path.suffix == ".parquet":
        importlib.import_module("pyarrow.parquet").write_table(table, path, row_group_size=2)
    else:
        ipc = importlib.import_module("pyarrow.ipc")
        with arrow.OSFile(str(path), "wb") as file, ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_each_row_of_a_table_is_a_document(tmp_path: Path, arrow: Any, suffix: str) -> None:
    """Rows come in order, those without a text are none; another column may be named."""
    path = tmp_path / f"x.{suffix}"
    write_table(arrow, path, {"text": [*WORDS, None, ""], "title": list("abcde")})
    assert texts(path) == WORDS
    assert texts(path, "title") == list("abcde")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path, arrow: Any, suffix: str) -> None:
    """So is one that holds no text; and what is no table at all."""
    path = tmp_path / f"x.{suffix}"
    write_table(arrow, path, {"body": WORDS, "number": [1, 2, 3]})
    with pytest.raises(BadInputError, match=r"^data\.text_field: .* no column 'text'; it has body, number$"):
        texts(path)
    with pytest.raises(BadInputError, match=r"^data\.text_field: .*holds int64, not text$"):
        texts(path, "number")
    path.write_bytes(b"no table")
    with pytest.raises(BadInputError, match=r"^data\.source: "):
        texts(path)


def test_a_text_that_lies_outside_of_a_damaged_table_is_not_read(tmp_path: Path, arrow: Any) -> None:
    """Arrow takes a file's places as they are: what lies behind in memory would be text, or the process would end."""
    path = tmp_path / "x.arrow"
    write_table(arrow, path, {"text": ["aaaa", "bbbb"]})
    content = path.read_bytes()
    places = struct.pack("<3i", 0, 4, 8)
    assert content.count(places) == 1
    for wrong in ((0, 4, 12), (0, 4, -1), (0, 1 << 30, 8), (0, 12, 8)):
        path.write_bytes(content.replace(places, struct.pack("<3i", *wrong)))
        with pytest.raises(BadInputError, match=r"^data\.source: .*cannot be read as a table"):
            texts(path)


def test_tables_without_pyarrow_name_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optional library that is not there is asked for by name."""

    def missing(name: str, *rest: Any) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    path = tmp_path / "x.parquet"
    path.write_bytes(b"")
    with pytest.raises(BadInputError, match=r"pip install 'barnraise\[data\]'"):
        texts(path)


def test_a_line_beyond_all_bounds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jsonl line is read only so far."""
    monkeypatch.setattr(files, "LINE_CHARACTERS_MAX", 40)
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "short"}\n{"text": "' + "long" * 20 + '"}\n')
    with pytest.raises(BadInputError, match=r"x\.jsonl:2 is longer than 40"):
        texts(path)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's word stands in the sentence."""
    path = tmp_path / "x.txt"
    path.write_text("secret")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BadInputError, match=r"^data\.source: .*x\.txt.*Permission denied"):
        texts(path)
