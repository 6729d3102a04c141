"""Stages of volunteers: the least power for the work, with a reason; moved seldom."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from coordinator.live.crew import MOVE_PAUSE_S, SETTLED_S, STAY_S
from coordinator.live.orders import ChangeRun
from coordinator.live.second_thoughts import TRIAL_S
from coordinator.live.stage_choice import GAIN_MIN, PAYBACK_S, Assignment, Power, Standing
from coordinator.live.stage_choice import assign as assign_by
from coordinator.live.stage_choice import balance as balance_by
from coordinator.live.stage_choice import fill as fill_by
from coordinator.live.throughput import Delivered, Means, Needs, beside_visits, reload_s, steps_per_s
from protocol.base.ids import NodeId
from protocol.base.machine import Ordered
from protocol.messages import LinkFigures, LinkReport, NodeReport, PlanChanged
from protocol.run.changes import make_change
from protocol.run.run import BatchSection, LimitsSection, RunConfig, StagesSection
from tests.coordinator.live.desk import DATA, Desk

SERVERS = ("s0", "s1", "s2", "s3")


BOTH = [True, True]


def assign(
    needed: list[bool], there: list[Power], newcomer: tuple[float, ...], wished: int, per_stage_max: int
) -> Assignment:
    return assign_by(needed, Standing(len(needed), there), newcomer, wished, per_stage_max)


def fill(needed: list[bool], there: list[Power], keep: Sequence[NodeId] = ()) -> tuple[NodeId, Assignment] | None:
    return fill_by(needed, Standing(len(needed), there), keep)


def balance(
    needed: list[bool],
    there: list[Power],
    per_stage_max: int,
    keep: Sequence[NodeId] = (),
    unproven: Sequence[NodeId] = (),
) -> tuple[NodeId, Assignment] | None:
    """The one move that is found, where there is no more than one."""
    moves = balance_by(needed, Standing(len(needed), there), per_stage_max, keep, unproven)
    assert len(moves) < 2
    return moves[0] if moves else None


NEW = (1.0, 1.0, 1.0)


def powers(*stages_and_speeds: tuple[int, float]) -> list[Power]:
    """Volunteers that do the same for every stage."""
    return [Power(NodeId(f"v{n}"), stage, (speed,) * 3, n) for n, (stage, speed) in enumerate(stages_and_speeds)]


def test_a_stage_that_all_routes_leave_out_needs_nobody() -> None:
    """Two stages with half of them skipped: nobody is given or moved to the one without work."""
    assert assign([True, False], [], NEW, -1, 9).stage == 0
    assert assign([True, False], powers((0, 5.0), (0, 5.0)), NEW, 1, 9).stage == 0
    assert fill([True, False], powers((0, 5.0), (0, 5.0))) is None
    assert balance([True, False], powers((0, 5.0), (0, 5.0)), 9) is None


def test_the_stage_that_carries_the_fewest_steps_gets_the_next_volunteer() -> None:
    """Ties go to the lower stage, and the sentence says why."""
    assert assign(BOTH, [], NEW, -1, 9).stage == 0
    assert assign(BOTH, powers((0, 5.0)), NEW, -1, 9).reason == "stage 1 has no volunteer"
    assert assign(BOTH, powers((0, 5.0), (1, 4.0)), NEW, -1, 9).stage == 1
    assert assign(BOTH, powers((0, 5.0), (1, 5.0)), NEW, -1, 9).stage == 0


def test_a_volunteer_goes_where_it_can_do_something() -> None:
    """Its line never brings a sum of the slowest stage up in time: the next slowest has more of it."""
    assert assign(BOTH, powers((0, 5.0), (1, 4.0)), (1.0, 0.0), -1, 9).stage == 0


def test_a_wish_is_granted_when_nobody_is_short() -> None:
    """Not while another stage has nobody, and not beyond what would bring somebody back: two beside one of four alike
    become two and two, whatever the fourth wishes."""
    assert assign(BOTH, powers((0, 5.0)), NEW, 0, 9).stage == 1
    assert assign(BOTH, powers((0, 4.7), (1, 4.0)), NEW, 0, 9).label == "wished"
    assert assign(BOTH, powers((0, 5.0), (1, 4.0)), NEW, 0, 9).stage == 1
    assert assign(BOTH, powers((0, 4.0), (0, 4.0), (1, 4.0)), NEW, 0, 9).stage == 1
    assert assign(BOTH, [], NEW, 7, 9).stage == 0


def test_a_full_stage_takes_nobody() -> None:
    """The servers of a stage hold so many links; when all are full the volunteer waits and knows why."""
    assert assign(BOTH, powers((0, 1.0), (1, 9.0), (1, 9.0)), NEW, 0, 1).stage == -1
    assert assign(BOTH, powers((0, 1.0)), NEW, 0, 1).stage == 1


def test_the_weakest_of_the_richest_stage_moves_to_the_empty_one() -> None:
    """Of equals the last to come; those to keep stay; a stage of one gives nobody."""
    assert fill(BOTH, powers((0, 5.0))) is None
    assert fill(BOTH, powers((0, 5.0), (1, 5.0))) is None
    moved = fill([True] * 3, powers((0, 5.0), (0, 3.0), (0, 3.0), (1, 1.0), (1, 1.0)))
    assert moved is not None and (moved[0], moved[1].stage) == ("v2", 2)
    kept = fill(BOTH, powers((0, 5.0), (0, 3.0)), keep=[NodeId("v1")])
    assert kept is not None and kept[0] == "v0"


def test_one_moves_to_the_slowest_stage_where_that_is_worth_its_download() -> None:
    """Six steps a second in one stage and two in the other: the move that leaves the most, with its gain in the words.
    Who is to stay, or would need longer to begin than the gain pays back, does not go."""
    crew = powers((0, 1.0), (0, 2.0), (0, 3.0), (1, 2.0))
    found = balance(BOTH, crew, 9)
    assert found is not None and found[0] == "v1" and found[1].stage == 1
    assert found[1].reason == "moved from stage 0 to stage 1, the slowest: 100% more steps"
    stays = balance(BOTH, crew, 9, keep=[NodeId("v1")])
    assert stays is not None and stays[0] == "v2"
    assert balance(BOTH, crew, 1) is None, "there is no room"
    far = [Power(p.node, p.stage, p.steps_per_s, p.number, (0.0, 1.1 * PAYBACK_S)) for p in crew]
    assert balance(BOTH, far, 9) is None


def test_no_move_is_ever_taken_back() -> None:
    """Random crews: moves follow each other until none is worth it, the slowest stage gains a fifth with each, so they
    end soon, and nobody comes back to a stage that it left."""
    rng = random.Random(5)
    for _ in range(200):
        count = rng.randint(2, 5)
        needed = [True] * count
        crew = [
            Power(NodeId(f"v{n}"), rng.randrange(count), tuple(rng.uniform(0.2, 2.0) for _ in needed), n)
            for n in range(rng.randint(count, 30))
        ]
        been: dict[str, set[int]] = {}
        before = min(Standing(count, crew).carried(needed))
        while moves := balance_by(needed, Standing(count, crew), 99):
            goes = {node: choice.stage for node, choice in moves}
            for node, stage in goes.items():
                assert stage not in been.setdefault(node, set())
                been[node] |= {other for other in range(count) if other != stage}
            crew = [replace(p, stage=goes.get(p.node, p.stage)) for p in crew]
            after = min(Standing(count, crew).carried(needed))
            assert after >= before * (1 + GAIN_MIN) * (1 - 1e-9)
            before = after


def test_two_move_at_once_where_two_stages_are_equally_slow() -> None:
    """Fourteen of spot instances stood as 2, 6, 4 and 2 for an hour, where 3, 4, 4 and 3 make steps a seventh shorter:
    one move alone leaves the other stage as slow as it was."""
    crew = powers(*[(stage, 1.0) for stage, count in enumerate((2, 6, 4, 2)) for _ in range(count)])
    crew = [replace(power, steps_per_s=(1.0, 0.75, 0.9, 1.0)) for power in crew]
    moves = balance_by([True] * 4, Standing(4, crew), 9)
    assert [(node, choice.stage) for node, choice in moves] == [("v7", 0), ("v6", 3)]
    assert {choice.reason for _, choice in moves} == {
        "moved from stage 1 to stage 0, the slowest: with 1 more move, 50% more steps",
        "moved from stage 1 to stage 3, the slowest: with 1 more move, 50% more steps",
    }
    keep = [power.node for power in crew if power.node != "v7"]
    assert balance_by([True] * 4, Standing(4, crew), 9, keep) == [], "only one of the two may go"
    far = [replace(power, reload_s=(0.3 * PAYBACK_S,) * 4) for power in crew]
    assert balance_by([True] * 4, Standing(4, far), 9) == [], "two downloads do not pay"


def test_a_stage_of_many_is_not_so_much_faster_since_each_sends_a_sum() -> None:
    """Six in one stage, each of whom sends its sum for eight seconds of a step, and four in another without any. Beside
    their sums the six carry three times as much, and with them half as much, so nobody leaves them."""
    crew = [Power(NodeId(f"v{n}"), 0, (0.1, 0.1), n, (), (8.0, 0.0)) for n in range(6)]
    crew += [Power(NodeId(f"v{n}"), 1, (0.1, 0.05), n, (), (8.0, 0.0)) for n in range(6, 10)]
    assert Standing(2, crew).carried(BOTH) == pytest.approx([0.6 / 5.8, 0.2])
    assert balance(BOTH, crew, 9) is None
    assert balance(BOTH, [replace(power, pause_s=()) for power in crew], 9) is not None
    assert assign(BOTH, crew, (0.1, 0.05), -1, 9).stage == 0


def test_a_thousand_volunteers_are_looked_at_within_a_tenth_of_a_second() -> None:
    """A drop, a newcomer, a look for a better place: with 16 stages and 1,000 members each is far below a second."""
    rng = random.Random(1)
    crew = [
        Power(NodeId(f"v{n}"), rng.randrange(16), tuple(rng.uniform(0.2, 2.0) for _ in range(16)), n)
        for n in range(1000)
    ]
    began = time.process_time()
    for _ in range(5):
        assign([True] * 16, crew, (1.0,) * 16, 3, 99)
        balance([True] * 16, crew, 99)
        fill([True] * 16, [power for power in crew if power.stage])
    assert (time.process_time() - began) / 5 < 0.1


def test_who_linked_up_earlier_and_was_welcomed_later_stands_before_the_others() -> None:
    """Of equals the last to come moves, and that is not whoever got its stage last."""
    there = powers((0, 1.0), (0, 1.0), (0, 1.0))
    standing = Standing(2, [there[0], there[2]])
    standing.add(there[1])
    assert [power.node for power in standing.powers] == ["v0", "v1", "v2"] and standing.counts == [3, 0]
    moved = fill_by(BOTH, standing)
    assert moved is not None and moved[0] == "v2"


def test_steps_count_device_lines_sum_and_version() -> None:
    """Whatever is the least: compute, what goes up and comes down a visit, and the stage's gradients and parameters."""
    needs = Needs(visits=10, flops=1e9, up_bytes=1e6, down_bytes=2e6, contribution_bytes=4e6, version_bytes=8e6)
    assert steps_per_s(Means(1e9, 0.0, 0.0), needs, 10.0) == pytest.approx(0.1)
    assert steps_per_s(Means(1e12, 1e6, 0.0), needs, 10.0) == pytest.approx((10 - 4) / 10 / 10)
    assert steps_per_s(Means(1e12, 0.0, 1e6), needs, 10.0) == pytest.approx((16 - 8) / 2 / 16 / 10)
    assert steps_per_s(Means(1e9, 1e6, 1e6), Needs(0, 0, 0, 0, 0, 0), 10.0) == 0.0
    assert reload_s(Means(1e9, 1e6, 1e6), needs) == 8.0


