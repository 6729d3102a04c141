"""Models in and out as Hugging Face folders: `config.json`, `model.safetensors`, `tokenizer.json`.

An exported folder loads as `LlamaForCausalLM` in transformers, offline, and gives the same loss. A run may start from
such a folder (`model.start_from`): names, shapes and sizes must be exactly the run's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from node.compute.layout import StageLayout
from node.data.files import at_home
from node.data.tokenizer import TextTokenizer
from protocol.base.errors import BadInputError
from protocol.run.run import RunConfig

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 4 << 20
"""A header takes some 120 bytes a tensor: enough for 1,024 layers three times over."""
_MOST_JSON_BYTES = 16 << 20
_FLOATS = ("F32", "BF16", "F16")


# ---- out ------------------------------------------------------------------------------------------------------


def check_whole(layouts: Sequence[StageLayout]) -> None:
    """Raises `ValueError` unless the stages together are the model, each block once."""
    blocks = sorted(chunk for layout in layouts for chunk in layout.chunks)
    edges = [0, *(end for _, end in blocks)]
    if not layouts or blocks != list(itertools.pairwise(edges)) or edges[-1] != layouts[0].config.block_count:
        raise ValueError(f"stages of blocks {blocks} are not the model's")


def export_model(folder: Path, stages: Sequence[tuple[StageLayout, Tensor]], tokenizer: TextTokenizer) -> None:
    """As `export_stages`, of flat vectors that are there already."""
    export_stages(folder, [layout for layout, _ in stages], lambda stage: stages[stage][1], tokenizer)


def export_stages(
    folder: Path, layouts: Sequence[StageLayout], weights: Callable[[int], Tensor], tokenizer: TextTokenizer
) -> None:
    """Writes the model whose stages have these layouts.

    Files are written beside their names and then renamed, `config.json` last: a folder with one is complete, and one
    that holds another model loses its own before the first file of that is replaced.

    Args:
        weights: [parameter_count] fp32 of a stage by its number. Asked for one after the other: the one before has been
            written by then and is let go.
    Raises:
        OSError: the folder is full, or cannot be written to; nothing half-written is left there.
    """
    check_whole(layouts)
    config = layouts[0].config
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _partial(folder / _WEIGHTS) as partial:
            partial.unlink(missing_ok=True)
            try:
                with partial.open("wb") as file:
                    places = _write_header(file, layouts)
                    for stage, layout in enumerate(layouts):
                        _write_stage(file, places, layout, weights(stage))
            except OSError as error:
                raise OSError(error.errno, f"{folder / _WEIGHTS}: {error.strerror or error}") from error
            (folder / "config.json").unlink(missing_ok=True)
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    _write_text(folder / "tokenizer.json", tokenizer.to_json())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(config, tokenizer))
    _write_json(folder / "config.json", _model_config(config, layouts[0].vocabulary, tokenizer.end_mark))


def _write_header(file: BinaryIO, layouts: Sequence[StageLayout]) -> dict[str, int]:
    """Where in the file each weight begins, after writing what says so: as safetensors' own writer does, which wants
    all weights at once and copies them. They lie in the order of their names."""
    slices = sorted((part for layout in layouts for part in layout.slices), key=lambda part: part.name)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    for part in slices:
        places[part.name], end = end, end + 4 * part.count
        header[part.name] = {"dtype": "F32", "shape": list(part.shape), "data_offsets": [places[part.name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + begin for name, begin in places.items()}


def _write_stage(file: BinaryIO, places: Mapping[str, int], layout: StageLayout, flat: Tensor) -> None:
    for name, view in layout.views(flat).items():
        file.seek(places[name])
        file.write(view.numpy().astype("<f4", copy=False).data)


def _model_config(config: RunConfig, vocabulary: int, end_mark: int | None) -> dict[str, Any]:
    model = config.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.feed_forward,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.hidden // model.heads,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": end_mark,
        "eos_token_id": end_mark,
        "dtype": "float32",
    }


def _tokenizer_config(config: RunConfig, tokenizer: TextTokenizer) -> dict[str, Any]:
    marks = {} if tokenizer.end_text is None else dict.fromkeys(("bos_token", "eos_token"), tokenizer.end_text)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.model.context,
        "clean_up_tokenization_spaces": False,
    } | marks


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    _write_text(path, json.dumps(content, indent=2) + "\n")


def _write_text(path: Path, text: str) -> None:
    with _partial(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Where to write what is then given its name, when all of it is on the disk."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# ---- in -------------------------------------------------------------------------------------------------------


def initial_weights(layout: StageLayout) -> Tensor:
    """[parameter_count] fp32: version 0 of a stage, from `model.start_from` or from the run's seed.

    Raises:
        BadInputError: the folder cannot be used; the sentence names the field.
    """
    config = layout.config
    if not config.model.start_from:
        return layout.initial(config.seed)
    return read_model(at_home("model.start_from", config.model.start_from), layout)


def read_model(folder: Path, layout: StageLayout) -> Tensor:
    """A stage's weights out of a Hugging Face folder, whose whole model must be exactly the run's."""
    _check_config(folder, layout.config)
    whole = StageLayout.whole(layout.config, layout.vocabulary)
    shapes = {part.name: part.shape for part in whole.slices}
    offsets = {part.name: part for part in layout.slices}
    flat = torch.empty(layout.parameter_count)
    seen: set[str] = set()
    for path in _weight_files(folder):
        _check_header(path)
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # the file is no mapping
                    _check_tensor(path, name, file.get_slice(name), shapes, seen)
                    seen.add(name)
                    if name in offsets:
                        part = offsets[name]
                        flat[part.offset : part.end] = file.get_tensor(name).flatten()
        except (SafetensorError, OSError) as error:
            raise BadInputError(f"model.start_from: {path} is no safetensors file: {error}") from error
    missing = sorted(shapes.keys() - seen)
    if missing:
        raise BadInputError(f"model.start_from: {folder} lacks {missing[0]} ({len(missing)} weights are missing)")
    return flat


def _check_tensor(path: Path, name: str, held: Any, shapes: Mapping[str, tuple[int, ...]], seen: set[str]) -> None:
    if name not in shapes or name in seen:
        raise BadInputError(f"model.start_from: {path} holds {name}, which the run's model has not (or twice)")
    if tuple(held.get_shape()) != shapes[name]:
        raise BadInputError(
            f"model.start_from: {name} has the shape {tuple(held.get_shape())}, the run's model needs {shapes[name]}"
        )
    if held.get_dtype() not in _FLOATS:
        raise BadInputError(f"model.start_from: {name} is {held.get_dtype()}, not one of {', '.join(_FLOATS)}")


def _check_config(folder: Path, config: RunConfig) -> None:
    """The sizes that the weights' shapes do not show, and the rules of arithmetic, must be the run's too."""
    held = _read_json(folder / "config.json")
    model = config.model
    rope = held.get("rope_parameters") or held.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise BadInputError(f"model.start_from: {folder}/config.json has rope parameters that are no table")
    for field, found, wanted in (
        ("", held.get("model_type"), "llama"),
        ("", held.get("hidden_act", "silu"), "silu"),
        ("", bool(held.get("attention_bias")), False),
        ("", bool(held.get("mlp_bias")), False),
        ("", rope.get("rope_type", rope.get("type", "default")), "default"),
        ("layers", held.get("num_hidden_layers"), model.layers),
        ("heads", held.get("num_attention_heads"), model.heads),
        ("kv_heads", held.get("num_key_value_heads", held.get("num_attention_heads")), model.kv_heads),
        ("tied_embeddings", held.get("tie_word_embeddings", False), model.tied_embeddings),
        ("rope_theta", rope.get("rope_theta", held.get("rope_theta", 10000.0)), model.rope_theta),
        ("norm_eps", held.get("rms_norm_eps", 1e-6), model.norm_eps),
    ):
        if found != wanted:
            whose = f"model.{field} is {wanted!r}" if field else f"this project computes {wanted!r}"
            raise BadInputError(f"model.start_from: {folder}/config.json says {found!r} where {whose}")


def _weight_files(folder: Path) -> Iterator[Path]:
    if (folder / _WEIGHTS).is_file() or not (folder / _INDEX).is_file():
        yield folder / _WEIGHTS
        return
    places = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise BadInputError(f"model.start_from: {folder / _INDEX} has no weight_map")
    for name in sorted({str(place) for place in places.values()}):
        if name != Path(name).name:
            raise BadInputError(f"model.start_from: {folder / _INDEX} names a file outside of the folder: {name!r}")
        yield folder / name


def _check_header(path: Path) -> None:
    """A safetensors file begins with the length of its JSON header, 8 bytes little-endian."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise BadInputError(f"model.start_from: {path} cannot be read: {error}") from error
    if length > _MOST_HEADER_BYTES:
        raise BadInputError(f"model.start_from: {path} has a header of {length} bytes, more than {_MOST_HEADER_BYTES}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_JSON_BYTES:
            raise BadInputError(f"model.start_from: {path} is larger than {_MOST_JSON_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:  # no UTF-8, no JSON, a number of thousands of digits
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(f"model.start_from: {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise BadInputError(f"model.start_from: {path} is no JSON table")
    return content
