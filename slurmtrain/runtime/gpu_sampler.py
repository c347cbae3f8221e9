"""Look at the GPUs of this node now and then, and keep in the run directory how busy they were.

The first rank of each node does it, in a thread of its own: a driver whose GPU is lost may never answer, and then only this
thread waits.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Callable

from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.gpu_use import GpuUse, NodeGpus, write_gpu_use
from slurmtrain.slurm.environment import Environment, has_gpu_files
from slurmtrain.system.gpu import Gpus, Sample

log = logging.getLogger(__name__)

EVERY_S = 30.0  # a sample takes some milliseconds of the driver for each GPU, and none of the GPU itself
WRITE_EVERY_S = 60.0  # a thousand nodes write to the same file system
LONGEST_GAP = 4  # intervals that a sample stands for at most: a process that was stopped has not looked in between


class GpuSampler:
    """Samples the GPUs of this node until the process ends.

    Args:
        attempt_dir: the folder of the attempt.
        node, node_rank: the name of this node as SLURM has it, and its place among the nodes of the attempt.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        gpus: Gpus,
        attempt_dir: AttemptDir,
        node: str,
        node_rank: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._gpus, self._attempt_dir, self._node, self._node_rank = gpus, attempt_dir, node, node_rank
        self._clock, self._looked = clock, clock()
        self._use = {index: GpuUse(index, gpus.name(index)) for index in gpus.indices}
        self._written: float | None = None
        gpus.xids()  # from now on they are listened to
        self._ecc_before = {index: sample.ecc_errors for index, sample in self._samples().items()}

    def look(self) -> None:
        """Take one sample of every GPU, and write what is known of them if it is time to."""
        now = self._clock()
        seconds, self._looked = min(now - self._looked, LONGEST_GAP * EVERY_S), now
        for index, sample in self._samples().items():
            if sample.lost and not self._use[index].lost_s:
                log.warning("GPU %d of %s does not answer its driver any more", index, self._node)
            if self._ecc_before[index] is None:  # its first answer
                self._ecc_before[index] = sample.ecc_errors
            self._use[index] = self._use[index].with_sample(sample, seconds, ecc_before=self._ecc_before[index])
        errors = self._gpus.xids()
        for index, number in errors:
            if index in self._use:
                self._use[index] = self._use[index].with_xid(number)
        if errors or self._written is None or now - self._written >= WRITE_EVERY_S:
            self._written = now
            with contextlib.suppress(OSError):  # the disk is full, say; the next one has all of it
                write_gpu_use(self._attempt_dir, self._node_rank, NodeGpus(self._node, tuple(self._use.values())))

    def _samples(self) -> dict[int, Sample]:
        return {index: self._gpus.sample(index) for index in self._use}


def start_gpu_sampler(attempt_dir: AttemptDir, environment: Environment) -> threading.Thread | None:
    """Start to sample the GPUs of this node, on its first rank; None on others, and where there are no GPUs."""
    if environment.local_rank != 0 or not has_gpu_files():
        return None
    thread = threading.Thread(
        target=_sample_for_ever, args=(attempt_dir, environment), name="slurmtrain-gpus", daemon=True
    )
    thread.start()
    return thread


def _sample_for_ever(attempt_dir: AttemptDir, environment: Environment) -> None:
    try:
        gpus = Gpus(importlib.import_module("pynvml"))
        sampler = GpuSampler(gpus, attempt_dir, environment.node, environment.node_rank)
        while True:
            time.sleep(EVERY_S)
            sampler.look()
    except Exception as error:  # neither the package nor the driver has to be there
        log.debug("GPUs are not sampled any more: %s: %s", type(error).__name__, error)
