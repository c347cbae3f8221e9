"""The output of a run: metrics on disk, curves in TensorBoard, progress for a person, speed, and loggers.

The names here are those of a logger of your own; it loads nothing else.
"""

from slurmtrain.observe.logger import Ending, Held, LoggedRun, Logger

__all__ = ["Ending", "Held", "LoggedRun", "Logger"]
