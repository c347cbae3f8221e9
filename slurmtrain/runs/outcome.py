"""Why an attempt ended, and what happens next: a pure function from evidence to an outcome.

It is called after every rank has exited, in the batch shell (through `finish-attempt`) or in the foreground of cluster=local.
Facts about SLURM below were observed with 22.05 (tests/slurm shows them again):

- A preempted job that exits within its grace time is not requeued by SLURM (before 24.05): we must.
- While COMPLETING, SLURM has decided already. `Restarts` one higher than ours: it will start the job again (somebody's
  `scontrol requeue`, the end of a preemption's grace, a dead node). Unchanged: it will not (scancel, the time limit, or,
  where it was submitted with --no-requeue, a dead node, which the field Reason tells).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from slurmtrain.choices import RequeueMode
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.slurm.job_states import AFTER_SCANCEL, ENDED_BY_SLURM, JobState
from slurmtrain.slurm.node_ledger import (
    BUS_ERROR,
    FAST_S,
    HARDWARE,
    NODE_NAME,
    NOT_THE_NODE,
    BlamePolicy,
    NodeEvent,
    NodeRecord,
    blamed_nodes,
    short,
)
from slurmtrain.system.signals import StopCause


class Reason(StrEnum):
    """The reason why an attempt ended."""

    FINISHED = "finished"
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    NODE_FAILURE = "node failure"
    REQUEUED = "requeued"  # somebody used scontrol requeue
    ASKED = "asked"  # a person's signal, `preempt RUN` or `requeue RUN`
    PRUNED = "pruned"  # its search has ended it early
    CONFIG = "config"
    DIVERGED = (
        "diverged"  # numbers of the training are not finite, or its loss has jumped: no retry, and no node's fault
    )
    BAD_NODE = "bad node"  # it could not start there, though an earlier attempt has trained elsewhere
    SUPERSEDED = "superseded"  # a newer attempt of the run, of another job, is at work
    CRASH = "crash"
    HANG = "hang"  # the watchdog has ended it; a crash in every other respect


class Verdict(StrEnum):
    """The decision what happens next to a run."""

    DONE = "done"
    IN_PLACE = "in-place"  # the ranks start again in the same job, which keeps its nodes
    REQUEUE = "requeue"  # we requeue the job
    RESUBMIT = "resubmit"  # we submit a new job
    NEXT = "next"  # the next job of the chain continues
    RESTARTING = "restarting"  # SLURM does it already
    END = "end"


class GoesOn(StrEnum):
    """The words for what happens next to a run that goes on."""

    REQUEUED = "it is requeued"
    SUBMITTED = "it is submitted again"
    CHAIN = "the next job of the chain continues"
    STARTS = "it starts again"  # where there is no queue
    SLURM = "SLURM starts it again"
    STARTED = "it was started again"
    IN_PLACE = "its ranks start again in the same job"  # and without which node, and after which pause


class LastWord(StrEnum):
    """The last word of rank 0 on an attempt, for all ranks."""

    FINISHED = "finished"
    STOPPED = "stopped"


class RunAction(StrEnum):
    """An action that a person, or the search that a run belongs to, has requested of it."""

    CANCEL = "cancel"
    STOP = "stop"  # by a file of this name in the run's directory
    PREEMPT = "preempt"
    REQUEUE = "requeue"
    PRUNE = "prune"  # by a search


ENDS_RUN = (RunAction.CANCEL, RunAction.STOP, RunAction.PRUNE)
PRUNED_BY_SEARCH = "pruned by its search"
STARTS_ANEW = (RunAction.PREEMPT, RunAction.REQUEUE)  # the run leaves its nodes, and goes on in a later start


def exit_code_of_run(verdict: str | None, reason: str | None, code: int | None) -> int:
    """Return the exit code of a command that has waited for the end of a run, given how the last attempt has ended.

    Args:
        code: the highest exit code of the attempt's ranks.

    Returns: 0 it has finished, 75 it has stopped and can be resumed, 78 the config or the environment is wrong, else 1.
    """
    if verdict == Verdict.DONE:
        return 0
    if reason in (Reason.CONFIG, Reason.DIVERGED):
        return EXIT_CONFIG
    # After a crash of one rank the others may have saved and exited with 75; the attempt still crashed.
    return EXIT_REQUEUE if code == EXIT_REQUEUE and reason not in (Reason.CRASH, Reason.HANG) else 1


@dataclass(frozen=True)
class Evidence:
    """All facts that are known when the last rank has exited.

    Attributes:
        exit_code: exit code of srun, the highest of all ranks; 128 + n for a rank killed by signal n.
        said: rank 0's last word, for all ranks; None when it had none. srun may exit with 0 when it
            has lost the ranks, so only this word proves the end. Our launcher writes it, whatever program it has started.
        cause: what told the ranks to stop; None when nothing did.
        seconds_left: seconds from the stop request to the time limit; None when unknown.
        failure: (exit code, sentence) of the first rank that failed by itself.
        set_up: message of a set-up that failed before any rank was started.
        on_any_node: that failure is the same on every node: a checkpoint that does not fit the config.
        diverged: that failure is one of the training's numbers.
        failed_on: the node of the first failure; None if it is not known.
        failed_nodes: all nodes on which a rank failed by itself.
        unfit_nodes: nodes that cannot do what the job needs, as the checks before training have found, or the copying to them.
        only_victims: that failure is of a rank that lost another one, and nobody has seen why that one was lost.
        lost_node: the node that failed, as srun has said; None if it has not.
        dead_nodes: nodes of its ranks that have left the job, or do not answer SLURM.
        usable_nodes: nodes of the job on which ranks can start, in SLURM's order; () if SLURM did not say.
        failed_before: nodes at fault for earlier attempts in this start of the job, the newest first.
        step_left: the processes of its ranks are not gone, so that others could not start beside them.
        seconds_to_limit: seconds from now to the end of the job; None when there is none, or it is not known.
        superseded: if a newer attempt has taken the run over: "attempt 3 in job 12 goes on with this run".
        trained: this attempt has begun to train.
        trained_before: an earlier attempt has begun to train with the same config and code.
        program_code: exit code of a program of the user's own on rank 0; None for other kinds of jobs.
        finished_when: job.finished_when.
        hang: the watchdog's sentence on the ranks that did not come, if it has ended the attempt; `failed_on` is their node.
        killed: srun's words on tasks that were killed, e.g. "n1: task 3: Killed".
        request: what a person requested of this attempt.
        facts: what SLURM says of the job; None outside of SLURM.
        told: what SLURM said of the job when the attempt was told to stop; None if it said nothing.
        preempted_when_told: SLURM said that it preempts the job when the attempt was told to stop; a requeue may have
            cleared that since.
        restart_count: SLURM_RESTART_COUNT of this attempt.
        progressed: a checkpoint was committed that is newer than the one the attempt started from, or a program of the
            user's own shows progress.
        progress_visible: False for a program that reports none, where the absence of progress proves nothing.
        lasted_s: seconds from its beginning to its end, or to the last thing that it wrote.
        stalled_before: number of attempts directly before this one that also stalled.
        unseen_before: number of long attempts before this one that show no progress.
        run, number: id of the run, and number of this attempt.
        now: unix seconds.
        stalled_numbers: the numbers of the attempts that `stalled_before` counts.
        node_records: what is on record against nodes, by earlier attempts of this run and in this person's ledger.
    """

    exit_code: int
    said: str | None = None  # a LastWord
    cause: str | None = None  # a StopCause
    seconds_left: float | None = None
    failure: tuple[int, str] | None = None
    set_up: str | None = None
    on_any_node: bool = False
    diverged: bool = False
    failed_on: str | None = None
    failed_nodes: tuple[str, ...] = ()
    unfit_nodes: tuple[str, ...] = ()
    only_victims: bool = False
    lost_node: str | None = None
    dead_nodes: tuple[str, ...] = ()
    usable_nodes: tuple[str, ...] = ()
    failed_before: tuple[str, ...] = ()
    step_left: bool = False
    seconds_to_limit: float | None = None
    superseded: str | None = None
    trained: bool = False
    trained_before: bool = False
    program_code: int | None = None
    finished_when: str | None = None
    hang: str | None = None
    killed: str | None = None
    request: str | None = None  # a RunAction
    facts: JobFacts | None = None
    told: JobFacts | None = None
    preempted_when_told: bool = False
    restart_count: int = 0
    progressed: bool = False
    progress_visible: bool = True
    lasted_s: float = 0.0
    stalled_before: int = 0
    unseen_before: int = 0
    run: str = ""
    number: int = 0
    now: float = 0.0
    stalled_numbers: tuple[int, ...] = ()
    node_records: tuple[NodeRecord, ...] = ()

    @property
    def lost_nodes(self) -> tuple[str, ...]:
        """The nodes that have failed, as far as SLURM or srun says so."""
        return self.dead_nodes or ((self.lost_node,) if self.lost_node is not None else ())


@dataclass(frozen=True)
class Policy:
    """The part of the config that decides.

    Attributes:
        mode: requeue.mode.
        links_left: jobs of the chain that still wait for this one.
        max_unseen_attempts: requeue.max_unseen_attempts.
        long_attempt_s: seconds after which an attempt may have made progress that is not visible.
        signal_lead_s: seconds before the time limit at which the early warning was requested.
        blame: what decides which nodes are left out.
        local: there is no queue (cluster.backend=local): whoever started the ranks starts them again.
        in_place: the ranks may start again in the same job (requeue.in_place).
        node_counts: numbers of nodes that the ranks can run on, the best first.
    """

    mode: RequeueMode = RequeueMode.REQUEUE
    links_left: int = 0
    max_attempts_without_progress: int = 3
    max_unseen_attempts: int = 10
    long_attempt_s: float = 3600.0
    signal_lead_s: float = 120.0
    early_s: float = 90.0  # SLURM may warn 60 s early, and looks every 30 s
    blame: BlamePolicy = field(default_factory=BlamePolicy)
    local: bool = False
    in_place: bool = False
    node_counts: tuple[int, ...] = ()


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


def joined(why: str, next_step: str | None) -> str:
    """Return why an attempt ended and what happens next in one sentence."""
    return why if next_step is None else f"{why}; {next_step}"


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
    if policy.local:
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


def nodes_of_next_start(
    allocated: Sequence[str], counts: Sequence[int], *, refused: Collection[str] = (), avoided: Sequence[str] = ()
) -> tuple[str, ...] | None:
    """Choose the nodes on which the ranks start again in the same job, in SLURM's order.

    Args:
        allocated: the nodes of the job that can be used, in SLURM's order.
        counts: the numbers of nodes that the ranks can run on, the best first.
        refused: nodes that must not be used.
        avoided: nodes that are left out where spare nodes can replace them; those that matter most come first.

    Returns:
        None if too few nodes are left.
    """
    left = [node for node in allocated if node not in refused]
    count = next((count for count in counts if count <= len(left)), None)
    if count is None:
        return None
    last = [node for node in dict.fromkeys(avoided) if node in left]
    order = [node for node in left if node not in last] + last[::-1]
    chosen = order[:count]
    return tuple(node for node in left if node in chosen)


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


FAILURES = (
    Reason.CRASH,
    Reason.HANG,
    Reason.NODE_FAILURE,
    Reason.BAD_NODE,
)  # may be the fault of a node, and end none of SLURM's job
IN_PLACE_LEAST_S = 60.0  # to start up and do something useful, before the warning of the time limit
QUICK_FAILURE_S = 60.0
PAUSES_S = (0.0, 5.0, 20.0, 60.0)  # before a start after so many quick failures in a row, the first excepted


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


_NOT_REQUEUED = "it is not requeued (requeue.mode=off)"
_NEXT_STEPS = {
    RequeueMode.REQUEUE: (Verdict.REQUEUE, GoesOn.REQUEUED),
    RequeueMode.RESUBMIT: (Verdict.RESUBMIT, GoesOn.SUBMITTED),
    RequeueMode.CHAIN: (Verdict.NEXT, GoesOn.CHAIN),
}
_GOES_ON = re.compile(rf"; (?:{'|'.join(GoesOn)})(?: without \S+(?:, \S+)*)?(?: after \d+ s)?\Z")


def why_of(sentence: str, next_step: str | None) -> str:
    """Return why an attempt ended, given the sentence of its record, without what was to happen next.

    Args:
        next_step: what happens next, as the record has it. Records of earlier versions do not have it: it is then found
            by the words for how a run goes on, and nothing else is cut off.
    """
    if next_step is None:
        return _GOES_ON.sub("", sentence)
    return sentence.removesuffix(f"; {next_step}")


def decide_abandoned_outcome(evidence: Evidence, policy: Policy) -> AttemptOutcome:
    """Decide the outcome of an attempt that nobody finished: its batch shell is gone, and the job has started again already.

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
    else:
        # The run itself may have ended it, and would take one node down after the other, so the attempt uses the
        # budget.
        reason, why = Reason.NODE_FAILURE, "ended without a word: its node failed, or it was killed"
    outcome = AttemptOutcome(reason, Verdict.RESTARTING, why, GoesOn.STARTED)
    return _with_effort(outcome, evidence, policy)


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


