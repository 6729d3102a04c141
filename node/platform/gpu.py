"""What NVIDIA's driver says of its GPUs: heat, power, and who uses them. Without the driver there is nothing to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import psutil

from node.owner.governor import cut_name
from node.platform.games import DESKTOP, LAUNCHERS
from node.platform.neighbours import is_neighbours


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Of one GPU."""

    temperature_c: float | None
    power_w: float | None


@cache
def _driver() -> tuple[Any, tuple[Any, ...]]:
    """NVML and its devices; (None, ()) where there is no driver or no library, which is normal."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        return nvml, tuple(nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount()))
    except Exception:  # NVMLError has a class for each of its codes, and without the library there is not even that
        return None, ()


def names() -> list[str]:
    """The GPUs, as the driver calls them."""
    nvml, devices = _driver()
    return [_text(nvml.nvmlDeviceGetName(device)) for device in devices]


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def read(gpu: str) -> GpuReading | None:
    """Heat and power of one GPU now; None where the driver knows none of that name. What it does not tell is None."""
    nvml, device = _find(gpu)
    if device is None:
        return None
    heat = _ask(nvml, lambda: float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)))
    return GpuReading(heat, _ask(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000.0))


def worst(found: Sequence[GpuReading]) -> GpuReading | None:
    """The heat of the hottest and the power of the one that draws most, which may be two; None where there is none."""
    if not found:
        return None
    heats = [reading.temperature_c for reading in found if reading.temperature_c is not None]
    powers = [reading.power_w for reading in found if reading.power_w is not None]
    return GpuReading(max(heats, default=None), max(powers, default=None))


def power_limit_w(gpu: str) -> float | None:
    """What the GPU may draw at most; None where that is not known."""
    nvml, device = _find(gpu)
    return None if device is None else _ask(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000.0)


def _find(gpu: str) -> tuple[Any, Any]:
    """NVML and the GPU that torch computes on: by its id, since torch may count them in another order."""
    nvml, devices = _driver()
    for device in devices if gpu else ():
        if _text(_ask(nvml, partial(nvml.nvmlDeviceGetUUID, device)) or "") == gpu:
            return nvml, device
    return nvml, None


def _ask(nvml: Any, question: Callable[[], Any]) -> Any:
    try:
        return question()
    except nvml.NVMLError:  # some laptops tell no power
        return None


def foreign_pids(own: list[int]) -> list[int]:
    """Processes that compute or draw in earnest on a GPU and are neither ours nor those of another daemon here.

    All cards count: a game on one of them needs the processor and the memory, too. A desktop draws with little memory;
    what has taken more than 500 MB for itself is a game or a renderer, but for some programs that everybody has open.
    """
    nvml, devices = _driver()
    left_out = set(own)
    found: dict[int, None] = {}
    for device in devices:
        drawing, computing = (
            [process.pid for process in _ask(nvml, partial(ask, device)) or () if _is_large(process)]
            for ask in (nvml.nvmlDeviceGetGraphicsRunningProcesses, nvml.nvmlDeviceGetComputeRunningProcesses)
        )
        # The driver names a browser that decodes a film among both: what draws as a desktop does is not asked again.
        left_out.update(pid for pid in drawing if pid not in left_out and _name_of(pid) in DESKTOP | LAUNCHERS)
        found |= dict.fromkeys(pid for pid in (*drawing, *computing) if pid not in left_out)
    return [pid for pid in found if not is_neighbours(pid)]


def _is_large(process: Any) -> bool:
    return (process.usedGpuMemory or 0) > 500e6


def _name_of(pid: int) -> str:
    try:
        return cut_name(psutil.Process(pid).name())
    except (psutil.Error, OSError):
        return ""
