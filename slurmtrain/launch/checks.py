"""What is checked of a config before anything is created or asked, also for a dry run."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from pathlib import Path

from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.data.sources.config_check import check_prepared
from slurmtrain.planner.fit import check_fits, check_host_memory

log = logging.getLogger(__name__)


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
        look_at_files: check that the files that the config names exist, and that this machine has the memory of a local job.
        said: warnings about other points of the same sweep, which are not logged again.

    Raises:
        ConfigError: it cannot work.
    """
    check_fits(config, dims)
    check_prepared(config, later=later)
    if look_at_files:
        has_gpu = next(Path("/dev").glob("nvidia[0-9]*"), None) is not None
        check_host_memory(config, dims, host_memory(), has_gpu=has_gpu)
        from slurmtrain.launch.named_paths import check_named_paths

        said = said if said is not None else set()
        for warning in check_named_paths(config, cwd, later=later):
            if warning not in said:
                log.warning(warning)
            said.add(warning)


def host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """Return the bytes of memory that processes of this machine can have; None when it does not say."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        found.append(1024 * int(re.findall(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)[0]))
    with suppress(OSError, ValueError):
        found.append(int(cgroup.read_text()))  # "max": there is no limit
    return min(found, default=None)