def test_a_sum_and_a_version_are_the_pause_of_whoever_their_line_binds() -> None:
    """And the factor gives back what `steps_per_s` has taken off for it."""
    needs = Needs(visits=10, flops=1e9, up_bytes=1e6, down_bytes=2e6, contribution_bytes=4e6, version_bytes=8e6)
    assert beside_visits(Means(1e9, 0.0, 0.0), needs, 10.0) == (1.0, 0.0)
    for means, pause_s in ((Means(1e12, 1e6, 0.0), 4.0), (Means(1e12, 0.0, 1e6), 8.0)):
        factor, found_s = beside_visits(means, needs, 20.0)
        assert found_s == pause_s and steps_per_s(means, needs, 20.0) * factor == pytest.approx(0.4 / pause_s)
    assert beside_visits(Means(1e9, 1e6, 1e6), Needs(0, 0, 0, 0, 0, 0), 10.0) == (1.0, 0.0)


def test_who_delivers_less_than_it_promised_counts_for_less() -> None:
    """Two promised the same and one does a quarter of the tasks: its promise is worth about half of its share; who is
    alone in a stage proves nothing; whoever leaves is forgotten."""
    delivered = Delivered()
    fast, slow, alone = NodeId("fast"), NodeId("slow"), NodeId("alone")
    for _ in range(30):
        delivered.count({fast: 6, slow: 2, alone: 1}, [{fast: 1.0, slow: 1.0}, {alone: 9.0}])
    assert delivered.share(fast) == pytest.approx(1.5, rel=0.1) and delivered.share(slow) == pytest.approx(0.5, rel=0.2)
    assert delivered.share(alone) == 1.0
    delivered.left(slow)
    assert delivered.share(slow) == 1.0


