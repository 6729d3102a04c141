"""`barnraise export`: a model from one shared folder, or from the parts that each server kept."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result
from msgspec.structs import replace
from safetensors.torch import load_file

from node.commands.export import export
from node.compute import checkpoint
from node.compute.checkpoint import Manifest, read_verified
from node.compute.layout import StageLayout
from node.compute.seals import seal_manifest
from node.data.dataset import Dataset, tokenize
from node.data.tokenizer import make_tokenizer
from protocol.base.errors import BadInputError
from protocol.run.run import DataSection, RunConfig
from protocol.trust.membership import Invite, JoinLink, sign_statement
from tests.node.compute.small import small_run
from tests.node.compute.test_seals import COORDINATOR, SERVERS, sealer

CONFIG = small_run()
VOCABULARY = make_tokenizer("bytes", []).vocabulary
LAYOUT = StageLayout.whole(CONFIG, VOCABULARY)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Checkpoints 2 and 4 of a run of one stage in two shards, in one folder."""
    return written(tmp_path / "shared", CONFIG, LAYOUT)


def written(place: Path, config: RunConfig, layout: StageLayout, data_hash: str = "d") -> Path:
    """The same of any run, in `place`."""
    folder = checkpoint.run_folder(place, config)
    for step in (2, 4):
        parts = []
        about = {"config_hash": config.config_hash().hex(), "version": step}
        for shard, params in enumerate(torch.chunk(layout.initial(step), 2)):
            zeros = torch.zeros_like(params)
            state = {"params": params.clone(), "m": zeros, "v": zeros.clone()}
            home = checkpoint.step_folder(folder, step)
            parts.append(checkpoint.write_checkpoint_part(home, 0, shard, state, about))
        manifest = Manifest(
            run=config.name,
            config_hash=config.config_hash().hex(),
            config=config,
            step=step,
            version=step,
            data_cursor=0,
            data_hash=data_hash,
            vocabulary=layout.vocabulary,
            partition=((0, layout.chunks[0][1], 2),),
            parts=tuple(parts),
        )
        checkpoint.write_manifest(folder, manifest, True)
    return place


def scattered(shared: Path, home: Path) -> list[Path]:
    """The same, as two servers without a shared folder leave it: each its own shard, the first the manifest."""
    folders = []
    for shard in (0, 1):
        folder = home / f"server-{shard}" / "checkpoints"
        shutil.copytree(shared, folder)
        for other in folder.glob(f"*/*/stage-0-shard-{1 - shard}-*.safetensors"):
            other.unlink()
        folders.append(folder)
    for manifest in folders[1].glob("*/*/manifest.json"):
        manifest.unlink()
    return folders


def run(*arguments: Path | str) -> Result:
    return CliRunner().invoke(export, [str(argument) for argument in arguments])


def test_the_newest_complete_checkpoint_is_written_unless_a_step_is_named(shared: Path, tmp_path: Path) -> None:
    """A damaged newest one is passed over; a damaged one that was named is refused by a sentence."""
    assert run(tmp_path / "a", shared).output.endswith("the model after 4 steps\n")
    assert run(tmp_path / "b", shared, "--step", "2").exit_code == 0
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert set(a) == set(b) and any(not torch.equal(a[name], b[name]) for name in a)
    next(shared.glob("*/step-00000004/stage-0-shard-1-*.safetensors")).unlink()
    assert run(tmp_path / "c", shared).output.endswith("the model after 2 steps\n")
    result = run(tmp_path / "d", shared, "--step", "4")
    assert isinstance(result.exception, BadInputError) and "stage-0-shard-1" in str(result.exception)
    absent = run(tmp_path / "e", shared, "--step", "3").exception
    assert str(absent) == "--step: no checkpoint has step 3; there are those of steps 2, 4"


def test_parts_of_several_servers_are_put_together(shared: Path, tmp_path: Path) -> None:
    """The same model as from the shared folder, in any order, and nothing is left beside it."""
    folders = scattered(shared, tmp_path)
    assert run(tmp_path / "whole", shared).exit_code == 0
    assert run(tmp_path / "parts", *reversed(folders)).exit_code == 0
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert set(whole) == set(parts) and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [path.name for path in tmp_path.glob(".barnraise-export-*")] == []


