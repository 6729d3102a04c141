"""Before `join` has joined its owner is heard: leave, pause, limits and status from another terminal."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from node.commands.members import QUESTION
from node.commands.owner import ENDED, last_words, show, text_of
from node.owner.limits import read_limits, shown
from node.owner.words import describe, headline
from node.platform.local_socket import NotRunningError, ask
from node.process.pauses import keep_pause, kept_pause
from node.process.starting import NOTHING_BEGUN, Starting
from protocol.cli import main
from protocol.trust.identity import Identity
from protocol.trust.membership import Invite, JoinLink, sign_statement

PATIENCE_S = 60.0


def test_what_its_owner_says_meanwhile_counts(tmp_path: Path) -> None:
    """A pause is kept for the keeper and taken back, a limit is written, a wrong order is refused in words, and leave
    interrupts what the main thread does."""
    interrupted = threading.Event()
    state, settings = tmp_path / "state", tmp_path / "settings" / "limits.toml"
    with Starting(state, settings, "r", interrupted.set) as starting:
        starting.says = QUESTION
        assert headline(ask(state, {"verb": "status"})) == f"Barnraise  STARTING  {QUESTION}"
        starting.run = "tiny"
        paused = ask(state, {"verb": "pause", "for_s": 600})
        assert "; then it pauses, by you until " in headline(paused) and kept_pause(state) is not None
        ask(state, {"verb": "resume"})
        assert kept_pause(state) is None
        said = " ".join(describe(ask(state, {"verb": "finish"})).split())
        assert said == f"tiny STARTING {QUESTION}; then it pauses, by you"
        assert ask(state, {"verb": "limits", "values": {"up": "5 Mbit/s"}})["limits"]["up"] == "5 Mbit/s"
        assert shown(read_limits(settings))["up"] == "5 Mbit/s"
        assert ask(state, {"verb": "pause", "for_s": -1})["error"].startswith("pause: ")
        assert ask(state, {"verb": "dance"})["error"] == "there is no order 'dance'"
        assert not starting.left
        leaving = ask(state, {"verb": "leave"})
        assert headline(leaving).startswith("tiny  LEAVING  nothing was begun yet") and starting.left
        assert interrupted.wait(PATIENCE_S)
    with pytest.raises(NotRunningError):
        ask(state, {"verb": "status"})
    assert last_words(state, leaving) == NOTHING_BEGUN


def test_how_long_a_pause_lasts_may_be_said_with_or_without_its_option(tmp_path: Path) -> None:
    """`pause 2m` ended in a foreign sentence about an unexpected extra argument."""
    with Starting(tmp_path, tmp_path / "limits.toml", "ab"):
        for words in (["2m"], ["2", "min"], ["--for", "2 min"]):
            keep_pause(tmp_path, None)
            done = CliRunner().invoke(main, ["pause", *words, "--state", str(tmp_path)])
            assert done.exit_code == 0 and "by you until" in done.output, done.output
            pause = kept_pause(tmp_path)
            assert pause is not None and 110 < (pause.until_unix_s or 0) - time.time() <= 120
        for words, sentence in (
            (["soon"], "pause: 'soon' is no time; write it as 30 min or 2 h"),
            (["-5"], "pause: '-5' is no time; write it as 30 min or 2 h"),
            (["--for", "-5 min"], "--for: '-5 min' must be more than nothing; write it as 30 min or 2 h"),
            (["2m", "--for", "2h"], "pause: '2m' or '2h'? Say it once, as in: barnraise pause --for 2h"),
        ):
            done = CliRunner().invoke(main, ["pause", *words, "--state", str(tmp_path)])
            assert (done.exit_code, done.output.strip()) == (2, sentence)


def test_of_several_each_says_how_to_mean_it(tmp_path: Path) -> None:
    """Two lines that were the same told nobody which computer's program was which; one alone needs no name."""
    answers = []
    for name in ("one", "two"):
        with Starting(tmp_path / name, tmp_path / "limits.toml", "r", lambda: None):
            answers.append((tmp_path / name, ask(tmp_path / name, {"verb": "status"})))
    lines = text_of(answers).splitlines()
    assert [line for line in lines if line.startswith("state ")] == [f"state   {folder}" for folder, _ in answers]
    assert "state " not in text_of(answers[:1])


