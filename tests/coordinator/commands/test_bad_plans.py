"""Plans that cannot be are one sentence that names the key, and exit code 2, before anybody joins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from protocol.cli import main
from tests.coordinator.commands.test_readme_files import EXAMPLES

TRUSTED = "[audit]\nrate = 0.0\n"
RUNS = {
    "[batch]\nsegments = 40\n[model]\ncontext = 32\n" + TRUSTED: "batch.segments: 40 segments of samples of 32 tokens",
    "[batch]\nsegments = 1000\n": "batch.segments: 1000 is not between 1 and 64",
    "[batch]\nsegments = 3\n": "batch.segments: audits compute whole samples again",
    "[routes]\nskip = 0.9\n[stages]\ncount = 4\n": "routes.skip: 4 of 4 stages, but stage 0 is never left out",
    "[routes]\nskip = 0.1\n[stages]\ncount = 4\n": "routes.skip: 0.1 of 4 stages is less than half a stage",
    "[routes]\nswaps = 1\n": "routes.swaps: a route has fewer than two visits that could be exchanged",
    "[stages]\nfront_servers = 0\n": "stages.front_servers: 0 is not between 1 and 64",
    "[stages]\nchunks = 2\n": 'stages.chunks: more than one needs stages.placement = "interleaved" or "v"',
    "[stages]\ncount = 30\n": "stages.count: 30 is not between 1 and 10",
    '[stages]\ncut = "3 3"\n': "stages.cut: ",
    '[stages]\norder = "static"\n': 'stages.order: expected one of "backward", "forward", "interleaved", "tuned"',
    '[stages]\ncount = "auto"\nchunks = 20\nplacement = "v"\n': 'stages.count: "auto", but no number of stages fits',
    '[wire]\nactivations_up = "d4"\n': (
        'wire.activations_up: "d4" needs stages.back_servers = 0: who takes an output must have the input'
    ),
    '[wire]\nactivations_up = "d4"\nactivations_down = "bf16"\n[stages]\nback_servers = 0\n': (
        'wire.activations_up: "d4" needs wire.activations_down = "q8", in which sums go on'
    ),
    '[wire]\nactivations_down = "d4"\n': "wire.activations_down: ",
}
STATIC = """
from coordinator.planning.schedules.design import Design
from protocol.schedule.ir import Hop

def design(stages, microbatches):
    routes = [{routes}]
    return Design.of(stages, microbatches).place(routes){room}
"""
DOWN, UP = "(Hop(0, 0), Hop(1, 1), Hop(2, 2), Hop(3, 3))", "(Hop(0, 0), Hop(3, 3), Hop(2, 2), Hop(1, 1))"
NETWORK = next(example for example in EXAMPLES if example["kind"] == "network")
ROUTES = {
    "kind": "routes", "stage_of_node": [0, 1, 3], "forward_s": [1, 1, 1], "backward_factor": 2, "loss_factor": 0.1,
    "link_s": [[0, 1, 1], [1, 0, 1], [1, 1, 0]], "heads": [0, 0], "route_stages": 3, "swaps_max": 0,
    "memory": [4, 4, 4], "visits_per_stage": 2,
}  # fmt: skip


SCHEDULE: dict[str, Any] = {
    "kind": "schedule", "stages": 2, "microbatches": 3, "forward_s": [1, 1], "backward_input_s": [1, 1],
    "backward_weight_s": [1, 1], "link_s": [0], "split_backward": False, "activations_max": None,
}  # fmt: skip


def wide(stages: int) -> dict[str, Any]:
    """Lists for so many stages."""
    lists = {key: [1] * stages for key in ("forward_s", "backward_input_s", "backward_weight_s")}
    return {"stages": stages, "microbatches": 1, **lists, "link_s": [0] * (stages - 1)}


def said(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), catch_exceptions=False)


@pytest.mark.parametrize("text", RUNS)
@pytest.mark.parametrize("command", ["run check", "coordinator"])
def test_a_run_that_cannot_be_is_one_sentence(tmp_path: Path, text: str, command: str) -> None:
    """Whoever looks first says it: the check, or the coordinator, before it has a state folder or prints a link."""
    run = tmp_path / "RUN.toml"
    run.write_text(text)
    state = ["--state", str(tmp_path / "state")] if command == "coordinator" else []
    done = said(*command.split(), str(run), *state)
    assert done.exit_code == 2 and not (tmp_path / "state").exists()
    assert done.output.startswith(f"RUN.toml: {RUNS[text]}"), done.output
    assert len(done.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("routes", "room", "sentence"),
    [
        (f"{DOWN}, {UP}", ".in_flight(lambda node: 1 if node else 8)", "schedule: deadlock: 2B0 waits for "),
        ("(Hop(0, 0), Hop(1, 1), Hop(1, 1))", "", "schedule: flow 0: the route visits a stage twice"),
        (DOWN, ".rule(lambda state, ready: 1 / 0)", "mine.py: ZeroDivisionError: division by zero"),
    ],
)
def test_a_static_order_that_cannot_be_is_one_sentence(tmp_path: Path, routes: str, room: str, sentence: str) -> None:
    """Routes down and up with one place each wait for each other, and the cycle is shown; a stage is visited once."""
    file = tmp_path / "mine.py"
    file.write_text(STATIC.format(routes=routes, room=room))
    done = said("schedule", "show", str(file), "--stages", "4", "--microbatches", "4")
    assert done.exit_code == 2 and done.output.startswith(sentence) and len(done.output.splitlines()) == 1


def network(tmp_path: Path, servers: int) -> str:
    """The README's, with so many of its servers."""
    gone = [machine["name"] for machine in NETWORK["machines"] if machine["role"] == "server"][servers:]
    left = {
        **NETWORK,
        "machines": [machine for machine in NETWORK["machines"] if machine["name"] not in gone],
        "links": [link for link in NETWORK["links"] if not {link["source"], link["target"]}.intersection(gone)],
    }
    path = tmp_path / "NETWORK.json"
    path.write_text(json.dumps(left))
    return str(path)


