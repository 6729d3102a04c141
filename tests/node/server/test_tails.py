"""Who hears that a step has no more work, and when the clocks of weight gradients begin."""

from __future__ import annotations

from itertools import count

import pytest

from node.machine.outbox import Outbox
from node.server.conduct import REJOIN_S, Conduct
from node.server.pool import Entry, Grant, Pool
from node.server.server import ServerMachine
from node.server.tails import CLOSED_STEPS_MAX, TailDesk
from node.server.tickets import KEY_BYTES
from node.volunteer.tails import OPEN_STEPS_MAX, Tails
from protocol.base.ids import NodeId
from protocol.base.machine import Send
from protocol.messages import Flush, Ready, StepClosed, StepOpened, Tail
from tests.node.setting import Effects, backward, make_config, make_context, make_plan, shard_tensor

A, B, FRONT = NodeId("a"), NodeId("b"), NodeId("f0")


class Desk:
    """The tails of back server b0 with two open backwards of step 0, and two volunteers."""

    def __init__(self) -> None:
        self.context = make_context("b0")
        self.pool = Pool(8.0, "when_empty", 20.0, count(1).__next__)
        self.tails = TailDesk(self.context)
        self.tails.open_step(0)
        self.tasks = [backward(0, 0), backward(0, 1)]
        for task in self.tasks:
            self.pool.add(Entry((task,), needs_result=False, needs_gradient=True, tensors=(shard_tensor(1),)))
        for worker in (A, B):
            self.pool.worker_here(worker, is_server=False)
            self.tails.worker_here(worker)

    def give(self, worker: NodeId, slots: int = 1) -> Effects:
        self.pool.add_slots(worker, slots, 64)
        return self.look()

    def look(self, now: float = 0.0) -> Effects:
        self.tails.granted(self.pool.grant(now))
        self.tails.look([self.pool], now)
        self.tails.check()
        self.pool.check()
        return Effects(self.context.out)


def told(effects: Effects) -> list[tuple[str, int]]:
    """(worker, leases) of each word."""
    return [(peer, flush.leases) for peer in effects.peers(Flush) for flush in effects.sent(Flush, peer)]


def test_everybody_hears_of_the_tail_once_and_with_the_number_of_their_leases() -> None:
    """Not while something is free; then each worker, and the fellow servers."""
    desk = Desk()
    assert told(desk.give(A)) == []
    effects = desk.give(B)
    assert told(effects) == [("a", 1), ("b", 1)]
    assert effects.peers(Tail) == ["f0"]
    assert desk.look().all == []


def test_a_backward_that_is_kept_for_another_ends_the_step_for_the_rest() -> None:
    """B has the graph of the second task: nothing is left for A, though not everything is given."""
    desk = Desk()
    desk.pool.prefer(desk.tasks[1], B)
    desk.pool._change(desk.pool._of_task[desk.tasks[1]], tensors=None)
    effects = desk.give(A)
    assert told(effects) == [("a", 1)]
    assert effects.peers(Tail) == []


def test_more_work_after_the_tail_is_told_again() -> None:
    """A dies with its task; B gets it, and hears anew that this was the last."""
    desk = Desk()
    desk.give(A)
    desk.give(B)
    desk.pool.worker_gone(A, 1.0)
    desk.tails.worker_gone(A)
    assert told(desk.look()) == []
    assert told(desk.give(B)) == [("b", 2)]


def test_nobody_hears_of_the_tail_while_sums_of_one_that_is_gone_may_come_back() -> None:
    """A dies with a task in its sum, which is waited for: B sends nothing before it knows whether it has to do that
    again, or it would be another whole vector. On a day of spot instances it was, for 40 s."""
    desk = Desk()
    desk.give(A)
    desk.pool.result_held(desk.tasks[0])
    desk.pool.summed([desk.tasks[0]], A, 0.0)
    desk.pool.worker_gone(A, 1.0)
    desk.tails.worker_gone(A)
    assert told(desk.give(B)) == []
    desk.pool.expire(1.0 + REJOIN_S)
    assert told(desk.look(1.0 + REJOIN_S)) == []
    assert told(desk.give(B)) == [("b", 2)]


def test_nobody_waits_for_sums_of_one_that_was_hung_up_on() -> None:
    """A sent what no honest member sends. If its sums were waited for, as those of a broken link are, it could call
    again, take a task and be refused, and each time the step would stand for five seconds."""
    desk = Desk()
    desk.give(A)
    desk.pool.result_held(desk.tasks[0])
    desk.pool.summed([desk.tasks[0]], A, 0.0)
    desk.pool.worker_refused(A)
    desk.pool.worker_gone(A, 1.0)
    desk.tails.worker_gone(A)
    assert told(desk.give(B)) == []
    desk.pool.expire(1.0)
    assert told(desk.give(B)) == [("b", 2)]


