"""Who is named as a relay: servers without a place in the plan, to all but themselves, as long as they wait."""

from __future__ import annotations

from protocol.base.limits import RELAYS_MAX
from protocol.base.machine import Effect, LinkDown
from protocol.messages import Relays
from tests.coordinator.live.desk import Desk


def named(desk: Desk, node: str, effects: list[Effect] | None = None) -> list[set[str]]:
    """The relays that a node was told of, message by message."""
    return [{relay.node for relay in message.relays} for message in desk.sent(node, Relays, effects)]


def test_servers_without_a_place_are_named_to_all_who_are_here_and_to_all_who_come() -> None:
    """With their addresses; to a member that came before them, and with the welcome of one that comes later."""
    desk = Desk()
    desk.train()
    desk.volunteer("v0")
    assert named(desk, "v0") == []
    effects = desk.server("s4", addresses=("198.51.100.4:8460",))
    assert named(desk, "v0", effects) == named(desk, "s0", effects) == [{"s4"}]
    assert desk.sent("v0", Relays)[-1].relays[0].addresses == ("198.51.100.4:8460",)
    assert named(desk, "v1", desk.volunteer("v1")) == [{"s4"}]


def test_nobody_is_told_of_itself_or_of_one_that_cannot_be_dialled() -> None:
    """Two spares hear of each other; a third one behind a NAT is no help to anybody."""
    desk = Desk()
    desk.train()
    for node, addresses in (("s4", ("s4:1",)), ("s5", ("s5:1",)), ("s6", ())):
        desk.server(node, addresses=addresses)
    assert [named(desk, node)[-1] for node in ("s0", "s4", "s5", "s6")] == [{"s4", "s5"}, {"s5"}, {"s4"}, {"s4", "s5"}]


def test_a_spare_that_goes_is_named_no_more() -> None:
    """Everybody hears that there is one less; what changes nothing is not repeated."""
    desk = Desk()
    desk.train()
    desk.volunteer("v0")
    desk.server("s4")
    assert named(desk, "v0", desk.drop("s4")) == [set()]
    assert named(desk, "v0", desk.volunteer("v1")) == []


def test_a_spare_that_takes_a_place_is_no_spare_any_more() -> None:
    """It holds a shard from then on, and the plan names it."""
    desk = Desk()
    desk.staff()
    desk.server("s4")
    assert named(desk, "s0")[-1] == {"s4"}
    desk.feed(LinkDown(desk.plan.stages[0].servers[0].node, "reset"))
    desk.stay(desk.machine.config.limits.server_gone_s + 5, "s1", "s2", "s3", "s4")
    assert desk.plan.stage_of(desk.sent("s1", Relays)[0].relays[0].node) is not None
    assert named(desk, "s1")[-1] == set()


def test_of_many_spares_everybody_hears_of_a_few_and_not_all_of_the_same() -> None:
    """The load of relaying is spread."""
    desk = Desk()
    desk.train()
    spares = {f"r{number:02}" for number in range(3 * RELAYS_MAX)}
    for spare in sorted(spares):
        desk.server(spare)
    heard = [named(desk, node)[-1] for node in ("s0", "s1", "s2", "s3")]
    assert all(len(each) == RELAYS_MAX and each <= spares for each in heard)
    assert len({frozenset(each) for each in heard}) > 1
