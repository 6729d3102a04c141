"""deploy/test, test-deps, supply and gpu-check, with programs of the test's own in place of those that they start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
PATIENCE_S = 60.0
DEBIAN_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="a script for Debian, in a bash of this century")


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


class Tree:
    """A copy of one script, with a folder for the programs that it finds, and where they say what they were told."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder, self.said = folder, folder / "said"
        self.script = folder / "deploy" / script
        self.script.parent.mkdir(parents=True)
        shutil.copy(DEPLOY / script, self.script)
        program(folder / "deploy" / "setup", f'echo setup >> "{self.said}"')
        self.environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def run(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(self.script), *arguments]
        return subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S
        )

    def heard(self) -> list[str]:
        return self.said.read_text().splitlines() if self.said.exists() else []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for a process in /proc")
def test_tests_that_are_interrupted_end_with_all_that_they_began(tmp_path: Path) -> None:
    """Ctrl-C does not reach what a script runs in the background, here the look at the types."""
    tree = Tree(tmp_path, "test")
    note = tmp_path / "mypy.pid"
    program(
        tmp_path / ".venv" / "bin" / "python",
        f'case "$2" in mypy) trap "" INT; echo $$ > "{note}.part"; mv "{note}.part" "{note}"; exec sleep 300 ;; '
        f'pytest) while [ ! -e "{note}" ]; do sleep 0.05; done; exit 2 ;; esac',
    )
    assert tree.run().returncode == 2
    deadline = time.monotonic() + PATIENCE_S
    while is_alive(int(note.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("mypy", "pytest_says", "code"), [(0, 0, 0), (1, 0, 1), (1, 1, 1), (0, 1, 1), (0, 4, 4)])
def test_what_fails_is_told_by_the_exit_code(tmp_path: Path, mypy: int, pytest_says: int, code: int) -> None:
    tree = Tree(tmp_path, "test")
    script = f'case "${{2:-}}" in mypy) exit {mypy} ;; pytest) exit {pytest_says} ;; esac; [ "$1" != - ] || echo 0'
    program(tmp_path / ".venv" / "bin" / "python", script)
    done = tree.run("--fast")
    assert done.returncode == code
    assert ("the types are wrong" in done.stderr) == (mypy == 1)


def machine(tmp_path: Path, *, has: str, new: bool = True, netns: int = 0) -> Tree:
    """A Debian on which these packages are to be had."""
    tree = Tree(tmp_path, "test-deps")
    places = tmp_path / "bin"
    program(places / "id", "echo 0")
    program(places / "apt-get", f'echo "apt-get $*" >> "{tree.said}"')
    program(places / "apt-cache", f'case " {has} " in *" $2 "*) echo "$2 | 1 | somewhere" ;; esac')
    program(places / "dpkg-query", "exit 1" if new else "echo install ok installed")
    program(
        places / "systemctl", f'[ "$1" = is-system-running ] && echo running || echo "systemctl $*" >> "{tree.said}"'
    )
    program(places / "ip", f'echo "ip $*" >> "{tree.said}"; [ "$2" != add ] || exit {netns}')
    return tree


DEBIAN = (
    "prometheus iproute2 nftables iputils-ping coturn miniupnpd-nftables gcc libc6-dev postgresql chromium "
    "chromium-driver"
)


@DEBIAN_ONLY
def test_a_system_without_one_of_the_packages_gets_the_others(tmp_path: Path) -> None:
    """Ubuntu's chromium is a snap; apt installs nothing at all when one name is unknown to it."""
    tree = machine(tmp_path, has=DEBIAN.replace("chromium-driver", "").replace("chromium", ""))
    done = tree.run()
    assert done.returncode == 0, done.stderr
    (install,) = [line for line in tree.heard() if " install " in line]
    assert install.endswith("gcc libc6-dev postgresql")
    assert "this system has no chromium chromium-driver" in done.stderr


@DEBIAN_ONLY
def test_services_that_came_along_are_ended_and_those_that_were_there_are_not(tmp_path: Path) -> None:
    """Debian starts what it installs: Prometheus and a TURN server would listen on all addresses."""
    tree = machine(tmp_path / "new", has=DEBIAN)
    assert tree.run().returncode == 0
    ended = [line.split()[-1] for line in tree.heard() if line.startswith("systemctl disable --now")]
    assert ended == ["prometheus", "coturn", "miniupnpd", "postgresql"]
    tree = machine(tmp_path / "old", has=DEBIAN, new=False)
    assert tree.run().returncode == 0
    assert not [line for line in tree.heard() if line.startswith("systemctl")]


@DEBIAN_ONLY
def test_the_look_at_namespaces_leaves_none(tmp_path: Path) -> None:
    """And none that was left by another look stands in its way."""
    names = set()
    for run in ("first", "second"):
        tree = machine(tmp_path / run, has=DEBIAN)
        assert tree.run().returncode == 0
        (made,) = [line.split()[-1] for line in tree.heard() if line.startswith("ip netns add")]
        assert f"ip netns del {made}" in tree.heard()
        names.add(made)
    assert len(names) == 2
    tree = machine(tmp_path / "without", has=DEBIAN, netns=1)
    assert "makes no network namespaces" in tree.run().stderr


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_supply_takes_no_option_for_a_folder(tmp_path: Path, option: str) -> None:
    tree = Tree(tmp_path, "supply")
    done = tree.run(option)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")
    assert {path.name for path in tmp_path.iterdir()} == {"deploy"}


def test_supply_without_an_environment_says_what_is_missing(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "supply")
    done = tree.run()
    assert done.returncode == 2 and "./deploy/setup first" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"deploy"}


def test_a_gpu_check_writes_where_one_is(tmp_path: Path) -> None:
    """And in an environment of one's own it installs nothing; in one that is not whole it does."""
    tree = Tree(tmp_path / "tree", "gpu-check")
    (tmp_path / "mine").mkdir()
    python = tmp_path / "tree" / ".venv" / "bin" / "python"
    program(python, 'case "$1" in -c) exit 0 ;; esac; echo "$PYTHONPATH $*" > figures')
    assert tree.run("--out", "figures", cwd=tmp_path / "mine").returncode == 0
    written = (tmp_path / "mine" / "figures").read_text()
    assert written.startswith(str(tmp_path / "tree")) and written.endswith("-m node.compute.gpu_check --out figures\n")
    assert tree.heard() == []
    program(python, 'case "$1" in -c) exit 1 ;; esac')
    assert tree.run(cwd=tmp_path / "mine").returncode == 0
    assert tree.heard() == ["setup"]


def test_what_a_gpu_check_needs_is_found_in_an_environment_that_has_it() -> None:
    """The words that look for it are right."""
    text = (DEPLOY / "gpu-check").read_text()
    words = text.partition("needed='")[2].partition("'\n")[0]
    assert words and subprocess.run([sys.executable, "-c", words], timeout=PATIENCE_S).returncode == 0
