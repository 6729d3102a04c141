"""Prediction and measurement in one form: a valid Chrome trace, tables, and a picture."""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from coordinator.live.measured_links import Direction
from coordinator.live.plan_builder import Guidance
from coordinator.live.tracing import Traced
from coordinator.world.members import members
from coordinator.world.prediction import Prediction, Setting, _network, lines_of, predict, speeds_of
from coordinator.world.trace_picture import trace_svg
from coordinator.world.traces import NodeSpans, Side, busy_s, chrome, link_rows, read_trace, stage_rows
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId, TaskId
from protocol.run.course import course_of
from protocol.run.run import BatchSection, ModelSection, RoutesSection, RunConfig, StagesSection
from protocol.run.spans import DTYPE, SpanRing
from protocol.schedule.policies import Policy
from protocol.schedule.profile import Link, Machine, NetworkFile

CONFIG = RunConfig(
    name="traced",
    steps=1000,
    model=ModelSection(layers=2, hidden=64, heads=2, kv_heads=1, feed_forward=128, context=64),
    batch=BatchSection(microbatches=4, samples=2),
    stages=StagesSection(count=2, collocated="never"),
)


def setting(up_bytes_per_s: float = 2e5, config: RunConfig = CONFIG, homes: tuple[int, ...] = (0, 1, 1, 1)) -> Setting:
    """Two servers a stage, and volunteers in the stages `homes` whose lines are what everything waits for."""
    names = [*(f"server-{n}" for n in range(2 * config.stages.count)), *(f"home-{n}" for n in range(len(homes)))]
    machines = tuple(
        Machine(
            name=name, role="server" if name[0] == "s" else "volunteer", forward_flops_per_s=1e9,
            backward_flops_per_s=1e9, memory_bytes=10**10,
            uplink_bytes_per_s=1e8 if name[0] == "s" else up_bytes_per_s, downlink_bytes_per_s=1e8,
        )
        for name in names
    )  # fmt: skip
    links = tuple(
        Link(source=a, target=b, latency_s=0.005, bytes_per_s=up_bytes_per_s if a[0] == "h" else 1e8)
        for a in names
        for b in names
        if a != b and "s" in (a[0], b[0])
    )
    stages = {f"home-{n}": stage for n, stage in enumerate(homes)}
    return Setting(
        config=config,
        network=NetworkFile(kind="network", machines=machines, links=links),
        stages=stages,
        guidance=Guidance(Policy(), 8),
    )


@pytest.fixture(scope="module")
def found() -> Prediction:
    return predict(setting(), members(), clock=lambda: 0.0)


def told_of(prediction: Prediction) -> dict[str, Any]:
    """A coordinator's answer in which what was measured is what was predicted, on a clock that is 5,000 s ahead."""
    steps = [(number, at_s + 5000.0, 1.0) for number, at_s in prediction.steps]
    nodes: list[dict[str, Any]] = []
    for told in prediction.nodes:
        fields = msgspec.structs.asdict(told)
        nodes.append({**fields, "uncertain_s": 0.0, "lost": 0, "spans": base64.b64encode(told.spans).decode()})
    side = read_trace({
        "run": "traced", "stages": 2, "steps": steps, "now_s": 6000.0, "nodes": nodes, "predicted": None,
        "no_prediction": "",
    })  # fmt: skip
    moved = []
    for node, one in zip(nodes, side.measured.nodes, strict=True):
        records = one.records.copy()
        records["start"] += 10_000.0
        moved.append({**node, "spans": base64.b64encode(records.tobytes()).decode()})
    predicted = {"steps": prediction.steps, "cost_step_s": prediction.cost_step_s, "nodes": nodes}
    return {
        "run": "traced", "stages": 2, "steps": steps, "now_s": 6000.0, "nodes": moved, "predicted": predicted,
        "no_prediction": "",
    }  # fmt: skip


def traced(prediction: Prediction) -> list[Traced]:
    """The nodes of a prediction as a coordinator has heard of real ones."""
    return [
        Traced(node.node, node.role, node.stage, 0.0, node.names, np.frombuffer(node.spans, DTYPE).copy())
        for node in prediction.nodes
    ]


