"""What an operator changes in a run while it runs: a numbered list, each change in force from one step on.

The list travels in the plan, so it is durable with every node that acts on it. Stage 0 decides from which step on a
change counts. Most act where a step is decided and nowhere else, and count from the first step on that is not decided
when stage 0 hears of them; others concern a server by itself, and count when it hears of them. What every server must
know before a step opens (`AT_BOUNDARY`) holds the run: no step opens until all that are open are closed and every
server has the list with the step. What a step did with its data and its gradient follows from the run's file and the
changes in force, so one process can do the same again (`--reference --changes`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.base.bounded import Number, Text
from protocol.base.errors import BadInputError
from protocol.run.config_file import change_run
from protocol.run.course import EVEN
from protocol.run.mixture import MIXTURE_TURN, parse_mixture
from protocol.run.run import MICROBATCHES_MAX, RunConfig

CHANGES_MAX = 256
"""In the life of a run; each takes some 60 bytes of every plan, 15 KB together."""
TEXT_MAX = 200
"""Characters of a value: a mixture of a dozen parts; 256 of those would be 60 KB of a plan."""
AT_DECISION = (
    "optimizer.learning_rate",
    "optimizer.warmup_steps",
    "optimizer.decay",
    "optimizer.decay_share",
    "optimizer.final_ratio",
    "optimizer.clip_norm",
)
"""Keys that act where a step is decided and nowhere else."""
LAYOUT = "stages"
"""The key of a change of the whole layout: its value is a table of all `LAYOUT_KEYS`, which count together."""
LAYOUT_KEYS = ("back_servers", "chunks", "count", "cut", "front_servers", "placement")
LAYOUT_TEXT_MAX = 600
"""Characters of a layout: the edges of 64 stages take some 250."""
LAYOUTS_MAX = 64
"""In the life of a run: 38 KB of every plan at the most."""
MICROBATCHES = "batch.microbatches"
AT_BOUNDARY = ("steps", "checkpoint.every_steps", "data.mixture", MICROBATCHES, LAYOUT)
"""Keys that all servers must agree on before a step opens."""
AT_ONCE = (
    "stages.collocated",
    "limits.lease_s",
    "limits.snapshot_steps",
    "limits.server_gone_s",
    "limits.volunteers_max",
)
"""Keys that each node goes by on its own; none of them is part of what is computed."""
CHANGEABLE = (*AT_DECISION, *AT_BOUNDARY, *AT_ONCE)
_BRANCH = "`barnraise run branch` begins another run from a checkpoint of this one"
_FROM_NOTHING = "no run can go on with another: begin one from nothing, with a file of its own"
_WHY_NOT = {
    "seed": f"it decided the weights and the order of the data; {_BRANCH}",
    "name": f"it names the run's folders everywhere; {_BRANCH}, under a name of its own",
    "description": "it is read from RUN.toml: write the words there, and start the coordinator again",
    "model": f"the weights have the model's shape; {_FROM_NOTHING}",
    "data": f"what was trained on so far was numbered by it; {_BRANCH}",
    "data.tokenizer": f"the model has learned its tokens; {_FROM_NOTHING}",
    "batch": f"volunteers have memory for graphs of this shape, and every step was computed with it; {_BRANCH}",
    "optimizer": f"the moments that servers hold were made with it; {_BRANCH}",
    "stages": "servers hold shards cut by it; `barnraise run replan` cuts them anew",
    "stages.order": "it is read from RUN.toml: write it there, and start the coordinator again",
    "routes": f"it is part of what is computed; {_BRANCH}",
    "wire": f"both ends of every link round by it; {_BRANCH}",
    "compute": f"volunteers compute in it; {_BRANCH}",
    "checkpoint": f"all stages look for the same checkpoints in the same folder; {_BRANCH}",
    "validation": f"every node counts its microbatches; {_BRANCH}",
    "guard": f"it is in the run's file that every node has; {_BRANCH}",
    "limits": f"both ends of a link have their clocks and bounds from it; {_BRANCH}",
    "audit": f"every ledger judges members by the run's file; {_BRANCH}",
}
"""By key, or by section for those that have no reason of their own."""


class RunChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key's new value."""

    key: Text
    value: Annotated[str, Meta(max_length=LAYOUT_TEXT_MAX)]
    """As JSON, which is TOML for a number and a text."""
    from_step: Number = -1
    """The first step that it counts for, as reported; -1: the first that is not decided when stage 0 hears of it, and
    for a key of `AT_BOUNDARY` none so far: no step opens before there is one."""

    @property
    def is_pending(self) -> bool:
        """Whether the run is held until there is a step for it."""
        return self.from_step < 0 and self.key in AT_BOUNDARY


