"""The planner as a process: it answers, and whatever becomes of it is an answer with a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import trio

from coordinator.live.problem import Problem
from coordinator.process import planner
from coordinator.process.planner import Answer, ask_planner, solve
from protocol.run.run import RunConfig, StagesSection
from tests.coordinator.planning.placement.test_seats import network, run

PROBLEM = Problem(config=RunConfig(stages=StagesSection(cut="planned")), network=network(5, 2, 1))


def test_a_process_solves_a_problem_while_others_are_answered() -> None:
    """The same answer as in this process; the loop turns at least every 100 ms meanwhile, as links and the API need."""
    turns = [0.0]

    async def watch() -> None:
        while True:
            before = trio.current_time()
            await trio.sleep(0.005)
            turns.append(trio.current_time() - before)

    async def both() -> Answer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            answer = await ask_planner(PROBLEM)
            nursery.cancel_scope.cancel()
        return answer

    answer = trio.run(both)
    assert answer == solve(PROBLEM) and answer.proposal is not None
    assert answer.proposal.fault(PROBLEM) == ""
    assert len(turns) > 10


@pytest.mark.slow
@pytest.mark.parametrize("collocated", ["never", "when_empty", "always"])
def test_every_answer_can_be_handed_over(collocated: str) -> None:
    """Also where a server's line sets the pace: once that time was a number of numpy's, and the planner ended."""
    for volunteers in (0, 4, 7):
        for count in (0, 1, 2):
            config = run(count=count, collocated=collocated)
            answer = solve(Problem(config=config, network=network(6, volunteers, 1)), clock=lambda: 0.0)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=Answer) == answer


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("import sys; print('no memory', file=sys.stderr); sys.exit(3)", "the planner ended with code 3: no memory"),
        ("print('hello')", "the planner's answer cannot be read"),
        ("import time; time.sleep(60)", "the planner has not ended within 0.3 s"),
    ],
)
def test_a_planner_that_fails_says_why(
    script: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends badly, says nonsense, or does not end."""
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(planner, "KILL_S", 0.3 if "sleep" in script else 30.0)
    monkeypatch.setattr(sys, "executable", str(fake))
    answer = trio.run(ask_planner, PROBLEM)
    assert answer.proposal is None and answer.sentence.startswith(sentence)


def test_a_planner_that_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert trio.run(ask_planner, PROBLEM) == Answer(None, "the planner cannot be started: No such file or directory")


def test_a_problem_without_an_answer_is_one_sentence() -> None:
    assert solve(Problem(config=PROBLEM.config, network=network(1, 0, 1))).sentence.startswith(
        "stages.count: 1 servers"
    )
