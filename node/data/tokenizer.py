"""Tokenizers: bytes, byte-pair encoding trained on the run's data, or somebody's tokenizer.json.

All three are `tokenizers.Tokenizer` objects in the end, so that an exported model carries one that other programs load.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from node.data.files import at_home
from node.data.goes_on import begins_silence
from node.data.pieces import Piece
from protocol.base.errors import BadInputError

if TYPE_CHECKING:
    import tokenizers

END_MARK = "<|end|>"
"""Stands after each document, and before the first token that a model writes."""
BYTES = "bytes"
PREPARED = "prepared"
"""The one that lies in the prepared folder which a run names as its source."""

_KNOWN_END_MARKS = (END_MARK, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_MOST_FILE_BYTES = 64 << 20
"""The largest published tokenizer.json files are some 35 MB."""
_MOST_VOCABULARY = 1 << 20
TRAINING_S = 600.0
"""The merges of a byte-pair encoding are found without a word, in a fraction of this: of 64 MB of text at the most."""
_CHARACTERS_AT_ONCE = 1 << 18
"""Tokenized together, on all cores; the library's answer takes some 200 bytes a token: about 20 MB."""
_PIECES_AT_ONCE = 4096


class TextTokenizer:
    """Text to token numbers and back.

    Attributes:
        vocabulary: token numbers are below it.
        end_mark: the number of the mark that ends a document, or None where a foreign tokenizer has none.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, end_mark: int | None, is_bytes: bool = False) -> None:
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # a mark's letters in the data are letters: text cannot forge a mark
        self._is_bytes = is_bytes
        self.end_mark = end_mark
        # Numbers may have holes in a foreign file; the model needs a row for the highest.
        self.vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_text(self) -> str | None:
        """The text of the end mark."""
        return None if self.end_mark is None else self._tokenizer.id_to_token(self.end_mark)

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Token numbers of one document, without any mark."""
        if self._is_bytes:
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
        with _said():
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_pieces(self, pieces: Iterable[Piece]) -> Iterator[tuple[npt.NDArray[np.int32], list[int]]]:
        """Documents in one row, each followed by the end mark, some of it at a time.

        Yields:
            The tokens that come next, and the places in them at which documents end, counted behind the mark.
        """
        batch: list[Piece] = []
        characters = 0
        for piece in pieces:
            batch.append(piece)
            characters += len(piece.text)
            if characters >= _CHARACTERS_AT_ONCE or len(batch) >= _PIECES_AT_ONCE:
                yield self._encode_batch(batch)
                batch, characters = [], 0
        if batch:
            yield self._encode_batch(batch)

    def _encode_batch(self, batch: Sequence[Piece]) -> tuple[npt.NDArray[np.int32], list[int]]:
        if self._is_bytes:
            rows = [self.encode(piece.text) for piece in batch]
        else:
            with _said():
                encoded = self._tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
            rows = [np.array(each.ids, dtype=np.int32) for each in encoded]
        end = np.array([] if self.end_mark is None else [self.end_mark], dtype=np.int32)
        parts: list[npt.NDArray[np.int32]] = []
        ends: list[int] = []
        count = 0
        for piece, row in zip(batch, rows, strict=True):
            parts.append(row)
            count += len(row)
            if piece.ends:
                parts.append(end)
                count += len(end)
                ends.append(count)
        return np.concatenate(parts), ends

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token numbers; marks are left out."""
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True))

    def to_json(self) -> str:
        """The content of a tokenizer.json; equal tokenizers give equal text."""
        return str(self._tokenizer.to_str())


@contextlib.contextmanager
def _said(failed: str = "it cannot tokenize the text") -> Iterator[None]:
    """What the library cannot do becomes a `BadInputError`: a foreign tokenizer may have no token for a text, and none
    that stands for such. It raises bare Exception, and at some files what no `except Exception` catches: a panic."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BadInputError(f"data.tokenizer: {failed}: {error}") from error


def make_tokenizer(choice: str, documents: Iterable[str]) -> TextTokenizer:
    """The tokenizer that `data.tokenizer` names; `documents` train it where it is `bpe:SIZE`.

    Raises:
        BadInputError: the choice means nothing, or its file cannot be used.
    """
    if choice == PREPARED:
        raise BadInputError("data.tokenizer: only a folder made by `barnraise data prepare` has a prepared one")
    if choice == BYTES:
        return _bytes_tokenizer()
    if choice.startswith("bpe:"):
        size = choice.removeprefix("bpe:")
        if not size.isdecimal() or not 257 < int(size) <= _MOST_VOCABULARY:
            raise BadInputError(
                f"data.tokenizer: {choice!r} needs a size from 258 to {_MOST_VOCABULARY}, as in bpe:2048"
            )
        return _train_bpe(int(size), documents)
    return read_tokenizer(at_home("data.tokenizer", choice))


def _bytes_tokenizer() -> TextTokenizer:
    """256 tokens that are the bytes of UTF-8 by their own numbers, and the end mark; BPE without a single merge."""
    from tokenizers import Tokenizer, models

    vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    _work_on_bytes(tokenizer, split_words=False)
    tokenizer.add_special_tokens([END_MARK])
    return TextTokenizer(tokenizer, tokenizer.token_to_id(END_MARK), is_bytes=True)


def _train_bpe(size: int, documents: Iterable[str]) -> TextTokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    begins_silence(TRAINING_S)
    tokenizer = Tokenizer(models.BPE())
    _work_on_bytes(tokenizer, split_words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_MARK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return TextTokenizer(tokenizer, tokenizer.token_to_id(END_MARK))


def _work_on_bytes(tokenizer: tokenizers.Tokenizer, split_words: bool) -> None:
    from tokenizers import decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    tokenizer.decoder = decoders.ByteLevel()


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level BPE (GPT-2's table).

    Bytes that print in Latin-1 stand for themselves; the others, in order, for the letters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, substitute = [], 0x100
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(substitute))
            substitute += 1
    return letters


def read_tokenizer(path: Path) -> TextTokenizer:
    """Somebody's tokenizer.json. Raises `BadInputError`."""
    from tokenizers import Tokenizer

    try:
        if path.stat().st_size > _MOST_FILE_BYTES:
            raise BadInputError(f"data.tokenizer: {path} is larger than {_MOST_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(
            f"data.tokenizer: {path} cannot be read ({error}); use bytes, bpe:SIZE or a path"
        ) from error
    with _said(f"{path} is no tokenizer.json"):
        tokenizer = Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if not 1 < tokenizer.get_vocab_size() <= _MOST_VOCABULARY:
        raise BadInputError(f"data.tokenizer: {path} has {tokenizer.get_vocab_size()} tokens")
    marks = (tokenizer.token_to_id(mark) for mark in _KNOWN_END_MARKS)
    found = TextTokenizer(tokenizer, next((mark for mark in marks if mark is not None), None))
    if found.vocabulary > _MOST_VOCABULARY:  # one number suffices, and the model has a row for every one below it
        raise BadInputError(f"data.tokenizer: {path} has a token with the number {found.vocabulary - 1}")
    return found
