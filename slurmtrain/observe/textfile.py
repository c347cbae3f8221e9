"""A text file for the node exporter of Prometheus: the newest numbers of a run, labelled by run, job and user.

The node exporter reads *.prom in the folder that its --collector.textfile.directory names, here that of rank 0's node. The
file is replaced in one step, and removed at the end. A kill leaves it behind: the next run on that node removes it when it is a
day old.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slurmtrain.errors import ConfigError
from slurmtrain.observe.logger import Ending, Held, LoggedRun, Logger
from slurmtrain.slurm.environment import own_node_name
from slurmtrain.system.files import replace_file
from slurmtrain.system.redaction import redact

STALE_S = 86400.0  # a file that was not written for so long is left over: it is written when something is logged
MODE = 0o644  # the node exporter is another user
PREFIX = "slurmtrain_"


class TextFileLogger(Logger):
    """Writes the file. A folder that hangs or is full holds up nothing, as with any logger.

    Args:
        folder: of the node exporter.

    Raises:
        ConfigError: prometheus-client is not installed.
    """

    def __init__(self, folder: str):
        try:
            import prometheus_client
        except ImportError:
            raise ConfigError(
                f"observe.textfile_dir={folder}, but prometheus-client is not installed where the job runs",
                hint="pip install 'slurmtrain[prometheus]'",
            ) from None
        self._prometheus: Any = prometheus_client
        self._folder = Path(folder)
        self._values: dict[str, float] = {}

    def open(self, run: LoggedRun) -> Held:
        self._path = self._folder / f"{PREFIX}{run.id}.prom"
        self._labels = {
            "run": run.id,
            "job": redact(run.name),
            "user": run.user,
            "node": own_node_name() or os.uname().nodename,
        }
        self._values = {"attempt": run.attempt, "steps": run.config["train"]["steps"]}
        for path in self._folder.glob(f"{PREFIX}*.prom"):
            with contextlib.suppress(OSError):  # it goes away just now, or is somebody else's
                if time.time() - path.lstat().st_mtime > STALE_S:
                    path.unlink()
        return Held()  # the file is gone: the newest numbers of metrics.jsonl are shown anew

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._values |= {re.sub(r"[^a-zA-Z0-9_]", "_", name): value for name, value in values.items()}
        self._values |= {"step": step, "logged_timestamp_seconds": round(time.time(), 3)}

    def flush(self) -> None:
        # No Gauge(), which writes into PROMETHEUS_MULTIPROC_DIR, too, where a program's environment has that.
        metrics = [self._prometheus.Metric(PREFIX + name, name, "gauge") for name in self._values]
        for metric, value in zip(metrics, self._values.values(), strict=True):
            metric.add_sample(metric.name, self._labels, value)
        text = self._prometheus.generate_latest(SimpleNamespace(collect=lambda: metrics))
        replace_file(self._path, text, mode=MODE, durable=False)

    def close(self, ending: Ending) -> None:
        self._path.unlink(missing_ok=True)
