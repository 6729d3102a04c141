"""Results count only with the ticket of their lease: whoever never had it, or another node, is refused by name."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest

from node.machine.outbox import Outbox
from node.machine.records import ContributionStored, Record, ShardStarted, StageKeyKnown
from node.server.server import ServerMachine
from node.server.tickets import KEY_BYTES, TicketOffice, leased_tasks
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId, TaskId, Ticket
from protocol.base.machine import Count, HangUp
from protocol.messages import (
    Contribute,
    FetchInput,
    Gradient,
    InputGradient,
    Lease,
    Output,
    Ready,
    ServerReady,
    StageKey,
    StepOpened,
    VersionReady,
    Work,
)
from tests.node.setting import TICKET, VOLUNTEER, Effects, activation, backward, make_config, make_plan, part

CONFIG = make_config()
KEY = bytes(range(KEY_BYTES))
OTHER = NodeId("v2")
UPDATES = "barnraise_server_updates_total"
FORWARD = TaskId(0, 0, 0, "F")


class Desk:
    """A server of the first stage with a volunteer linked, ready unless it has no key yet."""

    def __init__(self, node: str = "b0", records: list[Record] | None = None, key: bytes = KEY) -> None:
        self.out = Outbox(NodeId(node), count(1000))
        plan = make_plan()
        self.server = ServerMachine(
            NodeId(node), CONFIG, 259, plan, self.out, records or [], NodeId("c"), secret=KEY, incarnation=1
        )
        self.server.start(0.0)
        self.server.link_up(NodeId(node), "server", 0.0)
        self.server.link_up(VOLUNTEER, "volunteer", 0.0)
        for job in Effects(self.out).all:
            if hasattr(job, "job"):
                self.server.computed(job.job, 3 if "SetUp" in type(job.job).__name__ else b"digest", 0.0)
        if key and not self.server.context.tickets.open:
            self.server.persisted(StageKeyKnown(ledger_generation=1, step=0, key=key), 0.0)
        self.server.handle(NodeId("f0"), StepOpened(ledger_generation=1, step=0, closed=-1), 0.0)
        self.take()

    def take(self) -> Effects:
        return Effects(self.out)

    def say(self, message: Work, peer: NodeId = VOLUNTEER) -> Effects:
        self.server.handle(peer, message, 1.0)
        return self.take()

    def ticket(self, task: TaskId, node: NodeId = VOLUNTEER, fence: int = 3, generation: int = 1) -> Ticket:
        office = TicketOffice(generation)
        office.set_key(KEY)
        return office.issue(node, task, fence)


def hung_up(effects: Effects) -> list[str]:
    """The reasons; all of these have the fault with the peer, but for work of a plan that was in force before."""
    found = [effect for effect in effects.all if isinstance(effect, HangUp)]
    assert all(effect.fault != effect.reason.startswith("version") for effect in found)
    return [effect.reason for effect in found]


def output(ticket: Ticket) -> Output:
    return Output(ledger_generation=1, task=FORWARD, ticket=ticket, tensors=(activation(9, CONFIG),))


def contribute(tickets: tuple[Ticket, ...], tasks: tuple[TaskId, ...] = (backward(0, 0),)) -> Contribute:
    return msgspec.structs.replace(part(1, 0, tasks, 1, 9), tickets=tickets)


def test_a_result_with_the_ticket_of_its_lease_counts() -> None:
    """An output is kept, and a gradient is written down."""
    desk = Desk()
    assert desk.say(output(desk.ticket(FORWARD))).dropped == []
    assert len(desk.say(contribute((desk.ticket(backward(0, 0)),))).records(ContributionStored)) == 1


def test_work_of_an_earlier_plan_is_nobody_s_fault() -> None:
    """The link is ended, so that both begin anew; the member need not wait for that."""
    desk = Desk()
    late = msgspec.structs.replace(output(desk.ticket(FORWARD)), ledger_generation=0)
    assert [reason.split(":")[0] for reason in hung_up(desk.say(late))] == ["version"]


@pytest.mark.parametrize("how", ["nobody's", "another node's", "another task's", "another fence", "another generation"])
def test_a_result_without_the_ticket_of_its_lease_is_refused(how: str) -> None:
    """Its sender is hung up on with the reason, and nothing of it is kept."""
    desk = Desk()

    def forged(task: TaskId) -> Ticket:
        honest = desk.ticket(task)
        return {
            "nobody's": TICKET,
            "another node's": desk.ticket(task, OTHER),
            "another task's": desk.ticket(msgspec.structs.replace(task, microbatch=1)),
            "another fence": msgspec.structs.replace(honest, fence=honest.fence + 1),
            "another generation": desk.ticket(task, generation=2),
        }[how]

    for message in (output(forged(FORWARD)), contribute((forged(backward(0, 0)),))):
        effects = desk.say(message)
        assert [reason.split(":")[0] for reason in hung_up(effects)] == ["signature"]
        assert effects.dropped == [9] and effects.records(ContributionStored) == []


def test_a_contribution_in_another_nodes_name_is_refused() -> None:
    """Also when its sender has that node's ticket: a link proves who speaks."""
    desk = Desk()
    message = contribute((desk.ticket(backward(0, 0), OTHER),))
    stolen = msgspec.structs.replace(message, contribution=msgspec.structs.replace(message.contribution, node=OTHER))
    effects = desk.say(stolen)
    assert [reason.split(":")[0] for reason in hung_up(effects)] == ["signature"]
    assert effects.records(ContributionStored) == []
    desk.server.link_up(OTHER, "volunteer", 1.0)
    desk.take()
    mine = contribute((desk.ticket(backward(0, 0), OTHER),))
    effects = desk.say(msgspec.structs.replace(mine, tickets=(desk.ticket(backward(0, 0), VOLUNTEER),)), OTHER)
    assert effects.records(ContributionStored) == []


