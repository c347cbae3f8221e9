"""Check how a model is parallelised, and which gradients are compressed."""

from __future__ import annotations

from slurmtrain.choices import GradientCompression, PpSchedule
from slurmtrain.config.checks.values import at_least
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.errors import ConfigError


def check_parallel(parallel: ParallelConfig) -> None:
    """Raise if the model is to be compiled and its pipeline schedule splits the backward pass."""
    if parallel.compile and parallel.pp_schedule == PpSchedule.ZERO_BUBBLE and parallel.pp != 1:
        raise ConfigError(
            "parallel.compile=true with parallel.pp_schedule=zero_bubble: a compiled backward pass cannot be split in two",
            hint="parallel.pp_schedule=interleaved_1f1b, or parallel.compile=false",
        )


def check_compression(parallel: ParallelConfig, dims: ParallelDims) -> None:
    """Raise for compressed gradients where ranks do not hold whole replicas."""
    how = f"parallel.gradient_compression={parallel.gradient_compression}"
    if parallel.gradient_compression != GradientCompression.NONE and dims.uses_fsdp(parallel):
        what = (
            str(dims) if not dims.replicas_only else "parallel.param_dtype or parallel.reduce_dtype, which need FSDP2"
        )
        raise ConfigError(
            f"{how} works only with whole replicas in float32 (DDP), not with {what}",
            hint="parallel.reduce_dtype=bfloat16 halves the communication there",
        )
    at_least("parallel.powersgd_rank", parallel.powersgd_rank, 1)
    at_least("parallel.powersgd_start_step", parallel.powersgd_start_step, 2, why="DDP builds its final buckets before")
