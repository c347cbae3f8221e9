"""Check before a job is queued that the model fits into the GPUs, by a child process, since torch takes seconds to import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from slurmtrain.choices import JobKind
from slurmtrain.config.frozen import to_values
from slurmtrain.config.parallel_dims import ParallelDims, extreme_sizes, parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, EnvironmentMismatchError
from slurmtrain.planner.fit import StageMemory, check_fits, check_host_memory, share_of_gpu

DOUBTFUL = 0.5  # share of a GPU's memory: a model estimated below it is not built, so that submit answers at once
TIMEOUT_S = 120.0


def check_memory(config: Config, dims: ParallelDims) -> list[str]:
    """Raise if the model cannot fit, provided that the config says how much memory a GPU has; return warnings.

    Raises:
        ConfigError: the model cannot fit; the message gives the bytes, and changes with which it would fit.
    """
    if config.cluster.node_range.elastic:
        found = [check_memory(sized, parallel_dims_of(sized)) for sized in extreme_sizes(config)]
        return list(dict.fromkeys(warning for warnings in found for warning in warnings))
    has_gpu = next(Path("/dev").glob("nvidia[0-9]*"), None) is not None
    check_host_memory(config, dims, host_memory(), has_gpu=has_gpu)
    limit = config.cluster.gpu_memory_gb
    if limit is None or config.job.kind != JobKind.TRAIN:
        return []
    share = share_of_gpu(config, dims)
    if share is not None and share < DOUBTFUL:
        return []
    try:
        check_fits(config, dims, memory_by_dry_run(config))
    except EnvironmentMismatchError as error:
        return [f"whether it fits into cluster.gpu_memory_gb={limit:g} is not known: {error.message}"]
    return []


def host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """Return the bytes of memory that processes of this machine can have; None when it does not say."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        found.append(1024 * int(re.findall(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)[0]))
    with suppress(OSError, ValueError):
        found.append(int(cgroup.read_text()))  # "max": there is no limit
    return min(found, default=None)


def memory_by_dry_run(config: Config) -> list[StageMemory]:
    """Return the memory of each stage from a dry run of the config's layout.

    Raises:
        ConfigError: the model does not support such a layout.
        EnvironmentMismatchError: this machine has no torch, or not the model's code, and so cannot tell.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "slurmtrain.runtime.jobs.dry_run"],
            input=json.dumps(to_values(config)),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentMismatchError(f"building the sharded model took more than {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise EnvironmentMismatchError(f"the sharded model cannot be built here: {said[-1]}")
    answer = json.loads(done.stdout.splitlines()[-1])  # the model's own code may have printed before
    if "error" in answer:
        kind = ConfigError if answer["error"] == "ConfigError" else EnvironmentMismatchError
        raise kind(answer["message"], hint=answer["hint"])
    return [StageMemory(**stage) for stage in answer["stages"]]
