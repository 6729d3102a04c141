"""The sensors of a GPU are those of the one that computes, found by its id; what the driver does not tell is None."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from node.platform import gpu
from node.platform.places import note_process, note_running, noted_folders
from node.platform.sensors import SystemSensors


class _NvmlError(Exception):
    pass


def driver(monkeypatch: pytest.MonkeyPatch, *gpus: dict[str, Any]) -> None:
    """NVML with these GPUs, in its own order."""

    def tell(name: str) -> Any:
        def ask(device: dict[str, Any], *_: Any) -> Any:
            if device.get(name) is None:
                raise _NvmlError
            return device[name]

        return ask

    nvml = SimpleNamespace(
        NVMLError=_NvmlError, NVML_TEMPERATURE_GPU=0, nvmlDeviceGetUUID=tell("uuid"),
        nvmlDeviceGetTemperature=tell("heat"), nvmlDeviceGetPowerUsage=tell("milliwatts"),
        nvmlDeviceGetEnforcedPowerLimit=tell("limit"),
        nvmlDeviceGetGraphicsRunningProcesses=tell("draws"),
        nvmlDeviceGetComputeRunningProcesses=tell("computes"),
    )  # fmt: skip
    monkeypatch.setattr(gpu, "_driver", lambda: (nvml, gpus))


def test_the_gpu_that_computes_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another card that is hotter, or draws more, is nobody's reason to pause; without a GPU the processor counts."""
    driver(
        monkeypatch,
        {"uuid": b"GPU-aa", "heat": 90, "milliwatts": 400_000, "limit": 450_000},
        {"uuid": "GPU-bb", "heat": 60, "milliwatts": None, "limit": None},
    )
    assert gpu.read("GPU-aa") == gpu.GpuReading(90.0, 400.0) and gpu.power_limit_w("GPU-aa") == 450.0
    assert gpu.read("GPU-bb") == gpu.GpuReading(60.0, None) and gpu.power_limit_w("GPU-bb") is None
    assert gpu.read("") is gpu.read("GPU-cc") is None
    sensors = SystemSensors(tmp_path, list)
    sensors.device_is(True, ("GPU-bb",))
    now = sensors.read()
    assert sensors.gpu and (now.temperature_c, now.power_w) == (60.0, None)
    sensors.device_is(True, ("GPU-aa", "GPU-bb", "GPU-cc"))
    now = sensors.read()
    assert (now.temperature_c, now.power_w) == (90.0, 400.0), "of several the worst"
    assert now.each_device == ((90.0, 400.0), (60.0, None), (None, None))
    sensors.device_is(True, ())
    assert sensors.read().temperature_c is None, "a GPU of another maker is not as hot as the processor"
    sensors.device_is(False, ())
    assert not sensors.gpu and sensors.read().power_w is None


def processes(monkeypatch: pytest.MonkeyPatch, **table: tuple[int, str]) -> None:
    """A system with these processes alone: (parent, command line) by the number behind the letter p."""

    class Process:
        def __init__(self, pid: int) -> None:
            if f"p{pid}" not in table:
                raise psutil.NoSuchProcess(pid)
            self.pid = pid

        def parents(self) -> list[Process]:
            parent = table[f"p{self.pid}"][0]
            return [Process(parent), *Process(parent).parents()] if parent else []

        def cmdline(self) -> list[str]:
            return table[f"p{self.pid}"][1].split()

        def name(self) -> str:
            return self.cmdline()[0].rpartition("/")[2]

    monkeypatch.setattr("psutil.Process", Process)


def holds(pid: int, megabytes: float | None = 4000.0) -> SimpleNamespace:
    """A process as the driver lists it; under Windows it does not tell how much memory that has."""
    return SimpleNamespace(pid=pid, usedGpuMemory=None if megabytes is None else int(megabytes * 1e6))


def noted(folder: Path, pid: int) -> None:
    """As a daemon notes itself that works from this state folder."""
    folder.mkdir()
    (folder / "control.json").write_text(json.dumps({"address": "unix:x", "token": "", "pid": pid}))
    note_running(folder)


