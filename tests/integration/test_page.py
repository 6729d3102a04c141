"""The live page in a real browser, beside a real run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from coordinator.process.page import FILES
from tests.integration.browser import browser
from tests.integration.swarm import RUN, Swarm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WIDTHS = (360, 1280, 2560)


def test_the_page_shows_a_run_and_whom_it_waits_for(tmp_path: Path) -> None:
    """Loss, speed, stages, members and events fill by themselves; no script fails, nothing breaks the policy; nothing
    is wider than the screen, light or dark; when a server is killed the page says in words who is waited for."""
    with Swarm(tmp_path, RUN.replace('"attacked"', '"shown"')) as swarm, browser(tmp_path) as page:
        page.open(swarm.links["http"] + "/")
        page.until("document.querySelector('#state').textContent === 'training'")
        page.until("document.querySelectorAll('#rows tr').length === 4")
        page.until("document.querySelectorAll('.chart canvas').length === 2")
        page.until("/nats per token/.test(document.querySelector('#loss-words').textContent)")
        page.until("document.querySelectorAll('#stages > li').length === 2")
        assert page.ask("getComputedStyle(document.querySelector('#timeline')).display") == "none", "no empty picture"
        for width in WIDTHS:
            for dark in (False, True):
                page.look(width, 900, dark=dark)
                page.until(f"document.documentElement.scrollWidth <= {width}")
                page.picture(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
        assert page.ask("[...document.images].every((i) => i.alt)")
        assert page.ask(
            "[...document.querySelectorAll('input, button')].every((e) => e.labels?.length || e.textContent.trim())"
        )
        swarm.kill(swarm.servers[2])
        words = page.until("document.querySelector('#waiting').textContent")
        assert words.startswith("Waiting for stage") and words.endswith("s)"), words
        page.until("document.querySelectorAll('.mark.away').length === 1")
        assert page.complaints == []


def test_what_a_member_says_is_never_markup(tmp_path: Path) -> None:
    """A reason that would be a script in a careless page is text in ours."""
    with Swarm(tmp_path, server_count=0) as swarm, browser(tmp_path) as page:
        page.open(swarm.links["http"] + "/")
        page.until("document.querySelectorAll('#events li').length")
        words = "<img src=x onerror=alert(1)><script>alert(2)</script>"
        member = {"id": words, "name": words, "role": "server", "stage": 0, "state": words, "waits": words}
        member |= {"paths": words, "trip_s": None, "since_s": 1, "work": 0}
        event = {"wall_s": 1.0, "level": "info", "event": words, "who": words, "words": [words]}
        page.ask(f"showEvents({{events: [{json.dumps(event)}]}}); members = [{json.dumps(member)}]; showMembers(); 1")
        assert page.ask("document.querySelector('#rows td').textContent").startswith("<img")
        assert (
            page.ask("document.querySelectorAll('main img:not(#timeline), main script').length") == 0
            and page.complaints == []
        )


def test_a_page_that_was_sent_away_comes_again(tmp_path: Path) -> None:
    """By a coordinator with too many viewers, or by a proxy while it starts again: a browser gives a stream up for good
    at an answer that is none, and the page would say for a week that there is no word."""
    with sent_away_once() as url, browser(tmp_path) as page:
        page.open(url)
        page.until("document.querySelector('#page').textContent === 'nobody yet'")


@contextmanager
def sent_away_once() -> Iterator[str]:
    """Something that answers as a coordinator does, with 503 to the first who wants the stream."""
    folder = Path(__file__).parents[2] / "coordinator" / "page"
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/page/")
            if name == "events":
                asked.append(name)
                code, kind, body = 200, "text/event-stream", b"event: members\ndata: []\n\n"
                if len(asked) == 1:
                    code, body = 503, b"too many are looking; come again\n"
            elif name == "curve":
                code, kind, body = 200, "application/json", b'{"pieces": [], "validations": []}'
            else:
                content = folder / (name if name in FILES else "index.html")
                code, kind, body = 200, FILES.get(name, "text/html"), content.read_bytes()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
