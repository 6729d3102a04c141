"""`barnraise status` as a person reads it."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import coordinator.commands.status as status_module
from coordinator.commands.status import describe, status
from coordinator.live.orders import NameNode
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.machine import Ordered
from protocol.cli import main
from protocol.messages import NodeReport
from tests.coordinator.live.desk import Desk
from tests.coordinator.live.test_measured_links import A, admitted, figures, report


@pytest.fixture
def answers() -> Iterator[tuple[str, dict[str, tuple[int, Any]]]]:
    """A server's URL, and what it answers by path."""
    content: dict[str, tuple[int, Any]] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = content.get(self.path, (404, {"error": "not here"}))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args: Any) -> None:
            """Silent."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", content
    server.shutdown()
    thread.join()
    server.server_close()


def measured() -> Desk:
    desk = admitted()
    desk.say(A, report(figures("s0", path="quic", loss=0.012), figures("s1", round_trip_s=-1.0)))  # type: ignore[arg-type]
    desk.say("s0", report(figures(A)))
    desk.say("s2", report(figures("s3")))  # type: ignore[arg-type]
    desk.say("s3", report(figures("s2")))  # type: ignore[arg-type]
    return desk


def test_every_link_is_shown_once_with_its_path(answers: tuple[str, dict[str, tuple[int, Any]]]) -> None:
    """As the volunteer tells it, with round trip, loss and speed both ways; what is not known is a dash."""
    url, content = answers
    desk = measured()
    content["/api/status"] = (200, desk.machine.status(desk.now))
    result = CliRunner().invoke(main, ["status", url])
    assert result.exit_code == 0, result.output
    rows = sorted(result.output.split("measured\n")[1].splitlines(), reverse=True)
    assert len(rows) == 3
    told = "volunteer stage 0 - server stage 0 front 0 quic 40.0 ms 1.2 % 8.0 16.0 1 s ago"
    assert " ".join(rows[0].split()) == told
    assert " - " in rows[1] and "tcp" in rows[1]
    assert rows[2].startswith("server")


def test_a_member_is_called_what_its_operator_calls_it(answers: tuple[str, dict[str, tuple[int, Any]]]) -> None:
    """With its place behind it, in the table and on links, which are the same rows as before."""
    url, content = answers
    desk = measured()
    for node, name in ((A, "anna"), (NodeId("s0"), "rack 7")):
        desk.feed(Ordered(NameNode(node, name)))
    content["/api/status"] = (200, desk.machine.status(desk.now))
    output = CliRunner().invoke(main, ["status", url]).output
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert any(line.startswith("anna, stage 0 ") for line in lines), output
    assert "anna, stage 0 - rack 7, stage 0 front 0 quic 40.0 ms 1.2 % 8.0 16.0 1 s ago" in lines
    assert len(output.split("measured\n")[1].splitlines()) == 3


def test_a_server_that_is_away_stands_in_the_table(answers: tuple[str, dict[str, tuple[int, Any]]]) -> None:
    """With since when; and the run's line says that it waits for it."""
    url, content = answers
    desk = measured()
    desk.drop("s2")
    content["/api/status"] = (200, desk.machine.status(desk.now + 7.0))
    lines = CliRunner().invoke(main, ["status", url]).output.splitlines()
    assert lines[0].startswith("run demo: waiting")
    assert lines[1] == "  waiting for stage 1 front 0 (s2) to come back (for 7 s)"
    assert "server stage 1 front 0 s2 away (for 7 s)" in [" ".join(line.split()) for line in lines]


