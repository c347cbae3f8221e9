"""The plugin that Hydra finds: pip puts a copy of this file into the namespace hydra_plugins, as hydra_plugins.slurmtrain.

Its launcher makes each job of a multirun a call of `slurmtrain.map`. Every Hydra program on the machine imports this file when
it starts, so it does nothing before a launcher is asked for jobs.
"""

# No `from __future__ import annotations`: Hydra runs a plugin's module before it is in sys.modules, where dataclasses
# would look the annotations up.
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
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


class SlurmtrainLauncher(Launcher):
    """The launcher of `hydra/launcher=slurmtrain`."""

    def __init__(
        self, cluster: str, overrides: Sequence[str], config_dir: str | None, array_parallelism: int | None
    ) -> None:
        self._words, self._config_dir = [f"cluster={cluster}", "job.snapshot=none", *overrides], config_dir
        self._at_once = array_parallelism

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self._shared = {"context": hydra_context, "function": task_function, "config": config}

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:
        """Run some jobs and wait for them. A job that fails is returned as failed, with its exception."""
        import logging
        import re
        from pathlib import Path

        from hydra.core.singleton import Singleton
        from hydra.core.utils import JobReturn, JobStatus

        from slurmtrain.control.mapping import map_calls
        from slurmtrain.rank.jobs.map_task import run_task
        from slurmtrain.sweep.plan import values_of
        from slurmtrain.system import logs

        logs.set_up(leave_to_others=True)
        hydra = self._shared["config"].hydra
        folder = Path(str(hydra.sweep.dir)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if "mode" in hydra.sweep:
            folder.chmod(int(str(hydra.sweep.mode), 8))
        calls = [(number, list(words)) for number, words in enumerate(job_overrides, initial_job_idx)]
        found = map_calls(
            partial(run_task, {**self._shared, "singletons": Singleton.get_state()}),
            calls,
            self._words,
            Path.cwd(),
            name=re.sub(r"[^A-Za-z0-9._+-]", "_", str(hydra.job.name)).lstrip("._+-")[:64] or "multirun",
            varied=lambda number: values_of(calls[number][1]),
            max_parallel=self._at_once,
            config_dir=self._config_dir,
        )
        log = logging.getLogger("slurmtrain.hydra")
        log.info("waiting for %d jobs of %s; `sweep status %s` shows them", len(calls), found.path, found.id)
        returned = []
        for task, (_, words) in zip(found, calls, strict=True):
            try:
                returned.append(task.result())
            except KeyboardInterrupt:
                found.cancel()
                raise
            except Exception as error:
                failed = JobReturn(words, working_dir=str(task.run.path), status=JobStatus.FAILED)
                failed.return_value = error
                returned.append(failed)
        return returned


ConfigStore.instance().store(group="hydra/launcher", name="slurmtrain", node=LauncherConf, provider="slurmtrain")
