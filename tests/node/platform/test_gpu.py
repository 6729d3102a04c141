"""The sensors of a GPU are those of the one that computes, found by its id; what the driver does not tell is None."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.platform import gpu
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
        nvmlDeviceGetEnforcedPowerLimit=tell("limit"), nvmlDeviceGetGraphicsRunningProcesses=lambda _: [],
        nvmlDeviceGetComputeRunningProcesses=lambda _: [],
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
    sensors.device_is(True, "GPU-bb")
    now = sensors.read()
    assert sensors.gpu and (now.temperature_c, now.power_w) == (60.0, None)
    sensors.device_is(True, "")
    assert sensors.read().temperature_c is None, "a GPU of another maker is not as hot as the processor"
    sensors.device_is(False, "")
    assert not sensors.gpu and sensors.read().power_w is None
