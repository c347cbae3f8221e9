"""The life of a run in one job, or in one command on this machine: attempt after attempt.

Of several runs that share a job (sweep.pack), each is supervised in a process of its own. A rank that has no others is watched
from here: no other notices when it is stopped, or when a call holds its interpreter. Loads no torch.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from slurmtrain.choices import RequeueMode
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, SlurmtrainError
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.decide import AttemptOutcome
from slurmtrain.runs.ownership import require_own
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.platforms import Platform
from slurmtrain.system.process import kill_trees

log = logging.getLogger(__name__)


def supervise(run_dir: RunDir, platform: Platform, set_up_failure: str | None = None) -> int:
    """Run attempts until the ranks are not to start again here, and return the exit code of the job.

    Args:
        set_up_failure: why no rank can be started here, in words; None: the set-up has worked.
    """
    code = platform.begin()
    if code is not None:
        return code
    hooks: list[subprocess.Popen[bytes]] = []
    outcome = None
    while code is None:
        number = platform.claim()
        if set_up_failure is None:
            with watched(run_dir.attempt(number)):
                left_with = platform.run(number, outcome.nodes if outcome is not None else ())
        else:
            log.error(set_up_failure)
            with contextlib.suppress(OSError):  # a full disk
                run_dir.attempt(number).setup_failure_file.write_text(f"{set_up_failure}\n")
            left_with = EXIT_CONFIG
        # Imported only now, so that the ranks start without waiting for what the end of an attempt needs.
        from slurmtrain.supervise.end_of_attempt import finish_attempt
        from slurmtrain.supervise.hooks import start_hook

        try:
            outcome = finish_attempt(
                run_dir, number, left_with, platform.config, platform.client, can_start_again=platform.can_start_again
            )
        except Exception:  # an error of ours, which must not lose a run that was only stopped
            log.exception("attempt %d of run %s cannot be judged", number, run_dir.id)
            mode = platform.config.requeue.mode
            stopped = left_with == EXIT_REQUEUE and mode in (RequeueMode.REQUEUE, RequeueMode.RESUBMIT)
            outcome = AttemptOutcome(Reason.ASKED, Verdict(mode) if stopped else Verdict.END, f"exit code {left_with}")
        if platform.client is not None:  # on this machine it is printed
            log.info("run %s, attempt %d: %s", run_dir.id, number, outcome.sentence)
        code = platform.carry_out(number, outcome, left_with)
        hooks += start_hook(run_dir, number, platform.config)
    for hook in hooks:  # last: after a requeue, SLURM soon kills this job
        hook.wait()
    return code


def supervise_together(run_dirs: Sequence[RunDir], submitted: Mapping[str, str] | None, failure: str | None) -> int:
    """Supervise runs of one job and requeue it for those that are to continue, when the last one has left.

    Args:
        submitted: as for `SlurmJob`.
        failure: as for `supervise`.

    Returns:
        The exit code of the job: EXIT_REQUEUE, or the highest of the runs.
    """
    import multiprocessing

    from slurmtrain.supervise.platforms.slurm import SlurmJob

    sharing, fork = len(run_dirs), multiprocessing.get_context("fork")
    processes = [fork.Process(target=_alone, args=(run_dir, submitted, sharing, failure)) for run_dir in run_dirs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode or 0 for process in processes]
    going_on = [run_dir for run_dir, code in zip(run_dirs, codes, strict=True) if code == EXIT_REQUEUE]
    job = SlurmJob(going_on[0], submitted, sharing=sharing) if going_on else None
    if job is not None and job.config.requeue.mode == RequeueMode.REQUEUE:
        job.let_go_on([(run_dir, run_dir.attempt_numbers()[-1]) for run_dir in going_on])
        return EXIT_REQUEUE
    return max(code if code >= 0 else 128 - code for code in codes)


def _alone(run_dir: RunDir, submitted: Mapping[str, str] | None, sharing: int, failure: str | None) -> None:
    from slurmtrain.supervise.platforms.slurm import SlurmJob

    try:  # what is wrong with one of the runs does not touch the others
        require_own(run_dir)
        sys.exit(supervise(run_dir, SlurmJob(run_dir, submitted, sharing=sharing), failure))
    except SlurmtrainError as error:
        print(f"slurmtrain: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


# The watch over a rank that is alone. It writes its heartbeats to a file of the attempt. When none has come for the rank's own
# time-out, hang.md is written, and the rank is killed. It has to be on this node, where its process can be seen.

LOOK_EVERY_S = 2.0


@contextlib.contextmanager
def watched(attempt_dir: AttemptDir) -> Iterator[None]:
    """Watch over the rank of an attempt, if it is alone, during the block; then remove what ranks have left for a watch."""
    closed = threading.Event()
    thread = threading.Thread(target=_watch, args=(attempt_dir, closed), name="watch-alone", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()
        # A hiccup of a shared file system does not keep the attempt from being judged.
        with contextlib.suppress(OSError):
            for path in (attempt_dir.heartbeat_file, *attempt_dir.stacks_files()):  # of ranks that were killed
                path.unlink(missing_ok=True)


def _watch(attempt_dir: AttemptDir, closed: threading.Event) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread, which they wake
    while not closed.wait(LOOK_EVERY_S):
        with contextlib.suppress(OSError):  # also a hiccup of a shared file system
            if attempt_dir.heartbeat_file.exists():
                _watch_rank(attempt_dir, closed)


def _watch_rank(attempt_dir: AttemptDir, closed: threading.Event) -> None:
    """Watch until the rank's file is gone, or it hangs.

    Raises:
        OSError: the file is gone, or cannot be read.
    """
    from slurmtrain.hangs import evidence, judge, page
    from slurmtrain.hangs.beats import ActiveClock, parse_beat

    file, clock = attempt_dir.heartbeat_file, ActiveClock(time.monotonic())
    beat, changed, since = None, 0, 0.0
    while not closed.wait(LOOK_EVERY_S):
        now = clock.look(time.monotonic())
        if (newest := file.stat().st_mtime_ns) != changed:  # which changes also when the disk is full
            beat, changed, since = parse_beat(file.read_bytes()) or beat, newest, now
        if beat is None or not judge.hangs_alone(beat, now - since):
            continue
        state = evidence.state_of(beat.process)
        if state == evidence.GONE:
            since = now
            continue
        dump = evidence.dump_of_timer(attempt_dir.stacks_file(beat.rank))
        try:
            sentence = page.record(attempt_dir, [judge.silent_culprit(beat.rank, beat.node, beat, state, dump)], {}, 1)
            log.error("hung: %s; see %s", sentence, attempt_dir.hang_page)
        except OSError as error:  # a full disk does not keep a GPU
            log.error("hung: rank %d, of which nothing can be written: %s", beat.rank, error.strerror or error)
        kill_trees([beat.process])
        return
