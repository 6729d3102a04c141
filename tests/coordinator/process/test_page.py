"""The live page over HTTP: its policy, its files, its stream, and what the address for everybody leaves out."""

from __future__ import annotations

import json
import math
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.live.history import first_step_after
from coordinator.live.records import PlanRow, StepRow
from coordinator.process.page import FILES
from coordinator.process.store import Store
from protocol.drive.process import free_port
from protocol.run.course import Course
from protocol.run.plan import Plan
from protocol.run.run import RunConfig
from tests.coordinator.live.fake_node import Coordinator

RUN = 'name = "small"\nsteps = 5\n[stages]\ncount = 1\n'
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    process = Coordinator(tmp_path_factory.mktemp("page"), RUN, free_port())
    process.more = ("--page", f"127.0.0.1:{free_port()}")
    process.start()
    yield process
    process.stop(signal.SIGKILL)


def ask(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with _opener.open(request, timeout=30) as found:
            return found.status, {name.lower(): value for name, value in found.headers.items()}, found.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {name.lower(): value for name, value in error.headers.items()}, error.read()


def first_events(url: str) -> dict[str, Any]:
    """The first overview and the first list of members of the stream."""
    found: dict[str, Any] = {}
    with _opener.open(f"{url}/page/events", timeout=30) as stream:
        kind = ""
        while len(found) < 2:
            line = stream.readline().decode().strip()
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found[kind] = json.loads(line.removeprefix("data: "))
    return found


def test_the_browser_may_run_nothing_but_the_page_s_own_files(coordinator: Coordinator) -> None:
    """A strict policy on every answer; every file that the page names is there, once, with a tag."""
    code, headers, body = ask(coordinator.links["http"] + "/")
    assert code == 200 and "unsafe" not in headers["content-security-policy"]
    assert "default-src 'none'" in headers["content-security-policy"]
    text = body.decode()
    assert "<script>" not in text and " style=" not in text and " onclick" not in text
    for name in FILES:
        code, headers, body = ask(f"{coordinator.links['http']}/page/{name}")
        assert code == 200 and body and headers["x-content-type-options"] == "nosniff"
        assert ask(f"{coordinator.links['http']}/page/{name}", **{"If-None-Match": headers["etag"]})[0] == 304
        assert name == "uplot-license.txt" or f"page/{name}" in text
    for name in ("index.html", "../http.py", "..%2Fhttp.py", "app.js/x"):
        assert ask(f"{coordinator.links['http']}/page/{name}")[0] == 404


def test_scripts_make_text_of_what_they_are_told() -> None:
    """No way from a string to markup or code in our own scripts."""
    folder = Path(__file__).parents[3] / "coordinator" / "page"
    for name in ("app.js", "draw.js"):
        text = (folder / name).read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function", "DOMParser"):
            assert way not in text, f"{name}: {way}"


def test_the_stream_tells_the_run_and_its_members(coordinator: Coordinator) -> None:
    """At once, without waiting for a change."""
    found = first_events(coordinator.links["http"])
    assert found["overview"]["run"]["name"] == "small" and found["overview"]["operator"] is True
    assert found["members"] == []
    code, _, body = ask(coordinator.links["http"] + "/page/curve")
    assert (code, json.loads(body)) == (200, {"pieces": [], "validations": []})


def test_the_address_for_everybody_has_the_page_and_nothing_else(coordinator: Coordinator) -> None:
    """No API, no orders, by any host name (something with TLS stands before it)."""
    public = coordinator.links["page"]
    assert public != coordinator.links["http"]
    assert ask(public + "/", Host="train.example")[0] == 200
    assert first_events(public)["overview"]["operator"] is False
    for path in (
        "/api",
        "/api/status",
        "/api/sd",
        "/api/steps",
        "/api/network",
        "/api/ban",
        "/api/invites",
        "/metrics",
    ):
        assert ask(public + path)[0] == 404, path
    assert ask(coordinator.links["http"] + "/", Host="train.example")[0] == 403


def test_wrong_tokens_are_counted_and_slowed_and_the_right_one_still_works(coordinator: Coordinator) -> None:
    """After ten wrong ones in a minute whoever guesses is sent away unread; the operator is not."""
    wrong = [coordinator.post("/api/unban", {"node": "x"}, Authorization=f"Bearer {guess}")[0] for guess in range(15)]
    assert wrong == [401] * 10 + [429] * 5
    assert coordinator.metric("barnraise_coordinator_admin_refused_total") == 15
    right = {"Authorization": f"Bearer {coordinator.links['admin_token']}"}
    assert coordinator.post("/api/unban", {"node": "x"}, **right)[0] == 400


def test_a_timeline_is_the_operators_to_ask_for_and_everybodys_to_see(coordinator: Coordinator) -> None:
    """Without the token nobody is asked what he did; without a plan there is a sentence; before both, no picture."""
    assert coordinator.post("/api/trace", {"seconds": 5}, Authorization="Bearer no")[0] in (401, 429)
    right = {"Authorization": f"Bearer {coordinator.links['admin_token']}"}
    code, words = coordinator.post("/api/trace", {"seconds": 5}, **right)
    assert code == 400 and "no plan yet" in words["error"]
    assert coordinator.post("/api/trace", {"seconds": -5}, **right)[0] == 400
    assert coordinator.post("/api/trace", {"seconds": 1e9}, **right)[0] == 400
    for base in (coordinator.links["http"], coordinator.links["page"]):
        assert ask(f"{base}/page/timeline.svg")[0] == 404
        assert first_events(base)["overview"]["timeline_wall_s"] is None


def test_a_long_history_is_cut_into_even_pieces(tmp_path: Path) -> None:
    """Mean, smallest and largest of each; what is not finite is left out. A step of 10 tokens is reported each second:
    that each was open for two, as steps overlap, makes the rate no other."""
    store = Store(tmp_path, RunConfig())
    store.write([step_row(step, loss=math.nan if step in (7, 999) else float(step)) for step in range(1000)])
    pieces = store.curve(100)
    assert [piece[0] for piece in pieces] == list(range(0, 1000, 16))
    assert pieces[0][1] == pytest.approx((120 - 7) / 15) and pieces[0][2:4] == (0.0, 15.0)
    assert pieces[1][1:4] == (23.5, 16.0, 31.0) and pieces[1][4] == 10.0
    each = store.curve(5000)
    told = store.load().curve
    assert told[0] == (0, 0.0) and told[1] == (16, 23.5), "volunteers are told where it began, and means from there on"
    assert len(each) == 1000 and each[1] == (1, 1.0, 1.0, 1.0, 10.0) and each[999] == (999, None, None, None, 10.0)
    store.close()


def step_row(step: int, generation: int = 1, loss: float = 2.0) -> StepRow:
    return StepRow(
        ledger_generation=generation, step=step, loss=loss, tokens=10, gradient_norm=1.0, clip_factor=1.0,
        skipped=False, learning_rate=1e-3, duration_s=2.0, wall_s=100.0 + step,
    )  # fmt: skip


def test_a_curve_is_read_on_and_not_again(tmp_path: Path) -> None:
    """However the steps come between the looks, the curve is what one look at the end finds; each look reads the rows
    that have come since. After going back it is that of the steps that count."""
    store = Store(tmp_path, RunConfig())
    rows_read = 0

    def counted() -> list[Any]:
        nonlocal rows_read
        curve = store._curve
        before = 0 if curve is None else curve._row
        found = store.curve(8)
        assert store._curve is not None
        rows_read += store._curve._row - before
        return found

    assert counted() == []
    written = 0
    for count in (1, 6, 1, 1, 0, 25, 66):
        store.write([step_row(step, loss=float(step % 7)) for step in range(written, written + count)])
        written += count
        found = counted()
        assert len(found) <= 8
        store._curve, kept = None, store._curve
        whole = store.curve(8)
        assert [piece[0] for piece in found] == [piece[0] for piece in whole]
        assert found == [pytest.approx(piece) for piece in whole]
        store._curve = kept
    assert rows_read == 100
    plan = Plan(generation=9, ledger_generation=9, restore_step=40, stages=(), course=Course((), ()))
    store.write([PlanRow(plan=plan, sentence="", goes_back=True, lost_steps=59)])
    store.write([step_row(step, generation=9, loss=5.0) for step in range(first_step_after(40), 50)])
    found = store.curve(100)
    assert [piece[0] for piece in found] == list(range(50))
    assert [piece[1] for piece in found] == [float(step % 7) for step in range(first_step_after(40))] + [5.0] * (
        50 - first_step_after(40)
    )
    store.close()
