"""From "all servers are here" to the first plan: a survey, a planner that works beside, and what its answer does."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.live.first_plan import GATHER_S, PLANNING_S, SURVEY_S, problem_now
from coordinator.live.plan_builder import Guidance, in_flight_of
from coordinator.live.problem import Problem, Proposal
from coordinator.live.records import PlanRow, StoredState
from protocol.base.ids import NodeId
from protocol.base.machine import Effect, PlanReady, Send, StartPlanning
from protocol.messages import LinkFigures, LinkReport, PlanChanged, Survey, Welcome
from protocol.run.course import course_of
from protocol.run.run import TUNED, RunConfig, StagesSection
from protocol.schedule.policies import First, Policy, Traversal
from tests.coordinator.live.desk import DATA, Desk, join

CONFIG = RunConfig(steps=5, stages=StagesSection(count=2, cut="planned"))
TUNED_ORDER = RunConfig(steps=5, stages=StagesSection(count=2, order=TUNED))  # type: ignore[arg-type]
FORWARDS = Guidance(Policy(first=First.FORWARD, forward=Traversal(deepest_first=True)), 40)
AUTO = RunConfig(steps=5, stages=StagesSection(count=0, cut="planned"))


def proposal(*servers: tuple[str, ...], edges: tuple[int, ...] = (3,), **fields: Any) -> Proposal:
    """A planner's answer: names of each stage's servers."""
    placed = tuple(tuple(NodeId(node) for node in stage) for stage in servers)
    times = {"step_s": 2.0, "even_step_s": 3.0, "bound_s": 1.0, "reason": "the device of stage 0's members sets it"}
    return Proposal(servers=placed, edges=edges, **{**times, **fields})


def figures(peer: str, rate: float = 1e7) -> LinkFigures:
    return LinkFigures(
        peer=NodeId(peer), path="tcp", round_trip_s=0.01, loss=0.0, sent_bytes_per_s=rate, received_bytes_per_s=rate,
        age_s=0.0, spread=0.0,
    )  # fmt: skip


def measure(desk: Desk, *nodes: str, tokens_per_s: float = 100.0) -> None:
    """Servers tell what a survey makes them measure: themselves, and the links among them."""
    for node in nodes:
        desk.say(node, join(addresses=(f"{node}:1",), tokens_per_s=tokens_per_s))
        desk.say(node, LinkReport(links=tuple(figures(peer) for peer in nodes if peer != node)))


def test_the_lines_of_who_works_are_those_that_it_has_shown() -> None:
    """A volunteer has links to its own stage's servers: what it sends there it could send to others. (Its line to them
    counted as a home's, and the better of the two was its uplink.)"""
    desk = Desk(msgspec.structs.replace(CONFIG, stages=StagesSection(count=2)))
    desk.train()
    desk.volunteer("v0")
    line = msgspec.structs.replace(figures("s0"), sent_bytes_per_s=2.5e5, received_bytes_per_s=1e6)
    desk.say("v0", LinkReport(links=(line,)))
    servers = desk.machine.roster.servers()
    problem = problem_now(
        CONFIG, servers, desk.machine.roster.volunteers(), desk.machine.network, desk.machine.flops_per_s, desk.now
    )
    (home,) = [machine for machine in problem.network.machines if machine.role == "volunteer"]
    assert (home.uplink_bytes_per_s, home.downlink_bytes_per_s) == (2.5e5, 1e6)
    ways = {(link.source, link.target): link.bytes_per_s for link in problem.network.links}
    assert all(ways["v0", server.peer] == 2.5e5 and ways[server.peer, "v0"] == 1e6 for server in servers)


def asked(effects: list[Effect]) -> list[StartPlanning]:
    return [effect for effect in effects if isinstance(effect, StartPlanning)]


def planning(config: RunConfig = CONFIG, servers: int = 4) -> tuple[Desk, StartPlanning]:
    """A desk whose servers have measured, and the question to the planner."""
    desk = Desk(config)
    names = [f"s{number}" for number in range(servers)]
    for name in names:
        desk.server(name)
    if not config.stages.count:
        desk.stay(GATHER_S + 2.0, *names)
    measure(desk, *names)
    (question,) = asked(desk.done)
    return desk, question


