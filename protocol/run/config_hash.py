"""The hash of a run's configuration, and why a newer build finds the same one as an older build did.

State folders, checkpoints and consents are held to the hash. So a key that a later build has brought is left out of it
where it stands at what every run did before there was such a key: that value is written here, and does not follow the
struct's default. With any other value it is in the hash, and whoever does not know it cannot take part. Keys of the
first form always are.

For some time builds hashed every key that they knew, whatever its value. What they have left behind is still known:
`older_hashes` has those forms. No form will be added: a new key goes into `LATER`, and changes no hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import msgspec

NOT_HASHED = ("description", "audit", "stages.order", "checkpoint.buddy")
"""Keys and tables by which nothing is computed: words to people, audits, the order of work, copies."""
LATER: dict[str, int | float | str | bool] = {
    "validation.every_steps": 0,
    "validation.batches": 8,
    "validation.share": 0.015625,
    "validation.source": "",
    "stages.cut": "even",
    "guard.not_finite": "skip",
    "guard.spike": 0.0,
    "guard.on_spike": "pause",
    "batch.segments": 1,
    "compute.split_backward": False,
}
"""Keys that came after the first form, oldest first, each with what runs did before there was the key."""
_ALWAYS = (4, 5, 8, 9, 10)
"""How many of the first of `LATER` the builds between always had in the hash."""


def config_hash(config: msgspec.Struct) -> bytes:
    """BLAKE2b-256 over the canonical msgpack form of the keys that are hashed."""
    return _hash(_flat_without(config, set()))


def older_hashes(config: msgspec.Struct) -> tuple[bytes, ...]:
    """What builds that knew this configuration, and had other keys in the hash, called it by; newest form first."""
    found = []
    for count in reversed(_ALWAYS):
        always = list(LATER)[:count]
        fields = _flat_without(config, set(always))
        if all(_value(fields, key) is None for key in list(LATER)[count:]):  # else no such build can have had it
            found.append(_hash(fields))
    return tuple(found)


def _flat_without(config: msgspec.Struct, always: Collection[str]) -> dict[str, Any]:
    """The tables of the configuration without what is not hashed; `always`: later keys that are in at any value."""
    fields: dict[str, Any] = msgspec.to_builtins(config)
    gone = [key for key, before in LATER.items() if key not in always and _value(fields, key) == before]
    for key in (*NOT_HASHED, *gone):
        section, _, name = key.rpartition(".")
        table = fields[section] if section else fields
        del table[name]
        if not table:
            del fields[section]
    return fields


def _value(fields: dict[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    return fields.get(section, {}).get(name)


def _hash(fields: dict[str, Any]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=32, person=b"br-run-config").digest()
