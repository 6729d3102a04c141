"""Credit is what ledgers accepted, by member; news bring it to volunteers, signed, with the loss and a sample."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.live.bulletin import LAST_NEWS_S, NEWS_S, LossCurve
from coordinator.live.crediting import credit_ledger
from coordinator.live.giving import HOUR_S, Giving
from coordinator.live.records import Credit, StepRow
from protocol.base.ids import NodeId
from protocol.base.limits import CURVE_MAX
from protocol.base.machine import Effect, HangUp, Send
from protocol.messages import News, NodeReport, Share, StepReportStored, ValidationLoss, Wrote
from protocol.run.run import AuditSection, ModelSection
from tests.coordinator.live.desk import CONFIG, DATA, RUN_ID, Desk

A, B = NodeId("v0"), NodeId("v1")


def news(effects: list[Effect]) -> list[News]:
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, News)]


def training() -> Desk:
    """A run that trains with one volunteer."""
    desk = Desk()
    desk.staff()
    desk.say("s0", DATA)
    desk.volunteer("v0")
    return desk


def test_a_step_gives_credit_to_its_members_and_to_nobody_else() -> None:
    """Tasks, their tokens and the time that passed; a name that is no member's is left out before it is stored."""
    desk = training()
    shares = (Share(NodeId("nobody"), 2), Share(A, 3), Share(NodeId("s1"), 1))
    assert Send(NodeId("s0"), StepReportStored(step=0)) in desk.report(0, shares=shares)
    (row,) = [record for record in desk.records if isinstance(record, StepRow)]
    assert {share.node for share in row.shares} == {A, NodeId("s1")}
    credit = desk.machine.giving.of(A)
    assert credit is not None and credit.tasks == 3
    assert credit.tokens == 3 * CONFIG.batch.samples * CONFIG.model.context
    assert credit.working_s == pytest.approx(row.duration_s)
    assert desk.machine.giving.of(NodeId("nobody")) is None


@pytest.mark.parametrize(
    "shares",
    [
        (Share(A, 10**6),),
        (Share(A, 0),),
        (Share(A, -1),),
        (Share(A, 1), Share(A, 1)),
    ],
)
def test_shares_that_no_decider_can_honestly_name_end_its_link(shares: tuple[Share, ...]) -> None:
    """More tasks than a step has, none, or somebody twice."""
    desk = training()
    effects = desk.report(0, shares=shares)
    assert any(isinstance(effect, HangUp) for effect in effects) and desk.machine.giving.of(A) is None


def test_a_route_that_ends_where_it_began_has_a_task_more_than_there_are_stages() -> None:
    """Tied embeddings: two stages, three visits of each microbatch. A report that counts them all is honest."""
    config = msgspec.structs.replace(CONFIG, model=ModelSection(tied_embeddings=True))
    desk = Desk(config)
    plan = desk.train()
    visits = sum(plan.length(0, microbatch) for microbatch in range(config.batch.microbatches))
    assert visits == 3 * config.batch.microbatches
    assert Send(NodeId("s0"), StepReportStored(step=0)) in desk.report(0, shares=(Share(NodeId("s1"), visits),))
    effects = desk.report(1, shares=(Share(NodeId("s1"), visits + 1),))
    assert any(isinstance(effect, HangUp) for effect in effects)


def test_a_volunteer_is_told_now_and_then_and_when_it_drains() -> None:
    """At its welcome, every half minute, and at once when its owner wants it to end: with what is signed for it."""
    desk = training()
    desk.report(0, shares=(Share(A, 4), Share(NodeId("s1"), 12)))
    desk.say("s0", Wrote(step=0, sample="Once upon a time"))
    nodes = ("s0", "s1", "s2", "s3", "v0")
    desk.machine.bulletin.build = "barnraise-9.0"
    assert not news(desk.stay(NEWS_S / 2, *nodes))
    (told,) = news(desk.stay(NEWS_S, *nodes))
    assert (told.step, told.step_tasks, told.hour_ratio) == (0, 4, 0.25)
    assert told.build == "barnraise-9.0", "whoever has an older one hears of it"
    assert told.thanks == b"4 tasks" and told.sample == "Once upon a time"
    assert [step for step, _ in told.curve] == [0]
    draining = NodeReport(state="draining", waiting_for="", counters={})
    assert len(news(desk.say("v0", draining))) == 1
    assert not news(desk.say("v0", draining)), "at most one a second"
    desk.stay(LAST_NEWS_S, *nodes)
    assert len(news(desk.say("v0", draining))) == 1, "the last one has what came in the meantime"


def test_the_newest_validation_is_told() -> None:
    """What a version comes to on text kept aside; before the first there is none."""
    desk = training()
    nodes = ("s0", "s1", "s2", "s3", "v0")
    desk.report(0)
    (told,) = news(desk.stay(NEWS_S, *nodes))
    assert told.validated_step == -1
    desk.report(1, validations=(ValidationLoss(version=0, loss=5.5, tokens=16),))
    (told,) = news(desk.stay(NEWS_S, *nodes))
    assert (told.step, told.validated_step, told.validation_loss) == (1, 0, 5.5)