def test_servers_measure_each_other_and_then_a_planner_is_asked() -> None:
    """Every server hears of all the others; the planner is asked when the last has told; the status answers."""
    desk = Desk(CONFIG)
    for number in range(4):
        desk.server(f"s{number}")
    (survey,) = desk.sent("s1", Survey)
    assert sorted((fellow.node, fellow.addresses) for fellow in survey.fellows) == [
        ("s0", ("s0:1",)), ("s2", ("s2:1",)), ("s3", ("s3:1",)),
    ]  # fmt: skip
    assert "4 servers measure the lines between them" in desk.machine.status(desk.now)["run"]["waiting_for"]
    measure(desk, "s0", "s1", "s2")
    assert not asked(desk.done)
    measure(desk, "s0", "s1", "s2", "s3")
    (question,) = asked(desk.done)
    assert isinstance(question.problem, Problem)
    assert [machine.name for machine in question.problem.network.machines] == ["s0", "s1", "s2", "s3"]
    assert len(question.problem.network.links) == 12 and question.problem.network.links[0].bytes_per_s == 1e7
    assert "a planner works" in desk.machine.status(desk.now)["run"]["waiting_for"]


def test_the_planners_answer_is_the_plan_and_everybody_hears_what_was_open_first() -> None:
    """Seats, cut and sentence are the planner's; a second welcome, with the run filled in, comes before the plan."""
    desk, question = planning()
    effects = desk.feed(PlanReady(question.number, proposal(("s3", "s0"), ("s1", "s2"))))
    told = [effect.message for effect in effects if isinstance(effect, Send) and effect.peer == "s3"]
    welcome, changed = (message for message in told if isinstance(message, Welcome | PlanChanged))
    assert isinstance(welcome, Welcome) and welcome.config.stages.cut == "3"
    assert isinstance(changed, PlanChanged) and changed.stage == 0
    assert desk.plan.course == course_of(welcome.config)
    assert [server.node for stage in desk.plan.stages for server in stage.servers] == ["s3", "s0", "s1", "s2"]
    sentence = desk.machine.status(desk.now)["plan"]
    assert "cut at 3" in sentence and "at least 50% of the proven bound" in sentence and "the even plan 3 s" in sentence
    desk.say("s3", DATA)
    assert desk.machine.config.stages.cut == "3" == desk.machine.status(desk.now)["run"]["cut"]


def test_a_coordinator_that_comes_back_keeps_the_cut() -> None:
    """The cut is part of the run from its first plan on: a restart does not plan again, and says the same sentence."""
    desk, question = planning()
    desk.feed(PlanReady(question.number, proposal(("s3", "s0"), ("s1", "s2"))))
    (row,) = desk.written(PlanRow)
    again = Desk(CONFIG, stored=StoredState(plan=row.plan, plan_sentence=row.sentence), generation=2)
    assert again.machine.config == desk.machine.config and not again.machine.config.is_open
    for number in range(4):
        again.server(f"s{number}")
    assert again.plan.course == desk.plan.course and again.machine.placement.sentence == row.sentence
    assert not asked(again.done)


def test_whatever_goes_wrong_with_the_planner_the_run_begins_with_the_even_plan() -> None:
    """It is late, it fails, or its answer is none: the even plan, servers as they came, and the cause."""
    desk, _ = planning()
    desk.stay(PLANNING_S + 2.0, "s0", "s1", "s2", "s3")
    assert "planned evenly, with servers as they came: the planner has not answered within 40 s" in (
        desk.machine.placement.sentence
    )
    assert desk.machine.config.stages.cut == "even"
    for answer, cause in (
        (PlanReady(1, None, "the planner ended with code 1: no memory"), "no memory"),
        (PlanReady(1, proposal(("s3", "s0"))), "1 stages"),
        (PlanReady(1, proposal(("s3", "s0", "s1"), ("s2",))), "stages of [1, 3] servers, not 2"),
        (PlanReady(1, proposal(("s3", "s0"), ("s1", "s3"))), "a server twice"),
        (PlanReady(1, proposal(("s3", "s0"), ("s1", "stranger"))), "one that nobody knows"),
        (PlanReady(1, proposal(("s3", "s0"), ("s1", "s2"), edges=(3, 4))), "stages.cut: 2 blocks"),
    ):
        desk, _ = planning()
        desk.feed(answer)
        assert cause in desk.machine.placement.sentence, answer
        assert [server.node for stage in desk.plan.stages for server in stage.servers] == ["s0", "s1", "s2", "s3"]
        assert desk.machine.config.stages.cut == "even"


