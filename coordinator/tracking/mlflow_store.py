"""MLflow's store in a folder, which `mlflow ui` shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordinator.tracking.trackers import About, Row

METRICS_MAX = 900
"""Of one call: MLflow takes 1,000."""
PARAMS_MAX = 90
"""The same: 100."""
TAG = "barnraise.run_id"


class MlflowTracker:
    """`FOLDER/mlflow.db`, with one experiment a run. A new run in it for each time that steps come again; otherwise the
    one that is there goes on."""

    def __init__(self, about: About) -> None:
        # The library is an extra: the coordinator without it never comes here.
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._param = Metric, Param
        folder = Path(about.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
        found = self._client.get_experiment_by_name(about.run)
        experiment = found.experiment_id if found is not None else self._make_experiment(about.run, folder)
        self._run = self._going_on(experiment, about) or self._new(experiment, about)

    def _make_experiment(self, name: str, folder: Path) -> str:
        made: str = self._client.create_experiment(name, artifact_location=(folder / "artifacts").as_uri())
        return made

    def _going_on(self, experiment: str, about: About) -> str:
        """The newest run of this training, if it ends where the next row follows."""
        runs = self._client.search_runs([experiment], f"tags.`{TAG}` = '{about.run_id}'", max_results=1)
        if not runs:
            return ""
        history = self._client.get_metric_history(runs[0].info.run_id, "train.loss")
        newest = max((metric.step for metric in history), default=-1)
        return runs[0].info.run_id if newest + 1 == about.first else ""

    def _new(self, experiment: str, about: About) -> str:
        tags = {TAG: about.run_id, "mlflow.runName": f"{about.run} from step {about.first}"}
        made: str = self._client.create_run(experiment, tags=tags).info.run_id
        params = [self._param(key, value[:500]) for key, value in about.config.items()]
        for begin in range(0, len(params), PARAMS_MAX):
            self._client.log_batch(made, params=params[begin : begin + PARAMS_MAX])
        return made

    def log(self, rows: Sequence[Row]) -> None:
        metrics = []
        for row in rows:
            at_ms = int(1000 * row.wall_s)
            metrics += [self._metric(f"train.{name}", value, at_ms, row.step) for name, value in row.scalars.items()]
            for version, scalars in row.validations:
                metrics += [
                    self._metric(f"validation.{name}", value, at_ms, version) for name, value in scalars.items()
                ]
        for begin in range(0, len(metrics), METRICS_MAX):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + METRICS_MAX])

    def close(self) -> None:
        self._client.set_terminated(self._run)
