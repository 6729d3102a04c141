"""A lent computer as a service, looked at by its doctor, reported without its secrets."""

from __future__ import annotations

import json
import os
import plistlib
import shutil
import socket
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from node.commands import service as service_module
from node.commands.say import shown_path
from node.commands.service import bugreport, doctor, scrubbed, service
from node.owner.consent import Consent, keep_consent
from node.platform.logged import LOG_BYTES_MAX
from node.platform.notify import notify
from node.platform.sensors import SystemSensors
from node.platform.service import Service, launch_agent, scheduled_task, systemd_unit
from node.process.starting import NOTHING_BEGUN, Starting
from protocol.base.errors import BadInputError
from protocol.trust.membership import JoinLink
from tests.node.commands.test_members import link

LINK = link("volunteer")
RUN_ID = JoinLink.parse(LINK).run_id.hex()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An owner's folders, and a systemctl that writes down what it was asked."""
    tools = tmp_path / "bin"
    tools.mkdir()
    tool = tools / "systemctl"
    tool.write_text(
        f'#!/bin/sh\ncase "$*" in *ExecMainStatus*) cat {tmp_path}/status; exit;; esac\n'
        f'echo "$@" >> {tmp_path}/asked\n[ -e {tmp_path}/says ] && cat {tmp_path}/says >&2\n'
        f"[ -e {tmp_path}/refuses ] && grep -qf {tmp_path}/refuses {tmp_path}/config/systemd/user/*.service && exit 1\n"
        f"[ -e {tmp_path}/prints ] && cat {tmp_path}/prints\n"
        f"exit $(cat {tmp_path}/code 2>/dev/null || echo 0)\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(service_module, "FIRST_WORDS_S", 0.0)  # nobody was started
    for name, value in (
        ("BARNRAISE_CONFIG", tmp_path / "settings"), ("XDG_CONFIG_HOME", tmp_path / "config"),
        ("XDG_STATE_HOME", tmp_path / "state"), ("XDG_CACHE_HOME", tmp_path / "cache"),
        ("PATH", f"{tools}:{os.environ['PATH']}"),
    ):  # fmt: skip
        monkeypatch.setenv(name, str(value))
    return tmp_path


def agree(home: Path) -> None:
    keep_consent(home / "settings", RUN_ID, Consent("tiny", 1e9, "hash"))


def test_it_is_installed_only_after_a_yes_and_hides_the_link(home: Path) -> None:
    """Without a yes a sentence; with one a unit whose command names a private file in place of the link."""
    refused = CliRunner().invoke(service, ["install", LINK])
    assert isinstance(refused.exception, BadInputError) and "you have not said yes" in str(refused.exception)
    agree(home)
    done = CliRunner().invoke(service, ["install", LINK], catch_exceptions=False)
    unit = home / "config" / "systemd" / "user" / "barnraise.service"
    assert done.exit_code == 0 and str(unit) in done.output
    assert LINK not in unit.read_text() and "Type=notify" in unit.read_text() and "WatchdogSec=60" in unit.read_text()
    file = home / "settings" / "links" / RUN_ID
    assert file.read_text().strip() == LINK and file.stat().st_mode & 0o777 == 0o600
    assert (home / "asked").read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable barnraise.service",
        "--user restart barnraise.service",
    ]
    assert CliRunner().invoke(service, ["remove"]).exit_code == 0
    assert not unit.exists() and not file.exists(), "the secret that only it read lay there for ever"
    assert str(CliRunner().invoke(service, ["remove"]).exception) == "service: none is installed"
    assert "no service is installed" in CliRunner().invoke(service, ["status"]).output


