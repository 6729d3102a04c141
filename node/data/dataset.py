"""Batches of a run: any microbatch is a pure function of the run's seed, the step and the microbatch.

Samples are numbered through the whole run: microbatch b of step t holds `samples` numbers, from (t x microbatches + b)
x samples on, where every step has as many microbatches (`protocol.run.batches`). A finite text is cut into samples of
`context` tokens; every epoch visits each of them once, in an order of its own. A few samples, chosen by the seed, are
kept aside for validation, unless that has text of its own (`validation.source`). With `data.mixture` each part of a
prepared folder has samples and epochs of its own, and every number falls on one part.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from node.data.grammar import sample_text, sentences
from node.data.mixture import Turns, shares
from node.data.permutation import Permutation
from node.data.pieces import Piece
from node.data.prepared import DataHash, PreparedFolder, is_prepared
from node.data.rows import JoinedRow, MemoryRow, Row, Tokens
from node.data.sources import BUILTIN_GRAMMAR, read_pieces, training_texts
from node.data.tokenizer import PREPARED, TextTokenizer, make_tokenizer
from protocol.base.errors import BadInputError
from protocol.run.batches import Batches
from protocol.run.mixture import parse_mixture
from protocol.run.run import DataSection, RunConfig

_MOST_VALIDATION_SAMPLES = 4096
TEXT_CHARACTERS_MAX = 256 << 20
"""Of a source that a run tokenizes itself: its tokens stand in memory, 2 bytes each, at most one a byte of UTF-8, so
half a gigabyte of English (twice while they are put in one row). More must be prepared."""
_TRAINING_SENTENCES = 4000
"""Sentences of the grammar from which a BPE tokenizer is trained: each of the 2,100 is likely among them."""


@dataclass(frozen=True)
class DataDescription:
    """What the servers of stage 0 must agree on, and what a checkpoint and a report say of the data."""

    source: str
    data_hash: str
    """Hexadecimal BLAKE2b-256 over the tokens and the tokenizer."""
    token_count: int
    """Tokens of the text; 0 where it has no end."""
    vocabulary: int
    training_samples: int
    """Samples of an epoch; 0 where there are no epochs."""
    validation_samples: int


class _Samples(Protocol):
    """Numbered samples of `context` + 1 tokens: inputs and, one further, labels."""

    def training(self, number: int) -> Tokens: ...

    def validation(self, number: int) -> Tokens: ...


class Dataset:
    """The data of a run, read and tokenized when this is made (seconds).

    Raises:
        BadInputError: the source or the tokenizer cannot be used, or the text is shorter than one sample.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._samples: _Samples
        self._own: _TextSamples | None = None
        """Of `validation.source`."""
        self._read(config)
        if config.validation.source:
            self._read_own(config)
        if config.validation.every_steps > 0 and self.validation_batches < config.validation.batches:
            where = config.validation.source or f"what is kept aside (validation.share {config.validation.share})"
            raise BadInputError(
                f"validation.batches: {config.validation.batches} batches of {config.batch.samples} samples, but"
                f" {where} has {self._description.validation_samples} samples"
            )

    def _read(self, config: RunConfig) -> None:
        if config.data.source == BUILTIN_GRAMMAR:
            grammar = _GrammarSamples(config)
            self._samples, self.tokenizer = grammar, grammar.tokenizer
            self._description = grammar.description
            return
        row: Row
        if is_prepared(config.data.source):
            folder = _open_prepared(config.data)
            self.tokenizer, row, digest = folder.tokenizer, JoinedRow(folder.rows), folder.about.data_hash
            parts = [(part.name, each) for part, each in zip(folder.about.parts, folder.rows, strict=True)]
        else:
            self.tokenizer, row, digest = tokenize(config.data)
            parts = []
        text = _MixedSamples(config, parts) if config.data.mixture else _TextSamples(config, row)
        self._samples = text
        self._description = DataDescription(
            source=config.data.source,
            data_hash=digest,
            token_count=len(row),
            vocabulary=self.tokenizer.vocabulary,
            training_samples=text.training_count,
            validation_samples=text.validation_count,
        )

    def _read_own(self, config: RunConfig) -> None:
        """The validation's own text, with the tokenizer of the data."""
        source = config.validation.source
        section = DataSection(source=source, text_field=config.data.text_field, tokenizer=config.data.tokenizer)
        row: Row
        if is_prepared(source):
            folder = PreparedFolder.open(source)
            if folder.tokenizer.to_json() != self.tokenizer.to_json():
                raise BadInputError(f"validation.source: {source} was prepared with another tokenizer than the data")
            row, digest = JoinedRow(folder.rows), folder.about.data_hash
        else:
            try:
                row, digest = _row_of(section, self.tokenizer)
            except BadInputError as error:
                raise BadInputError(str(error).replace("data.source", "validation.source", 1)) from error
        self._own = _TextSamples(config, row, whole="validation.source")
        both = hashlib.blake2b(f"{self._description.data_hash} {digest}".encode(), digest_size=32, person=b"br-data")
        self._description = dataclasses.replace(
            self._description, data_hash=both.hexdigest(), validation_samples=self._own.validation_count
        )

    @property
    def vocabulary(self) -> int:
        return self._description.vocabulary

    def describe(self) -> DataDescription:
        return self._description

    def batch(
        self,
        step: int,
        microbatch: int,
        mixtures: Sequence[tuple[int, str]] = (),
        counts: tuple[tuple[int, int], ...] = (),
    ) -> tuple[Tokens, Tokens]:
        """Tokens and labels of a microbatch, int32 [samples, context] each.

        `mixtures` are (first step, mixture) of what an operator has made of `data.mixture` since the run began, up to
        this step and oldest first. `counts`: how many microbatches steps have (`Batches.counts`); empty: as the file
        says.
        """
        config = self._config
        batch, unit = config.batch, config.batch.microbatches
        batches = Batches(config, unit, counts or ((0, unit),))
        if step < 0 or not 0 <= microbatch < batches.count(step):
            raise ValueError(f"microbatch {microbatch} of step {step}")
        first = batches.samples(step)[0] + microbatch * batch.samples
        samples = self._samples
        if mixtures:
            assert isinstance(samples, _MixedSamples), "a run that began without a mixture gets none"
            changes = tuple((batches.samples(since)[0], mixture) for since, mixture in mixtures)
            return _cut([samples.training_as_changed(first + index, changes) for index in range(batch.samples)])
        return _cut([samples.training(first + index) for index in range(batch.samples)])

    def validation_batch(self, index: int) -> tuple[Tokens, Tokens]:
        """As `batch`, of samples that no step trains on; `index` counts up to `validation_batches`."""
        if not 0 <= index < self.validation_batches:
            raise ValueError(f"validation batch {index} of {self.validation_batches}")
        first = index * self._config.batch.samples
        samples = self._samples if self._own is None else self._own
        return _cut([samples.validation(first + offset) for offset in range(self._config.batch.samples)])

    @property
    def validation_batches(self) -> int:
        """Full batches of validation samples."""
        return self._description.validation_samples // self._config.batch.samples


