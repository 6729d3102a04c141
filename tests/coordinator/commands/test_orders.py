"""`barnraise run …`: what is wrong is said in one sentence, and nothing is ordered by mistake."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator.commands import asking, orders
from protocol.base.errors import BadInputError
from protocol.cli import main

IDS = [letter * 51 + end for letter, end in (("a", "a"), ("a", "b"), ("b", "b"))]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, Any]]:
    """A coordinator on this computer with three members; what was posted to it."""
    links = tmp_path / "links.json"
    links.write_text(json.dumps({"admin_token": "t", "http": "http://127.0.0.1:1"}))
    status = {"members": [{"id": one} for one in IDS], "away": [], "links_file": str(links)}
    for module in (asking, orders):
        monkeypatch.setattr(module, "fetch", lambda url: status)
    posted: list[tuple[str, Any]] = []

    def post(base: str, links: Path | None, what: str, order: dict[str, Any]) -> dict[str, Any]:
        posted.append((what, order))
        return {**order, "banned": [order["node"]]}

    monkeypatch.setattr(orders, "post", post)
    return posted


def test_a_few_letters_name_a_member_when_they_fit_one_alone(asked: list[tuple[str, Any]]) -> None:
    """Whom two could mean is not banned by guess."""
    assert CliRunner().invoke(orders.run, ["ban", "bbbbbb", "--lineage"]).exit_code == 0
    assert asked == [("ban", {"node": IDS[2], "reason": "", "lineage": True})]
    for letters, sentence in (("aaaaaa", "2 members"), ("bbb", "no member's id"), ("cccccc", "no member's id")):
        error = CliRunner().invoke(orders.run, ["ban", letters]).exception
        assert isinstance(error, BadInputError) and sentence in str(error)
    assert len(asked) == 1


def test_the_token_comes_from_the_coordinators_own_file(asked: list[tuple[str, Any]], tmp_path: Path) -> None:
    """Found by itself on the coordinator's computer; another file is another run's or none."""
    assert asking.token_of("http://127.0.0.1:1", None) == "t"
    for content in ("", "[]", '{"run": 1}'):
        (tmp_path / "other").write_text(content)
        with pytest.raises(BadInputError, match=r"not a coordinator's links\.json"):
            asking.token_of("http://127.0.0.1:1", tmp_path / "other")
    with pytest.raises(BadInputError, match="No such file"):
        asking.token_of("http://127.0.0.1:1", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        ("http://127.0.0.1:2", "is of the coordinator at http://127.0.0.1:1"),
        ("http://localhost:1", "is of the coordinator at http://127.0.0.1:1"),
        ("http://127.0.0.1.example:1", "is of the coordinator at"),
        ("http://train.example:1", "is not on this computer"),
    ],
)
def test_a_token_is_not_shown_to_another_than_its_own_coordinator(
    asked: list[tuple[str, Any]], base: str, sentence: str
) -> None:
    """Whoever answers at an address may name another coordinator's file as its own."""
    with pytest.raises(BadInputError, match=sentence):
        asking.token_of(base, None)


def test_a_server_that_names_another_coordinators_file_gets_no_token(tmp_path: Path) -> None:
    """It is asked for its status, answers with the path of a file that lies here, and that is all it hears."""
    links = tmp_path / "links.json"
    links.write_text(json.dumps({"admin_token": "secret", "http": "http://127.0.0.1:1"}))
    heard: list[tuple[str, str]] = []

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append((self.path, str(self.headers)))
            self.send_error(500)

        def do_GET(self) -> None:
            heard.append((self.path, str(self.headers)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"links_file": str(links)}).encode())

        def log_message(self, *args: Any) -> None:
            """Silent."""

    with http.server.HTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            done = CliRunner().invoke(main, ["run", "pause", "--url", f"http://127.0.0.1:{server.server_port}"])
        finally:
            server.shutdown()
            thread.join()
    assert done.exit_code == 2 and "is of the coordinator at http://127.0.0.1:1" in done.output
    assert [path for path, _ in heard] == ["/api/status"]
    assert "secret" not in str(heard)


def test_a_member_is_named_by_a_few_letters(asked: list[tuple[str, Any]]) -> None:
    """And an empty name is none."""
    said = [CliRunner().invoke(orders.run, ["name", "bbbbbb", name]).output for name in ("rack 7", "")]
    assert said == ["bbbbbbbb is called rack 7\n", "bbbbbbbb has no name\n"]
    assert asked == [("name", {"node": IDS[2], "name": name}) for name in ("rack 7", "")]


def test_changes_are_shown_with_their_steps(asked: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """For people a line each; with --json what `demo --reference --changes` reads."""
    found = [
        {"key": "optimizer.learning_rate", "value": "0.1", "from_step": 40},
        {"key": "optimizer.decay", "value": '"wsd"', "from_step": -1},
    ]
    monkeypatch.setattr(orders, "fetch", lambda url: {"run": {"state": "training", "changes": found}})
    shown = CliRunner().invoke(orders.run, ["changes"]).output
    assert shown.splitlines() == [
        "optimizer.learning_rate = 0.1  from step 40",
        'optimizer.decay = "wsd"  from the next step on',
    ]
    assert json.loads(CliRunner().invoke(orders.run, ["changes", "--json"]).output) == found
    monkeypatch.setattr(orders, "fetch", lambda url: {"run": {"state": "finished", "changes": found}})
    assert 'wsd"  never: it came when the last step was done' in CliRunner().invoke(orders.run, ["changes"]).output
    monkeypatch.setattr(orders, "fetch", lambda url: {"run": {"state": "training", "changes": []}})
    assert CliRunner().invoke(orders.run, ["changes"]).output == "nothing was changed\n"
