"""A lent computer that starts with its owner's session: a systemd user unit, a LaunchAgent, or a scheduled task.

Never a system service: in session 0 Windows sees neither the owner's idle time nor the GPU, and nobody else's account
should lend a computer. The join link lies in a file of mode 0600 and is not part of the command. The texts are made by
functions that change nothing; `Service` writes them and tells the system's own tool. Where the owner's settings lie
stands in them, since a session's manager does not know what the owner's shell has set: the limits that a terminal shows
must be those that the service keeps to.
"""

from __future__ import annotations

import contextlib
import os
import plistlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from platformdirs import user_config_path, user_log_path

from node.platform.places import CONFIG_VARIABLE, settings_folder
from protocol.base.errors import BadInputError

NAME = "barnraise"
WATCHDOG_S = 60
"""The daemon says that it lives at every look of its keeper, three times a second; one that hangs is restarted."""
START_S = 300
"""Until it says that it is ready: on a busy computer torch alone takes a minute to load."""
STOP_S = 90
"""Draining takes a minute at most; then it is killed."""
LOOK_S = 0.5
"""How often it is looked whether macOS has let go of one."""
NAMESPACED = (("ProtectKernelTunables", "ProtectControlGroups"), ("ProtectSystem", "ReadWritePaths", "PrivateTmp"))
"""Lines of the unit for which systemd needs namespaces of its own. Where the system does not give them to a user (user
namespaces are off, or it is a container) a service with such a line does not start, so these are left out, the first
group first."""
REFUSED = ("226", "203")
"""How systemd ends a service whose namespaces cannot be (NAMESPACE), or whose program its own /tmp hides (EXEC)."""


def systemd_unit(command: Sequence[str], writable: Sequence[Path], without: Sequence[str] = ()) -> str:
    """The user unit. Hardened by what user managers can do; torch needs memory that it writes and runs.

    Args:
        without: names of lines that this system does not take.
    """
    lines = _unit(command, writable).splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("=")[0] not in without)


def _unit(command: Sequence[str], writable: Sequence[Path]) -> str:
    paths = " ".join(_word(str(path)) for path in writable)
    return f"""[Unit]
Description=Barnraise: lends this computer to a training run, within its owner's limits
Documentation=man:systemd.service(5)
StartLimitIntervalSec=1h
StartLimitBurst=10

[Service]
Type=notify
NotifyAccess=main
Environment={_word(f"{CONFIG_VARIABLE}={settings_folder().absolute()}")}
ExecStart={" ".join(_word(word).replace("$", "$$") for word in command)}
WatchdogSec={WATCHDOG_S}
Restart=on-failure
RestartSec=30
RestartPreventExitStatus=2
KillMode=mixed
TimeoutStartSec={START_S}
TimeoutStopSec={STOP_S}
Nice=5
CPUWeight=idle
IOSchedulingClass=idle
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
UMask=0077
ProtectSystem=strict
ReadWritePaths={paths}
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes

[Install]
WantedBy=default.target
"""


def _word(word: str) -> str:
    """As one word of a line; a command's own have their dollars doubled, too."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def launch_agent(command: Sequence[str], log: Path, label: str = NAME) -> bytes:
    """The property list of macOS. Unverified: nobody has run this on a Mac yet."""
    return plistlib.dumps(
        {
            "Label": label,
            "ProgramArguments": list(command),
            "EnvironmentVariables": {CONFIG_VARIABLE: str(settings_folder().absolute())},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ProcessType": "Background",
            "LowPriorityIO": True,
            "Nice": 5,
            "ExitTimeOut": STOP_S,
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
        }
    )


def scheduled_task(command: Sequence[str], owner: str = "") -> str:
    """The task of Windows, at logon, with the owner's own rights. Unverified: nobody has run this on Windows yet.

    The program itself and no shell: `cmd /c` takes the first and the last quote of a line away, so that a path with a
    space was two words, and its window stays open. `owner`, as COMPUTER\\NAME: without it the task would be for whoever
    logs on, which only an administrator may ask for.
    """
    whose = f"<UserId>{escape(owner)}</UserId>" if owner else ""
    program, arguments = command[0], subprocess.list2cmdline(list(command[1:]))
    return f"""<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <Triggers><LogonTrigger><Enabled>true</Enabled>{whose}</LogonTrigger></Triggers>
  <Principals><Principal id="owner">{whose}<LogonType>InteractiveToken</LogonType><RunLevel>LeastPrivilege</RunLevel>
  </Principal></Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Priority>7</Priority>
    <RestartOnFailure><Interval>PT1M</Interval><Count>10</Count></RestartOnFailure>
  </Settings>
  <Actions Context="owner">
    <Exec><Command>{escape(program)}</Command><Arguments>{escape(arguments)}</Arguments></Exec>
  </Actions>
