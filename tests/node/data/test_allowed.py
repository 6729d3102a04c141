"""What a run may read and write of a server's machine: what the operator of that machine named, and nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from node.compute.lanes import ServerPerformer
from node.data.allowed import Allowed, named_paths
from node.machine.jobs import PrepareData
from protocol.base.errors import BadInputError
from protocol.run.run import CheckpointSection, DataSection, ModelSection, RunConfig


def _reading(source: str = "builtin:grammar", tokenizer: str = "bytes", start_from: str = "") -> RunConfig:
    return RunConfig(data=DataSection(source=source, tokenizer=tokenizer), model=ModelSection(start_from=start_from))


def test_without_leave_a_run_reads_what_comes_with_us() -> None:
    """The demo's data, and tokenizers that are made of it."""
    for source in ("builtin:python", "builtin:grammar"):
        for tokenizer in ("bytes", "bpe:512"):
            Allowed().check(_reading(source, tokenizer))


def test_every_path_that_a_run_reads_needs_leave(tmp_path: Path) -> None:
    """The sentence names the field, the path, and what to say if it is right."""
    for field, config in (
        ("data.source", _reading(source=f"{tmp_path}/*.txt")),
        ("data.tokenizer", _reading(tokenizer=str(tmp_path / "tokenizer.json"))),
        ("model.start_from", _reading(start_from=str(tmp_path))),
    ):
        with pytest.raises(BadInputError, match=f"^{field}: the run wants to read {tmp_path}.*--data {tmp_path}"):
            Allowed().check(config)
        Allowed(data=(tmp_path,)).check(config)
        Allowed(data=tuple(map(Path, named_paths(config)))).check(config)


def test_ways_around_a_folder_lead_nowhere(tmp_path: Path) -> None:
    """`..`, links, homes, patterns and names that only begin alike."""
    mine, secret = tmp_path / "mine", tmp_path / "mine-too"
    for folder in (mine, secret):
        folder.mkdir()
    (secret / "a.txt").write_text("secret")
    (mine / "link").symlink_to(secret)
    (mine / "loop").symlink_to(mine / "loop")
    allowed = Allowed(data=(mine,))
    for path in (
        secret, f"{mine}/../mine-too", f"{mine}/link", f"{mine}/link/a.txt", f"{mine}/*/../../mine-too/*.txt", "~",
        "~nobody-here/x", "/", "/etc/passwd", "relative", f"{mine}/loop", f"{mine}\0",
    ):  # fmt: skip
        with pytest.raises(BadInputError, match=r"^data\.source"):
            allowed.check(_reading(source=str(path)))
    allowed.check(_reading(source=f"{mine}/sub/../*.txt"))


def test_checkpoints_go_below_the_state_or_where_the_operator_says(tmp_path: Path) -> None:
    """A run cannot fill another disk, nor write into somebody's start-up folder."""

    def writing(folder: str) -> RunConfig:
        return msgspec.structs.replace(RunConfig(), checkpoint=CheckpointSection(folder=folder))

    for folder in ("checkpoints", "a/b"):
        Allowed().check(writing(folder))
    for folder in (str(tmp_path), "../up", "a/../../up"):
        with pytest.raises(BadInputError, match=r"^checkpoint\.folder: the run wants to write to"):
            Allowed().check(writing(folder))
    Allowed(checkpoints=(tmp_path,)).check(writing(str(tmp_path / "run")))
    with pytest.raises(BadInputError):
        Allowed(data=(tmp_path,)).check(writing(str(tmp_path)))


def test_a_store_is_written_where_the_operator_says_and_a_folder_by_its_url_too(tmp_path: Path) -> None:
    """A run must not use a server's keys for another bucket, nor a folder by another name for it."""

    def writing(folder: str) -> RunConfig:
        return msgspec.structs.replace(RunConfig(), checkpoint=CheckpointSection(folder=folder))

    allowed = Allowed(checkpoints=("s3://bucket/runs",))
    allowed.check(writing("s3://bucket/runs"))
    allowed.check(writing("s3://bucket/runs/mine"))
    for place in ("s3://bucket", "s3://bucket/runs-too", "s3://other/runs", "gs://bucket/runs", "/bucket/runs"):
        with pytest.raises(BadInputError, match=f"^checkpoint.folder: .* with `--checkpoints {place}`"):
            allowed.check(writing(place))
    with pytest.raises(BadInputError, match="with this computer's keys; if that is right"):
        Allowed().check(writing("s3://bucket/runs"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "out").symlink_to("/")
    for lent in (tmp_path / "in", f"file://{tmp_path}/in"):
        Allowed(checkpoints=(lent,)).check(writing(f"file://{tmp_path}/in/run"))
        Allowed(checkpoints=(lent,)).check(writing(f"{tmp_path}/in/run"))
        for place in (f"file://{tmp_path}", f"file://{tmp_path}/in/out/etc"):
            with pytest.raises(BadInputError, match=r"^checkpoint\.folder"):
                Allowed(checkpoints=(lent,)).check(writing(place))


def test_a_servers_lane_reads_nothing_without_leave(tmp_path: Path) -> None:
    """Where the files are opened: the job fails with the sentence, and the file was not read."""
    (tmp_path / "secret.txt").write_text("secret " * 1000)
    job = PrepareData(_reading(source=str(tmp_path / "secret.txt")))
    with pytest.raises(BadInputError, match="the run wants to read"):
        ServerPerformer(tmp_path / "state")._prepare_data(job, {})
    done = ServerPerformer(tmp_path / "state", allowed=Allowed(data=(tmp_path,)))._prepare_data(job, {})
    assert done[2] > 1000
