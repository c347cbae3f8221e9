"""The plugin that Hydra finds: pip puts a copy of this file into the namespace hydra_plugins, as hydra_plugins.slurmtrain.

Every Hydra program on the machine imports it when it starts, so it does nothing before a launcher is asked for jobs.
"""

# No `from __future__ import annotations`: Hydra runs a plugin's module before it is in sys.modules, where dataclasses
# would look the annotations up.
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher


@dataclass
class LauncherConf:
    """The config hydra.launcher of `hydra/launcher=slurmtrain`: any Hydra program's jobs as runs of slurmtrain."""

    _target_: str = "hydra_plugins.slurmtrain.SlurmtrainLauncher"
    cluster: str = "local"  # a config of slurmtrain's group of this name; local: processes of this machine
    overrides: list[str] = field(default_factory=list)  # further ones of slurmtrain's: cluster.nodes=2, requeue=off
    config_dir: str | None = None  # a folder with clusters of one's own, as in slurmtrain's --config-dir
    array_parallelism: int | None = None  # how many jobs may run at the same time
    again: bool = False  # do not come back to a multirun with the same hydra.sweep.dir whose shell has died


class SlurmtrainLauncher(Launcher):
    """The launcher of `hydra/launcher=slurmtrain`."""

    def __init__(self, **settings: Any):
        self._settings = settings
        self._tasks: Any = None

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        from slurmtrain.sweep.hydra_launcher import Tasks

        self._tasks = Tasks(hydra_context, task_function, config, **self._settings)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:
        results: Sequence[Any] = self._tasks.launch(job_overrides, initial_job_idx)
        return results


ConfigStore.instance().store(group="hydra/launcher", name="slurmtrain", node=LauncherConf, provider="slurmtrain")
