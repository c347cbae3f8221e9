"""Why an attempt ended, and what happens next: a pure function from evidence to an outcome.

It is called after every rank has exited, by the supervisor.
Facts about SLURM below were observed with 22.05 (tests/slurm shows them again):

- A preempted job that exits within its grace time is not requeued by SLURM (before 24.05): we must.
- While COMPLETING, SLURM has decided already. `Restarts` one higher than ours: it will start the job again (somebody's
  `scontrol requeue`, the end of a preemption's grace, a dead node). Unchanged: it will not (scancel, the time limit, or,
  where it was submitted with --no-requeue, a dead node, which the field Reason tells).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from slurmtrain.choices import RequeueMode
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE
from slurmtrain.runs.evidence import (
    Evidence,
    Policy,
    fault_of_node,
    nodes_of_next_start,
    nodes_to_leave_out,
)
from slurmtrain.runs.reasons import (
    FAILURES,
    PRUNED_BY_SEARCH,
    QUICK_FAILURE_S,
    LastWord,
    Reason,
    Verdict,
    joined,
)
from slurmtrain.runs.requests import ENDS_RUN, STARTS_ANEW, RunAction
from slurmtrain.slurm.job_facts import AFTER_SCANCEL, ENDED_BY_SLURM, JobFacts, JobState
from slurmtrain.slurm.node_ledger import NodeRecord
from slurmtrain.system.signals import StopCause

IN_PLACE_LEAST_S = 60.0  # to start up and do something useful, before the warning of the time limit
PAUSES_S = (0.0, 5.0, 20.0, 60.0)  # before a start after so many quick failures in a row, the first excepted


class GoesOn(StrEnum):
    """The words for what happens next to a run that goes on."""

    REQUEUED = "it is requeued"
    SUBMITTED = "it is submitted again"
    CHAIN = "the next job of the chain continues"
    STARTS = "it starts again"  # where there is no queue
    SLURM = "SLURM starts it again"
    STARTED = "it was started again"
    IN_PLACE = "its ranks start again in the same job"  # and without which node, and after which pause


_NOT_REQUEUED = "it is not requeued (requeue.mode=off)"
_NEXT_STEPS = {
    RequeueMode.REQUEUE: (Verdict.REQUEUE, GoesOn.REQUEUED),
    RequeueMode.RESUBMIT: (Verdict.RESUBMIT, GoesOn.SUBMITTED),
    RequeueMode.CHAIN: (Verdict.NEXT, GoesOn.CHAIN),
}
_DISK_FULL = "the disk of its run directory was full, so nobody could record why"
_HOW_TO_REPORT = "`slurmtrain progress STEP` or job.checkpoints would show it"


@dataclass(frozen=True)
class AttemptOutcome:
    """The outcome of an attempt, and what happens next.

    Attributes:
        why: why it ended. It may quote what a program has said, so "; " may be in it.
        next_step: what happens next, or why nothing does; None if `why` leaves nothing to say.
        stalled: nobody told it to stop, and it shows no progress: the attempt uses up the budget.
        unseen: the same for a long attempt of a program that reports no progress: it uses up another budget.
        lasted: it was a long attempt of such a program, whatever the cause of its end.
        bad_nodes: the nodes on which it could not start; the next start should exclude them.
        fault: what this attempt says against a node, for the ledger; None if it says nothing.
        nodes: nodes on which the ranks start again in the same job; () otherwise.
        wait_s: seconds before that start.
    """

    reason: Reason
    verdict: Verdict
    why: str
    next_step: str | None = None
    stalled: bool = False
    unseen: bool = False
    lasted: bool = False
    bad_nodes: tuple[str, ...] = ()
    fault: NodeRecord | None = None
    nodes: tuple[str, ...] = ()
    wait_s: float = 0.0

    @property
    def sentence(self) -> str:
        """Why it ended, and what happens next, as they are shown."""
        return joined(self.why, self.next_step)


def decide_outcome(evidence: Evidence, policy: Policy) -> AttemptOutcome:
    """Decide why the attempt ended and what to do next."""
    reason, why = _reason(evidence, policy)
    if reason is Reason.FINISHED:
        return AttemptOutcome(reason, Verdict.DONE, why)
    why += _doubt(evidence)
    if reason in (Reason.CANCELLED, Reason.PRUNED, Reason.CONFIG, Reason.DIVERGED, Reason.SUPERSEDED):
        return AttemptOutcome(reason, Verdict.END, why)
    fault = fault_of_node(evidence, reason)
    outcome = _with_effort(AttemptOutcome(reason, Verdict.END, why, fault=fault), evidence, policy)
    if _slurm_restarts(evidence):
        return replace(outcome, verdict=Verdict.RESTARTING, next_step=GoesOn.SLURM)
    nodes = _nodes_in_place(outcome, evidence, policy)
    if policy.mode == RequeueMode.OFF and nodes is None:
        return replace(outcome, why=why, next_step=_NOT_REQUEUED)
    spent = budget_spent(outcome, evidence, policy)
    if spent is not None:
        return replace(outcome, why=why, next_step=spent)
    if nodes is not None:
        return replace(_in_place(outcome, nodes, evidence), bad_nodes=evidence.unfit_nodes)
    if evidence.request in STARTS_ANEW and reason is not Reason.ASKED:
        outcome = replace(outcome, why=f"{outcome.why}; meanwhile asked to stop by `{evidence.request} RUN`")
    return _in_a_later_start(outcome, evidence, policy)


def _in_a_later_start(outcome: AttemptOutcome, evidence: Evidence, policy: Policy) -> AttemptOutcome:
    """Return the outcome of an attempt whose run goes on when the job, or the next one, starts (again)."""
    if policy.mode == RequeueMode.CHAIN and policy.links_left == 0:
        return replace(outcome, next_step="the chain has no jobs left (requeue.chain_length)")
    verdict, next_step = _NEXT_STEPS[policy.mode]
    if not policy.queue:
        next_step = GoesOn.STARTS
    bad_nodes = _bad_nodes(evidence) if outcome.reason is Reason.BAD_NODE else ()
    return replace(outcome, verdict=verdict, next_step=next_step, bad_nodes=bad_nodes)


def _bad_nodes(evidence: Evidence) -> tuple[str, ...]:
    """Return the nodes on which an attempt could not start."""
    return evidence.unfit_nodes or ((evidence.failed_on,) if evidence.failed_on is not None else ())


def _nodes_in_place(outcome: AttemptOutcome, evidence: Evidence, policy: Policy) -> tuple[str, ...] | None:
    """Return the nodes on which the ranks can start again in the same job; None if they cannot, or should not.

    A job that SLURM is about to end, or whose time is almost over, is of no use to them. A set-up that has failed is run
    again by a new start only. A blamed node is used only if no other start would come without it. A person who has asked that
    the run leaves its nodes is obeyed, also if it crashed at that moment.
    """
    facts = evidence.facts
    if evidence.request in STARTS_ANEW:
        return None
    if not policy.in_place or outcome.reason not in FAILURES or facts is None or facts.state != JobState.RUNNING:
        return None
    if evidence.set_up is not None or evidence.step_left:
        return None
    needs_s = policy.signal_lead_s + policy.early_s + IN_PLACE_LEAST_S
    if evidence.seconds_to_limit is not None and evidence.seconds_to_limit < needs_s:
        return None
    at_fault = (evidence.failed_on,) if evidence.failed_on is not None else ()
    blamed = nodes_to_leave_out(outcome.fault, evidence, policy.blame)
    last_start = policy.mode == RequeueMode.OFF or (policy.mode == RequeueMode.CHAIN and policy.links_left == 0)
    return nodes_of_next_start(
        evidence.usable_nodes,
        policy.node_counts,
        refused=(
            *(_bad_nodes(evidence) if outcome.reason is Reason.BAD_NODE else ()),
            *(() if last_start else blamed),
        ),
        avoided=(*at_fault, *blamed, *evidence.failed_before),
    )


def _in_place(outcome: AttemptOutcome, nodes: tuple[str, ...], evidence: Evidence) -> AttemptOutcome:
    """Return the outcome of an attempt after which the ranks start again in the same job, on `nodes`.

    An attempt that failed within seconds may find again what made it fail, so the pause before the next one grows.
    """
    quick = outcome.stalled and evidence.lasted_s < QUICK_FAILURE_S
    wait_s = PAUSES_S[min(evidence.stalled_before, len(PAUSES_S) - 1)] if quick else 0.0
    left_out = [node for node in evidence.usable_nodes if node not in nodes and node == evidence.failed_on]
    how = "".join((f" without {', '.join(left_out)}" if left_out else "", f" after {wait_s:.0f} s" if wait_s else ""))
    return replace(outcome, verdict=Verdict.IN_PLACE, next_step=f"{GoesOn.IN_PLACE}{how}", nodes=nodes, wait_s=wait_s)


def decide_after_pause(
    outcome: AttemptOutcome, evidence: Evidence, policy: Policy, *, request: str | None, facts: JobFacts | None
) -> AttemptOutcome:
    """Decide whether the ranks still start again in the same job, after the pause before that.

    Args:
        outcome: what was decided before the pause.
        evidence: what was known then.
        request: what a person has requested of the run meanwhile.
        facts: what SLURM says of the job now; None if it cannot be asked.
    """
    ended = replace(outcome, verdict=Verdict.END, next_step=None, nodes=(), wait_s=0.0)
    if request == RunAction.STOP:
        return replace(ended, why=f"{ended.why}; then stopped by the file `stop` in its directory")
    if request == RunAction.CANCEL:
        return replace(ended, why=f"{ended.why}; then cancelled by `cancel RUN`")
    if request == RunAction.PRUNE:
        return replace(ended, reason=Reason.PRUNED, why=f"{ended.why}; then {PRUNED_BY_SEARCH}")
    if facts is not None and facts.restarts > evidence.restart_count:
        return replace(ended, verdict=Verdict.RESTARTING, next_step=GoesOn.SLURM)
    if facts is not None and is_cancelled(facts, evidence.restart_count):
        return replace(ended, why=f"{ended.why}; then cancelled by scancel")
    asked = request in STARTS_ANEW
    if facts is not None and facts.state == JobState.RUNNING and not facts.preempted and not asked:
        return outcome
    if facts is not None and facts.preempted:
        ended = replace(ended, why=f"{ended.why}; then preempted")
    elif asked:
        ended = replace(ended, why=f"{ended.why}; then asked to stop by `{request} RUN`")
    if policy.mode == RequeueMode.OFF:
        return replace(ended, next_step=_NOT_REQUEUED)
    return _in_a_later_start(ended, evidence, policy)


def is_cancelled(facts: JobFacts, restart_count: int, told: JobFacts | None = None) -> bool:
    """Return whether SLURM has ended the job for good, as scancel does, so that a requeue would bring it back.

    The job has then neither been preempted, nor reached its time limit, nor lost its node, after which SLURM lets us
    requeue it. In the grace time of a preemption, COMPLETING says that the job has ended, and not why; the time of its end
    tells.

    Args:
        told: what SLURM said of the job when the attempt was told to stop; None if it said nothing.
    """
    if facts.restarts > restart_count or facts.reason in ("NodeDown", "TimeLimit"):
        return False
    if facts.state != JobState.COMPLETING or not facts.preempted:
        return facts.state in AFTER_SCANCEL
    assert facts.preempt_time is not None
    if facts.end_time is None:
        return False
    if told is not None and told.preempted and told.state == JobState.RUNNING and told.end_time is not None:
        return facts.end_time < told.end_time  # which is that of the grace time: SLURM itself never ends it sooner
    # At the end of a grace time slurmctld sets both anew. They differ by a second where the clock moves on in between.
    return facts.end_time > facts.preempt_time + 2.0


def decide_abandoned_outcome(evidence: Evidence, policy: Policy) -> AttemptOutcome:
    """Decide the outcome of an attempt that nobody finished: its supervisor is gone, and the job has started again already.

    A run that had finished, or that a person has cancelled, has nothing left to do all the same.
    """
    # Rank 0 alone knows of its own end: another rank may have failed, which the exit code of srun would have told.
    if evidence.said == LastWord.FINISHED and (evidence.failure is None or evidence.only_victims):
        return AttemptOutcome(Reason.FINISHED, Verdict.DONE, "finished")
    if evidence.request == RunAction.PRUNE:
        return AttemptOutcome(Reason.PRUNED, Verdict.END, PRUNED_BY_SEARCH)
    if evidence.request in ENDS_RUN:
        said = "cancelled by a person, and killed before that was on record"
        return AttemptOutcome(Reason.CANCELLED, Verdict.END, said)
    if evidence.preempted_when_told:
        reason, why = Reason.PREEMPTED, "preempted, and killed before it could say so"
    elif evidence.hang is not None:
        reason, why = Reason.HANG, f"hung: {evidence.hang}"
    elif evidence.lost_nodes:
        reason, why = Reason.NODE_FAILURE, f"node {', '.join(evidence.lost_nodes)} failed"
    elif evidence.killed is not None or (evidence.failure is not None and not evidence.only_victims):
        what = evidence.failure[1] if evidence.failure is not None else evidence.killed
        reason, why = Reason.CRASH, f"crashed: {what}"
    elif evidence.failure is not None:  # srun says which task was killed, unless it is killed itself
        gone = "a rank ended without a word: its node failed, or it was killed"
        reason, why = Reason.NODE_FAILURE, f"{gone} ({evidence.failure[1]})"
    elif evidence.said == LastWord.STOPPED or evidence.cause is not None:
        reason, why = _why_told(evidence, policy)
    elif evidence.disk_full:
        reason, why = Reason.CRASH, f"crashed: {_DISK_FULL}"
    else:
        # The run itself may have ended it, and would take one node down after the other, so the attempt uses the
        # budget.
        reason, why = Reason.NODE_FAILURE, "ended without a word: its node failed, or it was killed"
    outcome = _with_effort(AttemptOutcome(reason, Verdict.RESTARTING, why, GoesOn.STARTED), evidence, policy)
    # A run that takes its node down leaves no process that could count, and would go from node to node.
    spent = budget_spent(outcome, evidence, policy)
    return outcome if spent is None else replace(outcome, verdict=Verdict.END, next_step=spent)


def _doubt(evidence: Evidence) -> str:
    """Say why a program that ended with exit code 0 does not count as finished; return nothing if it did not."""
    if evidence.program_code != 0 or evidence.said == LastWord.FINISHED or evidence.failure is not None:
        return ""
    if evidence.finished_when is None:
        return " (exit code 0 after it was told to stop is not taken for finished; job.finished_when says when it is)"
    if evidence.finished_when.isdigit():
        return f" (its program ended with exit code 0, not with job.finished_when={evidence.finished_when})"
    return f" (its program ended with exit code 0, but {evidence.finished_when} is not there: job.finished_when)"


def _with_effort(outcome: AttemptOutcome, evidence: Evidence, policy: Policy) -> AttemptOutcome:
    """Add whether the attempt uses up a budget; for a long one that shows no progress, also say so.

    If progress is not visible, a long attempt may have made some, also one that reached its time limit. It is no crash
    loop, but a program that starts from scratch each time looks the same, so the number of such attempts is limited.
    """
    long = not evidence.progress_visible and evidence.lasted_s >= policy.long_attempt_s
    if evidence.progressed or not _own_fault(outcome.reason, evidence):
        return replace(outcome, lasted=long)
    if not long and (evidence.progress_visible or outcome.reason is not Reason.TIME_LIMIT):
        return replace(outcome, stalled=True)
    count = f"{evidence.unseen_before + 1} of {policy.max_unseen_attempts} such attempts"
    why = f"{outcome.why}; there is no sign of progress ({count}; {_HOW_TO_REPORT})"
    return replace(outcome, why=why, unseen=True, lasted=True)


def _own_fault(reason: Reason, evidence: Evidence) -> bool:
    """Return whether the end is the run's own fault.

    It is for a crash, a time limit, or a program that ends early although nobody told it to.

    A node that fails, or on which the run cannot start, counts, too: the run itself may take its nodes down.
    """
    known = evidence.request is not None or (evidence.cause is not None and evidence.program_code != 0)
    always = (Reason.CRASH, Reason.HANG, Reason.TIME_LIMIT, Reason.NODE_FAILURE, Reason.BAD_NODE)
    return reason in always or (reason is Reason.ASKED and not known)


def budget_spent(outcome: AttemptOutcome, evidence: Evidence, policy: Policy) -> str | None:
    """Say why this attempt is the last, or return None while there may be others."""
    if outcome.unseen and evidence.unseen_before + 1 >= policy.max_unseen_attempts:
        each = f"{policy.max_unseen_attempts} long attempts and nothing that shows progress ({_HOW_TO_REPORT})"
        return f"{each}: giving up (requeue.max_unseen_attempts)"
    # After some progress it may be a node that breaks it, and blame sends it elsewhere.
    alike = evidence.alike_before and evidence.lasted_s < QUICK_FAILURE_S and not evidence.trained_before
    if outcome.stalled and alike and outcome.reason is Reason.CRASH:
        return "its program has failed twice within seconds in the same way, so it is not started a third time"
    if not outcome.stalled or evidence.stalled_before + 1 < policy.max_attempts_without_progress:
        return None
    ours = evidence.program_code is None and evidence.progress_visible
    what = "a new checkpoint" if ours else f"progress ({_HOW_TO_REPORT})"
    tries = f"{policy.max_attempts_without_progress} attempts in a row without {what}"
    if policy.max_attempts_without_progress == 1:
        tries = f"an attempt without {what}"
    return f"{tries}: giving up (requeue.max_attempts_without_progress)"


def _reason(evidence: Evidence, policy: Policy) -> tuple[Reason, str]:
    if evidence.exit_code == 0 and evidence.said == LastWord.FINISHED:
        return Reason.FINISHED, _finished(evidence)
    if evidence.superseded is not None:
        return Reason.SUPERSEDED, f"superseded: {evidence.superseded}"
    if evidence.diverged and evidence.failure is not None:
        return Reason.DIVERGED, f"diverged: {evidence.failure[1]}"
    wrong = evidence.failure[1] if evidence.failure is not None and evidence.failure[0] == EXIT_CONFIG else None
    # Where this machine is all there is, nothing can be left out.
    unfit = bool(evidence.unfit_nodes) and not policy.local
    blame_node = unfit or (evidence.trained_before and not evidence.trained and not evidence.on_any_node)
    if wrong is not None and not blame_node:
        return Reason.CONFIG, wrong
    wrong = wrong or evidence.set_up  # a signal may have ended the set-up: whether there was one comes first
    if evidence.request == RunAction.STOP:
        return Reason.CANCELLED, "stopped by the file `stop` in its directory"
    if evidence.request == RunAction.CANCEL:
        return Reason.CANCELLED, "cancelled by `cancel RUN`"
    if evidence.request == RunAction.PRUNE:
        return Reason.PRUNED, PRUNED_BY_SEARCH
    external = _told_by_slurm(evidence)
    if external is not None:
        return external
    if evidence.hang is not None:
        return Reason.HANG, f"hung: {evidence.hang}"
    said = evidence.failure[1] if evidence.failure is not None else evidence.set_up
    if said is not None and unfit:
        return Reason.BAD_NODE, f"{said} (the fault of {', '.join(evidence.unfit_nodes)})"
    if wrong is not None and blame_node:
        where = evidence.failed_on or "its nodes"
        return Reason.BAD_NODE, f"{wrong} (the fault of {where}: an earlier attempt has trained)"
    if wrong is not None:
        return Reason.CONFIG, wrong
    told = evidence.exit_code == EXIT_REQUEUE or evidence.cause is not None
    if told and evidence.failure is None and evidence.killed is None:
        return _why_told(evidence, policy)
    if evidence.lost_nodes:
        return Reason.NODE_FAILURE, f"node {', '.join(evidence.lost_nodes)} failed"
    if evidence.failure is None and evidence.exit_code == EXIT_CONFIG:
        return Reason.CONFIG, "the config or the environment is wrong (exit code 78)"
    if evidence.failure is None and evidence.killed is None and evidence.exit_code == 0:
        return Reason.CRASH, "ended without a word: exit code 0, and rank 0 has not said that it had finished"
    code = f"exit code {evidence.exit_code}" + (f"; {_DISK_FULL}" if evidence.disk_full else "")
    what = evidence.failure[1] if evidence.failure else evidence.killed or code
    return Reason.CRASH, f"crashed: {what}"


def _finished(evidence: Evidence) -> str:
    rule = evidence.finished_when
    if evidence.program_code is None or rule is None:
        return "finished"
    return (
        f"finished: exit code {rule} (job.finished_when)"
        if rule.isdigit()
        else f"finished: {rule} is there (job.finished_when)"
    )


def _told_by_slurm(evidence: Evidence) -> tuple[Reason, str] | None:
    """Return the reason, and why in words, from SLURM's own record; None if it says nothing."""
    facts = evidence.facts
    preempted = evidence.preempted_when_told or (facts is not None and facts.preempted)
    if facts is not None and facts.preempted and is_cancelled(facts, evidence.restart_count, evidence.told):
        return Reason.CANCELLED, "cancelled by scancel while it was being preempted"
    if preempted:
        return Reason.PREEMPTED, "preempted"
    if facts is None:
        return None
    if facts.state not in ENDED_BY_SLURM:
        return None
    if _slurm_restarts(evidence):
        if evidence.request in STARTS_ANEW:
            return Reason.ASKED, f"asked to stop by `{evidence.request} RUN`"
        if evidence.killed is not None or (evidence.said is None and evidence.cause is None):
            return Reason.NODE_FAILURE, "a node failed"
        return Reason.REQUEUED, "requeued by SLURM or by `scontrol requeue`"
    if facts.reason == "NodeDown" or facts.state == JobState.NODE_FAIL:  # SLURM may not start this job again
        return Reason.NODE_FAILURE, "a node failed"
    if facts.reason == "TimeLimit" or facts.state == JobState.TIMEOUT:
        return Reason.TIME_LIMIT, "the time limit was reached before a checkpoint was saved"
    return Reason.CANCELLED, "cancelled by scancel"


def _slurm_restarts(evidence: Evidence) -> bool:
    return evidence.facts is not None and evidence.facts.restarts > evidence.restart_count


def _why_told(evidence: Evidence, policy: Policy) -> tuple[Reason, str]:
    """Return the reason, and why in words, from the clock and the signal, when SLURM's record says nothing."""
    if evidence.request in STARTS_ANEW:
        return Reason.ASKED, f"asked to stop by `{evidence.request} RUN`"
    near_limit = evidence.seconds_left is not None and evidence.seconds_left <= policy.signal_lead_s + policy.early_s
    if evidence.cause == StopCause.DEADLINE or (
        evidence.cause in (StopCause.SIGUSR2, StopCause.OTHER_RANK) and near_limit
    ):
        return Reason.TIME_LIMIT, "the time limit is near"
    if evidence.cause == StopCause.SIGINT:
        return Reason.CANCELLED, "stopped with Ctrl-C"
    if evidence.cause is None and evidence.program_code is not None:
        return Reason.ASKED, "its program wants to be started again"
    return Reason.ASKED, f"told to stop by {evidence.cause or 'a signal'}"
