"""A server before the first plan: it links to its fellows, measures itself once, and lets go when there is a plan."""

from __future__ import annotations

from itertools import count

from node.machine.jobs import Benchmark
from node.machine.outbox import Outbox
from node.machine.survey import SurveyDesk
from protocol.base.ids import NodeId
from protocol.base.machine import Compute
from protocol.messages import Fellow, Survey
from protocol.run.run import RunConfig, StagesSection

SURVEY = Survey(fellows=tuple(Fellow(NodeId(name), (f"{name}:1",)) for name in ("a", "b", "c")))


def test_a_server_dials_the_later_ones_and_measures_itself_once() -> None:
    """Of two servers the one with the smaller id dials; its own name in the list is no fellow."""
    out = Outbox(NodeId("b"), count(1))
    desk = SurveyDesk(NodeId("b"), out)
    config = RunConfig(stages=StagesSection(count=2))
    desk.take(SURVEY, config, computes=True)
    desk.take(SURVEY, config, computes=True)
    assert desk.peers() == {"a": (("a:1",), False), "c": (("c:1",), True)}
    assert out.take_effects() == [Compute(Benchmark(config))]
    assert desk.tokens_per_s(config) == 0.0
    desk.measured(1e12)
    half, whole = desk.tokens_per_s(config), desk.tokens_per_s(RunConfig(stages=StagesSection(count=0)))
    assert half == 2 * whole > 0, "tokens through half the model are twice those through all of it"
    desk.over()
    assert desk.peers() == {} and desk.tokens_per_s(config) == half


def test_a_server_without_a_device_measures_its_links_alone() -> None:
    out = Outbox(NodeId("b"), count(1))
    SurveyDesk(NodeId("b"), out).take(SURVEY, RunConfig(), computes=False)
    assert out.take_effects() == []
