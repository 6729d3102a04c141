"""Tests of `protocol.run.changes`: what an operator may change while a run runs."""

from __future__ import annotations

import re

import msgspec
import pytest

from protocol.base.errors import BadInputError
from protocol.run.changes import (
    CHANGEABLE,
    CHANGES_MAX,
    LAYOUT,
    LAYOUT_KEYS,
    LAYOUT_TEXT_MAX,
    RunChange,
    changed,
    changes_hash,
    check_changes,
    first_layout,
    in_force,
    in_words,
    kept_layouts,
    laid_out_at,
    layout_change,
    make_change,
    mixtures,
    running,
    settled_as,
    wanted_layout,
)
from protocol.run.plan import Plan
from protocol.run.run import DataSection, RunConfig
from tests.layouts import make_layout
from tests.node.setting import make_plan

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
        ("steps", "0", "is not between"),
        ("seed", "5", "the order of the data.*run branch"),
        ("batch.samples", "5", "volunteers have memory for graphs of this shape.*run branch"),
        ("model.layers", "5", "the weights have the model's shape"),
        ("optimizer.beta1", "0.5", "the moments"),
        ("data.source", "x", "was numbered by it"),
        ("checkpoint.keep", "5", "all stages look for the same checkpoints"),
        ("limits.ping_s", "1", "both ends of a link"),
        ("data.mixture", "a=1", "the run began without one.*run branch"),
    ],
)
def test_what_cannot_be_says_why(key: str, value: str, says: str) -> None:
    """In a sentence that begins with the key, and names what to do instead where there is something."""
    with pytest.raises(BadInputError, match=rf"(?s)^{key}: .*{says}"):
        make_change(CONFIG, (), key, value)


def remedy(key: str) -> str:
    """What an operator can do instead, by what the other commands really take."""
    section, _, name = key.partition(".")
    if key in ("description", "stages.order"):
        return "start the coordinator again"
    if section == "model" or key == "data.tokenizer":
        return "begin one from nothing"  # `run branch` keeps both, since the weights have been made with them
    return "`barnraise run replan`" if section == LAYOUT and name in LAYOUT_KEYS else "`barnraise run branch`"


def test_every_key_can_be_changed_or_says_why_not_and_what_to_do_instead() -> None:
    """No key of RUN.toml is refused without a reason, and none with advice that would be refused in its turn."""
    refused = 0
    for field in msgspec.structs.fields(RunConfig):
        section = getattr(CONFIG, field.name)
        names = section.__struct_fields__ if isinstance(section, msgspec.Struct) else ()
        for key in [f"{field.name}.{name}" for name in names] or [field.name]:
            if key in CHANGEABLE:
                continue
            refused += 1
            with pytest.raises(BadInputError) as raised:
                make_change(CONFIG, (), key, "1")
            said = str(raised.value)
            assert re.match(rf"{re.escape(key)}: cannot be changed while the run runs: .{{20}}", said), said
            named = {word for word in ("coordinator again", "from nothing", "run replan", "run branch") if word in said}
            assert remedy(key) in said and len(named) == 1, said
    assert refused > 40


def test_the_ends_of_links_bound_by_a_number_can_be_changed() -> None:
    """Also how many volunteers a server links to: each server goes by it from when it hears of it."""
    change = make_change(CONFIG, (), "limits.volunteers_max", "512")
    assert not change.is_pending and running(CONFIG, (change,)).limits.volunteers_max == 512


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
        (RunChange("seed", "5"),),
        (RunChange("optimizer.learning_rate", "1e999"),),
        (RunChange("optimizer.learning_rate", "0.1" + "0" * 200),),
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


def test_what_all_must_know_counts_for_no_step_before_it_has_one() -> None:
    """Nor does what was ordered after it; the run as it is now has what needs no boundary."""
    longer, at_once = make_change(CONFIG, (), "steps", "700"), make_change(CONFIG, (), "limits.lease_s", "5")
    rate = RunChange("optimizer.clip_norm", "2.0")
    assert longer.is_pending and not at_once.is_pending
    assert in_force((rate, longer, at_once), 10) == 1
    now = running(CONFIG, (rate, longer, at_once))
    assert (now.steps, now.limits.lease_s, now.optimizer.clip_norm) == (CONFIG.steps, 5.0, 2.0)
    begun = msgspec.structs.replace(longer, from_step=20)
    assert running(CONFIG, (begun,)).steps == 700 and [in_force((begun,), step) for step in (19, 20)] == [0, 1]


@pytest.mark.parametrize(
    ("mixture", "says"),
    [
        ("", "keeps one"),
        ("books=0", "sum to zero"),
        ("books=1 news=1", "there is no part news; the run's file names books, code"),
        ("books=1 code=0.0001", "less than one of"),
        ("books", "is not NAME=WEIGHT"),
    ],
)
def test_a_mixture_that_no_server_could_draw_from_is_refused(mixture: str, says: str) -> None:
    """Servers alone see the folder: the coordinator takes no name that they have not looked for."""
    mixed = RunConfig(data=DataSection(mixture="books=1 code=0"))
    with pytest.raises(BadInputError, match=f"^data.mixture: .*{says}"):
        make_change(mixed, (), "data.mixture", mixture)
    changes = [
        msgspec.structs.replace(make_change(mixed, (), "data.mixture", f"books=1 code={n}"), from_step=n)
        for n in (1, 2)
    ]
    assert [mixtures(changes, step) for step in (0, 1, 9)] == [
        (),
        ((1, "books=1 code=1"),),
        ((1, "books=1 code=1"), (2, "books=1 code=2")),
    ]


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