def test_two_daemons_with_a_card_each_are_no_games_to_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each saw the device's process of the other, said "python is running, which counts as a game", and paused; then
    both did."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path / "settings"))
    driver(monkeypatch, {"draws": [], "computes": [holds(101)]}, {"draws": [], "computes": [holds(201)]})
    processes(
        monkeypatch, p1=(0, "init"),
        p100=(1, "python -m protocol.cli join a"), p101=(100, "python -m node.compute.device_process"),
        p200=(1, "python /opt/bin/barnraise join b"), p201=(200, "python -m node.compute.device_process"),
    )  # fmt: skip
    assert gpu.foreign_pids([100, 101]) == [201], "nobody has noted it: it is anybody's program"
    noted(tmp_path / "b", 200)
    assert gpu.foreign_pids([100, 101]) == []
    noted(tmp_path / "a", 100)
    assert gpu.foreign_pids([200, 201]) == []


def test_a_server_beside_a_lent_card_is_no_game(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server computes on a card of its own while its stage is empty, and has no door for an owner by which it was
    known: the lent card beside it paused for "python is running, which counts as a game", for as long as it ran."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path / "settings"))
    driver(monkeypatch, {"draws": [], "computes": [holds(os.getpid())]})
    processes(monkeypatch, **{f"p{os.getpid()}": (0, "python -m protocol.cli server a")})
    (tmp_path / "server").mkdir()
    assert gpu.foreign_pids([]) == [os.getpid()]
    forget = note_process(tmp_path / "server")
    assert gpu.foreign_pids([]) == []
    forget()
    assert gpu.foreign_pids([]) == [os.getpid()] and noted_folders() == []
    assert not list((tmp_path / "server").iterdir())


def test_a_note_that_stayed_behind_hides_no_game(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a power loss the note lies there still, and its number is another program's; one that is damaged or whose
    daemon has gone hides nobody either."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path / "settings"))
    driver(monkeypatch, {"draws": [holds(200)], "computes": [holds(300)]})
    processes(monkeypatch, p1=(0, "init"), p200=(1, "/games/doom"), p300=(1, "blender"))
    monkeypatch.setattr("psutil.pid_exists", lambda pid: pid != 4711)
    noted(tmp_path / "old", 200)
    noted(tmp_path / "gone", 4711)
    noted(tmp_path / "damaged", 300)
    (tmp_path / "damaged" / "control.json").write_text("{")
    assert gpu.foreign_pids([]) == [200, 300]


def test_notes_of_those_that_were_killed_do_not_heap_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each look at a GPU's processes read all of them, hundreds after a month of power cuts, and of trials whose
    folders were long gone."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path / "settings"))
    monkeypatch.setattr("psutil.pid_exists", lambda pid: pid < 200)
    for name, pid in (("killed", 200), ("runs", 100), ("removed", 101)):
        noted(tmp_path / name, pid)
    (tmp_path / "removed" / "control.json").unlink()
    noted(tmp_path / "new", 102)
    assert noted_folders() == [tmp_path / "new", tmp_path / "runs"]


def test_a_desktop_is_no_game_however_much_it_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On two large screens the shell and a browser hold over 500 MB each, and nothing was ever computed. What draws
    little, or of which the driver does not tell, is none; a renderer is what it was, whatever it is called."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path))
    driver(
        monkeypatch,
        {
            "draws": [holds(9), holds(10), holds(11), holds(12, 900), holds(13), holds(14, 200), holds(15, None)],
            "computes": [holds(12, 900), holds(16), holds(17)],
        },
        {"draws": None, "computes": None},
    )
    processes(
        monkeypatch, p9=(0, "/opt/steam/steamwebhelper"),
        p10=(0, "/usr/bin/gnome-shell"), p11=(0, "/usr/lib/xorg/Xorg"), p12=(0, "/usr/bin/chrome"),
        p13=(0, "/home/me/cyberpunk"), p14=(0, "kate"), p15=(0, "doom"), p16=(0, "blender"), p17=(0, "xorg"),
    )  # fmt: skip
    assert gpu.foreign_pids([]) == [13, 16, 17]
