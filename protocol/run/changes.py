"""What an operator changes in a run while it runs: a numbered list, each change in force from one step on.

The list travels in the plan, so it is durable with every node that acts on it. Stage 0 decides from which step on a
change counts: the first one that is not decided when it hears of it. What a step did with its gradient follows from
the run's file and the changes in force, so one process can do the same again (`--reference --changes`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence

import msgspec

from protocol.base.errors import BadInputError
from protocol.run.config_file import change_run
from protocol.run.run import RunConfig

CHANGES_MAX = 256
"""In the life of a run; each takes some 60 bytes of every plan, 15 KB together."""
TEXT_MAX = 80
CHANGEABLE = (
    "optimizer.learning_rate",
    "optimizer.warmup_steps",
    "optimizer.decay",
    "optimizer.decay_share",
    "optimizer.final_ratio",
    "optimizer.clip_norm",
)
"""Keys that act where a step is decided and nowhere else."""
_BRANCH = "export the newest checkpoint and start another run with model.start_from"
_WHY_NOT = {
    "steps": f"every node checks work against it; {_BRANCH}",
    "seed": f"it decided the weights and the order of the data; {_BRANCH}",
    "name": "it names the run's folders everywhere",
    "model": f"the weights have the model's shape; {_BRANCH}",
    "data": f"steps that are open were cut from it; {_BRANCH}",
    "batch": f"every node counts tasks by it; {_BRANCH}",
    "optimizer": f"the moments that servers hold were made with it; {_BRANCH}",
    "stages": f"servers hold shards cut by it; {_BRANCH}",
    "routes": f"it is part of what is computed; {_BRANCH}",
    "wire": f"both ends of every link round by it; {_BRANCH}",
    "compute": f"volunteers compute in it; {_BRANCH}",
    "checkpoint": "all stages must write the same versions, and look for them in the same folder",
    "validation": "every node counts its microbatches",
    "guard": "it is in the run's file that every node has",
    "limits": "every node has its clocks from it",
}


class RunChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key's new value."""

    key: str
    value: str
    """As JSON, which is TOML for a number and a text."""
    from_step: int = -1
    """The first step that it counts for, as reported; -1: the first that is not decided when stage 0 hears of it."""


def make_change(config: RunConfig, changes: Sequence[RunChange], key: str, text: str) -> RunChange:
    """What `run set KEY VALUE` asks for, checked against the run as it is changed already.

    Raises:
        BadInputError: the key cannot be changed, with the reason, or the value is none for it.
    """
    section, _, name = key.partition(".")
    if key not in CHANGEABLE:
        table = getattr(config, section, None)
        known = table is not None if not name else hasattr(table, "__struct_fields__") and hasattr(table, name)
        if not known:
            raise BadInputError(f"{key}: unknown key; these can be changed: {', '.join(CHANGEABLE)}")
        raise BadInputError(f"{key}: cannot be changed while the run runs: {_WHY_NOT.get(section, _BRANCH)}")
    if len(changes) >= CHANGES_MAX:
        raise BadInputError(f"{key}: a run takes {CHANGES_MAX} changes in its life, and has had them")
    try:
        new = change_run(changed(config, changes), [f"{key}={text}"])
        new.validate()
    except BadInputError as error:
        raise BadInputError(str(error).removeprefix("--set ")) from error
    value = json.dumps(getattr(getattr(new, section), name))
    return RunChange(key=key, value=value)


def changed(config: RunConfig, changes: Sequence[RunChange]) -> RunConfig:
    """The run with all these changes, in their order. Raises `BadInputError` for what `make_change` never made."""
    for change in changes:
        if change.key not in CHANGEABLE or max(len(change.key), len(change.value)) > TEXT_MAX:
            raise BadInputError(f"a change of {change.key[:TEXT_MAX]!r}, which cannot be changed")
    new = change_run(config, [f"{change.key}={change.value}" for change in changes])
    new.validate()
    return new


def check_changes(config: RunConfig, changes: Sequence[RunChange]) -> None:
    """Raises `BadInputError` for a list that no coordinator of this run can have."""
    if len(changes) > CHANGES_MAX:
        raise BadInputError(f"{len(changes)} changes")
    steps = [change.from_step for change in changes]
    known = list(itertools.takewhile(lambda step: step >= 0, steps))
    if known != sorted(known) or any(step != -1 for step in steps[len(known) :]):
        raise BadInputError("changes that are not in the order of their steps")
    if changes:  # to write a whole run anew costs milliseconds, and everybody who comes is told an empty list first
        changed(config, changes)


def in_force(changes: Sequence[RunChange], step: int) -> int:
    """How many of the changes count for a step that is not decided yet: the first ones of the list."""
    return sum(1 for _ in itertools.takewhile(lambda change: change.from_step <= step, changes))


def changes_hash(config: RunConfig, changes: Sequence[RunChange]) -> str:
    """Hexadecimal BLAKE2b-256 over the run's file and the list: equal for runs that train alike."""
    state = hashlib.blake2b(config.config_hash(), digest_size=32, person=b"br-changes")
    state.update(msgspec.json.encode([(change.key, change.value, change.from_step) for change in changes]))
    return state.hexdigest()