def make_change(config: RunConfig, changes: Sequence[RunChange], key: str, text: str) -> RunChange:
    """What `run set KEY VALUE` asks for, checked against the run as it is changed already.

    Raises:
        BadInputError: the key cannot be changed, with the reason, or the value is none for it.
    """
    section, _, name = key.rpartition(".")
    if key not in CHANGEABLE or key == LAYOUT:
        section, _, name = key.partition(".")
        table = getattr(config, section, None)
        known = table is not None if not name else hasattr(table, "__struct_fields__") and hasattr(table, name)
        if not known:
            raise BadInputError(f"{key}: unknown key; these can be changed: {', '.join(CHANGEABLE)}")
        raise BadInputError(f"{key}: cannot be changed while the run runs: {_WHY_NOT.get(key) or _WHY_NOT[section]}")
    if len(changes) >= CHANGES_MAX:
        raise BadInputError(f"{key}: a run takes {CHANGES_MAX} changes in its life, and has had them")
    before = changed(config, changes)
    try:
        new = change_run(before, [f"{key}={text}"])
        new.validate()
        if key == "data.mixture":
            _check_mixture(config, new)
        _check_count(config, new.batch.microbatches)
    except BadInputError as error:
        raise BadInputError(str(error).removeprefix("--set ")) from error
    value = json.dumps(getattr(getattr(new, section) if section else new, name))
    if max(len(key), len(value)) > TEXT_MAX:
        raise BadInputError(f"{key}: a value of {len(value)} characters; at most {TEXT_MAX} travel in the plan")
    return RunChange(key=key, value=value)


def _check_mixture(config: RunConfig, new: RunConfig) -> None:
    """Raises `BadInputError` for a mixture that servers could not draw from: they alone see the folder, and the parts
    that the run's file names are those that they have found in it."""
    known, wanted = parse_mixture(config.data.mixture), parse_mixture(new.data.mixture)
    if not known or not wanted:
        without = "the run began without one" if not known else "a run that began with one keeps one"
        raise BadInputError(f"data.mixture: {without}, and what is kept aside follows from that; {_BRANCH}")
    for name, weight in wanted.items():
        if name not in known:
            raise BadInputError(f"data.mixture: there is no part {name}; the run's file names {', '.join(known)}")
        if 0 < weight < sum(wanted.values()) / MIXTURE_TURN:
            raise BadInputError(f"data.mixture: {name} would get less than one of {MIXTURE_TURN} samples")


def _check_count(config: RunConfig, wanted: int) -> None:
    """Raises `BadInputError` for more microbatches than the sums of a run on a grid have room for."""
    most = config.batch.microbatches
    if config.wire.gradients == "gi" and wanted > most:
        raise BadInputError(
            f'{MICROBATCHES}: {wanted}, and at most {most} are possible: with wire.gradients = "gi" gradients are whole'
            f" numbers that are rounded so that as many as the run's file says never overflow; {_BRANCH}"
        )


