"""The coordinator's machine by scripts: facts in, exact effects out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.live.orders import Ban
from coordinator.live.records import Banned, DataRow, InviteSpent, MemberRow, StoredState
from protocol.base.ids import NodeId
from protocol.base.machine import Exit, HangUp, Ordered, Send, Told
from protocol.messages import (
    Bye,
    DataReady,
    Leave,
    Message,
    News,
    NodeReport,
    Ping,
    PlanChanged,
    Pong,
    Refused,
    RunFinished,
    StepReportStored,
    VersionReady,
    Welcome,
)
from protocol.run.run import RunConfig, StagesSection
from protocol.trust.membership import MEMBERSHIP_S, Invite
from tests.coordinator.live.desk import CONFIG, DATA, RUN_ID, Desk, join, welcome


def test_a_server_is_welcomed_only_when_its_serial_is_durable() -> None:
    """Nothing is sent to a joining server before its membership's serial is on disk."""
    desk = Desk(durable=False)
    assert desk.server("s0") == []
    assert desk.records == [MemberRow(node=NodeId("s0"), public_key=b"s0", role="server", serial=1)]
    assert desk.settle() == [Send(NodeId("s0"), welcome(desk, serial=1, vocabulary=0))]


def test_the_plan_goes_to_everybody_when_all_places_are_filled_and_it_is_durable() -> None:
    """Three servers hear nothing but their welcome; the fourth completes the plan, which all get."""
    desk = Desk()
    for node in ("s0", "s1", "s2"):
        assert [type(effect) for effect in desk.server(node)] == [Send]
    desk.durable = False
    desk.server("s3")
    effects = desk.settle()
    plan = desk.plan
    assert effects == [
        Send(NodeId("s3"), welcome(desk, serial=4, vocabulary=0)),
        Send(NodeId("s0"), PlanChanged(plan=plan, stage=0, reason="stage 0 front 0")),
        Send(NodeId("s1"), PlanChanged(plan=plan, stage=0, reason="stage 0 back 0")),
        Send(NodeId("s2"), PlanChanged(plan=plan, stage=1, reason="stage 1 front 0")),
        Send(NodeId("s3"), PlanChanged(plan=plan, stage=1, reason="stage 1 back 0")),
    ]
    assert (plan.generation, plan.ledger_generation, plan.restore_step) == (1, 1, -1)
    assert plan.server_nodes() == ("s0", "s1", "s2", "s3")
    assert plan.addresses_of(NodeId("s2")) == ("s2:1",)


def test_the_vocabulary_is_durable_before_a_second_welcome_and_before_any_volunteer_is_in() -> None:
    """A volunteer waits for the data; then servers get a second welcome and the volunteer its first, and a stage."""
    desk = Desk()
    plan = desk.staff()
    assert desk.volunteer("v0") == []
    desk.durable = False
    assert desk.say("s0", DATA) == []
    assert desk.records[-1] == DataRow(vocabulary=259, data_hash="d" * 64, token_count=1000)
    assert desk.settle() == [
        *(Send(NodeId(f"s{n}"), welcome(desk, serial=n + 1, vocabulary=259)) for n in range(4)),
        Send(NodeId("v0"), welcome(desk, serial=5, vocabulary=259)),
        Send(NodeId("v0"), PlanChanged(plan=plan, stage=0, reason="stage 0 has no volunteer")),
        Send(NodeId("v0"), News(step=-1)),
    ]


def test_the_same_data_from_a_second_server_changes_nothing() -> None:
    """The back server of stage 0 reads the same data and is not answered."""
    desk = Desk()
    desk.train()
    assert desk.say("s1", DATA) == []
    assert len(desk.written(DataRow)) == 1


def test_a_server_with_other_data_is_refused_with_both_hashes() -> None:
    """Stage 0's second server disagrees on the data: refused, closed, and its place is free for another."""
    desk = Desk()
    desk.train()
    effects = desk.say("s1", DataReady(vocabulary=259, data_hash="e" * 64, token_count=1000))
    (refused,) = desk.sent("s1", Refused, effects)
    assert "e" * 16 in refused.reason and "d" * 16 in refused.reason
    assert desk.hung_up(effects) == [("s1", "data")]
    assert desk.machine.placement.table.empty() == [(0, 1)]
    assert desk.counted("barnraise_coordinator_node_leaves_total", reason="evicted") == 1


