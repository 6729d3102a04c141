"""A run's model out of a Hugging Face `config.json`: taken over where it is a LLaMA, else refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from protocol.base.errors import BadInputError
from protocol.run.run import ModelSection, RunConfig

FILE_BYTES_MAX = 1 << 20
"""Such a file has some thirty lines."""
_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "context": "max_position_embeddings",
}


def model_from(path: Path) -> ModelSection:
    """The model that a `config.json` describes; `path` is the file or its folder.

    Raises:
        BadInputError: it cannot be read, or is no model that a run can have, with what it is instead.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as content:
            found = json.loads(content.read(FILE_BYTES_MAX))
    except OSError as error:
        raise BadInputError(f"--from: {file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"--from: {file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadInputError(f"--from: {file} is no model's config.json")
    for fault in _faults(found):
        raise BadInputError(f"--from: {file}: {fault}; a run's model is a LLaMA")
    values: dict[str, Any] = {name: found.get(key) for name, key in _SIZES.items()}
    values["kv_heads"] = found.get("num_key_value_heads") or values["heads"]
    values["norm_eps"] = found.get("rms_norm_eps", 1e-6)
    values["rope_theta"] = _rope(found).get("rope_theta", found.get("rope_theta", 10000.0))
    values["tied_embeddings"] = found.get("tie_word_embeddings", False)
    try:
        model = msgspec.convert(values, ModelSection)
        RunConfig(model=model).validate()
    except (msgspec.ValidationError, ValueError) as error:  # ours, or half a character where a number is due
        raise BadInputError(f"--from: {file}: {error}") from error
    head = found.get("head_dim") or model.hidden // model.heads
    if head != model.hidden // model.heads:
        raise BadInputError(f"--from: {file}: heads of width {head}, where hidden / heads is needed")
    return model


def _rope(found: dict[str, Any]) -> dict[str, Any]:
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    return rope if isinstance(rope, dict) else {"rope_type": str(rope)}


def _faults(found: dict[str, Any]) -> list[str]:
    """What it has that a run's model has not, in words."""
    faults = []
    if found.get("model_type") != "llama":
        faults.append(f"it is of the type {found.get('model_type')!r}")
    if found.get("hidden_act", "silu") != "silu":
        faults.append(f"its feed-forward uses {found['hidden_act']!r}, not SwiGLU")
    faults += [f"it has {key} set" for key in ("attention_bias", "mlp_bias") if found.get(key)]
    kind = _rope(found).get("rope_type", _rope(found).get("type", "default"))
    if kind != "default":
        faults.append(f"its rotary positions are scaled ({kind!r})")
    return faults
