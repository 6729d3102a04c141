"""Tests of `node.data.pieces`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data import pieces
from node.data.pieces import blocks_of, normalise, pieces_of
from node.data.tokenizer import make_tokenizer

_TEXTS = st.lists(st.sampled_from(["ab", "c", "\n", "\n\n", " ", "\t", "\r\n", "x y", "\u2028"]), max_size=60)


@given(_TEXTS, st.integers(1, 7))
def test_pieces_are_the_normal_text_however_it_comes(words: list[str], block: int) -> None:
    """Cut small, fed in blocks of any size, the pieces join to one text, the same each time: normal up to blanks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_CHARACTERS", 16)
        text = "".join(words)
        whole = list(pieces_of([text]))
        fed = list(pieces_of(text[begin : begin + block] for begin in range(0, len(text), block)))
        assert fed == whole
        assert all(piece.text for piece in whole)
        assert [piece.ends for piece in whole] == [False] * (len(whole) - 1) + [True] * bool(whole)
        joined = "".join(piece.text for piece in whole)
        if "\n" * 16 not in normalise(text):
            assert joined.replace(" ", "") == normalise(text).replace(" ", "")


def test_a_text_of_lines_is_cut_between_words_and_loses_nothing() -> None:
    """Longer than several pieces: joined they are the normal text, and byte-pair tokens are those of the whole."""
    text = "\n".join(f"line {number} of the text, and\n  some more" for number in range(9000))
    parts = list(pieces_of(blocks_of(text)))
    assert len(parts) > 3 and max(len(part.text) for part in parts) <= pieces.PIECE_CHARACTERS + 1
    assert "".join(part.text for part in parts) == normalise(text) == text
    tokenizer = make_tokenizer("bpe:400", [text[:10_000]])
    tokens = [token for row, _ in tokenizer.encode_pieces(parts) for token in row.tolist()]
    assert tokens == [*tokenizer.encode(text).tolist(), tokenizer.end_mark]


def test_a_line_without_an_end_is_cut_all_the_same() -> None:
    """A text of one endless word comes in pieces, and so does one of blanks between words."""
    for text in ("x" * 500_000, "word " * 100_000 + "end"):
        parts = list(pieces_of(blocks_of(text)))
        assert len(parts) > 6
        assert "".join(part.text for part in parts) == text


def test_half_characters_of_json_become_the_mark_of_a_lost_one() -> None:
    """JSON can name half a character, which UTF-8 cannot hold; pairs stay whole, and tokenizers take the rest."""
    text = "".join(part.text for part in pieces_of(["a \ud83d b \ud83d\ude00"]))
    assert text == "a \ufffd b \U0001f600"
    assert make_tokenizer("bytes", []).encode(text).size == len(text.encode())
