"""What is checked of a config before anything is created or asked, also for a dry run."""

from __future__ import annotations

import logging
from pathlib import Path

from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.data.sources.config_check import check_prepared
from slurmtrain.planner.fit import check_fits

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
        look_at_files: check that the files that the config names exist.
        said: warnings about other points of the same sweep, which are not logged again.

    Raises:
        ConfigError: it cannot work.
    """
    check_fits(config, dims)
    check_prepared(config)
    if look_at_files:
        from slurmtrain.launch.named_paths import check_named_paths

        said = said if said is not None else set()
        for warning in check_named_paths(config, cwd, later=later):
            if warning not in said:
                log.warning(warning)
            said.add(warning)
