"""The owner's page in a real browser, and at its door: clicks act, events arrive, strangers and other pages do not."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from node.owner.governor import Readings
from node.owner.limits import KEYS
from node.platform.sensors import clock_s, moment_at
from node.process.consent_page import Answer, ask_on_page
from node.process.device_frames import Hello
from node.process.keeper import Keeper
from node.process.metrics import NodeMetrics
from node.process.page import serve_page
from node.process.page_gate import PORT, Place, keep_place, kept_place, new_token
from protocol.drive.limits import Limits
from protocol.drive.process import free_port
from protocol.drive.scrape import COORDINATOR_PORTS, NODE_PORTS
from protocol.messages import News

HOSTILE = "<img src=x onerror=alert(1)><script>document.title='owned'</script>"
PATIENCE_S = 60.0
NEWS = News(
    step=4209,
    curve=tuple((100 * piece, 5.0 - piece / 15) for piece in range(43)),
    sample=f"{HOSTILE} once upon a time",
    sample_step=4200,
    hour_ratio=0.012,
    step_tasks=318,
    build="barnraise-99.0.1",
    validated_step=4200,
    validation_loss=2.31,
)


class Sensors:
    """A computer that does as the test says."""

    gpu = False

    def __init__(self) -> None:
        self.readings = Readings(temperature_c=61.0, own_memory_bytes=4e8)

    def read(self) -> Readings:
        return self.readings

    def moment(self) -> Any:
        return moment_at(clock_s(), 1.8e9)

    def device_is(self, accelerator: bool, gpus: Sequence[str]) -> None: ...

    def describe(self) -> dict[str, str]:
        return {}


class Life:
    """A node that works until it is told to stop."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.reason = ""
        self.cards: list[dict[str, Any]] = []
        self.lingers = False
        """It takes its time to finish what was begun."""

    def tell(self, fact: Any) -> None:
        word, _, reason = fact.what.partition(" ")
        self.reason = f"suspended: {reason}" if word in ("yield", "suspend") else "drained"
        if not self.lingers:
            self.over.set()

    def end_device(self) -> None: ...

    def set_share(self, share: float) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {
            "stage": 1, "stages": 4, "waiting_for": "", "busy": True, "totals": [{"tokens": 2048.0, "accepted": 8.0}],
            "paths": {"tcp": 2}, "devices": [Hello(1, "a processor")], "coordinator": True, "news": NEWS,
            "cards": self.cards,
        }  # fmt: skip

    async def run(self) -> str:
        await self.over.wait()
        return self.reason


class Lent:
    """A keeper and its page, on trio in a thread of its own."""

    def __init__(self, folder: Path, token: str = "", port: int = 0) -> None:
        self._page_token, self._page_port = token, port
        self.sensors = Sensors()
        self.ready = threading.Event()
        self.ended: list[str] = []
        self.folder = folder
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self._thread.start()
        assert self.ready.wait(PATIENCE_S)

    async def _main(self) -> None:
        self.life = Life()
        self.keeper = Keeper(
            state=self.folder,
            settings=self.folder / "limits.toml",
            overrides={},
            sensors=self.sensors,
            line=Limits(),
            metrics=[NodeMetrics("volunteer")],
            run_name=lambda: HOSTILE,
        )
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.keeper.watch)
            nursery.start_soon(self._live)
            self.address = await serve_page(nursery, self.keeper, self._page_token, self._page_port)
            self.ready.set()
            await self._stop.wait()
            nursery.cancel_scope.cancel()

    async def _live(self) -> None:
        def make(_: Any) -> Life:
            self.life = Life()
            return self.life

        self.ended.append(await self.keeper.live(make))
        await self.keeper.say_last()

    def finish(self, reason: str) -> None:
        """The life ends, say since the run has done its last step."""
        self.life.reason = reason
        self._token.run_sync_soon(self.life.over.set)

    def close(self) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._stop.set)
        self._thread.join(PATIENCE_S)


@pytest.fixture
def lent(tmp_path: Path) -> Iterator[Lent]:
    lent = Lent(tmp_path)
    yield lent
    lent.close()