def test_a_data_conflict_is_seen_even_while_the_first_report_is_being_written() -> None:
    """Two reports arrive before the first is durable: the second must agree with the first."""
    desk = Desk()
    desk.staff()
    desk.durable = False
    desk.say("s0", DATA)
    effects = desk.say("s1", DataReady(vocabulary=300, data_hash="d" * 64, token_count=1000))
    assert desk.hung_up(effects) == [("s1", "data")]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (NodeReport(state="idle", waiting_for="", counters={}), "unexpected"),
        (DATA, "unexpected"),
        (VersionReady(ledger_generation=1, version=1), "unexpected"),
    ],
)
def test_anything_before_join_closes_the_link(message: Message, reason: str) -> None:
    """A node that has not joined may say hello, ping and goodbye, and nothing else."""
    desk = Desk()
    desk.link("s0")
    assert desk.say("s0", message) == [HangUp(NodeId("s0"), reason, fault=True)]
    assert desk.counted("barnraise_transport_rejected_messages_total", reason=reason) == 1


@pytest.mark.parametrize(
    "facts",
    [{"role": "volunteer"}, {"tokens_per_s": float("nan")}, {"tokens_per_s": -1.0}, {"checkpoints": tuple(range(17))}],
)
def test_a_join_that_no_honest_node_sends_closes_the_link(facts: dict[str, Any]) -> None:
    """A role other than the credential's, a speed that cannot be, too long a list."""
    desk = Desk()
    desk.link("s0")
    assert desk.say("s0", join(**facts)) == [HangUp(NodeId("s0"), "unexpected", fault=True)]
    assert desk.records == []


def test_messages_out_of_place_close_only_their_link() -> None:
    """Wrong messages from joined nodes: named, counted, closed; everybody else goes on."""
    desk = Desk()
    desk.train()
    desk.volunteer("v0")
    assert desk.hung_up(desk.say("v0", DATA)) == [("v0", "unexpected")]
    assert desk.hung_up(desk.say("s3", DATA)) == [("s3", "unexpected")]
    assert desk.hung_up(desk.report(0, node="s2")) == [("s2", "unexpected")]
    assert desk.hung_up(desk.say("s1", VersionReady(ledger_generation=1, version=1))) == [("s1", "unexpected")]
    assert desk.sent("s0", StepReportStored, desk.report(0)) == [StepReportStored(step=0)]


def test_a_coordinators_own_role_is_not_admitted() -> None:
    """Somebody with the coordinator's key in the role of a peer is closed."""
    assert Desk().link("c", role="coordinator") == [HangUp(NodeId("c"), "role", fault=True)]


# ---- invites, bans -----------------------------------------------------------------------------------------------


def _invite(uses: int) -> Invite:
    return Invite(issuer=bytes(32), run_id=RUN_ID, role="server", uses=uses, not_after=2**40, nonce=b"n" * 16)


def test_a_one_off_invite_admits_one_node_and_that_node_again() -> None:
    """The use is durable before the welcome; the second node is refused; the first may come again."""
    desk = Desk(invites={b"once": _invite(1)}, durable=False)
    desk.server("s0", credential=b"once")
    assert desk.records[0] == InviteSpent(nonce=b"n" * 16, node=NodeId("s0"), step=0)
    effects = desk.server("s1", credential=b"once")  # before the first is durable
    assert desk.hung_up(effects) == [("s1", "credential")]
    assert "1 node" in desk.sent("s1", Refused, effects)[0].reason
    desk.settle()
    desk.drop("s0")
    assert desk.server("s0", credential=b"once") == []
    assert desk.sent("s0", Welcome, desk.settle())
    assert len(desk.written(InviteSpent)) == 1