def test_a_member_that_does_nothing_makes_its_fellows_no_better() -> None:
    """Two honest members beside one that takes leases and does nothing did all the tasks: half as much again as their
    promise. So they looked strong, one was moved for it, and the run went at half its speed for three minutes."""
    delivered = Delivered()
    one, two, idle = NodeId("one"), NodeId("two"), NodeId("idle")
    for _ in range(40):
        delivered.count({one: 4, two: 4}, [{one: 1.0, two: 1.0, idle: 1.0}])
    assert delivered.share(one) == delivered.share(two) == pytest.approx(1.0, abs=0.05)
    assert delivered.share(idle) < 0.1


def test_what_somebody_did_beyond_its_promise_fades_where_nobody_compares() -> None:
    """Alone in a stage it does whatever there is to do: the more that it did beside others is forgotten, the less is
    not, or whoever drives its fellows away would be believed again."""
    delivered = Delivered()
    strong, weak = NodeId("strong"), NodeId("weak")
    for _ in range(30):
        delivered.count({strong: 7, weak: 3}, [{strong: 1.0, weak: 1.0}])
    assert delivered.share(strong) > 1.3
    for _ in range(60):
        delivered.count({strong: 9, weak: 1}, [{strong: 1.0}, {weak: 1.0}])
    assert delivered.share(strong) == pytest.approx(1.0, abs=0.05) and delivered.share(weak) < 0.7


