"""`barnraise simulate`: production machines in the world that measures, and one sentence for bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from coordinator.commands import simulate
from coordinator.live.plan_builder import Guidance
from coordinator.live.problem import Problem
from coordinator.process.planner import solve
from coordinator.world.churn import Change, Churn, load_churn, no_churn
from coordinator.world.planned import file_of
from coordinator.world.predicted import predicted
from coordinator.world.swarm import Swarm
from node.world.member import Members
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.cli import _BadInputExit
from protocol.run.config_file import load_run
from protocol.run.run import TUNED, AuditSection, BatchSection, DataSection, LimitsSection, RunConfig, StagesSection
from protocol.schedule.profile import load_network
from tests.benchmarks.home_lines import MODELS, home_lines
from tests.benchmarks.home_runs import ROWS, config_of

RUN = """
name = "small"
steps = 1000
[model]
layers = 6
hidden = 256
heads = 8
kv_heads = 8
feed_forward = 512
context = 256
[batch]
microbatches = 16
samples = 2
[stages]
count = 2
[limits]
contribution_tasks = 64
[audit]
rate = 0.0
first = 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, a network of four servers and six volunteers at 20/200 Mbit/s, and the node's side."""
    network = home_lines(None, servers=4, volunteers=6)
    sites = [{"a": "dc", "b": machine.site, "latency_s": 0.01, "bytes_per_s": 1e9} for machine in network.machines]
    file = {"kind": "network", "machines": msgspec.to_builtins(network.machines), "sites": sites[3:]}
    (tmp_path / "network.json").write_text(json.dumps(file))
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.setattr(simulate, "members", lambda: Members)
    return tmp_path


def run(folder: Path, *arguments: str, expect: int = 0) -> Result:
    """The command as a person would type it."""
    words = [str(folder / "run.toml"), str(folder / "network.json"), *arguments]
    result = CliRunner().invoke(simulate.simulate, words)
    if isinstance(result.exception, BadInputError):
        assert expect == _BadInputExit.exit_code
        return result
    assert result.exit_code == expect, result.output
    return result


def answer(folder: Path, *arguments: str, hours: float = 0.02) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(folder, "--json", "--hours", str(hours), *arguments).output)
    return found


@pytest.mark.slow
def test_steps_close_every_task_is_done_once_and_a_seed_replays(folder: Path) -> None:
    """Six volunteers for two stages: nobody leaves, so nothing is done twice, and no line carries more than it can."""
    found = answer(folder, hours=0.01)
    assert found["steps"] >= 5 and not found["warnings"]
    assert found["tasks"]["share"] == 1.0
    assert found["step_s"] >= 0.9 * found["predicted"]["step_s"]
    assert found["volunteer_bytes"]["up_per_hour"] <= 20e6 / 8 * 3600
    assert [round(stage["volunteers"]) for stage in found["stages"]] == [3, 3]
    assert answer(folder, hours=0.01) == found
    assert answer(folder, "--seed", "2", hours=0.01)["inputs"] != found["inputs"]


def test_a_run_whose_checkpoints_lie_in_a_store_is_simulated_without_one(folder: Path) -> None:
    """Nothing is asked of it; what servers would bring there costs the run no step."""
    text = RUN.replace("steps = 1000", "steps = 4")
    (folder / "run.toml").write_text(f'{text}[checkpoint]\nevery_steps = 2\nfolder = "s3://bucket/runs"\n')
    assert answer(folder)["steps"] == 4


def test_the_coordinator_hears_how_fast_lines_are(folder: Path) -> None:
    """As drivers tell it: without that it took every line for a home line, and half of a swarm with better ones stood
    in the wrong stages."""
    config, network = load_run(folder / "run.toml"), load_network(folder / "network.json")
    names = [machine.name for machine in network.machines[network.servers :]]
    swarm = Swarm(config, network, no_churn(names), 1, Members)
    swarm.run(30.0)
    assert {swarm.machine.network.line_of(NodeId(name)) for name in names} == {(20e6 / 8, 200e6 / 8)}
    hosts = (*swarm.servers, *swarm.volunteers.values())
    assert all("Ping" not in host.sent for host in hosts), "here the end of each link is told, so nobody asks"


@pytest.mark.slow
def test_a_trace_moves_volunteers_and_costs_steps(folder: Path) -> None:
    """Names that the network does not know are its volunteers in turn; who leaves takes what he computed with him."""
    rows = ["0,add,a", "0,add,b", "0,add,c", "0,add,d", "20000,remove,a", "30000,add,e", "40000,remove,b"]
    (folder / "trace.csv").write_text("\n".join(rows))
    found = answer(folder, "--churn", str(folder / "trace.csv"), "--svg", str(folder / "out.svg"))
    assert found["churn"]["departures"] == 2 and found["steps"] >= 2
    assert 0.0 < found["churn"]["of_best"] <= 1.05
    assert (folder / "out.svg").read_text().startswith("<svg")
    words = run(folder, "--hours", "0.02", "--churn", str(folder / "trace.csv")).output
    assert "2 left" in words and "steps an hour" in words


