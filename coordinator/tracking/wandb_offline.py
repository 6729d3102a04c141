"""Weights & Biases, offline: a folder that `wandb sync` sends, if somebody wants that; nothing leaves by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordinator.tracking.trackers import About, Row


class WandbTracker:
    """`FOLDER/wandb/offline-run-…`: a run of each start, all in one group. Steps are a value of their own: those that
    come again after going back to a checkpoint may stand behind later ones."""

    def __init__(self, about: About) -> None:
        # The library is an extra: the coordinator without it never comes here.
        import wandb

        Path(about.folder).mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, disable_code=True, silent=True
        )
        self._run = wandb.init(
            mode="offline",
            project="barnraise",
            dir=about.folder,
            group=f"{about.run}-{about.run_id[:8]}",
            name=f"{about.run} from step {about.first}",
            config={**about.config, "first_step": about.first},
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("train/*", step_metric="step")
        self._run.define_metric("version")
        self._run.define_metric("validation/*", step_metric="version")

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({"step": row.step, **{f"train/{name}": value for name, value in row.scalars.items()}})
            for version, scalars in row.validations:
                values = {f"validation/{name}": value for name, value in scalars.items()}
                self._run.log({"version": version, **values})

    def close(self) -> None:
        self._run.finish()