def changed(config: RunConfig, changes: Sequence[RunChange]) -> RunConfig:
    """The run with all these changes, in their order. Raises `BadInputError` for what `make_change` never made."""
    for change in changes:
        most = LAYOUT_TEXT_MAX if change.key == LAYOUT else TEXT_MAX
        if change.key not in CHANGEABLE or max(len(change.key), len(change.value)) > most:
            raise BadInputError(f"a change of {change.key[:TEXT_MAX]!r}, which cannot be changed")
    new = change_run(config, [setting for change in changes for setting in _settings(change)])
    new.validate()
    for change in changes:
        if change.key == MICROBATCHES:  # each counts for some steps, also where a later one follows
            if not change.value.isdecimal() or not 1 <= int(change.value) <= MICROBATCHES_MAX:
                raise BadInputError(f"{MICROBATCHES}: {change.value} is not between 1 and {MICROBATCHES_MAX}")
            _check_count(config, int(change.value))
    return new


def _settings(change: RunChange) -> list[str]:
    """As `change_run` takes them."""
    if change.key != LAYOUT:
        return [f"{change.key}={change.value}"]
    try:
        table = msgspec.json.decode(change.value, type=dict[str, int | str])
    except msgspec.DecodeError as error:
        raise BadInputError(f"a change of {LAYOUT} that is no table: {error}") from error
    if tuple(sorted(table)) != LAYOUT_KEYS:
        raise BadInputError(f"a change of {LAYOUT} with other keys than {', '.join(LAYOUT_KEYS)}")
    return [f"{LAYOUT}.{name}={json.dumps(value)}" for name, value in table.items()]


def wanted_layout(config: RunConfig, changes: Sequence[RunChange], settings: Sequence[str]) -> RunConfig:
    """The run as `run replan KEY=VALUE…` asks for it; a planner may have to say how many stages, or where to cut.

    Raises:
        BadInputError: a key is none of a layout's, or its value cannot be.
    """
    before = changed(config, changes)
    keys = [setting.partition("=")[0].strip() for setting in settings]
    for key in keys:
        section, _, name = key.partition(".")
        if section != LAYOUT or name not in LAYOUT_KEYS:
            known = ", ".join(f"{LAYOUT}.{each}" for each in LAYOUT_KEYS)
            raise BadInputError(f"{key}: is no part of the layout; `run replan` changes {known}")
    parts_change = {f"{LAYOUT}.{name}" for name in ("count", "chunks", "placement")}.intersection(keys)
    even = ["stages.cut=even"] if parts_change and "stages.cut" not in keys else []
    try:
        new = change_run(before, [*even, *settings])
        new.validate()
    except BadInputError as error:
        raise BadInputError(str(error).removeprefix("--set ")) from error
    return new


def layout_change(config: RunConfig, changes: Sequence[RunChange], new: RunConfig) -> RunChange:
    """Another layout, of which nothing is open any more.

    Raises:
        BadInputError: the run has that layout, or the change would be too long, or one too many.
    """
    assert not new.is_open, "a planner fills in first what is open"
    before = changed(config, changes)
    value = _layout_text(new)
    if value == _layout_text(before):
        raise BadInputError(f"{LAYOUT}: the run has this layout already")
    if len(value) > LAYOUT_TEXT_MAX:
        raise BadInputError(f"stages.cut: a layout of {len(value)} characters; at most {LAYOUT_TEXT_MAX} are possible")
    if len(changes) >= CHANGES_MAX or sum(change.key == LAYOUT for change in changes) >= LAYOUTS_MAX:
        raise BadInputError(f"stages: a run takes {LAYOUTS_MAX} layouts in its life, and has had them")
    return RunChange(key=LAYOUT, value=value)


def _layout_text(config: RunConfig) -> str:
    return json.dumps({name: getattr(config.stages, name) for name in LAYOUT_KEYS})