@pytest.mark.slow
def test_members_that_leave_while_others_are_audited_stop_nobody(folder: Path) -> None:
    """Others take over what they had summed up, in second sums of the step; their first ones are held for an audit
    that takes longer than the step. (Before a step's patience with audits ran from the tail on, each waited for the
    other: no step closed for minutes.)"""
    config, network = load_run(folder / "run.toml"), load_network(folder / "network.json")
    batch = msgspec.structs.replace(config.batch, microbatches=64)
    config = msgspec.structs.replace(config, batch=batch, audit=AuditSection(), limits=LimitsSection())
    slow = tuple(
        msgspec.structs.replace(machine, forward_flops_per_s=1e9, backward_flops_per_s=1e9)
        if machine.role == "server"
        else machine
        for machine in network.machines
    )
    names = [machine.name for machine in slow[network.servers :]]
    come = [Change(0.0, True, name) for name in names]
    goes = [Change(63.0, False, names[0]), Change(83.0, False, names[1])]
    churn = Churn((*come, *goes), {name: number for number, name in enumerate(names)})
    swarm = Swarm(config, replace(network, machines=slow), churn, 1, Members)
    swarm.run(130.0)
    closed = [step.at_s for step in swarm.steps if step.at_s > 40.0]
    gaps = [later - at for at, later in zip(closed, [*closed[1:], swarm.world.now], strict=True)]
    assert max(gaps) < 20.0, (max(gaps), len(closed))


def test_a_trace_with_the_networks_own_names_leaves_the_others_alone(folder: Path) -> None:
    """Two of the six are in the trace; the other four are there from the beginning."""
    (folder / "trace.csv").write_text("1000,add,home-1\n5000,add,home-0\n")
    names = [f"home-{number}" for number in range(6)]
    churn = load_churn(folder / "trace.csv", names)
    assert [change.name for change in churn.changes if change.at_s == 0.0] == names[2:]
    assert churn.kind_of["home-1"] == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("0,add", "not like"),
        ("-5,add,a", "not like"),
        ("0,add,a\n5,add,a", "line 2: 'a' comes, but is there already"),
        ("0,remove,a", "leaves, but is not there"),
        ("9,add,a\n5,add,b", "earlier than the line before"),
        ("", "says of nobody"),
    ],
)
def test_a_trace_that_cannot_be_is_one_sentence(folder: Path, content: str, words: str) -> None:
    """With file and line, before anything is simulated."""
    (folder / "trace.csv").write_text(content)
    result = run(folder, "--churn", str(folder / "trace.csv"), expect=2)
    assert words in str(result.exception)


def test_a_network_with_too_few_servers_is_one_sentence(folder: Path) -> None:
    """It names the key."""
    (folder / "run.toml").write_text(RUN.replace("count = 2", "count = 3"))
    result = run(folder, expect=2)
    assert "stages.count" in str(result.exception)
    assert "6 servers; the network has 4" in str(result.exception)


LINE_S = 256 * 2 * 4.263 / (3 * 2.5) + 86 / 2.5
"""What the lines alone need for a step of 1.1 B parameters, three volunteers a stage: each of 256 microbatches goes up
twice with 4.263 MB, once a step a sum of weight gradients with 86 MB, at 2.5 MB/s."""


@pytest.mark.slow
def test_a_billion_parameters_train_on_home_lines_at_the_pace_of_the_lines() -> None:
    """1.1 B parameters, eight stages, 24 volunteers at 20/200 Mbit/s: two steps close at 0.9 of the lines' own pace,
    with start, first fill and last drain of the pipeline, and no task is done twice. (Before clocks knew what the bytes
    take, no step closed in 3,000 s; before uplinks went one after the other, two took 1,392 s; before older results
    went first, and before sums, 730, not 707.)"""
    network = home_lines(None, servers=16, volunteers=24)
    config = RunConfig(
        model=MODELS["1.1 B"],
        steps=2,
        data=DataSection(tokenizer="bpe:32000"),
        batch=BatchSection(microbatches=256, samples=1),
        stages=StagesSection(count=8, front_servers=1, back_servers=1),
        limits=LimitsSection(lease_s=600.0),
    )
    names = [machine.name for machine in network.machines[network.servers :]]
    swarm = Swarm(config, network, no_churn(names), 1, Members)
    swarm.run(1400.0)
    assert [step.number for step in swarm.steps] == [0, 1]
    assert 2 * LINE_S / swarm.steps[1].at_s > 0.9
    assert not sum(host.jobs["Forward"] for host in swarm.servers), "servers took work that volunteers had room for"
    done = sum(host.jobs[kind] for host in swarm.volunteers.values() for kind in ("Forward", "Backward", "RouteEnd"))
    assert done == 2 * 256 * 15
    assert sum(host.jobs["TakeGradient"] for host in swarm.volunteers.values()) <= 2 * 24 + 4


def test_a_simulated_run_follows_the_order_that_its_planner_chose(folder: Path) -> None:
    """Nobody asks the planner twice: what it said before time began is in the plan in force, and steps close by it."""
    config = load_run(folder / "run.toml")
    stages = msgspec.structs.replace(config.stages, chunks=2, placement="v", order=TUNED)
    config, network = msgspec.structs.replace(config, stages=stages), load_network(folder / "network.json")
    wanted = solve(Problem(config=config, network=file_of(network)))
    assert wanted.proposal is not None
    volunteers = [machine.name for machine in network.machines[network.servers :]]
    swarm = Swarm(config, network, no_churn(volunteers), 1, Members)
    swarm.world.run(60.0, lambda: len(swarm.steps) >= 2)
    assert len(swarm.steps) >= 2 and Guidance.of(swarm.machine.placement.plan) == wanted.proposal.guidance


def test_a_stage_whose_graphs_fit_nowhere_is_predicted_with_forwards_that_run_again() -> None:
    """7 billion parameters in eight stages on 24 GB: a whole graph takes more than is left, so devices keep inputs and
    run forwards again. The prediction said that a step takes 10^18 s; the lines take 818."""
    config = config_of(next(row for row in ROWS if row.name == "7B-24"))
    network = home_lines(None, servers=16, volunteers=24, device_gigabytes=24)
    names = [machine.name for machine in network.machines[network.servers :]]
    swarm = Swarm(config, network, no_churn(names), 1, Members)
    swarm.run(8.0)
    plan = predicted(swarm)
    assert plan is not None and 700 < plan.step_s < 1000
