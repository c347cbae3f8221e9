"""job=command and loggers: variables by which an unmodified program goes on in the same run of W&B and MLflow."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from slurmtrain.config.schema import Config
from slurmtrain.errors import SlurmtrainError
from slurmtrain.observe import mlflow_logger, wandb_logger
from slurmtrain.observe.logger_thread import logged_run
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.system.patience import begin

log = logging.getLogger(__name__)

FIND_S = 60.0  # a new database of MLflow takes some seconds to make


def logger_variables(config: Config, context: AttemptContext) -> dict[str, str]:
    """Return the variables of the loggers that the config asks for, on rank 0; make the run of MLflow if there is none yet.

    Without an answer the program starts all the same: a logger never stops it.
    """
    run, variables = logged_run(context.run_dir, context.number), dict[str, str]()
    if config.observe.wandb.enabled:
        why = wandb_logger.why_offline(config.observe.wandb.mode, os.environ)
        variables |= wandb_logger.variables_of(config.observe.wandb, run, online=why is None)
        if why is not None:
            log.info("%s", wandb_logger.offline_sentence(run.directory, why))
    if config.observe.mlflow.enabled:
        try:
            _, _, run_id = begin(lambda: mlflow_logger.find_or_create(config.observe.mlflow, run)).result(FIND_S)
        except Exception as error:  # of MLflow's, or of what it uses
            said = error.message if isinstance(error, SlurmtrainError) else str(error).strip()
            sentence = said.splitlines()[0][:300] if said else type(error).__name__
            log.warning("MLflow cannot be reached, and the program starts without MLFLOW_RUN_ID: %s", sentence)
        else:
            name = config.observe.mlflow.experiment or run.name
            variables |= {"MLFLOW_RUN_ID": run_id, "MLFLOW_EXPERIMENT_NAME": name}
            uri = mlflow_logger.tracking_uri(config.observe.mlflow, run.directory)
            if uri != os.environ.get("MLFLOW_TRACKING_URI"):  # which all ranks have; there may be a password in it
                variables["MLFLOW_TRACKING_URI"] = uri
    return variables


def of_rank(found: Mapping[str, str], rank: int, own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one rank: rank 0 goes on in the run, and what the others log is no part of it.

    W&B knows two ways: only rank 0 logs, or each process has a run of its own in a group. Several that resume the same run
    mix their steps in it.

    Args:
        own: those of cluster.env, which stay as they are there.
    """
    given = dict(found)
    if rank != 0 and "WANDB_RUN_ID" in found and "WANDB_RUN_ID" not in own:
        run_id, suffix = found["WANDB_RUN_ID"], f"rank{rank}"
        given = {"WANDB_RUN_GROUP": run_id, **found, "WANDB_RUN_ID": f"{run_id}-{suffix}"}
        if "WANDB_NAME" in found:
            given["WANDB_NAME"] = f"{found['WANDB_NAME']} {suffix}"
    return {name: value for name, value in given.items() if name not in own}
