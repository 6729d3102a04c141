"""Tests of `node.data.grammar`."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from node.data.grammar import floor, sample_text, sentences


def split(text: str) -> list[str]:
    return [part + ". " for part in text.split(". ")[:-1]]


def test_probabilities_sum_to_one_and_no_sentence_begins_another() -> None:
    """The table is a distribution, and a text can be read in one way only."""
    table = sentences()
    assert math.fsum(table.values()) == pytest.approx(1.0, abs=1e-12)
    assert all(text.index(". ") == len(text) - 2 for text in table)


def test_endings_agree_with_beginnings() -> None:
    """Pronouns follow the name, verbs the count, and brackets close in reverse order."""
    for text in sentences():
        words = text.split()
        if words[0] in ("Anna", "Carla"):
            assert " her " in text and " she " in text
        elif words[0] in ("Bruno", "David"):
            assert " his " in text and " he " in text
        elif words[0] == "One":
            assert " it was " in text and not words[2].endswith("s")
        elif words[0] == "We":
            mirrored = words[2][::-1].translate(str.maketrans("([{", ")]}"))
            assert words[5] == mirrored + "."
        else:
            assert " they were " in text and words[2].endswith("s")


def test_samples_are_pure_and_grow_at_their_end() -> None:
    """A sample depends on seed, purpose and number alone; asking for more only adds."""
    text = sample_text(1, "training", 5, 300)
    assert text == sample_text(1, "training", 5, 300)
    assert sample_text(1, "training", 5, 2000).startswith(text)
    others = [
        sample_text(2, "training", 5, 300),
        sample_text(1, "validation", 5, 300),
        sample_text(1, "training", 6, 300),
    ]
    assert len({text, *others}) == 4
    assert set(split(text)) <= set(sentences())
    assert (
        sample_text(1, "training", 0, 1)
        == "David left his red stone in the market before night, and then he came back for it. "
    )


def test_sentences_come_as_often_as_the_table_says() -> None:
    """Over ten thousand sentences each kind's share lies within five standard deviations of its probability."""
    seen = [part for number in range(2000) for part in split(sample_text(9, "training", number, 300))]
    expected: Counter[str] = Counter()
    for text, chance in sentences().items():
        expected[text.split()[0]] += chance  # type: ignore[assignment]
    counts = Counter(text.split()[0] for text in seen)
    for word, chance in expected.items():
        deviation = math.sqrt(len(seen) * chance * (1 - chance))
        assert abs(counts[word] - len(seen) * chance) < 5 * deviation, word


def test_floor_is_the_entropy() -> None:
    """The floor of one byte, of a long text, and a measurement at a middling length agree with the definition."""
    table = sentences()
    first: Counter[str] = Counter()
    for text, chance in table.items():
        first[text[0]] += chance  # type: ignore[assignment]
    assert floor(1) == pytest.approx(-sum(chance * math.log(chance) for chance in first.values()))
    entropy = -sum(chance * math.log(chance) for chance in table.values())
    length = sum(chance * len(text) for text, chance in table.items())
    assert floor(20_000) == pytest.approx(entropy / length, rel=1e-3)
    # The surprise of a perfect reader, measured on samples, has the floor as its mean.
    context, samples = 100, 600
    surprises = [_surprise(sample_text(4, "training", number, context)[:context]) for number in range(samples)]
    mean = sum(surprises) / samples
    deviation = math.sqrt(sum((each - mean) ** 2 for each in surprises) / samples / samples)
    assert abs(mean / context - floor(context)) < 4 * deviation / context


def _surprise(text: str) -> float:
    """Minus the logarithm of the chance that a sample begins with `text`."""
    *whole, last = text.split(". ")
    nats = -sum(math.log(sentences()[part + ". "]) for part in whole)
    return nats - math.log(sum(chance for each, chance in sentences().items() if each.startswith(last)))
