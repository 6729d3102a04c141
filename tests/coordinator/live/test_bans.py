"""What a ban does at the coordinator: durable, signed, told to everybody, and to whoever comes later."""

from __future__ import annotations

import pytest

from coordinator.live.orders import Ban, CloseInvite, Unban
from coordinator.live.records import Banned, InviteClosed, InviteSpent, StoredState, Unbanned
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.base.machine import LinkUp, Ordered
from protocol.messages import Blamed, Bye, Refused, Revoked, Welcome
from protocol.trust.membership import LISTED_S, Invite
from tests.coordinator.live.desk import RUN_ID, Desk, join

S2, V0 = NodeId("s2"), NodeId("v0")


def _invite(uses: int) -> Invite:
    return Invite(issuer=bytes(32), run_id=RUN_ID, role="server", uses=uses, not_after=2**40, nonce=b"n" * 16)


def _list(number: int, *nodes: str) -> Revoked:
    return Revoked(number=number, nodes=tuple(map(NodeId, nodes)), signature=b"list %d" % number)


def test_everybody_is_told_of_a_ban_once_it_is_durable() -> None:
    """Not before: a coordinator that crashed would otherwise give the list's number to another list."""
    desk = Desk()
    desk.train()
    desk.durable = False
    assert not desk.sent("s0", Revoked, desk.feed(Ordered(Ban(S2, "garbage"))))
    effects = desk.settle()
    assert [desk.sent(node, Revoked, effects) for node in ("s0", "s1", "s3")] == [[_list(1, "s2")]] * 3
    assert not desk.sent("s2", Revoked, effects)


def test_a_coordinator_that_lost_its_database_hears_of_its_bans_from_a_server() -> None:
    """The list bears its own signature; whoever is on it is refused again, and the next list is newer than that one."""
    desk = Desk()
    desk.server("s0")
    desk.volunteer("v0")
    desk.say("s0", _list(7, "v0", "s2"))
    assert [record.node for record in desk.written(Banned)] == [V0, S2]
    assert desk.sent("v0", Refused) and desk.sent("s0", Revoked)[-1] == _list(9, "s2", "v0")
    desk.say("s0", _list(9, "s2", "v0"))
    assert len(desk.written(Banned)) == 2


def test_a_list_that_another_key_has_signed_bans_nobody() -> None:
    desk = Desk()
    desk.server("s0")
    desk.say("s0", Revoked(number=7, nodes=(V0,), signature=b"x"))
    assert not desk.written(Banned)


def test_of_two_bans_on_their_way_to_the_disk_both_are_told_at_once() -> None:
    """A list that named the second before it is durable could be told twice with other content."""
    desk = Desk()
    desk.train()
    desk.durable = False
    desk.feed(Ordered(Ban(S2, "garbage")))
    desk.feed(Ordered(Ban(V0, "garbage")))
    assert desk.sent("s0", Revoked, desk.settle()) == [_list(2, "v0", "s2")]


def test_who_comes_later_is_told_too_and_after_a_restart() -> None:
    """A list belongs to every welcome, as long as somebody on it could still be believed."""
    desk = Desk()
    desk.train()
    desk.feed(Ordered(Ban(V0, "garbage")))
    assert desk.sent("v1", Revoked, desk.volunteer("v1")) == [_list(1, "v0")]
    banned = Banned(node=V0, reason="garbage", number=1, wall_s=1e9)
    again = Desk(stored=StoredState(banned=(banned,), ban_number=4))
    again.server("s0")
    assert again.sent("s0", Revoked) == [_list(4, "v0")]
    again.now += LISTED_S  # none of its memberships counts anywhere by now; it stays banned here
    again.server("s1")
    assert again.sent("s1", Revoked) == [_list(4)]
    assert again.hung_up(again.link("v0")) == [("v0", "banned")]


def test_a_lifted_ban_is_told_and_the_node_may_come_again() -> None:
    """The list without it has a higher number."""
    desk = Desk()
    desk.train()
    desk.feed(Ordered(Ban(V0, "garbage")))
    effects = desk.feed(Ordered(Unban(V0)))
    assert desk.sent("s0", Revoked, effects) == [_list(2)]
    assert desk.records[-1] == Unbanned(node=V0, number=2)
    assert desk.sent("v0", Welcome, desk.volunteer("v0"))
    assert desk.feed(Ordered(Unban(V0))) == []


def test_a_ban_reaches_all_who_came_by_the_same_invite() -> None:
    """With `lineage`: they are out, and nobody comes by it any more; others stay."""
    desk = Desk(invites={b"shared": _invite(9), b"other": Invite(bytes(32), RUN_ID, "server", 9, 2**40, b"o" * 16)})
    for node in ("s0", "s1"):
        desk.server(node, credential=b"shared")
    desk.server("s2", credential=b"other")
    effects = desk.feed(Ordered(Ban(NodeId("s0"), "garbage", lineage=True)))
    assert desk.hung_up(effects) == [("s0", "banned"), ("s1", "banned")]
    assert [(record.node, record.is_kin) for record in desk.written(Banned)] == [("s0", False), ("s1", True)]
    assert desk.written(InviteClosed) == [InviteClosed(nonce=b"n" * 16)]
    refused = desk.server("s9", credential=b"shared")
    assert "closed by the run's operator" in desk.sent("s9", Refused, refused)[0].reason
    assert desk.sent("s8", Welcome, desk.server("s8", credential=b"other"))