def test_what_one_end_does_not_know_is_taken_from_the_other(answers: tuple[str, dict[str, tuple[int, Any]]]) -> None:
    """A volunteer has measured nothing in one direction; its server has."""
    url, content = answers
    desk = admitted()
    desk.say(A, report(figures(NodeId("s0"), received_bytes_per_s=0.0, round_trip_s=-1.0)))
    desk.say("s0", report(figures(A, sent_bytes_per_s=3e6, received_bytes_per_s=9e9)))
    desk.say("s1", report(figures(A)))  # of which the volunteer says nothing
    content["/api/status"] = (200, desk.machine.status(desk.now))
    rows = CliRunner().invoke(main, ["status", url]).output.split("measured\n")[1].splitlines()
    assert [" ".join(row.split()) for row in rows] == [
        "server stage 0 back 0 - volunteer stage 0 tcp 40.0 ms - 8.0 16.0 1 s ago",
        "volunteer stage 0 - server stage 0 front 0 tcp 40.0 ms - 8.0 24.0 1 s ago",
    ]


def test_no_line_is_wider_than_a_hundred_columns(answers: tuple[str, dict[str, tuple[int, Any]]]) -> None:
    """What a member waits for is cut with a mark; the API has all of it."""
    url, content = answers
    desk = measured()
    words = "step 250: forward of microbatch 2 by 5p3e75i6; 6 weight gradients; stage 1 to finish the gradients"
    desk.say(A, NodeReport(state="training", waiting_for=words, counters={}))
    content["/api/status"] = (200, desk.machine.status(desk.now))
    lines = CliRunner().invoke(main, ["status", url]).output.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("server stage 1 front 0 - stage 1 back 0 ") for line in lines)  # whole
    (line,) = [line for line in lines if "microbatch" in line]
    assert len(line) == 100 and line.endswith("6 weigh…")
    answer = json.loads(CliRunner().invoke(main, ["status", url, "--json"]).output)
    assert words in [member["waiting_for"] for member in answer["members"]]


def test_on_a_terminal_no_line_is_wider_than_it() -> None:
    """Rows of 100 columns were broken within a figure in a terminal of 80, and sentences within a word."""
    desk = measured()
    words = "step 250: forward of microbatch 2 by 5p3e75i6; 6 weight gradients"
    desk.say(A, NodeReport(state="training", waiting_for=words, counters={}))
    desk.drop("s2")
    status = desk.machine.status(desk.now + 7.0)
    status["run"]["alerts"] = [f"stage 0 front 0: the data cannot be read; {words}; it is tried again there"]
    status["links_file"] = "/home/somebody/.local/state/barnraise/coordinator/demo/links.json"
    lines = describe(status, 80).splitlines()
    assert max(map(len, lines)) <= 80, lines
    (head,) = (number for number, line in enumerate(lines) if line.startswith("link "))
    assert lines[head].split() == ["link", "path", "round", "trip", "loss", "Mbit/s", "back"]
    told = "volunteer stage 0 - stage 0 front 0 quic 40.0 ms 1.2 % 8.0 16.0"
    assert told in [" ".join(line.split()) for line in lines[head:]], "the ends are whole, and so is each figure"
    assert words in " ".join(" ".join(lines[:6]).split()), "a sentence is broken between words, and whole"