def test_nobody_leaves_a_stage_in_reliance_on_somebody_unknown() -> None:
    """Two members and a newcomer in one stage, two weak ones in the other: who has shown nothing yet is not counted as
    left behind. Once it has, one of them moves."""
    crew = powers((0, 1.0), (0, 1.0), (0, 1.0), (1, 0.5), (1, 0.5))
    newcomer = [NodeId("v2")]
    assert balance(BOTH, crew, 9, keep=newcomer, unproven=newcomer) is None
    assert balance(BOTH, crew, 9, keep=newcomer) is not None


def test_a_run_moves_a_volunteer_to_the_stage_that_holds_it_up() -> None:
    """Four of five volunteers stand in stage 0, since three of stage 1 left: after a minute one moves, and no other."""
    desk = Desk()
    desk.train()
    nodes = [f"v{number}" for number in range(8)]
    for node in nodes:
        desk.volunteer(node, tokens_per_s=10.0)
    where = {member.peer: member.stage for member in desk.machine.roster.volunteers()}
    gone = [node for node in nodes if where[NodeId(node)] == 1][:-1]
    here = [node for node in nodes if node not in gone]
    for node in gone:
        desk.drop(node)
    effects = desk.stay(SETTLED_S + 5, *SERVERS, *here)
    moved = [message for node in here for message in desk.sent(node, PlanChanged, effects)]
    assert [message.stage for message in moved] == [1] and "the slowest" in moved[0].reason
    assert not any(desk.sent(node, PlanChanged, desk.stay(5, *SERVERS, *here)) for node in here)


