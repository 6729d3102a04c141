"""What an installation is made of, and what a service may do: points O1 and O4 of protocol/THREATS.md."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[1] / "deploy"
NOT_LISTED = {"torch", "mlflow", "tensorboard", "wandb"}
"""Builds of torch differ by machine; the others no setup installs."""
EXPOSURE_MOST = 20
"""Of `systemd-analyze security`, in tenths."""


def listed() -> dict[str, list[str]]:
    """SHA-256 of the files that may be installed, by what the line names."""
    text = (DEPLOY / "hashes.txt").read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {name: [word.removeprefix("--hash=sha256:") for word in hashes] for name, *hashes in lines}


def test_every_version_that_setup_installs_has_its_hashes() -> None:
    """And nothing else but setuptools, which builds Barnraise: a version that is changed needs new hashes."""
    constraints = (DEPLOY / "constraints.txt").read_text().splitlines()
    versions = {line.lower().replace("_", "-") for line in constraints if not line.startswith("#")}
    wanted = {line for line in versions if line.partition("==")[0] not in NOT_LISTED}
    found = {name.lower().replace("_", "-"): hashes for name, hashes in listed().items()}
    assert {name for name in found if not name.startswith("setuptools==")} == wanted
    assert all(hashes and all(re.fullmatch("[0-9a-f]{64}", each) for each in hashes) for hashes in found.values())


def wheel(folder: Path, content: str) -> Path:
    """A package of one module."""
    record, path = [], folder / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (
            ("thing.py", content),
            ("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"),
            ("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
        ):  # fmt: skip
            archive.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(text)}\n")
        archive.writestr("thing-1.0.dist-info/RECORD", "".join(record) + "thing-1.0.dist-info/RECORD,,\n")
    return path


@pytest.mark.slow
def test_a_locked_setup_works_without_a_network_and_a_changed_wheel_ends_it(tmp_path: Path) -> None:
    """From a folder of wheels: what is listed is installed; with one byte changed nothing is, and setup says why."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "wheels").mkdir()
    shutil.copy(DEPLOY / "setup", tmp_path / "deploy" / "setup")
    path = wheel(tmp_path / "wheels", "answer = 42\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "deploy" / "constraints.txt").write_text("thing==1.0\n")
    (tmp_path / "deploy" / "hashes.txt").write_text(f"thing==1.0 --hash=sha256:{digest}\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "nothing"\nversion = "1"\n')
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_CONFIG_FILE": os.devnull}
    environment |= {"PYTHON": sys.executable}

    def locked() -> tuple[str, bool]:
        """What it says, and whether the package is there; whether the rest is built depends on what Python brings."""
        command = [str(tmp_path / "deploy" / "setup"), "--locked"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        found = list((tmp_path / ".venv").rglob("thing.py"))
        assert done.returncode == 0 or not list((tmp_path / ".venv").glob("barnraise-*"))
        return done.stderr, bool(found)

    said, there = locked()
    assert there and "HASHES" not in said
    for stamp in (tmp_path / ".venv").glob("barnraise-*"):
        stamp.unlink()
    data = bytearray(path.read_bytes())
    data[data.index(b"42")] ^= 1
    path.write_bytes(data)
    said, there = locked()
    assert not there and "DO NOT MATCH THE HASHES" in said


def exposure(unit: Path) -> float:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return 10 * float(found[1])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda unit: unit.stem)
def test_a_service_may_do_little(unit: Path, tmp_path: Path) -> None:
    """By systemd's own score, which rises above the bound as soon as what takes rights away is taken away."""
    assert exposure(unit) <= EXPOSURE_MOST
    open_door = tmp_path / unit.name
    away = ("CapabilityBoundingSet", "ProtectSystem", "PrivateUsers", "SystemCallFilter", "RestrictAddressFamilies")
    open_door.write_text("".join(line for line in unit.read_text().splitlines(True) if not line.startswith(away)))
    assert exposure(open_door) > EXPOSURE_MOST


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda unit: unit.stem)
def test_what_no_start_can_mend_is_not_started_for_ever(unit: Path) -> None:
    """Exit code 2 is a sentence about a file or an option that is wrong (`protocol.cli`)."""
    lines = unit.read_text().splitlines()
    assert "Restart=on-failure" in lines and "RestartPreventExitStatus=2" in lines


def test_a_join_link_gets_into_no_journal_and_no_process_list() -> None:
    """What the coordinator's service prints are links; the container's example gives one in a file."""
    unit = (DEPLOY / "systemd" / "barnraise-coordinator.service").read_text().splitlines()
    assert "StandardOutput=null" in unit and "StandardError=journal" in unit
    commands = [line for line in (DEPLOY / "Containerfile").read_text().splitlines() if "docker run" in line]
    assert commands and not any(re.search(r"BARNRAISE_LINK=|barnraise://", line) for line in commands)