def test_every_task_of_a_contribution_needs_its_ticket() -> None:
    """One ticket does not pay for two tasks, nor a backward's for somebody else's loss."""
    desk = Desk()
    both = (backward(0, 0), backward(0, 1))
    assert hung_up(desk.say(contribute((desk.ticket(both[0]),), both)))
    assert hung_up(desk.say(contribute((desk.ticket(both[0]), desk.ticket(both[0])), both)))
    with pytest.raises(RemoteProtocolError, match="without the backward"):
        leased_tasks((TaskId(0, 0, 2, "L"), backward(0, 1, 1)))
    (reason,) = hung_up(desk.say(contribute((), (TaskId(0, 0, 0, "F"),))))
    assert reason == "decode: 0:F0@0 leaves no weight gradient", "no lease, no ticket, and a whole part on the disk"
    with pytest.raises(RemoteProtocolError, match="leaves no weight gradient"):
        leased_tasks((TaskId(0, 0, 1, "F"),))
    assert leased_tasks((TaskId(0, 1, 2, "L"), backward(0, 1, 1))) == (backward(0, 1, 1),)


def test_graphs_that_nobody_leased_make_nobody_the_first_choice() -> None:
    """A volunteer that claims all graphs would get every backward without a slot; it is refused instead."""
    desk = Desk()
    claims = Ready(ledger_generation=1, hello=True, slots=0, graphs=(FORWARD,), tickets=(TICKET,))
    assert hung_up(desk.say(claims)) and hung_up(desk.say(msgspec.structs.replace(claims, tickets=())))
    assert not hung_up(desk.say(msgspec.structs.replace(claims, tickets=(desk.ticket(FORWARD),))))


def test_an_input_is_only_for_whoever_was_given_its_backward() -> None:
    """A front server answers with an activation only where a lease says so."""
    desk = Desk("f0")
    question = FetchInput(ledger_generation=1, task=FORWARD, ticket=TICKET)
    assert hung_up(desk.say(question))
    answered = desk.say(msgspec.structs.replace(question, ticket=desk.ticket(backward(0, 0))))
    assert not hung_up(answered) and len(answered.all) == 1


def test_a_gradient_of_a_step_that_has_not_begun_has_no_ticket() -> None:
    """The next step is within the window, but nobody was given work of it."""
    desk = Desk("f0")
    ahead = InputGradient(
        ledger_generation=1, task=backward(1, 0), ticket=desk.ticket(backward(0, 0)), tensors=(activation(9, CONFIG),)
    )
    assert hung_up(desk.say(ahead))


def test_the_ledger_draws_the_key_and_tells_its_stage_when_it_is_durable() -> None:
    """Before it is on the disk nobody has it; then fellow servers hear it, and volunteers that work can begin."""
    ledger = Desk("f0", key=b"")
    assert not ledger.server.context.tickets.open
    ledger.server.link_up(NodeId("b0"), "server", 0.0)
    ledger.take()
    ledger.server.persisted(StageKeyKnown(ledger_generation=1, step=0, key=KEY), 1.0)
    effects = ledger.take()
    assert effects.peers(StageKey) == ["b0"] and VOLUNTEER in effects.peers(VersionReady)
    late = Desk("b0", key=b"")
    assert late.take().all == []
    assert late.say(output(late.ticket(FORWARD))).dropped == [9], "what cannot be checked does not count"
    (record,) = late.say(StageKey(ledger_generation=1, key=KEY), NodeId("f0")).records(StageKeyKnown)
    late.server.persisted(record, 1.0)
    assert VOLUNTEER in late.take().peers(VersionReady)
    assert late.say(output(late.ticket(FORWARD))).dropped == []


