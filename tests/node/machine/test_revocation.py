"""How a node learns of bans, passes them on, and when it lets a membership count that has run out."""

from __future__ import annotations

from itertools import count

from node.machine.outbox import Outbox
from node.machine.revocation import RETURN_S, Revocation
from protocol.base.ids import NodeId
from protocol.base.machine import Effect, HangUp, Send
from protocol.messages import CoordinatorSeen, Message, Renewed, Revoked
from protocol.run.plan import Plan
from protocol.trust.identity import SIGNATURE_BYTES, Identity
from protocol.trust.membership import Revocations, Trust, sign_statement
from tests.node.setting import make_plan
from tests.protocol.samples import ALICE, BOB, COORDINATOR, RUN_ID


def bans(number: int, *nodes: NodeId, signer: Identity = COORDINATOR, run_id: bytes = RUN_ID) -> Revoked:
    """A list as it travels."""
    signed = sign_statement(Revocations(run_id, number, nodes), signer)
    return Revoked(number=number, nodes=nodes, signature=signed[-SIGNATURE_BYTES:])


class Desk:
    """One node's list of bans, with what it has ordered since the last look."""

    def __init__(self, *, serves: bool = True) -> None:
        self.trust = Trust(RUN_ID, COORDINATOR.public_key)
        self.out = Outbox(NodeId("me"), count(1))
        self.list = Revocation(self.out, self.trust, serves=serves)

    def effects(self) -> list[Effect]:
        return [effect for effect in self.out.take_effects() if isinstance(effect, Send | HangUp)]

    def sent(self, kind: type[Message]) -> list[tuple[NodeId, Message]]:
        effects = self.effects()
        return [(e.peer, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def test_a_list_is_passed_on_once_to_everybody_but_where_it_came_from_and_the_banned() -> None:
    """Two servers that hear of it from each other do not tell it back and forth."""
    desk = Desk()
    for peer, role in (("s1", "server"), ("s2", "server"), ("v1", "volunteer"), (ALICE.node, "volunteer")):
        desk.list.link_up(NodeId(peer), role)
    desk.effects()
    assert desk.list.take(NodeId("s1"), bans(3, ALICE.node)) == (ALICE.node,)
    assert [peer for peer, _ in desk.sent(Revoked)] == ["s2", "v1"]
    assert desk.list.take(NodeId("s2"), bans(3, ALICE.node)) == () and desk.sent(Revoked) == []
    assert desk.list.take(NodeId("s2"), bans(2)) == () and desk.list.is_banned(ALICE.node)
    desk.list.link_up(NodeId("s3"), "server")
    assert [message for _, message in desk.sent(Revoked)] == [bans(3, ALICE.node)]


def test_a_false_list_ends_the_link_it_came_on() -> None:
    """Another signer, another run, another order of the nodes: nobody is banned by it."""
    for false in (bans(1, BOB.node, signer=ALICE), bans(1, BOB.node, run_id=bytes(16))):
        desk = Desk()
        desk.list.link_up(NodeId("s1"), "server")
        desk.effects()
        assert desk.list.take(NodeId("s1"), false) == () and not desk.list.is_banned(BOB.node)
        assert [effect.peer for effect in desk.effects() if isinstance(effect, HangUp)] == ["s1"]


def test_a_volunteer_passes_nothing_on() -> None:
    """It has no word in who takes part."""
    desk = Desk(serves=False)
    desk.list.link_up(NodeId("s1"), "server")
    desk.list.take(NodeId("c"), bans(1, ALICE.node))
    assert desk.effects() == []


def test_a_renewed_membership_is_shown_on_every_link() -> None:
    """Else the other side would end the link when the one it was shown runs out."""
    desk = Desk(serves=False)
    desk.list.link_up(NodeId("s1"), "server")
    desk.list.renewed(b"new")
    assert desk.sent(Renewed) == [(NodeId("s1"), Renewed(membership=b"new"))]


def _away(desk: Desk, plan: Plan | None, now: float) -> bool:
    desk.list.look(plan, now)
    return desk.trust.coordinator_away()


def test_a_server_believes_old_memberships_only_together_with_more_than_half_of_the_others() -> None:
    """Alone it could be cut off from a ban; with the others it would have been told by one of them."""
    plan = make_plan()
    _, *others = plan.server_nodes()
    assert len(others) == 3
    desk = Desk()
    for peer in others:
        desk.list.link_up(peer, "server")
    assert not _away(desk, plan, 0.0), "nobody has said anything yet"
    desk.list.on_seen(others[0], CoordinatorSeen(here=False))
    assert not _away(desk, plan, 1.0), "two of four"
    desk.list.on_seen(others[1], CoordinatorSeen(here=False))
    assert _away(desk, plan, 2.0)
    assert not _away(desk, None, 2.0 + RETURN_S), "without a plan there is nobody to agree with"
    desk.list.look(plan, 3.0)
    desk.list.on_seen(others[2], CoordinatorSeen(here=True))
    assert _away(desk, plan, 4.0), "everybody gets a moment to renew"
    assert not _away(desk, plan, 3.0 + RETURN_S)
    desk.list.link_down(others[2])
    desk.list.on_seen(NodeId("spare"), CoordinatorSeen(here=True))
    assert _away(desk, plan, 4.0 + RETURN_S), "a spare has no voice"
    desk.list.coordinator(here=True)
    assert not _away(desk, plan, 4.0 + 2 * RETURN_S)


def test_servers_tell_each_other_when_the_coordinator_comes_and_goes() -> None:
    """At link-up and at each change; volunteers are not told."""
    desk = Desk()
    desk.list.link_up(NodeId("s1"), "server")
    desk.list.link_up(NodeId("v1"), "volunteer")
    desk.list.coordinator(here=True)
    desk.list.coordinator(here=True)
    desk.list.coordinator(here=False)
    assert [(peer, message) for peer, message in desk.sent(CoordinatorSeen)] == [
        ("s1", CoordinatorSeen(here=False)), ("s1", CoordinatorSeen(here=True)), ("s1", CoordinatorSeen(here=False)),
    ]  # fmt: skip
