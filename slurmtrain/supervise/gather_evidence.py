"""The evidence on an attempt that has ended: what its ranks, srun, SLURM and the run's own files say of it.

What is decided from it is in runs/decide.py.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from slurmtrain.checkpoint.format.directory import newest_committed_step
from slurmtrain.choices import Backend, JobKind, RequeueMode
from slurmtrain.config.parallel_dims import usable_sizes
from slurmtrain.config.schema import Config
from slurmtrain.data.prepare.units_done import count_done
from slurmtrain.launch.node_exclusion import blame_policy
from slurmtrain.runs import attempts, node_blame, requests
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.evidence import Evidence, Policy
from slurmtrain.runs.failures import (
    Failure,
    Failures,
    RankFailure,
    SrunLog,
    found_hang,
    in_its_words,
    node_of_killed_tasks,
    was_preempted,
    with_last_words,
)
from slurmtrain.runs.program_checkpoints import find_checkpoints, newest_complete
from slurmtrain.runs.reasons import Reason, RunAction, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import own_node_name, own_restart_count
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.system.signals import StopCause

REPORTING = ("command", "prepare")  # kinds of jobs whose progress is what they report


def progress_shown(run_dir: RunDir, config: Config) -> tuple[int | None, float | None, int | None]:
    """Return what a program has shown of its progress so far.

    Returns:
        The furthest step that it has reported. Where its checkpoints can be seen, these alone count: steps that are reported
        after the newest one will be done again.
        When the newest checkpoint was changed, in unix seconds, if it has no number.
        The step of its newest complete checkpoint.
    """
    job = config.job
    if job.kind not in REPORTING:
        return None, None, None
    if job.checkpoints is None:
        return attempts.furthest_reported(run_dir), None, None
    newest = newest_complete(find_checkpoints(run_dir.program_folders, job.checkpoints, job.checkpoint_complete))
    if newest is None:
        return None, None, None
    return None, newest.changed if newest.step is None else None, newest.step


def find_last_steps(run_dir: RunDir, attempt: Attempt, config: Config) -> None:
    """Add to the record of an attempt that has ended how far it came, by the files of its run."""
    attempt.committed_step = newest_committed_step(run_dir.checkpoints)
    attempt.reported_step, attempt.marked, attempt.seen_step = progress_shown(run_dir, config)
    if not attempt.started:  # rank 0 never opened it, so nothing that is there can be its work
        attempt.committed_before, attempt.reported_before = attempt.committed_step, attempt.reported_step
        attempt.marked_before, attempt.seen_before = attempt.marked, attempt.seen_step
    with contextlib.suppress(OSError):
        written = run_dir.metrics_file.stat().st_mtime
        attempt.last_logged = written if attempt.started and written >= attempt.started else None
    if config.job.kind == JobKind.PREPARE and attempt.stepping is not None:  # or the output may be of other settings
        prepare = config.prepare  # rank 0 has said how many units it saw before the others had left
        counted = count_done(Path(prepare.output), prepare.part, prepare.parts) if prepare.output else None
        attempt.last_step = max((each for each in (attempt.last_step, counted) if each is not None), default=None)
    # Of a later attempt's steps and checkpoints, none are this one's.
    later = any(run_dir.attempt(n).record_file.exists() for n in run_dir.attempt_numbers() if n > attempt.number)
    if attempt.last_step is None or (not later and config.job.kind not in (JobKind.PREPARE, JobKind.EVALUATE)):
        steps = (attempt.last_step, attempts.last_logged_step(run_dir), attempt.committed_step, attempt.seen_step)
        attempt.last_step = max(step or 0 for step in steps) or attempt.first_step


def evidence_of(
    run_dir: RunDir,
    attempt: Attempt,
    config: Config,
    *,
    exit_code: int,
    facts: JobFacts | None,
    ended: float,
    by_slurm: bool,
) -> Evidence:
    """Return the evidence on an attempt, but for what SLURM says of the nodes of its job; its record then has its last steps.

    Args:
        exit_code: of srun, or the highest of the local ranks.
        facts: what SLURM says of its job; None: it has none, or SLURM cannot be asked.
        ended: when it ended, in unix seconds.
        by_slurm: SLURM started its ranks, and may start the next ones on other nodes.
    """
    find_last_steps(run_dir, attempt, config)
    attempt_dir = run_dir.attempt(attempt.number)
    tries, srun_log = attempts.all_attempts(run_dir), SrunLog.read(attempt_dir)
    request = requests.take_request(run_dir, attempt)
    # The disk was full when rank 0 had to write the request.
    if request is None and attempt.cause == StopCause.STOP_FILE:
        request = RunAction.STOP
    killed = srun_log.killed_tasks
    failures = Failures.read(attempt_dir)
    first = failures.first()
    if first is None and killed is None:  # nobody saw the cause, only its effect on the other ranks
        first = failures.first(because_of_peer=True)
    set_up = attempts.failed_set_up(attempt_dir)
    counted = attempts.stalled_numbers(tries, attempt.number)
    unfit = failures.unfit_nodes(attempt.nodes)
    node_records = node_blame.records_of(run_dir.id, tries) if by_slurm else []
    if by_slurm:
        node_records += node_blame.ledger_of(node_blame.cluster_of_this_job(), blame_policy(config))
    hang = found_hang(attempt_dir)
    attempt.idle_since = min((each.time for each in failures.ranks), default=None)
    if hang is not None:
        attempt.idle_since = hang.since or attempt.last_logged or hang.time
    sentence, attempt.failed_with = in_its_words(first, attempt_dir, program=config.job.kind == JobKind.COMMAND)
    if unfit or (first is not None and first.bad_nodes):
        # Rank 0 speaks for them. Whoever speaks for most nodes is not at fault, nor is a single one of them.
        failed_on = unfit[0] if unfit else None
    elif hang is not None:  # ranks of torchrun do not know SLURM's names of nodes
        failed_on = hang.node if hang.node in attempt.nodes or not attempt.nodes else None
    else:
        failed_on = _node_at_fault(attempt, srun_log, first, exit_code, set_up=set_up is not None)
    return Evidence(
        exit_code=exit_code,
        said=attempt.said,
        cause=attempt.cause,
        seconds_left=attempt.seconds_left,
        failure=(first.exit_code, sentence) if first is not None else None,
        set_up=set_up,
        on_any_node=first is not None and first.on_any_node,
        diverged=first is not None and first.diverged,
        failed_on=failed_on,
        failed_nodes=failures.nodes,
        unfit_nodes=unfit,
        only_victims=first is not None and first.because_of_peer,
        lost_node=srun_log.lost_node,
        failed_before=attempts.failed_before(tries, attempt),
        seconds_to_limit=facts.seconds_left if facts is not None else None,
        superseded=_superseded_by(tries, attempt, first),
        trained=attempt.stepping is not None,
        trained_before=any(
            each.has_trained for each in tries if each.number < attempt.number and each.started > run_dir.changed_at()
        ),
        trained_on=tuple(node_blame.trained_on(tries)),
        program_code=attempt.program_code,
        finished_when=config.job.finished_when,
        hang=hang.sentence if hang is not None else None,
        disk_full=attempt_dir.full_disk_marker.exists(),
        killed=with_last_words(killed, attempt_dir) if killed is not None else None,
        request=request,
        facts=facts,
        told=attempt.facts_when_told,
        preempted_when_told=was_preempted(run_dir, attempt),
        restart_count=own_restart_count(),
        progressed=attempt.progressed,
        progress_visible=_progress_is_visible(attempt, config),
        lasted_s=ended - attempt.started if attempt.started else 0.0,
        stalled_before=len(counted),
        alike_before=attempts.failed_alike(tries, attempt),
        unseen_before=attempts.unseen_before(tries, attempt.number),
        run=run_dir.id if by_slurm else "",
        number=attempt.number,
        now=ended,
        stalled_numbers=tuple(counted),
        node_records=tuple(node_records),
    )


def _node_at_fault(
    attempt: Attempt,
    srun_log: SrunLog,
    first: RankFailure | None,
    code: int,
    *,
    set_up: bool,
) -> str | None:
    """Return the node of the first failure, by SLURM's name; None if it is not known.

    Args:
        first: the first failure that is on record; of a rank that lost another one, if that is all that anybody saw.
        code: exit code of srun.
    """
    if srun_log.lost_node is not None and srun_log.lost_node in attempt.nodes:
        return srun_log.lost_node
    if first is not None and first.because_of_peer:  # which says nothing against its own node
        return srun_log.node_without_tasks or (attempt.nodes[0] if len(attempt.nodes) == 1 else None)
    if first is not None and first.node is not None:
        return first.node
    if first is not None or set_up:  # the ranks of one node, or the set-up itself, have failed
        return own_node_name()
    if srun_log.killed_tasks is not None:
        return node_of_killed_tasks(srun_log.killed_tasks)
    ended = srun_log.nodes_of_tasks(f"Exited with exit code {code}") or attempt.nodes
    return srun_log.node_without_tasks or (ended[0] if len(ended) == 1 else None)


def _superseded_by(everything: list[Attempt], attempt: Attempt, failure: Failure | None) -> str | None:
    """Say which newer attempt, of another job, has taken the run over from this one; None if none has.

    One that failed for good, as on a node without a GPU, has left the run to this attempt, unless it has fenced it off
    by then. One that finished the run, or that a person has cancelled, has ended it for both.
    """
    fenced = failure is not None and failure.superseded
    newer = [each for each in everything if each.number > attempt.number and each.started]
    others = [each for each in newer if each.job_id != attempt.job_id]
    if not others or newer[-1] is not others[-1]:
        return "a newer job goes on with this run" if fenced else None
    alive = [each for each in others if each.verdict != Verdict.END]
    last = (alive or others)[-1]
    name = f"attempt {last.number}" + (f" in job {last.job_id}" if last.job_id is not None else "")
    if last.verdict == Verdict.DONE or others[-1].reason in (Reason.CANCELLED, Reason.PRUNED):
        return f"{name} has ended this run"
    if alive:
        return f"{name} goes on with this run"
    return f"{name} had taken this run over and has failed; `resume` continues it" if fenced else None


def _progress_is_visible(attempt: Attempt, config: Config) -> bool:
    """Return whether progress of this attempt would show, so that its absence proves something."""
    return (
        config.job.kind in (JobKind.TRAIN, JobKind.EVALUATE)
        or config.job.checkpoints is not None
        or attempt.committed_step is not None
        or attempt.reported_step is not None
    )


def policy(config: Config, links_left: int = 0, *, can_start_again: bool = False) -> Policy:
    """Return the part of the config that decides on an attempt.

    Args:
        links_left: jobs of the chain that still wait for this one.
        can_start_again: as for `finish_attempt`.
    """
    mode = config.requeue.mode
    queue = config.cluster.backend == Backend.SLURM
    if not queue and mode != RequeueMode.OFF:
        mode = RequeueMode.REQUEUE  # whoever started the ranks starts them again
    return Policy(
        mode=mode,
        links_left=links_left,
        max_attempts_without_progress=config.requeue.max_attempts_without_progress,
        max_unseen_attempts=config.requeue.max_unseen_attempts,
        long_attempt_s=60 * min(config.requeue.long_attempt_min, config.cluster.time_limit_min / 2),
        signal_lead_s=config.cluster.signal_lead_s,
        blame=blame_policy(config),
        local=config.cluster.backend == Backend.LOCAL,
        queue=queue,
        in_place=can_start_again and config.requeue.starts_in_place,
        node_counts=tuple(reversed(usable_sizes(config))),
    )
