"""A server that is there and does nothing: named, and its place given to a spare that does something."""

from __future__ import annotations

from coordinator.live.status import run_state
from protocol.base.ids import NodeId
from protocol.base.machine import Send
from protocol.messages import NodeReport, Ping, Pong
from protocol.run.run import RunConfig, StagesSection
from tests.coordinator.live.desk import CONFIG, Desk

PLACES = ("s0", "s1", "s2", "s3")
SMALL = RunConfig(steps=5, stages=StagesSection(count=1))
GONE_S = CONFIG.limits.server_gone_s
HANGS = "its disk, which has written nothing for 40 s"


def hang(
    desk: Desk, seconds: float, *hanging: str, spares: tuple[str, ...] = (), places: tuple[str, ...] = PLACES
) -> None:
    """So much time passes; the nodes named say all the while that their work stands still."""
    begun, desk.answers = desk.now, False
    while desk.now - begun < seconds:
        before = len(desk.done)
        for node in (*places, *spares):
            stalled_s = desk.now - begun if node in hanging else 0.0
            words = HANGS if node in hanging else "step 2: server 0 to sum up gradients"
            counters = {"stalled_s": stalled_s}
            desk.say(node, NodeReport(state="training", waiting_for=words, counters=counters, linked=()))
        desk.pass_time(2.0)
        for effect in desk.done[before:]:  # who hangs says nothing of checkpoints
            if isinstance(effect, Send) and isinstance(effect.message, Ping) and effect.peer not in hanging:
                desk.say(effect.peer, Pong(number=effect.message.number))
    desk.answers = True


def test_a_server_that_hangs_is_named_and_a_spare_takes_its_place() -> None:
    """The status says who and what long before; the spare takes the place when the same time is over as for one that
    is away, and the run goes back as it does for a dead one. The one that hung is not called again."""
    desk = Desk()
    desk.train()
    desk.report(0)
    desk.server("spare")
    hang(desk, 40.0, "s2", spares=("spare",))
    assert run_state(desk.machine, desk.now) == ("waiting", f"waiting for stage 1 front 0 (s2): {HANGS}")
    assert "s2" in desk.plan.server_nodes()
    hang(desk, GONE_S + 12.0, "s2", spares=("spare",))
    assert "s2" not in desk.plan.server_nodes() and "spare" in desk.plan.server_nodes()
    assert (desk.plan.ledger_generation, desk.machine.history.lost_steps) == (2, 1)
    desk.drop("s3")
    hang(desk, GONE_S + 12.0, "s2", spares=("spare",))
    assert NodeId("s2") not in desk.plan.server_nodes()


def test_nobody_is_given_up_when_most_hang() -> None:
    """Then it is what they share that hangs: a checkpoint folder, above all. The status names them."""
    desk = Desk()
    desk.train()
    desk.server("spare")
    hang(desk, 3 * GONE_S, "s0", "s2", "s3", spares=("spare",))
    assert desk.plan.server_nodes() == PLACES
    state, waiting_for = run_state(desk.machine, desk.now)
    assert state == "waiting" and all(f"({node})" in waiting_for for node in ("s0", "s2", "s3"))


def test_two_of_two_servers_that_hang_give_their_places_to_two_spares_that_do_not() -> None:
    """Spares write to what all share before they answer: as many as are needed have shown that it is not at fault."""
    desk = Desk(SMALL)
    for node in ("s0", "s1", "spare0"):
        desk.server(node)
    hang(desk, GONE_S + 12.0, "s0", "s1", spares=("spare0",), places=("s0", "s1"))
    assert desk.plan.server_nodes() == ("s0", "s1")  # one would not be enough
    desk.server("spare1")
    hang(desk, GONE_S + 12.0, "s0", "s1", spares=("spare0", "spare1"), places=("s0", "s1"))
    assert set(desk.plan.server_nodes()) == {"spare0", "spare1"}


def test_a_busy_server_keeps_its_place_while_steps_close() -> None:
    """A long job beside the work, like the writing of a snapshot, stops nobody."""
    desk = Desk()
    desk.train()
    desk.server("spare")
    for step in range(3):
        desk.report(step)
        hang(desk, 0.7 * GONE_S, "s2", spares=("spare",))
    assert desk.plan.server_nodes() == PLACES


def test_a_run_in_which_nothing_closes_does_not_count_as_training() -> None:
    """After three leases somebody is named, though every server is there and none of them hangs."""
    desk = Desk()
    desk.train()
    assert run_state(desk.machine, desk.now) == ("training", "")
    hang(desk, 3 * CONFIG.limits.lease_s + 2.0)
    state, waiting_for = run_state(desk.machine, desk.now)
    assert state == "waiting"
    assert waiting_for.endswith("stage 0 front 0 (s0) waits for step 2: server 0 to sum up gradients")
