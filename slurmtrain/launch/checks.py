"""What is checked of a config before anything is created or asked, also for a dry run.

Whether a model fits into the GPUs is built by a child process where it is in doubt, since torch takes seconds to import.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from slurmtrain.choices import JobKind
from slurmtrain.config.frozen import to_values
from slurmtrain.config.parallel_dims import ParallelDims, extreme_sizes, parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.data.sources.config_check import check_prepared
from slurmtrain.errors import ConfigError, EnvironmentMismatchError
from slurmtrain.planner.fit import check_fits, check_host_memory, share_of_gpu
from slurmtrain.planner.memory import StageMemory

log = logging.getLogger(__name__)

DOUBTFUL = 0.5  # share of a GPU's memory: a model estimated below it is not built, so that submit answers at once
TIMEOUT_S = 120.0


def check(
    config: Config,
    dims: ParallelDims,
    cwd: Path,
    *,
    later: bool = False,
    look_at_files: bool = True,
    said: set[str] | None = None,
) -> None:
    """Check what a validated config needs of the GPUs, of prepared data and of this machine's files.

    Args:
        cwd: the folder to which paths in the config are relative.
        later: the job waits for other jobs, which may still make files.
        look_at_files: check that the files that the config names exist.
        said: warnings about other points of the same sweep, which are not logged again.

    Raises:
        ConfigError: it cannot work.
    """
    check_fits(config, dims)
    check_prepared(config, later=later)
    if look_at_files:
        from slurmtrain.launch.named_paths import check_named_paths

        said = said if said is not None else set()
        for warning in check_named_paths(config, cwd, later=later):
            if warning not in said:
                log.warning(warning)
            said.add(warning)


def warn_of_memory(config: Config, dims: ParallelDims) -> None:
    """Log a warning if the model will hardly fit. That takes seconds for a large one."""
    for warning in check_memory(config, dims):
        log.warning(warning)


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