def test_an_order_that_is_left_to_the_planner_is_what_all_plans_say() -> None:
    """Though nothing else is open: its policy and its number of forwards in flight are in the first plan, in the one
    after a server has moved, and in that of a coordinator that comes back; the sentence says why."""
    desk, question = planning(TUNED_ORDER)
    assert question.problem.config == TUNED_ORDER
    why = "the device sets it; nodes do forwards first: 90% of the time of backwards first, simulated"
    desk.feed(PlanReady(question.number, proposal(("s3", "s0"), ("s1", "s2"), guidance=FORWARDS, reason=why)))
    desk.drop("s2")
    desk.server("s2")
    (first, *_) = rows = desk.written(PlanRow)
    again = Desk(TUNED_ORDER, stored=StoredState(plan=first.plan, plan_sentence=first.sentence), generation=9)
    for number in range(4):
        again.server(f"s{number}")
    assert not asked(again.done) and again.plan.generation >= 9
    for plan in (*(row.plan for row in rows), again.plan):
        assert Guidance.of(plan) == FORWARDS
    assert "90% of the time of backwards first" in desk.machine.status(desk.now)["plan"]
    assert desk.machine.config.stages.cut == "even", "what was not open is as the file says"


def test_an_order_that_the_file_says_is_none_of_the_planners() -> None:
    """Who asks it for a cut hears what it has to say of latency; and who takes the order back gets what he says."""
    desk, question = planning()
    desk.feed(PlanReady(question.number, proposal(("s3", "s0"), ("s1", "s2"), guidance=FORWARDS)))
    assert (desk.plan.order, desk.plan.in_flight_max) == (Policy(), 40)
    (row,) = desk.written(PlanRow)
    plan = msgspec.structs.replace(row.plan, order=FORWARDS.order)
    again = Desk(CONFIG, stored=StoredState(plan=plan, plan_sentence=row.sentence), generation=9)
    assert again.plan.order == Policy() and again.plan.in_flight_max == 40


def test_without_a_planner_an_order_that_is_left_open_is_backwards_first() -> None:
    """It fails, or says a number that nobody can mean: the rule's number, and why."""
    for answer, cause in (
        (PlanReady(1, None, "no memory"), "no memory"),
        (PlanReady(1, proposal(("s3", "s0"), ("s1", "s2"), guidance=Guidance(Policy(), 10**6))), "1000000 forwards"),
    ):
        desk, _ = planning(TUNED_ORDER)
        desk.feed(answer)
        assert desk.plan.order == Policy() and desk.plan.in_flight_max == in_flight_of(2)
        assert cause in desk.machine.placement.sentence


def test_a_survey_that_does_not_end_is_filled_up() -> None:
    """A link that nobody can open, a server that cannot measure itself: after a while the others' median stands in."""
    desk = Desk(CONFIG)
    for number in range(4):
        desk.server(f"s{number}")
    measure(desk, "s0", "s1", "s2")
    desk.stay(SURVEY_S + 2.0, "s0", "s1", "s2", "s3")
    (question,) = asked(desk.done)
    powers = {machine.name: machine.forward_flops_per_s for machine in question.problem.network.machines}
    assert powers["s3"] == powers["s0"] > 0 and len(question.problem.network.links) == 12
    assert [fields["detail"] for fields in desk.logged("survey incomplete")]


