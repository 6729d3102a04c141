"""Reads a TOML file into frozen structs, and writes the commented example from the same structs.

All mistakes of a file are told at once, one line each, with the file, the key and what was meant:

    RUN.toml: model.layerz: unknown key (did you mean "layers"?)
    RUN.toml: optimizer.decay: expected one of "cosine", "linear", "wsd", "constant", got "exponential"
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from protocol.base.errors import BadInputError
from protocol.run.run import ModelSection, RunConfig

FILE_BYTES_MAX = 1 << 20
"""A run file has some hundred lines; whatever is larger is another file."""
ERRORS_SHOWN = 20
"""Lines of complaint at most: beyond, the file is of another kind."""

S = TypeVar("S", bound=msgspec.Struct)

_WORDS = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}


def load_run(path: Path) -> RunConfig:
    """The run in a `RUN.toml`, checked. Raises `BadInputError`, one line for each mistake."""
    config = load_struct(path, RunConfig)
    try:
        config.validate()
    except BadInputError as error:
        raise BadInputError(f"{path.name}: {error}") from error
    return config


def load_struct(path: Path, struct: type[S]) -> S:
    """The struct in a TOML file: known keys and right types; ranges are the caller's. Raises `BadInputError`."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise BadInputError(f"{path.name}: longer than {FILE_BYTES_MAX} bytes")
    try:
        table = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path.name}: not UTF-8 at byte {error.start}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInputError(f"{path.name}: not TOML: {error}") from error
    _read_auto(table)
    mistakes = [f"{path.name}: {mistake}" for mistake in _mistakes(table, struct, "", _homes(struct))]
    if len(mistakes) > ERRORS_SHOWN:
        mistakes[ERRORS_SHOWN:] = [f"{path.name}: and {len(mistakes) - ERRORS_SHOWN} more"]
    if mistakes:
        raise BadInputError("\n".join(mistakes))
    return msgspec.convert(table, struct)


def change_run(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """The run with `KEY=VALUE` settings of the command line: keys as in RUN.toml (`stages.count`), values in TOML.

    A text may stand without quotes. Ranges are the caller's to check. Raises `BadInputError` naming the key.
    """
    table: dict[str, Any] = msgspec.to_builtins(config)
    for setting in settings:
        key, equals, text = setting.partition("=")
        *sections, name = key.strip().split(".")
        if not equals:
            raise BadInputError(f"--set {setting}: expected KEY=VALUE")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            value = text.strip()
        place = table
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise BadInputError(f"--set {key.strip()}: {section} is no table")
        is_number = isinstance(value, int | float)
        place[name] = text.strip() if is_number and isinstance(place.get(name), str) else value  # `stages.cut=3`
    _read_auto(table)
    mistakes = [f"--set {mistake}" for mistake in _mistakes(table, RunConfig, "", _homes(RunConfig))]
    if mistakes:
        raise BadInputError("\n".join(mistakes[:ERRORS_SHOWN]))
    return msgspec.convert(table, RunConfig)


def example(struct: type[msgspec.Struct], heading: str, values: msgspec.Struct | None = None) -> str:
    """A TOML file with every key of a struct, each under its docstring: at its default, or as `values` has it."""
    lines = [*_comment(heading), "", *_example_lines(struct() if values is None else values, "")]
    return "\n".join(lines) + "\n"


def run_example(model: ModelSection | None = None, values: RunConfig | None = None) -> str:
    """What `barnraise coordinator --example` prints; with a model, `barnraise run example --from FOLDER`; with the
    values of a whole run, its file."""
    if values is not None:
        return example(RunConfig, "A run of Barnraise.", values)
    if model is not None:
        heading = "A run of Barnraise with the model of a config.json. Every other key stands at its default."
        return example(RunConfig, heading, RunConfig(model=model))
    return example(
        RunConfig,
        "A run of Barnraise. Every key may be left out; the values here are the defaults, which train a 0.9"
        " M-parameter LLaMA on Python's own documentation.",
    )


def _read_auto(table: dict[str, Any]) -> None:
    """`stages.count = "auto"`: the one key that takes a word in place of a number, 0 in the struct."""
    stages = table.get("stages")
    if isinstance(stages, dict) and stages.get("count") == "auto":
        stages["count"] = 0


# ---- reading ---------------------------------------------------------------------------------------------------


@cache
def _fields_of(struct: type[msgspec.Struct]) -> tuple[FieldInfo, ...]:
    """Its types are kept as text, which is compiled each time that somebody asks for them."""
    return msgspec.structs.fields(struct)


def _mistakes(table: dict[str, Any], struct: type[msgspec.Struct], prefix: str, homes: dict[str, str]) -> Iterator[str]:
    """Sentences about everything in `table` that `struct` does not allow, in the file's order."""
    fields = {field.name: field.type for field in _fields_of(struct)}
    for key, value in table.items():
        if key not in fields:
            yield f"{prefix}{key}: unknown key{_guess(key, list(fields), homes)}"
            continue
        expected = fields[key]
        if isinstance(expected, type) and issubclass(expected, msgspec.Struct):
            if isinstance(value, dict):
                yield from _mistakes(value, expected, f"{prefix}{key}.", homes)
            else:
                yield f"{prefix}{key}: expected a table ([{prefix}{key}]), got {_shown(value)}"
        elif not _fits(value, _bare(expected)):
            yield f"{prefix}{key}: expected {_words_for(_bare(expected))}, got {_shown(value)}"
        elif isinstance(value, str) and len(value) > _characters_max(expected):
            yield f"{prefix}{key}: has {len(value)} characters; at most {_characters_max(expected)}"


def _bare(expected: Any) -> Any:
    """A field's type without its bound."""
    return get_args(expected)[0] if get_origin(expected) is Annotated else expected


def _characters_max(expected: Any) -> float:
    """What a text's type bounds it by; infinity for a word of a choice."""
    bounds = [bound.max_length for bound in get_args(expected)[1:] if isinstance(bound, msgspec.Meta)]
    return next((most for most in bounds if most is not None), float("inf"))


def _fits(value: Any, expected: Any) -> bool:
    if get_origin(expected) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(expected))
    if expected is float:
        return type(value) in (int, float)
    return type(value) is expected


