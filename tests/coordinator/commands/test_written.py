"""What cannot be written, asked or read is said in one sentence, with exit code 2, and before the work is done."""

from __future__ import annotations

import socket
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from coordinator.commands import branch as branch_module
from protocol.cli import main
from protocol.run.config_file import load_run
from protocol.trust.credit import CreditLedger, sign_credit
from protocol.trust.identity import Identity
from protocol.trust.voided import VoidList, sign_voided

IDENTITY = Identity(bytes(range(32)))


def refused(*words: str) -> str:
    """What is said to somebody whose command cannot be done."""
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 2 and not done.output.startswith("Traceback"), (done.output, done.exception)
    return done.output


@pytest.mark.parametrize("what", ["credit", "voided"])
def test_a_ledger_that_cannot_be_written_is_no_traceback(what: str, tmp_path: Path) -> None:
    """`--out` in a folder that is not there; where it is, the file is as it was signed."""
    ledger = CreditLedger(run="small", run_id="00" * 16, written_unix_s=1, rows=())
    voids = VoidList(run="small", run_id="00" * 16, written_unix_s=1, rows=())
    signed = sign_credit(ledger, IDENTITY) if what == "credit" else sign_voided(voids, IDENTITY)
    (tmp_path / "signed").write_bytes(signed)
    words = ["run", what, "--check", str(tmp_path / "signed"), "--out"]
    assert f"--out: {tmp_path}/no/x cannot be written: No such file" in refused(*words, str(tmp_path / "no" / "x"))
    assert CliRunner().invoke(main, [*words, str(tmp_path / "x")]).exit_code == 0
    assert CliRunner().invoke(main, ["run", what, "--check", str(tmp_path / "x")]).exit_code == 0


def test_a_branch_that_cannot_be_written_is_refused_before_the_export(tmp_path: Path) -> None:
    """The folder of checkpoints is not even looked at."""
    (tmp_path / "RUN.toml").write_text('name = "old"\n')
    (tmp_path / "file").write_text("")
    words = ["run", "branch", str(tmp_path / "RUN.toml"), str(tmp_path / "file" / "NEW.toml"), str(tmp_path / "none")]
    words += ["--set", "name=new", "--model", str(tmp_path / "model")]
    assert "NEW.toml cannot be written: Not a directory" in refused(*words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RUN.toml", "file"]


def test_a_branch_makes_the_folder_that_it_is_to_lie_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the weights go to another."""

    @click.command()
    def export(**words: Any) -> None:
        words["out"].mkdir()

    class Export:
        name = EntryPoint("export", "", "").name

        def load(self) -> click.Command:
            return export

    monkeypatch.setattr(branch_module, "entry_points", lambda group: [Export()])
    (tmp_path / "RUN.toml").write_text('name = "old"\n')
    words = ["run", "branch", str(tmp_path / "RUN.toml"), str(tmp_path / "a" / "b" / "NEW.toml"), str(tmp_path)]
    done = CliRunner().invoke(main, [*words, "--set", "name=new", "--model", str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    assert load_run(tmp_path / "a" / "b" / "NEW.toml").model.start_from == str(tmp_path / "model")


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:x", "http://127.0.0.1:99999", "http://", "127.0.0.1"])
def test_what_is_no_address_is_said(url: str) -> None:
    """By all that ask a coordinator."""
    for words in (("status", url), ("run", "pause", "--url", url), ("monitoring", "write", "dir", url)):
        assert "not an address of a coordinator's status API (http://HOST:PORT)" in refused(*words)


def test_a_host_that_cannot_be_is_said() -> None:
    assert "nobody answers there" in refused("status", "http://a b")


def test_an_answer_that_is_no_http_is_said() -> None:
    """Another program listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            caller, _ = server.accept()
            with caller:
                caller.recv(1 << 16)
                caller.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        assert "nobody answers there" in refused("status", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize("command", [("checkpoints", "verify"), ("export", "out")])
def test_a_place_that_cannot_be_looked_at_is_said(command: tuple[str, ...], tmp_path: Path) -> None:
    """The system says so in the same way of a folder that may not be entered, which nobody is kept from as root."""
    assert "File name too long" in refused(command[0], *command[1:], str(tmp_path / ("x" * 300)))