_HOW_TO_REPORT = "`slurmtrain progress STEP` or job.progress_file would show it"


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
    counted = evidence.stalled_before + 1 - _spared(outcome.fault, evidence, policy)
    if not outcome.stalled or counted < policy.max_attempts_without_progress:
        return None
    ours = evidence.program_code is None and evidence.progress_visible
    what = "a new checkpoint" if ours else f"progress ({_HOW_TO_REPORT})"
    tries = f"{policy.max_attempts_without_progress} attempts in a row without {what}"
    if policy.max_attempts_without_progress == 1:
        tries = f"an attempt without {what}"
    return f"{tries}: giving up (requeue.max_attempts_without_progress)"


def fault_of_node(evidence: Evidence, reason: Reason) -> NodeRecord | None:
    """Return what an attempt that ended for this reason says against a node; None if it says nothing.

    A crash speaks against a node when it comes within seconds, or with words about broken hardware. It does not when ranks
    failed by themselves on several nodes, or were killed, as for want of memory.
    """
    node = evidence.failed_on
    said = evidence.failure[1] if evidence.failure is not None else evidence.set_up or evidence.killed or ""
    if reason is Reason.NODE_FAILURE or (evidence.lost_nodes and reason in FAILURES):
        node, event = evidence.lost_node or next(iter(evidence.dead_nodes), None), NodeEvent.LOST
        said = "SLURM says that the node failed"  # what its victims said tells nothing of it
    elif reason is Reason.BAD_NODE:
        event = NodeEvent.BAD_START
    elif reason is Reason.HANG:
        said, event = evidence.hang or "", NodeEvent.HANG
    elif reason is Reason.CRASH and HARDWARE.search(said):
        event = NodeEvent.HARDWARE
    elif reason is Reason.CRASH and not NOT_THE_NODE.search(said) and len(evidence.failed_nodes) < 2:
        event = NodeEvent.CRASH
        if not BUS_ERROR.search(said) and (evidence.progressed or evidence.lasted_s >= FAST_S):
            return None
    else:
        return None
    if node is None or NODE_NAME.fullmatch(node) is None or not evidence.run:
        return None
    return NodeRecord(
        time=evidence.now,
        node=node,
        event=event,
        run=evidence.run,
        attempt=evidence.number,
        said=short(said or f"exit code {evidence.exit_code}"),
        lasted_s=round(evidence.lasted_s, 1),
        proven=event in (NodeEvent.HARDWARE, NodeEvent.BAD_START)
        or (event is NodeEvent.HANG and evidence.trained)
        or _has_trained_elsewhere(evidence, node),
    )