def train_on(desk: Desk, nodes: list[str], lucky: NodeId, duration_s: float) -> None:
    """One more step, and the coordinator goes on thinking that `lucky` does the work of four."""
    desk.machine.crew.delivered._counts[lucky] = 400.0, 100.0
    desk.report(desk.machine.history.newest_step + 1, duration_s=duration_s)
    desk.stay(duration_s, *SERVERS, *nodes)


def test_a_move_that_makes_steps_longer_is_taken_back() -> None:
    """Volunteers stand two and two; one is thought to do the work of four, and the other one of its stage moves. Steps
    took a second and take two from then on, so it comes back, and the next move waits twice as long: what members are
    thought to do may be wrong, by a lie too, and what steps take is seen."""
    desk = Desk(RunConfig(steps=10_000, stages=StagesSection(count=2)))
    desk.train()
    nodes = [f"v{number}" for number in range(4)]
    for node in nodes:
        desk.volunteer(node, tokens_per_s=10.0)
    lucky, mover = (member.peer for member in desk.machine.roster.volunteers() if member.stage == 0)
    desk.done.clear()
    while not desk.sent(mover, PlanChanged):
        assert desk.now < 100 + 2 * SETTLED_S
        train_on(desk, nodes, lucky, 1.0)
    assert "the slowest" in desk.sent(mover, PlanChanged)[0].reason
    since = desk.now
    while len(desk.sent(mover, PlanChanged)) < 2:
        assert desk.now < since + STAY_S + TRIAL_S + 15
        train_on(desk, nodes, lucky, 2.0)
    back = desk.sent(mover, PlanChanged)[1]
    assert back.stage == 0 and back.reason == "moved back from stage 1 to stage 0: steps took 100% longer"
    since = desk.now
    while len(desk.sent(mover, PlanChanged)) < 3:
        assert desk.now < since + 3 * SETTLED_S
        train_on(desk, nodes, lucky, 1.0)
    assert desk.now >= since + 2 * SETTLED_S


@pytest.mark.parametrize(("step_s", "moves"), [(10.0, 0), (0.2, 1)])
def test_what_is_measured_of_lines_moves_nobody_where_steps_do_not_wait_for_them(step_s: float, moves: int) -> None:
    """Two stages of two on one computer: lines are said to be fourfold apart, and steps take thirty times what any of
    them needs. Where steps are as short as lines would have them, the same figures do move one."""
    desk = Desk(RunConfig(steps=100_000, stages=StagesSection(count=2)))
    desk.train()
    nodes = [f"v{number}" for number in range(4)]
    for node in nodes:
        desk.volunteer(node)
    stages = {str(member.peer): member.stage for member in desk.machine.roster.volunteers()}
    slower = next(stage for node, stage in stages.items() if node == "v0")
    desk.done.clear()
    while desk.now < 4 * SETTLED_S:
        for node, stage in stages.items():
            rate = 1e6 if stage == slower else 4e6
            found = LinkFigures(
                peer=NodeId("s0"), path="tcp", round_trip_s=0.001, loss=-1.0, sent_bytes_per_s=rate,
                received_bytes_per_s=rate, age_s=1.0, spread=0.1,
            )  # fmt: skip
            desk.say(node, LinkReport(links=(found,)))
        for _ in range(3):
            desk.report(desk.machine.history.newest_step + 1, duration_s=step_s)
        desk.stay(3.0, *SERVERS, *nodes)
    assert sum(len(desk.sent(node, PlanChanged)) for node in nodes) == moves