def test_an_export_holds_weights_alone_and_of_one_part_at_a_time(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 8 B parameters the moments are two thirds of a checkpoint of 96 GB, and none of them is written."""
    held: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def seen(*words: Any) -> dict[str, torch.Tensor]:
        nonlocal most
        tensors = read_verified(*words)
        held.extend(map(weakref.ref, tensors.values()))
        most = max(most, sum(tensor.nbytes for ref in held if (tensor := ref()) is not None))
        return tensors

    monkeypatch.setattr("node.compute.export_checkpoint.read_verified", seen)
    assert run(tmp_path / "out", shared).exit_code == 0
    assert len(held) == 2 and most <= 4 * -(-LAYOUT.parameter_count // 2)


def test_a_store_gives_the_same_model_by_its_url(shared: Path, tmp_path: Path) -> None:
    """The newest whole one is brought here for it, and nothing is left; a step can be named."""
    url = f"file://{shared}"
    assert run(tmp_path / "folder", shared).exit_code == 0
    result = run(tmp_path / "url", url)
    assert result.output.endswith("the model after 4 steps\n"), result.exception
    folder, store = (load_file(tmp_path / name / "model.safetensors") for name in ("folder", "url"))
    assert set(folder) == set(store) and all(torch.equal(folder[name], store[name]) for name in folder)
    part = next(shared.glob("*/step-00000004/stage-0-shard-1-*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert run(tmp_path / "older", url).output.endswith("the model after 2 steps\n")
    assert "stage-0-shard-1" in str(run(tmp_path / "bad", url, "--step", "4").exception)
    assert "no checkpoint has step 3" in str(run(tmp_path / "none", url, "--step", "3").exception)
    assert [path.name for path in tmp_path.glob(".barnraise-export-*")] == []


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_the_state_folders_of_the_servers_do_as_well(shared: Path, tmp_path: Path, levels: int) -> None:
    """Named one by one, by the folder that holds them, or as they lie below a user's folder: the same model."""
    home = tmp_path / "home" / ("run-id" if levels == 4 else "")
    scattered(shared, home)
    states = sorted(home.iterdir())
    (home / "server-2").mkdir()  # one that has no place yet
    given = {1: [state / "checkpoints" for state in states], 2: sorted(home.iterdir()), 3: [home], 4: [home.parent]}
    assert run(tmp_path / "whole", shared).exit_code == 0
    result = run(tmp_path / "parts", *given[levels])
    assert result.exit_code == 0, result.exception
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert set(whole) == set(parts) and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_what_is_missing_is_named(shared: Path, tmp_path: Path) -> None:
    """One server's folder is not enough; no folder and folders of several runs are no checkpoints."""
    folders = scattered(shared, tmp_path)
    result = run(tmp_path / "out", folders[0])
    assert "no complete checkpoint" in str(result.exception) and "stage-0-shard-1" in str(result.exception)
    assert "is no folder" in str(run(tmp_path / "out", tmp_path / "nowhere").exception)
    assert str(run("/dev/null/x", shared).exception) == "OUT: /dev/null/x cannot be written: Not a directory"
    (tmp_path / "empty").mkdir()
    assert str(run(tmp_path / "out", tmp_path / "empty").exception) == (
        f"CHECKPOINTS: there is no checkpoint in {tmp_path / 'empty'}"
    )
    other = tmp_path / "other" / "another-run" / "step-00000001"
    other.mkdir(parents=True)
    assert "several runs" in str(run(tmp_path / "out", folders[0], tmp_path / "other").exception)
    assert not (tmp_path / "out").exists()


def test_a_model_gets_the_tokenizer_that_it_has_learned_or_none(tmp_path: Path) -> None:
    """A byte-pair encoding is trained on the run's text: where that has grown, the same key names another tokenizer,
    and the export says so instead of writing it beside the weights. Bytes are bytes, whatever lies where the text
    was."""
    text = tmp_path / "text.txt"
    text.write_text("the barn was raised by all of them together\n" * 50)
    config = small_run(data=DataSection(source=str(text), tokenizer="bpe:300"))
    data = Dataset(config)
    layout = StageLayout.whole(config, data.vocabulary)
    place = written(tmp_path / "of-text", config, layout, data.describe().data_hash)
    assert run(tmp_path / "same", place).exit_code == 0
    assert (tmp_path / "same" / "tokenizer.json").read_text() == data.tokenizer.to_json()

    text.write_text("zebras quickly jumped over every lazy fox in sight of us\n" * 50)
    tokenize.cache_clear()  # another process would export
    other = run(tmp_path / "other", place)
    assert isinstance(other.exception, BadInputError), other.output
    assert str(other.exception).startswith(f"data.source: {text} is not here what the run was trained on")
    assert not (tmp_path / "other").exists()

    text.unlink()
    tokenize.cache_clear()
    bytes_run = small_run(data=DataSection(source=str(text), tokenizer="bytes"))
    place = written(tmp_path / "of-bytes", bytes_run, StageLayout.whole(bytes_run, VOCABULARY))
    assert run(tmp_path / "bytes", place).exit_code == 0


def test_a_full_disk_is_said_in_a_sentence(shared: Path, tmp_path: Path) -> None:
    """Where the weights were to be written, and in words of the system's."""
    (tmp_path / "out" / "tokenizer.json").mkdir(parents=True)  # as good as a full disk: no file can be written there
    assert str(run(tmp_path / "out", shared).exception) == f"OUT: {tmp_path / 'out'} cannot be written: Is a directory"


def test_parts_that_can_be_neither_linked_nor_copied_are_named(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another file system they are copied, and there may be no room for them."""

    def across(_: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(target))

    folders = scattered(shared, tmp_path)
    monkeypatch.setattr("os.link", across)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        result = run(tmp_path / "out", *folders)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(result.exception, BadInputError) and "cannot be copied: File too large" in str(result.exception)
    assert [path.name for path in tmp_path.glob(".barnraise-export-*")] == []


def _named(manifest: Manifest, name: str) -> dict[str, Any]:
    return {"parts": (dataclasses.replace(manifest.parts[0], file=name), *manifest.parts[1:])}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: {"parts": m.parts[:1]}, "the weights of stage 0 are not"),
        (lambda m: {"partition": ((0, 4, 2),)}, "are not the model's"),
        (lambda m: {"partition": ((0,),)}, "has a partition that cannot be"),
        (lambda m: {"partition": ((0, 8, 0),)}, "the weights of stage 0 are not"),
        (lambda m: {"partition": ((0, 8, 1 << 62),)}, "the weights of stage 0 are not"),
        (lambda m: {"vocabulary": 1 << 62}, "the weights of stage 0 are not"),
        (
            lambda m: {"config": replace(m.config, model=replace(m.config.model, heads=0))},
            "is none that its run can have written: model.heads",
        ),
        (lambda m: _named(m, ".."), "is not the name of a file in its folder"),
        (lambda m: _named(m, "a/b"), "is not the name of a file in its folder"),
        (lambda m: _named(m, "x" * 300), "is not the name of a file in its folder"),
        (lambda m: _named(m, "x\0"), "is not the name of a file in its folder"),
    ],
)
def test_a_manifest_that_somebody_has_made_up_is_refused_in_words(
    change: Callable[[Manifest], dict[str, Any]], says: str, shared: Path, tmp_path: Path
) -> None:
    """Its sum is right: anybody can write one, and hand it on as a run's checkpoint."""
    home = next(shared.glob("*/step-00000004"))
    found = checkpoint.read_manifest(home)
    found = replace(found, **change(found), sum="")
    found = replace(found, sum=found.expected_sum())
    (home / checkpoint.MANIFEST).write_bytes(msgspec.json.encode(found))
    result = run(tmp_path / "out", shared, "--step", "4")
    assert isinstance(result.exception, BadInputError), result.exception
    assert str(result.exception).startswith("CHECKPOINTS: ") and says in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_who_signed_is_said_and_who_knows_the_run_takes_nothing_else(shared: Path, tmp_path: Path) -> None:
    """A checkpoint from before is exported with a sentence; with a join link of the run only what its coordinator's
    servers signed."""
    assert "nobody has signed" in run(tmp_path / "a", shared).output
    invite = Invite(COORDINATOR.public_key, bytes(16), "volunteer", 0, 1, bytes(16))
    link = JoinLink(("127.0.0.1:9",), sign_statement(invite, COORDINATOR))
    refused = run(tmp_path / "b", shared, "--link", str(link))
    assert isinstance(refused.exception, BadInputError) and "nobody has signed" in str(refused.exception)
    for home in shared.glob("*/step-*"):
        found = checkpoint.read_manifest(home)
        seal_manifest(home, found, sealer(SERVERS[0]))
    taken = run(tmp_path / "b", shared, "--link", str(link))
    assert taken.exit_code == 0 and SERVERS[0].node in taken.output
