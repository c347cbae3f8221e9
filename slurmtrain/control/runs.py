"""A run as an object: `submit` returns one, and `open_run` finds one again, from any process that sees its directory.

run = slurmtrain.submit(["+cluster=a100x4", "model=small", "optim.lr=3e-4"])
run.wait()
run.metrics()[-1]["loss"]
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.choices import Backend
from slurmtrain.config.launched_program import with_program
from slurmtrain.config.overrides import normalise
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config
from slurmtrain.control import stop
from slurmtrain.control.submitting import submit_run
from slurmtrain.errors import ClusterError, SlurmtrainError, UnreadableRecordError, UsageError
from slurmtrain.launch.checks import check
from slurmtrain.launch.code_source import CodeSource
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.submit import preparing
from slurmtrain.report.checkpoints import StoredCheckpoint, complete_checkpoints
from slurmtrain.report.collect import metrics_of
from slurmtrain.report.rank_logs import Tail, attempt_number, last_lines, log_file
from slurmtrain.report.status.state import RunState, RunStatus, state
from slurmtrain.report.status.waiting import RunFailedError, RunStoppedError, as_they_end
from slurmtrain.runs import lookup, ownership
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.paths import absolute, runs_root
from slurmtrain.system.records import printable, read_tail
from slurmtrain.system.redaction import redact

if TYPE_CHECKING:
    from omegaconf import DictConfig

LAUNCHER_LOG = "launcher.log"  # what the launcher says on stderr; the output of the ranks is in their own logs
POLL_S = 0.05
SHOWN_BYTES = 2000
submitting = threading.RLock()  # composing and sbatch change what belongs to the whole process, for a moment


@dataclass(frozen=True)
class Status:
    """The state of a run at one moment. The names are those of `status RUN --json`.

    Attributes:
        state: one word, such as "running" or "finished".
        sentence: why, and what comes next.
        alive: SLURM or a local launcher has the run, or may have it.
        step, steps: steps done, and steps of the whole run; None if not known.
        loss, valid_loss: values logged last, in nats per token.
        tokens_per_s, step_time_s, eta_s: speed, and seconds left, while it runs.
        logged: unix time of the last line of its metrics.
        reason, expected_start: why its job waits, in SLURM's word, and the unix time at which SLURM expects to start it.
        job_id: its latest job; None outside of SLURM.
        attempts: its attempts, oldest first, each with the reason why it ended.
        doubt: why SLURM could not be asked; None if it could.
    """

    state: RunStatus
    sentence: str
    alive: bool
    step: int | None
    steps: int | None
    loss: float | None
    valid_loss: float | None
    tokens_per_s: float | None
    step_time_s: float | None
    eta_s: float | None
    logged: float | None
    reason: str | None
    expected_start: float | None
    job_id: str | None
    attempts: tuple[Attempt, ...]
    doubt: str | None

    @classmethod
    def of(cls, now: RunState) -> Status:
        """Return what `report.status.state` knows of a run."""
        return cls(**now.facts(), alive=now.alive, attempts=tuple(now.attempts), doubt=now.slurm_error)

    def __str__(self) -> str:
        of = f" of {self.steps}" if self.steps is not None else ""
        step = f", step {self.step}{of}" if self.step is not None else ""
        return f"{self.state}{step}" + (f": {self.sentence}" if self.sentence != self.state else "")

    def __repr__(self) -> str:
        return f"<{self}>"


class Run:
    """One run, seen through its run directory. It holds nothing else, so any number of these may exist for a run.

    Attributes:
        path: the run directory.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)

    @property
    def id(self) -> str:
        """The run's id, which the command line takes as RUN."""
        return self._run_dir.id

    @property
    def name(self) -> str:
        """The run's name, which is job.name of its config."""
        return str(self._run_dir.info()["name"])

    @property
    def job_ids(self) -> list[str]:
        """The ids of all jobs that the run was submitted as, the latest last; none with cluster=local."""
        return list(self._run_dir.info()["job_ids"])

    def status(self) -> Status:
        """Return the state of the run now, from its files and one squeue call.

        Raises:
            UnreadableRecordError: its files cannot be used.
        """
        return Status.of(state(self._run_dir))

    def wait(self, timeout_s: float | None = None) -> Status:
        """Wait until the run has finished, through all its attempts.

        The run's own files are looked at twice a second, and SLURM is asked every 20 s.

        Args:
            timeout_s: seconds to wait at most; None: as long as it takes.

        Raises:
            RunFailedError: it has failed, with the reason of its last attempt.
            RunStoppedError: it was cancelled, or ended before it had finished; `resume` continues it.
            WaitTimeoutError: it has not ended by then, and goes on.
        """
        ((_, now),) = as_they_end([self._run_dir], timeout_s=timeout_s)
        refuse_unfinished(self._run_dir, now)
        return Status.of(now)

    def metrics(self) -> list[dict[str, Any]]:
        """Return what the run has logged, a dict with "step" for each line, by step.

        Steps that a resumed attempt did again are there once. The metrics of evaluation jobs are among them.

        Raises:
            UnreadableRecordError: the file cannot be used.
        """
        return metrics_of(self._run_dir)

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Return the complete checkpoints, oldest first."""
        return complete_checkpoints(self._run_dir.checkpoints)

    def logs(self, rank: int = 0, *, tail: int | None = None, attempt: int | None = None) -> str:
        """Return the output of a rank.

        Args:
            tail: number of lines from its end; None: all of it.
            attempt: number of the attempt; None: the latest.

        Raises:
            UsageError: the run has not started yet, or has no such rank or attempt.
        """
        log = log_file(self._run_dir, rank, attempt_number(self._run_dir, attempt))
        if tail is not None:
            return last_lines(log, tail)
        whole = Tail(log, None)
        return "".join(whole.pieces()) + whole.rest()

    def cancel(self) -> str:
        """End the run for good; it saves if time allows. Return what was done, in words.

        Raises:
            UsageError: it belongs to somebody else.
            ClusterError: SLURM refuses or does not answer, or a local run is still setting up.
        """
        ownership.require_own(self._run_dir)
        return stop.cancel(self._run_dir)

    @property
    def _run_dir(self) -> RunDir:
        return RunDir(self.path)

    def __repr__(self) -> str:
        try:
            return f"<Run {self.id} ({self.name}): {self.status()}>"
        except SlurmtrainError as error:
            return f"<Run {self.id} (unreadable): {error.message}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)


def submit(
    config: Sequence[str] | Config | DictConfig,
    *,
    command: Sequence[str] | None = None,
    project: str | os.PathLike[str] = ".",
    config_dir: str | os.PathLike[str] | None = None,
) -> Run:
    """Submit a run as `submit` on the command line does, and return it at once.

    With cluster=local it runs on this machine, in the background.

    Args:
        config: overrides as on the command line, such as ["+cluster=a100x4", "optim.lr=3e-4"]; or a config that the
            program has composed or built.
        command: with overrides: the words of a program of your own, which every rank runs.
        project: the folder that relative paths mean, and of whose code the job gets a snapshot.
        config_dir: a folder of your own configs, beside the shipped ones.

    Raises:
        UsageError: an unknown key, group or option, or an override that cannot be read.
        ConfigError: the config cannot work.
        ClusterError: SLURM is not there, refuses, or does not answer.
    """
    cwd = folder_of(project)
    with submitting:
        found, dims, overrides = config_of(config, cwd, command=command, config_dir=config_dir)
        check(found, dims, cwd)
        run_dir, _ = start(found, overrides, cwd)
    return Run(run_dir.path)


def start(
    config: Config, overrides: Sequence[str], cwd: Path, source: CodeSource | None = None
) -> tuple[RunDir, subprocess.Popen[bytes] | None]:
    """Submit a run with a checked config, or start it on this machine in the background; return it, and its launcher there.

    The arguments and errors are those of `submit_run`.
    """
    if config.cluster.backend != Backend.LOCAL:
        return submit_run(config, overrides, cwd, source)[0], None
    with preparing(config, overrides, cwd, source) as run_dir:
        pass
    words = ["resume", str(run_dir.path)]
    return run_dir, start_in_background(words, run_dir.path, lambda: bool(run_dir.attempt_numbers()))


def open_run(run: str | os.PathLike[str], *, project: str | os.PathLike[str] = ".") -> Run:
    """Return a run that exists.

    Args:
        run: its id, a unique beginning of one, its path, or "last".
        project: the folder from which it was submitted: runs are looked for in its `runs`, or in SLURMTRAIN_RUNS.

    Raises:
        UsageError: none or several match.
    """
    reference = os.fspath(run)
    inside = folder_of(project) / reference
    is_path = os.sep in reference and (inside / "run.json").is_file()
    return Run(lookup.find(str(inside) if is_path else reference, runs_of(project)).path)


def config_of(
    given: Sequence[str] | Config | DictConfig,
    cwd: Path,
    *,
    command: Sequence[str] | None = None,
    config_dir: str | os.PathLike[str] | None = None,
) -> tuple[Config, ParallelDims, list[str]]:
    """Return the validated config that overrides or an object stand for, its parallel dims, and the overrides.

    Paths in it are absolute.

    Raises:
        UsageError, ConfigError: as `submit`.
    """
    from slurmtrain.config.compose import compose, from_program

    if isinstance(given, str):
        raise UsageError(f"{given!r} is a string; expected a list of overrides", hint=f"write [{given!r}]")
    if not isinstance(given, Sequence):
        if command is not None or config_dir is not None:
            raise UsageError("command and config_dir work with overrides, but this is a config", hint="set job.command")
        config = with_absolute_paths(from_program(given), cwd)
        return config, validate(config), []
    for each in given:
        if not isinstance(each, str):
            raise UsageError(f"{each!r} is no override", hint='expected strings such as "optim.lr=3e-4"')
    overrides = [normalise(each) for each in given]
    if command is not None:
        if isinstance(command, str) or not command:
            raise UsageError(f"command={command!r}: expected a list of words", hint='["python", "my_train.py"]')
        overrides = with_program(overrides, command)
    config = compose(
        overrides, config_dir=str(absolute(os.fspath(config_dir), cwd)) if config_dir is not None else None
    )
    config = with_absolute_paths(config, cwd)
    return config, validate(config), overrides


def refuse_unfinished(run_dir: RunDir, now: RunState) -> None:
    """Raise the error for a run that has ended, unless it has finished.

    Raises:
        RunFailedError, RunStoppedError: it has not.
        UnreadableRecordError: its files cannot be used.
    """
    if now.status == RunStatus.FINISHED:
        return
    if now.status == RunStatus.UNREADABLE:
        raise UnreadableRecordError(now.explanation)
    kind = (
        RunStoppedError if now.status in (RunStatus.STOPPED, RunStatus.PRUNED, RunStatus.PREPARED) else RunFailedError
    )
    raise kind(
        redact(f"run {run_dir.id} {now.status}: {now.explanation}"), hint=f"logs {run_dir.id}, or {run_dir.path}"
    )


def folder_of(project: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a project's folder.

    Raises:
        UsageError: there is none.
    """
    folder = absolute(os.fspath(project))
    if not folder.is_dir():
        raise UsageError(f"project={os.fspath(project)!r}: there is no folder {folder}")
    return folder


def runs_of(project: str | os.PathLike[str]) -> Path:
    """Return the folder of the runs that were submitted from a project's folder."""
    return absolute(runs_root(), folder_of(project))


def start_in_background(words: list[str], folder: Path, has_begun: Callable[[], bool]) -> subprocess.Popen[bytes]:
    """Start `python -m slurmtrain WORDS` in the background, and return its process when it has begun.

    It is in a session of its own, so neither Ctrl-C nor the end of this process reaches it.

    Args:
        folder: the folder of the run or sweep, which gets the launcher's log.
        has_begun: returns whether it has taken over.

    Raises:
        ClusterError: it has ended before.
    """
    log = folder / LAUNCHER_LOG
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "slurmtrain", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, name="wait-for-launcher", daemon=True).start()  # it must not stay a zombie
    while not has_begun():
        if process.returncode is not None and not has_begun():
            said = read_tail(log, SHOWN_BYTES).decode(errors="replace").strip()
            raise ClusterError(f"the launcher of {folder} exited immediately: {printable(said) or process.returncode}")
        time.sleep(POLL_S)
    return process
