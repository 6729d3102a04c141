"""What the status says of a run whose servers go and come: its state, what it waits for, and how fast it is."""

from __future__ import annotations

import gc

import pytest

from coordinator.process.daemon import COLLECT_AFTER
from coordinator.process.metrics import coordinator_families, refresh
from protocol.drive.metrics import Metrics
from protocol.run.run import RunConfig
from tests.coordinator.live.desk import CONFIG, Desk


def running(step_s: float = 1.0, steps: int = 3) -> Desk:
    """Four servers that have closed some steps, `step_s` apart, the newest just now."""
    desk = Desk()
    desk.train()
    for step in range(steps):
        desk.stay(step_s, "s0", "s1", "s2", "s3")
        desk.report(step)
    return desk


def test_a_server_that_leaves_makes_the_run_wait_for_it_by_name() -> None:
    """At once, until it is back; status, log and gauge say the same, and the table has it as away."""
    desk = running()
    desk.drop("s2")
    desk.stay(24.0, "s0", "s1", "s3")
    status = desk.machine.status(desk.now)
    assert status["run"]["state"] == "waiting"
    assert status["run"]["waiting_for"] == "waiting for stage 1 front 0 (s2) to come back"
    assert status["run"]["waiting_s"] == 24.0
    (away,) = status["away"]
    assert (away["id"], away["place"], away["away_s"]) == ("s2", "stage 1 front 0", 24.0)
    assert desk.logged("run waits")[-1] == {"detail": status["run"]["waiting_for"]}
    metrics = Metrics(*coordinator_families(CONFIG))
    refresh(metrics, desk.machine, desk.now)
    read = metrics.registry.get_sample_value
    assert [read("barnraise_run_state", {"run": "demo", "state": s}) for s in ("waiting", "training")] == [1.0, 0.0]
    plan = desk.plan
    desk.server("s2", stage=1, shard=0, version=3, held_generation=plan.ledger_generation)
    status = desk.machine.status(desk.now)
    assert (status["run"]["state"], status["run"]["waiting_for"], status["away"]) == ("training", "", [])


def test_several_servers_that_left_are_named_in_one_sentence() -> None:
    """In the order of their places, the first four."""
    desk = running()
    for node in ("s3", "s0", "s1"):
        desk.drop(node)
    waiting_for = desk.machine.status(desk.now)["run"]["waiting_for"]
    assert waiting_for == ("waiting for stage 0 front 0 (s0), stage 0 back 0 (s1) and stage 1 back 0 (s3) to come back")


def test_a_run_whose_steps_close_is_training_though_a_server_has_no_link_to_the_coordinator() -> None:
    """A step needs every server: one that closes shows that all work; it is away all the same. Then no step comes."""
    desk = running()
    desk.drop("s2")
    desk.stay(1.0, "s0", "s1", "s3")
    desk.report(3)
    status = desk.machine.status(desk.now)
    assert (status["run"]["state"], len(status["away"])) == ("training", 1)
    desk.stay(6.0, "s0", "s1", "s3")
    run = desk.machine.status(desk.now)["run"]
    assert (run["state"], run["waiting_for"][:11]) == ("waiting", "waiting for")


@pytest.mark.parametrize(("step_s", "quiet_s"), [(1.0, 5.0), (10.0, 30.0)])
def test_a_run_that_stands_still_has_no_speed(step_s: float, quiet_s: float) -> None:
    """Five seconds after its newest step, or three of its steps where these take longer."""
    desk = running(step_s)
    assert desk.machine.status(desk.now + quiet_s - 0.1)["run"]["tokens_per_s"] == 2048 / step_s
    assert desk.machine.status(desk.now + quiet_s + 0.1)["run"]["tokens_per_s"] == 0.0


def test_steps_that_stood_still_before_make_nobody_wait_longer_for_a_word() -> None:
    """Two of the newest steps took a minute, since somebody was away then. The next server that leaves is named five
    seconds later all the same; where steps close in pairs a minute apart, after three minutes."""
    for pauses_s, quiet_s in (([60.0, 60.0, *[1.0] * 8], 5.0), ([0.0, 60.0] * 5, 180.0)):
        desk = Desk(RunConfig(steps=100))
        desk.train()
        for pause_s in (1.0, *pauses_s):
            desk.stay(pause_s, "s0", "s1", "s2", "s3")
            desk.report(desk.machine.history.newest_step + 1)
        desk.drop("s2")
        desk.stay(1.0, "s0", "s1", "s3")
        desk.report(desk.machine.history.newest_step + 1)
        for after_s, state in ((quiet_s - 1.0, "training"), (quiet_s + 1.0, "waiting")):
            assert desk.machine.status(desk.now + after_s)["run"]["state"] == state


def test_nobody_is_away_when_the_run_is_finished() -> None:
    """Servers leave then, and nobody waits for them."""
    desk = running(steps=5)
    desk.drop("s2")
    status = desk.machine.status(desk.now)
    assert (status["run"]["state"], status["away"]) == ("finished", [])


def test_answers_about_a_thousand_members_leave_nothing_for_a_full_collection() -> None:
    """What a collection finds while an answer is being made counts as what stays, and once there is a quarter more of
    that, all links are looked through: 100 ms without an answer to anybody, every three seconds."""
    desk = running()
    for number in range(1000):
        desk.volunteer(f"v{number}")
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        collected = gc.get_stats()[1]["collections"]
        for _ in range(40):
            assert len(desk.machine.status(desk.now)["members"]) == 1004
        assert gc.get_stats()[1]["collections"] == collected
    finally:
        gc.set_threshold(*before)
