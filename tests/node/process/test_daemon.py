"""The process: every end has a reason, and an exit code that follows from it."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import structlog.testing
import trio
import trio.testing

import node.process.daemon as daemon
import node.process.state as state_folder
from node.data.allowed import Allowed
from node.process.daemon import NodeOptions, run_node
from node.process.driver import Driver
from node.process.ends import GOOD_ENDS, end_in_words
from node.process.journal import Journal, JournalError
from node.process.link_options import link_options
from node.process.metrics import NodeMetrics
from node.process.state import NodeState, only_run
from node.process.store import StoreFullError, TensorStore
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.limits import SEND_QUEUE_BYTES, TENSOR_BYTES_MAX
from protocol.base.machine import CheckpointsFound
from protocol.drive.addresses import OFF
from protocol.drive.limits import Limits
from protocol.messages import Welcome
from protocol.run.course import line
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import CheckpointSection, ModelSection, RunConfig, WireSection
from protocol.trust.identity import Identity
from protocol.trust.membership import Invite, JoinLink, Trust, sign_statement


def link_of_a(role: Literal["server", "volunteer"], not_after: int = 2**40) -> JoinLink:
    """Nobody answers behind it."""
    coordinator = Identity(bytes(range(32)))
    key = coordinator.public_key
    invite = Invite(issuer=key, run_id=bytes(16), role=role, uses=1, not_after=not_after, nonce=bytes(16))
    return JoinLink(("127.0.0.1:9",), sign_statement(invite, coordinator))


OPTIONS = NodeOptions(link=link_of_a("volunteer"), state=Path("nowhere"))


def ending(monkeypatch: pytest.MonkeyPatch, how: Exception | str) -> tuple[int, list[Any]]:
    """Exit code and log of a node whose life ends so, deep inside its tasks."""

    async def life(options: NodeOptions) -> str:
        if isinstance(how, str):
            return how
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise how

    monkeypatch.setattr(daemon, "_run", life)
    with structlog.testing.capture_logs() as logs:
        return run_node(OPTIONS), logs


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (JournalError("full", "x: no space left on the disk"), "full"),
        (JournalError("corrupt", "x is damaged"), "corrupt"),
        (StoreFullError("tensor store full"), "memory"),
    ],
)
def test_a_disk_or_memory_that_gives_out_ends_it_with_a_named_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    """No traceback: one critical line with the reason and the sentence, exit code 1."""
    code, logs = ending(monkeypatch, error)
    assert code == 1
    assert [(line["event"], line["reason"], line["detail"]) for line in logs] == [("stopped", reason, str(error))]


def test_what_cannot_be_used_is_one_sentence_also_from_deep_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--map-port` without a socket, found by a life below the keeper's tasks, ended with a traceback and status 1: the
    service's manager began it again for ever, where status 2 says that somebody has to look."""
    with pytest.raises(BadInputError, match="--map-port: no socket"):
        ending(monkeypatch, BadInputError("--map-port: no socket here listens"))


def test_a_further_device_that_can_be_no_member_any_more_is_left_out(tmp_path: Path) -> None:
    """The link has run out. Those that are members need none, and all were refused for the sake of one that was not;
    while the link holds, whatever is wrong is said."""
    options = replace(OPTIONS, state=tmp_path / "state", link=link_of_a("volunteer", 1_000_000_000), metrics=OFF)
    with ExitStack() as ends, structlog.testing.capture_logs() as logs:
        assert daemon._open_further(options, ends) is None
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert line["event"] == "one device is left out" and "ran out" in line["detail"]
    journal = Journal(options.state)
    journal.set_meta("membership", b"anything")
    journal.close()
    with ExitStack() as ends:
        assert daemon._open_further(options, ends) is not None
    (tmp_path / "file").write_text("")
    with ExitStack() as ends, pytest.raises(BadInputError, match="cannot be used as state folder"):
        daemon._open_further(replace(OPTIONS, state=tmp_path / "file", metrics=OFF), ends)


def test_our_own_mistakes_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no name ends with its traceback."""
    with pytest.raises(ExceptionGroup):
        ending(monkeypatch, AssertionError("a bug"))


@pytest.mark.parametrize(
    ("reason", "code"), [("finished", 0), ("drained", 0), ("stopped", 0), ("refused: banned", 1), ("failed: Apply", 1)]
)
def test_the_exit_code_follows_from_the_reason(monkeypatch: pytest.MonkeyPatch, reason: str, code: int) -> None:
    """0 for an end in peace, 1 for one that somebody should look at."""
    assert ending(monkeypatch, reason)[0] == code


def test_the_end_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line was `reason=drained` alone: what that means for whoever lends or serves stands behind it."""
    for reason in GOOD_ENDS:
        lent, served = (end_in_words(reason, role) for role in ("volunteer", "server"))
        assert " " in lent and " " in served and reason not in (lent, served)
    (said,) = ending(monkeypatch, "drained")[1]
    assert (said["event"], said["reason"]) == ("ended", "drained") and said["detail"].startswith("what was begun is ")


