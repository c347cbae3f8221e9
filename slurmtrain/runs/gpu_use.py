"""How busy the GPUs of a node were during an attempt: the record that the first rank of each node keeps of them.

One small file a node and attempt, attempts/NNNN/gpus-N.json, which is replaced again and again. It holds sums and extremes, not
the samples themselves, so that it stays small however long the attempt takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.gpu import Sample
from slurmtrain.system.records import Count, Number, typed_or_none

IDLE_PERCENT = 5  # a GPU whose kernels ran for less than this share of a sample is idle
XIDS_KEPT = 32
NODES_READ = 4096


@dataclass(frozen=True, kw_only=True)
class GpuSums:
    """What adds up over samples, and over GPUs, nodes and attempts.

    Attributes:
        sampled_s: GPUs x seconds that the samples stand for.
        idle_s: of them, those with a utilisation below IDLE_PERCENT.
        utilization_s: integral over time: divided by `sampled_s`, the mean percent.
        power_ws, power_s: the same of watts, and the seconds in which they were known: divided, the mean watts.
        ecc_errors: uncorrectable errors that were added while it was watched.
        lost_s: GPUs x seconds in which the driver had lost one, or it could not be asked for another reason.
    """

    sampled_s: Number = 0.0
    idle_s: Number = 0.0
    utilization_s: Number = 0.0
    power_ws: Number = 0.0
    power_s: Number = 0.0
    ecc_errors: Count = 0
    lost_s: Number = 0.0

    @property
    def utilization(self) -> float | None:
        """The mean percent of the time in which kernels ran; None if nothing was sampled."""
        return self.utilization_s / self.sampled_s if self.sampled_s > 0 else None

    @property
    def idle_share(self) -> float | None:
        """The share of GPU time with next to no kernels; None if nothing was sampled."""
        return self.idle_s / self.sampled_s if self.sampled_s > 0 else None

    @property
    def power_w(self) -> float | None:
        """The mean watts of a GPU, over all GPUs and the time in which theirs was known; None if it never was."""
        return self.power_ws / self.power_s if self.power_s > 0 else None


@dataclass(frozen=True)
class GpuUse(GpuSums):
    """How busy one GPU was, over all samples of an attempt.

    Attributes:
        index: its number on the node, by NVML.
        memory_gb, temperature_c: the highest seen; memory in units of 10^9 bytes.
        xids: numbers of the driver's Xid errors, in order.
    """

    index: Count
    name: str = ""
    memory_gb: Number = 0.0
    temperature_c: Number = 0.0
    xids: tuple[Count, ...] = ()

    def with_sample(self, sample: Sample, seconds: float, *, ecc_before: int | None) -> GpuUse:
        """Return this with a sample that stands for the last `seconds`.

        Args:
            ecc_before: the count of errors in the first sample.
        """
        seconds = max(0.0, seconds)
        if sample.lost:
            return replace(self, lost_s=self.lost_s + seconds)
        known, powered = sample.utilization is not None, sample.power_w is not None
        busy = sample.utilization or 0.0
        errors = (sample.ecc_errors or 0) - (ecc_before or 0) if ecc_before is not None else 0
        return replace(
            self,
            sampled_s=self.sampled_s + (seconds if known else 0.0),
            idle_s=self.idle_s + (seconds if known and busy < IDLE_PERCENT else 0.0),
            utilization_s=self.utilization_s + busy * seconds,
            power_s=self.power_s + (seconds if powered else 0.0),
            power_ws=self.power_ws + (sample.power_w or 0.0) * seconds,
            memory_gb=max(self.memory_gb, sample.memory_gb or 0.0),
            temperature_c=max(self.temperature_c, sample.temperature_c or 0.0),
            ecc_errors=max(self.ecc_errors, errors),
        )

    def with_xid(self, number: int) -> GpuUse:
        """Return this with an Xid error of the driver; of many the first ones are kept."""
        return replace(self, xids=(*self.xids, number)[:XIDS_KEPT])


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of one node during one attempt."""

    node: str
    gpus: tuple[GpuUse, ...]


def write_gpu_use(attempt_dir: AttemptDir, node_rank: int, found: NodeGpus) -> None:
    """Replace the record of a node's GPUs."""
    write_json(attempt_dir.gpu_file(node_rank), asdict(found), durable=False)


def read_gpu_use(attempt_dir: AttemptDir) -> list[NodeGpus]:
    """Return the records of all nodes of an attempt; what is no such record is left out."""
    found = []
    for path in attempt_dir.gpu_files()[:NODES_READ]:
        try:
            values = read_json(path)
        except UnreadableRecordError:
            continue
        if (node := typed_or_none(NodeGpus, values)) is not None:
            found.append(node)
    return found


@dataclass(frozen=True)
class GpuTotals(GpuSums):
    """The same over many GPUs, nodes and attempts; of an Xid error the node, the number of the GPU, and that of the error."""

    xids: tuple[tuple[str, int, int], ...] = ()


def total_of(found: Iterable[NodeGpus]) -> GpuTotals:
    """Add up the records of nodes."""
    gpus = [(each.node, gpu) for each in found for gpu in each.gpus]
    xids = tuple((node, gpu.index, number) for node, gpu in gpus for number in gpu.xids)
    sums: dict[str, Any] = {each.name: sum(getattr(gpu, each.name) for _, gpu in gpus) for each in fields(GpuSums)}
    return GpuTotals(**sums, xids=xids[:XIDS_KEPT])