def test_spent_invites_are_remembered_across_a_restart() -> None:
    """What the database has is spent."""
    stored = StoredState(spent=(InviteSpent(nonce=b"n" * 16, node=NodeId("s0")),))
    desk = Desk(stored=stored, invites={b"twice": _invite(2)})
    assert desk.sent("s1", Welcome, desk.server("s1", credential=b"twice"))
    assert desk.hung_up(desk.server("s2", credential=b"twice")) == [("s2", "credential")]


def test_a_banned_node_leaves_at_once_and_stays_out() -> None:
    """Ban: told why, closed, its place freed, refused from then on, also after a restart."""
    desk = Desk()
    desk.staff()
    effects = desk.feed(Ordered(Ban(NodeId("s2"), "sent garbage")))
    assert effects[:2] == [
        Send(NodeId("s2"), Refused(reason="banned: sent garbage")),
        HangUp(NodeId("s2"), "banned"),
    ]
    assert desk.records[-1] == Banned(node=NodeId("s2"), reason="sent garbage", number=1, wall_s=1e9 + desk.now)
    assert desk.machine.placement.table.empty() == [(1, 0)]
    assert desk.hung_up(desk.link("s2")) == [("s2", "banned")]
    assert desk.counted("barnraise_coordinator_node_leaves_total", reason="banned") == 1
    again = Desk(stored=StoredState(banned=(Banned(node=NodeId("s2"), reason="sent garbage"),)))
    assert again.hung_up(again.link("s2")) == [("s2", "banned")]


# ---- links -------------------------------------------------------------------------------------------------------


def test_a_quiet_link_is_pinged_and_a_silent_one_closed() -> None:
    """After ping_s a ping; after silent_s the end, counted as a timeout."""
    desk = Desk()
    desk.server("s0")
    limits = CONFIG.limits
    assert desk.pass_time(limits.ping_s - 0.01) == []
    assert desk.pass_time(0.02) == [Send(NodeId("s0"), Ping(number=0))]
    desk.say("s0", Pong(number=0))
    assert desk.hung_up(desk.pass_time(limits.silent_s - 0.01)) == []
    assert desk.hung_up(desk.pass_time(limits.silent_s / 6 + 0.02)) == [("s0", "silent")]
    assert desk.counted("barnraise_coordinator_node_leaves_total", reason="timeout") == 1
    assert desk.machine.wake_at() is None or desk.pass_time(10) == []


def test_a_ping_is_answered() -> None:
    """Also before Join."""
    desk = Desk()
    desk.link("s0")
    assert desk.say("s0", Ping(number=7)) == [Send(NodeId("s0"), Pong(number=7))]


@pytest.mark.parametrize("message", [Leave(reason="Ctrl-C"), Bye(reason="Ctrl-C")])
def test_a_node_that_says_goodbye_leaves_gracefully(message: Message) -> None:
    """Counted as graceful, once, although the link's end follows."""
    desk = Desk()
    desk.train()
    desk.volunteer("v0")
    desk.say("v0", message)
    desk.drop("v0")
    assert desk.counted("barnraise_coordinator_node_leaves_total", reason="graceful") == 1
    assert desk.counted("barnraise_coordinator_node_leaves_total", reason="timeout") == 0


def test_a_second_link_of_a_node_replaces_the_first() -> None:
    """A node whose old link's end was never seen: it starts over and is welcomed again."""
    desk = Desk()
    desk.staff()
    effects = desk.server("s0", stage=0, shard=0, version=0, held_generation=1)
    assert desk.sent("s0", Welcome, effects) and desk.sent("s0", PlanChanged, effects)
    assert desk.plan.generation == 1


def test_a_welcome_that_is_durable_too_late_is_not_sent() -> None:
    """The link closes while the serial is being written, and a new one comes: one welcome, on the new link's serial."""
    desk = Desk(durable=False)
    desk.server("s0")
    desk.drop("s0")
    desk.server("s0")
    assert [m.membership for m in desk.sent("s0", Welcome, desk.settle())] == [b"membership 2"]


def test_a_membership_is_renewed_at_half_of_its_life() -> None:
    """A node that stays linked never runs out."""
    desk = Desk()
    desk.server("s0")
    desk.now += MEMBERSHIP_S / 2
    desk.say("s0", Pong(number=0))
    effects = desk.pass_time(2.0)
    assert [m.membership for m in desk.sent("s0", Welcome, effects)] == [b"membership 2"]


