"""One job of a Hydra program's multirun, inside of a run: `python -m slurmtrain.runtime.jobs.hydra_task TASK`.

It calls the program's task function as Hydra's own launcher would, and leaves its return value for the shell that
waits. Every rank calls it; rank 0 alone writes Hydra's folder and the result. Imports no torch; the function may.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from slurmtrain.slurm.environment import own_job_id, rank_or_zero
from slurmtrain.system.redaction import holds_secret, redact

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

RESULT = "result.pkl"  # in the run's directory


def main(task_file: Path) -> int:
    """Run the task; return 0, or 1 when the function raised."""
    import cloudpickle

    task = json.loads(task_file.read_text())
    sys.path += [folder for folder in task["path"] if folder not in sys.path]  # the folders of the function's modules
    run_dir, rank = RunDir(Path(os.environ[RUN_DIR_VARIABLE])), rank_or_zero()
    secrets.take(load_frozen(run_dir.config_file, with_secrets=False).secrets)
    if rank == 0:
        (run_dir.path / RESULT).unlink(missing_ok=True)  # left by an attempt in which another rank failed
    with open(task["shared"], "rb") as file:
        shared = cloudpickle.load(file)
    returned = _run(shared, task, rank)
    error = _exception_of(returned)
    if error is not None:
        traceback.print_exception(error)
        sentence = traceback.format_exception_only(error)[-1].strip()
        record_failure(run_dir.attempt(int(os.environ[ATTEMPT_VARIABLE])), rank, Failure(1, sentence))
    if rank == 0:
        temporary = run_dir.path / f".{RESULT}"
        temporary.write_bytes(_pickled(returned))
        temporary.replace(run_dir.path / RESULT)
    return 0 if error is None else 1


def _run(shared: dict[str, Any], task: dict[str, Any], rank: int) -> JobReturn:
    from hydra.core.singleton import Singleton
    from hydra.core.utils import run_job, setup_globals
    from omegaconf import open_dict, read_write

    Singleton.set_state(shared["singletons"])
    setup_globals()
    context = shared["context"]
    config = context.config_loader.load_sweep_config(shared["config"], task["overrides"])
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.num = task["number"]
        config.hydra.job.id = own_job_id() or str(task["number"])
        if rank != 0:
            config.hydra.output_subdir = None
            config.hydra.job_logging = {"root": None}  # as hydra/job_logging=none
    return run_job(shared["function"], config, "hydra.sweep.dir", "hydra.sweep.subdir", context)


def _exception_of(returned: JobReturn) -> Exception | None:
    from hydra.core.utils import JobStatus

    error = returned._return_value
    return error if returned.status is JobStatus.FAILED and isinstance(error, Exception) else None


def _pickled(returned: JobReturn) -> bytes:
    """Pickle the result.

    One that cannot be pickled or read back, or that contains a secret, is replaced by an error that says so.
    """
    import cloudpickle
    from hydra.core.utils import JobStatus

    try:
        pickled: bytes = cloudpickle.dumps(returned)
        pickle.loads(pickled)
        if holds_secret(pickled):
            raise ValueError("it holds a secret")
    except Exception as problem:
        error = _exception_of(returned)
        if error is not None:
            returned.return_value = RuntimeError(redact(f"{type(error).__name__}: {error}"))
        else:
            returned.return_value = TypeError(f"the result cannot be handed over: {problem}")
            returned.status = JobStatus.FAILED
        pickled = cloudpickle.dumps(returned)
    return pickled


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