def _has_trained_elsewhere(evidence: Evidence, node: str) -> bool:
    trained = [each for each in evidence.node_records if each.event is NodeEvent.TRAINED and each.run == evidence.run]
    return any(node not in each.nodes for each in trained)


def _spared(fault: NodeRecord | None, evidence: Evidence, policy: Policy) -> int:
    """Return how many of the attempts without progress do not count, since a blamed node ended them within seconds.

    If the run came back to a node that was blamed already, that node cannot be left out, and its attempts count. At most
    as many are spared as may count, so that a run that is itself broken ends.
    """
    found = [*evidence.node_records, *([fault] if fault is not None else [])]
    own = [each for each in found if each.run == evidence.run and each.node and each.fast]
    spared: set[int] = set()
    for node in {each.node for each in own}:
        numbers = {each.attempt for each in own if each.node == node}
        before_the_last = [each for each in found if (each.run, each.attempt) != (evidence.run, max(numbers))]
        if _is_blamed(node, found, evidence, policy) and not _is_blamed(node, before_the_last, evidence, policy):
            spared |= numbers
    spared &= {*evidence.stalled_numbers, evidence.number}
    return min(len(spared), policy.max_attempts_without_progress)


def nodes_to_leave_out(fault: NodeRecord | None, evidence: Evidence, policy: BlamePolicy) -> tuple[str, ...]:
    """Return the nodes that the next start should leave out, after this attempt has said this of a node."""
    found = [*evidence.node_records, *([fault] if fault is not None else [])]
    return tuple(each.node for each in blamed_nodes(found, policy, now=evidence.now, run=evidence.run))


def _is_blamed(node: str, found: Sequence[NodeRecord], evidence: Evidence, policy: Policy) -> bool:
    ever = replace(policy.blame, expiry_s=math.inf)  # what was spared stays so
    blamed = blamed_nodes(found, ever, now=evidence.now, run=evidence.run)
    return node in [each.node for each in blamed]


def _reason(evidence: Evidence, policy: Policy) -> tuple[Reason, str]:
    if evidence.exit_code == 0 and evidence.said == LastWord.FINISHED:
        return Reason.FINISHED, _finished(evidence)
    if evidence.superseded is not None:
        return Reason.SUPERSEDED, f"superseded: {evidence.superseded}"
    if evidence.diverged and evidence.failure is not None:
        return Reason.DIVERGED, f"diverged: {evidence.failure[1]}"
    wrong = evidence.failure[1] if evidence.failure is not None and evidence.failure[0] == EXIT_CONFIG else None
    unfit = (
        bool(evidence.unfit_nodes) and not policy.local
    )  # where this machine is all there is, nothing can be left out
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
    what = evidence.failure[1] if evidence.failure else evidence.killed or f"exit code {evidence.exit_code}"
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
