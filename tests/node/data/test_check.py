"""Tests of `node.data.check` and `node.visit.costs`: what is wrong with a run is found before anybody joins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from node.data import check
from node.data.check import check_data
from node.data.prepared import prepare
from node.visit.costs import describe_costs
from protocol.base.errors import BadInputError
from protocol.run.run import CheckpointSection, DataSection, ModelSection, RunConfig, StagesSection, ValidationSection


def run(start_from: str = "", **data: str) -> RunConfig:
    return RunConfig(data=DataSection(**data), model=ModelSection(context=8, start_from=start_from))


def test_what_comes_with_barnraise_needs_no_look() -> None:
    """The defaults are fine, and the vocabulary is known without reading anything."""
    assert check_data(RunConfig()) == ([], 257)
    assert check_data(run(source="builtin:grammar", tokenizer="bpe:2048")) == ([], 2048)


def test_what_is_not_here_is_said_and_no_mistake(tmp_path: Path) -> None:
    """Only servers may have the files: the coordinator cannot know."""
    notes, vocabulary = check_data(
        run(str(tmp_path / "weights"), source=str(tmp_path / "no" / "*.txt"), tokenizer=str(tmp_path / "t.json"))
    )
    assert [note.split(":")[0] for note in notes] == ["data.source", "data.tokenizer", "model.start_from"]
    assert all("not on this computer" in note for note in notes) and vocabulary == 0
    assert "not on this computer" in check_data(run(source=str(tmp_path / "no"), tokenizer="prepared"))[0][0]


def test_a_prepared_folder_here_and_a_validation_elsewhere_are_no_mistake(tmp_path: Path) -> None:
    """The coordinator may have the one and not the other; servers read both."""
    (tmp_path / "a.txt").write_text("some words " * 50)
    prepare([("a", str(tmp_path / "a.txt"))], "text", "bytes", tmp_path / "out")
    validation = ValidationSection(every_steps=10, source=str(tmp_path / "no" / "b.txt"))
    config = replace(run(source=str(tmp_path / "out"), tokenizer="prepared"), validation=validation)
    notes, vocabulary = check_data(config)
    assert [note.partition(":")[0] for note in notes] == ["validation.source", "data.source"] and vocabulary == 257


def test_a_home_of_nobody_is_not_here() -> None:
    """A name that was mistyped is no reason for the coordinator to end without a sentence."""
    notes, _ = check_data(run(source="~nobody-here/a.txt", tokenizer="~nobody-here/b", start_from="~nobody-here/c"))
    assert [note.partition(":")[0] for note in notes] == ["data.source", "data.tokenizer", "model.start_from"]


def test_what_is_here_is_looked_at(tmp_path: Path) -> None:
    """Text by its beginning, a prepared folder as a whole, weights by their folder."""
    (tmp_path / "a.txt").write_text("words " * 100)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    notes, vocabulary = check_data(run(str(tmp_path / "model"), source=str(tmp_path / "*.txt")))
    assert vocabulary == 257 and "1 file," in notes[0] and "is here" in notes[1]
    prepare([("a", str(tmp_path / "a.txt"))], "text", "bytes", tmp_path / "out")
    notes, vocabulary = check_data(run(source=str(tmp_path / "out"), tokenizer="prepared"))
    assert vocabulary == 257 and "600 tokens" in notes[0]


@pytest.mark.parametrize(
    ("name", "content", "data", "says"),
    [
        ("a.jsonl", json.dumps({"body": "x"}), {}, r"data\.text_field: .*no text in the field"),
        ("a.txt", "\n", {}, r"data\.source: .*holds no text"),
        ("a.csv", "a,b", {}, r"data\.source: no "),
        ("a.txt", "words", {"tokenizer": "prepared"}, r"data\.source: .*was not made by"),
        ("a.txt", "words", {"mixture": "a=1"}, r"data\.source: .*was not made by"),
        ("a.txt", "words", {"tokenizer": "bpe:5"}, r"data\.tokenizer: "),
        ("a.txt", "words", {"source": "builtin:nothing"}, r"data\.source: there is no"),
        ("a.txt", "words", {"start_from": "."}, r"model\.start_from: there is no config\.json"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_key(
    tmp_path: Path, name: str, content: str, data: dict[str, Any], says: str
) -> None:
    """Before a link is printed, in one sentence."""
    (tmp_path / name).write_text(content)
    facts = {"source": str(tmp_path), **data}
    if "start_from" in facts:
        facts["start_from"] = str(tmp_path)
    with pytest.raises(BadInputError, match=f"^{says}"):
        check_data(run(**facts))


def test_text_that_is_too_much_is_found_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reading it."""
    monkeypatch.setattr(check, "TEXT_CHARACTERS_MAX", 100)
    (tmp_path / "a.txt").write_text("words " * 100)
    with pytest.raises(BadInputError, match=r"^data\.source: .*barnraise data prepare"):
        check_data(run(source=str(tmp_path)))


def test_costs_follow_from_the_runs_numbers() -> None:
    """Model, servers, volunteers and time, in lines for people."""
    lines = "\n".join(describe_costs(RunConfig(), 257))
    assert all(len(line) <= 80 for line in lines.splitlines()), "a small terminal would break them within a word"
    assert "0.8 M parameters in 2 stages" in lines and "servers     4 (2 a stage)" in lines
    assert "0.00 GB" not in lines and " MB of a device" in lines
    assert "MB more where it computes for want of volunteers)" in lines
    assert "none are needed" in lines and "hours for each 1,000 tokens/s" in lines


def test_costs_of_a_run_whose_stages_are_open_are_those_of_one() -> None:
    """It divided by the number that the planner has still to choose."""
    lines = "\n".join(describe_costs(RunConfig(stages=StagesSection(count=0)), 257))
    assert all(len(line) <= 80 for line in lines.splitlines())
    assert "in as many stages as the planner chooses" in lines and "2 a stage, each of one stage" in lines
    of_one, of_three = (describe_costs(RunConfig(stages=StagesSection(count=count)), 257) for count in (1, 3))
    differing = [pair for pair in zip(lines.splitlines()[2:], of_one[2:], strict=True) if pair[0] != pair[1]]
    assert len(differing) == 1 and differing[0][0] in of_three, "a stage in the middle moves the most activations"


def test_costs_say_what_a_lost_disk_costs_or_what_copies_take() -> None:
    """The demo's parts are large beside what its steps send; where copies are wanted, their memory is named."""
    assert "no copies: a lost disk costs all steps since the newest checkpoint" in "\n".join(
        describe_costs(RunConfig(), 257)
    )
    lines = describe_costs(RunConfig(checkpoint=CheckpointSection(buddy="always")), 257)
    assert any("copies of others' parts: 3.2 MB sent a step, 9.7 MB of memory" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_a_store_for_checkpoints_is_named_with_who_can_reach_it() -> None:
    """Nobody has keys here: what can be said is what each server needs, and where its own word is read."""
    url = "s3://bucket/runs"
    config = RunConfig(checkpoint=CheckpointSection(folder=url))
    (sentence,) = [note for note in check_data(config)[0] if note.startswith("checkpoint.folder")]
    assert f"`--checkpoints {url}`" in sentence and "`barnraise status`" in sentence
    assert not [note for note in check_data(RunConfig())[0] if note.startswith("checkpoint.folder")]