def test_stop_says_goodbye_and_exits() -> None:
    """A clean stop tells every node."""
    desk = Desk()
    desk.server("s0")
    assert desk.feed(Told("stop")) == [
        Send(NodeId("s0"), Bye(reason="the coordinator stops")),
        Exit("stopped"),
    ]


# ---- the end -----------------------------------------------------------------------------------------------------


def test_the_last_step_ends_the_run_for_everybody_present_and_to_come() -> None:
    """RunFinished to all when step 4 of 5 is stored, to a volunteer after the last news of what it gave; a node that
    comes later hears it too."""
    desk = Desk()
    desk.train()
    desk.volunteer("v0")
    for step in range(4):
        assert not desk.sent("v0", RunFinished, desk.report(step))
    effects = desk.report(4)
    (last,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, News)]
    assert last.peer == "v0" and effects.index(last) == effects.index(Send(NodeId("v0"), RunFinished())) - 1
    effects.remove(last)
    assert effects == [
        Send(NodeId("s0"), StepReportStored(step=4)),
        *(Send(NodeId(node), RunFinished()) for node in ("s0", "s1", "s2", "s3", "v0")),
    ]
    assert desk.sent("v1", RunFinished, desk.volunteer("v1"))
    assert desk.machine.status(desk.now)["run"]["state"] == "finished"
    (log,) = [log for log in desk.logs if log.event == "run finished"]
    assert "barnraise export OUT" in str(log.fields["detail"])


def test_status_says_that_a_stage_has_nobody_who_computes() -> None:
    """Servers that never compute and one volunteer for two stages: the run waits, and says for what."""
    desk = Desk(RunConfig(stages=StagesSection(count=2, collocated="never")))
    desk.train()
    desk.volunteer("v0")
    run = desk.machine.status(desk.now)["run"]
    assert run["state"] == "waiting" and run["waiting_for"].startswith("waiting for volunteers for stage 1:")
    desk.volunteer("v1")
    assert desk.machine.status(desk.now)["run"]["state"] == "training"


def test_status_is_plain_data_that_names_what_it_waits_for() -> None:
    """Before the plan: waiting, for which places, and since when; with everything there: training."""
    desk = Desk()
    desk.server("s0")
    desk.pass_time(1.0)
    run = desk.machine.status(desk.now)["run"]
    assert run["state"] == "waiting"
    assert run["waiting_for"] == "waiting for 3 more servers: stage 0 back 0, stage 1 front 0, stage 1 back 0"
    assert run["waiting_s"] == 1.0
    for number in range(1, 4):
        desk.server(f"s{number}")
    assert "read the data" in desk.machine.status(desk.now)["run"]["waiting_for"]
    desk.say("s0", DATA)
    desk.volunteer("v0", tokens_per_s=10.0)
    desk.say("v0", NodeReport(state="training", waiting_for="", counters={"tokens": 5.0}))
    desk.report(0)
    status = desk.machine.status(desk.now)
    assert status["run"]["state"] == "training" and status["run"]["waiting_for"] == ""
    assert status["losses"] == [{"step": 0, "loss": 5.0}]
    assert [stage["blocks"] for stage in status["stages"]] == ["embed, 0a-1f", "2a-3f, head"]
    assert status["stages"][0]["volunteers"] == 1
    member = next(member for member in status["members"] if member["id"] == "v0")
    assert (member["state"], member["stage"], member["counters"]) == ("training", 0, {"tokens": 5.0})


def test_places_and_stages_are_looked_after_however_seldom_links_are_asked() -> None:
    """In a large run links may be asked every few minutes; a place that nobody fills does not wait for that."""
    limits = msgspec.structs.replace(CONFIG.limits, ping_s=300.0, silent_s=1200.0)
    desk = Desk(msgspec.structs.replace(CONFIG, limits=limits))
    desk.server("s0")
    due = desk.machine.wake_at()
    assert due is not None and due - desk.now <= 7.5
