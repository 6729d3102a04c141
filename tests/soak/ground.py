"""Where the processes of a soak live: disks of a few megabytes and a network of their own, which vanish with it.

With root, `unshare` and `ip` the soak starts itself again in a mount and a network namespace. Inside, each process has
a small file system in memory for its state, and each node is a host on a bridge. Nothing outside notices; what is left
when the last process is gone is nothing. Without them everything is on loopback and on the ordinary disk, and the kinds
of faults that need more are left out, loudly.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INSIDE = "BARNRAISE_SOAK_INSIDE"
BRIDGE, NET = "soak0", "10.93.0"
DISK_MB = 128
LENT_DISK_MB = 1280
"""A volunteer leaves its owner a gigabyte; memory is taken only by what is written."""
RULES = "table inet soak {\n chain seen { type filter hook input priority 0; iifname soak0 drop; }\n}\n"
"""What reaches the coordinator, whose address is the bridge's own; what hosts say to each other passes."""


def why_not() -> str:
    """Why this machine makes no such namespaces, or an empty string."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [program for program in ("unshare", "ip", "nft", "mount") if shutil.which(program) is None]
    if missing:
        return f"namespaces need {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "-m", "-n", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt && ip link add soak0 type bridge"],
        capture_output=True, check=False,
    )  # fmt: skip
    return f"this machine makes no namespaces: {tried.stderr.decode().strip()}" if tried.returncode else ""


def enter(words: Sequence[str]) -> bool:
    """Goes on inside, in a new process image: returns only where that is so already (true) or cannot be (false)."""
    if os.environ.get(INSIDE):
        return True
    if reason := why_not():
        print(f"NO full disks and NO partitions in this soak: {reason}", file=sys.stderr, flush=True)
        return False
    os.environ[INSIDE] = "1"
    command = ["unshare", "-m", "-n", "--kill-child", sys.executable, "-m", "tests.soak", *words]
    os.execvp(command[0], command)


class Ground:
    """What processes stand on: `home` and `within` for each, and what can be taken from under their feet."""

    def __init__(self, folder: Path, inside: bool) -> None:
        self.folder = folder
        self.inside = inside
        self.address = f"{NET}.1" if inside else "127.0.0.1"
        """The coordinator's."""
        self._hosts: dict[str, int] = {}
        self._mounted: list[Path] = []
        if inside and not self._is_bridged():
            for line in (
                "mount -t tmpfs none /run",
                "ip link set lo up",
                f"ip link add {BRIDGE} type bridge",
                f"ip addr add {NET}.1/24 dev {BRIDGE}",
                f"ip link set {BRIDGE} up",
            ):
                _run(line)

    def _is_bridged(self) -> bool:
        return Path(f"/sys/class/net/{BRIDGE}").exists() or not subprocess.run(
            ["ip", "link", "show", BRIDGE], capture_output=True, check=False
        ).returncode  # fmt: skip

    def disk(self, name: str, megabytes: int = DISK_MB) -> Path:
        """A folder with a small disk of its own where that can be."""
        path = self.folder / name
        path.mkdir(parents=True)
        if self.inside:
            _run(f"mount -t tmpfs -o size={megabytes}m none {path}")
            self._mounted.append(path)
        return path

    def host(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The address of a node, and what its command runs within."""
        if not self.inside:
            return self.address, ()
        number = self._hosts[name] = len(self._hosts) + 10
        for line in (
            f"ip netns add {name}",
            f"ip link add v{number} type veth peer name eth0 netns {name}",
            f"ip link set v{number} master {BRIDGE} up",
            f"ip -n {name} addr add {NET}.{number}/24 dev eth0",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} link set lo up",
        ):
            _run(line)
        return f"{NET}.{number}", ("ip", "netns", "exec", name)

    def cut(self, name: str) -> None:
        """Nothing reaches the host any more, and nothing leaves it; of the coordinator: nothing reaches it."""
        if name in self._hosts:
            _run(f"ip link set v{self._hosts[name]} down")
        else:
            subprocess.run(["nft", "-f", "-"], input=RULES.encode(), check=True)

    def join(self, name: str) -> None:
        """As before."""
        if name in self._hosts:
            _run(f"ip link set v{self._hosts[name]} up")
        else:
            _run("nft delete table inet soak")

    def clear(self) -> None:
        """Hosts and disks of a run that is over go; its processes have ended."""
        for name, number in self._hosts.items():
            _run(f"ip link del v{number}")
            _run(f"ip netns del {name}")
        for path in self._mounted:
            _run(f"umount -l {path}")
        self._hosts.clear()
        self._mounted.clear()


def _run(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True)