@pytest.mark.parametrize("linked", [True, False])
def test_nobody_waits_for_sums_of_one_that_is_banned(linked: bool) -> None:
    """They will not be accepted; also where its link broke a moment before the word came."""
    desk = Desk()
    desk.give(A)
    desk.pool.result_held(desk.tasks[0])
    desk.pool.summed([desk.tasks[0]], A, 0.0)
    if linked:
        desk.pool.ban([A])
    desk.pool.worker_gone(A, 1.0)
    desk.tails.worker_gone(A)
    desk.pool.ban([A, FRONT])
    assert told(desk.give(B)) == []
    desk.pool.expire(1.0)
    assert told(desk.give(B)) == [("b", 2)]


def test_a_member_is_waited_for_as_long_in_all_as_one_that_is_away_once() -> None:
    """Whoever breaks its link in each step, with a task in its sum, and comes back after seconds would otherwise hold
    up each. A link that is back after half a second has many of these."""
    desk = Desk()
    desk.give(A)
    desk.pool.result_held(desk.tasks[0])
    desk.pool.summed([desk.tasks[0]], A, 0.0)
    for link, (away_s, waits_s) in enumerate(((2.0, 5.0), (2.0, 3.2), (4.0, 1.3), (4.0, 0.0))):
        now = 20.0 * link
        desk.pool.worker_gone(A, now)
        until = desk.pool.next_deadline()
        assert until is not None and until - now == pytest.approx(waits_s, abs=0.2)
        desk.pool.expire(now + min(away_s, waits_s))
        assert desk.pool.open_count(0) == 1 + (away_s > waits_s), "one is B's"
        desk.pool.worker_here(A, is_server=False)
        desk.pool.claim((desk.tasks[0],), A, now + away_s)
    seldom = Conduct()
    assert all(seldom.may_be_waited_for_s(A, 600.0 * link) == REJOIN_S for link in range(5))


def test_a_new_link_hears_it_anew_and_counts_from_nothing() -> None:
    """What was said on the link before may be lost."""
    desk = Desk()
    desk.give(A, 2)
    desk.pool.worker_here(B, is_server=False)
    desk.tails.worker_here(B)
    assert told(desk.look()) == [("b", 0)]


def test_clocks_begin_when_the_whole_stage_has_nothing_left() -> None:
    """A worker sends its sum only when every server has spoken, so no server may count before."""
    desk = Desk()
    desk.give(A, 2)
    desk.pool.summed(desk.tasks, A, 1.0)
    desk.look(2.0)
    assert desk.pool.next_deadline() is None
    desk.tails.on_tail(FRONT, 0)
    desk.look(3.0)
    assert desk.pool.next_deadline() == 23.0


def test_a_server_that_comes_back_hears_of_the_tail() -> None:
    """The word before may have been lost with its process."""
    desk = Desk()
    desk.give(A, 2)
    desk.tails.sync(FRONT)
    assert Effects(desk.context.out).peers(Tail) == ["f0"]
    desk.tails.sync(NodeId("f1"))
    assert Effects(desk.context.out).all == []


def test_a_tail_that_comes_before_the_word_that_the_step_is_open_counts() -> None:
    """It comes by another link, and once only."""
    desk = Desk()
    desk.tails.on_tail(FRONT, 1)
    desk.tails.on_tail(FRONT, 1000)  # no step that could be open soon
    desk.tails.open_step(1)
    desk.tails.on_tail(desk.context.node, 1)
    assert 1 in desk.tails.over()
    desk.tails.on_tail(FRONT, 2)
    desk.tails.close_step(2)
    desk.context.closed = 2
    desk.tails.check()


def test_who_has_lost_its_place_is_not_waited_for_and_does_not_count() -> None:
    """Another server has it now, and has not said that it has nothing left."""
    desk = Desk()
    for server in (NodeId("before"), FRONT):
        desk.tails.on_tail(server, 0)
    assert desk.tails.over() == []
    desk.tails.on_tail(desk.context.node, 0)
    assert desk.tails.over() == [0]


def test_a_closed_step_leaves_nothing() -> None:
    """Nothing is told of it any more."""
    desk = Desk()
    desk.pool.drop_step(0)
    desk.tails.close_step(0)
    assert desk.look().all == []


@pytest.mark.parametrize("hello", [True, False], ids=["greets", "has greeted under a plan that came here later"])
def test_who_has_not_greeted_yet_hears_of_the_tail_again_when_it_does(hello: bool) -> None:
    """A volunteer that moves has its links before it leaves its stage, and takes no word of another one until then:
    what b1, which has nothing to give, told it at link-up was lost, and its sums waited ten minutes for that word."""
    out, mover = Outbox(NodeId("b1"), count(1000)), NodeId("mover")
    server = ServerMachine(
        NodeId("b1"), make_config(), 259, make_plan(), out, [], NodeId("c"), secret=bytes(KEY_BYTES), incarnation=1
    )
    server.start(0.0)
    server.handle(NodeId("f1"), StepOpened(ledger_generation=1, step=0, closed=-1), 0.0)
    server.link_up(mover, "volunteer", 1.0)
    assert told(Effects(out)) == [("mover", 0)], "one whose slots are all taken says nothing by itself"
    server.handle(mover, Ready(ledger_generation=1, hello=hello, slots=0), 2.0)
    assert told(Effects(out)) == [("mover", 0)]
    server.handle(mover, Ready(ledger_generation=1, hello=False, slots=1), 3.0)
    assert told(Effects(out)) == []


