"""The coordinator as a process, over loopback: a whole run with fake nodes, SIGKILL in the middle, and bad peers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from coordinator.process import sockets
from protocol.base.errors import BadInputError
from protocol.base.limits import REPORT_COUNTERS
from protocol.cli import main
from protocol.drive.process import free_port
from protocol.drive.transport import DialError
from protocol.messages import (
    Bye,
    DataReady,
    NodeReport,
    PlanChanged,
    Refused,
    RunFinished,
    StepReportStored,
    Welcome,
)
from protocol.trust.membership import JoinLink, Membership, open_credential
from tests.coordinator.live.desk import DATA, step_report
from tests.coordinator.live.fake_node import PATIENCE_S, Coordinator, FakeNode, nodes

RUN = 'name = "small"\nsteps = 5\n[stages]\ncount = 1\n'
"""One stage, a front and a back server, five steps."""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    process = Coordinator(tmp_path, RUN, free_port())
    process.start()
    yield process
    if process.process.poll() is None:
        process.stop(signal.SIGKILL)


@pytest.mark.slow
def test_a_run_from_the_first_join_over_sigkill_to_the_end(coordinator: Coordinator) -> None:
    """Two servers and a volunteer join by the printed links; the coordinator is killed after step 2 and started again;
    the nodes come back with their memberships, the same ledgers go on, and the last step ends the run for all."""

    async def run() -> None:
        async with nodes(coordinator, "server", "server", "volunteer") as (front, back, volunteer):
            await front.join()
            welcome = await front.hears(Welcome)
            assert welcome.config.name == "small" and welcome.vocabulary == 0
            assert welcome.config_hash == welcome.config.config_hash()
            membership = open_credential(welcome.membership, front.link.coordinator_key)
            assert isinstance(membership, Membership) and membership.node == front.node
            await back.join()
            plan = (await back.hears(PlanChanged)).plan
            assert (await front.hears(PlanChanged)).plan == plan
            assert set(plan.server_nodes()) == {front.node, back.node} and plan.decider == front.node
            await volunteer.join(tokens_per_s=10.0)
            front.say(DATA)
            assert (await volunteer.hears(Welcome)).vocabulary == 259
            assert (await volunteer.hears(PlanChanged)).stage == 0
            volunteer.say(NodeReport(state="training", waiting_for="", counters={REPORT_COUNTERS[0]: 3.0}))
            for step in range(3):
                front.say(step_report(step, plan.ledger_generation))
            for step in range(3):
                await front.hears(StepReportStored, step=step)
            status = await trio.to_thread.run_sync(coordinator.get, "/api/status")
            assert status["run"]["state"] == "training" and status["run"]["step"] == 2
            assert [row["step"] for row in status["losses"]] == [0, 1, 2]
            assert {member["id"] for member in status["members"]} == {front.node, back.node, volunteer.node}

            coordinator.stop(signal.SIGKILL)
            for node in (front, back, volunteer):
                await node.is_down()
            await trio.to_thread.run_sync(coordinator.start)
            marks = [len(node.heard) for node in (front, back, volunteer)]
            held = {"stage": 0, "version": 3, "held_generation": plan.ledger_generation}
            await front.join(**held, shard=0)
            await back.join(**held, shard=1)
            await volunteer.join(stage=0)
            again = (await front.hears(PlanChanged, marks[0])).plan
            assert again.generation > plan.generation and again.ledger_generation == plan.ledger_generation
            assert again.stages == plan.stages
            assert (await volunteer.hears(Welcome, marks[2])).vocabulary == 259
            for step in range(2, 5):
                front.say(step_report(step, plan.ledger_generation))
            for node, mark in zip((front, back, volunteer), marks, strict=True):
                await node.hears(RunFinished, mark)

            steps = await trio.to_thread.run_sync(coordinator.get, "/api/steps?from=1")
            assert [row["step"] for row in steps["steps"]] == [1, 2, 3, 4]
            assert (await trio.to_thread.run_sync(coordinator.get, "/api/status"))["run"]["state"] == "finished"
            assert await trio.to_thread.run_sync(coordinator.stop) == 0
            assert (await back.hears(Bye)).reason == "the coordinator stops"

    trio.run(run)


@pytest.mark.slow
def test_links_are_kept_for_scripts_and_stay_the_same(coordinator: Coordinator) -> None:
    """links.json is for the owner alone; both links parse, name the run, and survive a restart; so does the key. The
    status says where it lies and reads it for its owner; the API never tells what is in it."""
    path = coordinator.folder / "state" / "links.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = coordinator.links
    assert before["printed"]["server"] == before["server"] and "admin_token" not in before["printed"]
    for role in ("server", "volunteer"):
        link = JoinLink.parse(before[role])
        assert (link.role, link.run_id.hex()) == (role, before["run_id"])
        assert link.addresses == (f"127.0.0.1:{coordinator.port}",)
    shown = CliRunner().invoke(main, ["status", before["http"]]).output
    assert str(path) in shown and before["server"] not in shown
    assert before["server"] not in coordinator.text("/api/status")
    printed = CliRunner().invoke(main, ["status", before["http"], "--links"]).output
    assert (
        f"barnraise server '{before['server']}'\n" in printed and f"barnraise join '{before['volunteer']}'\n" in printed
    )
    assert coordinator.stop() == 0
    coordinator.start()
    assert [coordinator.links[role] for role in ("server", "volunteer")] == [before["server"], before["volunteer"]]
    assert coordinator.links["admin_token"] != before["admin_token"]


@pytest.mark.slow
def test_a_second_coordinator_on_the_same_folder_is_refused(coordinator: Coordinator) -> None:
    """Exit 1 and one sentence; the first does not notice."""
    second = Coordinator(coordinator.folder, RUN, free_port())
    done = subprocess.run(second.command(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r"Error: .*state: another coordinator is running .*\n", done.stderr)
    assert coordinator.get("/api/status")["run"]["state"] == "waiting"


def test_bad_input_exits_with_2_and_one_line(coordinator: Coordinator) -> None:
    """A wrong key, a changed run, a taken port: the sentence and nothing else."""
    other = coordinator.folder / "other"
    other.mkdir()
    wrong = Coordinator(other, "[model]\nlayerz = 2\n", free_port())
    taken = Coordinator(other, RUN, coordinator.port)
    for start, sentence in (
        (wrong, 'RUN.toml: model.layerz: unknown key (did you mean "layers"?)\n'),
        (taken, f"--listen 127.0.0.1:{coordinator.port}: "),
    ):
        start.toml.write_text(RUN if start is taken else "[model]\nlayerz = 2\n")
        done = subprocess.run(start.command(), capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1, done.stderr

    async def run() -> None:
        async with nodes(coordinator, "server") as (node,):
            await node.join()
            await node.hears(Welcome)

    trio.run(run)
    assert coordinator.stop() == 0
    coordinator.toml.write_text(RUN.replace("5", "6"))
    done = subprocess.run(coordinator.command(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and "steps was 5, is 6" in done.stderr


@pytest.mark.slow
def test_a_run_that_no_server_has_joined_takes_its_edited_file(coordinator: Coordinator) -> None:
    """The log says what changed; the links stay, unless there are more places now than the servers' is good for."""
    before = coordinator.links
    assert coordinator.stop() == 0
    coordinator.toml.write_text(RUN.replace("5", "6"))
    coordinator.start()
    assert "nothing was computed by it yet: steps was 5, is 6" in (coordinator.folder / "log").read_text()
    assert coordinator.metric('barnraise_run_target_steps{run="small"}') == 6
    assert [coordinator.links[role] for role in ("server", "volunteer")] == [before["server"], before["volunteer"]]
    assert coordinator.stop() == 0
    coordinator.toml.write_text(RUN.replace("count = 1", "count = 8"))
    coordinator.start()
    assert coordinator.links["server"] != before["server"] and coordinator.links["volunteer"] == before["volunteer"]


