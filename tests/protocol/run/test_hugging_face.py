"""Tests of `protocol.run.hugging_face`: a run's model out of somebody's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator.commands import orders
from protocol.base.errors import BadInputError
from protocol.run.config_file import load_run
from protocol.run.hugging_face import model_from
from protocol.run.run import ModelSection

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu", "head_dim": 64, "vocab_size": 128256,
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def test_a_llama_is_taken_over(tmp_path: Path) -> None:
    """From the folder or the file; the exported model then has the same positions; older files lack some keys."""
    model = model_from(written(tmp_path))
    assert model == model_from(tmp_path / "config.json")
    assert model == ModelSection(
        layers=16, hidden=2048, heads=32, kv_heads=8, feed_forward=8192, context=4096, rope_theta=500000.0
    )
    old = model_from(written(tmp_path, num_key_value_heads=None, head_dim=None, rope_parameters={"rope_theta": 1e6}))
    assert (old.kv_heads, old.rope_theta) == (32, 1e6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "it is of the type 'gpt2'; a run's model is a LLaMA"),
        ({"hidden_act": "gelu"}, "not SwiGLU"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary positions are scaled \\('llama3'\\)"),
        ({"rope_scaling": {"type": "linear"}}, "scaled \\('linear'\\)"),
        ({"head_dim": 128}, "heads of width 128"),
        ({"head_dim": {"a": 1}}, "heads of width {'a': 1}"),
        ({"hidden_size": None}, "Expected `int`"),
        ({"max_position_embeddings": "\ud800"}, "surrogates not allowed"),
        ({"hidden_size": 2047}, "model.hidden"),
        ({"num_key_value_heads": 7}, "model.kv_heads"),
    ],
)
def test_what_is_no_llama_is_refused_in_words(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    """With what it is instead."""
    with pytest.raises(BadInputError, match=rf"^--from: .*config\.json: .*{says}"):
        model_from(written(tmp_path, **changes))


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_other_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    """In a sentence."""
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadInputError, match=r"^--from: "):
        model_from(tmp_path)


def test_the_example_has_the_model_and_can_be_run(tmp_path: Path) -> None:
    """What `run example --from` prints loads as a run with that model; without --from it has the defaults."""
    for arguments, layers in ((["--from", str(written(tmp_path))], 16), ([], ModelSection().layers)):
        done = CliRunner().invoke(orders.run, ["example", *arguments])
        assert done.exit_code == 0
        (tmp_path / "RUN.toml").write_text(done.output)
        assert load_run(tmp_path / "RUN.toml").model.layers == layers
