"""Who reads a text says that it goes on; who listens need not be known to what is between."""

from __future__ import annotations

from pathlib import Path

from node.data.dataset import tokenize
from node.data.goes_on import begins_silence, told_to, watched
from node.data.tokenizer import TRAINING_S
from protocol.run.run import DataSection


def test_reading_and_training_are_told(tmp_path: Path) -> None:
    """One word for each text that is read, and before the merges that say nothing how long they may take."""
    (tmp_path / "a.txt").write_text("one two three four five " * 200)
    told: list[float] = []
    with told_to(told.append):
        tokenize(DataSection(source=str(tmp_path / "a.txt"), tokenizer="bpe:260"))
    assert told[0] == TRAINING_S and told.count(0.0) == 2  # for the training, and for the tokens


def test_a_thousand_pieces_a_second_are_one_word() -> None:
    told: list[float] = []
    with told_to(told.append):
        items = watched(iter(range(1000)))
    assert list(items) == list(range(1000)) and 1 <= len(told) < 1000


def test_nobody_need_listen() -> None:
    begins_silence(5.0)
    assert list(watched(iter("ab"))) == ["a", "b"]
