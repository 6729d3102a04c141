"""What NVIDIA's driver says of its GPUs: heat, power, and who uses them. Without the driver there is nothing to say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Of the hottest, and of all together."""

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


def read() -> GpuReading | None:
    """Heat and power now; None without a driver."""
    nvml, devices = _driver()
    if not devices:
        return None
    try:
        heat = max(float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)) for device in devices)
        power = sum(nvml.nvmlDeviceGetPowerUsage(device) / 1000.0 for device in devices)
    except nvml.NVMLError:  # some laptops tell no power
        return GpuReading(None, None)
    return GpuReading(heat, power)


def foreign_pids(own: list[int]) -> list[int]:
    """Processes that compute or draw in earnest on a GPU and are not ours.

    A desktop draws with little memory; what has taken more than 500 MB for itself is a game or a renderer.
    """
    nvml, devices = _driver()
    found: dict[int, None] = {}
    for device in devices:
        for ask in (nvml.nvmlDeviceGetGraphicsRunningProcesses, nvml.nvmlDeviceGetComputeRunningProcesses):
            try:
                processes = ask(device)
            except nvml.NVMLError:
                continue
            for process in processes:
                if process.pid not in own and (process.usedGpuMemory or 0) > 500e6:
                    found[process.pid] = None
    return list(found)
