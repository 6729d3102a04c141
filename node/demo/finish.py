"""The end of a demo, with and without the machinery: the summary that scripts read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.compute.devices.choice import DeviceChoice
from protocol.run.changes import RunChange
from protocol.run.run import RunConfig


def train_without_machinery(
    config: RunConfig,
    out: Path,
    threads: int,
    device: DeviceChoice,
    on_step: Any,
    changes: Sequence[RunChange] = (),
) -> dict[str, Any]:
    """`--reference`: the same run in this process; exports its model and returns its summary."""
    from node.compute.devices.device import open_device
    from node.compute.reference import train_reference

    result = train_reference(
        config,
        on_step=lambda report: on_step(report.step, report.loss),
        threads=threads,
        changes=changes,
        device=open_device(device),
    )
    result.export(out)
    validations = {found.version: found.loss for found in result.validations}
    return summary(config, result.losses, result.tokens_per_second, out, validations=validations)


def summary(
    config: RunConfig,
    losses: list[float],
    tokens_per_second: float,
    model: Path | None,
    *,
    kills: int = 0,
    reissued: int = 0,
    samples_lost: int = 0,
    samples_doubled: int = 0,
    moved: dict[str, float] | None = None,
    seconds: dict[str, float] | None = None,
    validations: dict[int, float] | None = None,
) -> dict[str, Any]:
    """The content of `--summary FILE`; the same shape with and without the machinery."""
    return {
        "run": config.name,
        "seed": config.seed,
        "delay": config.batch.delay,
        "stages": config.stages.count,
        "cut": config.stages.cut,
        "steps": len(losses),
        "losses": losses,
        "validations": {str(version): loss for version, loss in (validations or {}).items()},
        "tokens_per_second": round(tokens_per_second, 3),
        "kills": kills,
        "reissued": reissued,
        "samples_lost": samples_lost,
        "samples_doubled": samples_doubled,
        "bytes": {kind: int(count) for kind, count in (moved or {}).items()},
        "seconds": {phase: round(value, 3) for phase, value in (seconds or {}).items()},
        "model": None if model is None else str(model),
    }


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Writes the summary as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