def test_who_greets_hears_which_step_was_closed_last() -> None:
    """A volunteer counts leases and tails of steps that may be open, which it knows by the last one that is closed.
    One that moved took no word of its new stage at link-up: in the middle of step 90 it counted nothing until 89 was
    closed, then waited for a tail of 90 that it had thrown away, and its sum lay there for ten minutes."""
    out, mover = Outbox(NodeId("b1"), count(1000)), NodeId("mover")
    server = ServerMachine(
        NodeId("b1"), make_config(), 259, make_plan(), out, [], NodeId("c"), secret=bytes(KEY_BYTES), incarnation=1
    )
    server.start(0.0)
    server.handle(NodeId("f1"), StepOpened(ledger_generation=1, step=0, closed=-1), 0.0)
    server.handle(NodeId("f1"), StepClosed(ledger_generation=1, step=0), 0.5)
    server.handle(NodeId("f1"), StepOpened(ledger_generation=1, step=1, closed=0), 0.5)
    server.link_up(mover, "volunteer", 1.0)
    Effects(out)  # it does not listen yet
    server.handle(mover, Ready(ledger_generation=1, hello=True, slots=0), 2.0)
    said = [effect.message for effect in Effects(out).all if isinstance(effect, Send) and effect.peer == mover]
    words = [(type(word), word.step) for word in said if isinstance(word, (StepClosed, Flush))]
    assert words == [(StepClosed, 0), (Flush, 1)]


def test_who_greets_on_a_new_link_hears_once_which_step_was_closed_last() -> None:
    """Of 10,000 volunteers each has twenty links: what is said twice on each of them is 200,000 words. A link that is
    older than the server's place in the plan hears it unasked, since nobody has taken its greeting."""
    out, new, old = Outbox(NodeId("b1"), count(1000)), NodeId("new"), NodeId("old")
    server = ServerMachine(
        NodeId("b1"), make_config(), 259, make_plan(), out, [], NodeId("c"), secret=bytes(KEY_BYTES), incarnation=1
    )
    server.start(0.0)
    for node, here_before in ((new, False), (old, True)):
        server.link_up(node, "volunteer", 1.0, here_before)
    assert Effects(out).peers(StepClosed) == ["old"]
    server.handle(new, Ready(ledger_generation=1, hello=True, slots=0), 2.0)
    assert Effects(out).peers(StepClosed) == ["new"]


def test_a_volunteer_hears_from_the_ledger_and_from_those_it_has_work_of_that_a_step_is_closed() -> None:
    """Not from all other servers of its stage, of which there may be twenty: the first word is enough."""
    for node, told_by_it in (("b1", ["busy"]), ("f1", ["busy", "idle"])):
        server = ServerMachine(
            NodeId(node), make_config(), 259, make_plan(), Outbox(NodeId(node), count(1000)), [], NodeId("c"),
            secret=bytes(KEY_BYTES), incarnation=1,
        )  # fmt: skip
        server.start(0.0)
        for worker in ("busy", "idle"):
            server.link_up(NodeId(worker), "volunteer", 0.0)
        roles = server._roles
        roles.tails.open_step(0)
        roles.tails.granted([Grant(Entry((backward(0, 0),), True, True), NodeId("busy"), False)])
        Effects(server.context.out)
        roles.close_step(0)
        told = Effects(server.context.out)
        assert sorted(peer for peer in told.peers(StepClosed) if peer in ("busy", "idle")) == told_by_it


def test_who_hears_of_closings_from_nobody_else_hears_of_them_before_a_tail_that_it_would_throw_away() -> None:
    """The ledger's server is away for a volunteer, and for thirty steps: its link to the back server lives, and brings
    tails of steps that it thinks cannot be open. Every fifth of them is preceded by a word of what is closed, so each
    one counts."""
    assert CLOSED_STEPS_MAX + 1 < OPEN_STEPS_MAX
    context, counted = make_context("b0"), Tails()
    desk, pool = TailDesk(context), Pool(8.0, "when_empty", 20.0, count(1).__next__)
    desk.worker_here(A)
    for step in range(30):
        desk.open_step(step)
        desk.look([pool], 0.0)
        said = [effect for effect in Effects(context.out).all if isinstance(effect, Send) and effect.peer == A]
        for message in [effect.message for effect in said]:
            if isinstance(message, StepClosed):
                counted.forget(message.step)
            elif isinstance(message, Flush):
                counted.told(message.step, NodeId("b0"), message.leases)
        assert counted.has_come(step, [NodeId("b0")]), f"the tail of step {step} was thrown away"
        context.closed = step
        desk.close_step(step)
        desk.check()
