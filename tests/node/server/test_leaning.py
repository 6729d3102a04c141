"""Errors within the tolerance that all point to one side are found; errors that point anywhere never are."""

from __future__ import annotations

import math
import random
from itertools import count
from pathlib import Path

import msgspec
import pytest
import torch

from node.compute.tolerance import residual
from node.machine.records import Record
from node.process.journal import Append, Forget, Journal
from node.process.store import TensorStore
from node.server.leaning import WINDOW, Leaning
from protocol.base.ids import NodeId
from protocol.run.audits import RESIDUAL_PARTS
from tests.node.server.test_audits import LIAR, Desk, differs
from tests.node.server.test_tickets import Desk as Server

TOLERANCE = 0.02
HONEST = NodeId("v1")


def error(rng: random.Random, length: float) -> tuple[float, ...]:
    """One that points anywhere."""
    parts = [rng.gauss(0.0, 1.0) for _ in range(RESIDUAL_PARTS)]
    size = math.sqrt(sum(part * part for part in parts))
    return tuple(length * part / size for part in parts)


def one_way(length: float, part: int = 0) -> tuple[float, ...]:
    return tuple(length if number == part else 0.0 for number in range(RESIDUAL_PARTS))


def both(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def audits_until(desk: Desk, node: NodeId, residuals: list[tuple[float, ...]]) -> tuple[list[str], int]:
    """What came of the audits of one member, and how many there were when it was out (0: it never was)."""
    outcomes: list[str] = []
    for number, each in enumerate(residuals):
        while not desk.bring(node):
            pass
        (unit,) = desk.give()
        found = differs(math.sqrt(sum(part * part for part in each)), node)
        ruling = desk.say(unit, msgspec.structs.replace(found, residual=each))
        assert ruling is not None
        outcomes.append(ruling.outcome)
        if any(blame.out for blame in ruling.blames):
            return outcomes, number + 1
    return outcomes, 0


@pytest.mark.parametrize("part", [0, 7], ids=["longer", "elsewhere"])
def test_a_lean_of_half_the_tolerance_is_found(part: int) -> None:
    """Beside honest errors as large: all is audited after one window, and it is out after the second."""
    rng = random.Random(part)
    desk = Desk(first=0, rate=0.5, tolerance=TOLERANCE)
    lean = [both(one_way(TOLERANCE / 2, part), error(rng, TOLERANCE / 2)) for _ in range(3 * WINDOW)]
    outcomes, out_after = audits_until(desk, LIAR, lean)
    assert outcomes.index("leans") + 1 == WINDOW
    assert out_after == 2 * WINDOW
    assert desk.audits.rate_of(LIAR) == 1.0


def test_gradients_that_are_all_longer_are_found_beside_larger_errors() -> None:
    """On a grid what rounding makes of a lean is several times as long as it, and points anywhere else."""
    rng = random.Random(3)
    lean, honest = Leaning(), Leaning()
    for _ in range(WINDOW):
        elsewhere = both(error(rng, 4 * TOLERANCE), one_way(0.0))
        rounding = (rng.gauss(0.0, TOLERANCE / 20), *elsewhere[1:])
        honest.add(rounding, TOLERANCE)
        lean.add(both(one_way(TOLERANCE / 2), rounding), TOLERANCE)
    assert lean.leaned is True and honest.leaned is False


def test_nobody_honest_leans_in_a_hundred_thousand_audits() -> None:
    """Whether the errors of its device point anywhere or lie on one line, as large as the tolerance allows."""
    rng = random.Random(5)
    for _ in range(500):
        anywhere, on_a_line = Leaning(), Leaning()
        for _ in range(WINDOW):
            anywhere.add(error(rng, TOLERANCE), TOLERANCE)
            on_a_line.add(one_way(rng.choice((-1.0, 1.0)) * TOLERANCE), TOLERANCE)
        for each in (anywhere, on_a_line):
            assert each.leaned is False
            assert each.judge(()) == ""


def test_a_device_that_rounds_to_one_side_a_little_is_left_alone() -> None:
    """A fifth of the tolerance, always the same: such a kind of device there may be."""
    lean = Leaning()
    for _ in range(WINDOW):
        lean.add(one_way(TOLERANCE / 5), TOLERANCE)
    assert lean.leaned is False


def test_where_most_lean_it_is_the_auditor() -> None:
    """Four members differ from one auditor in the same way: nobody is blamed."""
    desk = Desk(first=0, rate=1.0, tolerance=TOLERANCE)
    names = [NodeId(f"v{number}") for number in range(4)]
    for _ in range(2):
        for node in names:
            audits_until(desk, node, [one_way(TOLERANCE / 2)] * WINDOW)
    assert desk.audits.counts["blamed"] == 0
    assert not any(desk.audits.rate_of(node) < 1.0 for node in names)
    assert sum(record.leaning.windows > 1 for record in desk.audits._records.values()) == 0


def test_numbers_that_nobody_honest_sends_change_nothing() -> None:
    lean = Leaning()
    for residual_ in ((), one_way(math.nan), one_way(math.inf), one_way(10 * TOLERANCE), (0.0,) * 3):
        lean.add(residual_, TOLERANCE)
    assert lean.count == 0


def test_what_is_known_of_a_member_is_the_same_after_a_restart() -> None:
    """Passed audits, strikes, and the window that is averaged."""
    before = Desk(first=5, rate=0.1, tolerance=TOLERANCE)
    audits_until(before, HONEST, [one_way(TOLERANCE / 2)] * 7)
    before.judge(2 * TOLERANCE)
    before.judge(2 * TOLERANCE)
    after = Desk(first=5, rate=0.1, tolerance=TOLERANCE)
    for node in before.audits.known():
        after.audits.recall(before.audits.record_of(node, 3, 9))
    assert after.audits.standing() == before.audits.standing()
    assert (after.audits.rate_of(HONEST), after.audits.rate_of(LIAR)) == (0.1, 1.0)
    assert after.audits.waits_for(LIAR)
    assert after.audits._records == before.audits._records
    assert any(blame.out for blame in after.judge(2 * TOLERANCE).blames), "the third strike"


def test_the_numbers_keep_length_and_side_of_a_difference() -> None:
    """Of 20,000 elements: the same difference gives the same numbers, others average out, and a scale shows first."""
    torch.manual_seed(3)
    seed = b"12345678"
    true = torch.randn(20_000)
    scaled = residual(true, true * 1.01, seed)
    assert scaled[0] == pytest.approx(0.01, rel=1e-3)
    assert residual(true, true * 1.01, seed) == scaled
    assert residual(true, true.clone(), seed) == (0.0,) * RESIDUAL_PARTS
    assert residual(true, torch.full_like(true, math.nan), seed) == (0.0,) * RESIDUAL_PARTS
    noises = [residual(true, true + 0.01 * torch.randn(20_000), seed) for _ in range(100)]
    lengths = [math.sqrt(sum(part * part for part in each[1:])) for each in noises]
    assert sum(lengths) / 100 == pytest.approx(0.01, rel=0.1)
    mean = [sum(each[number] for each in noises) / 100 for number in range(RESIDUAL_PARTS)]
    assert math.sqrt(sum(part * part for part in mean)) < 0.002
    assert residual(true, true * 1.01, b"another!")[1:] != scaled[1:]


def test_a_ledger_that_starts_again_knows_its_members_and_tells_the_next_ledgers() -> None:
    """Also what was written under an earlier generation; the newest record of a member counts."""
    said = Desk(first=5).audits.record_of(LIAR, 0, 3)
    records: list[Record] = [msgspec.structs.replace(said, passed=passed) for passed in (3, 7)]
    server = Server("f0", records).server
    assert server.ledger is not None
    assert server.ledger.desk.audits.standing() == {LIAR: (7, 0)}
    after = Server("f0").server
    after.take_over((), server.standing())
    assert after.ledger is not None
    assert after.ledger.desk.audits.standing() == {LIAR: (7, 0)}


def test_of_each_member_the_journal_keeps_the_newest_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    said = Desk().audits.record_of(LIAR, 1, 3)
    other = msgspec.structs.replace(said, node=HONEST, passed=1)
    journal.commit([Append(msgspec.structs.replace(said, passed=number)) for number in range(9)] + [Append(other)])
    journal.commit([Forget(50)])
    found = journal.read(TensorStore(count(1), 1 << 20))
    journal.close()
    assert found == [msgspec.structs.replace(said, passed=8), other]