def test_watching_goes_on_until_it_is_interrupted(
    answers: tuple[str, dict[str, tuple[int, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status anew each time, also over a coordinator that is away for a while; Ctrl-C is a good end."""
    url, content = answers
    desk = measured()
    content["/api/status"] = (200, desk.machine.status(desk.now))
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            content["/api/status"] = (500, {"error": "the coordinator is tired"})
        elif len(slept) == 2:
            desk.report(0)
            content["/api/status"] = (200, desk.machine.status(desk.now))
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    result = CliRunner().invoke(main, ["status", url, "--watch", "0.5"])
    assert result.exit_code == 0 and slept == [0.5, 0.5, 0.5]
    first, second, third = (result.output.find(text) for text in ("0 of 5 steps", "is tired", "1 of 5 steps"))
    assert 0 < first < second < third
    assert CliRunner().invoke(main, ["status", url, "--watch", "--json"]).exit_code == 2
    content["/api/status"] = (500, {"error": "the coordinator is tired"})
    assert CliRunner().invoke(main, ["status", url, "--watch"]).exit_code == 2


def test_people_are_told_how_many_steps_are_done(answers: tuple[str, dict[str, tuple[int, Any]]]) -> None:
    """0 before the first, all at the end, though the API counts from 0; and nothing is "not yet" when all is over."""
    url, content = answers
    desk = measured()

    def said() -> list[str]:
        content["/api/status"] = (200, desk.machine.status(desk.now))
        return CliRunner().invoke(main, ["status", url]).output.splitlines()

    assert said()[0] == "run demo: training, 0 of 5 steps, 0 tokens/s"
    for step in range(5):
        desk.report(step)
    assert desk.machine.status(desk.now)["run"]["step"] == 4
    for member in desk.machine.roster.all():
        desk.drop(member.peer)
    assert said() == [
        "run demo: finished, 5 of 5 steps, loss 4.600",
        "",
        "Everybody has left: links are shown while their computers take part.",
    ]


def test_the_network_is_written_for_the_planner(
    answers: tuple[str, dict[str, tuple[int, Any]]], tmp_path: Path
) -> None:
    """`--network FILE` writes the API's answer; its refusal is a sentence and the exit code of bad input."""
    url, content = answers
    file = tmp_path / "NETWORK.json"
    content["/api/network"] = (404, {"error": "network: no link is measured yet"})
    result = CliRunner().invoke(main, ["status", url, "--network", str(file)])
    assert result.exit_code == 2 and "no link is measured yet" in result.output and not file.exists()
    content["/api/network"] = (200, {"kind": "network", "machines": [], "links": []})
    result = CliRunner().invoke(main, ["status", url, "--network", str(file)])
    assert result.exit_code == 0 and json.loads(file.read_text())["kind"] == "network"
    result = CliRunner().invoke(main, ["status", url, "--network", "/nowhere/N.json"])
    assert result.exit_code == 2 and "--network: /nowhere/N.json cannot be written: " in result.output


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "file:///etc/passwd", "nonsense"])
def test_an_address_where_nobody_answers_is_named(url: str) -> None:
    """Exit code 2 and a sentence with the address."""
    result = CliRunner().invoke(main, ["status", url])
    assert result.exit_code == 2 and url in result.output


@pytest.mark.parametrize(
    ("papers", "said"),
    [
        (None, "links.json: No such file"),
        ("nonsense", "links.json: not a coordinator's links.json"),
        ('{"run_id": "ff", "server": "a", "volunteer": "b"}', "links.json: the links of another run"),
    ],
)
def test_links_that_cannot_be_read_are_named(
    answers: tuple[str, dict[str, tuple[int, Any]]], tmp_path: Path, papers: str | None, said: str
) -> None:
    """The file and what is wrong with it, and exit code 2; without its name, where to look."""
    url, content = answers
    desk = measured()
    file = tmp_path / "links.json"
    if papers is not None:
        file.write_text(papers)
    content["/api/status"] = (200, {**desk.machine.status(desk.now), "links_file": str(file)})
    result = CliRunner().invoke(main, ["status", url, "--links"])
    assert result.exit_code == 2 and said in result.output
    content["/api/status"] = (200, desk.machine.status(desk.now))
    result = CliRunner().invoke(main, ["status", url, "--links"])
    assert result.exit_code == 2 and "--state folder" in result.output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_that_nothing_runs_here_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns broke the address in two."""

    def nobody(_: str) -> Any:
        raise BadInputError("http://127.0.0.1:8470/api/status: nobody answers there: Connection refused")

    monkeypatch.setattr(status_module, "fetch", nobody)
    monkeypatch.setattr(status_module, "status_of_lent_computers", lambda *_: None)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        status.main([], standalone_mode=False)
    assert ended.value.code == status_module.NOT_RUNNING
    lines = terminal.getvalue().splitlines()
    assert len(lines) > 1 and all(len(line) <= 80 for line in lines)
