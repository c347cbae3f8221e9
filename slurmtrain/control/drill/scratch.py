"""The runs of a drill: a folder of their own, their start, the wait for them, and their end in whatever way it comes.

The folder is `drills/<time>` below the runs. Whoever removes or cancels something here does so to runs of this drill alone.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain.choices import Backend, RequeueMode
from slurmtrain.config.schema import Config
from slurmtrain.control import background, stop
from slurmtrain.errors import SlurmtrainError, UnreadableRecordError
from slurmtrain.launch.further_jobs import submit_links
from slurmtrain.launch.submit import interrupted, submit
from slurmtrain.report.status.look import is_over, states
from slurmtrain.report.status.state import RunState
from slurmtrain.runs.create import make_folder, new_run_id
from slurmtrain.runs.run_dir import DRILLS, RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_states import GONE

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25  # at the runs' own files
ASK_EVERY_S = 4.0  # SLURM, about all of them
LEAVE_S = 20.0  # longest wait for cancelled jobs to be gone
FIRST_ASKED_S = 0.5  # SLURM, after a cancellation; each further pause is twice as long, up to ASK_EVERY_S


@dataclass
class Watched:
    """A run of a drill, while it goes on.

    Attributes:
        told_at: when it was told to stop, or SLURM to preempt it, in unix seconds; None: not yet.
        refused: why that could not be done.
        unanswered: why it is not known whether it was done.
        given_up: nothing more is to be learned of it, though it goes on.
        over: it has ended, or was given up.
        state: what `status` says of it, when SLURM was asked last.
        launcher: the process of a local run.
        own_jobs: its jobs, as far as its record could be read: somebody may remove its folder meanwhile.
        jobs: further jobs that belong to it, such as the one that preempts it.
    """

    name: str
    run_dir: RunDir
    config: Config
    told_at: float | None = None
    refused: str | None = None
    unanswered: str | None = None
    given_up: bool = False
    over: bool = False
    state: RunState | None = None
    launcher: subprocess.Popen[bytes] | None = None
    own_jobs: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)

    @property
    def local(self) -> bool:
        return self.config.cluster.backend == Backend.LOCAL

    @property
    def explanation(self) -> str:
        return f"{self.state.status}: {self.state.explanation}" if self.state is not None else "nothing is known of it"


def make_drill_folder(runs_dir: Path) -> Path:
    """Make the folder of a new drill below the folder of runs.

    Raises:
        ConfigError: somebody else can replace files in it.
        OSError: it cannot be made.
    """
    return make_folder(runs_dir, DRILLS, new_run_id())


def remove_drill_folder(folder: Path) -> None:
    """Remove the folder of a drill, and the one above if no other drill has left anything there."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def start(name: str, run_dir: RunDir, config: Config, client: SlurmClient | None) -> Watched:
    """Start a prepared run: submit its job, or all of its chain; or start it here, in the background.

    Raises:
        ClusterError: SLURM refuses, or the launcher has ended at once.
    """
    watched = Watched(name, run_dir, config)
    if client is None:
        start_again(watched)
        return watched
    try:
        job_id = submit([run_dir], config)
        if config.requeue.mode == RequeueMode.CHAIN:
            submit_links(run_dir, job_id, config.requeue.chain_length, client)
        watched.own_jobs = list(run_dir.info()["job_ids"])
    except BaseException:  # Ctrl-C, say: its job may be in the queue all the same
        with contextlib.suppress(SlurmtrainError, OSError):
            interrupted(run_dir, client)
            if run_dir.info()["job_ids"]:
                client.cancel(*run_dir.info()["job_ids"])
        raise
    return watched


def start_again(watched: Watched) -> None:
    """Start a local run, or start it again when it has stopped, and return when its next attempt has begun.

    Raises:
        ClusterError: the launcher has ended at once.
    """
    run_dir, before = watched.run_dir, len(watched.run_dir.attempt_numbers())
    words = ["resume", str(run_dir.path)]
    watched.launcher = background.start(words, run_dir.path, lambda: len(run_dir.attempt_numbers()) > before)


def follow(
    runs: Sequence[Watched],
    act: Callable[[Watched], None],
    *,
    within_s: float,
    is_to_come: Callable[[Watched], bool] = lambda run: False,
) -> None:
    """Follow the runs until all have ended, or the time is over.

    Args:
        act: called for each run that has not ended, again and again; it interrupts the run when it is time.
        is_to_come: returns whether a run that has ended is one that `act` will still start again.
    """
    deadline, asked, said = time.monotonic() + within_s, -ASK_EVERY_S, ""
    while True:
        left = [run for run in runs if not run.over]
        for run in left:
            act(run)
        ask = time.monotonic() - asked >= ASK_EVERY_S
        if ask:
            asked = time.monotonic()
            now = states(run.run_dir for run in left)
            for run in left:
                run.state = now[run.run_dir.id]
                run.over = run.given_up or (not run.state.alive and not is_to_come(run))
        else:
            for run in left:
                run.over = run.given_up or (_is_over(run) and not is_to_come(run))
        said = _say(runs, said)
        if all(run.over for run in runs) or time.monotonic() >= deadline:
            break
        time.sleep(LOOK_EVERY_S)
    final = states(run.run_dir for run in runs)
    for run in runs:
        run.state = final[run.run_dir.id]