def test_a_server_that_leaves_while_the_planner_works_begins_it_anew() -> None:
    """A plan with somebody who is gone is no plan: those who are there then measure and are planned for."""
    desk, question = planning()
    desk.drop("s2")
    desk.feed(PlanReady(question.number, proposal(("s3", "s0"), ("s1", "s2"))))
    assert desk.machine.placement.plan is None
    desk.server("s4")
    measure(desk, "s0", "s1", "s3", "s4")
    assert [effect.number for effect in asked(desk.done)] == [1, 2]
    desk.feed(PlanReady(2, proposal(("s3", "s0"), ("s1", "s4"))))
    assert desk.plan.stages[1].servers[1].node == "s4"


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    """It came after the coordinator's patience, or twice."""
    desk, question = planning()
    desk.stay(PLANNING_S + 2.0, "s0", "s1", "s2", "s3")
    plan = desk.plan
    desk.feed(PlanReady(question.number, proposal(("s3", "s0"), ("s1", "s2"))))
    desk.feed(PlanReady(99, None, "what?"))
    assert desk.plan == plan


def test_a_spare_may_get_a_place_from_the_planner() -> None:
    """Five servers for four places: the planner says who waits."""
    desk = Desk(CONFIG)
    for number in range(3):
        desk.server(f"s{number}")
    desk.server("s3")
    desk.server("s4")
    names = [f"s{number}" for number in range(5)]
    measure(desk, *names)
    desk.stay(SURVEY_S + 2.0, *names)
    (question,) = asked(desk.done)
    desk.feed(PlanReady(question.number, proposal(("s4", "s0"), ("s1", "s3"))))
    assert desk.plan.decider == "s4"
    (word,) = desk.sent("s2", PlanChanged)
    assert word.stage == -1 and "spare" in word.reason


def test_an_open_number_of_stages_waits_for_enough_servers_and_then_for_more() -> None:
    """One server is too few for one stage: a sentence names the key. With enough, it waits for more."""
    desk = Desk(AUTO)
    desk.server("s0")
    desk.stay(GATHER_S + 2.0, "s0")
    waiting_for = desk.machine.status(desk.now)["run"]["waiting_for"]
    assert waiting_for.startswith('stages.count = "auto": 1 server is here, and one stage alone takes 2')
    desk.server("s1")
    desk.stay(2.0, "s0", "s1")
    assert "waiting 10 s for more" in desk.machine.status(desk.now)["run"]["waiting_for"]
    assert not desk.sent("s0", Survey)
    desk.stay(GATHER_S, "s0", "s1")
    assert desk.sent("s0", Survey)


def test_an_open_number_of_stages_is_what_the_planner_says() -> None:
    """Five servers, two stages, one spare; reports and the next coordinator go by two stages from then on."""
    desk, question = planning(AUTO, servers=5)
    assert question.problem.config == AUTO
    desk.feed(PlanReady(question.number, proposal(("s3", "s0"), ("s1", "s2"))))
    assert len(desk.plan.stages) == 2 and desk.machine.config == AUTO.settled(2, (3,))
    assert desk.machine.reported.stages == 2 and desk.machine.status(desk.now)["run"]["stages"] == 2
    desk.say("s3", DATA)
    desk.volunteer("v0")
    desk.volunteer("v1")
    assert sorted(member.stage for member in desk.machine.roster.volunteers()) == [0, 1]


def test_without_a_planner_an_open_number_of_stages_uses_all_servers() -> None:
    """As many stages as the servers can fill, as far as the run's keys allow."""
    desk, question = planning(AUTO, servers=5)
    desk.feed(PlanReady(question.number, None, "no memory"))
    assert len(desk.plan.stages) == 2 and "no memory" in desk.machine.placement.sentence


def test_an_even_run_asks_nobody() -> None:
    """`stages.cut = "even"`: no survey, no planner, the plan of before."""
    desk = Desk(msgspec.structs.replace(CONFIG, stages=StagesSection(count=2)))
    for number in range(4):
        desk.server(f"s{number}")
    assert desk.plan.decider == "s0" and not desk.sent("s0", Survey) and not asked(desk.done)
