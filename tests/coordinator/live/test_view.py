"""What the live page is told: enough to follow a run, and nothing that strangers should not read."""

from __future__ import annotations

import json
import re

import pytest

from coordinator.live.orders import NameNode
from coordinator.live.records import Named, StoredState
from coordinator.live.view import WORDS_MAX, members, overview, public
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.machine import Ordered
from protocol.messages import NodeReport
from tests.coordinator.live.desk import Desk

WHOLE_ID = "abcdefgh" + "2" * 44


def test_a_run_is_told_in_numbers_and_words() -> None:
    """Step, loss, time left at the present pace, who stands where, plan with its reason, checkpoints, steps, events."""
    desk = Desk()
    desk.train()
    for step in range(3):
        desk.now += 2.0
        desk.report(step)
    view = overview(desk.machine, desk.now)
    run = view["run"]
    assert (run["state"], run["step"], run["target_steps"]) == ("training", 2, 5)
    assert run["loss"] == pytest.approx(4.8) and run["left_s"] == pytest.approx(4.0)
    assert [row[0] for row in view["steps"]] == [0, 1, 2]
    assert [stage["blocks"] != "" for stage in view["stages"]] == [True, True]
    assert all(server["linked"] for stage in view["stages"] for server in stage["servers"])
    assert view["plan"]["sentence"] == desk.machine.placement.sentence
    assert any(event["event"] == "plan in force" for event in view["events"])
    json.dumps(view, allow_nan=False)


def test_a_stalled_run_says_whom_it_waits_for() -> None:
    """In words, and the server that is away stands on the list of members as such."""
    desk = Desk()
    desk.train()
    desk.report(0)
    desk.drop("s3")
    desk.pass_time(60.0)
    run = overview(desk.machine, desk.now)["run"]
    assert run["state"] == "waiting" and run["waiting_for"].startswith("waiting for stage") and run["waiting_s"] > 0
    assert "away" in {member["state"] for member in members(desk.machine, desk.now, whole_ids=False)}


def test_strangers_get_neither_whole_ids_nor_addresses() -> None:
    """Whatever members say; the operator's own page has whole ids, to ban by."""
    desk = Desk()
    node = WHOLE_ID
    desk.server(node)
    said = f"waits for {WHOLE_ID} at 198.51.100.7:8460 or [2001:db8::1]:9, " + "x" * 2000
    desk.say(node, NodeReport(state="training", waiting_for=said, counters={}))
    desk.machine.outbox.log("info", "node left", node=WHOLE_ID, reason=said)
    shown = json.dumps([overview(desk.machine, desk.now), members(desk.machine, desk.now, whole_ids=False)])
    assert "waits for abcdefgh at (address) or (address), " in shown
    assert WHOLE_ID not in shown and not re.search(r"198\.51|2001:db8", shown) and "x" * WORDS_MAX not in shown
    assert members(desk.machine, desk.now, whole_ids=True)[0]["id"] == WHOLE_ID


def test_the_operators_name_for_a_member_stands_everywhere_and_stays() -> None:
    """Once it is durable; also when the member or the coordinator comes back. Nobody else can have it, and an empty
    one takes it away."""
    desk = Desk()
    desk.train()
    desk.volunteer("v0", name="anybody")
    desk.durable = False
    for node, name in (("v0", "anna"), ("s0", "rack 7")):
        desk.feed(Ordered(NameNode(NodeId(node), name)))
    assert "anna" not in json.dumps(members(desk.machine, desk.now, whole_ids=True)), "not durable yet"
    desk.settle()
    shown = {member["id"]: member["name"] for member in members(desk.machine, desk.now, whole_ids=True)}
    assert shown["v0"] == "anna" and shown["s0"].startswith("rack 7, ")
    assert {one["id"]: one["name"] for one in desk.machine.status(desk.now)["members"]}["v0"] == "anna"
    desk.drop("s0")
    desk.pass_time(30.0)
    away = [one for one in members(desk.machine, desk.now, whole_ids=True) if one["state"] == "away"]
    assert [one["name"].startswith("rack 7, ") for one in away if one["id"] == "s0"] == [True]
    checked = desk.machine.naming.checked
    assert checked(NodeId("v0"), " anna ") == "anna" and checked(NodeId("v1"), "") == ""
    for name, fault in (("anna", "is called anna already"), ("a" * 65, "at most 64"), ("a\x1bb", "can be printed")):
        with pytest.raises(BadInputError, match=fault):
            checked(NodeId("v1"), name)
    again = Desk(stored=StoredState(names=tuple(desk.written(Named))))
    assert again.machine.naming.of(NodeId("v0")) == "anna"
    again.feed(Ordered(NameNode(NodeId("v0"), "")))
    assert again.machine.naming.of(NodeId("v0")) == ""


def test_sentences_are_cut_to_what_people_read() -> None:
    """With a mark where something is missing."""
    assert public("short") == "short"
    assert len(public("y" * 1000)) == WORDS_MAX and public("y" * 1000).endswith("…")
