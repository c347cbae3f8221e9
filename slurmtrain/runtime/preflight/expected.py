"""What the config asks for, in the terms of the facts that ranks gather before training."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Expected:
    """What the config asks for.

    Attributes:
        world_size: ranks of the job.
        gpus_per_node: GPUs that the job has asked for.
        cpus_per_task: CPUs for each rank.
        mem_per_node_gb: memory asked for; None: it is not known.
        min_free_gb: least space where the run writes, in units of 1e9 bytes.
        clock_offset_s: how far a clock may be off.
        shared: the folders of `NodeFacts.disks` in which the run writes; the others are each node's own.
        managed: the job has nodes of its own (SLURM), so that a foreign process on its GPUs has no business there.
        alone: no other program of the same job may be on its GPUs, as other runs of a pack or a server beside a script.
        ignored: kinds of findings to leave out.
    """

    world_size: int
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem_per_node_gb: float | None = None
    min_free_gb: float = 0.2
    clock_offset_s: float = 5.0
    shared: tuple[str, ...] = ()
    managed: bool = True
    alone: bool = True
    ignored: tuple[str, ...] = field(default=())