def check_chrome(trace: dict[str, Any]) -> None:
    """What Perfetto and chrome://tracing want of a file (the trace event format), and what ours promises."""
    text = json.dumps(trace, allow_nan=False)
    events = json.loads(text)["traceEvents"]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named, processes = set(), {}
    for event in events:
        assert event["ph"] in ("X", "M") and isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} <= set(event)
        assert math.isfinite(event["ts"]) and event["dur"] >= 0.0
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(rows) <= named, "a row without a name"
    for spans in rows.values():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 0.01, "two spans of a row overlap: Perfetto would draw one of them elsewhere"
    assert set(processes) == {pid for pid, _ in rows}


def test_a_trace_holds_both_sides_as_processes(found: Prediction) -> None:
    """Valid by the format's rules, with a row for each node and thing it does."""
    trace = read_trace(told_of(found))
    written = chrome(trace)
    check_chrome(written)
    names = [event["args"]["name"] for event in written["traceEvents"] if event["name"] == "process_name"]
    assert names == ["traced: measured", "traced: predicted"]
    kinds = {event["cat"] for event in written["traceEvents"] if event["ph"] == "X"}
    assert {"step", "forward", "backward", "loss", "receive", "send", "wait", "optimizer"} <= kinds


def test_two_spans_that_overlap_on_one_row_are_found() -> None:
    """The schema's own test can fail."""
    span = {"ph": "X", "name": "a", "cat": "b", "pid": 1, "tid": 1, "ts": 0.0, "dur": 5.0, "args": {}}
    name = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "row"}}
    process = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "p"}}
    check_chrome({"traceEvents": [process, name, span, {**span, "ts": 5.0}]})
    with pytest.raises(AssertionError, match="overlap"):
        check_chrome({"traceEvents": [process, name, span, {**span, "ts": 4.0}]})


def test_tables_of_equal_sides_are_equal(found: Prediction) -> None:
    """Both sides go through the same lines, so clocks alone make no difference."""
    trace = read_trace(told_of(found))
    assert trace.predicted is not None
    assert trace.measured.step_s == pytest.approx(trace.predicted.step_s)
    real, guess = stage_rows(trace.measured, 2), stage_rows(trace.predicted, 2)
    assert {node.node: node.stage for node in trace.measured.nodes if node.role == "volunteer"} == setting().stages
    assert [row.devices for row in real] == [row.devices for row in guess] and real[0].devices == 1
    for one, two in zip(real, guess, strict=True):
        assert (one.tasks, one.busy, one.forward_s) == pytest.approx((two.tasks, two.busy, two.forward_s))
    assert [row.megabytes for row in link_rows(trace.measured)] == pytest.approx(
        [row.megabytes for row in link_rows(trace.predicted)]
    )


def test_the_simulated_tasks_and_bytes_are_those_of_the_run(found: Prediction) -> None:
    """F and B at stage 0, the route's end at stage 1, once a step; of five steps one may lie across an edge."""
    trace = read_trace(told_of(found))
    assert trace.predicted is not None
    first, last = stage_rows(trace.predicted, 2)
    assert first.tasks == pytest.approx(8, abs=1.6) and last.tasks == pytest.approx(4, abs=0.8)
    ways = {row.name: row for row in link_rows(trace.predicted)}
    up = ways["stage 0 volunteers → stage 0 servers"]
    assert up.ways == 2 and up.rate <= 2e5 * 1.01
    assert up.busy > 0.5, "the line that everybody waits for is shown to be busy"
    each = {row.name for row in link_rows(trace.predicted, each=True)}
    assert any("volunteer home-0" in name for name in each)


def test_a_slower_line_is_predicted_to_cost_time() -> None:
    """Half the rate where the line is the limit: nearly twice the step."""
    slow = predict(setting(1e5), members(), clock=lambda: 0.0)
    fast = predict(setting(2e5), members(), clock=lambda: 0.0)
    ratio = (slow.steps[-1][1] / (len(slow.steps) - 1)) / (fast.steps[-1][1] / (len(fast.steps) - 1))
    assert 1.6 < ratio < 2.1