def test_a_folder_of_several_runs_is_not_guessed_about(tmp_path: Path) -> None:
    """One run below or in the folder is it; several are named; none is an empty list later."""
    assert only_run(tmp_path) == tmp_path
    (tmp_path / "a-1" / "step-00000001").mkdir(parents=True)
    assert only_run(tmp_path) == only_run(tmp_path / "a-1") == tmp_path / "a-1"
    (tmp_path / "b-2" / "step-00000001").mkdir(parents=True)
    with pytest.raises(BadInputError, match="holds 2 runs"):
        only_run(tmp_path)
    with pytest.raises(BadInputError, match="is no folder"):
        only_run(tmp_path / "nowhere")


class FakePump:
    """An inbox that is looked at."""

    def __init__(self) -> None:
        self.facts: list[Any] = []

    def put(self, fact: Any) -> None:
        self.facts.append(fact)


async def test_a_server_that_learns_its_run_names_the_checkpoints_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement with an empty disk: the welcome says where the run keeps its checkpoints, and it looks there."""
    config = RunConfig(checkpoint=CheckpointSection(folder=str(tmp_path / "shared")))
    looked: list[Path] = []

    def look(folder: Path, _: object) -> tuple[tuple[int, ...], tuple[str, ...]]:
        looked.append(folder)
        return (4, 2), ("bad",)

    monkeypatch.setattr(state_folder, "look_at_checkpoints", look)
    link = link_of_a("server")
    journal = Journal(tmp_path / "state")
    options = NodeOptions(link=link, state=tmp_path / "state", allowed=Allowed(checkpoints=(tmp_path,)))
    node = daemon._Node(
        daemon._Member(options, NodeState(options.state, link, journal), NodeMetrics("server")), Limits()
    )
    pump: Any = FakePump()
    node._pump = pump
    node._driver = Driver(TensorStore(), NodeMetrics("server"), "server", on_welcome=node._on_welcome)
    transport: Any = SimpleNamespace(options=None)
    node._driver.transport = transport
    welcome = Welcome(membership=b"m", config=config, config_hash=config.config_hash(), vocabulary=1)
    await node._on_welcome(welcome)
    await node._on_welcome(welcome)
    journal.close()
    assert pump.facts == [CheckpointsFound((4, 2))]
    assert [folder.is_relative_to(tmp_path / "shared") for folder in looked] == [True]


def volunteer_in(folder: Path) -> tuple[daemon._Node, NodeState, Journal]:
    """A daemon's node over a state folder of its own, with nothing started."""
    link = link_of_a("volunteer")
    journal = Journal(folder)
    options = NodeOptions(link=link, state=folder)
    state = NodeState(options.state, link, journal)
    return daemon._Node(daemon._Member(options, state, NodeMetrics("volunteer")), Limits()), state, journal


async def test_a_disk_that_hangs_holds_up_what_the_coordinator_says_and_nothing_else(tmp_path: Path) -> None:
    """The journal is busy in a write that does not end: links, pings and timers go on meanwhile."""
    node, state, journal = volunteer_in(tmp_path / "state")
    node._driver = Driver(TensorStore(), NodeMetrics("volunteer"), "volunteer", on_welcome=node._on_welcome)
    transport: Any = SimpleNamespace(options=None)
    node._driver.transport = transport
    config = RunConfig()
    welcome = Welcome(membership=b"m", config=config, config_hash=config.config_hash(), vocabulary=1)
    journal._one_at_a_time.acquire()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node._on_welcome, welcome)
        await trio.testing.wait_all_tasks_blocked()
        assert state.config is None  # written first, then gone by
        journal._one_at_a_time.release()
    assert journal.meta("membership") == b"m" and state.config == config
    journal.close()


async def test_a_disk_that_hangs_holds_up_the_list_of_bans_and_nothing_else(tmp_path: Path) -> None:
    """What a next start shall know is written in a thread: a loop that waited would miss the pings of its links."""
    node, state, journal = volunteer_in(tmp_path / "state")
    node._trust = Trust(bytes(16), bytes(32))
    state.recall_bans(node._trust)
    machine: Any = SimpleNamespace(server=None)
    node._trust.revocations_signed = b"signed"
    journal._one_at_a_time.acquire()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node._watch_disk, machine)
        await trio.testing.wait_all_tasks_blocked()
        assert state.has_news_of_bans(node._trust)
        journal._one_at_a_time.release()
        while state.has_news_of_bans(node._trust):
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert journal.meta("bans") == b"signed"
    journal.close()