def in_words(change: RunChange) -> str:
    """A change as people read it: `steps = 400`; a layout, whose value is a table, as a sentence has it."""
    if change.key != LAYOUT:
        return f"{change.key} = {change.value}"
    try:
        table = msgspec.json.decode(change.value, type=dict[str, int | str])
        count, chunks, placement, cut = table["count"], table["chunks"], table["placement"], table["cut"]
        fronts, backs = table["front_servers"], table["back_servers"]
    except (msgspec.DecodeError, KeyError):
        return f"{change.key} = {change.value}"
    parts = f" of {chunks} chunks ({placement})" if chunks != 1 else ""
    where = "cut evenly" if cut == EVEN else f"cut at {cut}"
    return f"{LAYOUT} = {count}{parts}, {where}, {fronts} front and {backs} back server{'' if backs == 1 else 's'} each"


def first_layout(config: RunConfig) -> RunChange | None:
    """How a planner settled a run whose file leaves that open, as a change that counts from the first step on: the
    first of all changes, since no plan shows it any more when another layout has begun. None: it is too long, and such
    a run cannot be laid out anew."""
    value = _layout_text(config)
    return RunChange(key=LAYOUT, value=value, from_step=0) if len(value) <= LAYOUT_TEXT_MAX else None


def settled_as(config: RunConfig, first: RunChange) -> RunConfig:
    """A run whose file leaves its layout open, as `first_layout` says that it was settled. Raises `BadInputError` for
    what `first_layout` never made."""
    return change_run(config, _settings(first))


def laid_out_at(config: RunConfig, changes: Sequence[RunChange], step: int) -> RunConfig:
    """The run as it is laid out in a step: as its file has it, or the newest such change up to the step."""
    return changed(config, [change for change in changes if change.key == LAYOUT and 0 <= change.from_step <= step])


def kept_layouts(changes: Sequence[RunChange], step: int) -> tuple[RunChange, ...]:
    """The list when the run goes back to a step (-1: the seed): it goes on as it is laid out now, so layouts that began
    later count from that step on. The others keep their steps, and their order."""
    found = [
        msgspec.structs.replace(change, from_step=max(0, step))
        if change.key == LAYOUT and change.from_step > max(0, step)
        else change
        for change in changes
    ]
    return in_order(found)


def in_order(changes: Sequence[RunChange]) -> tuple[RunChange, ...]:
    """Those that have a step by their steps, then the others; else as they came."""
    known = [change for change in changes if change.from_step >= 0]
    return (*sorted(known, key=lambda change: change.from_step), *(each for each in changes if each.from_step < 0))


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
    counts = itertools.takewhile(lambda change: change.from_step <= step and not change.is_pending, changes)
    return sum(1 for _ in counts)


def running(config: RunConfig, changes: Sequence[RunChange]) -> RunConfig:
    """The run as it is now: with all changes but those that no step has been found for."""
    return changed(config, [change for change in changes if not change.is_pending]) if changes else config


def counts_of(config: RunConfig, changes: Sequence[RunChange]) -> tuple[tuple[int, int], ...]:
    """(first step, microbatches of a step from there on), rising: the file's number, then those that have a step."""
    found = {0: config.batch.microbatches}
    for change in changes:
        if change.key == MICROBATCHES and change.from_step >= 0:
            found[change.from_step] = int(change.value)
    return tuple(sorted(found.items()))


def mixtures(changes: Sequence[RunChange], step: int) -> tuple[tuple[int, str], ...]:
    """(first step, mixture) of each change of the mixture up to a step, oldest first: what its batches are cut by."""
    return tuple(
        (change.from_step, json.loads(change.value))
        for change in changes
        if change.key == "data.mixture" and 0 <= change.from_step <= step
    )


def changes_hash(config: RunConfig, changes: Sequence[RunChange]) -> str:
    """Hexadecimal BLAKE2b-256 over the run's file and the list: runs for which it is equal train alike."""
    state = hashlib.blake2b(config.config_hash(), digest_size=32, person=b"br-changes")
    state.update(msgspec.json.encode([(change.key, change.value, change.from_step) for change in changes]))
    return state.hexdigest()