def test_it_keeps_to_the_options_of_its_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lent the second card, two threads and the nights computed on whatever was found, at all times. One that
    runs starts anew with other options, and what cannot be is named at once: at logon nobody reads it."""
    agree(home)
    monkeypatch.setattr(service_module, "check_device", lambda _: None)
    unit = home / "config" / "systemd" / "user" / "barnraise.service"
    options = [
        "--device",
        "cuda:1",
        "--threads",
        "2",
        "--limit",
        "hours=22:00-07:00 overnight",
        "--limit",
        "up=5 Mbit/s",
    ]
    assert CliRunner().invoke(service, ["install", LINK, *options], catch_exceptions=False).exit_code == 0
    (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    assert line.endswith(" " + " ".join(f'"{word}"' for word in options))
    assert (home / "asked").read_text().splitlines()[-1] == "--user restart barnraise.service"

    def none(_: object) -> None:
        raise BadInputError("--device cuda:1: there is none")

    monkeypatch.setattr(service_module, "check_device", none)
    for wrong, sentence in (
        (["--device", "cuda:1"], "--device cuda:1: there is none"),
        (["--device", "toaster"], "--device toaster: not one of"),
        (["--threads", "0"], "--threads: '0' cannot be"),
        (["--limit", "up"], "--limit: 'up' is not NAME=VALUE"),
        (["--name", "../x"], "--name: '../x' cannot be"),
    ):
        refused = CliRunner().invoke(service, ["install", LINK, *wrong])
        assert isinstance(refused.exception, BadInputError) and str(refused.exception).startswith(sentence)
    assert line in unit.read_text()


def test_each_card_may_have_a_service_of_its_own(home: Path) -> None:
    """One for all was overwritten by the next. Each has its unit, link, state folder and log, and goes alone."""
    agree(home)
    units, links = home / "config" / "systemd" / "user", home / "settings" / "links"
    for name in ("", "b", "a-b"):
        named = ["--name", name] if name else []
        done = CliRunner().invoke(service, ["install", LINK, *named], catch_exceptions=False)
        assert f"barnraise service remove{' --name ' if name else ''}{name}\n" in done.output
    folders = [
        home / "state" / "barnraise" / RUN_ID / folder for folder in ("volunteer", "volunteer-a-b", "volunteer-b")
    ]
    assert sorted(path.name for path in units.iterdir()) == [
        "barnraise-a-b.service", "barnraise-b.service", "barnraise.service",
    ]  # fmt: skip
    assert sorted((home / "state" / "barnraise" / RUN_ID).iterdir()) == folders
    assert str(folders[1]) in (units / "barnraise-a-b.service").read_text()
    assert CliRunner().invoke(service, ["remove", "--name", "b"], catch_exceptions=False).exit_code == 0
    assert sorted(path.name for path in links.iterdir()) == [RUN_ID, f"{RUN_ID}-a-b"]
    assert (home / "asked").read_text().splitlines()[-1] == "--user disable --now barnraise-b.service"
    assert "no service is installed" in CliRunner().invoke(service, ["status", "--name", "b"]).output
    assert CliRunner().invoke(service, ["remove"], catch_exceptions=False).exit_code == 0
    assert [path.name for path in links.iterdir()] == [f"{RUN_ID}-a-b"]


def test_a_system_that_refuses_is_quoted(home: Path) -> None:
    """No user manager here, say: its own words, in one sentence."""
    agree(home)
    (home / "code").write_text("1")
    refused = CliRunner().invoke(service, ["install", LINK])
    assert str(refused.exception) == "service: `systemctl --user daemon-reload` says: 1"
    (home / "says").write_text("Created symlink a → b.\nJob for barnraise.service failed.\nSee its status.\n")
    refused = CliRunner().invoke(service, ["install", LINK])
    assert str(refused.exception).endswith("says: Job for barnraise.service failed. See its status.")
    refused = CliRunner().invoke(service, ["remove"])
    assert isinstance(refused.exception, BadInputError) and not (home / "settings" / "links" / RUN_ID).exists(), (
        "the secret stayed, and the next `remove` said that none is installed"
    )


def test_status_says_what_the_system_says_or_that_it_does_not_answer(home: Path) -> None:
    """A service that has stopped is an answer, whatever the exit code; a system that says nothing is an error."""
    agree(home)
    assert CliRunner().invoke(service, ["install", LINK]).exit_code == 0
    (home / "code").write_text("3")
    (home / "prints").write_text("barnraise.service: inactive (dead)\n")
    stopped = CliRunner().invoke(service, ["status"])
    assert stopped.exit_code == 0 and stopped.output == "barnraise.service: inactive (dead)\n"
    (home / "prints").write_text("")
    (home / "says").write_text("Failed to connect to bus: No medium found\n")
    (home / "code").write_text("1")
    silent = CliRunner().invoke(service, ["status"])
    assert isinstance(silent.exception, BadInputError)
    assert str(silent.exception).endswith("the system does not answer: Failed to connect to bus: No medium found")


def test_a_system_without_namespaces_gets_a_unit_without_the_lines_that_need_them(home: Path) -> None:
    """Where systemd ends it with 226/NAMESPACE the first group of lines goes, then the second, and that is said; all
    else stays. Another failure is none of these."""
    agree(home)
    unit = home / "config" / "systemd" / "user" / "barnraise.service"
    (home / "refuses").write_text("^ProtectKernelTunables\n")
    (home / "status").write_text("226\n")
    done = CliRunner().invoke(service, ["install", LINK], catch_exceptions=False)
    assert "It works without ProtectKernelTunables, ProtectControlGroups: this system" in " ".join(done.output.split())
    whole = systemd_unit(["x"], [home]).splitlines()
    kept = [line.partition("=")[0] for line in unit.read_text().splitlines()]
    names = [line.partition("=")[0] for line in whole]
    assert [name for name in names if name not in kept] == ["ProtectKernelTunables", "ProtectControlGroups"]
    (home / "refuses").write_text("^PrivateTmp\n")
    done = CliRunner().invoke(service, ["install", LINK], catch_exceptions=False)
    assert "ProtectControlGroups, ProtectSystem, ReadWritePaths, PrivateTmp" in " ".join(done.output.split())
    assert "NoNewPrivileges=yes" in unit.read_text() and "Protect" not in unit.read_text()
    (home / "status").write_text("1\n")
    refused = CliRunner().invoke(service, ["install", LINK])
    assert isinstance(refused.exception, BadInputError) and "PrivateTmp=yes" in unit.read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """Its own checker finds nothing to say, with blanks, quotes and percent signs in the paths too."""
    odd = tmp_path / 'a b%c"d\\e'
    odd.mkdir()
    unit = tmp_path / "barnraise.service"
    unit.write_text(systemd_unit([sys.executable, "-m", "protocol.cli", "join", str(odd / "li$nk")], [odd]))
    command = ["systemd-analyze", "--user", "verify", "--man=no", str(unit)]
    runtime = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=runtime)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr


def test_a_service_keeps_to_the_limits_that_the_owners_terminal_shows(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's manager has not the variables of a shell, by which the settings may lie elsewhere."""
    folder = home / "my $ettings%"
    monkeypatch.setenv("BARNRAISE_CONFIG", str(folder))
    lines = Service("linux").text(["join", "x"], []).decode().splitlines()
    assert f'Environment="BARNRAISE_CONFIG={folder}%"' in lines, "a percent sign is doubled, a dollar is not"
    agent = plistlib.loads(Service("darwin").text(["join", "x"], []))
    assert agent["EnvironmentVariables"] == {"BARNRAISE_CONFIG": str(folder)}
    monkeypatch.delenv("BARNRAISE_CONFIG")
    lines = Service("linux").text(["join", "x"], []).decode().splitlines()
    assert f'Environment="BARNRAISE_CONFIG={home / "config" / "barnraise"}"' in lines