def cookie_of(address: str) -> str:
    """What the owner's browser sends to this page."""
    base, _, token = address.partition("/enter/")
    return f"barnraise-{base.rpartition(':')[2]}={token}"


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def fetch(url: str, data: bytes | None = None, /, **headers: str) -> tuple[int, str, Any]:
    """(code, text, headers) without any proxy, following nothing."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)
    request = urllib.request.Request(url, data, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with opener.open(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


def test_the_pages_usual_port_is_nobody_elses() -> None:
    """It was the fourth of those at which daemons answer Prometheus: beside a few servers it was never free."""
    assert PORT not in {8469, 8470, *COORDINATOR_PORTS, *NODE_PORTS}


def test_only_the_owner_gets_in(lent: Lent) -> None:
    """No cookie, a wrong token, another host name, another origin, an order without an origin: refused; the owner's
    address sets a cookie that no other site can use."""
    base, _, _ = lent.address.partition("/enter/")
    assert base.startswith("http://127.0.0.1:")
    assert fetch(f"{base}/")[0] == fetch(f"{base}/api/status")[0] == fetch(f"{base}/enter/wrong")[0] == 403
    code, _, headers = fetch(lent.address)
    cookie = headers["set-cookie"]
    assert code == 303 and "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    mine = {"cookie": cookie_of(lent.address)}
    assert mine["cookie"] == cookie.partition(";")[0] and "max-age" in cookie.lower(), "a bookmark opens it for long"
    code, text, headers = fetch(f"{base}/", **mine)
    assert code == 200 and "<h1" in text and "default-src 'none'" in headers["content-security-policy"]
    assert fetch(f"{base}/", **mine, host="evil.example")[0] == 403
    assert fetch(f"{base}/api/status", **mine, origin="http://evil.example")[0] == 403
    order = b'{"verb": "pause"}'
    plain = {**mine, "content_type": "application/json"}
    assert fetch(f"{base}/api/order", order, **plain)[0] == 403
    assert fetch(f"{base}/api/order", order, **plain, origin="http://evil.example")[0] == 403
    assert fetch(f"{base}/api/order", order, **mine, content_type="text/plain", origin=base)[0] == 403
    assert lent.keeper.decision.works
    assert fetch(f"{base}/api/order", b'{"verb": "dance"}', **plain, origin=base)[:2] == (
        400,
        '{"error":"not an order"}',
    )
    assert fetch(f"{base}/api/order", b"x" * 20000, **plain, origin=base)[0] == 400
    assert fetch(f"{base}/api/order", order, **plain, origin=base)[0] == 200
    assert lent.keeper.decision.reason == "user"


def test_it_listens_on_loopback_alone(lent: Lent) -> None:
    """There is no way in from the network."""
    import psutil

    port = int(lent.address.split(":")[2].split("/")[0])
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


def test_two_lent_runs_on_one_computer_have_a_page_each(lent: Lent, tmp_path: Path) -> None:
    """The usual port is taken by the first; the second finds another, and does not end over it."""
    (tmp_path / "other").mkdir()
    other = Lent(tmp_path / "other")
    try:
        assert other.address.split("/")[2] != lent.address.split("/")[2]
        assert fetch(other.address)[0] == fetch(lent.address)[0] == 303
        both = {"cookie": f"{cookie_of(lent.address)}; {cookie_of(other.address)}"}
        pages = [f"{one.address.partition('/enter/')[0]}/" for one in (lent, other)]
        assert [fetch(page, **both)[0] for page in pages] == [200, 200], "a browser has both open"
    finally:
        other.close()


@pytest.fixture
def browser() -> Iterator[Any]:
    """Chromium, driven by its own driver; both from the system's packages (deploy/test-deps)."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("no chromium and chromedriver here (deploy/test-deps): the owner's page was not seen in a browser")
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium")
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_window_size(900, 1400)
    yield driver
    driver.quit()


def wait(browser: Any, what: str, happened: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, PATIENCE_S).until(lambda _: happened(), what)


def text(browser: Any, name: str) -> str:
    return str(browser.execute_script("return document.getElementById(arguments[0]).textContent", name))


