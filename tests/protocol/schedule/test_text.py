"""The text form says everything, refuses what it cannot mean, and trades plans with torch's CSV."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.base.errors import BadInputError
from protocol.schedule.check import check
from protocol.schedule.ir import EVERY, TENSORS, Flow, Hop, Instruction, Key, Op, RouteRules, Schedule
from protocol.schedule.text import parse_key, read, write
from tests.strategies.schedules import designs

SEQ1F1B = """\
schedule stages=2 samples=2 tokens=2
flow 0-1 route=0@0,1@1 segments=1,1
node 0: 0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1
node 1: 1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1
"""


def keys() -> st.SearchStrategy[Key]:
    """Every key that can be said."""
    number = st.integers(0, 9999)
    plain = st.builds(
        Key, st.sampled_from([Op.LOAD, Op.F, Op.L, Op.B, Op.I, Op.W, Op.R]), number, number, number, number, st.just("")
    )
    sent = st.builds(Key, st.sampled_from([Op.SEND, Op.RECV]), number, number, number, number, st.sampled_from(TENSORS))
    custom = st.builds(
        Key, st.just(Op.CUSTOM), number, number, number, number, st.from_regex("[a-z_]{1,12}", fullmatch=True)
    )
    whole = st.builds(Key, st.sampled_from([Op.REDUCE, Op.OPT]), st.just(EVERY), number, number, number, st.just(""))
    return st.one_of(plain, sent, custom, whole)


def instructions() -> st.SearchStrategy[Instruction]:
    """Keys with every attribute set or not."""
    seconds = st.floats(0, 1e6)
    timed = st.tuples(seconds, seconds)
    return st.builds(
        lambda key, peer, after, times, memory, attempt, skip, steal: Instruction(
            key=key,
            peer=peer,
            after=tuple(after),
            start_s=times[0] if times else None,
            end_s=times[1] if times else None,
            memory_start=memory[0],
            memory_end=memory[1],
            attempt=attempt,
            skippable=skip,
            stealable=steal,
        ),
        keys(),
        st.integers(-1, 50),
        st.lists(keys(), max_size=3),
        st.none() | timed,
        st.tuples(st.integers(-1000, 1000), st.integers(-1000, 1000)),
        st.integers(0, 5),
        st.booleans(),
        st.booleans(),
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Anything that can be written, valid or not."""
    number = st.integers(0, 50)
    flows = [
        Flow(
            microbatch=microbatch,
            route=tuple(draw(st.lists(st.builds(Hop, number, number), min_size=1, max_size=4))),
            segment_tokens=tuple(draw(st.lists(st.integers(1, 99), min_size=1, max_size=3))),
            slice_samples=tuple(draw(st.lists(st.integers(1, 99), min_size=1, max_size=3))),
            wave=draw(st.integers(0, 3)),
            loss_node=draw(st.none() | number),
        )
        for microbatch in sorted(draw(st.sets(st.integers(0, 30), max_size=6)))
    ]
    rules = st.builds(
        RouteRules, swaps_max=number, visits_per_stage=st.none() | number, routes_per_node_max=st.none() | number
    )
    return Schedule(
        stages=draw(number),
        flows=tuple(flows),
        orders=tuple(tuple(draw(st.lists(instructions(), max_size=4))) for _ in range(draw(st.integers(0, 3)))),
        samples=draw(st.none() | number),
        tokens=draw(st.none() | number),
        memory_max=draw(st.none() | st.lists(number, min_size=1, max_size=4).map(tuple)),
        rules=draw(st.none() | rules),
    )


@settings(deadline=None)
@given(keys())
def test_a_key_reads_back_as_it_was_written(key: Key) -> None:
    """The short form of an operation loses nothing."""
    assert parse_key(str(key)) == key


@settings(max_examples=50, deadline=None)
@given(schedules())
def test_a_schedule_reads_back_as_it_was_written(schedule: Schedule) -> None:
    """Writing and reading is the identity on every schedule, with every attribute."""
    assert read(write(schedule)) == schedule


@settings(max_examples=20, deadline=None)
@given(designs())
def test_a_planned_schedule_stays_valid_through_its_text(design: object) -> None:
    """What the generators make can be written down, read and checked."""
    schedule = design.schedule()  # type: ignore[attr-defined]
    check(read(write(schedule)))


def test_the_text_is_what_a_person_would_write() -> None:
    """A schedule typed by hand is read, found valid, and written in the same words."""
    schedule = read("# two segments\n\n" + SEQ1F1B)
    check(schedule)
    assert write(schedule) == SEQ1F1B


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "line 1"),
        ("node 0: 0F0", "line 1: a schedule starts"),
        ("schedule stages=x", "stages: 'x'"),
        ("schedule stages=2 stages=3", "'stages'"),
        ("schedule stages=1\nflow 0 route=0-0", "route"),
        ("schedule stages=1\nflow\n", "line 2: flow: ''"),
        ("schedule stages=1\nflow 3-1 route=0@0", "flow 3-1"),
        ("schedule stages=1\nflow 0 route=0@0\nnode 1: 0F0", "node 0 expected"),
        ("schedule stages=1\nflow 0 route=0@0\nnode 0: 0F", "'0F'"),
        ("schedule stages=1\nflow 0 route=0@0\nnode 0: 0X0", "'0X0'"),
        ("schedule stages=1\nflow 0 route=0@0\nnode 0: 0SEND0", "SEND takes one of"),
        ("schedule stages=1\nflow 0 route=0@0\nnode 0: 0REDUCE3", "whole stage"),
        ("schedule stages=1\nflow 0 route=0@0\nnode 0: 0F0[t=1]", "two numbers"),
        ("schedule stages=1\nflow 0 route=0@0\nnode 0: 0F0[mem=1:2", "bracket"),
        ("schedule stages=1\nflow 0 route=0@0\nnode 0: 0F0[why=1]", "'why'"),
        ("schedule stages=1\nflow 0-99999999 route=0@0", "flow 0-99999999"),
        ("schedule stages=1\nflow 0 route=0@0\nnode 0: 0F0[mem=1e99:0]", "mem: "),
        ("schedule stages=1\nflow 0 route=0@0\nnode 0: 0F0[t=nan:1]", "t: "),
        ("schedule stages=999999999\nflow 0 route=0@0\nnode 0:", "stages: more than"),
        (f"schedule stages=1\nflow 0-99999 route=0@0 slices={'1,' * 200}1", "parts"),
    ],
)
def test_a_wrong_line_is_refused_by_name(text: str, complaint: str) -> None:
    """The sentence says which line is wrong and what is wrong there."""
    with pytest.raises(BadInputError, match=complaint):
        read(text)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_spoilt_text_never_does_worse_than_a_refusal(data: st.DataObject) -> None:
    """Whatever characters are exchanged, reading and checking ends with a schedule or a sentence."""
    rich = SEQ1F1B.replace("0F1 ", "0F1[t=1.5:2.5,mem=4:-2,after=1F0+0CUSTOM_x1,try=2] ").replace(
        "samples=2", "swaps_max=1"
    )
    text = list(rich)
    alphabet = st.sampled_from([*"0123456789FLBIWRSENDOPT_.,:=@[]+-/e \n#", "inf", "nan", "999999999"])
    for index in data.draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=6)):
        text[index] = data.draw(alphabet)
    with contextlib.suppress(BadInputError):
        check(read("".join(text)))