def _words_for(expected: Any) -> str:
    if get_origin(expected) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in get_args(expected))
    return _WORDS[expected]


def _shown(value: Any) -> str:
    """A value as it stood in the file, cut short."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool, int, float)) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _guess(key: str, siblings: list[str], homes: dict[str, str]) -> str:
    """` (did you mean …?)`: a sibling spelled alike, or the table that has this very key, or nothing."""
    alike = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if alike:
        return f' (did you mean "{alike[0]}"?)'
    if key in homes:
        return f' (did you mean "{homes[key]}"?)'
    return ""


def _homes(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, str]:
    """Full name of each key by its last part; of equal ones the first."""
    homes: dict[str, str] = {}
    for field in _fields_of(struct):
        homes.setdefault(field.name, prefix + field.name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            for name, full in _homes(field.type, f"{prefix}{field.name}.").items():
                homes.setdefault(name, full)
    return homes


# ---- writing ---------------------------------------------------------------------------------------------------


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The string under each field of a struct, joined to one line; read from the source, so it cannot go stale."""
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[statement.target.id] = " ".join(after.value.value.split())
    return docs


def _example_lines(struct: msgspec.Struct, prefix: str) -> Iterator[str]:
    """Plain keys first, then the tables: TOML gives keys to the table above them."""
    docs = field_docs(type(struct))
    tables: list[tuple[str, msgspec.Struct]] = []
    for field in _fields_of(type(struct)):
        value = getattr(struct, field.name)
        if isinstance(value, msgspec.Struct):
            tables.append((field.name, value))
            continue
        doc = docs.get(field.name, "")
        if get_origin(field.type) is Literal:
            choices = ", ".join(json.dumps(choice) for choice in get_args(field.type))
            doc = f"{doc} One of {choices}."
        yield from _comment(doc.strip())
        yield f"{field.name} = {json.dumps(value)}"
    for name, value in tables:
        yield ""
        yield from _comment(inspect.getdoc(type(value)) or "")
        yield f"[{prefix}{name}]"
        yield from _example_lines(value, f"{prefix}{name}.")


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, width=100, initial_indent="# ", subsequent_indent="# ")