@pytest.mark.slow
def test_the_stream_of_events_does_not_end(lent: Lent) -> None:
    """A browser that listens says nothing for hours: the server does not take that for an absent one (it once ended the
    stream after ten seconds, and the page said that the program does not answer)."""
    base, _, _ = lent.address.partition("/enter/")
    connection = http.client.HTTPConnection("127.0.0.1", int(base.rpartition(":")[2]), timeout=PATIENCE_S)
    try:
        connection.request("GET", "/api/events", headers={"cookie": cookie_of(lent.address)})
        with connection.getresponse() as answer:
            seen = 0
            while seen < 13:
                line = answer.readline()
                assert line, f"the stream ended after {seen} events"
                seen += line.startswith(b"data:")
    finally:
        connection.close()


@pytest.mark.slow
def test_the_page_in_a_browser(lent: Lent, browser: Any) -> None:
    """Events arrive, pause, limits and the yes work by click and by keyboard, a hostile run name is text, nothing is
    wider than a telephone."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.get(lent.address)
    assert browser.current_url.endswith("/") and "enter" not in browser.current_url
    wait(browser, "the state", lambda: text(browser, "state") == "Working on part 2 of 4 of the model")
    assert text(browser, "run") == HOSTILE and browser.title == "Working – Barnraise"
    assert not browser.find_elements(By.CSS_SELECTOR, "h1 img, h1 script")
    assert text(browser, "sample").startswith(HOSTILE) and not browser.find_elements(By.CSS_SELECTOR, "q img, q script")
    assert text(browser, "loss") == "from 5.00 to 2.20" and text(browser, "step") == "4,210"
    assert not browser.find_element(By.ID, "resume").is_enabled(), "nothing of the owner's is there to be ended"
    assert text(browser, "tested") == "2.31 after 4,200 steps"
    assert text(browser, "part") == "1.2 % of the last hour's work; step 4,210 holds 318 of your tasks"
    assert text(browser, "device") == "a processor, 0.4 GB of memory in use for it"
    assert not browser.find_element(By.ID, "cards").is_displayed(), "there is one device"
    card = {"device": f"cuda:0 {HOSTILE}", "stage": 1, "waiting_for": "", "busy": True, "ended": ""}
    lent.life.cards = [card, {**card, "device": "cuda:1", "stage": 3, "waiting_for": "work", "busy": False}]
    wait(browser, "the cards", lambda: text(browser, "state") == "Working on parts 2 and 4 of 4 of the model")
    assert [line.text for line in browser.find_elements(By.CSS_SELECTOR, "#cards div")] == [
        f"cuda:0 {HOSTILE}: part 2 of 4",
        "cuda:1: part 4 of 4, waiting for work",
    ]
    lent.life.cards = []
    wait(browser, "one device", lambda: text(browser, "state") == "Working on part 2 of 4 of the model")
    assert text(browser, "update").startswith("Update: the run's coordinator has Barnraise 99.0.1, this computer 0.")
    lent.sensors.readings = Readings(games=("cyberpunk",), own_memory_bytes=4e8)
    wait(
        browser,
        "the game",
        lambda: text(browser, "state").startswith("Paused: cyberpunk is running, which counts as a game."),
    )
    assert text(browser, "device") == "a processor, 0.4 GB of memory for this program itself"
    assert "now" not in text(browser, "line") and text(browser, "line").endswith("; links: none")
    assert re.fullmatch(r"4,210, as of \d\d:\d\d", text(browser, "step")), "no news come while nothing is linked"
    assert re.fullmatch(r"from 5.00 to 2.20, as of \d\d:\d\d", text(browser, "loss"))
    assert re.match(r"1.2 % of the work of the hour before \d\d:\d\d; step 4,210", text(browser, "part"))
    lent.sensors.readings = Readings()
    wait(browser, "the game's end", lambda: text(browser, "state").startswith("Working"))
    browser.find_element(By.ID, "pause").click()
    wait(browser, "the pause", lambda: text(browser, "state").startswith("Paused: by you"))
    assert lent.keeper.decision.reason == "user"
    browser.find_element(By.CSS_SELECTOR, "#snooze-for option[value='600']").click()
    browser.find_element(By.ID, "snooze").click()
    wait(browser, "the short pause", lambda: text(browser, "answer") == "Paused for 10 minutes.")
    assert 590 < (lent.keeper.status()["until_unix_s"] or 0) - 1.8e9 <= 600
    browser.find_element(By.ID, "resume").send_keys(Keys.ENTER)
    wait(browser, "the resume", lambda: text(browser, "state").startswith("Working"))
    assert text(browser, "answer") == "Your pause is over.", "whether it works now is the state's to say"
    assert not browser.find_element(By.ID, "resume").is_enabled()
    assert browser.switch_to.active_element.get_attribute("id") == "pause", "the keyboard goes on beside it"
    browser.find_element(By.XPATH, "//summary[contains(., 'line')]").click()
    field = browser.find_element(By.ID, "limit-up")
    field.clear()
    field.send_keys("5 apples", Keys.ENTER)
    wait(browser, "the sentence at its field", lambda: "is no rate" in text(browser, "answer-up"))
    field.clear()
    field.send_keys("5 Mbit/s", Keys.ENTER)
    wait(
        browser, "the limit", lambda: "; at most 5.0 Mbit/s up, no limit down; links: 2 by TCP" in text(browser, "line")
    )
    assert lent.keeper.limits.up_bytes_per_s == 5e6 / 8
    unnamed = "return [...document.querySelectorAll('input')].filter(i => !i.labels.length).length"
    assert browser.execute_script(unnamed) == 0
    inputs = browser.find_elements(By.CSS_SELECTOR, "#limits input")
    assert {field.get_attribute("id") for field in inputs} == {f"limit-{key.name}" for key in KEYS}
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    lent.life.lingers = True
    browser.find_element(By.ID, "finish").click()
    ends = "Finishing what was begun, then it pauses: by you."
    wait(browser, "what finishing means", lambda: text(browser, "state") == ends)
    browser.find_element(By.ID, "withdraw").click()
    wait(browser, "the last words", lambda: text(browser, "state").startswith("Ending: finishing what was begun"))
    assert text(browser, "answer-yes") == "Your yes is taken back; it ends."
    assert not browser.execute_script(USABLE), "what was said is said"
    lent.finish("drained")
    wait(browser, "the end", lambda: lent.ended == ["left"])
    lent.close()
    wait(browser, "thanks", lambda: text(browser, "state").startswith("It has ended. Thank you. This visit: "))
    assert not browser.execute_script(USABLE) and text(browser, "answer") == "", "nobody is there who would hear"
    assert not browser.find_element(By.ID, "line").is_displayed(), (
        "a line that moved 1.2 Mbit/s stood below `Now` when all was over"
    )
    faded = "return getComputedStyle(document.getElementById('pause')).opacity"
    assert float(browser.execute_script(faded)) < 1, "buttons that do nothing looked as if they did"


USABLE = "return [...document.querySelectorAll('button, input, select')].filter((one) => !one.disabled).length"


@pytest.mark.slow
def test_the_end_of_the_run_is_told(lent: Lent, browser: Any) -> None:
    """The page hears of it before it is gone, and offers nothing more. ("Resumed." stayed beside buttons that nobody
    heard, below "does not answer".) A program that comes back can be told again what to do."""
    browser.get(lent.address)
    wait(browser, "the state", lambda: text(browser, "state").startswith("Working"))
    browser.find_element("id", "finish").click()
    wait(browser, "the pause", lambda: text(browser, "state").startswith("Paused: by you"))
    browser.find_element("id", "resume").click()
    wait(browser, "the answer", lambda: text(browser, "answer") == "Your pause is over.")
    wait(browser, "the work", lambda: text(browser, "state").startswith("Working"))
    lent.finish("finished")
    wait(browser, "the end", lambda: lent.ended == ["finished"])
    assert lent.keeper.status()["sentence"] == "the run is finished, so this ends"
    wait(browser, "thanks", lambda: text(browser, "state").startswith("The run is finished, so it has ended. Thank "))
    lent.close()
    assert not browser.execute_script(USABLE) and text(browser, "answer") == ""
    base, _, token = lent.address.partition("/enter/")
    (lent.folder / "next").mkdir()
    after = Lent(lent.folder / "next", token, int(base.rpartition(":")[2]))
    try:
        assert after.address == lent.address
        wait(browser, "the next visit", lambda: text(browser, "state").startswith("Working"))
        assert browser.execute_script(USABLE) > len(KEYS)
    finally:
        after.close()


class Asked:
    """The question on a page, and what was answered, in a thread of its own."""

    def __init__(
        self, folder: Path, text: str = f"The run: {HOSTILE}\n  up at most 2.0 GB an hour", kept: Place | None = None
    ) -> None:
        self.settings, self.kept = folder / "limits.toml", kept
        self.answers: list[Answer] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(text,))
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    def _ask(self, text: str) -> None:
        self.answers.append(ask_on_page(HOSTILE, text, self.settings, self._tell, self.kept))

    def _tell(self, address: str, once: str) -> None:
        self.address, self.once = address, once
        self._ready.set()

    def order(self, verb: str, **more: Any) -> int:
        base, _, _ = self.address.partition("/enter/")
        body = json.dumps({"verb": verb, **more}).encode()
        return fetch(
            f"{base}/api/order", body, cookie=cookie_of(self.address), content_type="application/json", origin=base
        )[0]

    def close(self) -> None:
        if self._thread.is_alive() and not self.answers:
            with suppress(OSError):
                self.order("no")
        self._thread.join(PATIENCE_S)


def test_the_question_is_where_the_page_was_at_the_last_visit(tmp_path: Path) -> None:
    """At its port, with its token: a bookmark still opens it. (Each question on a page made a new address for good.)"""
    kept = Place(new_token(), free_port())
    asked = Asked(tmp_path, kept=kept)
    try:
        assert asked.address == f"http://127.0.0.1:{kept.port}/enter/{kept.token}"
        assert asked.order("yes") == 200
    finally:
        asked.close()
    assert (asked.answers[0].token, asked.answers[0].port) == (kept.token, kept.port)


def test_a_page_that_had_to_move_once_comes_back(tmp_path: Path) -> None:
    """Another program had its port at one start: from then on it was elsewhere for good, and the bookmark opened
    nothing. Where the port stays another's, the place beside it is kept, too."""
    token, first, second = new_token(), free_port(), free_port()
    for port in (first, second):
        keep_place(tmp_path, f"http://127.0.0.1:{port}/enter/{token}")
    kept = kept_place(tmp_path)
    assert kept == Place(token, first, second)
    with socket.create_server(("127.0.0.1", first)):
        moved = Asked(tmp_path, kept=kept)
        moved.close()
        assert moved.address == f"http://127.0.0.1:{second}/enter/{token}"
    asked = Asked(tmp_path, kept=kept)
    asked.close()
    assert asked.address == f"http://127.0.0.1:{first}/enter/{token}"
    keep_place(tmp_path, asked.address)
    assert kept_place(tmp_path) == kept


