"""Tests of `coordinator.commands.branch`: what another run can take from this one, and what it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.commands.branch import branched
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
