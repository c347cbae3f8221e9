"""Stop a run: cancel it for good; preempt or requeue it, so that it starts again.

`resume` needs a part of this, too: the right to do it alone, the run's jobs in the queue, and its SLURM.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurmtrain.choices import Backend, RequeueMode
from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.launch.claims import claimed, is_claimed
from slurmtrain.report.status.state import WAITING, RunState, RunStatus, state
from slurmtrain.runs import lookup
from slurmtrain.runs.attempts import read_attempt
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.requests import RunAction, ask_to_cancel, ended_after, signal_ranks, write_request
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system import kubectl
from slurmtrain.system.process import ProcessMark

log = logging.getLogger(__name__)

POLL_S = 0.2  # seconds between looks at a file on a shared file system

# Why a run in this state cannot be stopped to start again, and what to do.
CANNOT_STOP = {
    **dict.fromkeys(WAITING, ("is not running but {0.status}", "requeue {1} starts it now")),
    RunStatus.STARTING: ("is still starting: {0.explanation}", "try again when `status {1}` shows steps"),
    RunStatus.SUSPENDED: ("is suspended, so it cannot save now: {0.explanation}", "`cancel {1}` ends it"),
    RunStatus.STOPPING: ("is already stopping: {0.explanation}", "status {1}"),
}


def cancel(run_dir: RunDir) -> str:
    """End a run for good, and the jobs that evaluate its checkpoints; return what was done, in words for a person.

    Raises:
        UsageError: it is a copy, whose original has the jobs.
        ClusterError: SLURM refuses or does not answer, or the run is still setting up.
    """
    _refuse_copy(run_dir)
    said = [_cancel_one(run_dir)]
    if run_dir.info()["backend"] == Backend.SLURM and is_claimed(claim_folder(run_dir)):
        with claimed_alone(run_dir):  # somebody was resuming it at the same moment
            said = [_cancel_one(run_dir)]
    if run_dir.evaluations.exists():
        from slurmtrain.launch.evaluations import cancel_all

        ended = cancel_all([run_dir], client(run_dir))
        said += [f"its evaluation {evaluation.path.name} is told to end" for evaluation in ended]
    return "\n".join(said)


def _refuse_copy(run_dir: RunDir) -> None:
    original = run_dir.info().get("copied_from")
    if original is not None:
        raise UsageError(
            f"run {run_dir.path} is a copy of {original}, and has no job of its own",
            hint=f"to end or restart the original, name {original}; `resume` continues the copy",
        )


def _cancel_one(run_dir: RunDir) -> str:
    now = state(run_dir)
    if run_dir.info()["backend"] == Backend.KUBERNETES:
        return _cancel_pods(run_dir, now)
    jobs = [job for job in jobs_in_queue(run_dir, now) if job not in (now.job_id, *now.following)]
    if now.queued_again:
        client(run_dir).cancel(*filter(None, [now.job_id]), *jobs)
        return f"run {run_dir.id} has ended: {now.status}; its job {now.job_id} is taken out of the queue"
    by_signal = now.alive and (has_no_job(run_dir, now) or not now.own_job)
    if now.alive and not by_signal and not now.packed:
        # The last of a chain first: each would start when those before it are gone.
        jobs = [*reversed(now.following), *filter(None, [now.job_id]), *jobs]
    if not now.alive and not jobs:
        return f"run {run_dir.id} is not running: {now.explanation}"
    if jobs:
        with _asking(run_dir, RunAction.CANCEL, ends_jobs=True):
            client(run_dir).cancel(*jobs)
    if by_signal:
        _signal_ranks(run_dir, now, RunAction.CANCEL, signal.SIGTERM)
    elif now.alive and now.packed:  # not the others of its job; a run that waits is left out when the job starts
        if now.status == RunStatus.STARTING:
            raise _cannot(run_dir, now)
        with _asking(run_dir, RunAction.CANCEL):
            if now.status in (RunStatus.RUNNING, RunStatus.UNKNOWN):
                client(run_dir).signal(_step_id(now), "TERM")
    with contextlib.suppress(OSError):  # it has been told
        run_dir.event(Event.CANCEL_ASKED)
    return f"run {run_dir.id} is told to end; it saves if time allows and does not come back"


def _cancel_pods(run_dir: RunDir, now: RunState) -> str:
    with _asking(run_dir, RunAction.CANCEL, ends_jobs=True):
        kubectl.delete(run_dir.manifest)
    if not now.alive:
        return f"run {run_dir.id} is not running: {now.explanation}; its objects on Kubernetes are deleted"
    with contextlib.suppress(OSError):  # it has been told
        run_dir.event(Event.CANCEL_ASKED)
    return f"run {run_dir.id} is told to end; it saves if its grace time allows and does not come back"


def start_again(run_dir: RunDir, action: RunAction, about_to: Callable[[], None] = lambda: None) -> str:
    """Let a run save and start again, by the signal of a preemption or the early warning; return what was done.

    Raises as `cancel`.

    Args:
        about_to: called when the run can be stopped, before it is.
    """
    _refuse_copy(run_dir)
    now = state(run_dir)
    if not now.alive:
        hint = None if now.status == RunStatus.FINISHED else f"resume {run_dir.id}"
        raise ClusterError(f"run {run_dir.id} is not running: {now.explanation}", hint=hint)
    pods = run_dir.info()["backend"] == Backend.KUBERNETES
    if now.status in WAITING and pods:
        raise ClusterError(f"run {run_dir.id} is not running: {now.explanation}", hint="kubectl get workloads")
    if now.status in WAITING and action == RunAction.REQUEUE and now.job_id is not None:
        if now.status == RunStatus.HELD:
            client(run_dir).release(now.job_id)
        client(run_dir).update_pending(now.job_id, StartTime="now")  # SLURM holds a requeued one for 121 s otherwise
        return f"run {run_dir.id} is asked to start now"
    if now.status in CANNOT_STOP:
        raise _cannot(run_dir, now)
    ended_by = ended_after(run_dir, now.attempts[-1] if now.attempts else None)
    # The ranks still save. This request would replace the one to end, and bring the run back.
    if ended_by is not None:
        raise ClusterError(
            f"run {run_dir.id} has been told to end for good ({ended_by}), and is leaving",
            hint=f"`resume {run_dir.id}` continues it when it has ended",
        )
    about_to()
    next_step, asked = _next_step(run_dir, now), time.time()
    number, name = (signal.SIGTERM, "TERM") if action == RunAction.PREEMPT else (signal.SIGUSR2, "USR2")
    if pods:
        from slurmtrain.launch.targets import stop_pods

        with _asking(run_dir, action):
            stop_pods(run_dir, load_frozen(run_dir.config_file, with_secrets=False))
    elif has_no_job(run_dir, now) or not now.own_job:
        _signal_ranks(run_dir, now, action, number)
    else:
        with _asking(run_dir, action):
            client(run_dir).signal(_step_id(now) if now.packed else str(now.job_id), name)
    with contextlib.suppress(OSError):  # it has been told
        run_dir.event(Event.PREEMPT_ASKED if action == RunAction.PREEMPT else Event.REQUEUE_ASKED)
    said = f"run {run_dir.id} is told to save and leave; {next_step} (logs {run_dir.id} -f)"
    if next_step is None:
        said = f"run {run_dir.id} is told to save and end; `resume {run_dir.id}` continues it"
    if action == RunAction.REQUEUE or pods or has_no_job(run_dir, now) or not now.own_job:
        return said
    return "\n".join(filter(None, [said, _how_long_leaving_took(run_dir, now, asked)]))


def _how_long_leaving_took(run_dir: RunDir, now: RunState, asked: float) -> str | None:
    """Wait until all ranks have exited, and say how long that took; None if SLURM does not say how long it may take."""
    from slurmtrain.slurm.facts import preemption_of
    from slurmtrain.slurm.read_facts import read_facts

    cluster = load_frozen(run_dir.config_file, with_secrets=False).cluster
    facts = read_facts(client(run_dir).glance, whole=False)
    its = preemption_of(facts, cluster.partition, account=cluster.account, qos=cluster.qos)
    if (within_s := its.to_leave_s) is None:
        return None
    log.info("waiting until it has stopped, for %.0f s at most", within_s)
    deadline = time.monotonic() + within_s
    while (attempt := read_attempt(run_dir, now.attempts[-1].number)).ended is None and time.monotonic() <= deadline:
        time.sleep(POLL_S)
    gives = f"{its.of or 'SLURM'} gives {within_s:.0f} s"
    if attempt.ended is None:
        return f"it has not stopped in time: {gives}, after which a preemption would have killed it"
    saved = f" after step {attempt.last_step}" if attempt.last_step is not None else ""
    return f"it stopped{saved}, {max(0.0, attempt.ended - asked):.1f} s after it was told to stop; {gives}"


def _cannot(run_dir: RunDir, now: RunState, status: RunStatus | None = None) -> ClusterError:
    why, hint = CANNOT_STOP[status or now.status]
    return ClusterError(f"run {run_dir.id} {why.format(now)}", hint=hint.format(now, run_dir.id))


def _next_step(run_dir: RunDir, now: RunState) -> str | None:
    """Describe how the run continues after a stop; None when it does not."""
    config = load_frozen(run_dir.config_file, with_secrets=False)
    mode = config.requeue.mode
    # Whoever starts ranks by hand sees what they print there; the launchers write a log of every rank.
    by_hand = not now.own_job and now.attempts and not run_dir.attempt(now.attempts[-1].number).rank_log(0).exists()
    if mode == RequeueMode.OFF or by_hand:
        return None
    if config.cluster.backend != Backend.SLURM:
        return "it starts again and resumes by itself"
    if mode == RequeueMode.CHAIN:
        return f"the next job of its chain, {now.following[0]}, resumes it" if now.following else None
    if mode == RequeueMode.RESUBMIT:
        return "it is submitted again and resumes by itself"
    others = " when the others of its pack have left, too" if now.packed else ""
    return f"it is requeued and resumes by itself{others}"


def _step_id(now: RunState) -> str:
    """Return the step id of a running run.

    Raises:
        ClusterError: it cannot be known whether the run is running.
    """
    if now.slurm_error is not None:
        raise ClusterError(f"SLURM cannot be asked: {now.slurm_error}", hint="try again later")
    step_id = now.attempts[-1].step_id
    assert step_id is not None  # rank 0 writes it down before the run is called running
    return step_id


@contextlib.contextmanager
def _asking(run_dir: RunDir, action: RunAction, *, ends_jobs: bool = False) -> Iterator[None]:
    """Leave the request for the supervisor to find, and remove it again if it could not be passed on.

    Args:
        ends_jobs: the jobs are cancelled in the block, which ends the run without the request, too.
    """
    if ends_jobs:
        ask_to_cancel(run_dir)
    else:
        write_request(run_dir, action)
    try:
        yield
    except BaseException:
        run_dir.request_file.unlink(missing_ok=True)
        raise


def _signal_ranks(run_dir: RunDir, now: RunState, action: RunAction, number: int) -> None:
    """Signal the ranks of a run that has no job of its own.

    Raises:
        ClusterError: the run has no rank 0 yet, or none on this host.
    """
    last = now.attempts[-1] if now.attempts else None
    if last is None or last.rank_0 is None or last.ended is not None:
        raise _cannot(run_dir, now, RunStatus.STARTING)
    if not last.rank_0.lives():
        where = f"in another container on {last.host}" if last.rank_0_lives else f"on {last.host}"
        what, hint = "runs", f"type `{action} {run_dir.id}` there"
        if now.job_id is not None and not now.own_job:  # which may do more than this run, whose step is not known
            what = f"was started by hand inside job {now.job_id},"
            hint = (
                f"Ctrl-C there, or `squeue --steps --jobs={now.job_id}` and `scancel --signal=TERM {now.job_id}.STEP`"
            )
        raise ClusterError(f"run {run_dir.id} {what} {where}", hint=hint)
    with _asking(run_dir, action):
        try:
            signal_ranks(run_dir, last, number)
        except OSError as error:  # it has just left, or is somebody else's
            raise ClusterError(f"cannot signal rank 0, process {last.pid}: {error.strerror}") from None


@contextlib.contextmanager
def claimed_alone(run_dir: RunDir) -> Iterator[None]:
    """Claim the right to resume this run.

    A process that finds it ended must record its next job before another process looks.
    """

    def busy(owner: ProcessMark) -> None:
        who = f"process {owner.pid} on {owner.host}"
        if run_dir.info()["backend"] == Backend.LOCAL:  # it is at it until the run has ended
            raise ClusterError(f"{who} is already running {run_dir.id}", hint=f"status {run_dir.id}")
        log.info("%s is resuming it; waiting for that", who)

    with claimed(claim_folder(run_dir), busy):
        yield


def claim_folder(run_dir: RunDir) -> Path:
    """Return the folder of the claim to resume the run: that of all runs of a sweep, which `sweep retry` resumes together."""
    in_sweep = lookup.is_sweep(run_dir.path.parent) and run_dir.info()["backend"] == Backend.SLURM
    return run_dir.path.parent / "arrays" if in_sweep else run_dir.path


def jobs_in_queue(run_dir: RunDir, now: RunState) -> list[str]:
    """Return all jobs of the run that SLURM still has; none if it has no jobs, or SLURM cannot be asked."""
    if run_dir.info()["backend"] != Backend.SLURM or now.slurm_error is not None:
        return []
    from slurmtrain.launch.job import in_queue

    return in_queue([run_dir], client(run_dir))[run_dir.id]


def has_no_job(run_dir: RunDir, now: RunState) -> bool:
    """Return whether the run is not a job of SLURM."""
    return run_dir.info()["backend"] != Backend.SLURM or now.job_id is None


def client(run_dir: RunDir) -> SlurmClient:
    """Return the client of the SLURM that the run was submitted to."""
    return SlurmClient(run_dir.slurm_conf())
