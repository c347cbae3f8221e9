"""The output of a run: metrics on disk, curves in TensorBoard, progress for a person, speed."""

from slurmtrain.observe.logger import Ending, Held, LoggedRun, Logger
from slurmtrain.observe.metrics import MetricsLog, read_evaluations, read_metrics
from slurmtrain.observe.progress import ProgressLine
from slurmtrain.observe.reporter import Reporter, TensorBoardLog
from slurmtrain.observe.throughput import Throughput

__all__ = [
    "Ending",
    "Held",
    "LoggedRun",
    "Logger",
    "MetricsLog",
    "ProgressLine",
    "Reporter",
    "TensorBoardLog",
    "Throughput",
    "read_evaluations",
    "read_metrics",
]
