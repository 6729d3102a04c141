"""deploy/natbed and deploy/wan: whatever ends them, nothing is left, and nobody else decides what root does."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.namespaces import alone, why_not

DEPLOY = Path(__file__).parents[2] / "deploy"
PATIENCE_S = 60.0
_VETH = ["ip", "-n", "NAME", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"]
_WHY_NOT = why_not(("ip", "nft", "bash"), _VETH, "this kernel makes no veth pairs")
BEDS = {"natbed": ("brn-", "/tmp/natbed.lock", "up"), "wan": ("brw-", "/tmp/barnraise-wan.lock", "veth")}
"""Of each script: how its namespaces are called, the lock under which tests use them, and what builds them."""

pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "there are namespaces here")


class Bed:
    """One of the two scripts, with a folder of the test's own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.environment = name, folder / "run", dict(os.environ)
        self.environment |= {"NATBED_RUN": str(self.folder), "WAN_RUN": str(self.folder)}
        self.prefix, self.lock, self.up = BEDS[name]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [str(DEPLOY / self.name), *arguments]
        return subprocess.Popen(
            command, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        said, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said

    def namespaces(self) -> list[str]:
        done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        return [line.split()[0] for line in done.stdout.splitlines() if line.startswith(self.prefix)]


def waits_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(params=sorted(BEDS))
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    made = Bed(request.param, tmp_path)
    with alone(Path(made.lock)):
        yield made
        made.run("down")


def shadowed(bed: Bed, folder: Path, program: str, script: str) -> None:
    """From now on the script finds another program by this name. REAL in `script` stands for the true one."""
    real = shutil.which(program)
    assert real is not None
    folder.mkdir()
    (folder / program).write_text(f"#!/bin/bash\n{script}\n".replace("REAL", real))
    (folder / program).chmod(0o755)
    bed.environment["PATH"] = f"{folder}:{bed.environment['PATH']}"


@pytest.mark.slow
def test_a_bed_that_cannot_be_built_to_its_end_is_gone(bed: Bed, tmp_path: Path) -> None:
    """Half a bed would answer, and wrongly: a command that fails takes all of it away."""
    refuses = {"natbed": '[[ $* = *"-4"* || $* = *"l-home2"* ]] && exit 7; exec REAL "$@"',
               "wan": '[[ $* = *"10.77.0.2"* ]] && exit 7; exec REAL "$@"'}[bed.name]  # fmt: skip
    shadowed(bed, tmp_path / "bin", "ip", refuses)
    code, _ = bed.run(bed.up)
    assert code != 0
    assert bed.namespaces() == []


@pytest.mark.slow
def test_a_bed_whose_building_is_interrupted_is_gone(bed: Bed, tmp_path: Path) -> None:
    """As by Ctrl-C or a closed terminal: it says so by its exit code."""
    shadowed(bed, tmp_path / "bin", "ip", '[[ $* = *"addr add"* ]] && sleep 0.3; exec REAL "$@"')
    process = bed.start(bed.up)
    waits_for(lambda: len(bed.namespaces()) >= 2)
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    assert bed.namespaces() == []


@pytest.mark.slow
def test_who_does_not_end_when_the_bed_goes_down_is_killed(bed: Bed) -> None:
    """In a namespace without a name nobody would find it again."""
    assert bed.run(bed.up)[0] == 0
    inside = bed.namespaces()[-1]
    command = ["ip", "netns", "exec", inside, "bash", "-c", 'trap "" TERM; echo there; while true; do sleep 0.2; done']
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as stubborn:
        try:
            assert stubborn.stdout is not None and stubborn.stdout.readline() == "there\n"
            assert bed.run("down")[0] == 0
            assert stubborn.wait(timeout=PATIENCE_S) == -9
        finally:
            stubborn.kill()
    assert bed.namespaces() == []


@pytest.mark.slow
def test_the_watchdog_of_a_bed_that_was_forgotten_ends_no_other(bed: Bed, tmp_path: Path) -> None:
    """Tests that were killed left one behind. Twenty minutes later it ended those of somebody else in mid-run."""
    bed.environment["WAN_SECONDS"] = "2"
    assert bed.run(bed.up, *(["2"] if bed.name == "natbed" else []))[0] == 0
    watchdog = Path("/proc", (bed.folder / "watchdog.pid").read_text().strip())
    other = Bed(bed.name, tmp_path / "other")
    other.folder.parent.mkdir()
    try:
        assert other.run(other.up)[0] == 0
        there = other.namespaces()
        waits_for(lambda: not watchdog.exists())
        assert there and other.namespaces() == there
    finally:
        other.run("down")


@pytest.mark.parametrize("how", ["of another user", "a link", "open to all"])
def test_a_folder_that_others_made_is_not_used(bed: Bed, tmp_path: Path, how: str) -> None:
    """Root runs a program and kills by numbers that lie there, and it is in /tmp unless told."""
    real = tmp_path / "elsewhere"
    real.mkdir(mode=0o700)
    if how == "of another user":
        os.chown(real, 65534, 65534)
    if how == "open to all":
        real.chmod(0o777)
    if how == "a link":
        bed.folder.symlink_to(real)
    else:
        real.rename(bed.folder)
    code, said = bed.run(bed.up)
    assert code == 1 and "is not a folder that belongs to this user alone" in said
    assert bed.namespaces() == [] and not any(bed.folder.iterdir())


@pytest.mark.slow
def test_a_bed_works_without_the_program_sysctl(bed: Bed, tmp_path: Path) -> None:
    """Small systems have none; without forwarding nothing would pass, and nobody would know why."""
    shadowed(bed, tmp_path / "bin", "sysctl", "exit 127")
    assert bed.run(bed.up)[0] == 0
    where, path, value = {
        "natbed": ("brn-gw-home", "net/ipv4/ip_forward", "1"),
        "wan": ("brw-a", "net/ipv6/conf/all/disable_ipv6", "1"),
    }[bed.name]
    command = ["ip", "netns", "exec", where, "cat", f"/proc/sys/{path}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == value
