"""A run in MLflow, through its client: no process-wide active run, and nothing is patched."""

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.observe.trackers.tracker import Ending, Row, TrackedRun
from meshwright.spec.observe import MlflowSpec

_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
# Limits of one request of MLflow.
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_CHARACTERS = 1000, 100, 500


class MlflowRun:
    """Continues the run of `run_id`, or starts one in the experiment."""

    def __init__(self, spec: MlflowSpec, run: TrackedRun, run_id: str | None) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = mlflow.entities
        self._client: Any = mlflow.MlflowClient(tracking_uri=tracking_uri(spec, run.run_dir))
        if run_id is None:
            run_id = str(self._start(spec, run))
            self._log_params(run_id, run.settings)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.run_id = run_id
        for name, value in run.facts.items():  # a resume may have other ones
            self._client.set_tag(run_id, f"system.{name}", str(value))

    def _start(self, spec: MlflowSpec, run: TrackedRun) -> str:
        found = self._client.get_experiment_by_name(spec.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(spec.experiment)
        return self._client.create_run(experiment, run_name=run.name).info.run_id

    def _log_params(self, run_id: str, settings: Mapping[str, Any]) -> None:
        params = [
            self._entities.Param(name, str(value)[:_MAX_PARAM_CHARACTERS]) for name, value in settings.items()
        ]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + _MAX_PARAMS])

    def log(self, rows: Sequence[Row]) -> None:
        """Send the scalars in as few requests as possible."""
        metrics = [
            self._entities.Metric(tag, value, int(row.time * 1000), row.step)
            for row in rows
            for tag, value in row.scalars.items()
        ]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _MAX_METRICS])

    def close(self, ending: Ending) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self.run_id, status=_STATUS[ending])


def tracking_uri(spec: MlflowSpec, run_dir: Path) -> str:
    """The address of the store: as set, as in the environment, or a database beside the run directory."""
    beside = f"sqlite:///{run_dir.resolve().parent / 'mlflow.db'}"
    return spec.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or beside
