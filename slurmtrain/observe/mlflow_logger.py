"""MLflow: one run over all attempts, on a tracking server, or in a database of the run's own (RUN/mlflow.db).

The run is found by a tag with the run's id, so that no second one is made, whatever a kill has interrupted. No step is logged
twice: MLflow is asked for `logged_step` and `evaluated_step`, metrics that come with the last ones of their step.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmtrain.config.schema import MlflowConfig
from slurmtrain.errors import ConfigError
from slurmtrain.observe.logger import Ending, Held, LoggedRun, Logger

log = logging.getLogger(__name__)

TAG = "slurmtrain.run_id"
LOGGED, EVALUATED = "logged_step", "evaluated_step"
METRICS_AT_ONCE = 900  # MLflow takes 1000 in a request
PARAMS_AT_ONCE = 100
LONGEST = 500  # characters of a value; MLflow takes 6000 today, and took 500
REQUEST_S, RETRIES = "20", "2"  # instead of minutes: the next try comes soon
STATUS = {Ending.FINISHED: "FINISHED", Ending.STOPPED: "KILLED", Ending.FAILED: "FAILED"}


def tracking_uri(config: MlflowConfig, directory: Path) -> str:
    """Return where the run is kept."""
    return config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or own_database(directory)


def own_database(directory: Path) -> str:
    """Return the URI of a run's own database."""
    return f"sqlite:///{directory / 'mlflow.db'}"


def shown(uri: str) -> str:
    """Return how a person sees what is kept at a URI: its address without a password, or the command that shows a database."""
    scheme, separator, rest = uri.partition("://")
    if scheme.startswith(("sqlite", "file")):
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"  # of `pip install mlflow`: the extra is the client
    return f"{scheme}://{rest.rpartition('@')[2]}" if separator else uri


def find_or_create(config: MlflowConfig, run: LoggedRun) -> tuple[Any, str, str]:
    """Return MLflow's client, and the ids of the experiment and the run, which are made if need be.

    Raises:
        ConfigError: mlflow is not installed.
        Exception: of MLflow's, if the server cannot be reached or refuses.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise ConfigError(
            "observe.mlflow.enabled=true, but mlflow is not installed where the job runs",
            hint="pip install 'slurmtrain[mlflow]'",
        )
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", REQUEST_S)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", RETRIES)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    logging.getLogger("alembic").setLevel(logging.WARNING)
    uri, name, artifacts = tracking_uri(config, run.directory), config.experiment or run.name, None
    if uri == own_database(run.directory):
        artifacts = str(run.directory / "mlartifacts")
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            experiment = client.get_experiment(client.create_experiment(name, artifact_location=artifacts))
        except MlflowException:  # another run has made it at the same moment
            experiment = client.get_experiment_by_name(name)
    found = client.search_runs([experiment.experiment_id], f"tags.`{TAG}` = '{run.id}'", max_results=1)
    if found:
        if not found[0].data.params:  # a kill, or a server that failed, has kept the first attempt from it
            _log_params(client, found[0].info.run_id, run.config)
        return client, experiment.experiment_id, found[0].info.run_id
    tags = {TAG: run.id, "mlflow.user": run.user, "slurmtrain.directory": str(run.directory), **config.tags}
    if run.sweep:
        tags["slurmtrain.sweep"] = run.sweep
    made = client.create_run(experiment.experiment_id, run_name=f"{run.name} {run.id}", tags=tags)
    _log_params(client, made.info.run_id, run.config)
    return client, experiment.experiment_id, made.info.run_id


def _log_params(client: Any, run_id: str, config: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    params = [Param(name, value) for name, value in flattened(config)]
    for begin in range(0, len(params), PARAMS_AT_ONCE):
        client.log_batch(run_id, params=params[begin : begin + PARAMS_AT_ONCE])


def flattened(config: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a config by their dotted names, as texts. `secrets` is left out."""
    for name, value in config.items():
        key = f"{where}{name}"
        if key == "secrets":
            continue
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield allowed_name(key), text[:LONGEST]


def allowed_name(name: str) -> str:
    """Return the name of a metric or parameter with `_` for what MLflow refuses in one."""
    return re.sub(r"[^\w\-. /:]", "_", name)[:250]


class MlflowLogger(Logger):
    """Logs to MLflow: numbers, the config as parameters, and tags; no artifacts.

    Raises:
        ConfigError: mlflow is not installed.
    """

    def __init__(self, config: MlflowConfig):
        self._config = config
        self._client: Any = None
        self._run_id = ""
        self._buffer: list[tuple[str, float, int]] = []
        self.said = ""  # where the numbers go

    def open(self, run: LoggedRun) -> Held:
        self._client, experiment, self._run_id = find_or_create(self._config, run)
        self._client.update_run(self._run_id, status="RUNNING")
        metrics = self._client.get_run(self._run_id).data.metrics
        uri = tracking_uri(self._config, run.directory)
        self.said = f"MLflow: run {self._run_id} of experiment {experiment}: {shown(uri)}"
        log.info("%s", self.said)
        return Held(int(metrics.get(LOGGED, -1)), int(metrics.get(EVALUATED, -1)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, {**values, LOGGED: step})

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, {**values, EVALUATED: step})

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        if len(self._buffer) > METRICS_AT_ONCE:
            self.flush()
        self._buffer += [(allowed_name(name), float(value), step) for name, value in values.items()]

    def flush(self) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value, step in self._buffer]
        self._buffer = []
        # A step is said to be logged by the last of its metrics, so never before the others.
        for begin in range(0, len(metrics), METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + METRICS_AT_ONCE])

    def close(self, ending: Ending) -> str | None:
        if self._client is None:
            return None
        self.flush()
        self._client.set_terminated(self._run_id, STATUS[ending])
        return self.said