@pytest.mark.parametrize(
    ("text", "servers", "sentence"),
    [
        ('[stages]\ncount = "auto"\n', 1, "stages.count: 1 servers, and one stage alone takes 2"),
        ("[stages]\ncount = 2\n", 2, "stages.count: 2 stages with 1 front and 1 back servers each need 4 servers"),
    ],
)
def test_a_network_without_servers_for_a_stage_is_one_sentence(
    tmp_path: Path, text: str, servers: int, sentence: str
) -> None:
    """`auto` with one server; stages that a route visits and nobody serves."""
    run = tmp_path / "RUN.toml"
    run.write_text(text)
    done = said("simulate", str(run), network(tmp_path, servers))
    assert done.exit_code == 2 and done.output.startswith(sentence) and len(done.output.splitlines()) == 1


def test_auto_with_one_server_is_refused_before_a_demo_begins() -> None:
    done = said("demo", "--set", "stages.count=auto", "--servers", "1")
    assert done.exit_code == 2 and done.output.startswith("stages.count: 1 server")


def test_routes_over_a_stage_without_nodes_are_one_sentence(tmp_path: Path) -> None:
    """Stage 2 has nobody."""
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(ROUTES))
    done = said("plan", "routes", str(file))
    assert done.exit_code == 2
    assert done.output == "problem.json: stage_of_node: every stage from 0 to the highest needs a node\n"


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("schedule", {"forward_s": [1, 1.7e308]}, "forward_s: with the other times and all microbatches more seconds"),
        ("schedule", wide(20_000), "stages: 20000 is more than 1000"),
        (
            "routes",
            {"stage_of_node": [0, 1, 10**12]},
            "stage_of_node: 1000000000000 is not below 20000",
        ),
    ],
)
def test_a_problem_too_large_for_its_tables_is_one_sentence(
    tmp_path: Path, kind: str, changes: dict[str, Any], sentence: str
) -> None:
    """Before memory is taken for as many stages as a number in a file names, or a time is infinite."""
    file = tmp_path / "problem.json"
    file.write_text(json.dumps({**(SCHEDULE if kind == "schedule" else ROUTES), **changes}))
    done = said("plan", kind, str(file))
    assert done.exit_code == 2 and done.output.startswith(f"problem.json: {sentence}"), done.output
    assert len(done.output.splitlines()) == 1


def test_memory_and_swaps_beyond_all_use_are_as_good_as_no_limit(tmp_path: Path) -> None:
    """Whoever writes a one and 400 noughts means that there is room."""
    file = tmp_path / "problem.json"
    plain = {**ROUTES, "stage_of_node": [0, 1, 2]}
    answers = []
    for changes in ({}, {"memory": [4, 10**400, 4], "swaps_max": 0}):
        file.write_text(json.dumps({**plain, **changes}))
        done = said("plan", "routes", str(file), "--json", "--budget-s", "1")
        assert done.exit_code == 0
        answers.append(json.loads(done.output)["makespan_s"])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--stages", "20000", "--microbatches", "1"], "--stages: 20000 is more than 512 nodes"),
        (["--stages", "-3", "--microbatches", "-3"], "--stages: -3 is not at least 1"),
        (["--microbatches", "1"], "microbatches: Chimera sends one down and one up, so it needs at least 2, got 1"),
    ],
)
def test_a_schedule_that_no_picture_shows_is_refused_by_its_option(words: list[str], sentence: str) -> None:
    """A row for each of 20,000 nodes, and a table of the links between any two of them."""
    done = said("schedule", "show", "chimera", *words)
    assert done.exit_code == 2 and done.output == f"{sentence}\n"


@pytest.mark.parametrize("command", ["simulate", "plan run"])
def test_a_picture_without_a_place_is_refused_before_the_work(tmp_path: Path, command: str) -> None:
    """A folder, a file where a folder would have to be, no folder: said at once, not after hours of work."""
    run = tmp_path / "RUN.toml"
    run.write_text("")
    places = {
        tmp_path: "Is a directory",
        run / "picture.svg": "Not a directory",
        tmp_path / "missing" / "picture.svg": "No such file or directory",
    }
    for path, why in places.items():
        # The network is not there either: that nobody has looked for it shows that nothing has begun.
        done = said(*command.split(), str(run), str(tmp_path / "NETWORK.json"), "--svg", str(path))
        assert done.exit_code == 2 and done.output == f"--svg: {path} cannot be written: {why}\n"
