"""`hydra/launcher=slurmtrain`: the jobs of any Hydra program's multirun as runs of ours.

Each job is a run of job=command that calls the program's task function (`runtime/jobs/hydra_task.py`): submitted as an
array, requeued when it is preempted, failed in SLURM when the function raises, and shown by `status`, `logs` and
`sweep`. The function's return value or exception reaches the sweeper as from Hydra's own launcher.

A shell that waits may die. Started again with the same hydra.sweep.dir, the program finds its jobs again, also those
that have ended; unless it had come to its end before, in which case its jobs are run anew.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pickle
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.choices import Backend
from slurmtrain.config import secrets
from slurmtrain.config.compose import compose
from slurmtrain.config.schema import JOB_NAME, Config
from slurmtrain.config.validate import validate
from slurmtrain.errors import ClusterError
from slurmtrain.launch.job import check_slurm_is_here
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.submit import slurm_conf_of
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.runtime.jobs.hydra_task import RESULT
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.sweep.adaptive import OpenSweep, open_sweep
from slurmtrain.sweep.plan import SweepPlan, values_of
from slurmtrain.system import logs
from slurmtrain.system.files import replace_file, write_json
from slurmtrain.system.paths import current_folder

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

OVER = "over"  # a file in the sweep: the program has come to its end


class Tasks:
    """The launcher, from one `setup` on.

    Args:
        context, function, config: the arguments that Hydra passes to launchers.
        cluster, overrides, config_dir: the launcher's own settings, see `slurmtrain/hydra_plugin.py`.
    """

    def __init__(
        self,
        context: Any,
        function: Any,
        config: DictConfig,
        *,
        cluster: str,
        overrides: Sequence[str],
        config_dir: str | None,
        array_parallelism: int | None,
        again: bool,
    ):
        self._context, self._function, self._config = context, function, config
        self._overrides = [f"cluster={cluster}", "job=command", "job.command=set-below", "job.snapshot=none"]
        # A function that raises would raise again. One that returned a result has finished, even if it was told to
        # stop.
        once = "requeue.max_attempts_without_progress=1"
        name = f"job.name={_name(config.hydra.job.name)}"
        self._overrides += [name, once, f"job.finished_when={RESULT}", *overrides]
        self._config_dir = config_dir
        self._parallelism, self._again = array_parallelism, again
        self._cut_short = False
        self._open: OpenSweep | None = None
        self._base: Config | None = None

    def launch(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Run some jobs and wait for them. A job that fails is returned as failed, with its exception.

        Args:
            first: number of the first of them.

        Raises:
            SlurmtrainError: the launcher's own settings are wrong, or SLURM refuses.
        """
        import cloudpickle
        from hydra.core.singleton import Singleton

        logs.set_up(leave_to_others=True)
        hydra = self._config.hydra
        folder = Path(str(hydra.sweep.dir)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if "mode" in hydra.sweep:
            folder.chmod(int(str(hydra.sweep.mode), 8))
        shared = {"context": self._context, "function": self._function, "config": self._config}
        pickled = cloudpickle.dumps({**shared, "singletons": Singleton.get_state()})
        values = secrets.read(self._run_config(Path("tasks")).secrets)
        secrets.refuse_pickled(values, pickled, "what the task function needs")
        secrets.refuse_pickled(values, json.dumps([list(each) for each in job_overrides]).encode(), "an override")
        opened = self._open = self._open or self._find_or_make(folder)
        tasks = opened.sweep.tasks
        tasks.mkdir(mode=0o700, exist_ok=True)
        file = tasks / f"{hashlib.sha256(pickled).hexdigest()[:16]}.pkl"
        wanted: list[tuple[dict[str, str], Config]] = []
        for number, overrides in enumerate(job_overrides, first):
            digest = hashlib.sha256(json.dumps(list(overrides)).encode()).hexdigest()[:8]
            task = tasks / f"{number:04d}-{digest}.json"
            if not task.exists():  # otherwise it was asked for before the last shell died
                if not file.exists():
                    replace_file(file, pickled)  # whole or not at all: jobs read it
                facts = {"shared": str(file), "number": number, "overrides": list(overrides)}
                write_json(task, {**facts, "path": [os.path.abspath(each) for each in sys.path]})
            wanted.append((values_of(overrides), self._run_config(task)))
        numbers = f"jobs {first} to {first + len(wanted) - 1}" if len(wanted) > 1 else f"job {first}"
        log.info("waiting for %s of %s; `sweep status %s` shows them", numbers, opened.sweep.path, opened.sweep.id)
        try:
            with opened.alone():
                run_dirs = [opened.add(varied, config) for varied, config in wanted]
                ended = opened.run(run_dirs)
        except BaseException:
            self._cut_short = True
            raise
        return [
            _left_by(run_dir, now) or _failed(run_dir, now, overrides)
            for overrides, run_dir, now in zip(job_overrides, run_dirs, ended, strict=True)
        ]

    def _find_or_make(self, folder: Path) -> OpenSweep:
        from omegaconf import OmegaConf

        first = with_absolute_paths(self._run_config(Path("tasks")), current_folder())
        asked = OmegaConf.masked_copy(self._config, [str(key) for key in self._config if key != "hydra"])
        function = f"{getattr(self._function, '__module__', '')}.{getattr(self._function, '__qualname__', '')}"
        search = json.dumps([str(folder), function, OmegaConf.to_yaml(asked), self._overrides])
        client = None
        if first.cluster.backend != Backend.LOCAL:
            client = SlurmClient(slurm_conf_of(first))
            check_slurm_is_here(client.slurm_conf)
        opened = open_sweep(
            SweepPlan(first, search=search),
            list(self._config.hydra.overrides.task),
            client,
            parallelism=self._parallelism,
            again=lambda sweep: self._again or (sweep.path / OVER).exists(),
        )
        atexit.register(self._end, opened.sweep)
        return opened

    def _end(self, sweep: Sweep) -> None:
        """Mark the sweep as over at the program's end.

        A program that was stopped while it waited may be started again, and marks nothing.
        """
        if not self._cut_short and sweep.path.exists():
            (sweep.path / OVER).touch()

    def _run_config(self, task: Path) -> Config:
        """Return the config of the run that calls the task function."""
        if self._base is None:
            self._base = compose(self._overrides, config_dir=self._config_dir)
            validate(self._base)
        python = self._base.cluster.python or sys.executable
        command = shlex.join([python, "-m", "slurmtrain.runtime.jobs.hydra_task", str(task)])
        return dataclasses.replace(self._base, job=dataclasses.replace(self._base.job, command=command))


def _name(task: str) -> str:
    """Return a valid job.name for a program's name."""
    name = re.sub(r"[^A-Za-z0-9._+-]", "_", task).lstrip("._+-")[:64]
    return name if re.fullmatch(JOB_NAME.regex, name) else "multirun"


def _left_by(run_dir: RunDir, now: RunState) -> JobReturn | None:
    """Return the result or exception of the job; None when it left none, or another of its ranks failed."""
    from hydra.core.utils import JobStatus

    with contextlib.suppress(FileNotFoundError), (run_dir.path / RESULT).open("rb") as file:
        returned: JobReturn = pickle.load(file)
        if now.status == RunStatus.FINISHED or returned.status is JobStatus.FAILED:
            return returned
    return None


def _failed(run_dir: RunDir, now: RunState, overrides: Sequence[str]) -> JobReturn:
    """Return what is known of the end of a job that has left no result."""
    from hydra.core.utils import JobReturn, JobStatus

    returned = JobReturn(overrides, working_dir=str(run_dir.path), status=JobStatus.FAILED)
    returned.return_value = ClusterError(f"run {run_dir.id} {now.status}: {now.explanation}", hint=f"logs {run_dir.id}")
    return returned