@pytest.mark.slow
def test_a_host_that_nobody_knows_is_named_with_its_option(tmp_path: Path) -> None:
    """Names are looked up by three libraries, each with its own way to fail: still one sentence and exit code 2."""
    for option in ("--http", "--metrics", "--listen"):
        refused = Coordinator(tmp_path, RUN, free_port())
        command = [*refused.command(), option, "nohost.invalid:80"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(rf"{option}:? nohost\.invalid:80: (?!Unknown error).+\n", done.stderr), done.stderr


async def test_the_usual_port_in_use_is_no_riddle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gave no --listen is told of it; who gave one is told what is wrong with it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = (("127.0.0.1", taken.getsockname()[1]),)
        with pytest.raises(BadInputError, match=r"^--listen 127"):
            await sockets.listen(where)
        monkeypatch.setattr(sockets, "DEFAULT_LISTEN", where)
        with pytest.raises(BadInputError, match=f"^port {where[0][1]} is in use .* `--listen HOST:PORT` chooses"):
            await sockets.listen(where)


def test_bad_peers_are_closed_counted_and_disturb_nobody(coordinator: Coordinator) -> None:
    """Random bytes, a volunteer that sends what only servers may, a message out of turn: each is closed and counted."""

    async def run() -> None:
        async with nodes(coordinator, "server", "volunteer", "server") as (good, forger, hasty):
            await good.join()
            await good.hears(Welcome)
            with socket.create_connection(("127.0.0.1", coordinator.port), timeout=PATIENCE_S) as raw:
                raw.sendall(os.urandom(4096))
                assert await trio.to_thread.run_sync(raw.recv, 1) == b""
            await hasty.join()
            await hasty.hears(PlanChanged)
            hasty.say(DataReady(vocabulary=0, data_hash="", token_count=0))
            await hasty.is_down()
            await forger.join(role="server")
            await forger.is_down()
            good.say(DATA)
            assert (await good.hears(PlanChanged)).stage == 0
            await good.hears(Welcome, vocabulary=259)

    trio.run(run)
    text = coordinator.metrics()
    refused = re.findall(r'barnraise_transport_rejected_messages_total\{reason="(\w+)"\} ([1-9])', text)
    assert ("unexpected", "2") in refused and len(refused) >= 2, refused


@pytest.mark.slow
def test_a_coordinator_whose_disk_fails_ends_and_says_which_file(coordinator: Coordinator) -> None:
    """It can promise nothing any more: no welcome, exit 1, one sentence; with the disk back it goes on."""

    async def run() -> None:
        async with nodes(coordinator, "server") as (node,):
            resource.prlimit(coordinator.process.pid, resource.RLIMIT_FSIZE, (8192, 8192))
            # It may have found out before we call, by a line for its own log.
            with contextlib.suppress(DialError):
                await node.join()
                await node.is_down()
            assert not node.heard

    trio.run(run)
    assert coordinator.process.wait(PATIENCE_S) == 1
    assert coordinator.process.stdout is not None
    coordinator.process.stdout.close()
    last = (coordinator.folder / "log").read_text().splitlines()[-1]
    assert re.fullmatch(r"Error: .*coordinator\.sqlite3: .*", last), last
    coordinator.start()
    assert coordinator.get("/api/status")["run"]["state"] == "waiting"


def test_the_operator_bans_by_the_api(coordinator: Coordinator) -> None:
    """Only with the token; the node is told, closed, and refused when it comes again."""

    async def run() -> None:
        async with nodes(coordinator, "server") as (node,):
            await node.join()
            await node.hears(Welcome)
            order = {"node": node.node, "reason": "sent garbage"}
            token = {"Authorization": f"Bearer {coordinator.links['admin_token']}"}

            def post(*arguments: object, **headers: str) -> int:
                return coordinator.post("/api/ban", *arguments, **headers)[0]

            assert post(order) == 401
            assert post(order, Authorization="Bearer x") == 401
            assert post({"node": "short"}, **token) == 400
            assert post({"node": node.node, "reason": "x" * 5000}, **token) == 400
            assert post(order, **token) == 200
            assert (await node.hears(Refused)).reason == "banned: sent garbage"
            await node.is_down()
            node.heard.clear()
            await node.join()
            assert (await node.hears(Refused)).reason == "banned: sent garbage"

    trio.run(run)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ban", "unban", "uninvite"])
def test_no_order_is_said_to_be_done_that_the_disk_did_not_take(coordinator: Coordinator, order: str) -> None:
    """The coordinator ends, and comes back without it: whoever ordered it must not have been told that it is done."""
    token = {"Authorization": f"Bearer {coordinator.links['admin_token']}"}
    node = {"node": "a" * 52}
    assert order != "unban" or coordinator.post("/api/ban", node, **token)[0] == 200
    invite = {"invite": coordinator.get("/api/invites", **token)["invites"][0]["invite"]}
    resource.prlimit(coordinator.process.pid, resource.RLIMIT_FSIZE, (8192, 8192))
    with contextlib.suppress(OSError, http.client.HTTPException):  # no answer at all is none that it is done
        answer = urllib.request.Request(
            f"{coordinator.links['http']}/api/{order}",
            json.dumps(invite if order == "uninvite" else node).encode(),
            token,
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(answer, timeout=PATIENCE_S) as done:
            raise AssertionError(f"{done.status}: {done.read()!r}")
    assert coordinator.process.wait(PATIENCE_S) == 1
    assert coordinator.process.stdout is not None
    coordinator.process.stdout.close()


def test_a_servers_lineage_is_not_banned(coordinator: Coordinator) -> None:
    """All servers come by one link: the run would lose every place at once. Nobody is banned, and a sentence
    says why; a volunteer's lineage still is."""

    async def run() -> None:
        async with nodes(coordinator, "server", "server", "volunteer") as (one, other, volunteer):
            await one.join()
            await other.join()
            plan = (await one.hears(PlanChanged)).plan
            (one if plan.decider == one.node else other).say(DATA)
            await volunteer.join()
            await volunteer.hears(Welcome)
            token = {"Authorization": f"Bearer {coordinator.links['admin_token']}"}

            def ban(node: FakeNode) -> tuple[int, dict[str, object]]:
                return coordinator.post("/api/ban", {"node": node.node, "lineage": True}, **token)

            code, said = ban(one)
            assert code == 400
            assert str(said["error"]).startswith(
                f"{one.node[:8]}: 2 servers came by its link, and to ban a whole lineage"
            )
            assert len(coordinator.get("/api/status")["members"]) == 3
            assert ban(volunteer) == (200, {"banned": [volunteer.node]})
            assert (await volunteer.hears(Refused)).reason == "banned: by the operator"

    trio.run(run)


def test_the_api_answers_only_what_it_knows_and_who_asks_by_loopback(coordinator: Coordinator) -> None:
    """Unknown paths, wrong numbers, and another site's name for 127.0.0.1."""
    assert "/api/status" in coordinator.text("/api")
    for path, code in (("/api/nothing", 404), ("/api/steps?from=x", 400), ("/api/steps?count=100000", 400)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            coordinator.get(path)
        with caught.value:
            assert caught.value.code == code
    with pytest.raises(urllib.error.HTTPError) as caught:
        coordinator.get("/api/status", Host="evil.example")
    with caught.value:
        assert caught.value.code == 403
    assert coordinator.get("/api/steps") == {"steps": []}
    assert coordinator.metric('barnraise_coordinator_http_requests_total{code="403",route="/api/status"}') == 1


@pytest.mark.slow
def test_metrics_pass_promtool(coordinator: Coordinator) -> None:
    """`promtool check metrics` has no complaint; names and labels are those of the documentation."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: install Debian's package prometheus"
    text = coordinator.metrics()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_metric_is_there_from_the_start(coordinator: Coordinator) -> None:
    """Children exist before anything happens, so that 0 is visible; no label holds a node."""
    text = coordinator.metrics()
    for line in (
        'barnraise_run_state{run="small",state="waiting"} 1.0',
        'barnraise_run_step{run="small"} -1.0',
        'barnraise_run_target_steps{run="small"} 5.0',
        'barnraise_coordinator_stage_nodes{run="small",stage="0"} 0.0',
        'barnraise_coordinator_node_leaves_total{reason="banned"} 0.0',
        'barnraise_run_bad_steps_total{reason="rolled_back",run="small"} 0.0',
    ):
        assert line in text.splitlines(), line
    assert not re.search(r'="[a-z2-7]{52}"', text)
    stages = set(re.findall(r'^barnraise_coordinator_\w+\{.*stage="(\d+)"', text, re.MULTILINE))
    assert stages == {"0"}, "a stage that the model could have, and the run has not, looks like an empty one"
