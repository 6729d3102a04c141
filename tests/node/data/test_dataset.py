"""Tests of `node.data.dataset`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from node.data.dataset import Dataset, tokenize
from node.data.grammar import sentences
from protocol.base.errors import BadInputError
from protocol.run.batches import Batches
from protocol.run.run import BatchSection, DataSection, ModelSection, RunConfig, ValidationSection

CONTEXT = 8


def run(source: str, seed: int = 1, tokenizer: str = "bytes") -> RunConfig:
    return RunConfig(
        seed=seed,
        model=ModelSection(context=CONTEXT),
        data=DataSection(source=source, tokenizer=tokenizer),
        batch=BatchSection(microbatches=3, samples=2),
    )


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    """A thousand and more bytes in which no eight repeat."""
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"{number:04d}" for number in range(250)), encoding="utf-8")
    return str(path)


def test_each_sample_comes_once_an_epoch(text_file: str) -> None:
    """Over two epochs each training sample is seen twice, and a validation sample never, in different orders."""
    dataset = Dataset(run(text_file))
    description = dataset.describe()
    epoch = description.training_samples
    assert epoch + description.validation_samples == (description.token_count - 1) // CONTEXT
    numbers: list[int] = []
    rows: list[bytes] = []
    for step in range(-(-2 * epoch // 6)):
        numbers += range(*Batches.of(run(text_file)).samples(step))
        for microbatch in range(3):
            rows += [row.tobytes() for row in dataset.batch(step, microbatch)[0]]
    assert numbers == list(range(len(rows)))
    first, second = rows[:epoch], rows[epoch : 2 * epoch]
    assert len(set(first)) == epoch and set(first) == set(second) and first != second
    aside = {row.tobytes() for index in range(dataset.validation_batches) for row in dataset.validation_batch(index)[0]}
    assert aside and not aside & set(first)


def test_batches_are_pure(text_file: str) -> None:
    """Asked in any order, by another reader, a microbatch is the same; another seed gives another."""
    one, two = Dataset(run(text_file)), Dataset(run(text_file))
    asked = [(4, 2), (0, 0), (4, 1)]
    expected = [one.batch(*each) for each in asked]
    for each, (tokens, labels) in reversed(list(zip(asked, expected, strict=True))):
        again = two.batch(*each)
        assert np.array_equal(again[0], tokens) and np.array_equal(again[1], labels)
    assert not np.array_equal(Dataset(run(text_file, seed=2)).batch(0, 0)[0], expected[1][0])


@pytest.mark.parametrize("source", ["text", "builtin:grammar"])
def test_labels_are_the_next_tokens(source: str, text_file: str) -> None:
    """Batches are int32 [samples, context]; each label is the token that follows, also past the sample's end."""
    dataset = Dataset(run(text_file if source == "text" else source))
    tokens, labels = dataset.batch(1, 1)
    for array in (tokens, labels):
        assert array.dtype == np.int32 and array.shape == (2, CONTEXT) and array.flags.c_contiguous
    assert np.array_equal(tokens[:, 1:], labels[:, :-1])
    if source == "text":
        row = tokenize(DataSection(source=text_file))[1]
        whole = row.cut(0, len(row)).tolist()
        for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
            begin = next(place for place in range(len(whole)) if whole[place : place + CONTEXT] == row)
            assert whole[begin + CONTEXT] == label[-1]


def test_grammar_has_no_end_and_no_repetition() -> None:
    """Samples begin with the end mark and then sentences; numbers far away work; validation is another stream."""
    config = RunConfig(data=DataSection(source="builtin:grammar"), seed=3)
    dataset = Dataset(config)
    tokens, labels = dataset.batch(10**9, 7)
    assert tokens[0, 0] == dataset.tokenizer.end_mark
    text = dataset.tokenizer.decode(labels[0])
    assert text.split(". ")[0] + ". " in sentences()
    assert not np.array_equal(dataset.batch(0, 0)[0], dataset.validation_batch(0)[0])
    assert dataset.describe().token_count == 0
    rows = {row.tobytes() for step in range(20) for row in dataset.batch(step, 0)[0]}
    assert len(rows) == 40


