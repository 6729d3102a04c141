"""How many false contributions get in before a liar is out: the audits' own decisions, played life by life.

    python -m tests.benchmarks.audits [--lives 400] [--seed 1]

10, 20 or 30 % of the members collude: each is honest until it is known (`audit.first` audits passed), and lies from
then on, in all it brings (how rarely it lies makes no difference to how many get in, only to when). When it is out it
comes back as somebody new, or cannot. `node.server.audits` draws by its MAC, confirms, and blames, as in a server;
contributions are played, auditors find all that is false (d = 1) and are always free, and colluders cannot help each
other, since servers audit. Honest members are exact, and no part of this (`tests/simulation/test_audits.py` has them).

Shown with 95 % intervals (bootstrap over lives) beside the arithmetic of `strangers.md`, section 3: false ones before a
life's end, (1 - p) / p; as a share of all that is accepted, colluders x false / (first + false); of the microbatches
of a route through 4 stages that one of them touches, 1 - (1 - share)^8, a forward and a backward in each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence

from node.server.audits import Audits
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.messages import AuditReport, Stored
from protocol.run.audits import Difference
from protocol.run.run import AuditSection

SHARES = (0.1, 0.2, 0.3)
TERMS = ((0.05, 20), (0.1, 200), (0.2, 1000))
"""(rate, first), as in the table."""
AUDITORS = (NodeId("auditor-1"), NodeId("auditor-2"))
VISITS = 8
"""Contributions that a microbatch goes into on its way through 4 stages and back."""
COLLUDERS = 30
"""Of a hundred members, for the count of false ones where nobody can come back."""


def live(rate: float, first: int, key: bytes) -> int:
    """False contributions that one life gets in before it is out."""
    audits = Audits(AuditSection(rate=rate, first=first), lambda: key, lambda node: node in AUDITORS, 60.0)
    for auditor in AUDITORS:
        audits.auditor_here(auditor)
    node, false = NodeId("liar"), 0
    for number in range(10**6):
        lies = number >= first
        if _audit(audits, _stored(node, number, number), lies):
            return false
        false += lies
    raise AssertionError("a liar was never found")


def _stored(node: NodeId, number: int, step: int) -> Stored:
    return Stored(
        ledger_generation=1,
        contribution=ContributionId(node, 1, number),
        step=step,
        version=step,
        tasks=(TaskId(step, 0, 0, "B"),),
        losses=(),
        shard=0,
    )


def _audit(audits: Audits, stored: Stored, false: bool) -> bool:
    """Whether a contribution's sender is put out by it; auditors are always free, and find what is false."""
    if not audits.draw(stored):
        return False
    while True:
        (unit,) = audits.give(0.0)
        assert unit.busy is not None
        value = 2.0 if false else 0.0
        found = Difference(claim="gradient", node=stored.contribution.node, task=stored.tasks[0], value=value)
        report = AuditReport(
            ledger_generation=1,
            contribution=stored.contribution,
            step=stored.step,
            attempt=len(unit.auditors),
            differences=(found,),
        )
        ruling = audits.report(unit.busy, report, 0.0)
        assert ruling is not None
        if ruling.outcome != "again":
            return any(blame.out for blame in ruling.blames)


def interval(lives: Sequence[int], value: Callable[[float], float], rng: random.Random) -> tuple[float, float]:
    """95 % of what `value` gives for the mean of as many lives drawn with replacement."""
    found = sorted(value(statistics.fmean(rng.choices(lives, k=len(lives)))) for _ in range(2000))
    return found[50], found[1949]


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(words)
    rng = random.Random(options.seed)
    cells = outside = 0

    def cell(lives: Sequence[int], before: float, value: Callable[[float], float], form: str) -> str:
        nonlocal cells, outside
        low, high = interval(lives, value, rng)
        inside = low <= value(before) <= high
        cells, outside = cells + 1, outside + (not inside)
        mark = "" if inside else " (outside)"
        return f"{value(statistics.fmean(lives)):{form}} ({low:{form}} to {high:{form}}; {value(before):{form}}{mark})"

    print("Each cell: measured (95 % interval; arithmetic).\n")
    print(
        f"| colluders | rate, first | until out | bad, if they return | microbatches touched | {COLLUDERS} who cannot |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for share in SHARES:
        for rate, first in TERMS:
            lives = [live(rate, first, rng.randbytes(32)) for _ in range(options.lives)]
            before = (1 - rate) / rate

            def bad(false: float, share: float = share, first: int = first) -> float:
                return share * false / (first + false)

            def touched(false: float) -> float:
                return 1 - (1 - bad(false)) ** VISITS

            row = [
                cell(lives, before, lambda false: false, ".1f"),
                cell(lives, before, bad, ".2%"),
                cell(lives, before, touched, ".1%"),
                cell(lives, before, lambda false: COLLUDERS * false, ".0f"),
            ]
            print(f"| {share:.0%} | {rate}, {first} | {' | '.join(row)} |", flush=True)
    print(f"\n{outside} of {cells} outside of their interval, where one in twenty is by chance")


if __name__ == "__main__":
    main(sys.argv[1:])
