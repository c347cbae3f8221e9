"""Stop a run: cancel it for good; preempt or requeue it, so that it starts again."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator, Sequence

from slurmtrain.choices import Backend, RequeueMode
from slurmtrain.control.access import claim_folder, claimed_alone, client, has_no_job, jobs_in_queue
from slurmtrain.errors import ClusterError
from slurmtrain.report.status.look import state
from slurmtrain.report.status.state import WAITING, RunState, RunStatus
from slurmtrain.runs import lookup
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import RunAction, Verdict
from slurmtrain.runs.requests import ask_to_cancel, ended_after, signal_rank_0, write_request
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.file_claims import is_claimed
from slurmtrain.system.paths import current_folder

log = logging.getLogger(__name__)

PAUSE_WAITS_S = 120.0  # for ranks that start again in the same job
LOOK_EVERY_S = 3.0


def cancel(run_dir: RunDir) -> str:
    """End a run for good, and the jobs that evaluate its checkpoints; return what was done, in words for a person.

    Raises:
        ClusterError: SLURM refuses or does not answer, or the run is still setting up.
    """
    said = [_cancel_one(run_dir)]
    if run_dir.info()["backend"] == Backend.SLURM and is_claimed(claim_folder(run_dir)):
        with claimed_alone(run_dir):  # somebody was resuming it at the same moment
            said = [_cancel_one(run_dir)]
    if run_dir.evaluations.exists():
        from slurmtrain.launch.evaluations import cancel_all

        ended = cancel_all([run_dir], client(run_dir))
        said += [f"its evaluation {evaluation.path.name} is told to end" for evaluation in ended]
    return "\n".join(said)


def _cancel_one(run_dir: RunDir) -> str:
    now = state(run_dir)
    others = [job for job in jobs_in_queue(run_dir, now) if job not in (now.job_id, *now.following)]
    if now.queued_again:
        client(run_dir).cancel(_job_id(now), *others)
        return f"run {run_dir.id} has ended: {now.status}; its job {now.job_id} is taken out of the queue"
    if others and not (now.alive and now.own_job and not now.packed):
        with _cancelling(run_dir):
            client(run_dir).cancel(*others)
    if not now.alive and not others:
        return f"run {run_dir.id} is not running: {now.explanation}"
    if not now.alive:
        pass
    elif has_no_job(run_dir, now) or not now.own_job:
        _signal_rank_0(run_dir, now, RunAction.CANCEL, signal.SIGTERM)
    elif now.packed:
        _cancel_in_pack(run_dir, now)
    else:
        job_id = _job_id(now)
        with _cancelling(run_dir):
            # The last of a chain first: each would start when those before it are gone.
            client(run_dir).cancel(*reversed(now.following), job_id, *others)
    with contextlib.suppress(OSError):  # it has been told
        run_dir.event(Event.CANCEL_ASKED)
    return f"run {run_dir.id} is told to end; it saves if time allows and does not come back"


def _cancel_in_pack(run_dir: RunDir, now: RunState) -> None:
    """End this run, but not the others of its job. A run that waits is left out when the job starts (again)."""
    _refuse_while_setting_up(run_dir, now)
    with _asking(run_dir, RunAction.CANCEL):
        if now.status in (RunStatus.RUNNING, RunStatus.UNKNOWN):
            client(run_dir).signal(_step_id(now), "TERM")


def preempt(run_dir: RunDir) -> str:
    """Let a run save and start again as a preemption does; return what was done. Raises as `cancel`."""
    return _stop_and_start_again(run_dir, RunAction.PREEMPT, "TERM")


def requeue(run_dir: RunDir, overrides: Sequence[str] = ()) -> str:
    """Let a run save and start again, with these fields of its config changed; return what was done.

    Raises:
        ClusterError: as `cancel`, or there is no next attempt that could have another config.
    """
    if not overrides:
        return _stop_and_start_again(run_dir, RunAction.REQUEUE, "USR2")
    _check_changeable(run_dir, state(run_dir), overrides)
    local = run_dir.info()["backend"] == Backend.LOCAL
    from slurmtrain.launch.next_change import record_next_change

    with record_next_change(run_dir, overrides, current_folder(), None if local else client(run_dir)) as lines:
        said = _stop_and_start_again(run_dir, RunAction.REQUEUE, "USR2", changed=True)
    return "\n".join([said, *lines])


def _check_changeable(run_dir: RunDir, now: RunState, overrides: Sequence[str]) -> None:
    """Look whether the next attempt of a run can have another config than this one.

    Raises:
        ClusterError: it cannot, or there is no next attempt.
    """
    from slurmtrain.config.frozen import load_frozen

    resume = " ".join(["resume", run_dir.id, *overrides])
    if not now.alive:
        raise ClusterError(f"run {run_dir.id} is not running: {now.explanation}", hint=resume)
    mode = load_frozen(run_dir.config_file, with_secrets=False).requeue.mode
    why = None
    if now.packed or lookup.is_sweep(run_dir.path.parent):
        why = "its job is that of its sweep, too"
    elif mode == RequeueMode.CHAIN:
        why = "the next jobs of its chain are in the queue with the config of before"
    elif mode == RequeueMode.OFF:
        why = "it does not start again by itself (requeue.mode=off)"
    elif _by_hand(run_dir, now):
        why = "it was started by hand"
    elif now.status in WAITING:
        why = "its job waits in the queue"
    if why is not None:
        raise ClusterError(
            f"run {run_dir.id} cannot be changed while it is alive: {why}", hint=f"cancel it, then {resume}"
        )


def _stop_and_start_again(run_dir: RunDir, action: RunAction, name: str, *, changed: bool = False) -> str:
    """Stop a running job for `preempt` or `requeue`, with the signal of a preemption or the early warning.

    Args:
        changed: its next attempt has another config.
    """
    now = _after_a_pause(run_dir, state(run_dir))
    if changed and not run_dir.next_change_file.exists():  # it was made in that pause
        return f"run {run_dir.id} has just started again"
    if not now.alive:
        raise ClusterError(f"run {run_dir.id} is not running: {now.explanation}", hint=f"resume {run_dir.id}")
    if now.status in WAITING:
        if action == RunAction.PREEMPT:
            raise ClusterError(
                f"run {run_dir.id} is not running but {now.status}", hint=f"requeue {run_dir.id} starts it now"
            )
        if now.status == RunStatus.HELD:
            client(run_dir).release(_job_id(now))
        client(run_dir).start_now(_job_id(now))
        return f"run {run_dir.id} is asked to start now"
    _refuse_while_setting_up(run_dir, now)
    if now.status == RunStatus.SUSPENDED:
        raise ClusterError(
            f"run {run_dir.id} is suspended, so it cannot save now: {now.explanation}",
            hint=f"`cancel {run_dir.id}` ends it",
        )
    if now.status == RunStatus.STOPPING:
        raise ClusterError(f"run {run_dir.id} is already stopping: {now.explanation}", hint=f"status {run_dir.id}")
    ended_by = ended_after(run_dir, now.attempts[-1] if now.attempts else None)
    # The ranks still save. This request would replace the one to end, and bring the run back.
    if ended_by is not None:
        raise ClusterError(
            f"run {run_dir.id} has been told to end for good ({ended_by}), and is leaving",
            hint=f"`resume {run_dir.id}` continues it when it has ended",
        )
    next_step, asked = _next_step(run_dir, now, changed=changed), time.time()
    if has_no_job(run_dir, now) or not now.own_job:
        _signal_rank_0(run_dir, now, action, signal.SIGTERM if name == "TERM" else signal.SIGUSR2)
    else:
        with _asking(run_dir, action):
            client(run_dir).signal(_step_id(now) if now.packed else _job_id(now), name)
    with contextlib.suppress(OSError):  # it has been told
        run_dir.event(Event.PREEMPT_ASKED if action == RunAction.PREEMPT else Event.REQUEUE_ASKED)
    goes_on = f"leave; {next_step} (logs {run_dir.id} -f)"
    said = (
        f"run {run_dir.id} is told to save and {goes_on if next_step else f'end; `resume {run_dir.id}` continues it'}"
    )
    if action != RunAction.PREEMPT or has_no_job(run_dir, now) or not now.own_job:
        return said
    return "\n".join([said, *_how_long_leaving_took(run_dir, now, asked)])


def _how_long_leaving_took(run_dir: RunDir, now: RunState, asked: float) -> list[str]:
    """Wait until the job has stopped, and return a sentence.

    Return nothing if SLURM does not say how long a preempted job may take.
    """
    from slurmtrain.config.frozen import load_frozen
    from slurmtrain.report.leaving_time import leaving_sentence, time_to_leave, wait_until_left
    from slurmtrain.slurm.preemption import preemption_times
    from slurmtrain.slurm.read_facts import read_preemption

    cluster = load_frozen(run_dir.config_file, with_secrets=False).cluster
    facts = read_preemption(client(run_dir).glance)
    times = preemption_times(facts, cluster.partition, account=cluster.account, qos=cluster.qos)
    within_s = time_to_leave(times)
    if times is None or within_s is None:
        return []
    log.info("waiting until it has stopped, for %.0f s at most", within_s)
    left = wait_until_left(run_dir, now.attempts[-1].number, within_s)
    return [leaving_sentence(left, asked, within_s, times)]


def _after_a_pause(run_dir: RunDir, now: RunState) -> RunState:
    """Wait while no ranks are at work because they start again in the same job, and return the state of the run then.

    The pause takes seconds, and there is nobody in it whom a signal would reach.
    """
    deadline, said = time.monotonic() + PAUSE_WAITS_S, False
    while _starts_again_in_its_job(run_dir, now) and time.monotonic() < deadline:
        if not said:
            log.info(
                "waiting until the next attempt of run %s has begun, for %.0f s at most", run_dir.id, PAUSE_WAITS_S
            )
        said = True
        time.sleep(LOOK_EVERY_S)
        now = state(run_dir)
    return now


def _starts_again_in_its_job(run_dir: RunDir, now: RunState) -> bool:
    if now.status != RunStatus.STARTING:
        return False
    last = next((attempt for attempt in reversed(now.attempts) if attempt.verdict is not None), None)
    if last is None:
        return False
    if run_dir.info()["backend"] == Backend.LOCAL:
        return last.verdict not in (Verdict.DONE, Verdict.END)
    return last.verdict == Verdict.IN_PLACE and last.job_id == now.job_id


def _refuse_while_setting_up(run_dir: RunDir, now: RunState) -> None:
    """Raise ClusterError if a signal would reach nobody, or a shell that ignores it."""
    if now.status == RunStatus.STARTING:
        raise ClusterError(
            f"run {run_dir.id} is still starting: {now.explanation}",
            hint=f"try again when `status {run_dir.id}` shows steps",
        )


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
def _asking(run_dir: RunDir, action: RunAction) -> Iterator[None]:
    """Leave the request for the supervisor to find, and remove it again if it could not be passed on."""
    write_request(run_dir, action)
    with _taken_back(run_dir):
        yield


@contextlib.contextmanager
def _cancelling(run_dir: RunDir) -> Iterator[None]:
    """Do as `_asking` for a run whose jobs are cancelled in the block, which ends it without the request, too."""
    ask_to_cancel(run_dir)
    with _taken_back(run_dir):
        yield


@contextlib.contextmanager
def _taken_back(run_dir: RunDir) -> Iterator[None]:
    try:
        yield
    except BaseException:
        run_dir.request_file.unlink(missing_ok=True)
        raise


def _job_id(now: RunState) -> str:
    assert now.job_id is not None
    return now.job_id


def _by_hand(run_dir: RunDir, now: RunState) -> bool:
    """Return whether somebody started the ranks: they print where that was, and the launchers write a log of every rank."""
    return bool(not now.own_job and now.attempts) and not run_dir.attempt(now.attempts[-1].number).rank_log(0).exists()


def _next_step(run_dir: RunDir, now: RunState, *, changed: bool) -> str | None:
    """Describe how the run continues after a stop; None when it does not.

    Args:
        changed: its next attempt has another config.
    """
    from slurmtrain.config.frozen import load_frozen

    if _by_hand(run_dir, now):
        return None
    config = load_frozen(run_dir.config_file, with_secrets=False)
    mode = config.requeue.mode
    if config.cluster.backend == Backend.LOCAL and mode != RequeueMode.OFF:
        return "it starts again and resumes by itself"
    if mode == RequeueMode.CHAIN and not now.following:
        return None
    if changed and mode in (RequeueMode.REQUEUE, RequeueMode.RESUBMIT):
        return "a new job with the changed config resumes it by itself"
    if mode == RequeueMode.REQUEUE and now.packed:
        return "it is requeued and resumes by itself when the others of its pack have left, too"
    return {
        RequeueMode.REQUEUE: "it is requeued and resumes by itself",
        RequeueMode.RESUBMIT: "it is submitted again and resumes by itself",
        RequeueMode.CHAIN: f"the next job of its chain, {', '.join(now.following[:1])}, resumes it",
    }.get(mode)


def _signal_rank_0(run_dir: RunDir, now: RunState, action: RunAction, number: int) -> None:
    """Signal rank 0 of a run that has no job of its own; rank 0 tells the others.

    Raises:
        ClusterError: the run has no rank 0 yet, or none on this host.
    """
    last = now.attempts[-1] if now.attempts else None
    if last is None or last.rank_0 is None or last.ended is not None:
        raise ClusterError(
            f"run {run_dir.id} is still starting: {now.explanation}",
            hint=f"try again when `status {run_dir.id}` shows steps",
        )
    if not last.rank_0.lives():
        where = f"in another container on {last.host}" if last.rank_0_lives else f"on {last.host}"
        if now.job_id is None or now.own_job:
            raise ClusterError(f"run {run_dir.id} runs {where}", hint=f"type `{action} {run_dir.id}` there")
        # A job that does more than this run must not be ended, and it is not known which of its steps is ours.
        raise ClusterError(
            f"run {run_dir.id} was started by hand inside job {now.job_id}, which may also do other things, {where}",
            hint=f"Ctrl-C (twice for srun) where it was started, or `squeue --steps --jobs={now.job_id}` and "
            f"`scancel --signal=TERM {now.job_id}.STEP`",
        )
    with _asking(run_dir, action):
        try:
            signal_rank_0(run_dir, last, number)
        except OSError as error:  # it has just left, or is somebody else's
            raise ClusterError(f"cannot signal rank 0, process {last.pid}: {error.strerror}") from None
