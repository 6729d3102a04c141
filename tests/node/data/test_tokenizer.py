"""Tests of `node.data.tokenizer`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from node.data.pieces import Piece
from node.data.tokenizer import END_MARK, TextTokenizer, make_tokenizer
from protocol.base.errors import BadInputError

TEXTS = [f"The number {number} is followed by {number + 1}, naturally: ünïcode → 数.\n" for number in range(300)]


def row_of(tokenizer: TextTokenizer, documents: Sequence[str]) -> npt.NDArray[np.int32]:
    """All documents in one row, each with its mark; the places that are told are those behind the marks."""
    pieces = list(tokenizer.encode_pieces(Piece(document, ends=True) for document in documents))
    row = np.concatenate([tokens for tokens, _ in pieces])
    told, begin = [], 0
    for tokens, ends in pieces:
        told += [begin + end for end in ends]
        begin += len(tokens)
    assert told == [place + 1 for place in np.flatnonzero(row == tokenizer.end_mark)]
    return row


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_exported_bytes_tokenizer_encodes_the_same(text: str) -> None:
    """The tokenizer.json of `bytes`, loaded by the library, gives the UTF-8 bytes of any text, and the text back."""
    mine = make_tokenizer("bytes", [])
    theirs = Tokenizer.from_str(mine.to_json())
    theirs.encode_special_tokens = True
    assert mine.encode(text).tolist() == list(text.encode()) == theirs.encode(text).ids
    assert mine.decode(mine.encode(text)) == text


def test_bytes_need_one_mark() -> None:
    """The vocabulary is 256 bytes and the end mark."""
    tokenizer = make_tokenizer("bytes", [])
    assert (tokenizer.vocabulary, tokenizer.end_mark, tokenizer.end_text) == (257, 256, END_MARK)
    assert row_of(tokenizer, ["ab", "", "c"]).tolist() == [97, 98, 256, 256, 99, 256]
    assert tokenizer.decode([97, 256, 98]) == "ab"


def test_bpe_is_trained_alike_twice() -> None:
    """The same texts give the same tokenizer, of the size asked for, that shortens text and loses nothing."""
    one, two = make_tokenizer("bpe:400", TEXTS), make_tokenizer("bpe:400", TEXTS)
    assert one.to_json() == two.to_json()
    assert one.vocabulary == 400
    text = "The number 7 has a π in it ☃."
    assert one.decode(one.encode(text)) == text
    assert len(one.encode(text)) < len(text.encode())
    row = row_of(one, TEXTS)
    assert (row == one.end_mark).sum() == len(TEXTS)
    assert one.decode(row) == "".join(TEXTS)


def test_text_cannot_forge_marks() -> None:
    """The letters of the end mark inside a document are letters, for every tokenizer."""
    for choice in ("bytes", "bpe:300"):
        tokenizer = make_tokenizer(choice, TEXTS)
        assert tokenizer.end_mark not in tokenizer.encode(f"a {END_MARK} b")
        assert row_of(tokenizer, [END_MARK]).tolist().count(tokenizer.end_mark) == 1


def test_a_file_gives_the_tokenizer_that_was_written(tmp_path: Path) -> None:
    """A tokenizer.json comes back with its vocabulary and its end mark."""
    written = make_tokenizer("bpe:300", TEXTS)
    path = tmp_path / "tokenizer.json"
    path.write_text(written.to_json(), encoding="utf-8")
    read = make_tokenizer(str(path), [])
    assert (read.vocabulary, read.end_mark) == (written.vocabulary, written.end_mark)
    assert read.encode(TEXTS[0]).tolist() == written.encode(TEXTS[0]).tolist()


@pytest.mark.parametrize(
    "choice", ["bpe:", "bpe:-4", "bpe:257", "bpe:99999999", "bpe:2k", "nothing/here.json", "words", "~nobody-here/x"]
)
def test_choices_that_mean_nothing_are_refused(choice: str) -> None:
    """The sentence names the field."""
    with pytest.raises(BadInputError, match=r"^data\.tokenizer: "):
        make_tokenizer(choice, TEXTS)


def test_a_number_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    """The model has a row for every number below the highest: one mistyped would make it as large as no computer."""
    content = json.loads(make_tokenizer("bpe:300", TEXTS).to_json())
    token = next(reversed(content["model"]["vocab"]))
    content["model"]["vocab"][token] = 4_000_000_000
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(BadInputError, match=r"^data\.tokenizer: .*a token with the number 4000000000$"):
        make_tokenizer(str(path), [])


def test_a_file_at_which_the_library_panics_is_refused_too(tmp_path: Path) -> None:
    """What it raises then is no Exception: it would end the thread that reads a run's data."""
    content = json.loads(make_tokenizer("bpe:300", TEXTS).to_json())
    content["model"]["continuing_subword_prefix"] = "longer than some of its tokens"
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(BadInputError, match=r"^data\.tokenizer: .*is no tokenizer\.json: "):
        make_tokenizer(str(path), [])


def test_text_that_a_tokenizer_has_no_token_for_is_said(tmp_path: Path) -> None:
    """Some have a mark for what they do not know, and name one that is not there."""
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"barn": 0, "raise": 1}, "unk_token": "[UNK]"}
    path.write_text(json.dumps({"version": "1.0", "model": model}), encoding="utf-8")
    tokenizer = make_tokenizer(str(path), [])
    assert tokenizer.encode("barn").tolist() == [0]
    with pytest.raises(BadInputError, match=r"^data\.tokenizer: it cannot tokenize the text: "):
        tokenizer.encode("house")
    with pytest.raises(BadInputError, match=r"^data\.tokenizer: it cannot tokenize the text: "):
        row_of(tokenizer, ["house"])


@pytest.mark.parametrize("content", ["", "[]", "{}", "not json", '{"model": {"type": "Nope"}}', "[" * 100_000])
def test_broken_files_are_refused(tmp_path: Path, content: str) -> None:
    """A file that is no tokenizer is named, whatever is wrong with it."""
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BadInputError, match=r"tokenizer\.json"):
        make_tokenizer(str(path), [])