def test_grammar_works_with_trained_tokens() -> None:
    """With tokens of many letters the samples are as long, and need longer texts."""
    dataset = Dataset(run("builtin:grammar", tokenizer="bpe:400"))
    tokens, _ = dataset.batch(0, 0)
    assert tokens.shape == (2, CONTEXT)
    assert len(dataset.tokenizer.decode(tokens[0])) > CONTEXT
    assert int(tokens.max()) < dataset.vocabulary <= 400


def test_hash_is_of_the_content(tmp_path: Path) -> None:
    """Equal texts under different names have equal hashes; a changed letter or another tokenizer shows."""
    hashes = []
    for name, text in (("a", "x" * 100), ("b", "x" * 100), ("c", "x" * 99 + "y")):
        path = tmp_path / f"{name}.txt"
        path.write_text(text, encoding="utf-8")
        hashes.append(Dataset(run(str(path))).describe().data_hash)
    hashes.append(Dataset(run(str(path), tokenizer="bpe:258")).describe().data_hash)
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_a_text_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    """The sentence names the source and what it lacks."""
    path = tmp_path / "short.txt"
    path.write_text("short", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"^data\.source: .*model\.context"):
        Dataset(run(str(path)))


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    """Empty lines are no text."""
    path = tmp_path / "empty.txt"
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"^data\.source: .*holds no text"):
        Dataset(run(str(path)))


def test_too_much_text_is_sent_to_be_prepared(text_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would not stand in memory is refused with the command that helps."""
    monkeypatch.setattr("node.data.dataset.TEXT_CHARACTERS_MAX", 1000)
    tokenize.cache_clear()
    with pytest.raises(BadInputError, match=r"^data\.source: .*barnraise data prepare"):
        Dataset(run(text_file))


@pytest.mark.parametrize(("step", "microbatch"), [(-1, 0), (0, -1), (0, 3)])
def test_batches_that_do_not_exist_are_refused(step: int, microbatch: int, text_file: str) -> None:
    """There is no microbatch before the first or after a step's last."""
    with pytest.raises(ValueError, match="microbatch"):
        Dataset(run(text_file)).batch(step, microbatch)


def test_the_validation_may_have_text_of_its_own(text_file: str, tmp_path: Path) -> None:
    """Then no sample of the data is kept aside, and the servers' hash speaks of both texts."""
    other = tmp_path / "other.txt"
    other.write_text("quite another text, and long enough " * 4, encoding="utf-8")
    plain = Dataset(run(text_file))
    config = msgspec.structs.replace(run(text_file), validation=ValidationSection(source=str(other), every_steps=1))
    own = Dataset(config)
    aside = {row.tobytes() for index in range(own.validation_batches) for row in own.validation_batch(index)[0]}
    letters = other.read_bytes()
    assert len(aside) >= 8 and all(
        np.frombuffer(row, dtype=np.int32).astype(np.uint8).tobytes() in letters for row in aside
    )
    described = own.describe()
    assert described.training_samples == (described.token_count - 1) // CONTEXT > plain.describe().training_samples
    assert described.data_hash != plain.describe().data_hash
    other.write_text(other.read_text().replace("quite", "still"), encoding="utf-8")
    assert Dataset(config).describe().data_hash != described.data_hash


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batches": 9}, "validation.batches: 9 batches of 2 samples, but what is kept aside"),
        ({"share": 0.0}, "has 0 samples"),
        ({"source": "EMPTY"}, "validation.source"),
        ({"source": "SHORT"}, "validation.source: .*fewer than one sample"),
    ],
)
def test_a_validation_without_enough_text_is_refused(
    text_file: str, tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    """Before anybody trains, and in words."""
    (tmp_path / "SHORT.txt").write_text("a")
    if "source" in changes:
        changes = {"source": str(tmp_path / f"{changes['source']}.txt")}
    section = ValidationSection(**{"every_steps": 1, "batches": 1, **changes})  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match=sentence):
        Dataset(msgspec.structs.replace(run(text_file), validation=section))
