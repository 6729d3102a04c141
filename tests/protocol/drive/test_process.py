"""Logs, signals, the loop's watch, and metrics of a daemon (S12)."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import structlog
import trio
import trio.testing

from protocol.base.limits import REJECT_REASONS
from protocol.base.machine import Count, LinkUp, Log, Told
from protocol.drive.metrics import DAEMON_FAMILIES, Family, Metrics
from protocol.drive.process import (
    PORTS,
    LastingStream,
    free_port,
    listening_socket,
    set_up_logging,
    watch_loop,
    watch_signals,
    write_log,
)
from tests.protocol.samples import ALICE, BOB


@pytest.fixture
def metrics() -> Any:
    """Metrics of a pretended daemon; structlog is put back afterwards."""
    yield Metrics(Family("barnraise_run_loss", "gauge", "Loss in nats per token.", {"run": None, "split": ("train",)}))
    structlog.reset_defaults()


def _value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_lines_are_written_and_counted(metrics: Metrics) -> None:
    """JSON where nobody looks, with the bound fields; lines below the level are dropped; each level is counted."""
    stream = io.StringIO()
    logger = set_up_logging(metrics, stream=stream, level="info", role="server")
    write_log(logger, Log("warning", "volunteer gone", {"node": "x", "after_s": 1.5}))
    logger.debug("unseen")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["event"] == "volunteer gone" and first["role"] == "server" and first["after_s"] == 1.5
    assert first["level"] == "warning" and first["timestamp"].endswith("Z")
    assert "ValueError: broken" in second["exception"]
    assert _value(metrics, "barnraise_log_messages_total", level="warning") == 1
    assert _value(metrics, "barnraise_log_messages_total", level="error") == 1
    assert _value(metrics, "barnraise_log_messages_total", level="debug") == 0


def test_a_terminal_gets_text(metrics: Metrics) -> None:
    """On a terminal a line is for people."""
    stream = io.StringIO()
    set_up_logging(metrics, stream=stream, json=False).info("hello", step=3)
    assert "hello" in stream.getvalue() and not stream.getvalue().startswith("{")


def test_a_terminal_gets_round_figures_and_few_lines_of_what_happens_often(metrics: Metrics) -> None:
    """Floats of four digits, and one line in five seconds of an event that is said to be frequent; JSON has all."""
    now = [100.0]
    numbers = {"loss": 4.3471521735191345, "rate": 0.0012000000000000001, "wall_s": 1763800000.123456, "step": 12345}

    def written(json: bool) -> str:
        stream = io.StringIO()
        logger = set_up_logging(metrics, stream=stream, json=json, seldom={"step": 5.0}, clock=lambda: now[0])
        for now[0] in (100.0, 104.9, 105.0, 109.0):
            logger.info("step", at=now[0], **numbers)
            logger.info("other")
        return stream.getvalue()

    text = written(json=False)
    assert text.count("other") == 4 and text.count("4.347") == 2 and "104.9" not in text
    for shown in ("loss=4.347", "rate=0.0012", "wall_s=1763800000.1", "step=12345", "at=100.0", "at=105.0"):
        assert shown in text.split(), shown
    rows = [json.loads(line) for line in written(json=True).splitlines()]
    assert [row["loss"] for row in rows if row["event"] == "step"] == [numbers["loss"]] * 4


def test_what_a_terminal_has_no_room_for_stands_in_json(metrics: Metrics) -> None:
    """A peer that no way leads to takes one line of 80 columns, whatever became of each way; and not for each peer."""
    ways = "direct: 192.0.2.1:4321: Connection refused; reverse: the coordinator is away; punch: the same; " * 3
    seldom, detail = {"no way to a peer": 60.0}, {"no way to a peer": "ways"}
    written = {}
    for as_json in (False, True):
        stream = io.StringIO()
        logger = set_up_logging(metrics, stream=stream, json=as_json, seldom=seldom, detail=detail, clock=lambda: 1.0)
        for node in (ALICE.node, BOB.node):
            logger.info("no way to a peer", peer=node, reason="the coordinator is away", ways=ways)
        written[as_json] = stream.getvalue().splitlines()
    _, *lines = written[False]
    assert [line[9:] for line in lines] == [
        f'no way to a peer  peer={ALICE.node[:8]}  reason="the coordinator is away"'
    ]
    assert len(lines[0]) <= 80 and [json.loads(line)["ways"] for line in written[True]] == [ways, ways]


def test_no_line_on_a_terminal_is_wider_than_it(metrics: Metrics) -> None:
    """Broken between words, what goes on below the event; ids in their first letters, nothing that is empty or the
    same on every line; a warning says that it is one; a day begins with its date."""
    stream = io.StringIO()
    logger = set_up_logging(metrics, stream=stream, json=False, role="volunteer")
    logger.info("linked", peer=ALICE.node, path="tcp", way="", detail="a way was found " * 8)
    logger.warning("holding back", reason="user", detail="by you until 21:40")
    day, first, *more, last = stream.getvalue().splitlines()
    assert len(day) == 10 and day[4] == day[7] == "-"
    assert f"peer={ALICE.node[:8]} " in first and "way=" not in first and "role=" not in first
    assert more and all(len(line) <= 80 for line in (first, *more)) and all(line[:9].isspace() for line in more)
    assert last[9:] == 'WARNING: holding back  reason=user  detail="by you until 21:40"'


def test_planted_secrets_stay_out(metrics: Metrics) -> None:
    """Seeds, credentials and byte strings never reach the log, whatever they are nested in."""
    stream = io.StringIO()
    logger = set_up_logging(metrics, stream=stream)
    planted = b"planted secret value"
    logger.info("x", seed=planted, credential=planted, invite="planted secret value", digest=planted)
    logger.info("x", nested={"key": "planted secret value", "deep": [planted, (planted,)]}, identity=ALICE)
    logger.info("x", fact=LinkUp(ALICE.node, "volunteer", ALICE.public_key, planted))
    text = stream.getvalue()
    for form in ("planted secret", planted.hex(), ALICE.seed.hex(), repr(ALICE.seed)):
        assert form not in text
    assert planted[:4].hex() in text and "(20 bytes)" in text


def test_metrics_are_served_on_loopback(metrics: Metrics) -> None:
    """Every family is there from the start with its zeros, no `_created` series, and only loopback is bound."""
    port = metrics.serve()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    for family in DAEMON_FAMILIES:
        assert f"# HELP {family.name} " in text and f"# TYPE {family.name} {family.kind}" in text
    for reason in REJECT_REASONS:
        assert f'barnraise_transport_rejected_messages_total{{reason="{reason}"}} 0.0' in text
    assert "_created" not in text and 'protocol="1.' in text
    with socket.create_server(("127.0.0.2", port)):
        pass  # free there, so the daemon did not bind all addresses


def test_counts_of_machines(metrics: Metrics) -> None:
    """`Count` adds to counters, sets gauges, observes in histograms; unknown names and labels are bugs."""
    metrics.apply(Count("barnraise_errors_total", 2.0, (("component", "machine"),)))
    metrics.apply(Count("barnraise_errors_total", 1.0, (("component", "machine"),)))
    metrics.apply(Count("barnraise_run_loss", 2.5, (("run", "demo"), ("split", "train"))))
    metrics.apply(Count("barnraise_run_loss", 2.25, (("run", "demo"), ("split", "train"))))
    metrics.apply(Count("barnraise_transport_round_trip_seconds", 0.2, (("path", "tcp"),)))
    assert _value(metrics, "barnraise_errors_total", component="machine") == 3
    assert _value(metrics, "barnraise_run_loss", run="demo", split="train") == 2.25
    assert _value(metrics, "barnraise_transport_round_trip_seconds_count", path="tcp") == 1
    for bad in (Count("unknown"), Count("barnraise_errors_total", 1.0, (("component", "a node id"),))):
        with pytest.raises(KeyError):
            metrics.apply(bad)


async def test_signals_become_facts() -> None:
    """The first SIGTERM or Ctrl-C asks to drain, any further one to stop."""
    told: list[Told] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(watch_signals, told.append)
        for count, number in enumerate((signal.SIGHUP, signal.SIGTERM, signal.SIGINT), start=1):
            os.kill(os.getpid(), number)
            with trio.fail_after(30):
                while len(told) < count:
                    await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert told == [Told("drain"), Told("stop"), Told("stop")]


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no hang-up here")
async def test_a_terminal_that_closes_asks_once() -> None:
    """It hangs up itself and through its shell, a tenth of a millisecond apart: about one closed terminal in five ended
    at once what should have been finished first. Another signal still says that it must end now."""
    told: list[Told] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(watch_signals, told.append)
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
            await trio.testing.wait_all_tasks_blocked(0.05)
        nursery.cancel_scope.cancel()
    assert told == [Told("drain"), Told("stop")]


async def test_a_blocked_loop_shows(metrics: Metrics) -> None:
    """Blocking the loop for 60 ms is seen as a lag of that length."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: watch_loop(metrics, every_s=0.01))
        await trio.testing.wait_all_tasks_blocked()
        time.sleep(0.07)
        with trio.fail_after(30):
            while not _value(metrics, "barnraise_event_loop_lag_seconds_count"):
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert (_value(metrics, "barnraise_event_loop_lag_seconds_sum") or 0) >= 0.05


def test_free_ports() -> None:
    """A port that is called free can be bound, and no outgoing connection is given it before that."""
    port = free_port()
    assert port in PORTS
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_terminal_that_was_closed_does_not_end_the_process() -> None:
    """After a hang-up a line cannot be written: that is no error, and nobody tries again."""
    tries: list[str] = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            tries.append(text)
            raise OSError(5, "Input/output error")

    stream = LastingStream(Gone())
    assert stream.write("draining\n") == 9
    stream.flush()
    assert stream.write("ended\n") == 6
    assert tries == ["draining\n"]


def test_of_those_who_want_one_port_in_the_same_moment_each_gets_some() -> None:
    """Eight threads begin together at a free port: one has it, the others are elsewhere, and nobody fails. It was only
    looked at before, and a volunteer that began beside another ended over its owner's page."""
    port, start = free_port(), threading.Barrier(8)

    def take(_: int) -> socket.socket:
        start.wait(30)
        return listening_socket("127.0.0.1", (port, 0))

    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        taken = [stack.enter_context(made).getsockname()[1] for made in pool.map(take, range(8))]
        assert taken.count(port) == 1 and len(set(taken)) == 8
        with pytest.raises(OSError, match="in use"):
            listening_socket("127.0.0.1", (port,))
