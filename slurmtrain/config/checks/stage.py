"""Check what is to be copied to the nodes."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from slurmtrain.choices import Backend, SnapshotMode
from slurmtrain.config.checks.values import at_least
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError

STAGE_DIR = re.compile(r"(/|\$[A-Za-z_]\w*(?=/|$))[^$`\"\\]*")  # a path, or a variable of the job and what is below it


def check_stage(config: Config) -> None:
    """Raise if what is to be copied to the nodes cannot be, or would not be used there."""
    stage, cluster = config.cluster.stage, config.cluster
    if stage.dir is not None and not STAGE_DIR.fullmatch(stage.dir):
        raise ConfigError(
            f"cluster.stage.dir={stage.dir!r} is not a folder on a node",
            hint="an absolute path such as /local/scratch, or a variable of the job such as $SLURM_TMPDIR",
        )
    names = [PurePosixPath(path).name for path in stage.data]
    for name in names:
        if not name or name == ".." or names.count(name) > 1:
            why = "is a second of that name" if names.count(name) > 1 else "is no file or folder with a name"
            raise ConfigError(
                f"cluster.stage.data={','.join(stage.data)}: {name or 'an empty path'} {why}",
                hint="copies are named after the last part of their path, so these parts must differ",
            )
    at_least("cluster.stage.limit_min", stage.limit_min, 1)
    if not stage.wanted:
        return
    if cluster.backend == Backend.LOCAL:
        raise ConfigError(
            "cluster.stage copies to the nodes of a SLURM job, and cluster.backend=local has only this machine",
            hint="leave cluster.stage out",
        )
    if cluster.container.kind:
        raise ConfigError(
            f"cluster.stage with cluster.container.kind={cluster.container.kind}: the ranks would not see the copies",
            hint="an image is a single file that its runtime reads by itself; leave cluster.stage out",
        )
    if config.sweep.pack > 1:
        raise ConfigError(
            f"cluster.stage with sweep.pack={config.sweep.pack}: each run of a pack would make its own copies",
            hint="sweep.pack=1, or leave cluster.stage out",
        )
    if stage.code and config.job.snapshot == SnapshotMode.NONE:
        raise ConfigError(
            "cluster.stage.code=true with job.snapshot=none: there is no snapshot to copy",
            hint="job.snapshot=auto, or cluster.stage.code=false",
        )
