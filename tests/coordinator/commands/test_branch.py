"""Tests of `coordinator.commands.branch`: what another run can take from this one, and what it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from coordinator.commands.branch import branched, with_weights
from protocol.base.errors import BadInputError
from protocol.cli import main
from protocol.run.run import RunConfig

OLD = RunConfig(name="old")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ((), "the new run needs a name of its own"),
        (("name=old",), "the new run needs a name of its own"),
        (("name=new", "model.layers=9"), r"model.layers: the weights have the model's shape \(4\)"),
        (("name=new", "model.start_from=/x"), "a branch begins with the weights of the checkpoint"),
        (("name=new", "data.tokenizer=bpe:300"), "the model has learned bytes"),
        (("name=new", "batch.microbatches=0"), "batch.microbatches: 0 is not between"),
        (("name=new", "batch.microbatchez=2"), "did you mean"),
    ],
)
def test_what_a_branch_cannot_have_is_said(setting: tuple[str, ...], says: str) -> None:
    """In a sentence that names the key."""
    with pytest.raises(BadInputError, match=says):
        branched(OLD, setting)


def test_all_else_may_be_other() -> None:
    """What `run set` refuses, above all."""
    new = branched(OLD, ("name=new", "batch.microbatches=32", "stages.count=3", "seed=2", "optimizer.beta1=0.8"))
    assert (new.batch.microbatches, new.stages.count, new.seed) == (32, 3, 2)


def test_nothing_is_written_over_and_a_wrong_folder_is_named(tmp_path: Path) -> None:
    """Exit code 2 and one sentence each; no file is left."""
    (tmp_path / "RUN.toml").write_text('name = "old"\n')
    (tmp_path / "there.toml").write_text("")
    for target, folder, says in (
        ("there.toml", "none", "there is already, and is not written over"),
        ("NEW.toml", "none", "is no folder"),
    ):
        words = ["run", "branch", str(tmp_path / "RUN.toml"), str(tmp_path / target), str(tmp_path / folder)]
        done = CliRunner().invoke(main, [*words, "--set", "name=new"])
        assert done.exit_code == 2 and says.split()[-1] in done.output, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RUN.toml", "there.toml"]


def of_data(**changes: str) -> RunConfig:
    return msgspec.structs.replace(OLD, data=msgspec.structs.replace(OLD.data, **changes))


@pytest.mark.parametrize(
    ("setting", "taken_along"),
    [("data.source=/other", True), ("data.text_field=body", True), ("seed=2", False)],
)
def test_a_tokenizer_that_was_trained_on_the_old_text_is_kept_for_another(
    setting: str, taken_along: bool, tmp_path: Path
) -> None:
    """`bpe:300` of another text is another tokenizer: the weights would get numbers that mean other letters."""
    old = of_data(source="/text", tokenizer="bpe:300")
    new = with_weights(old, branched(old, ("name=new", setting)), tmp_path / "model")
    assert new.model.start_from == str(tmp_path / "model")
    assert new.data.tokenizer == (str(tmp_path / "model" / "tokenizer.json") if taken_along else "bpe:300")


def test_data_that_was_prepared_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Where both folders are here; what is not here, its servers will read."""
    for name, words in (("old", {"a": 1}), ("same", {"a": 1}), ("other", {"a": 2})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(words))
    old = of_data(source=str(tmp_path / "old"), tokenizer="prepared")
    for name in ("same", "absent"):
        source = str(tmp_path / name)
        assert with_weights(old, branched(old, ("name=new", f"data.source={source}")), tmp_path).data.source == source
    with pytest.raises(BadInputError, match=r"other was prepared with another tokenizer than .*old; prepare it again"):
        with_weights(old, branched(old, ("name=new", f"data.source={tmp_path / 'other'}")), tmp_path)