def test_two_that_moved_together_go_back_together() -> None:
    """Of three stages the middle one has six and the others, where a line carries twice as much, have one: two move at
    once. Steps are twice as long from then on, and both come back: with one of them there, nobody has tried it. What
    counts begins when they have brought their sums: 146 kB on lines of 10 kB/s."""
    desk = Desk(RunConfig(steps=10_000, batch=BatchSection(microbatches=64), stages=StagesSection(count=3)))
    servers = [f"s{number}" for number in range(6)]
    for server in servers:
        desk.server(server)
    desk.say("s0", DATA)
    for number in range(12):
        desk.volunteer(f"v{number}", tokens_per_s=1e12)
        line = LinkFigures(
            peer=NodeId("s0"), path="tcp", round_trip_s=0.001, loss=-1.0, sent_bytes_per_s=1e4,
            received_bytes_per_s=1e5, age_s=1.0, spread=0.1,
        )  # fmt: skip
        desk.say(f"v{number}", LinkReport(links=(line,)))
    by_stage = [[m.peer for m in desk.machine.roster.volunteers() if m.stage == stage] for stage in range(3)]
    gone = [*by_stage[0][1:], *by_stage[1][6:], *by_stage[2][1:]]
    here = [node for crew in by_stage for node in crew if node not in gone]
    for node in gone:
        desk.drop(node)
    desk.done.clear()

    def train_until(moved: Callable[[], bool], step_s: float, within_s: float) -> None:
        until = desk.now + within_s
        while not moved():
            assert desk.now < until
            desk.report(desk.machine.history.newest_step + 1, duration_s=step_s)
            desk.stay(step_s, *servers, *here)

    train_until(lambda: any(desk.sent(node, PlanChanged) for node in here), 1.0, 2 * SETTLED_S)
    movers = [node for node in here if desk.sent(node, PlanChanged)]
    assert len(movers) == 2 and {desk.sent(node, PlanChanged)[0].stage for node in movers} == {0, 2}
    trial = desk.machine.crew._thoughts.trial
    assert trial is not None and trial.begins_at - desk.now > STAY_S + 13
    train_until(lambda: any(len(desk.sent(node, PlanChanged)) > 1 for node in here), 2.0, STAY_S + TRIAL_S + 35)
    assert [desk.sent(node, PlanChanged)[1].stage for node in movers] == [1, 1]
    assert "moved back" in desk.sent(movers[0], PlanChanged)[1].reason


def test_a_stage_that_loses_its_last_volunteer_gets_one_after_a_pause() -> None:
    """Stage 1, which has the head, has two; stage 0 loses its one: after the pause one moves, and is told why."""
    desk = Desk()
    desk.train()
    for number in range(3):
        desk.volunteer(f"v{number}", tokens_per_s=10.0)
    assert [member.stage for member in desk.machine.roster.volunteers()] == [0, 1, 1]
    desk.stay(STAY_S, *SERVERS, "v0", "v1", "v2")
    desk.drop("v0")
    assert not desk.sent("v2", PlanChanged, desk.stay(MOVE_PAUSE_S - 1, *SERVERS, "v1", "v2"))
    effects = desk.stay(4, *SERVERS, "v1", "v2")
    assert not desk.sent("v1", PlanChanged, effects)
    (message,) = desk.sent("v2", PlanChanged, effects)
    assert message.stage == 0 and message.reason == "moved from stage 1 to stage 0, where no volunteer works"
    assert message.plan == desk.plan