def _open_prepared(section: DataSection) -> PreparedFolder:
    folder = PreparedFolder.open(section.source)
    if section.tokenizer != PREPARED:
        raise BadInputError(
            f"data.tokenizer: {section.source} was prepared with {folder.about.tokenizer!r}; write tokenizer ="
            f' "{PREPARED}", or prepare it again with --tokenizer {section.tokenizer}'
        )
    return folder


def _cut(rows: list[Tokens]) -> tuple[Tokens, Tokens]:
    stacked = np.stack(rows)
    return np.ascontiguousarray(stacked[:, :-1]), np.ascontiguousarray(stacked[:, 1:])


@functools.lru_cache(maxsize=2)
def tokenize(section: DataSection) -> tuple[TextTokenizer, MemoryRow, str]:
    """Tokenizer, tokens of all documents in one row, and their hash; kept for the next caller.

    Raises:
        BadInputError: the source or the tokenizer cannot be used, or the text is too much to stand in memory.
    """
    if section.mixture:
        raise BadInputError("data.mixture: needs a data.source made by `barnraise data prepare`, which has parts")
    tokenizer = make_tokenizer(section.tokenizer, training_texts(section))
    return tokenizer, *_row_of(section, tokenizer)


def _row_of(section: DataSection, tokenizer: TextTokenizer) -> tuple[MemoryRow, str]:
    """Tokens of all documents in one row, and their hash."""
    digest = DataHash(tokenizer)
    kind = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.int32
    parts: list[npt.NDArray[np.integer]] = []
    for tokens, _ in tokenizer.encode_pieces(_up_to(TEXT_CHARACTERS_MAX, read_pieces(section), section.source)):
        digest.tokens(tokens)
        parts.append(tokens.astype(kind))
    if not parts:
        raise BadInputError(f"data.source: {section.source} holds no text")
    return MemoryRow(np.concatenate(parts)), digest.hexdigest()


def _up_to(characters: int, pieces: Iterator[Piece], source: str) -> Iterator[Piece]:
    for piece in pieces:
        characters -= len(piece.text)
        if characters < 0:
            raise BadInputError(
                f"data.source: {source} holds more than {TEXT_CHARACTERS_MAX} characters, which a run does not tokenize"
                f" in memory; say `barnraise data prepare {source} --out FOLDER` and name that folder"
            )
        yield piece


