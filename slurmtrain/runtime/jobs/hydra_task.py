"""One job of a Hydra program's multirun, as a call of `slurmtrain.map`: see `slurmtrain/hydra_plugin.py`.

Every rank makes the call; rank 0 alone writes Hydra's folder. Imports no torch; the task function may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmtrain.slurm.environment import own_job_id, rank_or_zero

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn


def run_task(shared: Mapping[str, Any], number: int, overrides: Sequence[str]) -> JobReturn:
    """Call the program's task function as Hydra's own launcher does; raise what it raises."""
    from hydra.core.singleton import Singleton
    from hydra.core.utils import run_job, setup_globals
    from omegaconf import open_dict, read_write

    Singleton.set_state(shared["singletons"])
    setup_globals()
    context = shared["context"]
    config = context.config_loader.load_sweep_config(shared["config"], list(overrides))
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.num = number
        config.hydra.job.id = own_job_id() or str(number)
        if rank_or_zero() != 0:
            config.hydra.output_subdir = None
            config.hydra.job_logging = {"root": None}  # as hydra/job_logging=none
    returned = run_job(shared["function"], config, "hydra.sweep.dir", "hydra.sweep.subdir", context)
    _ = returned.return_value  # raises what the function has raised
    return returned