</Task>
"""


@dataclass(frozen=True)
class Service:
    """How this system does it. `platform`: as `sys.platform` says; `name`: of a further one beside the first."""

    platform: str = sys.platform
    name: str = ""

    @property
    def label(self) -> str:
        """How the system calls it."""
        return f"{NAME}-{self.name}" if self.name else NAME

    @property
    def file(self) -> Path:
        """Where the description lies."""
        if self.platform == "win32":
            return settings_folder() / f"{self.label}.xml"
        if self.platform == "darwin":
            return Path.home() / "Library" / "LaunchAgents" / f"{self.label}.plist"
        return user_config_path("systemd") / "user" / f"{self.label}.service"

    @property
    def log(self) -> str:
        """Where its words go, for people."""
        return str(self._log_file) if self.platform in ("win32", "darwin") else f"journalctl --user -u {self.label}"

    @property
    def _log_file(self) -> Path:
        return user_log_path(NAME) / f"{self.label}.log"

    @property
    def ends_at_once(self) -> bool:
        """Whether the system ends it without a word to it: it has to be told to leave before."""
        return self.platform == "win32"

    def command(self, words: Sequence[str]) -> list[str]:
        """What the system starts for these words of `barnraise`."""
        if self.platform != "win32":
            return [sys.executable, "-m", "protocol.cli", *words]
        quiet = Path(sys.executable).with_name("pythonw.exe")  # has no console, so nobody sees a window
        program = str(quiet) if quiet.is_file() else sys.executable
        return [program, "-m", "node.platform.logged", str(self._log_file), *words]

    def text(self, words: Sequence[str], writable: Sequence[Path], without: Sequence[str] = ()) -> bytes:
        """What `install` writes."""
        command = self.command(words)
        if self.platform == "win32":
            whose = "\\".join(filter(None, (os.environ.get("USERDOMAIN"), os.environ.get("USERNAME"))))
            return scheduled_task(command, whose).encode("utf-16")
        if self.platform == "darwin":
            return launch_agent(command, self._log_file, self.label)
        return systemd_unit(command, writable, without).encode()

    def orders(self, what: str) -> list[list[str]]:
        """The commands that make the system take notice: `install`, `remove`, or `status`."""
        file = str(self.file)
        if self.platform == "win32":
            return {
                "install": [
                    ["schtasks", "/Create", "/TN", self.label, "/XML", file, "/F"],
                    ["schtasks", "/Run", "/TN", self.label],
                ],
                "remove": [["schtasks", "/End", "/TN", self.label], ["schtasks", "/Delete", "/TN", self.label, "/F"]],
                "status": [["schtasks", "/Query", "/TN", self.label]],
            }[what]
        if self.platform == "darwin":
            domain = f"gui/{os.getuid()}"
            return {
                "install": [["launchctl", "bootstrap", domain, file]],
                "remove": [["launchctl", "bootout", f"{domain}/{self.label}"]],
                "status": [["launchctl", "print", f"{domain}/{self.label}"]],
            }[what]
        unit = f"{self.label}.service"
        return {
            "install": [  # one that runs already must start anew: `enable --now` would leave it as it was
                ["systemctl", "--user", "daemon-reload"],
                ["systemctl", "--user", "enable", unit],
                ["systemctl", "--user", "restart", unit],
            ],
            "remove": [["systemctl", "--user", "disable", "--now", unit]],
            "status": [["systemctl", "--user", "--no-pager", "status", unit]],
        }[what]

    def install(self, words: Sequence[str], writable: Sequence[Path]) -> tuple[str, ...]:
        """Writes it and has the system start it with these words of `barnraise`; returns the lines that had to be left
        out. Raises `BadInputError` with what the system said."""
        without: tuple[str, ...] = ()
        for more in (*NAMESPACED, None):
            self._write(self.text(words, writable, without))
            if self.platform == "darwin":
                self._unload()
            try:
                self._tell("install")
            except BadInputError:
                if more is None or not self._is_refused():
                    raise
                without += more
            else:
                break
        return without

    def _unload(self) -> None:
        """On macOS: one that is loaded already is refused, so it goes first, which takes as long as it has work to end;
        the order itself comes back at once. Unverified like the rest."""
        remove, status = self.orders("remove")[0], self.orders("status")[0]
        deadline = time.monotonic() + STOP_S
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # `install` says what does not work here
            subprocess.run(remove, capture_output=True, timeout=START_S, check=False)  # noqa: S603
            while not subprocess.run(status, capture_output=True, timeout=20, check=False).returncode:  # noqa: S603
                if time.monotonic() > deadline:
                    break
                time.sleep(LOOK_S)

    def _write(self, text: bytes) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_bytes(text)
        except OSError as error:
            raise BadInputError(f"{self.file}: cannot be written: {error.strerror or error}") from None

    def _is_refused(self) -> bool:
        """Whether systemd could not even begin it as hardened as it is."""
        if self.platform in ("win32", "darwin"):
            return False
        show = ["systemctl", "--user", "show", "--property=ExecMainStatus", "--value", f"{self.label}.service"]
        try:
            done = subprocess.run(show, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
        except (OSError, subprocess.SubprocessError):
            return False
        return done.stdout.strip() in REFUSED

    def remove(self) -> None:
        if not self.file.exists():
            raise BadInputError("service: none is installed")
        try:
            self._tell("remove")
        finally:
            self.file.unlink(missing_ok=True)

    def status(self) -> str:
        """What the system says of it. Raises `BadInputError` where it says nothing: nobody is logged in, for one."""
        if not self.file.exists():
            return "no service is installed; `barnraise service install LINK` does"
        try:
            done = subprocess.run(self.orders("status")[0], capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
        except (OSError, subprocess.SubprocessError) as error:
            raise BadInputError(f"service: {self.file} is there, but the system does not answer: {error}") from None
        if said := done.stdout.strip():  # of a service that has stopped, too, whatever the exit code
            return said
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise BadInputError(f"service: {self.file} is there, but the system does not answer: {why}")

    def _tell(self, what: str) -> None:
        for order in self.orders(what):
            try:
                done = subprocess.run(order, capture_output=True, text=True, timeout=START_S + 30, check=False)  # noqa: S603
            except (OSError, subprocess.SubprocessError) as error:
                raise BadInputError(f"service: `{' '.join(order)}` does not work here: {error}") from None
            if done.returncode and "/End" not in order:  # which finds none to end after it has left in peace
                lines = (done.stderr or done.stdout).strip().splitlines()
                said = " ".join(line for line in lines if not line.startswith("Created symlink"))  # what went well
                raise BadInputError(f"service: `{' '.join(order)}` says: {said or done.returncode}")