def test_the_status_page_comes_to_where_the_question_was(lent: Lent, asked: Asked, tmp_path: Path) -> None:
    """Also where the usual port is another lent run's, and though the question's links were closed a moment ago: the
    browser that said yes waits there. (It waited for ever: the status page was at a third port.)"""
    assert asked.order("yes") == 200
    asked.close()
    (tmp_path / "next").mkdir()
    after = Lent(tmp_path / "next", asked.answers[0].token, asked.answers[0].port)
    try:
        assert after.address == asked.address != lent.address
    finally:
        after.close()


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    asked = Asked(tmp_path)
    yield asked
    asked.close()


def test_the_address_on_a_browsers_command_line_opens_the_page_once(asked: Asked) -> None:
    """Every user of the computer could read the owner's address there, and had the page for good with it. The browser
    that was first may load it again, say when its session is restored."""
    assert asked.once.rpartition("/")[0] == asked.address.rpartition("/")[0] and asked.once != asked.address
    code, _, headers = fetch(asked.once)
    cookie = headers["set-cookie"].partition(";")[0]
    assert code == 303 and cookie == cookie_of(asked.address)
    assert fetch(asked.once)[0] == 403, "somebody else comes with it later"
    assert fetch(asked.once, cookie=cookie)[0] == 303


