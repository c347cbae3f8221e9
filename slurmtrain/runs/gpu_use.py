"""How busy the GPUs of a node are during an attempt: attempts/NNNN/gpus-N.json, kept by the first rank of each node.

The file holds sums and not the samples, so that it stays small however long the attempt takes.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.slurm.environment import Environment, has_gpu_files
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.gpu import Gpus
from slurmtrain.system.records import Number, typed_or_none

log = logging.getLogger(__name__)

IDLE_PERCENT = 5  # a GPU whose kernels ran for less than this share of a sample is idle
EVERY_S = 60.0  # a sample takes the driver some milliseconds for each GPU; a thousand nodes write to one file system
LONGEST_S = 240.0  # that a sample stands for at most: a process that was stopped has not looked in between
NODES_READ = 4096


@dataclass(frozen=True)
class GpuUse:
    """Sums over samples, and over GPUs, nodes and attempts.

    Attributes:
        sampled_s: GPUs x seconds that the samples stand for.
        idle_s: of them, those with a utilisation below IDLE_PERCENT.
        utilization_s: integral over time: divided by `sampled_s`, the mean percent.
    """

    sampled_s: Number = 0.0
    idle_s: Number = 0.0
    utilization_s: Number = 0.0

    @property
    def utilization(self) -> float | None:
        """The mean percent of the time in which kernels ran; None if nothing was sampled."""
        return self.utilization_s / self.sampled_s if self.sampled_s > 0 else None

    @property
    def idle_share(self) -> float | None:
        """The share of GPU time with next to no kernels; None if nothing was sampled."""
        return self.idle_s / self.sampled_s if self.sampled_s > 0 else None

    def with_sample(self, percents: Iterable[float | None], seconds: float) -> GpuUse:
        """Return this with a sample of some GPUs, None for those that do not tell, that stands for the last `seconds`."""
        known, seconds = [each for each in percents if each is not None], min(seconds, LONGEST_S)
        idle = sum(each < IDLE_PERCENT for each in known)
        return total_of([self, GpuUse(seconds * len(known), seconds * idle, seconds * sum(known))])


def total_of(found: Iterable[GpuUse]) -> GpuUse:
    """Add up records."""
    uses = list(found)
    return GpuUse(*(sum(getattr(use, each.name) for use in uses) for each in fields(GpuUse)))


def read_gpu_use(attempt_dir: AttemptDir) -> list[GpuUse]:
    """Return the records of all nodes of an attempt; what is no such record is left out."""
    found = []
    for path in attempt_dir.gpu_files()[:NODES_READ]:
        with contextlib.suppress(UnreadableRecordError):
            found.append(typed_or_none(GpuUse, read_json(path)))
    return [use for use in found if use is not None]


def start_gpu_sampler(attempt_dir: AttemptDir, environment: Environment) -> threading.Thread | None:
    """Start to sample the GPUs of this node, on its first rank; None on others, and where there are no GPUs.

    It is done in a thread of its own: a driver whose GPU is lost may never answer, and then only this thread waits.
    """
    if environment.local_rank != 0 or not has_gpu_files():
        return None
    file = attempt_dir.gpu_file(environment.node_rank)
    thread = threading.Thread(target=_sample_for_ever, args=(file,), name="slurmtrain-gpus", daemon=True)
    thread.start()
    return thread


def _sample_for_ever(file: Path) -> None:
    try:
        gpus, use, looked = Gpus(importlib.import_module("pynvml")), GpuUse(), time.monotonic()
        while True:
            time.sleep(EVERY_S)
            before, looked = looked, time.monotonic()
            use = use.with_sample([gpus.utilization(index) for index in gpus.indices], looked - before)
            with contextlib.suppress(OSError):  # the disk is full, say; the next one has all of it
                write_json(file, asdict(use), durable=False)
    except Exception as error:  # neither the package nor the driver has to be there
        log.debug("GPUs are not sampled any more: %s: %s", type(error).__name__, error)
