"""The node's commands: what is wrong on the line is said in one sentence, with exit code 2."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from node.commands.link_argument import LINK_VARIABLE, parse_link
from node.commands.members import agrees_on_page, join, server, state_folder
from node.commands.owner import consent
from node.demo.cli import demo
from node.links.relay.relay_desk import RelayLimits
from node.owner.consent import Consent, keep_consent, read_consents
from node.platform.local_socket import ask
from node.platform.places import settings_folder
from node.process.consent_page import Answer
from node.process.daemon import NodeOptions
from node.process.journal import Journal
from node.process.page_gate import Place, keep_place
from node.visit.enquiry import Offer
from node.visit.survey import NobodyAnswersError
from protocol.base.errors import BadInputError
from protocol.run.run import RunConfig
from protocol.trust.identity import Identity
from protocol.trust.membership import Invite, JoinLink, JoinRole, sign_statement

COORDINATOR = Identity(bytes(range(32)))


@pytest.fixture
def folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a `join` leaves on its way must not be left to whoever runs the tests."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("BARNRAISE_CONFIG", str(home / "settings"))


def link(role: JoinRole = "server", run_id: bytes = b"r" * 16) -> str:
    """A sound link to a coordinator that nobody runs."""
    invite = Invite(
        issuer=COORDINATOR.public_key,
        run_id=run_id,
        role=role,
        uses=1,
        not_after=int(time.time()) + 3600,
        nonce=b"n" * 16,
    )
    return str(JoinLink(("127.0.0.1:9",), sign_statement(invite, COORDINATOR)))


def complaint(command: click.Command, *arguments: str) -> str:
    """The sentence of the `BadInputError` that the command ends with (the group turns it into exit code 2)."""
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, BadInputError), result.output
    return str(result.exception)


def starts(monkeypatch: pytest.MonkeyPatch) -> list[NodeOptions]:
    """The options of every daemon that is started from here on; none of them runs."""
    started: list[NodeOptions] = []

    def run_node(options: NodeOptions) -> int:
        started.append(options)
        return 0

    monkeypatch.setattr("node.process.daemon.run_node", run_node)
    return started


def test_a_damaged_link_is_named() -> None:
    """A lost character, a cut end, something else: the sentence says that it is the link."""
    good = link()
    for bad in (good[:-1], good[:40], good.replace("barnraise", "http"), "", good[:-3] + "aaa"):
        assert complaint(server, bad).startswith("join link:")


def test_a_link_for_the_other_kind_names_the_right_command() -> None:
    """A server's link does not join a volunteer, and the reverse."""
    assert complaint(join, link("server")) == (
        "join link: this one is for servers (`barnraise server`); here the one for volunteers is needed, which the "
        "coordinator prints beside it"
    )
    assert "is for volunteers (`barnraise join`)" in complaint(server, link("volunteer"))
    assert parse_link(link("volunteer"), "volunteer").role == "volunteer"


def test_a_link_need_not_stand_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of a computer can read its process list: a file, standard input and the environment do as well."""
    started, one = starts(monkeypatch), link()  # a link holds the time: two calls may differ
    file = tmp_path / "server.link"
    file.write_text(f"{one}\n")
    rest = ("--state", str(tmp_path / "state"))
    for arguments, given in (((str(file),), None), (("-",), f"{one}\nmore"), ((), None)):
        if not arguments:
            monkeypatch.setenv(LINK_VARIABLE, one)
        CliRunner().invoke(server, [*arguments, *rest], input=given, catch_exceptions=False)
    assert [str(options.link) for options in started] == [one] * 3
    assert LINK_VARIABLE not in os.environ, "children must not inherit it"
    assert complaint(server, *rest).startswith("join link: none is given; name it, or a file that holds it")
    file.write_bytes(b"\xff\xfe")
    assert complaint(server, str(file), *rest) == f"join link: {file} cannot be read: it is no text"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """It read "it starts with barnraise://", as if the file's name were the link; a damaged link stays unseen."""
    gone = str(tmp_path / "server.link")
    assert complaint(server, gone).startswith(f"join link: there is no file '{gone}' here")
    damaged = link("server").replace("barnraise", "http")
    assert "file" not in complaint(server, damaged) and damaged not in complaint(server, damaged)


