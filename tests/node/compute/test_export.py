"""Tests of `node.compute.export`: folders that transformers reads, and folders that a run starts from."""

from __future__ import annotations

import json
import os
import resource
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from node.compute.export import export_model, export_stages, initial_weights, read_model
from node.compute.layout import StageLayout
from node.compute.model import StageModel
from node.compute.shard import ShardWorker
from node.data.tokenizer import make_tokenizer
from protocol.base.errors import BadInputError
from protocol.run.run import ModelSection, RunConfig
from tests.node.compute.small import random_batch, small_run

TOKENIZER = make_tokenizer("bytes", [])
VOCABULARY = TOKENIZER.vocabulary
CONFIG = small_run()


def starting_from(folder: Path, config: RunConfig = CONFIG, **changes: Any) -> RunConfig:
    model = msgspec.structs.replace(config.model, start_from=str(folder), **changes)
    return msgspec.structs.replace(config, model=model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The small model with seeded weights, exported as one stage."""
    layout = StageLayout.whole(CONFIG, VOCABULARY)
    export_model(tmp_path / "model", [(layout, layout.initial(7))], TOKENIZER)
    return tmp_path / "model"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same_loss(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exported folder loads offline as LlamaForCausalLM, with every weight, the same loss, and the same tokens."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = ModelSection(
        layers=2, hidden=32, heads=4, kv_heads=2, feed_forward=48, context=64, rope_theta=500.0, tied_embeddings=tied
    )
    config = small_run(model=model)
    layout = StageLayout.whole(config, VOCABULARY)
    params = layout.initial(7) * 3  # far from the start, so that no part is negligible
    export_model(tmp_path, [(layout, params)], TOKENIZER)

    loaded: Any = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    theirs, loading = loaded
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    text = "Numbers have names: 1 → one. " * 3
    tokens = torch.tensor([TOKENIZER.encode(text)[:65].tolist()]).long()
    loss, count = StageModel(layout).evaluate(params, tokens[:, :-1], tokens[:, 1:])
    assert float(theirs(input_ids=tokens, labels=tokens).loss.detach()) == pytest.approx(loss / count, rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(text)["input_ids"] == TOKENIZER.encode(text).tolist()
    assert tokenizer.eos_token_id == TOKENIZER.end_mark


def test_a_folder_that_is_full_is_said_and_left_as_it_was(folder: Path) -> None:
    """No half of a large file stays to fill it for good, and the model that was there is there still."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    layout = StageLayout.whole(CONFIG, VOCABULARY)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors: .*File too large"):
            export_model(folder, [(layout, layout.initial(8))], TOKENIZER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_export_over_another_model_is_never_taken_for_either(folder: Path) -> None:
    """One that ends between its files leaves new weights beside an old tokenizer, and no `config.json`."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()  # cannot be replaced by a file
    layout = StageLayout.whole(CONFIG, VOCABULARY)
    with pytest.raises(OSError, match="tokenizer"):
        export_model(folder, [(layout, layout.initial(8))], TOKENIZER)
    assert sorted(path.name for path in folder.iterdir()) == [
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_stages_give_the_file_of_the_whole(folder: Path, tmp_path: Path) -> None:
    """However the model is cut, the same bytes are written, and no partial file is left."""
    stages = [StageLayout(CONFIG, VOCABULARY, first, end) for first, end in ((0, 3), (3, 4), (4, 8))]
    export_model(tmp_path / "cut", [(stage, stage.initial(7)) for stage in stages], TOKENIZER)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / "cut" / name).read_bytes() == (folder / name).read_bytes()


def test_the_weights_are_written_as_safetensors_writes_them(folder: Path, tmp_path: Path) -> None:
    """To the byte: which needs all of them in memory, twice."""
    layout = StageLayout.whole(CONFIG, VOCABULARY)
    save_file(layout.views(layout.initial(7)), tmp_path / "theirs", metadata={"format": "pt"})
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_stage_is_let_go_before_the_next_is_asked_for(tmp_path: Path) -> None:
    """A model need not fit into memory; and where one stage cannot be had, no folder is left."""
    layouts = [StageLayout(CONFIG, VOCABULARY, first, end) for first, end in ((0, 3), (3, 4), (4, 8))]
    given: list[weakref.ref[torch.Tensor]] = []

    def weights(stage: int) -> torch.Tensor:
        assert not any(ref() is not None for ref in given)
        flat = layouts[stage].initial(7)
        given.append(weakref.ref(flat))
        return flat

    export_stages(tmp_path / "model", layouts, weights, TOKENIZER)
    assert len(given) == 3
    with pytest.raises(IndexError):
        export_stages(tmp_path / "none", layouts, lambda stage: [layouts[0].initial(7)][stage], TOKENIZER)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_all_files_have_the_mode_that_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    """A model that its maker can read and nobody else is of no use on a shared disk."""
    layout = StageLayout.whole(CONFIG, VOCABULARY)
    before = os.umask(umask)
    try:
        export_model(tmp_path / "model", [(layout, layout.initial(7))], TOKENIZER)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask) and "model.safetensors" in modes


def test_stages_that_are_not_the_model_are_refused(tmp_path: Path) -> None:
    """A stage that is missing or twice is no model."""
    stages = [StageLayout(CONFIG, VOCABULARY, first, end) for first, end in ((0, 3), (3, 8))]
    pairs = [(stage, stage.initial(7)) for stage in stages]
    for wrong in (pairs[:1], pairs[1:], [pairs[0], *pairs]):
        with pytest.raises(ValueError, match="are not the model's"):
            export_model(tmp_path / "model", wrong, TOKENIZER)


def test_a_run_starts_from_a_folder(folder: Path) -> None:
    """Any stage, and any shard of it, gets the folder's weights bit for bit."""
    config = starting_from(folder)
    layout = StageLayout(config, VOCABULARY, 2, 7)
    expected = layout.initial(7)
    assert not torch.equal(layout.initial(config.seed), expected)
    assert torch.equal(initial_weights(layout), expected)
    shard = ShardWorker(layout, 1, 2)
    shard.initial()
    assert torch.equal(shard.params(0), expected[shard.begin : shard.end])


def test_half_precision_and_several_files_are_read(folder: Path) -> None:
    """Published models come in bf16 and in several files with an index; both are read."""
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    places = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for part in sorted(set(places.values())):
        save_file({name: weights[name] for name in names if places[name] == part}, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    layout = StageLayout(starting_from(folder), VOCABULARY, 2, 7)
    assert torch.equal(initial_weights(layout), layout.initial(7).bfloat16().float())


def _rename(weights: dict[str, torch.Tensor]) -> None:
    weights["model.other.weight"] = weights.pop("model.norm.weight")


def _remove(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def _transpose(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"].T.contiguous()


def _to_integers(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].int()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_rename, "model.other.weight"),
        (_remove, "model.layers.1.mlp.up_proj.weight"),
        (_transpose, "lm_head.weight"),
        (_to_integers, "model.norm.weight"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    """An unknown, missing or misshapen weight is refused by name, even where another stage would hold it."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(BadInputError, match=rf"^model\.start_from: .*{named}"):
        read_model(folder, StageLayout(CONFIG, VOCABULARY, 0, 1))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("num_hidden_layers", 4, "model.layers is 3"),
        ("num_attention_heads", 2, "model.heads is 4"),
        ("num_key_value_heads", 4, "model.kv_heads is 2"),
        ("rms_norm_eps", 1e-6, "model.norm_eps is 1e-05"),
        ("tie_word_embeddings", True, "model.tied_embeddings is False"),
        ("model_type", "gpt2", "'llama'"),
        ("hidden_act", "gelu", "'silu'"),
        ("attention_bias", True, "False"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 10000.0}, "'default'"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 500.0}, "model.rope_theta is 10000.0"),
        ("rope_parameters", [1], "rope parameters"),
    ],
)
def test_other_arithmetic_is_refused(folder: Path, field: str, value: object, named: str) -> None:
    """What the weights' shapes cannot tell must agree in config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {field: value}), encoding="utf-8")
    with pytest.raises(BadInputError, match=r"^model\.start_from: ") as caught:
        read_model(folder, StageLayout.whole(CONFIG, VOCABULARY))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\x05"),
        ("model.safetensors", (1 << 40).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", (5 << 20).to_bytes(8, "little") + b"{" * (5 << 20)),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
        ("config.json", b"[]"),
        ("config.json", b"{"),
        ("config.json", b"\xff"),
        ("config.json", b"[" * 100_000),
        ("config.json", b'{"hidden_size": ' + b"9" * 5000 + b"}"),
    ],
)
def test_broken_files_are_refused(folder: Path, name: str, content: bytes) -> None:
    """Garbage, and headers larger than any honest one, end in one sentence."""
    (folder / name).write_bytes(content)
    with pytest.raises(BadInputError, match=r"^model\.start_from: "):
        read_model(folder, StageLayout.whole(CONFIG, VOCABULARY))


def test_missing_folders_and_paths_outside_are_refused(folder: Path, tmp_path: Path) -> None:
    """A folder that is not there is named; an index cannot lead out of its folder."""
    layout = StageLayout.whole(CONFIG, VOCABULARY)
    with pytest.raises(BadInputError, match="nowhere"):
        read_model(tmp_path / "nowhere", layout)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    with pytest.raises(BadInputError, match=r"model\.safetensors cannot be read"):
        read_model(folder, layout)
    index = {"weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(BadInputError, match="outside of the folder"):
        read_model(folder, layout)


def test_a_folder_goes_through_unchanged(folder: Path, tmp_path: Path) -> None:
    """What is read and written again is the same file."""
    layout = StageLayout.whole(starting_from(folder), VOCABULARY)
    export_model(tmp_path / "again", [(layout, initial_weights(layout))], TOKENIZER)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    tokens, labels = random_batch(CONFIG)
    assert StageModel(layout).evaluate(initial_weights(layout), tokens, labels)[0] > 0
