"""What a person gets at a shell for a mistake: one sentence on standard error, exit code 2, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protocol.trust.identity import Identity
from protocol.trust.membership import Invite, JoinLink, JoinRole, sign_statement


def barnraise(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "protocol.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def link(role: JoinRole) -> str:
    """A sound link to a coordinator that nobody runs."""
    issuer = Identity(bytes(32))
    invite = Invite(
        issuer=issuer.public_key, run_id=bytes(16), role=role, uses=1, not_after=int(time.time()) + 60, nonce=bytes(16)
    )
    return str(JoinLink(("127.0.0.1:9",), sign_statement(invite, issuer)))


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[model]\nlayerz = 2\n", 'RUN.toml: model.layerz: unknown key (did you mean "layers"?)'),
        ("[modell]\nlayers = 2\n", 'RUN.toml: modell: unknown key (did you mean "model"?)'),
        ('[model]\nlayers = "2"\n', "RUN.toml: model.layers: "),
        ("[batch]\ndelay = 2\n", "RUN.toml: batch.delay: "),
        ("[model]\nlayers = 0\n", "RUN.toml: model.layers: 0 is not between 1 and 1024"),
        ("steps = -1\n", "RUN.toml: steps: -1 is not between 1 and "),
        ("[model]\nhidden = 100\nheads = 3\n", "RUN.toml: model.hidden: "),
        ("[optimizer]\nlearning_rate = nan\n", "RUN.toml: optimizer.learning_rate: "),
        ('name = "No Spaces"\n', "RUN.toml: name: "),
        ("[stages]\ncount = 99\n", "RUN.toml: stages.count: "),
        ("steps = \n", "RUN.toml: "),
        ("\0\1", "RUN.toml: "),
    ],
)
def test_a_wrong_run_file(tmp_path: Path, toml: str, sentence: str) -> None:
    """The key, what is wrong with it, and what was meant."""
    path = tmp_path / "RUN.toml"
    path.write_text(toml)
    done = barnraise("coordinator", str(path), "--state", str(tmp_path / "state"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "state").exists()


def test_a_wrong_link(tmp_path: Path) -> None:
    """Cut, changed by one letter, of the other kind, or no link at all: the sentence says which; nothing is left."""
    good = link("server")
    changed = good[:-9] + ("a" if good[-9] != "a" else "b") + good[-8:]
    for command, text in (
        ("server", good[:-1]),
        ("server", good[: len(good) // 2]),
        ("server", changed),
        ("server", good.replace("127.0.0.1:9", "127.0.0.1:99999")),
        ("server", good.replace("127.0.0.1:9", "127.0.0.2:9")),
        ("server", "https://example.org"),
        ("server", ""),
        ("join", good),
        ("server", link("volunteer")),
    ):
        done = barnraise(command, text, "--state", str(tmp_path / "state"))
        assert (done.returncode, done.stdout) == (2, ""), (text, done)
        assert done.stderr.count("\n") == 1 and ("link" in done.stderr or "address" in done.stderr), done.stderr
        assert not (tmp_path / "state").exists()


def test_wrong_options(tmp_path: Path) -> None:
    """Unknown commands and options, values out of range: exit code 2 and a hint."""
    for arguments in (
        ("trian",),
        ("server",),
        ("server", link("server"), "--listen", "nowhere"),
        ("server", link("server"), "--threads", "0"),
        ("server", link("server"), "--thread", "2"),
        ("demo", "--steps", "0"),
        ("demo", "--delay", "2"),
        ("demo", "--config", str(tmp_path / "nothing.toml")),
        ("coordinator", str(tmp_path / "nothing.toml")),
        ("coordinator",),
    ):
        done = barnraise(*arguments)
        assert done.returncode == 2 and done.stdout == "", (arguments, done)
        assert done.stderr and "Traceback" not in done.stderr, (arguments, done.stderr)


@pytest.mark.slow
def test_help_and_the_coordinator_start_without_torch() -> None:
    """Torch alone takes seconds: nobody who only asks for help, or coordinates, shall wait for it."""
    for arguments in (("--help",), ("coordinator", "--help"), ("server", "--help"), ("plan", "--help")):
        program = "import sys; from protocol.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        program += "sys.exit('torch' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, env=os.environ
        )
        assert done.returncode == 0, (arguments, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("node.process.daemon, node.process.page, node.visit.enquiry", "torch"),
        ("node.compute.device_process", "torch._dynamo"),
        ("node.process.own_lanes", "torch._dynamo"),
    ],
)
def test_nobody_loads_more_of_torch_than_he_needs(module: str, heavy: str) -> None:
    """A volunteer's daemon computes nothing: torch would take 300 MB of a lent computer, and seconds of every start.
    Who computes needs torch, but not its compiler, which takes as long again and came along with a mask."""
    program = f"import {module}, sys; sys.exit({heavy!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