class _TextSamples:
    """Samples of a finite text: sample i begins at token i x context and shares one token with the next."""

    def __init__(self, config: RunConfig, row: Row, part: str = "", whole: str = "") -> None:
        """`whole`: the field that names this text, which is for the validation alone."""
        self._row = row
        self._context = config.model.context
        self._seed = config.seed
        count = (len(row) - 1) // self._context
        if count < 1:
            name = f"the part {part} of {config.data.source}" if part else config.data.source
            name = config.validation.source if whole else name
            raise BadInputError(
                f"{whole or 'data.source'}: {name} has {len(row)} tokens, fewer than one sample of model.context = "
                f"{self._context} needs"
            )
        share = 0.0 if config.validation.source else config.validation.share
        self.validation_count = min(_MOST_VALIDATION_SAMPLES, count if whole else int(count * share))
        self.training_count = count - self.validation_count
        # The first places of one fixed shuffle are for training, the rest for validation.
        self._split = Permutation(count, self._seed, "split")
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    def training(self, number: int) -> Tokens:
        epoch, place = divmod(number, self.training_count)
        return self._sample(self._split[self._epoch(epoch)[place]])

    def validation(self, number: int) -> Tokens:
        return self._sample(self._split[self.training_count + number])

    def _make_epoch(self, epoch: int) -> Permutation:
        return Permutation(self.training_count, self._seed, f"epoch {epoch}")

    def _sample(self, index: int) -> Tokens:
        begin = index * self._context
        return self._row.cut(begin, begin + self._context + 1)


class _MixedSamples:
    """Samples of several rows by their weights; each row has epochs of its own."""

    def __init__(self, config: RunConfig, parts: Sequence[tuple[str, Row]]) -> None:
        weights = parse_mixture(config.data.mixture)
        found = shares(weights, [name for name, _ in parts])
        # A part that is named with nothing may get a share while the run runs.
        named = [(share, name, row) for share, (name, row) in zip(found, parts, strict=True) if name in weights]
        self._parts = [_TextSamples(config, row, name) for _, name, row in named]
        self._names = [name for _, name, _ in named]
        self._seed = config.seed
        self._training = Turns([share for share, _, _ in named], config.seed, "training")
        self._validation = Turns([share for share, _, _ in named], config.seed, "validation")
        self._changed: dict[tuple[tuple[int, str], ...], Turns] = {(): self._training}
        self.training_count = sum(
            part.training_count for (share, *_), part in zip(named, self._parts, strict=True) if share
        )
        self.validation_count = self._whole_validation()

    def training_as_changed(self, number: int, changes: tuple[tuple[int, str], ...]) -> Tokens:
        """As `training`, by mixtures that came later: each with the number of the first sample that is drawn by it."""
        part, place = self._turns(changes).find(number)
        return self._parts[part].training(place)

    def _turns(self, changes: tuple[tuple[int, str], ...]) -> Turns:
        """Those of the last of these mixtures; each part goes on where it was when the one before ended."""
        found = self._changed.get(changes)
        if found is None:
            first, mixture = changes[-1]
            used = self._turns(changes[:-1]).drawn(first)
            weights = shares(parse_mixture(mixture), self._names)
            found = self._changed[changes] = Turns(weights, self._seed, f"training from {first}", first, used)
        return found

    def training(self, number: int) -> Tokens:
        part, place = self._training.find(number)
        return self._parts[part].training(place)

    def validation(self, number: int) -> Tokens:
        part, place = self._validation.find(number)
        return self._parts[part].validation(place)

    def _whole_validation(self) -> int:
        """How many come before a part would have to repeat itself."""
        for number in range(_MOST_VALIDATION_SAMPLES):
            part, place = self._validation.find(number)
            if place >= self._parts[part].validation_count:
                return number
        return _MOST_VALIDATION_SAMPLES


class _GrammarSamples:
    """Samples of the grammar: the end mark, then sentences, cut at `context` + 1 tokens."""

    _VALIDATION = 1024

    def __init__(self, config: RunConfig) -> None:
        self._seed = config.seed
        self._size = config.model.context + 1
        # The tokenizer, unlike the samples, does not depend on the seed: runs that differ in it can be compared.
        trained_on = [sample_text(0, "tokenizer", number, 1) for number in range(_TRAINING_SENTENCES)]
        self.tokenizer = make_tokenizer(config.data.tokenizer, trained_on)
        table = "".join(f"{chance!r} {text}\n" for text, chance in sentences().items())
        digest = DataHash(self.tokenizer)
        digest.text(table)
        self.description = DataDescription(
            source=config.data.source,
            data_hash=digest.hexdigest(),
            token_count=0,
            vocabulary=self.tokenizer.vocabulary,
            training_samples=0,
            validation_samples=self._VALIDATION,
        )

    def training(self, number: int) -> Tokens:
        return self._sample("training", number)

    def validation(self, number: int) -> Tokens:
        return self._sample("validation", number)

    def _sample(self, purpose: str, number: int) -> Tokens:
        mark = [] if self.tokenizer.end_mark is None else [self.tokenizer.end_mark]
        characters = self._size  # a token is at least a character of ASCII, but may be many
        while True:
            tokens = self.tokenizer.encode(sample_text(self._seed, purpose, number, characters))
            if len(tokens) + len(mark) >= self._size:
                return np.concatenate((np.array(mark, dtype=np.int32), tokens))[: self._size]
            characters *= 2