@pytest.mark.parametrize("command", [server, join])
def test_the_help_says_where_state_is_kept(command: click.Command) -> None:
    """Whoever exports a model or frees a disk needs to know."""
    shown = " ".join(CliRunner().invoke(command, ["--help"], terminal_width=400).output.split())
    role: JoinRole = "server" if command is server else "volunteer"
    folder = state_folder(None, JoinLink.parse(link(role)))
    assert f"[default: {folder.parent.parent}/RUN-ID/{folder.name}]" in shown


@pytest.mark.parametrize("address", ["nowhere", "1.2.3.4:", "h:70000", ":80", "h:-1"])
def test_a_bad_address_names_its_option(address: str) -> None:
    """HOST:PORT or nothing."""
    assert complaint(server, link(), "--listen", address) == f"--listen: {address!r} is not HOST:PORT"
    assert complaint(join, link("volunteer"), "--metrics", address).startswith("--metrics:")


def test_a_state_folder_in_use_or_of_another_run_is_refused(tmp_path: Path) -> None:
    """Two processes never share an identity, and one state folder never serves two runs."""
    arguments = (link(), "--state", str(tmp_path), "--listen", "127.0.0.1:0")
    journal = Journal(tmp_path)
    assert "is in use by another process" in complaint(server, *arguments)
    journal.set_meta("run_id", b"x" * 16)
    journal.close()
    assert "belongs to another run; name another with --state" in complaint(server, *arguments)


@pytest.mark.parametrize(
    ("command", "options"),
    [(server, ()), (join, ("--yes",)), (join, ("--yes", "--no-benchmark"))],
)
def test_a_state_folder_that_cannot_be_is_named(command: click.Command, options: tuple[str, ...]) -> None:
    """A slip in the path is no bug of ours: a sentence, no traceback."""
    arguments = (link("server" if command is server else "volunteer"), "--state", "/dev/null/x", *options)
    assert complaint(command, *arguments) == "/dev/null/x: cannot be used as state folder: Not a directory"