def test_a_stage_whose_servers_give_its_volunteers_nothing_is_filled_like_an_empty_one() -> None:
    """The one of stage 0 rests at one server: without that server's pool the stage does nothing. Two of stage 1 rest at
    a server each, and no server has nobody. A newcomer meanwhile goes where nobody works."""
    desk = Desk(RunConfig(steps=5, stages=StagesSection(count=2, collocated="never")))
    desk.train()
    for number in range(3):
        desk.volunteer(f"v{number}", tokens_per_s=10.0)
    assert [member.stage for member in desk.machine.roster.volunteers()] == [0, 1, 1]
    desk.stay(STAY_S, *SERVERS, "v0", "v1", "v2")
    fronts = [place.servers[0].node for place in desk.plan.stages]
    backs = [place.servers[1].node for place in desk.plan.stages]
    rest(desk, fronts[1], "v1")
    rest(desk, backs[1], "v2")
    assert not desk.sent("v2", PlanChanged, desk.stay(2 * MOVE_PAUSE_S, *SERVERS, "v0", "v1", "v2"))
    assert desk.machine.status(desk.now)["run"]["state"] == "training"
    rest(desk, fronts[1])
    rest(desk, backs[0], "v0")
    waits = desk.machine.status(desk.now)["run"]["waiting_for"]
    assert waits.startswith("waiting for volunteers for stage 0") and waits.endswith(
        "there, but of no use for the time being: v0"
    )
    (message,) = desk.sent("v2", PlanChanged, desk.stay(MOVE_PAUSE_S + 2, *SERVERS, "v0", "v1", "v2"))
    assert message.stage == 0 and message.reason == "moved from stage 1 to stage 0, where no volunteer works"
    assert desk.machine.status(desk.now)["run"]["waiting_for"] == ""
    rest(desk, backs[0], "v0", "v2")
    desk.volunteer("v3", tokens_per_s=10.0)
    assert [member.stage for member in desk.machine.roster.volunteers()] == [0, 1, 0, 0]
    rest(desk, backs[0])
    assert desk.machine.crew.without_work() == {}


def test_a_stage_of_members_of_no_use_takes_no_more_than_any_other() -> None:
    """It counts as empty, and its servers hold so many links all the same."""
    config = RunConfig(steps=5, stages=StagesSection(count=2), limits=LimitsSection(volunteers_max=1))
    desk = Desk(config)
    desk.train()
    desk.volunteer("v0", tokens_per_s=10.0)
    rest(desk, desk.plan.stages[0].servers[0].node, "v0")
    assert list(desk.machine.crew.without_work()) == [0]
    desk.volunteer("v1", tokens_per_s=10.0)
    desk.volunteer("v2", tokens_per_s=10.0)
    assert [member.stage for member in desk.machine.roster.volunteers()] == [0, 1, -1]


def test_who_is_of_no_use_goes_where_there_is_nobody_at_all() -> None:
    """Both of stage 0 rest, and the one of stage 1 leaves: there the servers may know nothing against them."""
    desk = Desk(RunConfig(steps=5, stages=StagesSection(count=2, collocated="never")))
    desk.train()
    desk.volunteer("v0", tokens_per_s=10.0)
    desk.volunteer("v1", tokens_per_s=10.0)
    desk.volunteer("v2", tokens_per_s=10.0)
    assert [member.stage for member in desk.machine.roster.volunteers()] == [0, 1, 1]
    desk.stay(STAY_S, *SERVERS, "v0", "v1", "v2")
    rest(desk, desk.plan.stages[1].servers[0].node, "v1", "v2")
    desk.drop("v0")
    (message,) = desk.sent("v2", PlanChanged, desk.stay(MOVE_PAUSE_S + 2, *SERVERS, "v1", "v2"))
    assert message.stage == 0


def rest(desk: Desk, server: NodeId, *volunteers: str) -> None:
    """The server's next report says that it gives these nothing."""
    resting = tuple(NodeId(name) for name in volunteers)
    desk.say(server, NodeReport(state="training", waiting_for="", resting=resting, counters={}))


def test_the_pause_is_counted_from_the_loss_and_not_from_the_next_look_at_all_links() -> None:
    """Looks are a second apart: to notice the loss at one, and the end of the pause at another, took up to two more."""
    desk = Desk()
    desk.train()
    for number in range(3):
        desk.volunteer(f"v{number}", tokens_per_s=10.0)
    desk.stay(STAY_S, *SERVERS, "v0", "v1", "v2")
    look_at = desk.machine.wake_at()
    assert look_at is not None
    desk.pass_time(look_at - desk.now + 0.25)
    desk.drop("v0")
    assert not desk.sent("v2", PlanChanged, desk.stay(MOVE_PAUSE_S - 0.125, *SERVERS, "v1", "v2"))
    assert desk.sent("v2", PlanChanged, desk.pass_time(0.125))
    next_at = desk.machine.wake_at()
    assert next_at is not None and next_at > desk.now, "it is looked once"