def test_top_says_that_what_it_watched_has_ended(tmp_path: Path) -> None:
    """Its last frame once said WORKING for ever, and its exit code that nothing had run."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, height=24)
    with Starting(tmp_path, tmp_path / "limits.toml", "r", lambda: None):
        watching = threading.Thread(target=show, args=(tmp_path, 0.01, console))
        watching.start()
        deadline = time.monotonic() + PATIENCE_S
        while "STARTING" not in screen.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    watching.join(PATIENCE_S)
    assert not watching.is_alive()
    assert " ".join(screen.getvalue().split()).endswith(ENDED)


def test_the_keeper_takes_over_its_door(tmp_path: Path) -> None:
    """From then on an order that would come too late is refused; what lies in the folder is the keeper's to remove."""
    starting = Starting(tmp_path, tmp_path / "limits.toml", "r", lambda: None).__enter__()
    starting.hand_over()
    assert ask(tmp_path, {"verb": "pause"})["error"].startswith("it begins this very moment")
    assert ask(tmp_path, {"verb": "status"})["state"] == "starting"
    starting.close()
    assert (tmp_path / "control.json").exists() and kept_pause(tmp_path) is None


def test_a_daemon_that_runs_keeps_its_door(tmp_path: Path) -> None:
    """Whoever starts a second one on its folder does not answer in its place, and removes nothing of it."""
    with Starting(tmp_path, tmp_path / "limits.toml", "r", lambda: None) as first:
        first.run = "first"
        with Starting(tmp_path, tmp_path / "limits.toml", "r", lambda: None):
            assert ask(tmp_path, {"verb": "status"})["run"] == "first"
        assert ask(tmp_path, {"verb": "status"})["run"] == "first"


@pytest.mark.slow
@pytest.mark.parametrize("trap", ["-", "''"])
def test_leave_ends_a_join_that_waits_for_the_run(trap: str, tmp_path: Path) -> None:
    """A coordinator that takes the call and never says a word: exit code 0, one sentence, nothing of it is left; also
    where a script started it in the background, so that it does not hear Ctrl-C."""
    issuer = Identity(bytes(32))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        invite = Invite(
            issuer=issuer.public_key, run_id=bytes(16), role="volunteer", uses=1, not_after=int(time.time()) + 60,
            nonce=bytes(16),
        )  # fmt: skip
        link = str(JoinLink((f"127.0.0.1:{silent.getsockname()[1]}",), sign_statement(invite, issuer)))
        command = [sys.executable, "-m", "protocol.cli"]
        settings = {**os.environ, "BARNRAISE_CONFIG": str(tmp_path / "settings")}
        shell = ["sh", "-c", f'trap {trap} INT; exec "$@"', "sh"]
        joining = subprocess.Popen(
            [*shell, *command, "join", link, "--yes", "--state", str(tmp_path / "state")],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=settings,
        )  # fmt: skip
        silent.settimeout(PATIENCE_S)
        connection, _ = silent.accept()
        with connection:
            left = subprocess.run([*command, "leave"], capture_output=True, text=True, timeout=PATIENCE_S, env=settings)
            said, _ = joining.communicate(timeout=PATIENCE_S)
    assert left.returncode == 0 and left.stdout.strip() == NOTHING_BEGUN, left
    assert joining.returncode == 0 and "Traceback" not in said, said
    assert said.strip().endswith("You have left it before it joined. Nothing was started.")
    assert not (tmp_path / "state" / "control.json").exists()