def test_the_other_systems_texts_can_be_read(tmp_path: Path) -> None:
    """A property list and an XML file with the command in it, whole; neither was run on its system yet."""
    command = ["/opt/py thon", "join", "a&b<c"]
    agent = plistlib.loads(launch_agent(command, tmp_path / "log"))
    assert agent["ProgramArguments"] == command and agent["RunAtLoad"] is True
    root = ElementTree.fromstring(scheduled_task(command).split("?>", 1)[1])
    parts = {node.tag.rpartition("}")[2]: node.text for node in root.iter()}
    assert (parts["Command"], parts["Arguments"]) == ("/opt/py thon", "join a&b<c")
    for system in ("win32", "darwin", "linux"):
        assert all(Service(system).orders(what) for what in ("install", "remove", "status"))


def test_windows_starts_it_with_blanks_in_all_its_paths_and_no_window(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a line for cmd, which takes away the first quote and the last: with a blank in the program's path nothing
    started, and without one a console stood open."""
    scripts = home / "Program Files" / "Python"
    scripts.mkdir(parents=True)
    monkeypatch.setattr("sys.executable", str(scripts / "python.exe"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "a b"))
    here = Service("win32", "second")
    log = home / "a b" / "barnraise" / "log" / "barnraise-second.log"
    words = ["join", r"C:\my links\x", "--limit", "up=5 Mbit/s"]
    assert here.command(words)[0] == str(scripts / "python.exe"), "some Pythons come without the other"
    (scripts / "pythonw.exe").touch()
    root = ElementTree.fromstring(here.text(words, []).decode("utf-16").split("?>", 1)[1])
    parts = {node.tag.rpartition("}")[2]: node.text or "" for node in root.iter()}
    assert parts["Command"] == str(scripts / "pythonw.exe")
    assert parts["Arguments"] == f'-m node.platform.logged "{log}" join "C:\\my links\\x" --limit "up=5 Mbit/s"'


def test_windows_starts_it_for_its_owner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task for whoever logs on takes an administrator to make, and would lend the computer in others' names."""
    monkeypatch.setenv("USERDOMAIN", "HOME-PC")
    monkeypatch.setenv("USERNAME", "Ann & Bo")
    text = Service("win32").text(["join", "x"], []).decode("utf-16")
    root = ElementTree.fromstring(text.split("?>", 1)[1])
    assert [node.text for node in root.iter() if node.tag.endswith("}UserId")] == ["HOME-PC\\Ann & Bo"] * 2


def test_macos_takes_it_again_after_it_has_let_go_of_the_one_before(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launchd refuses what it has already, and ends one only after its order to do so has come back."""
    monkeypatch.setattr(service_module, "Service", partial(Service, "darwin"))
    monkeypatch.setattr("node.platform.service.LOOK_S", 0.01)
    monkeypatch.setenv("HOME", str(home))
    agree(home)
    tool = home / "bin" / "launchctl"
    tool.write_text(f"""#!/bin/sh
cd {home}; echo $1 >> asked
case $1 in
    bootstrap) [ ! -e loaded ] && touch loaded ;;
    bootout) [ -e loaded ] && echo > ending ;;
    print) if [ "$(cat ending 2>/dev/null | wc -l)" -ge 3 ]; then rm -f ending loaded; fi
           [ ! -e ending ] || echo >> ending
           [ -e loaded ] ;;