def test_a_fellow_that_keeps_graphs_is_not_hung_up_on_by_who_has_lost_the_key() -> None:
    """A link begins with them, and the key comes after: refused, it would begin anew for ever. Without a key nothing is
    proven either, so nobody is preferred for its graphs until it names them again."""
    late = Desk("b0", key=b"")
    fellow = NodeId("f0")
    late.server.link_up(fellow, "server", 0.0)
    late.take()
    ready = Ready(ledger_generation=1, hello=True, slots=2, graphs=(FORWARD,), tickets=(late.ticket(FORWARD, fellow),))
    effects = late.say(ready, fellow)
    assert not hung_up(effects) and effects.peers(VersionReady) == []
    (record,) = late.say(StageKey(ledger_generation=1, key=KEY), fellow).records(StageKeyKnown)
    late.server.persisted(record, 1.0)
    assert fellow in late.take().peers(VersionReady), "upon this it says again which graphs it keeps"
    assert not hung_up(late.say(msgspec.structs.replace(ready, hello=False), fellow))
    assert hung_up(late.say(msgspec.structs.replace(ready, tickets=(TICKET,)), fellow))


def test_only_the_ledger_names_the_key() -> None:
    """Another server, or a key of another length, is refused."""
    desk = Desk("b0")
    for key, peer in ((KEY, "f1"), (b"", "f0")):
        effects = desk.say(StageKey(ledger_generation=1, key=key), NodeId(peer))
        assert hung_up(effects) and effects.records(StageKeyKnown) == []


@pytest.mark.parametrize("node", ["f0", "b0"])
def test_tickets_are_known_again_after_a_restart(node: str) -> None:
    """The key is on every server's disk: a result of a lease from before the restart counts, and no new key is made."""
    started = ShardStarted(
        ledger_generation=1, step=0, stage=0, shard=0, shard_count=2, checkpoint_step=-1, config_hash=b""
    )
    desk = Desk(node, [started, StageKeyKnown(ledger_generation=1, step=0, key=KEY)], key=b"")
    assert desk.server.context.tickets.open
    message: Any = contribute((desk.ticket(backward(0, 0)),))
    message = msgspec.structs.replace(message, shard=desk.server.context.shard)
    assert len(desk.say(message).records(ContributionStored)) == 1
    assert desk.say(ServerReady(ledger_generation=1, version=0), NodeId("f1")).records(StageKeyKnown) == []


def test_fences_of_two_starts_differ() -> None:
    """A lease that is given after a restart has a ticket that was never made before."""
    first, second = TicketOffice(1, 5 << 32), TicketOffice(1, 6 << 32)
    assert first.next_fence() != second.next_fence()
    assert first.next_fence() == first.next_fence() - 1


def test_a_lease_carries_the_ticket_of_its_last_task() -> None:
    """What a volunteer sends back with its result is what the server made for it."""
    desk = Desk("b0")
    desk.say(output(desk.ticket(FORWARD)))
    gradient = activation(11, CONFIG)
    effects = desk.say(Gradient(ledger_generation=1, task=backward(0, 0), tensors=(gradient,)), NodeId("f1"))
    (lease,) = effects.sent(Lease)
    assert lease.ticket == desk.ticket(backward(0, 0), VOLUNTEER, lease.ticket.fence)


@pytest.mark.parametrize(("node", "counted"), [("f0", 1), ("b0", 0)])
def test_a_contribution_that_comes_too_late_is_counted_by_the_ledger_alone(node: str, counted: int) -> None:
    """Each shard is sent its part of it: counted there, too, one that is late would be all that such a server counts,
    and an alert on the share of those refused would tell of it."""
    desk = Desk(node)
    late = msgspec.structs.replace(contribute((desk.ticket(backward(0, 0)),)), step=CONFIG.steps + 3)
    effects = desk.say(late)
    assert effects.dropped == [9]
    told = [effect for effect in effects.all if isinstance(effect, Count) and effect.metric == UPDATES]
    assert [dict(effect.labels) for effect in told] == counted * [{"outcome": "stale"}]
