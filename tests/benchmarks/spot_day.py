"""A day of spot instances, lived through by the running system: `python -m tests.benchmarks.spot_day FILE`.

The machines of production in the world that measures (`coordinator.world`, as `barnraise simulate --churn` has them)
go through Bamboo's p3 trace: 11 to 32 computers come and go, 166 departures in 11.4 hours. Everybody has a device of 10
TFLOP/s, and a home line of 20/200 Mbit/s, or with `--lines cloud` what the trace's own computers have (p3.2xlarge, "up
to 10 Gbit/s": 2.5 both ways, a millisecond from servers with 10); 1.1 billion parameters, 131,072 tokens a step, with
the cloud's lines 524,288, the default forms and audits.

*Of the best* is the number of steps over that which the best assignment of those who are there would have closed at
every moment, with changes that cost nothing: `by cost`, at the planners' cost of pools, and `by itself`, at the pace
that the very same machines keep when that assignment stands from the beginning and nobody comes or goes. What is
missing to 1 are moves, downloads, the start, work that leavers took with them, and wrong choices; *tasks* is how many
were done for one that the steps needed.

FILE gets a line for each row and each pace as it ends, and what stands there is not done again. Simulated seconds are
the same on every machine. A row takes some five minutes of a processor, all paces of a row as long; with the cloud's
lines a day of four stages takes 22 minutes and its paces 8, of eight stages twice as long.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from coordinator.world.churn import Churn, load_churn, no_churn
from coordinator.world.figures import figures_of
from coordinator.world.predicted import best_crews
from coordinator.world.swarm import Swarm
from node.world.member import Members
from protocol.base.ids import NodeId
from protocol.run.run import BatchSection, DataSection, LimitsSection, RunConfig, StagesSection
from protocol.schedule.profile import Network
from tests.benchmarks.home_lines import MODELS, Line, home_lines

TRACE = Path(__file__).parents[1] / "data" / "bamboo_p3-trace.csv"
MOST = 32
MICROBATCHES = 64
SAMPLES = {"home": 1, "cloud": 4}
"""Of 2,048 tokens, in a microbatch. With one a step on the cloud's lines takes ten seconds with 21 volunteers and with
30: its servers', each with one processor in this world, and devices are idle for half of it. With four it takes 32
seconds with 21; the same tokens as 256 microbatches take 29, and three times as long to simulate."""
ROWS = (4, 8)
LINES = {"home": Line(), "cloud": Line(2500.0, 2500.0, 0.001, 10_000.0)}
STEPS, SETTLED = {"home": 8, "cloud": 24}, {"home": 2, "cloud": 3}
"""Of a run whose pace is taken: so many steps, without the first ones, which fill the pipeline. In the cloud's, every
second one is short."""
OF_BEST_MIN = 0.95


def config_of(lines: str, stages: int, steps: int) -> RunConfig:
    """The run of a row."""
    return RunConfig(
        name=f"spot-{stages}",
        model=MODELS["1.1 B"],
        steps=steps,
        data=DataSection(tokenizer="bpe:32000"),
        batch=BatchSection(microbatches=MICROBATCHES, samples=SAMPLES[lines]),
        stages=StagesSection(count=stages, front_servers=1, back_servers=1),
        limits=LimitsSection(lease_s=600.0),
    )


def ground(lines: str, stages: int, volunteers: int = MOST) -> tuple[Network, list[str]]:
    """A network, and the names of its volunteers."""
    network = home_lines(None, 2 * stages, volunteers, device_gigabytes=24, line=LINES[lines])
    return network, [machine.name for machine in network.machines[network.servers :]]


def there(churn: Churn) -> Iterator[tuple[float, int]]:
    """(seconds, how many are there meanwhile), in order, until the last change."""
    count, before = 0, 0.0
    for change in churn.changes:
        if change.at_s > before:
            yield change.at_s - before, count
            before = change.at_s
        count += 1 if change.comes else -1


def pace(lines: str, stages: int, volunteers: int) -> dict[str, Any]:
    """Seconds a step of so many in their best assignment, while nothing changes."""
    network, names = ground(lines, stages, volunteers)
    # Whoever is pinned has to be known before the plan, and the best crews after it: so a plan is waited for first.
    first = Swarm(config_of(lines, stages, STEPS[lines]), network, no_churn(names), 1, Members)
    first.world.run(60.0)
    crews = best_crews(first, range(volunteers))
    pinned = {NodeId(names[member]): stage for stage, crew in enumerate(crews) for member in crew}
    swarm = Swarm(config_of(lines, stages, STEPS[lines]), network, no_churn(names), 1, Members, pinned=pinned)
    swarm.run(86_400.0)
    closed = [step.at_s for step in swarm.steps[SETTLED[lines] :]]
    taken = [later - at for at, later in pairwise(closed)]
    found = {"lines": lines, "stages": stages, "volunteers": volunteers, "crews": [*map(len, crews)]}
    return {**found, "pace_s": sum(taken) / len(taken)}


def live(lines: str, stages: int, until_s: float | None = None) -> dict[str, Any]:
    """The whole day, or its beginning."""
    network, names = ground(lines, stages)
    churn = load_churn(TRACE, names)
    swarm = Swarm(config_of(lines, stages, 10**6), network, churn, 1, Members)
    swarm.run(churn.changes[-1].at_s if until_s is None else until_s)
    figures = figures_of(swarm, 1)
    return {
        "lines": lines,
        "stages": stages,
        "day_s": swarm.world.now,
        "steps": figures["steps"],
        "departures": figures["churn"]["departures"],
        "by_cost": figures["churn"]["of_best"],
        "tasks": figures["tasks"]["share"],
        "longest_s": max((b.at_s - a.at_s for a, b in pairwise(swarm.steps)), default=0.0),
        "warnings": figures["warnings"],
    }


def by_itself(row: dict[str, Any], paces: dict[int, float]) -> float:
    """Steps over those of the same machines in the best assignment at every moment."""
    churn = load_churn(TRACE, [str(number) for number in range(MOST)])
    left_s, best = row["day_s"], 0.0
    for seconds, count in there(churn):
        best += min(seconds, left_s) / paces[count]
        left_s -= min(seconds, left_s)
    return float(row["steps"] / best)


def main() -> int:
    """Does what is missing, then prints the table; 1 where less than 0.95 of the best was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--lines", nargs="+", choices=LINES, default=["home"])
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=ROWS, help="stages")
    arguments = parser.parse_args()
    known = [json.loads(line) for line in arguments.file.read_text().splitlines()] if arguments.file.exists() else []

    def keep(found: dict[str, Any]) -> None:
        known.append(found)
        with arguments.file.open("a") as out:
            out.write(json.dumps(found) + "\n")

    counts = sorted({count for _, count in there(load_churn(TRACE, [str(n) for n in range(MOST)]))} - {0})
    rows = [(lines, stages) for lines in arguments.lines for stages in arguments.rows]

    def of(row: tuple[str, int]) -> list[dict[str, Any]]:
        return [each for each in known if (each["lines"], each["stages"]) == row]

    for row in rows:
        if not any("steps" in each for each in of(row)):
            keep(live(*row))
        for count in counts:
            if not any(each.get("volunteers") == count for each in of(row)):
                keep(pace(*row, count))
    missed = 0
    print("lines  stages   steps   left   longest s   tasks   of the best, by cost   by itself")
    for row in rows:
        day = next(each for each in of(row) if "steps" in each)
        share = by_itself(day, {each["volunteers"]: each["pace_s"] for each in of(row) if "pace_s" in each})
        missed += share < OF_BEST_MIN
        print(
            f"{day['lines']:6} {day['stages']:>6} {day['steps']:>7} {day['departures']:>6} {day['longest_s']:>11.0f}"
            f" {day['tasks']:>7.3f} {day['by_cost']:>22.1%} {share:>11.1%}{'   MISSED' if share < OF_BEST_MIN else ''}"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