esac
""")
    tool.chmod(0o755)
    for _ in ("first", "second"):
        assert CliRunner().invoke(service, ["install", LINK], catch_exceptions=False).exit_code == 0
    asked = (home / "asked").read_text().split()
    assert asked == ["bootout", "print", "bootstrap", "bootout", "print", "print", "print", "bootstrap"]


def test_a_daemon_without_a_console_writes_a_log(tmp_path: Path) -> None:
    """All that it says, its errors too, behind what stands there; one that has grown too long makes room."""
    log = tmp_path / "my logs" / "x.log"
    log.parent.mkdir()
    log.write_text("before\n")
    command = [sys.executable, "-m", "node.platform.logged", str(log)]
    done = subprocess.run([*command, "--version"], capture_output=True, timeout=60)
    wrong = subprocess.run([*command, "join", "nothing"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, wrong.returncode, wrong.stderr) == (0, b"", 2, b"")
    lines = log.read_text().splitlines()
    assert lines[0] == "before" and lines[1].startswith("barnraise, version") and "join link:" in lines[2]
    with log.open("a") as file:
        file.truncate(LOG_BYTES_MAX + 1)
    subprocess.run([*command, "--version"], capture_output=True, timeout=60)
    assert len(log.read_text().splitlines()) == 1 and log.with_suffix(".old").stat().st_size > LOG_BYTES_MAX


@pytest.mark.parametrize("order", ["remove", "install"])
def test_windows_ends_it_only_after_it_has_left(home: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """Its scheduler ends a process with all that it has begun. Another one of this owner goes on, and a task that has
    ended by itself is removed all the same."""
    folder, file = home / "state" / "barnraise" / RUN_ID / "volunteer", home / "settings" / "links" / RUN_ID
    monkeypatch.setattr(service_module, "Service", partial(Service, "win32"))
    agree(home)
    tool = home / "bin" / "schtasks"
    tool.write_text(f'#!/bin/sh\n[ -e {folder}/control.json ] && echo early >> {home}/asked\necho $1 >> {home}/asked\n'
                    f'[ "$1" != /End ]\n')  # fmt: skip
    tool.chmod(0o755)
    assert CliRunner().invoke(service, ["install", LINK], catch_exceptions=False).exit_code == 0
    (home / "asked").unlink()
    lines = [["pythonw", "join", "other"], ["pythonw", "-m", "node.platform.logged", "log", "join", str(file)]]
    monkeypatch.setattr("psutil.Process", lambda _: SimpleNamespace(cmdline=lambda: lines[0]))
    with Starting(folder, home / "settings" / "limits.toml", RUN_ID, lambda: starting.close()) as starting:
        if order == "remove":
            assert CliRunner().invoke(service, ["install", LINK, "--name", "b"], catch_exceptions=False).exit_code == 0
            CliRunner().invoke(service, ["remove", "--name", "b"], catch_exceptions=False)
            (home / "asked").unlink()
        assert not starting.left, "it belongs to another service"
        lines[0] = lines[1]
        arguments = [order, LINK] if order == "install" else [order]
        done = CliRunner().invoke(service, arguments, catch_exceptions=False)
        assert done.exit_code == 0 and starting.left and NOTHING_BEGUN in " ".join(done.output.split())
    asked = (home / "asked").read_text().split()
    assert asked == (["/End", "/Delete"] if order == "remove" else ["/Create", "/Run"])


def test_the_manager_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """READY and STATUS as one datagram; without a manager nothing happens."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1", "STATUS=working")
        assert manager.recv(100) == b"READY=1\nSTATUS=working"