def test_a_closed_invite_lets_nobody_in_and_throws_nobody_out() -> None:
    """Also after a restart; who came by it stays, and comes again with its membership."""
    desk = Desk(invites={b"shared": _invite(9)})
    desk.server("s0", credential=b"shared")
    assert desk.feed(Ordered(CloseInvite(b"n" * 16))) == []
    assert desk.hung_up(desk.server("s1", credential=b"shared")) == [("s1", "credential")]
    desk.drop("s0")
    assert desk.sent("s0", Welcome, desk.server("s0", credential=b"membership 1"))
    stored = StoredState(closed_invites=(b"n" * 16,), spent=(InviteSpent(nonce=b"n" * 16, node=NodeId("s0")),))
    again = Desk(stored=stored, invites={b"shared": _invite(9)})
    assert again.hung_up(again.server("s1", credential=b"shared")) == [("s1", "credential")]


def test_one_network_brings_a_few_new_members_at_a_time_and_keeps_nobody_else_out() -> None:
    """Six at once from a /24, then one in ten seconds; members that come again are not counted, nor other networks."""
    desk = Desk(invites={b"many": _invite(10**6)})

    def come(node: str, address: str) -> bool:
        desk.feed(LinkUp(NodeId(node), "volunteer", node.encode(), b"many", address))
        desk.say(node, join(role="volunteer", addresses=()))
        return NodeId(node) in desk.machine.roster

    assert [come(f"v{number}", f"203.0.113.{number}:1") for number in range(8)] == [True] * 6 + [False] * 2
    assert [message.reason for message in desk.sent("v7", Bye)] == [
        "many computers of this network have just joined: trying again soon"
    ]
    assert come("w0", "198.51.100.9:1")
    desk.drop("v0")
    assert come("v0", "203.0.113.0:1"), "it has used the invite before"
    desk.stay(10.5, *(f"v{number}" for number in range(6)), "w0")
    assert come("v6", "203.0.113.6:1") and not come("v7", "203.0.113.7:1")


def test_a_demo_may_start_twenty_at_once_but_not_six_hundred() -> None:
    """From this computer and from private addresses more may come at once, and no crowd."""
    desk = Desk(invites={b"many": _invite(10**6)})
    for number in range(600):
        desk.feed(LinkUp(NodeId(f"v{number}"), "volunteer", b"", b"many", "127.0.0.1:1"))
        desk.say(f"v{number}", join(role="volunteer", addresses=()))
    assert len(desk.written(InviteSpent)) == 64


def _blamed(node: str) -> Blamed:
    made = ContributionId(NodeId(node), 1, 2)
    task = TaskId(3, 0, 0, "B")
    return Blamed(
        node=NodeId(node),
        contribution=made,
        step=3,
        claim="gradient",
        task=task,
        difference=2.0,
        auditors=(NodeId("s0"),),
    )


@pytest.mark.parametrize(("uses", "out"), [(1, ["v5"]), (2, ["v5", "v6"]), (10**6, ["v5"])])
def test_whom_audits_blame_is_banned_with_its_household_and_nobody_else(uses: int, out: list[str]) -> None:
    """All by an invite for a few computers; of a link that anybody may use the others stay, and it stays open."""
    invite = Invite(bytes(32), RUN_ID, "volunteer", uses, 2**40, b"h" * 16)
    desk = Desk(invites={b"household": invite})
    desk.train()
    for node in ("v5", "v6")[:uses]:
        desk.link(node, "volunteer", b"household")
        desk.say(node, join(role="volunteer", addresses=()))
    desk.say("s1", _blamed("v5"))
    assert [record.node for record in desk.written(Banned)] == out
    assert [record.is_kin for record in desk.written(Banned)] == [False, True][: len(out)]
    assert len(desk.written(InviteClosed)) == (uses <= 2)
    assert "audits: its gradient of 3:B0@0 is off by 2" in desk.written(Banned)[0].reason
    desk.say("s1", _blamed("v5"))
    assert len(desk.written(Banned)) == len(out), "told again, it changes nothing"


def test_who_was_out_for_whom_it_came_with_and_is_found_out_later_is_banned_for_that() -> None:
    """An audit of what it gave may end after its ban: the ban is its own from then on, also after a restart."""
    desk = Desk(invites={b"household": Invite(bytes(32), RUN_ID, "volunteer", 2, 2**40, b"h" * 16)})
    desk.train()
    for node in ("v5", "v6"):
        desk.link(node, "volunteer", b"household")
        desk.say(node, join(role="volunteer", addresses=()))
    desk.say("s1", _blamed("v5"))
    assert desk.machine.admission.is_kin(NodeId("v6"))
    desk.say("s1", _blamed("v6"))
    assert not desk.machine.admission.is_kin(NodeId("v6"))
    again = Desk(stored=StoredState(banned=tuple(desk.written(Banned)), ban_number=3))
    assert again.machine.admission.ban_reason(NodeId("v6")) == "audits: its gradient of 3:B0@0 is off by 2"
    assert [record.number for record in desk.written(Banned)] == [1, 2, 3]


def test_only_a_server_in_its_place_can_blame_and_no_server_is_blamed() -> None:
    """A spare has audited nothing; servers are the operator's to judge."""
    desk = Desk()
    desk.train()
    desk.server("s9")
    desk.say("s9", _blamed("v0"))
    desk.say("s1", _blamed("s2"))
    assert not desk.written(Banned) and desk.logged("audits blame a server")
