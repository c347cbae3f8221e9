"""job=command and loggers: variables by which an unmodified program goes on in the same run of W&B and MLflow.

Rank 0 finds them out in a process of its own, so that what wraps the program never imports wandb or mlflow, and a server that
does not answer costs seconds:

    python -m slurmtrain.runtime.jobs.program_loggers RUN_DIR ATTEMPT
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from slurmtrain.config.schema import Config
from slurmtrain.errors import SlurmtrainError
from slurmtrain.observe.textfile import TextFile, text_file_of
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import records

log = logging.getLogger(__name__)

FIND_S = 60.0  # a new database of MLflow takes some seconds to make
LINE_BYTES = 1 << 16
NAMES = (
    *("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR", "WANDB_PROJECT", "WANDB_NAME", "WANDB_MODE"),
    *("WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_TAGS"),
    *("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"),
)


def logger_variables(config: Config, context: AttemptContext) -> dict[str, str]:
    """Return the variables for the program, on rank 0. Those of cluster.env stay as they are there.

    Without an answer the program starts all the same: a logger never stops it.
    """
    if not (config.observe.wandb.enabled or config.observe.mlflow.enabled):
        return {}
    words = [sys.executable, "-m", __name__, str(context.run_dir.path), str(context.number)]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=FIND_S, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("the program starts without the variables of W&B and MLflow: %s", error)
        return {}
    # The last line: what is imported may print, too.
    found = records.parse((done.stdout.strip().splitlines() or [""])[-1].encode())
    return {**checked(found, config.cluster.env)}


def checked(found: object, own: Mapping[str, str]) -> dict[str, str]:
    """Return the known variables in what the process has answered, without those that `cluster.env` sets."""
    if not isinstance(found, dict):
        return {}
    return {
        name: value for name, value in found.items() if name in NAMES and isinstance(value, str) and name not in own
    }


def of_rank(found: Mapping[str, str], rank: int) -> dict[str, str]:
    """Return the variables of one rank: rank 0 goes on in the run, and what the others log is no part of it.

    W&B knows two ways: only rank 0 logs, or each process has a run of its own in a group. Several that resume the same run
    mix their steps in it.
    """
    if rank == 0 or "WANDB_RUN_ID" not in found:
        return dict(found)
    run_id, suffix = found["WANDB_RUN_ID"], f"rank{rank}"
    named = {"WANDB_NAME": f"{found['WANDB_NAME']} {suffix}"} if "WANDB_NAME" in found else {}
    return {"WANDB_RUN_GROUP": run_id, **found, **named, "WANDB_RUN_ID": f"{run_id}-{suffix}"}


def find_variables(run_dir: RunDir, attempt: int) -> dict[str, str]:
    """Return the variables of the loggers that the config asks for; make the run of MLflow if there is none yet."""
    from slurmtrain.config import secrets
    from slurmtrain.config.frozen import load_frozen
    from slurmtrain.observe import mlflow_logger, wandb_logger
    from slurmtrain.observe.logger_thread import logged_run

    config = load_frozen(run_dir.config_file)
    secrets.take(config.secrets)
    run, variables = logged_run(run_dir, attempt), dict[str, str]()
    if config.observe.wandb.enabled:
        why = wandb_logger.why_offline(config.observe.wandb.mode, os.environ)
        variables |= wandb_logger.variables_of(config.observe.wandb, run, online=why is None)
        if why is not None:
            log.info("%s", wandb_logger.offline_sentence(run.directory, why))
    if config.observe.mlflow.enabled:
        try:
            _, _, run_id = mlflow_logger.find_or_create(config.observe.mlflow, run)
        except SlurmtrainError:
            raise
        except Exception as error:  # of MLflow's, or of what it uses
            sentence = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            log.warning("MLflow cannot be reached, and the program starts without MLFLOW_RUN_ID: %s", sentence)
        else:
            variables |= {
                "MLFLOW_RUN_ID": run_id,
                "MLFLOW_EXPERIMENT_NAME": config.observe.mlflow.experiment or run.name,
            }
            uri = mlflow_logger.tracking_uri(config.observe.mlflow, run.directory)
            if uri != os.environ.get("MLFLOW_TRACKING_URI"):  # which all ranks have; there may be a password in it
                variables["MLFLOW_TRACKING_URI"] = uri
    return variables


def program_text_file(config: Config, environment: Environment, context: AttemptContext) -> TextFile | None:
    """Begin the text file of this node for Prometheus, on its first rank; None: nobody asks for it, or this is another rank.

    On rank 0 it has the numbers of the newest line of metrics.jsonl, if the program writes there.
    """
    if config.observe.textfile_dir is None or environment.local_rank != 0:
        return None
    name, labels = text_file_of(context.run_dir, environment.rank, environment.node)
    source = (lambda: newest_numbers(context.run_dir.metrics_file)) if environment.rank == 0 else None
    file = TextFile(Path(config.observe.textfile_dir), name, labels, source=source)
    file.update({"attempt": context.number})
    return file


def newest_numbers(path: Path) -> dict[str, float]:
    """Return the numbers of the last whole line of a metrics file; none without one."""
    lines = records.read_tail(path, LINE_BYTES).split(b"\n")
    found = records.parse(lines[-2]) if len(lines) > 1 else None
    if not isinstance(found, dict):
        return {}
    return {name: float(value) for name, value in found.items() if isinstance(value, float) or records.is_number(value)}


def main(words: list[str]) -> int:
    """Print the variables as JSON."""
    from slurmtrain.system import logs

    logs.set_up(0)
    try:
        print(json.dumps(find_variables(RunDir(Path(words[0])), int(words[1]))), flush=True)
    except (SlurmtrainError, OSError) as error:
        logs.show_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