def test_a_layout_is_one_change_of_all_its_keys() -> None:
    """They count together, from a boundary; a list of blocks goes with the number of stages that it was for."""
    three = make_layout(CONFIG, (), ["stages.count=3", "stages.back_servers=0"])
    assert three.is_pending and running(CONFIG, (three,)) == CONFIG
    begun = msgspec.structs.replace(three, from_step=7)
    cut = msgspec.structs.replace(make_layout(CONFIG, (begun,), ["stages.cut=2 5"]), from_step=9)
    assert [laid_out_at(CONFIG, (begun, cut), step).stages.cut for step in (6, 8, 9)] == ["even", "even", "2 5"]
    assert [laid_out_at(CONFIG, (begun, cut), step).stages.count for step in (6, 7, 9)] == [2, 3, 3]
    two = make_layout(CONFIG, (begun, cut), ["stages.count=2"])
    assert changed(CONFIG, (begun, cut, two)).stages.cut == "even"
    with pytest.raises(BadInputError, match=r"^stages: cannot be changed.*run replan"):
        make_change(CONFIG, (), "stages", three.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["stages.count=2"], "stages: the run has this layout already"),
        (["routes.skip=0.5"], "routes.skip: is no part of the layout"),
        (["stages.collocated=never"], "stages.collocated: is no part of the layout"),
        (["stages.count=99"], "stages.count: 99 is not between"),
        (["stages.cut=40"], "stages.cut: "),
        (["stages.chunks=2"], "stages.chunks: more than one needs"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_its_key(settings: list[str], says: str) -> None:
    """Before anybody is held."""
    with pytest.raises(BadInputError, match=f"^{says}"):
        make_layout(CONFIG, (), settings)


def test_a_layout_may_be_left_to_a_planner() -> None:
    """The number of stages, the cut, or both; what is not named stays."""
    for settings, stages in (
        (["stages.cut=planned"], (2, "planned")),
        (["stages.count=auto", "stages.cut=planned"], (0, "planned")),
        (["stages.count=auto"], (0, "even")),
    ):
        wanted = wanted_layout(CONFIG, (), settings)
        assert wanted.is_open and (wanted.stages.count, wanted.stages.cut) == stages
        assert wanted.settled(3, (2, 5)).stages.count == 3


def test_how_a_planner_settled_a_run_is_the_first_of_its_layouts() -> None:
    """When another layout has begun, nothing else tells; as a change it changes nothing."""
    left_open = msgspec.structs.replace(CONFIG, stages=msgspec.structs.replace(CONFIG.stages, cut="planned"))
    for edges in ((3,), ()):
        settled = left_open.settled(2, edges)
        first = first_layout(settled)
        assert first is not None
        later = msgspec.structs.replace(layout_change(settled, (first,), left_open.settled(2, (2,))), from_step=7)
        assert settled_as(left_open, first) == settled == changed(settled, (first,))
        assert laid_out_at(settled, (first, later), 6) == settled
        assert laid_out_at(settled, (first, later), 7).stages.cut == "2"
        check_changes(settled, (first, later))


def test_a_layout_is_said_in_words() -> None:
    """Its value is a table for programs."""
    assert in_words(make_change(CONFIG, (), "steps", "400")) == "steps = 400"
    layout = make_layout(CONFIG, (), ["stages.cut=3", "stages.back_servers=2"])
    assert in_words(layout) == "stages = 2, cut at 3, 1 front and 2 back servers each"
    chunks = make_layout(CONFIG, (), ["stages.chunks=2", "stages.placement=v"])
    assert in_words(chunks) == "stages = 2 of 2 chunks (v), cut evenly, 1 front and 1 back server each"


def test_the_longest_layout_travels_in_a_plan() -> None:
    """And one that is longer is none, before anybody is held. (A plan with more than 256 characters of it was written
    and could never be sent or read.)"""
    model = msgspec.structs.replace(CONFIG.model, layers=100)
    config = msgspec.structs.replace(CONFIG, model=model, stages=msgspec.structs.replace(CONFIG.stages, cut="planned"))
    long = config.settled(64, tuple(range(70, 133)))
    first = first_layout(long)
    assert first is not None and 256 < len(first.value) <= LAYOUT_TEXT_MAX
    plan = msgspec.structs.replace(make_plan(), changes=(first,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan
    assert settled_as(config, first) == long
    longest = msgspec.structs.replace(long, stages=msgspec.structs.replace(long.stages, cut=" ".join(["1000"] * 200)))
    assert first_layout(longest) is None


def test_a_run_that_goes_back_keeps_its_layout_from_there_on() -> None:
    """Other changes keep their steps; the list stays in order."""
    rate = RunChange("optimizer.learning_rate", "0.1", 30)
    layout = msgspec.structs.replace(make_layout(CONFIG, (), ["stages.count=3"]), from_step=40)
    new = RunChange("optimizer.clip_norm", "2.0")
    back = kept_layouts((rate, layout, new), 20)
    assert [(change.key, change.from_step) for change in back] == [
        ("stages", 20), ("optimizer.learning_rate", 30), ("optimizer.clip_norm", -1),
    ]  # fmt: skip
    assert kept_layouts((layout,), 50) == (layout,) and kept_layouts((layout,), -1)[0].from_step == 0
    check_changes(CONFIG, back)


@pytest.mark.parametrize("value", ["3", '{"count": 3}', '{"count": [1]}'])
def test_a_layout_from_elsewhere_is_a_table_of_all_its_keys(value: str) -> None:
    """A node looks at what it is told."""
    with pytest.raises(BadInputError, match="a change of stages"):
        check_changes(CONFIG, (RunChange("stages", value, 3),))
