"""One call of `slurmtrain.map`, inside of a run: `python -m slurmtrain.rank.jobs.map_task`.

The run is a point of a sweep. It calls the sweep's function with the arguments of its own number, and leaves the result
or the exception in its run directory for whoever asks for it. A function that raises would raise again, so it ends the
run; a process that is killed leaves no result, and is started again as any program. Every rank makes the call, and rank
0 alone writes the result. Imports no torch; the function may.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, ConfigError
from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.slurm.environment import own_job_id, rank_or_zero
from slurmtrain.system.files import replace_file
from slurmtrain.system.redaction import holds_secret, redact

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

RESULT = "result.pkl"  # in the run's directory


def function_file(sweep: Sweep) -> Path:
    """Return the file of the function: a pickled dict.

    path: the folders of its modules; python: the version that has pickled it; function: pickled by cloudpickle.
    """
    return sweep.tasks / "function.pkl"


def arguments_file(sweep: Sweep, number: int) -> Path:
    """Return the file of the pickled arguments of one call, a tuple."""
    return sweep.tasks / f"{number:04d}.pkl"


def python_version() -> str:
    """Return the version of Python whose bytecode a pickled function has."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def main() -> int:
    """Make the call; return 0, or 78, which nobody retries, when the function raised."""
    run_dir, rank = RunDir(Path(os.environ[RUN_DIR_VARIABLE])), rank_or_zero()
    secrets.take(load_frozen(run_dir.config_file, with_secrets=False).secrets)
    if rank == 0:
        (run_dir.path / RESULT).unlink(missing_ok=True)  # left by an attempt in which another rank failed
    try:
        function, arguments = _load(Sweep(run_dir.path.parent), int(run_dir.id.rpartition("-")[2]))
        left = _with_value(function(*arguments))
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == EXIT_REQUEUE:
            raise
        traceback.print_exception(error)
        left = _with_error(error)
    if rank == 0:
        replace_file(run_dir.path / RESULT, pickle.dumps(left))
    if "value" in left:
        return 0
    attempt_dir = run_dir.attempt(int(os.environ[ATTEMPT_VARIABLE]))
    record_failure(attempt_dir, rank, Failure(EXIT_CONFIG, left["said"], on_any_node=True))
    return EXIT_CONFIG


def _load(sweep: Sweep, number: int) -> tuple[Any, tuple[Any, ...]]:
    shared = pickle.loads(function_file(sweep).read_bytes())
    if shared["python"] != python_version():
        raise ConfigError(
            f"the function is of Python {shared['python']}, and the job runs {sys.executable}, {python_version()}",
            hint="call map with the Python of cluster.python, cluster.venv or cluster.conda_env",
        )
    sys.path += [folder for folder in shared["path"] if folder not in sys.path]
    return pickle.loads(shared["function"]), pickle.loads(arguments_file(sweep, number).read_bytes())


def _with_value(value: Any) -> dict[str, Any]:
    """Return what is left of a call that has returned.

    Raises:
        TypeError: the value cannot be pickled and read back, or holds a secret.
    """
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(value)
        pickle.loads(pickled)
    except Exception as problem:
        raise TypeError(f"the result cannot be pickled: {type(problem).__name__}: {problem}") from problem
    if holds_secret(pickled):
        raise TypeError("the result holds the value of a secret, which would be stored on disk in clear text")
    return {"value": pickled}


def _with_error(error: BaseException) -> dict[str, Any]:
    """Return what is left of a call that has raised: the error, if it can be pickled, its traceback and its last line."""
    import cloudpickle

    text = redact("".join(traceback.format_exception(error)))
    said = redact(traceback.format_exception_only(error)[-1].strip())
    try:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    if pickled is not None and holds_secret(pickled):
        pickled = None
    return {"error": pickled, "traceback": text, "said": said}


# One job of a Hydra program's multirun: see `slurmtrain/hydra_plugin.py`. Rank 0 alone writes Hydra's folder.


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


if __name__ == "__main__":
    sys.exit(main())