def test_a_line_is_found_in_the_spans_whatever_its_ways_were_measured_to_be() -> None:
    """Two ways at once have half of it each, so the line is what all of them had while any had something; where too
    little was sent, what nodes have measured stands."""
    big = msgspec.structs.replace(
        CONFIG,
        model=msgspec.structs.replace(CONFIG.model, context=256),
        batch=msgspec.structs.replace(CONFIG.batch, samples=16),
    )
    wanted = setting(up_bytes_per_s=2e5)
    nodes = traced(predict(msgspec.structs.replace(wanted, config=big), members(), clock=lambda: 0.0))
    lines = lines_of(list(wanted.stages), nodes)
    assert all(lines[home][0] == pytest.approx(2e5, rel=0.05) for home in wanted.stages), lines
    assert lines_of(["home-0"], nodes[:1]) == {"home-0": (0.0, 0.0)}
    half = {
        (NodeId(a), NodeId(b)): Direction(1e5, 0.01, 0.0, 0.0) for a in ("home-0",) for b in ("server-0", "server-1")
    }
    seats, homes = [NodeId("server-0"), NodeId("server-1")], [NodeId("home-0")]
    for known, rate in ((lines, lines["home-0"][0]), ({}, 1e5)):
        network = _network(seats, homes, half, known, lambda peer: (1e9, 1e9), {})
        assert {link.bytes_per_s for link in network.links if link.source == "home-0"} == {rate}


def test_a_device_is_found_in_the_spans_also_where_a_route_begins_and_ends_with_it() -> None:
    """What it does at the end, forward and backward in one, is of another chunk than its other tasks."""
    config = msgspec.structs.replace(
        CONFIG,
        model=msgspec.structs.replace(CONFIG.model, layers=6),
        stages=StagesSection(count=4, collocated="never"),
        routes=RoutesSection(skip=0.25),
    )
    found = predict(setting(2e6, config, homes=(0, 1, 2, 3)), members(), clock=lambda: 0.0)
    speeds = speeds_of(config, course_of(config), traced(found))
    for stage in range(4):
        assert speeds[f"home-{stage}"] == pytest.approx((1e9, 1e9), rel=0.05), (stage, speeds)


def test_the_picture_is_a_document_with_both_sides(found: Prediction) -> None:
    """Bars of both, on one scale, and words for what is off."""
    picture = trace_svg(read_trace(told_of(found)))
    root = ElementTree.fromstring(picture)
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("predicted:") for text in words) and any(text.startswith("measured:") for text in words)
    assert "traced: predicted over measured, +0% off" in words or "traced: predicted over measured, -0% off" in words
    assert len(picture) < 500_000


def test_seconds_in_which_anything_goes_on() -> None:
    """Overlapping spans count once, and only what lies in the window."""
    ring = SpanRing()
    for start, end in ((-1.0, 1.0), (0.5, 2.0), (4.0, 5.0), (4.2, 4.4), (9.0, 12.0)):
        ring.add("forward", start, end, about=TaskId(0, 0, 0, "F"))
    _, records = ring.newest(0, 10)
    assert busy_s(records, 10.0) == pytest.approx(4.0)
    assert busy_s(records[:0], 10.0) == 0.0
    side = Side((NodeSpans("n", "volunteer", 0, 0.0, ("",), records),), ((0, 0.0), (1, 10.0)))
    assert side.bubble() == pytest.approx(0.6)


@pytest.mark.parametrize("broken", [{}, {"steps": [["x"]]}, {"steps": [], "predicted": None, "nodes": [{"node": 1}]}])
def test_an_answer_that_is_no_trace_is_said_to_be_none(broken: dict[str, Any]) -> None:
    """A sentence, whatever a server of some other kind answers."""
    with pytest.raises(BadInputError, match="no trace"):
        read_trace(broken)


def test_a_network_on_which_nothing_closes_is_not_predicted() -> None:
    """Whoever cannot be reached: a sentence in place of numbers."""
    whole = setting()
    missing = tuple(link for link in whole.network.links if "server-3" not in (link.source, link.target))
    network = NetworkFile(kind="network", machines=whole.network.machines, links=missing)
    found = predict(msgspec.structs.replace(whole, network=network), members(), lambda: 0.0)
    assert found.sentence.startswith("no prediction:") and not found.nodes
    assert np.array(found.steps).size == 0