def test_links_take_the_largest_tensor_of_the_run() -> None:
    """A small run keeps the protocol's bounds; a large one gets room for a server's part of a stage, and no more: a
    link could hold 128 GB once."""
    assert link_options(RunConfig()).tensor_bytes_max >= TENSOR_BYTES_MAX
    model = ModelSection(layers=32, hidden=4096, heads=32, kv_heads=8, feed_forward=14336, context=4096)
    config = RunConfig(model=model)
    parameters = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    alone = link_options(config)
    assert 4 * parameters < alone.tensor_bytes_max < 6 * parameters  # before the plan is known
    servers = StagePlan((ServerPlan(NodeId("f"), "front", ()), ServerPlan(NodeId("b"), "back", ())))
    stages = link_options(config, 128_256, Plan(1, 1, -1, (servers,) * 16, line(66, 16)))
    assert 4 * parameters / 32 < stages.tensor_bytes_max < 2.5 * 4 * parameters / 32  # one stage has the embedding
    assert stages.window_bytes == 2 * stages.tensor_bytes_max
    assert parameters / 32 < stages.elements_max < 2.5 * parameters / 32


@pytest.mark.parametrize("parameters", ["p12", "bf16", "fp32"])
@pytest.mark.parametrize(("stage_count", "servers"), [(16, 2), (8, 2), (8, 1), (4, 2)])
def test_two_whole_versions_and_an_activation_may_wait_for_one_peer(
    parameters: Literal["p12", "bf16", "fp32"], stage_count: int, servers: int
) -> None:
    """Of 8 B in 8 stages of one server two versions are 2.33 GiB in packed form: a fixed gibibyte cut off everybody who
    joined, as too slow, before a byte had left."""
    model = ModelSection(layers=32, hidden=4096, heads=32, kv_heads=8, feed_forward=14336, context=4096)
    config = RunConfig(model=model, wire=WireSection(parameters=parameters))
    some = StagePlan(tuple(ServerPlan(NodeId(str(number)), "both", ()) for number in range(servers)))
    plan = Plan(1, 1, -1, (some,) * stage_count, line(66, stage_count))
    values = 8_030_000_000 // (stage_count * servers)
    bits = {"p12": 10, "bf16": 16, "fp32": 32}[parameters]
    activation = 4 * config.batch.samples * model.context * model.hidden
    assert link_options(config, 128_256, plan).send_queue_bytes > 2 * values * bits // 8 + activation
    assert link_options(RunConfig(), 4096).send_queue_bytes == SEND_QUEUE_BYTES


@pytest.mark.slow
def test_what_is_loaded_is_not_looked_at_again_by_the_garbage_collector() -> None:
    """A full collection of a daemon then looks at what has come since, not at all modules; garbage still goes."""
    script = (
        "import gc, weakref, node.process.daemon\n"
        "from protocol.base.loading import keep_what_is_loaded\n"
        "loaded = len(gc.get_objects())\n"
        "keep_what_is_loaded()\n"
        "class Loop: pass\n"
        "loop = Loop(); loop.itself = loop; seen = weakref.ref(loop); del loop; gc.collect()\n"
        "print(loaded, gc.get_freeze_count(), len(gc.get_objects()), seen() is None)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    loaded, kept, left, gone = done.stdout.split()
    assert int(kept) > 0.9 * int(loaded) > 10 * int(left) and gone == "True", done.stdout + done.stderr


def test_a_node_says_once_where_its_state_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In full, whatever the command line said: `barnraise export` wants these folders."""

    async def life(*_: object) -> str:
        return "stopped"

    monkeypatch.setattr(daemon, "live", life)
    monkeypatch.setattr(daemon, "set_up_logging", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    link = link_of_a("server")
    with structlog.testing.capture_logs() as logs:
        assert run_node(NodeOptions(link=link, state=Path("s1"))) == 0
    assert [line["folder"] for line in logs if line["event"] == "state"] == [str(tmp_path / "s1")]


async def test_a_state_folders_sockets_are_found_at_the_addresses_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that stand for all interfaces: what others are told follows the computer, not the time of its start."""
    hosts = ["198.51.100.5"]
    monkeypatch.setattr(
        "psutil.net_if_addrs", lambda: {"eth0": [SimpleNamespace(family=socket.AF_INET, address=hosts[0])]}
    )
    _, state, journal = volunteer_in(tmp_path)
    assert state.addresses() == ()
    listeners, first = await state.listen((("0.0.0.0", 0),), ())
    port = listeners[0].socket.getsockname()[1]
    assert first == state.addresses() == (f"198.51.100.5:{port}",)
    hosts[0] = "198.51.100.6"
    assert state.addresses() == (f"198.51.100.6:{port}",)
    for listener in listeners:
        await listener.aclose()
    journal.close()