def test_the_question_is_the_owners_alone(asked: Asked) -> None:
    """As the status page: no cookie, another origin, another host name get nothing, and cannot say yes."""
    base, _, _ = asked.address.partition("/enter/")
    mine = {"cookie": cookie_of(asked.address), "content_type": "application/json"}
    assert fetch(f"{base}/")[0] == fetch(f"{base}/api/offer")[0] == 403
    assert fetch(f"{base}/api/order", b'{"verb": "yes"}', **mine)[0] == 403
    assert fetch(f"{base}/api/order", b'{"verb": "yes"}', **mine, origin="http://evil.example")[0] == 403
    assert fetch(f"{base}/api/order", b'{"verb": "yes"}', content_type="application/json", origin=base)[0] == 403
    assert asked.order("maybe") == asked.order("limits", values={"up": "5 apples"}) == 400
    assert asked.answers == [] and not asked.settings.exists()
    assert asked.order("limits", values={"up": "5 Mbit/s"}) == 200
    assert 'up = "5 Mbit/s"' in asked.settings.read_text()
    assert asked.order("no") == 200
    asked.close()
    assert [answer.yes for answer in asked.answers] == [False]


@pytest.mark.slow
def test_the_yes_is_a_click(asked: Asked, browser: Any, tmp_path: Path) -> None:
    """The question with its limits in a browser, hostile words as text; a click says yes, and the same tab goes on with
    the status page at the same address."""
    from selenium.webdriver.common.by import By

    browser.get(asked.address)
    wait(browser, "the question", lambda: "2.0 GB an hour" in text(browser, "offer"))
    assert text(browser, "run") == HOSTILE and not browser.find_elements(
        By.CSS_SELECTOR, "#offer img, h1 img, h1 script"
    )
    assert browser.title == "Barnraise: may it start?"
    second = browser.find_elements(By.CSS_SELECTOR, "#offer span")[1]
    margins = "const s = getComputedStyle(arguments[0]); return [s.paddingLeft, s.textIndent].map(parseFloat)"
    inside, back = browser.execute_script(margins, second)
    assert inside > -back > 0, "what does not fit on a line goes on below its words"
    browser.find_element(By.XPATH, "//summary[contains(., 'line')]").click()
    field = browser.find_element(By.ID, "limit-up")
    field.clear()
    field.send_keys("5 apples")
    browser.find_element(By.CSS_SELECTOR, "button[aria-label='Set up']").click()
    wait(browser, "the sentence", lambda: "is no rate" in text(browser, "answer-up"))
    browser.find_element(By.ID, "yes").click()
    wait(browser, "the answer", lambda: [answer.yes for answer in asked.answers] == [True])
    (tmp_path / "lent").mkdir()
    lent = Lent(tmp_path / "lent", asked.answers[0].token, asked.answers[0].port)
    try:
        assert lent.address == asked.address
        wait(browser, "the status page", lambda: browser.title == "Working – Barnraise")
        wait(browser, "the state", lambda: text(browser, "state").startswith("Working"))
    finally:
        lent.close()


def pictures(folder: Path, out: Path) -> None:
    """Screenshots for people to look at: light and dark, wide and narrow."""
    lent = Lent(folder)
    generator = browser.__wrapped__()  # type: ignore[attr-defined]
    driver = next(generator)
    try:
        driver.get(lent.address)
        wait(driver, "the state", lambda: text(driver, "state").startswith("Working"))
        asked = Asked(folder)
        driver.get(asked.address)
        wait(driver, "the question", lambda: text(driver, "offer") != "")
        driver.save_screenshot(str(out / "page-consent.png"))
        asked.close()
        driver.get(lent.address)
        wait(driver, "the state", lambda: text(driver, "state").startswith("Working"))
        for name, scheme, width in (("light", "light", 900), ("dark", "dark", 900), ("narrow", "light", 360)):
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            size = {"width": width, "height": 1500, "deviceScaleFactor": 1, "mobile": width < 500}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.save_screenshot(str(out / f"page-{name}.png"))
    finally:
        next(generator, None)
        lent.close()


if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        pictures(Path(scratch), Path(sys.argv[1]))