def test_the_last_report_tells_of_the_versions_that_no_step_runs_on() -> None:
    """Those before are told with their steps."""
    desk = training()
    losses = [ValidationLoss(version=version, loss=5.5 - version, tokens=16) for version in range(CONFIG.steps + 1)]
    last, delay = CONFIG.steps - 1, CONFIG.batch.delay
    for step in range(last):
        desk.report(step, validations=tuple(losses[step - delay : step - delay + 1] if step >= delay else ()))
    effects = desk.report(last, validations=tuple(losses[last - delay :]))
    assert HangUp not in map(type, effects)
    assert list(desk.machine.history.validations) == losses


def test_the_words_of_a_volunteer_are_no_sample() -> None:
    """Only a server of the plan may say what the model writes; a volunteer has no way to (the role table), and a spare
    is not believed."""
    desk = training()
    desk.server("s9")
    desk.say("s9", Wrote(step=0, sample="buy now"))
    assert desk.machine.bulletin.sample == ""


def test_the_last_hour_forgets() -> None:
    """The part of the last hour is of that hour's tasks alone; what was given for ever stays."""
    giving = Giving({B: Credit(node=B, tasks=7, tokens=70, working_s=1.0, since_s=5.0, until_s=6.0)}, task_tokens=10)
    giving.store((Share(A, 1), Share(B, 3)), 0, 1.0, 1e9, now=0.0)
    assert giving.hour_ratio(B, 100.0) == 0.75 and giving.newest[A] == 1
    giving.store((Share(A, 2),), 1, 1.0, 1e9 + 1, now=HOUR_S - 1)
    assert giving.hour_ratio(A, HOUR_S - 1) == 0.5
    assert giving.hour_ratio(A, HOUR_S + 1) == 1.0 and giving.newest[B] == 0
    credit = giving.of(B)
    assert credit is not None and (credit.tasks, credit.tokens, credit.since_s) == (10, 100, 5.0)


def test_steps_that_overlap_do_not_make_an_hour_of_two() -> None:
    """Two steps are open at once: the time of the second begins where the first ended; a clock set back adds none."""
    giving = Giving({}, 1)
    assert [giving.worked_s(10.0, wall) for wall in (100.0, 106.0, 130.0, 90.0)] == [10.0, 6.0, 10.0, 0.0]


def test_the_curve_is_bounded_and_goes_back_with_the_run() -> None:
    """However long the run, at most CURVE_MAX points, each the mean of an even piece; steps that come again replace
    those that were thrown away; a loss that is no number leaves no mark."""
    curve = LossCurve()
    for step in range(1000):
        curve.add(step, 5.0 - step / 1000)
    points = curve.points()
    assert CURVE_MAX / 2 <= len(points) <= CURVE_MAX
    assert points[0] == (0, 5.0), "where it began drifted: the first piece was of more and more steps"
    assert (points[1][0], points[-1][0]) == (16, 992) and points[1][1] == pytest.approx(5.0 - 23.5 / 1000)
    assert LossCurve(points).points()[0] == (0, 5.0)
    curve.add(500, 9.0)
    assert curve.points()[-1][0] == 496
    curve.add(501, float("nan"))
    curve.add(502, float("inf"))
    assert all(loss < 10 for _, loss in curve.points())
    curve.add(0, 4.0)
    assert curve.points() == ((0, 4.0),)


def test_only_accepted_work_that_audits_have_vouched_for_is_credited() -> None:
    """Twenty audited tasks are enough; a ban for what it gave takes all; servers are believed; without
    audits all counts."""
    desk = training()
    known, new, banned = NodeId("k" * 52), NodeId("n" * 52), NodeId("b" * 52)
    giving, admission = desk.machine.giving, desk.machine.admission
    shares = (Share(known, 30, 20), Share(new, 30, 19), Share(banned, 30, 30), Share(NodeId("s1"), 5))
    giving.store(shares, 7, 1.0, 1e9, now=0.0)
    giving.store((Share(known, 1),), 9, 1.0, 1e9, now=0.0)
    admission.ban(banned, "audits: its gradient is off by 2", 1e9)
    ledger = credit_ledger(CONFIG, RUN_ID, giving, admission, desk.plan.server_nodes(), 2e9)
    credited = {row.node: (row.tasks, row.audited, row.credited) for row in ledger.rows}
    assert credited == {known: (31, 20, 31), new: (30, 19, 0), banned: (30, 30, 0), NodeId("s1"): (5, 0, 5)}
    assert [row.why for row in ledger.rows if row.node == new] == ["19 tasks were audited; 20 are needed"]
    found = giving.of(known)
    assert found is not None and found.first_step == 7
    admission.ban(known, "came by the invite of another", 1e9, is_kin=True)
    ledger = credit_ledger(CONFIG, RUN_ID, giving, admission, desk.plan.server_nodes(), 2e9)
    assert {row.node: row.credited for row in ledger.rows}[known] == 31, "nobody found anything wrong in what it gave"
    free = msgspec.structs.replace(CONFIG, audit=AuditSection(rate=0.0))
    ledger = credit_ledger(free, RUN_ID, giving, admission, (), 2e9)
    assert {row.node: row.credited for row in ledger.rows}[new] == 30
