"""A newer build knows the runs of older ones by the hash that those gave them, and every difference still counts.

`tests/golden/older_hashes.json` was written by the builds that it names, from git's history: what each called some
configurations. `first_form` are the keys that the oldest of them had.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.run.config_file import change_run
from protocol.run.config_hash import LATER, NOT_HASHED, older_hashes
from protocol.run.run import RunConfig

OLDER = json.loads((Path(__file__).parents[2] / "golden" / "older_hashes.json").read_text())
WRITTEN = [(build, each["config"], each["hash"]) for build, found in OLDER["builds"].items() for each in found]
OTHERS: dict[type, Any] = {int: 12345, float: 0.123, str: "other", bool: True}


def keys(table: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from keys(value, f"{before}{name}.")
        else:
            yield before + name, value


def hashed_keys() -> dict[str, Any]:
    all_keys = dict(keys(msgspec.to_builtins(RunConfig())))
    return {key: value for key, value in all_keys.items() if key not in NOT_HASHED and not key.startswith("audit.")}


@pytest.mark.parametrize(("build", "written", "called"), WRITTEN)
def test_a_configuration_has_the_hash_that_an_older_build_gave_it(
    build: str, written: dict[str, Any], called: str
) -> None:
    """What the older build kept as JSON reads as the same run, and is called so too; another run is not."""
    config = msgspec.json.decode(json.dumps(written), type=RunConfig)
    assert config.has_hash(bytes.fromhex(called)), build
    other = msgspec.structs.replace(config, seed=config.seed + 1)
    assert not other.has_hash(bytes.fromhex(called))


def test_the_first_form_is_still_the_hash() -> None:
    """Where all later keys stand at what was done before them, nothing at all has changed."""
    for build in ("f03bf97", "ec8a390"):
        for each in OLDER["builds"][build]:
            config = msgspec.json.decode(json.dumps(each["config"]), type=RunConfig)
            assert config.config_hash().hex() == each["hash"]


def test_every_key_is_of_the_first_form_or_came_later_or_is_not_hashed() -> None:
    """A new key goes to the end of `LATER` with what runs did before it, and is read so from files that lack it; or,
    if nothing is computed by it, into `NOT_HASHED`. No key is dropped."""
    assert set(hashed_keys()) == {*OLDER["first_form"], *LATER}
    defaults = hashed_keys()
    assert {key: defaults[key] for key in LATER} == LATER, "older files lack the key and mean this"


@pytest.mark.parametrize("key", sorted(hashed_keys()))
def test_another_value_of_any_key_is_another_hash(key: str) -> None:
    """By this build's form and by each older one."""
    config = RunConfig()
    value = hashed_keys()[key]
    if isinstance(value, str):  # texts of a fixed list take only those
        section, _, name = key.rpartition(".")
        struct = type(getattr(config, section)) if section else RunConfig
        hint = msgspec.inspect.type_info(struct)
        kind = next(field.type for field in hint.fields if field.name == name)  # type: ignore[attr-defined]
        choices = [choice for choice in getattr(kind, "values", ["other"]) if choice != value]
        other = change_run(config, [f"{key}={json.dumps(choices[0])}"])
    elif key == "batch.delay":
        other = change_run(config, ["batch.delay=0"])
    else:
        other = change_run(
            config, [f"{key}={json.dumps(not value if isinstance(value, bool) else OTHERS[type(value)])}"]
        )
    assert other != config
    assert not {other.config_hash(), *older_hashes(other)} & {config.config_hash(), *older_hashes(config)}
    assert not config.has_hash(other.config_hash()) and not other.has_hash(config.config_hash())