def test_a_new_volunteer_within_the_pause_spares_the_others_the_move() -> None:
    """A killed volunteer's successor goes where it was."""
    desk = Desk()
    desk.train()
    for number in range(3):
        desk.volunteer(f"v{number}", tokens_per_s=10.0)
    desk.stay(STAY_S, *SERVERS, "v0", "v1", "v2")
    desk.drop("v0")
    desk.stay(MOVE_PAUSE_S - 2, *SERVERS, "v1", "v2")
    assert desk.sent("v3", PlanChanged, desk.volunteer("v3", tokens_per_s=10.0))[0].stage == 0
    effects = desk.stay(60, *SERVERS, "v1", "v2", "v3")
    assert not any(desk.sent(node, PlanChanged, effects) for node in ("v1", "v2", "v3"))


def test_who_has_just_come_is_not_moved() -> None:
    """Both volunteers of stage 0 leave at once: one of stage 1 moves, but not before it has been there a while."""
    desk = Desk()
    desk.train()
    for number in range(4):
        desk.volunteer(f"v{number}", tokens_per_s=10.0)
    assert [member.stage for member in desk.machine.roster.volunteers()] == [0, 1, 1, 0]
    desk.drop("v0")
    desk.drop("v3")
    effects = desk.stay(STAY_S - 2, *SERVERS, "v1", "v2")
    assert not desk.sent("v1", PlanChanged, effects) + desk.sent("v2", PlanChanged, effects)
    effects = desk.stay(60, *SERVERS, "v1", "v2")
    assert len(desk.sent("v1", PlanChanged, effects) + desk.sent("v2", PlanChanged, effects)) == 1


def test_a_volunteer_without_room_gets_a_stage_when_there_is_some() -> None:
    """Two stages of one volunteer each: the third waits with a reason and follows the first that leaves."""
    desk = Desk(RunConfig(limits=LimitsSection(volunteers_max=1)))
    desk.train()
    desk.volunteer("v0")
    desk.volunteer("v1")
    effects = desk.volunteer("v2")
    (message,) = desk.sent("v2", PlanChanged, effects)
    assert message.stage == -1 and "all stages have the 1 volunteer" in message.reason
    desk.drop("v0")
    effects = desk.stay(2, *SERVERS, "v1", "v2")
    assert [message.stage for message in desk.sent("v2", PlanChanged, effects)] == [0]
    desk.volunteer("v3")
    desk.feed(Ordered(ChangeRun(make_change(desk.machine.config, (), "limits.volunteers_max", "2"))))
    effects = desk.stay(2, *SERVERS, "v1", "v2", "v3")
    assert [message.stage for message in desk.sent("v3", PlanChanged, effects) if message.stage >= 0], "there is room"


def test_who_comes_where_lines_are_fast_is_thought_to_have_such_a_line_until_it_is_measured() -> None:
    """Two stages of four volunteers whose lines are two hundred times a home line. Of four newcomers, whose lines
    nobody has measured yet, two go to each stage: were they thought to have home lines, none would seem to make its
    stage any faster, and all would go to the same one."""
    desk = Desk(RunConfig(steps=100_000, stages=StagesSection(count=2)))
    desk.train()
    nodes = [f"v{number}" for number in range(8)]
    for node in nodes:
        desk.volunteer(node, tokens_per_s=1e6)
    for node in nodes:
        found = LinkFigures(
            peer=NodeId("s0"), path="tcp", round_trip_s=0.001, loss=-1.0, sent_bytes_per_s=5e8,
            received_bytes_per_s=5e8, age_s=1.0, spread=0.1,
        )  # fmt: skip
        desk.say(node, LinkReport(links=(found,)))
    desk.stay(15.0, *SERVERS, *nodes)
    for number in range(8, 12):
        desk.volunteer(f"v{number}", tokens_per_s=1e6)
    where = [member.stage for member in desk.machine.roster.volunteers()]
    assert [where.count(stage) for stage in (0, 1)] == [6, 6]
