"""The run and the attempt of this process, and who keeps the attempt's record.

A submitted job is given run and attempt by its supervisor. Ranks that somebody started by hand (srun, torchrun, plain
python) find them out together: they meet first, rank 0 makes the run directory or claims the next attempt, and
broadcasts both.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format.directory import newest_committed_step
from slurmtrain.config.schema import Config
from slurmtrain.errors import EnvironmentMismatchError, SlurmtrainError, UnreadableRecordError
from slurmtrain.runs import attempts
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.reasons import Event, LastWord
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RunDir
from slurmtrain.runs.software import record_environment
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import Environment, own_job_id
from slurmtrain.supervise.end_of_attempt import close_abandoned, progress_shown
from slurmtrain.system import process
from slurmtrain.system.files import make_own_folder
from slurmtrain.system.process import ProcessMark

log = logging.getLogger(__name__)

MEETINGS = ".meetings-"  # below runs/; the user's number follows


@dataclass(frozen=True)
class AttemptContext:
    """The run and the attempt of this process.

    Attributes:
        supervised: a supervisor finishes the attempt's record after the ranks have exited;
            else rank 0 does.
    """

    run_dir: RunDir
    number: int
    supervised: bool

    @property
    def attempt_dir(self) -> AttemptDir:
        return self.run_dir.attempt(self.number)

    def incarnation_label(self, environment: Environment) -> str:
        job = f"job {environment.job_id}" if environment.job_id else f"pid {os.getpid()} on {socket.gethostname()}"
        return f"attempt {self.number}, {job}, restart {environment.restart_count}"


def given_attempt(run_dir: RunDir) -> AttemptContext | None:
    """Return the attempt that a supervisor has named, or None for ranks started by hand."""
    number = os.environ.get(ATTEMPT_VARIABLE)
    return AttemptContext(run_dir, int(number), supervised=True) if number else None


def rendezvous_directory(context: AttemptContext | None, environment: Environment, runs_dir: Path) -> Path | None:
    """Return the folder where rank 0 publishes its address; None where nobody needs one.

    It is that of the attempt. Ranks started by hand under SLURM have one per step and restart, in a folder of this user, since
    others may share `runs_dir`: whoever could write the address would get the ranks.

    Raises:
        EnvironmentMismatchError: somebody else has made that folder, or can write to it.
    """
    if context is not None:
        return context.attempt_dir.path
    if environment.source != "slurm" or environment.world_size == 1:
        return None
    runs_dir.mkdir(parents=True, exist_ok=True)
    own = runs_dir / f"{MEETINGS}{os.geteuid()}"
    if not make_own_folder(own, closed=0o022):
        raise EnvironmentMismatchError(
            f"{own} is to hold the address of rank 0, and it is not a folder that only you can write to",
            hint="remove it",
        )
    path = own / f"{environment.job_id}.{environment.step_id}.{environment.restart_count}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def agree_on_attempt(
    environment: Environment,
    find_or_create: Callable[[], RunDir],
    tell: Callable[[str | None], str],
    rendezvous_dir: Path | None,
) -> AttemptContext:
    """Let rank 0 find or create the run directory and claim an attempt, and broadcast both.

    Args:
        tell: broadcasts rank 0's text to all; called with None on the others.
        rendezvous_dir: folder to remove afterwards.
    """
    text = None
    if environment.rank == 0:
        run_dir = find_or_create()
        text = json.dumps([str(run_dir.path), run_dir.new_attempt()])
    path, number = json.loads(tell(text))
    if environment.rank == 0 and rendezvous_dir is not None:
        shutil.rmtree(rendezvous_dir, ignore_errors=True)
    return AttemptContext(RunDir(Path(path)), number, supervised=False)


def alone(kind: str, environment: Environment, find_or_create: Callable[[], RunDir]) -> AttemptContext:
    """Return run and attempt of a job started by hand whose kind has ranks that do not meet.

    None of its ranks could tell others the attempt.

    Raises:
        EnvironmentMismatchError: there are other ranks.
    """
    if environment.world_size > 1:
        raise EnvironmentMismatchError(
            f"job={kind} was started by hand with {environment.world_size} ranks", hint="let `submit` start it"
        )
    run_dir = find_or_create()
    return AttemptContext(run_dir, run_dir.new_attempt(), supervised=False)


def open_attempt(context: AttemptContext, environment: Environment, config: Config) -> None:
    """Begin the record of this attempt on rank 0, and close those of attempts that ended without one."""
    close_abandoned(context.run_dir, context.number, config, SlurmClient() if environment.source == "slurm" else None)
    me = ProcessMark.own()
    attempt = Attempt(
        number=context.number,
        job_id=own_job_id() if environment.source in ("slurm", "pods") else None,
        step_id=f"{environment.job_id}.{environment.step_id}" if environment.source == "slurm" else None,
        restart_count=environment.restart_count,
        nodes=list(environment.nodes),
        world_size=environment.world_size,
        pid=me.pid,
        born=me.born,
        pid_namespace=me.namespace,
        host=me.host,
        started=time.time(),
        gpus=_gpus(context.run_dir, environment, config),
        kind=config.job.kind,
        committed_before=newest_committed_step(context.run_dir.checkpoints),
    )
    attempt.reported_before, attempt.marked_before, attempt.seen_before = progress_shown(context.run_dir, config)
    attempts.write_attempt(context.run_dir, attempt)
    record_environment(context.attempt_dir)
    context.run_dir.event(
        Event.ATTEMPT_STARTED,
        attempt=context.number,
        job_id=attempt.job_id,
        nodes=attempt.nodes,
        world_size=attempt.world_size,
    )


def _gpus(run_dir: RunDir, environment: Environment, config: Config) -> float:
    """Return the GPUs that this attempt holds: spare nodes count, and runs that share a job share its GPUs."""
    nodes = len(environment.nodes)
    if environment.source == "slurm":
        allocated = os.environ.get("SLURM_JOB_NUM_NODES", "")
        nodes = max(nodes, int(allocated) if allocated.isdigit() else 0)
    packed = False
    with contextlib.suppress(UnreadableRecordError):  # it is needed for nothing else here
        packed = bool(run_dir.info().get("packed"))
    sharing = config.sweep.pack if packed else 1
    return nodes * config.cluster.gpus_per_node / max(1, sharing)


def record_last_word(context: AttemptContext, said: LastWord, **changes: Any) -> None:
    """Record rank 0's last word on the attempt, once what it has done is safe. An error here does not fail the attempt.

    Only this word says that a run has finished: without it, the run starts again from its last checkpoint.

    Args:
        changes: further fields of the attempt's record.
    """
    try:
        update_attempt(context, said=said, **changes)
    except (OSError, SlurmtrainError) as error:
        log.warning("cannot record that the attempt has %s: %s", said, error)


def update_attempt(context: AttemptContext, **changes: object) -> None:
    """Change fields of this attempt's record; rank 0 only, one writer at a time."""
    attempt = attempts.read_attempt(context.run_dir, context.number)
    for name, value in changes.items():
        setattr(attempt, name, value)
    attempts.write_attempt(context.run_dir, attempt)


# The stages of a start and their durations: from the interpreter's first instruction to the first step.


class Timeline:
    """The seconds between marks, from the start of this process on.

    Attributes:
        aloud: log what begins, so that a person who follows the log sees progress.
    """

    aloud = False

    def __init__(self) -> None:
        self._last = time.time() - process_age_s()
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Record that the stage `name` ends now."""
        now = time.time()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now

    def begin(self, what: str) -> None:
        """Log that a stage begins: "loading PyTorch"."""
        if self.aloud:
            log.info("%s ...", what)


def process_age_s() -> float:
    """Return the seconds since the kernel started this process."""
    began = process.born(os.getpid())
    assert began is not None, "/proc is not mounted"
    return time.clock_gettime(time.CLOCK_BOOTTIME) - float(began)
