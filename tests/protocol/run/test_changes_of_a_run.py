"""Tests of `protocol.run.changes`: what an operator may change while a run runs."""

from __future__ import annotations

import msgspec
import pytest

from protocol.base.errors import BadInputError
from protocol.run.changes import (
    CHANGEABLE,
    CHANGES_MAX,
    RunChange,
    changed,
    changes_hash,
    check_changes,
    in_force,
    make_change,
)
from protocol.run.run import RunConfig

CONFIG = RunConfig()


def test_a_change_is_checked_and_written_one_way() -> None:
    """Numbers and words as in RUN.toml, with or without quotes; what comes of it is the run with that value."""
    rate = make_change(CONFIG, (), "optimizer.learning_rate", "3e-4")
    shape = make_change(CONFIG, (rate,), "optimizer.decay", "wsd")
    assert (rate, shape) == (
        RunChange("optimizer.learning_rate", "0.0003"),
        RunChange("optimizer.decay", '"wsd"'),
    )
    assert make_change(CONFIG, (), "optimizer.decay", '"wsd"') == shape
    new = changed(CONFIG, (rate, shape))
    assert (new.optimizer.learning_rate, new.optimizer.decay) == (3e-4, "wsd")
    assert changed(CONFIG, ()) == CONFIG


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("optimizer.learning_rate", "fast", "expected a number"),
        ("optimizer.learning_rate", "-1", "is not between"),
        ("optimizer.learning_rate", "nan", "is not between"),
        ("optimizer.decay", "exp", "expected one of"),
        ("optimizer.learning_rat", "1", "unknown key; these can be changed"),
        ("nothing", "1", "unknown key"),
        ("steps", "5", "every node checks work against it.*model.start_from"),
        ("model.layers", "5", "the weights have the model's shape"),
        ("optimizer.beta1", "0.5", "the moments"),
        ("data.source", "x", "steps that are open"),
        ("checkpoint.every_steps", "5", "all stages must write the same versions"),
    ],
)
def test_what_cannot_be_says_why(key: str, value: str, says: str) -> None:
    """In a sentence that begins with the key, and names what to do instead where there is something."""
    with pytest.raises(BadInputError, match=rf"(?s)^{key}: .*{says}"):
        make_change(CONFIG, (), key, value)


def test_every_section_says_why_it_cannot_be_changed() -> None:
    """No key of RUN.toml is refused without a reason."""
    for field in msgspec.structs.fields(RunConfig):
        section = getattr(CONFIG, field.name)
        names = section.__struct_fields__ if isinstance(section, msgspec.Struct) else ()
        for key in [f"{field.name}.{name}" for name in names] or [field.name]:
            if key not in CHANGEABLE:
                with pytest.raises(BadInputError, match=f"^{key}: cannot be changed while the run runs: .{{20}}"):
                    make_change(CONFIG, (), key, "1")


def test_a_run_takes_only_so_many_changes() -> None:
    """The list travels in every plan."""
    full = [RunChange("optimizer.learning_rate", "0.1")] * CHANGES_MAX
    with pytest.raises(BadInputError, match=f"{CHANGES_MAX} changes"):
        make_change(CONFIG, full, "optimizer.learning_rate", "1")


def test_changes_count_from_their_step_on_in_their_order() -> None:
    """One without a step counts at once, but never before one that stands before it."""
    at_40, at_60, new = (RunChange("optimizer.clip_norm", "1.0", step) for step in (40, 60, -1))
    assert [in_force((at_40, at_60, new), step) for step in (0, 39, 40, 59, 60)] == [0, 0, 1, 1, 3]
    assert in_force((new,), 0) == 1 and in_force((), 5) == 0


@pytest.mark.parametrize(
    "changes",
    [
        (RunChange("steps", "5"),),
        (RunChange("optimizer.learning_rate", "1e999"),),
        (RunChange("optimizer.learning_rate", "0.1" + "0" * 100),),
        (RunChange("optimizer.clip_norm", "1", 50), RunChange("optimizer.clip_norm", "1", 40)),
        (RunChange("optimizer.clip_norm", "1"), RunChange("optimizer.clip_norm", "1", 40)),
        (RunChange("optimizer.clip_norm", "1", -2),),
        (RunChange("optimizer.clip_norm", "1"),) * (CHANGES_MAX + 1),
    ],
)
def test_lists_that_no_coordinator_has_are_refused(changes: tuple[RunChange, ...]) -> None:
    """A node looks at what it is told before it acts on it."""
    with pytest.raises(BadInputError):
        check_changes(CONFIG, changes)


def test_the_hash_covers_file_and_list() -> None:
    """Equal for runs that train alike, another for another value, step or file."""
    change = RunChange("optimizer.learning_rate", "0.1", 40)
    seen = {
        changes_hash(CONFIG, ()),
        changes_hash(CONFIG, (change,)),
        changes_hash(CONFIG, (msgspec.structs.replace(change, from_step=41),)),
        changes_hash(CONFIG, (msgspec.structs.replace(change, value="0.2"),)),
        changes_hash(RunConfig(seed=5), (change,)),
    }
    assert len(seen) == 5
    assert changes_hash(CONFIG, (change,)) in seen