def test_the_doctor_counts_only_our_own_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was set there is no folder of ours: the owner's own files are nobody's to walk through, and the
    disk still has a figure."""
    monkeypatch.setenv("HOME", str(home))
    (home / "film").write_bytes(bytes(1000))
    sensors = SystemSensors(home / "settings", list)
    now = sensors.read()
    assert now.own_disk_bytes == 0 and now.disk_free_bytes is not None
    asked = []

    def here(folder: Path, _: object) -> SystemSensors:
        asked.append(folder)
        return sensors

    def none(_: object) -> None:
        raise BadInputError("no device")

    monkeypatch.setattr(service_module, "sensors_here", here)
    monkeypatch.setattr(service_module, "ask_device", none)
    service_module.examine()
    assert asked == [home / "settings"]


@pytest.mark.slow
def test_a_report_holds_no_secret(home: Path) -> None:
    """The link, the identity's seed, tokens of page and socket, the owner's folder: none of them is in it."""
    agree(home)
    seed = "barnraise-key-1:" + "a" * 52
    token = "Zk3" * 11
    log = home / "log"
    log.write_text(f"joined by {LINK}\n{seed}\npage http://127.0.0.1:8475/enter/{token}\n{Path.home()}/x\nend\n")
    out = home / "report.zip"
    done = CliRunner().invoke(bugreport, [str(out), "--log", str(log)], catch_exceptions=False)
    assert done.exit_code == 0
    with zipfile.ZipFile(out) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    whole = "\n".join(texts.values())
    assert {"doctor.txt", "limits.json", "log-log"} <= set(texts)
    for secret in (LINK, LINK[20:60], seed, "a" * 52, token, f"{Path.home()}/x"):
        assert secret not in whole
    assert "end" in texts["log-log"] and "ok torch" in texts["doctor.txt"]
    assert scrubbed("loss 3.214 at step 1200") == "loss 3.214 at step 1200"


def test_the_doctor_breaks_no_path_and_says_nothing_twice(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands on a line of its own, also with a space in its name; what a daemon waits for is said once."""
    folder = home / "a long name" / "with spaces" / ("x" * 60)
    status = {
        "run": "tiny", "begun": True, "state": "waiting", "sentence": "waiting for a place in the run",
        "device": {"free": False},
    }  # fmt: skip

    def none(_: object) -> None:
        raise BadInputError("no device")

    monkeypatch.setattr(service_module, "ask_device", none)
    monkeypatch.setattr(service_module, "noted_folders", lambda: [folder])
    monkeypatch.setattr(service_module, "ask", lambda *_: status)
    lines = CliRunner().invoke(doctor, []).output.splitlines()
    at = lines.index("ok   daemon       tiny  WAITING  for a place in the run")
    assert lines[at + 1].strip() == str(folder)
    assert any(line.strip().endswith("limits.toml") and " " not in line.strip() for line in lines)
    monkeypatch.setenv("HOME", str(home))
    assert shown_path(home / "state") == "~/state" and shown_path(Path("/srv/x")) == "/srv/x"


@pytest.mark.slow
def test_the_doctor_names_what_is_wrong(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sensors, device and versions are listed; a limits file with a slip is named, with exit code 1."""
    done = CliRunner().invoke(doctor, ["--json"], catch_exceptions=False)
    rows = {row["what"].strip(): row for row in json.loads(done.output)}
    assert "GB free" in rows["disk"]["says"]
    assert {"torch", "limits", "device", "idle", "battery", "disk", "clock"} <= set(rows) and done.exit_code == 0
    (home / "settings").mkdir(exist_ok=True)
    (home / "settings" / "limits.toml").write_text('up = "5 apples"\n')

    def broken(_: object) -> None:
        raise BadInputError("the device could not be measured: it burns")

    monkeypatch.setattr(service_module, "ask_device", broken)  # the real one was asked above
    done = CliRunner().invoke(doctor, [])
    assert "BAD  device       the device could not be measured: it burns" in done.output
    assert done.exit_code == 1 and "BAD  limits" in done.output and "'5 apples' is no rate" in done.output
