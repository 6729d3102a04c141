"""What a volunteer is told before it says yes follows from the run's own numbers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from node.compute.layout import StageLayout
from node.measure.meter import Figures
from node.visit.costs import describe_costs
from node.visit.device_facts import DeviceFacts, Question, ask_device
from node.visit.enquiry import describe, gigabytes_per_hour
from node.visit.survey import Reached, answer_ping, best_stage
from protocol.base.errors import BadInputError
from protocol.base.forms import TYPICAL_BITS, FormName
from protocol.base.ids import NodeId
from protocol.drive.limits import LineLimits
from protocol.messages import Message, Ping, Pong
from protocol.run.run import (
    BatchSection,
    LimitsSection,
    ModelSection,
    RoutesSection,
    RunConfig,
    StagesSection,
    WireSection,
)

CONFIG = RunConfig(
    name="tiny",
    model=ModelSection(layers=2, hidden=1000, heads=2, kv_heads=1, feed_forward=24, context=10),
    batch=BatchSection(microbatches=8, samples=5),
    stages=StagesSection(count=2),
    wire=WireSection(activations_up="bf16", activations_down="bf16", gradients="fp32", parameters="bf16"),
    limits=LimitsSection(contribution_tasks=2),
)


def test_traffic_is_hand_checkable() -> None:
    """1,000 tokens/s of width 1,000 in bf16 both ways; 3 M parameters in three stages, of which the middle one passes
    on activations and gradients: a sum each 100 tokens, weights each 400."""
    three = msgspec.structs.replace(CONFIG, stages=StagesSection(count=3))
    up, down = gigabytes_per_hour(three, 3_000_000, 1000.0)
    assert up == pytest.approx((2 * 1000 * 2 + 1_000_000 * 4 / 100) * 1000 * 3600 / 1e9)
    assert down == pytest.approx((2 * 1000 * 2 + 1_000_000 * 2 / 400) * 1000 * 3600 / 1e9)


@pytest.mark.parametrize(
    ("stages", "skip", "up", "down"),
    [
        (StagesSection(count=1), 0.0, [], 0),
        (StagesSection(count=2, back_servers=0), 0.0, ["q8"], 1),
        (StagesSection(count=3, back_servers=0), 0.0, ["d4", "d4"], 2),
        # Stage 0 has the embedding and the head: it begins all routes, and ends them.
        (StagesSection(count=4, back_servers=0), 0.25, ["q8", "q8"], 2),
        # Stage 0 begins them and is visited once more, with both neighbours.
        (StagesSection(count=2, back_servers=0, chunks=2, placement="interleaved"), 0.0, ["q8", "d4", "d4"], 3),
    ],
)
def test_traffic_counts_each_boundary_in_the_form_in_which_it_passes(
    stages: StagesSection, skip: float, up: list[FormName], down: int
) -> None:
    """With differences up, what begins a route and what comes back from its end go whole: a stage that does both was
    promised half of its activations. One that routes visit twice was promised the bytes of one visit."""
    model = msgspec.structs.replace(CONFIG.model, layers=4)
    wire = WireSection() if stages.count == 1 else WireSection(activations_up="d4")
    config = msgspec.structs.replace(CONFIG, model=model, stages=stages, wire=wire, routes=RoutesSection(skip=skip))
    values = config.model.hidden * 3600  # of an hour at a token a second, for each boundary
    gigabytes = [values * bits / 8e9 for bits in (sum(TYPICAL_BITS[form] for form in up), down * TYPICAL_BITS["q8"])]
    assert gigabytes_per_hour(config, 0, 1.0) == pytest.approx(gigabytes)


def test_an_open_number_of_stages_costs_the_most_that_any_number_does() -> None:
    """One stage has the largest sums and passes no activation on; the middle one of three passes on two."""
    few, wide = CONFIG, msgspec.structs.replace(CONFIG, batch=BatchSection(microbatches=800, samples=500))
    for config, stages in ((few, 1), (wide, 3)):
        settled, left_open = (
            next(line for line in describe_costs(of, 257) if "one moves" in line)
            for of in (config.settled(stages), config.settled(0))
        )
        assert settled == left_open


def test_one_stage_is_one_stage() -> None:
    """ "1 stages" stood in the question, and in what an operator is told of a run file."""
    one = msgspec.structs.replace(CONFIG, stages=StagesSection(count=1), steps=1)
    assert "parameters in 1 stage, 1 step of " in describe(one, 257, 1, 0.0)
    assert "parameters in 1 stage" in describe_costs(one, 257)[0]
    assert "parameters in 2 stages, " in describe(CONFIG, 257, 1, 0.0)


def test_the_text_names_run_cost_and_promise() -> None:
    """Run, size, gigabytes an hour, and that no code is sent; without a measurement no figure is made up."""
    text = describe(CONFIG, 259, 1, 500.0)
    assert "The run: tiny" in text and "never code" in text and "GB an hour" in text and "500 tokens/s" in text
    assert "--limit-up" in text and "--quota" in text
    unmeasured = describe(CONFIG, 259, 1, 0.0)
    up, down = gigabytes_per_hour(CONFIG, StageLayout.whole(CONFIG, 259).parameter_count, 1000.0)
    assert f"not measured; at 1,000 tokens/s it is {up:.1f} GB an hour up and {down:.1f} down" in unmeasured
    assert "at most" not in unmeasured


def test_the_memory_of_the_processes_themselves_is_told() -> None:
    """A small run was offered with 0.1 GB, and `status` then showed 0.4: Python and torch are most of that."""
    model = msgspec.structs.replace(CONFIG.model, hidden=16)
    small = msgspec.structs.replace(CONFIG, model=model, steps=20_000)
    assert "  memory 0.4 GB while it works" in describe(small, 259, 1, 0.0)
    assert "  memory 0.5 GB while it works" in describe(CONFIG, 259, 1, 0.0), "6.7 M parameters take 0.09 more"
    assert "in 2 stages, 20,000 steps of" in describe(small, 259, 1, 0.0)


def test_several_devices_are_told_one_by_one_and_together() -> None:
    """The owner lends both: what they draw, hold and move counts twice."""
    one = DeviceFacts("an old card", True, "", 300.0, power_limit_w=150.0)
    two = DeviceFacts("a new card", True, "", 700.0, power_limit_w=350.0)
    text = describe(CONFIG, 259, 2, 1000.0, devices=[one, two])
    assert "4 lent" in text and "computes on an old card\n  computes on a new card" in text
    assert "speed      1,000 tokens/s on one stage of this run, together, each 300 and 700" in text
    assert "device: an old card, up to 150 W while it works and a new card, up to 350 W while it works" in text
    assert "memory 0.9 GB while it works, disk under 0.2 GB" in text
    alone = describe(CONFIG, 259, 2, 300.0, devices=[one])
    assert "together" not in alone and "memory 0.5 GB while it works, disk under 0.1 GB, device: an old card" in alone


def reached(stage: int, mbit: float, path: str = "tcp") -> Reached:
    """A server that was reached and measured, with the same speed both ways."""
    figures = Figures(0.02, mbit * 125_000, mbit * 125_000, 1, True) if path else None
    return Reached(NodeId("n" * 52), stage, "front", path=path, figures=figures)


def test_a_direction_that_nobody_could_measure_is_not_called_zero() -> None:
    """A server that has measured enough for the moment refuses."""
    server = replace(reached(0, 20.0), figures=Figures(0.02, 2_500_000, 0.0, 1, False))
    text = describe(CONFIG, 259, 1, 500.0, [server])
    assert ", up not measured, 20.0 Mbit/s down, round trip 20 ms" in text


def test_what_is_expected_is_what_the_line_and_the_owner_allow() -> None:
    """20 Mbit/s are 9 GB an hour; a limit of 4 Mbit/s is 1.8; a slow machine needs less than either. The largest part
    is named."""
    servers = [reached(0, 20.0), reached(1, 12.0, "relay")]
    text = describe(CONFIG, 259, 1, 5000.0, servers)
    assert "2 of 2 servers reached (1 by TCP, 1 through a relay), 20.0 Mbit/s up, 20.0 down" in text
    assert "up    at most 9.0 GB an hour, set by your line; " in text and "weight gradients in fp32" in text
    text = describe(CONFIG, 259, 1, 5000.0, servers, LineLimits(up_mbit_per_s=4.0, quota_gb=50))
    assert "Your quota stops it for the month after 50 GB" in text, "it may come from the limits, and from no option"
    assert "from another terminal, or a click on its page." in text, "whoever is asked on a page may know no terminal"
    assert "up    at most 1.8 GB an hour, set by your limit of 4 Mbit/s" in text, "no option said it"
    assert "after 50 GB" in text and "To lend less" not in text
    assert "set by this machine's speed" in describe(CONFIG, 259, 1, 1.0, servers)


def test_the_stage_with_the_best_line_is_wished_for() -> None:
    """By the mean over its servers; one that was not reached counts as nothing; nearly equal leaves the choice."""
    assert best_stage([reached(0, 20.0), reached(0, 10.0), reached(1, 30.0), reached(1, 25.0)]) == 1
    assert best_stage([reached(0, 20.0), reached(0, 10.0), reached(1, 60.0), reached(1, 0.0, "")]) == 1
    assert best_stage([reached(0, 20.0), reached(0, 20.0), reached(1, 30.0), reached(1, 0.0, "")]) == 0
    assert best_stage([reached(0, 20.0), reached(1, 21.0)]) == -1
    assert best_stage([reached(0, 20.0)]) == -1
    assert best_stage([]) == -1


@pytest.mark.slow
def test_the_benchmark_measures_a_stage() -> None:
    """A figure above nothing, also when a stage is less than a layer."""
    small = RunConfig(
        model=ModelSection(layers=1, hidden=16, heads=2, kv_heads=1, feed_forward=24, context=8),
        stages=StagesSection(count=3),
    )
    facts = ask_device(Question(small, 37, 1, "cpu", True))
    assert facts.tokens_per_s > 0 and facts.label and not facts.is_accelerator
    assert not facts.why_no_accelerator, "who names the processor need not be told why it is no accelerator"
    with pytest.raises(BadInputError, match="--device cuda:99: there is"):
        ask_device(Question(small, 37, 1, "cuda:99", True))


def test_whoever_waits_for_a_run_to_begin_answers_pings() -> None:
    """A run whose servers are not there yet may leave a person waiting for long; silence would cost the link."""
    sent: list[Message] = []
    link: Any = SimpleNamespace(send=sent.append)
    assert answer_ping(link, Ping(number=7)) and sent == [Pong(number=7)]
    assert not answer_ping(link, Pong(number=7)) and len(sent) == 1
