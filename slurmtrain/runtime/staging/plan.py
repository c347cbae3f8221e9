"""What the nodes of a job get copies of, decided once, on its first node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.choices import JobKind
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.stage_record import Item, Plan
from slurmtrain.runtime.staging.copying import copy_tree, size_of
from slurmtrain.runtime.staging.environment import archive_of, digest_of, find_environment

CODE, ENVIRONMENT, DATA = "code", "environment", "data"  # names of the copies in the folder of a node


def make_plan(run_dir: RunDir, config: Config, nodes: Sequence[str], python: Sequence[str]) -> Plan:
    """Return what each node is to copy; an environment is packed first, if there is no archive of it yet.

    Args:
        nodes: all nodes of the job.
        python: the words that start the ranks' interpreter on this node.

    Raises:
        ConfigError: something cannot be copied.
        OSError: something cannot be read, or there is no room for the archive.
    """
    stage, info = config.cluster.stage, run_dir.info()
    items: list[Item] = []
    imports: list[str] = []
    workdir = str(info.get("workdir") or CODE)
    if stage.code:
        if os.path.isabs(workdir):
            raise ConfigError(
                "cluster.stage.code=true, and this run has no snapshot of its code", hint="job.snapshot=auto"
            )
        items.append(Item(CODE, str(run_dir.code), size_of(run_dir.code), copy_tree(run_dir.code, None)))
        imports = list(dict.fromkeys([workdir, CODE, *(f"{CODE}/{root}" for root in info.get("import_roots", ()))]))
    environment = find_environment(python) if stage.environment else None
    if environment is not None:
        archive = archive_of(environment, run_dir.environments)
        items.append(Item(ENVIRONMENT, str(archive), archive.stat().st_size, digest_of(archive)))
    for path in stage.data:
        items.append(Item(f"{DATA}/{Path(path).name}", path, size_of(Path(path))))
    return Plan(
        tuple(items),
        tuple(nodes),
        tuple(imports),
        workdir if stage.code else None,
        str(environment.prefix) if environment is not None else None,
        environment.python if environment is not None else None,
        # A program of the user's own finds its modules beside it, as ever.
        only_copies=stage.code and config.job.kind != JobKind.COMMAND,
    )
