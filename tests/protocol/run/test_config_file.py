"""RUN.toml: every mistake named, all at once; the example is true."""

from __future__ import annotations

import ast
import tomllib
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from protocol.base.errors import BadInputError
from protocol.run.config_file import FILE_BYTES_MAX, change_run, field_docs, load_run, run_example
from protocol.run.run import RunConfig


def write(folder: Path, text: str) -> Path:
    path = folder / "RUN.toml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(folder: Path, text: str) -> str:
    with pytest.raises(BadInputError) as caught:
        load_run(write(folder, text))
    return str(caught.value)


def test_the_example_parses_to_the_defaults(tmp_path: Path) -> None:
    """What --example prints is a run file that changes nothing."""
    assert load_run(write(tmp_path, run_example())) == RunConfig()


def test_the_example_shows_every_key_under_its_docstring() -> None:
    """No key is left out, and none is without a comment."""

    def keys(struct: type[msgspec.Struct]) -> int:
        count = 0
        for field in msgspec.structs.fields(struct):
            nested = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
            count += keys(field.type) if nested else 1
            assert nested or field_docs(struct)[field.name], f"{struct.__name__}.{field.name} has no docstring"
        return count

    lines = run_example().splitlines()
    assert sum(" = " in line and not line.startswith("#") for line in lines) == keys(RunConfig)
    for before, line in pairwise(lines):
        if " = " in line and not line.startswith("#"):
            assert before.startswith("#"), f"{line!r} has no comment"


def test_an_empty_file_is_the_default_run(tmp_path: Path) -> None:
    """Every key may be left out."""
    assert load_run(write(tmp_path, "")) == RunConfig()


def test_values_are_taken(tmp_path: Path) -> None:
    """A whole number is a number, too."""
    config = load_run(write(tmp_path, 'name = "a-1"\n[optimizer]\nlearning_rate = 1\n[batch]\ndelay = 0\n'))
    assert (config.name, config.optimizer.learning_rate, config.batch.delay) == ("a-1", 1.0, 0)
    assert isinstance(config.optimizer.learning_rate, float)


BAD = [
    ("[model]\nlayerz = 2", 'RUN.toml: model.layerz: unknown key (did you mean "layers"?)'),
    ("layers = 2", 'RUN.toml: layers: unknown key (did you mean "model.layers"?)'),
    ("[modle]\nlayers = 2", 'RUN.toml: modle: unknown key (did you mean "model"?)'),
    ("zzz = 2", "RUN.toml: zzz: unknown key"),
    ('[model]\nlayers = "four"', 'RUN.toml: model.layers: expected a whole number, got "four"'),
    ("[model]\nlayers = 4.0", "RUN.toml: model.layers: expected a whole number, got 4.0"),
    ("[model]\nlayers = true", "RUN.toml: model.layers: expected a whole number, got true"),
    ("[model]\nlayers = [4]", "RUN.toml: model.layers: expected a whole number, got a list"),
    ("[model.layers]\na = 1", "RUN.toml: model.layers: expected a whole number, got a table"),
    ("[model]\nlayers = 1979-05-27", "RUN.toml: model.layers: expected a whole number, got 1979-05-27"),
    ("model = 3", "RUN.toml: model: expected a table ([model]), got 3"),
    ("name = 3", "RUN.toml: name: expected text in quotes, got 3"),
    ("[model]\ntied_embeddings = 1", "RUN.toml: model.tied_embeddings: expected true or false, got 1"),
    ('[optimizer]\nbeta1 = "a"', 'RUN.toml: optimizer.beta1: expected a number, got "a"'),
    (
        '[optimizer]\ndecay = "exp"',
        'RUN.toml: optimizer.decay: expected one of "cosine", "linear", "wsd", "constant", got "exp"',
    ),
    ("[batch]\ndelay = 2", "RUN.toml: batch.delay: expected one of 0, 1, got 2"),
    ("[batch]\ndelay = true", "RUN.toml: batch.delay: expected one of 0, 1, got true"),
    ("[model]\nlayers = 0", "RUN.toml: model.layers: 0 is not between 1 and 1024"),
    (
        "[model]\nlayers = -9223372036854775809",
        "RUN.toml: model.layers: -9223372036854775809 is not between 1 and 1024",
    ),
    ("[optimizer]\nbeta1 = nan", "RUN.toml: optimizer.beta1: nan is not between 0.0 and 1.0"),
    ("[limits]\nlease_s = inf", "RUN.toml: limits.lease_s: inf is not between 0.01 and 86400.0"),
    ('name = "A b"', "RUN.toml: name: 'A b' is not 1 to 63 lower-case letters, digits and dashes"),
    ("[model]\nkv_heads = 3", "RUN.toml: model.kv_heads: must divide model.heads"),
    (
        "sed = 2\n[model]\nlayerz = 2\nhidden = 1.5",
        'RUN.toml: sed: unknown key (did you mean "seed"?)\n'
        'RUN.toml: model.layerz: unknown key (did you mean "layers"?)\n'
        "RUN.toml: model.hidden: expected a whole number, got 1.5",
    ),
]


@pytest.mark.parametrize(("text", "expected"), BAD, ids=[text.replace("\n", " ")[:30] for text, _ in BAD])
def test_a_mistake_is_named_with_its_key(tmp_path: Path, text: str, expected: str) -> None:
    """File, key, what was expected and what stood there; all mistakes of a file at once."""
    assert complaint(tmp_path, text) == expected


def test_what_is_no_toml_is_said_with_its_place(tmp_path: Path) -> None:
    """Line and column, as the TOML reader gives them; never a traceback."""
    assert complaint(tmp_path, "steps 5").startswith("RUN.toml: not TOML: Expected '=' after a key")
    assert "line 2" in complaint(tmp_path, "steps = 5\nseed 6")
    assert complaint(tmp_path, "a = " + "[" * 2000).startswith("RUN.toml: not TOML")
    path = tmp_path / "RUN.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(BadInputError, match=r"RUN\.toml: not UTF-8 at byte 8"):
        load_run(path)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    """Missing, a folder, or far too long."""
    with pytest.raises(BadInputError, match=r"none\.toml: cannot be read: No such file"):
        load_run(tmp_path / "none.toml")
    with pytest.raises(BadInputError, match=f"^{tmp_path}: cannot be read: Is a directory"):
        load_run(tmp_path)
    assert "longer than" in complaint(tmp_path, "#" * (FILE_BYTES_MAX + 1))


def test_a_file_full_of_mistakes_is_cut_short(tmp_path: Path) -> None:
    """Twenty lines, then how many more."""
    lines = complaint(tmp_path, "\n".join(f"zz{n} = 1" for n in range(30))).splitlines()
    assert len(lines) == 21 and lines[-1] == "RUN.toml: and 10 more"


def test_the_example_is_plain_toml() -> None:
    """It parses alone, and its values are what Python would print."""
    table = tomllib.loads(run_example())
    assert table["model"]["rope_theta"] == 10000.0
    assert ast.literal_eval(repr(table["batch"])) == {"microbatches": 8, "samples": 2, "segments": 1, "delay": 1}


def test_a_text_on_the_command_line_needs_no_quotes_though_it_is_a_number() -> None:
    """A shell has taken them off: `stages.cut="3"` comes as a number."""
    changed = change_run(RunConfig(), ["stages.cut=3", "name=7", "steps=9"])
    assert (changed.stages.cut, changed.name, changed.steps) == ("3", "7", 9)