def test_a_port_that_no_router_can_forward_to_is_refused(tmp_path: Path) -> None:
    """Only this computer reaches its loopback."""
    arguments = (link(), "--state", str(tmp_path), "--listen", "127.0.0.1:0", "--map-port")
    assert complaint(server, *arguments).startswith("--map-port: ")


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("arguments", "listens"),
    [
        ((), ()),
        (("--map-port",), (("*", 0),)),
        (("--map-port", "--listen", "*:7"), (("*", 7),)),
    ],
)
def test_a_volunteer_listens_only_where_its_owner_allows_it(
    arguments: tuple[str, ...], listens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that the router forwards needs somebody behind it."""
    started = starts(monkeypatch)
    CliRunner().invoke(join, (link("volunteer"), "--yes", "--no-benchmark", *arguments), catch_exceptions=False)
    assert [(options.listen, options.ways.map_port) for options in started] == [(listens, bool(arguments))]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    """Who listens there already is not our business, but which option to change is."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert complaint(server, link(), "--state", str(tmp_path), "--listen", address).startswith(
            f"--listen {address}:"
        )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--steps", "0"), "steps: 0 is not between 1 and"),
        (("--stages", "99"), "stages.count: 99 is not between 1 and 10"),
        (("--steps", "10", "--kill-server", "10"), "--kill-server: step 10 is not between 1 and 9"),
        (("--config", "/nowhere/RUN.toml"), "/nowhere/RUN.toml: cannot be read"),
        (("--out", "/dev/null/x"), "--out: /dev/null/x cannot be written: Not a directory"),
        (("--out", "/dev/null/x", "--reference"), "--out: /dev/null/x cannot be written: Not a directory"),
        (("--data", "/nowhere"), "data.source: no .txt, .md, .jsonl"),
        (("--data", "builtin:nothing"), "data.source: there is no 'builtin:nothing'"),
        (("--summary", "/dev/null/x"), "--summary: /dev/null/x cannot be written: Not a directory"),
        (("--state", "/dev/null/x"), "--state: /dev/null/x cannot be written: Not a directory"),
    ],
)
def test_a_demo_that_cannot_be_is_refused_before_anything_starts(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is checked as a RUN.toml is, and where its results go by trying; nothing is left of that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert sentence in complaint(demo, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_what_a_server_carries_for_others_is_its_owners_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate and a quota of its own, or nothing at all."""
    started = starts(monkeypatch)
    for options in ((), ("--relay-limit", "8", "--relay-quota", "2.5"), ("--no-relay",)):
        CliRunner().invoke(server, [link(), "--state", str(tmp_path), *options], catch_exceptions=False)
    usual, chosen, none = (options.ways.relay for options in started)
    assert usual == RelayLimits() and none is None
    assert chosen == RelayLimits(bytes_per_s=1e6, quota_bytes=2.5e9)


@pytest.mark.usefixtures("folders")
def test_nobody_lends_a_computer_without_a_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No terminal, an answer from a pipe, the end of a file: it refuses before anything is contacted or written."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr("node.process.daemon.run_node", lambda options: pytest.fail("it was started"))
    for typed in ("", "n\n", "y\n"):
        result = CliRunner().invoke(join, (link("volunteer"), "--state", str(tmp_path / "state")), input=typed)
        assert isinstance(result.exception, BadInputError)
        assert str(result.exception).startswith("nobody can be asked here, since this is no terminal: add --yes")
    assert not (tmp_path / "state").exists()


def asked(monkeypatch: pytest.MonkeyPatch, typed: str, *arguments: str, config: str = "c1") -> tuple[bool, str]:
    """(was it started, what was shown) by a join in a terminal where this is typed."""
    started = starts(monkeypatch)
    offer = Offer("The run: tiny", (100.0,), run="tiny", terms_hashes=(config, "older"))
    monkeypatch.setattr("node.visit.enquiry.enquire", lambda *_: offer)
    monkeypatch.setattr("node.commands.members.is_terminal", lambda: True)
    result = CliRunner().invoke(join, (link("volunteer"), *arguments), input=typed)
    return bool(started), result.output


@pytest.mark.usefixtures("folders")
def test_a_yes_is_kept_for_its_run_and_its_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No or the end of the input start nothing; a yes does, and is not asked for again until the terms change or it is
    taken back."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path))
    assert asked(monkeypatch, "n\n") == (False, asked(monkeypatch, "n\n")[1])
    started, shown = asked(monkeypatch, "")
    assert not started and "Nothing was started." in shown
    started, shown = asked(monkeypatch, "what?\nno\n")
    assert not started and shown.count("Start?") == 2 and "Say y (start), n (start nothing)" in shown
    started, shown = asked(monkeypatch, "y\n")
    assert started and "The run: tiny" in shown and "Limits: only when you are not using the computer" in shown
    started, shown = asked(monkeypatch, "")
    assert started and "You said yes to this run on" in shown
    assert not asked(monkeypatch, "", config="c2")[0]
    run_id, kept = next(iter(read_consents(tmp_path).items()))
    keep_consent(tmp_path, run_id, msgspec.structs.replace(kept, config_hash="older"))
    assert asked(monkeypatch, "")[0], "an older build called the same terms so"
    assert "tiny" in CliRunner().invoke(consent).output
    assert "Taken back" in CliRunner().invoke(consent, ["withdraw", "tiny"]).output
    assert not asked(monkeypatch, "")[0]
    assert complaint(consent, "withdraw", "tiny") == "consent: there is no yes to 'tiny' that could be taken back"


@pytest.mark.usefixtures("folders")
def test_ctrl_c_before_it_joined_says_what_was_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said "Aborted!", which leaves open what runs on the computer now."""
    started = starts(monkeypatch)

    def enquire(*_: object) -> Offer:
        raise KeyboardInterrupt

    monkeypatch.setattr("node.visit.enquiry.enquire", enquire)
    done = CliRunner().invoke(join, [link("volunteer"), "--yes"])
    assert done.output.splitlines()[-1] == "You have left it before it joined. Nothing was started."
    assert done.exit_code == 1 and not started


@pytest.mark.usefixtures("folders")
def test_what_a_join_waits_for_is_told_in_another_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` went on saying that it measures this computer, for as long as the run had not begun."""
    starts(monkeypatch)
    heard: list[str] = []

    def enquire(*arguments: Any) -> Offer:
        arguments[-1]("The run has not begun: its servers are not all there. Waiting (Ctrl-C leaves) …")
        heard.append(ask(state_folder(None, JoinLink.parse(one)), {"verb": "status"})["sentence"])
        return Offer("The run: tiny", (100.0,), run="tiny", terms_hashes=("c1",))

    one = link("volunteer")
    monkeypatch.setattr("node.visit.enquiry.enquire", enquire)
    shown = CliRunner().invoke(join, [one, "--yes"], catch_exceptions=False).output
    assert heard == ["The run has not begun: its servers are not all there"] and "Waiting (Ctrl-C leaves)" in shown


@pytest.mark.usefixtures("folders")
def test_the_device_is_measured_within_the_owners_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the card has beyond `gpu-memory` says nothing about the work that it will do."""
    starts(monkeypatch)
    caps = []

    def enquire(*arguments: Any) -> Offer:
        caps.append(arguments[-2])
        return Offer("The run: tiny", (100.0,), run="tiny", terms_hashes=("c1",))

    monkeypatch.setattr("node.visit.enquiry.enquire", enquire)
    CliRunner().invoke(join, [link("volunteer"), "--yes", "--limit", "gpu-memory=6GB"], catch_exceptions=False)
    assert caps == [6e9]


@pytest.mark.usefixtures("folders")
def test_one_that_the_system_started_waits_for_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """At logon there may be none yet: with a kept yes and nobody to tell, it asks again until the run answers, and says
    each reason once. In a terminal, and with --yes, who started it is told at once."""
    started, answers = starts(monkeypatch), ["away", "away", "down", ""]

    def enquire(*_: object) -> Offer:
        if answer := answers.pop(0):
            raise NobodyAnswersError(answer)
        return Offer("The run: tiny", (100.0,), run="tiny", terms_hashes=("c1",))

    monkeypatch.setattr("node.visit.enquiry.enquire", enquire)
    monkeypatch.setattr("node.commands.members.RETRY_S", 0.0)
    run_id = JoinLink.parse(link("volunteer")).run_id.hex()
    keep_consent(settings_folder(), run_id, Consent("tiny", 1e9, "c1"))
    done = CliRunner().invoke(join, [link("volunteer")], catch_exceptions=False)
    assert len(started) == 1 and answers == [] and done.exit_code == 0
    assert done.stderr.splitlines() == [f"{reason}. Trying again every 0 s." for reason in ("away", "down")]
    answers[:] = ["away"]
    assert complaint(join, link("volunteer"), "--yes") == "away"


@pytest.mark.usefixtures("folders")
def test_one_that_the_system_started_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each logon card and line were measured, in a pause, beside a game, on battery, before anybody had looked at
    the limits. It tells the run what its owner saw measured, if it is about the same device, threads and terms."""
    started, measured = starts(monkeypatch), []

    def enquire(*arguments: Any) -> Offer:
        _, _, _, measure, _, _, choices, *_ = arguments
        measured.append(measure)
        assert measure is bool(choices), "a driver that is loaded takes memory of the device, too"
        return Offer("The run: tiny", (100.0,) if measure else (), run="tiny", terms_hashes=(terms, "older"))

    terms, one = "c1", link("volunteer")
    monkeypatch.setattr("node.visit.enquiry.enquire", enquire)
    keep_consent(settings_folder(), JoinLink.parse(one).run_id.hex(), Consent("tiny", 1e9, "older"))

    def joins(*options: str) -> float:
        assert CliRunner().invoke(join, [one, *options], catch_exceptions=False).exit_code == 0
        return started[-1].tokens_per_s

    assert joins() == 0.0 and measured == [False], "nothing is known of it"
    assert joins("--yes") == 100.0 and measured == [False, True], "who says so now is there to see it"
    assert joins() == 100.0 and measured == [False, True, False]
    assert joins("--threads", "2") == joins("--device", "cuda:1") == 0.0
    terms = "c2"
    assert joins() == 0.0
    (state_folder(None, JoinLink.parse(one)) / "speed.json").write_text("{")
    assert joins() == 0.0
    assert measured.count(True) == 1


@pytest.mark.usefixtures("folders")
def test_a_device_that_cannot_be_measured_ends_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card whose memory a game had taken was a wrong word, exit code 2, after which systemd starts nothing again."""
    started = starts(monkeypatch)

    async def survey(*_: Any) -> Any:
        return SimpleNamespace(
            finished=False,
            servers=[],
            measured=(),
            welcome=SimpleNamespace(config=RunConfig(name="tiny"), vocabulary=0),
        )

    def full(_: object) -> None:
        raise BadInputError("the device could not be measured: out of memory")

    monkeypatch.setattr("node.visit.enquiry._survey", survey)
    monkeypatch.setattr("node.visit.enquiry.ask_device", full)
    consent = Consent("tiny", 1e9, RunConfig(name="tiny").terms_hashes()[0].hex())
    keep_consent(settings_folder(), JoinLink.parse(link("volunteer")).run_id.hex(), consent)
    done = CliRunner().invoke(join, [link("volunteer")], catch_exceptions=False)
    assert len(started) == 1 and "device: not looked at" in done.output
    assert complaint(join, link("volunteer"), "--yes") == "the device could not be measured: out of memory"


@pytest.mark.usefixtures("folders")
def test_limits_can_be_set_before_the_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`limits` at the question shows and changes them; what is wrong is said and asked again."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path))
    started, shown = asked(monkeypatch, "limits\nup 5 apples\nup 5 Mbit/s\n\ny\n")
    assert started and "up: '5 apples' is no rate" in shown
    assert 'up = "5 Mbit/s"' in (tmp_path / "limits.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--limit", "up"), "--limit: 'up' is not NAME=VALUE"),
        (("--limit", "upp=5 Mbit/s"), "limits: there is no 'upp' (did you mean up?)"),
        (("--limit", "hours=9:00-5:00"), "hours: 9:00-5:00 ends before it starts"),
        (("--while-not", "@gamez"), "while-not: there is no list of programs '@gamez'"),
    ],
)
def test_a_wrong_limit_on_the_line_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    """Before anything is contacted."""
    assert complaint(join, link("volunteer"), "--yes", *arguments).startswith(sentence)


@pytest.mark.parametrize("command", [join, server])
@pytest.mark.parametrize(
    ("option", "value", "takes"),
    [
        ("--limit-up", "0.5", "a number of Mbit/s, 1 or more"),
        ("--limit-up", "-5", "a number of Mbit/s, 1 or more"),
        ("--limit-down", "5 apples", "a number of Mbit/s, 1 or more"),
        ("--limit-down", "nan", "a number of Mbit/s, 1 or more"),
        ("--quota", "-1", "a number of GB, 0.1 or more"),
        ("--threads", "0", "a whole number from 1 to 256"),
        ("--threads", "two", "a whole number from 1 to 256"),
    ],
)
def test_an_amount_that_cannot_be_is_one_sentence(command: click.Command, option: str, value: str, takes: str) -> None:
    """It names the option, quotes what was written and says what is allowed."""
    role: JoinRole = "volunteer" if command is join else "server"
    assert complaint(command, link(role), option, value) == f"{option}: {value!r} cannot be; it takes {takes}"


def test_a_device_that_cannot_be_is_one_sentence() -> None:
    """As other options: it was click's own."""
    assert complaint(join, link("volunteer"), "--device", "toaster").startswith(
        "--device toaster: not one of auto, cpu,"
    )


def test_a_rate_may_have_its_unit(folders: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `barnraise limits set` takes it, which was refused here."""
    started = starts(monkeypatch)
    arguments = ["--yes", "--no-benchmark", "--limit-up", "5 Mbit/s", "--limit-down", "20", "--quota", "2000000GB"]
    assert CliRunner().invoke(join, [link("volunteer"), *arguments]).exit_code == 0
    assert dict(started[0].overrides) == {"up": "5 Mbit/s", "down": "20 Mbit/s", "quota": "2000000 GB"}


def test_the_question_on_the_page_names_the_limits_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Below it stand those of all starts, "up off" for one; that 4 Mbit/s hold this time was said in the terminal
    alone. It is where the page was at the last visit, and whoever asks elsewhere hears where."""
    asked: list[str] = []
    opened: list[str] = []
    said, kept = SimpleNamespace(says=""), Place("token", 4711)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", opened.append)

    def ask_on_page(run: str, text: str, settings: Path, tell: Callable[[str, str], None], place: Place) -> Answer:
        asked.append(text)
        tell("http://127.0.0.1:4711/enter/token", "http://127.0.0.1:4711/enter/once")
        assert place == kept and said.says == "waiting for your yes on http://127.0.0.1:4711/enter/token"
        return Answer(yes=False, token="", port=0)

    monkeypatch.setattr("node.process.consent_page.ask_on_page", ask_on_page)
    offer = Offer("The run: tiny", run="tiny")
    keep_place(tmp_path, "http://127.0.0.1:4711/enter/token")
    assert agrees_on_page(offer, {"up": "4 Mbit/s", "while-not": "doom"}, tmp_path, said) == (False, "", 0)  # type: ignore[arg-type]
    agrees_on_page(offer, {}, tmp_path, said)  # type: ignore[arg-type]
    assert asked == [
        "The run: tiny\nFor this start, whatever stands below: up 4 Mbit/s, while-not doom",
        "The run: tiny",
    ]
    assert opened == ["http://127.0.0.1:4711/enter/once"] * 2, "anybody here can read a command line"
