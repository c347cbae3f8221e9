"""How a rank of job=command starts its program: the words, the environment, and the port on which its ranks meet."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurmtrain.config.launched_program import SHELLS
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, EnvironmentMismatchError, SlurmtrainError
from slurmtrain.observe import mlflow_logger, wandb_logger
from slurmtrain.observe.logger_thread import logged_run
from slurmtrain.rank.addresses import await_rank_0, listening_address, machine
from slurmtrain.rank.attempt_context import AttemptContext
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import write_json
from slurmtrain.system.patience import begin

log = logging.getLogger(__name__)

FIND_S = 60.0  # a new database of MLflow takes some seconds to make
# What SLURM, or a person, may send to tell a program to stop.
STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def start_program(
    config: Config,
    environment: Environment,
    context: AttemptContext,
    port: socket.socket | None,
    stop_requested: Callable[[], bool],
) -> subprocess.Popen[bytes]:
    """Start this rank's program.

    Args:
        port: rank 0's MASTER_PORT, to be held until the program has ended; None on other ranks.

    Raises:
        ConfigError: there is no such program, or it cannot be executed.
        RendezvousError: rank 0 did not publish its address.
        StopDuringStartError: a stop was requested before that.
    """
    given = rank_variables(config, environment, context, port, stop_requested)
    words = with_variables(shlex.split(config.job.command or ""), given, os.environ)
    heard = signal.Signals[config.job.stop_signal]
    try:
        return subprocess.Popen(words, env={**os.environ, **given}, preexec_fn=lambda: _reset_signals(heard))
    except OSError as error:
        name = words[0]
        raise ConfigError(
            f"job.command: cannot start {name!r}: {error.strerror}",
            hint="is it on the PATH of the nodes?" if os.sep not in name else f"see `ls -l {name}` on a node",
        ) from None


def _reset_signals(heard: signal.Signals) -> None:
    """Give a new process the defaults, whatever this one blocks or ignores, but let it ignore SLURM's other stop signals.

    A program that handles those sets its own handlers.
    """
    for number in {signal.SIGTERM, signal.SIGUSR2, heard}:
        signal.signal(number, signal.SIG_DFL if number == heard else signal.SIG_IGN)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python itself ignores
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def rank_variables(
    config: Config,
    environment: Environment,
    context: AttemptContext,
    port: socket.socket | None,
    stop_requested: Callable[[], bool],
) -> dict[str, str]:
    """Return the variables of the program: those of torch.distributed's env://, of loggers, and ours.

    Raises:
        RendezvousError, StopDuringStartError: as `start_program`.
    """
    variables = {
        "RANK": str(environment.rank),
        "WORLD_SIZE": str(environment.world_size),
        "LOCAL_RANK": str(environment.local_rank),
        "LOCAL_WORLD_SIZE": str(environment.local_world_size),
        "NODE_RANK": str(environment.node_rank),
        RUN_DIR_VARIABLE: str(context.run_dir.path),
        ATTEMPT_VARIABLE: str(context.number),
    }
    cluster, published = config.cluster, context.attempt_dir.master_file
    found: dict[str, Any]
    if port is not None:  # on rank 0
        try:
            host = listening_address(environment, cluster.network_interface)
        except EnvironmentMismatchError:
            if cluster.network_interface not in ("auto", "none"):
                raise
            host = environment.node  # not every program makes use of it
        # Rank 0 alone goes on in the run of W&B and MLflow: several that resume the same run mix their steps in it.
        own = {name: value for name, value in logger_variables(config, context).items() if name not in cluster.env}
        # A run of W&B that another rank begins is none of this one, but neither asks for a key, nor is beside the code.
        of_others = {name: own[name] for name in ("WANDB_MODE", "WANDB_DIR") if name in own}
        variables |= own
        found = {"host": host, "port": port.getsockname()[1], "machine": machine(), "variables": of_others}
        if environment.world_size > 1:
            write_json(published, found)
    else:  # also where there is an address: rank 0 publishes its own when it has looked at the program's checkpoints
        timeout_s = cluster.rendezvous_timeout_s
        found = await_rank_0(published, environment, timeout_s, stop_requested, lambda published: published)
        variables |= found["variables"]
    host = "127.0.0.1" if environment.rank != 0 and found["machine"] == machine() else found["host"]
    around = os.environ if environment.world_size > 1 else {}
    if not {"MASTER_ADDR", "MASTER_PORT"} <= around.keys():  # an engine tells pods the name of the first, and no port
        variables |= {"MASTER_ADDR": around.get("MASTER_ADDR", host), "MASTER_PORT": str(found["port"])}
    return variables


def with_variables(words: Sequence[str], given: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Replace `$NAME` and `${NAME}` in a program's words for the variables that are only known when the rank runs.

    Words after the name of a shell are left to that shell. Every other `$` is unchanged, since no shell runs.

    Args:
        given: variables of this rank, all of which may be replaced.
        environment: variables of this process; its SLURM_* and MASTER_* may be replaced, and the folders of cluster.stage.
    """
    replaced = ("SLURM_", "MASTER_", "SLURMTRAIN_CODE", "SLURMTRAIN_DATA")
    known = {name: value for name, value in environment.items() if name.startswith(replaced)} | dict(given)
    shell = next((at for at, word in enumerate(words) if os.path.basename(word) in SHELLS), len(words))

    def value_of(match: re.Match[str]) -> str:
        return known.get(match.group(1) or match.group(2), match.group())

    return [VARIABLE.sub(value_of, word) if at < shell else word for at, word in enumerate(words)]


# Variables by which an unmodified program goes on in the same run of W&B and MLflow.


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
            variables["MLFLOW_TRACKING_URI"] = mlflow_logger.tracking_uri(config.observe.mlflow, run.directory)
    return variables
