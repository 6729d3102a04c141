"""Tests of `node.data.sources`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from node.data import sources
from node.data.dataset import TEXT_CHARACTERS_MAX
from node.data.pieces import normalise
from node.data.sources import python_documents, read_pieces, training_texts
from protocol.base.errors import BadInputError
from protocol.run.run import DataSection


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two text files, one of them deeper, a jsonl file, and a file that is not text."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("bee\r\nbuzz  \n", encoding="utf-8")
    (tmp_path / "deep" / "a.md").write_text("# ay", encoding="utf-8")
    lines = [{"text": "one", "other": "uno"}, {"text": "two", "other": "dos"}]
    (tmp_path / "c.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    (tmp_path / "d.bin").write_bytes(b"\xff\x00")
    return tmp_path


def read(source: Path | str, text_field: str = "text") -> list[str]:
    """The documents, each put together from its pieces."""
    documents = [""]
    for text, ends in read_pieces(DataSection(source=str(source), text_field=text_field)):
        documents[-1] += text
        if ends:
            documents.append("")
    assert documents.pop() == ""
    return documents


def test_files_folders_and_patterns_are_read_in_order(folder: Path) -> None:
    """A file is a document (a jsonl line is), a folder is read to its depths, a pattern matches; all sorted by path."""
    assert read(folder / "b.txt") == ["bee\nbuzz"]
    assert read(folder) == ["bee\nbuzz", "one", "two", "# ay"]
    assert read(folder / "**" / "*.md") == ["# ay"]
    assert read(folder / "c.jsonl", "other") == ["uno", "dos"]


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("x.txt", b"\xff\xfe", "data.source"),
        ("x.jsonl", b'{"text": ', "data.source"),
        ("x.jsonl", b'{"words": "hello"}', "data.text_field"),
        ("x.jsonl", b'{"text": 5}', "data.text_field"),
        ("x.jsonl", b'["text"]', "data.text_field"),
        ("x.jsonl", b"[" * 100_000, "data.source"),
        ("x.csv", b"a,b", "data.source"),
        ("x.csv.gz", b"a,b", "data.source"),
        ("x.txt.gz", b"not packed at all", "data.source"),
        ("x.txt.gz", gzip.compress(b"words " * 10_000, mtime=0)[:-100], "data.source"),
        ("x.txt.gz", gzip.compress(b"\xff\xfe", mtime=0), "data.source"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, field: str) -> None:
    """What cannot be read is refused with the field at fault first in the sentence."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "source", ["", "no/such/file.txt", "*.nothing", "builtin:nothing", "~nobody-here/x", "x" * 300, "x\0"]
)
def test_bad_sources_are_named(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that leads nowhere is refused; so is the empty one, which would be the working folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError, match=r"^data\.source: "):
        read(source)


def test_a_tokenizer_is_trained_on_so_much_however_many_files_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gives a piece at least, and a hundred thousand books would come to gigabytes, a hundred times as much as
    is meant. What a run reads by itself is always less."""
    assert sources.TRAINING_CHARACTERS_MAX >= TEXT_CHARACTERS_MAX
    for number in range(50):
        (tmp_path / f"{number:02d}.txt").write_text("twenty letters there\n" * 5)
    section = DataSection(source=str(tmp_path))
    piece = len(next(read_pieces(section)).text)
    monkeypatch.setattr(sources, "TRAINING_CHARACTERS", 1000)
    assert len("".join(training_texts(section))) == 50 * piece
    monkeypatch.setattr(sources, "TRAINING_CHARACTERS_MAX", 4000)
    assert 4000 <= len("".join(training_texts(section))) < 4000 + piece


def test_normalising_is_done_once() -> None:
    """Normal text stays as it is; tabs, carriage returns and blanks at line ends go."""
    assert normalise("\n\na\tb \r\n\n c\n") == "a       b\n\n c"
    assert normalise(normalise("x\t \r\ny")) == normalise("x\t \r\ny")


@pytest.mark.slow
def test_installed_python_holds_a_megabyte_of_prose() -> None:
    """The built-in text is large, without repetitions, and the same when read again."""
    documents = python_documents()
    assert sum(map(len, documents)) > 1_000_000
    assert len(set(documents)) == len(documents)
    python_documents.cache_clear()
    assert python_documents() == documents