def _is_over(run: Watched) -> bool:
    try:
        return is_over(run.run_dir)
    except UnreadableRecordError:  # `states` says which, at its next turn
        return False


def _say(runs: Sequence[Watched], said: str) -> str:
    """Log how far all runs are, if that has changed."""
    words = []
    for run in runs:
        state = "ended" if run.over else run.state.status if run.state is not None else "submitted"
        words.append(f"{run.name} {state}")
    now = ", ".join(words)
    if now != said:
        log.info("%s", now)
    return now


def end_all(runs: Sequence[Watched], client: SlurmClient | None) -> bool:
    """End what is left of the runs and of their further jobs; return whether nothing of them is left anywhere."""
    for run in runs:
        if run.launcher is not None and run.launcher.returncode is None:
            with contextlib.suppress(OSError):
                run.launcher.send_signal(signal.SIGTERM)  # it tells the ranks, and starts no others
    if client is not None:
        for run in runs:
            if not run.over or run.given_up:
                with contextlib.suppress(SlurmtrainError):
                    stop.cancel(run.run_dir)
        # Also where a run's own files say that it has ended, one of its jobs may be in the queue.
        jobs = _in_queue(runs, client)
        if jobs:
            with contextlib.suppress(SlurmtrainError):
                client.cancel(*jobs)
    if all_leave(runs, client):
        return True
    for run in _live(runs):
        assert run.launcher is not None
        run.launcher.kill()
    return False


def all_leave(
    runs: Sequence[Watched],
    client: SlurmClient | None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait for LEAVE_S at most until nothing of the runs is left, and return whether that is so."""
    deadline = clock() + LEAVE_S
    while _live(runs):
        if clock() >= deadline:
            return False
        sleep(LOOK_EVERY_S)
    pause = FIRST_ASKED_S
    while client is not None and _in_queue(runs, client):
        if clock() >= deadline:
            return False
        sleep(min(pause, max(0.0, deadline - clock())))
        pause = min(2 * pause, ASK_EVERY_S)
    return True


def _live(runs: Sequence[Watched]) -> list[Watched]:
    return [run for run in runs if run.launcher is not None and run.launcher.poll() is None]


def _in_queue(runs: Sequence[Watched], client: SlurmClient) -> list[str]:
    for run in runs:
        with contextlib.suppress(SlurmtrainError):
            run.own_jobs = list(run.run_dir.info()["job_ids"])
    jobs = [job for run in runs for job in [*run.own_jobs, *run.jobs]]
    try:
        return [job for job, queued in client.queue(jobs).items() if queued.state not in GONE]
    except SlurmtrainError:
        return jobs


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the end of the terminal and TERM raise KeyboardInterrupt, as Ctrl-C does, so that jobs are taken back."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]  # nohup
    handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Leftovers:
    """What a drill has left behind.

    Attributes:
        folder: the folder of its runs; None if it was removed.
        jobs: whether some of its jobs have not ended yet.
    """

    folder: Path | None = None
    jobs: bool = False


NOTHING_LEFT = Leftovers()


@dataclass
class Drill:
    """A drill that goes on.

    Attributes:
        runs: those that it has started.
        keep: keep its folder; so it is with one that is broken off.
        leftovers: what it has left behind, when it has ended.
    """

    folder: Path
    runs: list[Watched] = field(default_factory=list)
    keep: bool = True
    leftovers: Leftovers = NOTHING_LEFT


@contextlib.contextmanager
def drilling(runs_dir: Path, client: SlurmClient | None) -> Iterator[Drill]:
    """Make the folder of a drill; at the end, in whatever way it comes, end all of its runs and remove the folder.

    The folder stays if it is to be kept, or a job may still write there.

    Raises:
        ConfigError, OSError: as for `make_drill_folder`.
    """
    drill = Drill(make_drill_folder(runs_dir))
    try:
        with interruptible():
            yield drill
    except BaseException:
        if drill.runs:
            log.info("the drill was interrupted; its jobs are cancelled, and its runs are kept: %s", drill.folder)
        raise
    finally:
        if not end_all(drill.runs, client):
            drill.leftovers = Leftovers(drill.folder, jobs=True)
        elif drill.keep and drill.runs:
            drill.leftovers = Leftovers(drill.folder)
        else:
            remove_drill_folder(drill.folder)
