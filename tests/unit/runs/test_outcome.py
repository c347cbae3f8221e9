"""Why an attempt ended and what comes next: one row for every way an attempt can end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.choices import RequeueMode
from slurmtrain.runs.evidence import Evidence, Policy
from slurmtrain.runs.outcome import decide_abandoned_outcome, decide_outcome, is_cancelled
from slurmtrain.runs.reasons import Reason, RunAction, Verdict, why_of
from slurmtrain.slurm.job_facts import JobFacts

# What SLURM 22.05 says of a job while its batch script still runs.
RUNNING = JobFacts("RUNNING", "None", restarts=0, start_time=1000.0)
PREEMPTED = JobFacts("RUNNING", "None", start_time=1000.0, preempt_time=1500.0)
PREEMPTED_BY_SLURM = JobFacts("COMPLETING", "None", restarts=1, start_time=1000.0, preempt_time=1500.0)
CANCELLED = JobFacts("COMPLETING", "None", start_time=1000.0)
REQUEUED = JobFacts("COMPLETING", "None", restarts=1, start_time=1000.0)
TIMED_OUT = JobFacts("COMPLETING", "TimeLimit", start_time=1000.0)
PREEMPTED_LAST_TIME = JobFacts("RUNNING", "None", restarts=1, start_time=2000.0, preempt_time=1500.0)

# With PreemptMode=CANCEL, too. At the end of a grace time both its times are set anew.
IN_GRACE = JobFacts("RUNNING", "None", start_time=1000.0, preempt_time=1500.0, end_time=1510.0)
CANCELLED_IN_GRACE = JobFacts("COMPLETING", "None", start_time=1000.0, preempt_time=1500.0, end_time=1504.0)
GRACE_IS_OVER = JobFacts("COMPLETING", "None", start_time=1000.0, preempt_time=1510.0, end_time=1511.0)

STOPPED = {"exit_code": 75, "said": "stopped", "progressed": True}
SLURM_TERM = {**STOPPED, "cause": "SIGTERM"}
EARLY = {**STOPPED, "cause": "SIGUSR2", "seconds_left": 150.0}
SAVED_AND_SAID_0 = {"exit_code": 75, "said": "stopped", "program_code": 0}
KILLED = {"exit_code": 137, "killed": "n1: task 3: Killed"}

ROWS = [
    # how it ended, evidence, reason, verdict, a part of the sentence
    ("finished", {"exit_code": 0, "said": "finished", "facts": RUNNING}, "finished", "done", "finished"),
    ("srun says 0, and no rank has said anything", {"exit_code": 0}, "crash", "requeue", "ended without a word"),
    (
        "srun says 0, and no rank has said anything, cancelled",
        {"exit_code": 0, "facts": CANCELLED},
        "cancelled",
        "end",
        "scancel",
    ),
    (
        "finished while being preempted",
        {"exit_code": 0, "said": "finished", "facts": PREEMPTED},
        "finished",
        "done",
        "",
    ),
    ("finished after a pruning", {"exit_code": 0, "said": "finished", "request": "prune"}, "finished", "done", ""),
    ("pruned by its search", {**STOPPED, "request": "prune", "cause": "SIGUSR2"}, "pruned", "end", "by its search"),
    (
        "pruned while it was preempted",
        {**SLURM_TERM, "request": "prune", "facts": PREEMPTED},
        "pruned",
        "end",
        "pruned",
    ),
    ("pruned, and crashed as it left", {"exit_code": 1, "request": "prune"}, "pruned", "end", "pruned by its search"),
    ("finished after a cancel", {"exit_code": 0, "said": "finished", "request": "cancel"}, "finished", "done", ""),
    ("preempted, saved and left in time", {**SLURM_TERM, "facts": PREEMPTED}, "preempted", "requeue", "requeued"),
    (
        "preempted with the job's own signal",
        {**STOPPED, "cause": "SIGUSR2", "facts": PREEMPTED},
        "preempted",
        "requeue",
        "preempted",
    ),
    (
        "preempted, grace time over",
        {**KILLED, "cause": "SIGTERM", "facts": PREEMPTED_BY_SLURM},
        "preempted",
        "restarting",
        "SLURM starts it again",
    ),
    (
        "preempted, and put back into the queue by the time that SLURM is asked",
        {**SLURM_TERM, "facts": REQUEUED, "preempted_when_told": True},
        "preempted",
        "restarting",
        "SLURM starts it again",
    ),
    (
        "preempted, and SLURM does not answer afterwards",
        {**SLURM_TERM, "preempted_when_told": True},
        "preempted",
        "requeue",
        "preempted",
    ),
    ("preempted before the first step", {"exit_code": 75, "facts": PREEMPTED}, "preempted", "requeue", "preempted"),
    ("early warning of the time limit", {**EARLY, "facts": RUNNING}, "time limit", "requeue", "time limit is near"),
    (
        "the warning reached another rank",
        {**EARLY, "cause": "another rank", "facts": RUNNING},
        "time limit",
        "requeue",
        "near",
    ),
    ("the clock gave the warning", {**STOPPED, "cause": "deadline"}, "time limit", "requeue", "near"),
    (
        "time limit hit while saving",
        {**KILLED, "cause": "SIGUSR2", "facts": TIMED_OUT},
        "time limit",
        "requeue",
        "before",
    ),
    ("scancel, saved in time", {**SLURM_TERM, "facts": CANCELLED}, "cancelled", "end", "scancel"),
    ("scancel, killed", {**KILLED, "facts": CANCELLED}, "cancelled", "end", "scancel"),
    (
        "scancel in the grace time of a preemption",
        {**SLURM_TERM, "facts": CANCELLED_IN_GRACE, "told": IN_GRACE, "preempted_when_told": True},
        "cancelled",
        "end",
        "scancel",
    ),
    (
        "preempted, grace time over, where SLURM cancels",
        {**KILLED, "cause": "SIGTERM", "facts": GRACE_IS_OVER, "told": IN_GRACE, "preempted_when_told": True},
        "preempted",
        "requeue",
        "preempted",
    ),
    ("`cancel RUN`", {**SLURM_TERM, "facts": CANCELLED, "request": "cancel"}, "cancelled", "end", "`cancel RUN`"),
    ("`cancel RUN` of a local run", {**SLURM_TERM, "request": "cancel"}, "cancelled", "end", "`cancel RUN`"),
    (
        "`preempt RUN`",
        {**SLURM_TERM, "facts": RUNNING, "request": "preempt"},
        "asked",
        "requeue",
        "asked to stop by `preempt RUN`",
    ),
    (
        "`requeue RUN`",
        {**STOPPED, "cause": "SIGUSR2", "facts": RUNNING, "request": "requeue"},
        "asked",
        "requeue",
        "`requeue RUN`",
    ),
    ("somebody's signal", {**SLURM_TERM, "facts": RUNNING}, "asked", "requeue", "told to stop by SIGTERM"),
    (
        "somebody's USR2 long before the limit",
        {**EARLY, "seconds_left": 5000.0, "facts": RUNNING},
        "asked",
        "requeue",
        "SIGUSR2",
    ),
    ("scontrol requeue", {**SLURM_TERM, "facts": REQUEUED}, "requeued", "restarting", "scontrol requeue"),
    ("a node died", {"exit_code": 143, "facts": REQUEUED}, "node failure", "restarting", "a node failed"),
    ("a node died, srun saw it", {**KILLED, "facts": REQUEUED}, "node failure", "restarting", "a node failed"),
    (
        "one rank killed",
        {**KILLED, "facts": RUNNING},
        "crash",
        "requeue",
        "crashed: n1: task 3: Killed; it is requeued",
    ),
    ("one rank killed after a signal", {**KILLED, "cause": "SIGTERM"}, "crash", "requeue", "task 3: Killed"),
    (
        "user code raised",
        {"exit_code": 1, "failure": (1, "rank 2: ValueError: no"), "facts": RUNNING},
        "crash",
        "requeue",
        "crashed: rank 2: ValueError: no",
    ),
    (
        "user code raised while stopping",
        {"exit_code": 1, "cause": "SIGTERM", "failure": (1, "rank 0: OSError: full"), "facts": RUNNING},
        "crash",
        "requeue",
        "OSError: full",
    ),
    (
        "srun lost its ranks and says 0",
        {"exit_code": 0, "killed": "io error and missing step on node 0", "facts": RUNNING},
        "crash",
        "requeue",
        "missing step on node 0",
    ),
    ("crashed without a word", {"exit_code": 139, "facts": RUNNING}, "crash", "requeue", "exit code 139"),
    ("config error", {"exit_code": 78, "failure": (78, "rank 0: no GPU")}, "config", "end", "no GPU"),
    (
        "a node on which it cannot start, though it has trained elsewhere",
        {
            "exit_code": 78,
            "failure": (78, "rank 0: no GPU"),
            "failed_on": "n2",
            "trained_before": True,
            "facts": RUNNING,
        },
        "bad node",
        "requeue",
        "the fault of n2",
    ),
    (
        "a set-up that fails, though it has worked elsewhere",
        {"exit_code": 78, "set_up": "set-up failed with code 1: module", "failed_on": "n2", "trained_before": True},
        "bad node",
        "requeue",
        "set-up failed with code 1: module (the fault of n2",
    ),
    ("a set-up that fails", {"exit_code": 78, "set_up": "set-up failed with code 1: x"}, "config", "end", "code 1: x"),
    (
        "config error after it has trained",
        {"exit_code": 78, "failure": (78, "rank 0: no such set"), "trained_before": True, "trained": True},
        "config",
        "end",
        "no such set",
    ),
    (
        "numbers that broke",
        {"exit_code": 78, "failure": (78, "rank 0: step 7 has loss nan"), "diverged": True, "facts": RUNNING},
        "diverged",
        "end",
        "diverged: rank 0: step 7 has loss nan",
    ),
    (
        "numbers that broke before it had trained again: no node's fault",
        {
            "exit_code": 78,
            "failure": (78, "rank 0: step 7 has loss nan"),
            "failed_on": "n2",
            "trained_before": True,
            "diverged": True,
        },
        "diverged",
        "end",
        "diverged: rank 0: step 7 has loss nan",
    ),
    (
        "a set-up that a preemption interrupted",
        {"exit_code": 78, "set_up": "set-up failed with code 143: sleep", "facts": PREEMPTED},
        "preempted",
        "requeue",
        "preempted",
    ),
    (
        "a newer job is at work for the run",
        {
            "exit_code": 1,
            "failure": (1, "rank 0: may not commit"),
            "superseded": "attempt 3 in job 12 goes on with this run",
            "facts": RUNNING,
        },
        "superseded",
        "end",
        "superseded: attempt 3 in job 12 goes on",
    ),
    ("exit code 78 alone", {"exit_code": 78}, "config", "end", "exit code 78"),
    (
        "config error of one rank, the others killed",
        {**KILLED, "failure": (78, "rank 1: no GPU")},
        "config",
        "end",
        "rank 1: no GPU",
    ),
    ("Ctrl-C", {**STOPPED, "cause": "SIGINT"}, "cancelled", "end", "Ctrl-C"),
    ("a command died of the signal", {"exit_code": 143, "cause": "SIGTERM"}, "asked", "requeue", "SIGTERM"),
    (
        "a program saved and exited with 0 when preempted",
        {**SAVED_AND_SAID_0, "cause": "SIGTERM", "facts": PREEMPTED},
        "preempted",
        "requeue",
        "exit code 0 after it was told to stop is not taken for finished",
    ),
    (
        "a program saved and exited with 0 before the time limit",
        {**SAVED_AND_SAID_0, "cause": "SIGUSR2", "seconds_left": 150.0, "facts": RUNNING},
        "time limit",
        "requeue",
        "job.finished_when says when",
    ),
    (
        "a program saved and exited with 0, cancelled",
        {**SAVED_AND_SAID_0, "cause": "SIGTERM", "facts": CANCELLED},
        "cancelled",
        "end",
        "scancel",
    ),
    (
        "told to stop, and nobody said that it has finished",
        {"exit_code": 0, "cause": "SIGTERM", "facts": PREEMPTED},
        "preempted",
        "requeue",
        "",
    ),
    (
        "finished by the file that says so, after a signal",
        {"exit_code": 0, "said": "finished", "cause": "SIGTERM", "program_code": 0, "finished_when": "done"},
        "finished",
        "done",
        "done is there (job.finished_when)",
    ),
    (
        "finished by the exit code that says so",
        {"exit_code": 0, "said": "finished", "program_code": 9, "finished_when": "9"},
        "finished",
        "done",
        "exit code 9 (job.finished_when)",
    ),
    (
        "exit code 0 without the file that says finished",
        {**SAVED_AND_SAID_0, "finished_when": "done", "facts": RUNNING},
        "asked",
        "requeue",
        "wants to be started again (its program ended with exit code 0, but done is not there",
    ),
    (
        "an old preemption is not this one's",
        {**SLURM_TERM, "facts": PREEMPTED_LAST_TIME, "restart_count": 1},
        "asked",
        "requeue",
        "SIGTERM",
    ),
    ("SLURM cannot be asked", {**SLURM_TERM, "facts": None}, "asked", "requeue", "SIGTERM"),
]


@pytest.mark.parametrize(
    ("evidence", "reason", "verdict", "sentence"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_every_end_has_its_reason_and_its_consequence(
    evidence: dict[str, object], reason: str, verdict: str, sentence: str
) -> None:
    outcome = decide_outcome(Evidence(**evidence), Policy())  # type: ignore[arg-type]
    assert (outcome.reason, outcome.verdict) == (reason, verdict)
    assert sentence in outcome.sentence


def test_the_outcome_of_a_restarted_job_is_decided_by_its_own_count_of_restarts() -> None:
    second_life = JobFacts("COMPLETING", "None", restarts=1, start_time=1000.0)
    assert (
        decide_outcome(Evidence(75, "stopped", "SIGTERM", facts=second_life, restart_count=1), Policy()).reason
        == "cancelled"
    )
    assert (
        decide_outcome(Evidence(75, "stopped", "SIGTERM", facts=second_life, restart_count=0), Policy()).reason
        == "requeued"
    )


# The budget.

CRASH = Evidence(1, failure=(1, "rank 0: boom"), facts=RUNNING)


def with_history(stalled_before: int, progressed: bool = False) -> Evidence:
    return Evidence(1, failure=(1, "rank 0: boom"), facts=RUNNING, stalled_before=stalled_before, progressed=progressed)


@pytest.mark.parametrize(
    ("budget", "stalled_before", "verdict"),
    [(3, 0, "requeue"), (3, 1, "requeue"), (3, 2, "end"), (3, 7, "end"), (1, 0, "end"), (2, 0, "requeue")],
)
def test_a_crash_loop_without_progress_ends_with_the_budget(budget: int, stalled_before: int, verdict: str) -> None:
    outcome = decide_outcome(with_history(stalled_before), Policy(max_attempts_without_progress=budget))
    assert outcome.verdict == verdict
    assert ("giving up" in outcome.sentence) == (verdict == "end")


def test_a_checkpoint_resets_the_budget() -> None:
    assert decide_outcome(with_history(5, progressed=True), Policy()).verdict == Verdict.REQUEUE


def test_time_limits_without_progress_use_up_the_budget_too() -> None:
    evidence = Evidence(75, "stopped", "deadline", stalled_before=2)
    assert decide_outcome(evidence, Policy()).verdict == Verdict.END


@pytest.mark.parametrize("facts", [PREEMPTED, REQUEUED, PREEMPTED_BY_SLURM])
def test_what_is_not_the_runs_fault_never_uses_up_the_budget(facts: JobFacts) -> None:
    evidence = Evidence(75, "stopped", "SIGTERM", facts=facts, stalled_before=9)
    assert decide_outcome(evidence, Policy()).verdict in (Verdict.REQUEUE, Verdict.RESTARTING)


def test_a_program_with_checkpoints_of_its_own_may_reach_the_time_limit_every_day() -> None:
    evidence = Evidence(75, "stopped", "SIGUSR2", seconds_left=60.0, progress_visible=False, stalled_before=9)
    outcome = decide_outcome(evidence, Policy())
    assert (outcome.reason, outcome.verdict) == (Reason.TIME_LIMIT, Verdict.REQUEUE)


def test_a_program_that_asks_to_be_started_again_without_reason_or_progress_uses_up_the_budget() -> None:
    assert decide_outcome(Evidence(75, "stopped", stalled_before=2), Policy()).verdict == Verdict.END
    assert (
        decide_outcome(Evidence(75, "stopped", stalled_before=2, progressed=True), Policy()).verdict == Verdict.REQUEUE
    )


# A program of the user's own may show no progress at all.

UNSEEN = {"progress_visible": False, "program_code": 1, "facts": RUNNING}
LONG, SHORT = {**UNSEEN, "lasted_s": 7200.0}, {**UNSEEN, "lasted_s": 60.0}
BOOM = {"exit_code": 1, "failure": (1, "rank 0: boom")}
WANTS_MORE = {"exit_code": 75, "said": "stopped"}
AT_THE_LIMIT = {**WANTS_MORE, "cause": "SIGUSR2", "seconds_left": 60.0}
TOLD_BY_NOBODY = {**WANTS_MORE, "cause": "SIGTERM", "program_code": 0}

EFFORTS = [
    # how it ended, evidence -> uses up the budget, that of long attempts, was long
    ("a short crash", {**SHORT, **BOOM}, (True, False, False)),
    ("a crash after hours", {**LONG, **BOOM}, (False, True, True)),
    (
        "a crash after hours, where progress is visible",
        {**LONG, **BOOM, "progress_visible": True},
        (True, False, False),
    ),
    ("a chunk done in a minute, and not reported", {**SHORT, **WANTS_MORE, "program_code": 75}, (True, False, False)),
    ("a chunk done, and reported", {**SHORT, **WANTS_MORE, "progressed": True}, (False, False, False)),
    ("a chunk of hours, not reported", {**LONG, **WANTS_MORE, "program_code": 75}, (False, True, True)),
    ("a short time limit, from scratch each time", {**SHORT, **AT_THE_LIMIT}, (False, True, True)),
    ("the time limit, with progress", {**LONG, **AT_THE_LIMIT, "progressed": True}, (False, False, True)),
    ("exit code 0 after a TERM of nobody's, in a minute", {**SHORT, **TOLD_BY_NOBODY}, (True, False, False)),
    ("the same on request", {**SHORT, **TOLD_BY_NOBODY, "request": "preempt"}, (False, False, False)),
    ("the same in a preemption", {**SHORT, **TOLD_BY_NOBODY, "facts": PREEMPTED}, (False, False, False)),
    ("preempted after hours", {**LONG, **WANTS_MORE, "cause": "SIGTERM", "facts": PREEMPTED}, (False, False, True)),
]


@pytest.mark.parametrize(("evidence", "effort"), [row[1:] for row in EFFORTS], ids=[row[0] for row in EFFORTS])
def test_what_uses_up_which_budget(evidence: dict[str, object], effort: tuple[bool, bool, bool]) -> None:
    outcome = decide_outcome(Evidence(**evidence), Policy())  # type: ignore[arg-type]
    assert (outcome.stalled, outcome.unseen, outcome.lasted) == effort
    assert outcome.verdict == Verdict.REQUEUE


@pytest.mark.parametrize("ending", [BOOM, AT_THE_LIMIT, {**WANTS_MORE, "program_code": 75}])
def test_a_program_that_shows_no_progress_is_told_of_it_each_time_and_does_not_go_on_for_ever(
    ending: dict[str, object],
) -> None:
    early, late = (decide_outcome(Evidence(**{**LONG, **ending}, unseen_before=n), Policy()) for n in (3, 9))  # type: ignore[arg-type]
    assert early.verdict == Verdict.REQUEUE and "there is no sign of progress (4 of 10 such" in early.sentence
    assert late.verdict == Verdict.END and "giving up (requeue.max_unseen_attempts)" in late.sentence
    assert "slurmtrain progress STEP" in early.sentence and "slurmtrain progress STEP" in late.sentence


# Where SLURM does not requeue: the same reasons, other consequences.

NODE_DOWN = JobFacts("COMPLETING", "NodeDown", start_time=1000.0)
GOES_ON = {
    "resubmit": (Policy(mode=RequeueMode.RESUBMIT), "resubmit", "it is submitted again"),
    "chain": (Policy(mode=RequeueMode.CHAIN, links_left=2), "next", "the next job of the chain continues"),
    "last of a chain": (Policy(mode=RequeueMode.CHAIN), "end", "the chain has no jobs left"),
    "off": (Policy(mode=RequeueMode.OFF), "end", "it is not requeued"),
}


@pytest.mark.parametrize("mode", GOES_ON)
@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        ({**SLURM_TERM, "facts": PREEMPTED}, "preempted"),
        ({**SAVED_AND_SAID_0, "cause": "SIGTERM", "facts": PREEMPTED}, "preempted"),
        ({**EARLY, "facts": RUNNING}, "time limit"),
        ({**KILLED, "cause": "SIGUSR2", "facts": TIMED_OUT}, "time limit"),
        ({**SLURM_TERM, "facts": RUNNING, "request": "preempt"}, "asked"),
        ({"exit_code": 143, "facts": NODE_DOWN}, "node failure"),
        ({**SLURM_TERM, "facts": NODE_DOWN}, "node failure"),
        (KILLED, "crash"),
    ],
)
def test_each_mode_goes_on_in_its_own_way_and_says_so(mode: str, evidence: dict[str, object], reason: str) -> None:
    policy, verdict, words = GOES_ON[mode]
    outcome = decide_outcome(Evidence(**evidence), policy)  # type: ignore[arg-type]
    assert (outcome.reason, outcome.verdict) == (reason, verdict)
    assert words in outcome.sentence


@pytest.mark.parametrize("mode", GOES_ON)
@pytest.mark.parametrize(
    ("evidence", "verdict"),
    [
        ({"exit_code": 0, "said": "finished", "facts": RUNNING}, "done"),
        ({**SLURM_TERM, "facts": CANCELLED}, "end"),
        ({**SLURM_TERM, "facts": RUNNING, "request": "cancel"}, "end"),
        ({"exit_code": 78}, "end"),
        ({"exit_code": 1, "failure": (1, "rank 0: boom"), "facts": RUNNING, "stalled_before": 2}, "end"),
    ],
)
def test_what_ends_a_run_ends_it_in_every_mode(mode: str, evidence: dict[str, object], verdict: str) -> None:
    assert decide_outcome(Evidence(**evidence), GOES_ON[mode][0]).verdict == verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "evidence",
    [
        Evidence(143, facts=REQUEUED, stalled_before=0),  # SLURM starts it again
        Evidence(143, facts=NODE_DOWN, stalled_before=0),
    ],
)
def test_a_node_that_fails_under_a_run_without_progress_uses_up_the_budget(evidence: Evidence) -> None:
    assert decide_outcome(evidence, Policy()).stalled
    assert not decide_outcome(dataclasses.replace(evidence, progressed=True), Policy()).stalled


@pytest.mark.parametrize(
    ("facts", "cancelled"),
    [
        (RUNNING, False),
        (PREEMPTED, False),
        (PREEMPTED_BY_SLURM, False),
        (CANCELLED, True),
        (JobFacts("CANCELLED"), True),
        (REQUEUED, False),
        (TIMED_OUT, False),
        (NODE_DOWN, False),
        (CANCELLED_IN_GRACE, True),
        (GRACE_IS_OVER, False),
    ],
)
def test_a_requeue_would_revive_what_scancel_has_ended(facts: JobFacts, cancelled: bool) -> None:
    assert is_cancelled(facts, 0) == cancelled


# Whatever the evidence.

EVIDENCE = st.builds(
    Evidence,
    exit_code=st.sampled_from([0, 1, 75, 78, 137, 143]),
    said=st.sampled_from([None, "finished", "stopped"]),
    cause=st.sampled_from([None, "SIGTERM", "SIGUSR2", "SIGINT", "deadline", "another rank"]),
    seconds_left=st.none() | st.floats(0, 1e5),
    failure=st.sampled_from([None, (1, "rank 0: x"), (78, "rank 1: y")]),
    killed=st.sampled_from([None, "n0: task 0: Killed"]),
    request=st.sampled_from([None, "cancel", "preempt", "requeue"]),
    facts=st.sampled_from([None, RUNNING, PREEMPTED, CANCELLED, REQUEUED, TIMED_OUT, PREEMPTED_BY_SLURM]),
    progressed=st.booleans(),
    stalled_before=st.integers(0, 4),
    program_code=st.sampled_from([None, 0, 1, 75]),
    progress_visible=st.booleans(),
    lasted_s=st.floats(0, 1e5),
    unseen_before=st.integers(0, 11),
)


@given(evidence=EVIDENCE, budget=st.integers(1, 4), mode=st.sampled_from([RequeueMode.RESUBMIT, RequeueMode.CHAIN]))
def test_promises_that_hold_for_every_evidence(evidence: Evidence, budget: int, mode: RequeueMode) -> None:
    outcome = decide_outcome(evidence, Policy(max_attempts_without_progress=budget))
    off = decide_outcome(evidence, Policy(mode=RequeueMode.OFF, max_attempts_without_progress=budget))
    slurm_restarts = evidence.facts is not None and evidence.facts.restarts > 0
    assert outcome.sentence and "\n" not in outcome.sentence
    assert off.verdict is not Verdict.REQUEUE  # requeue.mode=off
    other = decide_outcome(evidence, Policy(mode=mode, links_left=1, max_attempts_without_progress=budget))
    same = {Verdict.RESUBMIT: Verdict.REQUEUE, Verdict.NEXT: Verdict.REQUEUE}
    assert other.reason is outcome.reason
    assert same.get(other.verdict, other.verdict) is outcome.verdict  # a mode decides how a run goes on, not whether
    if outcome.verdict is Verdict.REQUEUE:
        assert not slurm_restarts  # or it would be requeued twice
        assert evidence.request != "cancel"
    if evidence.request == "cancel" or evidence.failure == (78, "rank 1: y"):
        assert outcome.verdict in (Verdict.END, Verdict.DONE)
    finished = evidence.exit_code == 0 and evidence.said == "finished"
    assert (outcome.reason is Reason.FINISHED) == finished
    for each in (outcome, off, other, decide_abandoned_outcome(evidence, Policy())):
        assert why_of(each.sentence, each.next_step) == each.why
        if each.verdict not in (Verdict.DONE, Verdict.END):
            assert each.next_step is not None
            assert why_of(each.sentence, None) == each.why  # as in a record of an earlier version


HUNG = "rank 1 on n2 was stopped (SIGSTOP) in step 17, forward/backward; 3 other ranks waited"


def test_a_hang_is_a_crash_that_names_the_rank_which_did_not_come() -> None:
    killed = "n2: task 1: Killed"
    outcome = decide_outcome(Evidence(exit_code=137, hang=HUNG, killed=killed, failed_on="n2"), Policy())
    assert (outcome.reason, outcome.verdict, outcome.stalled) == (Reason.HANG, Verdict.REQUEUE, True)
    assert (outcome.why, outcome.next_step) == (f"hung: {HUNG}", "it is requeued")
    assert outcome.sentence == f"hung: {HUNG}; it is requeued"


VICTIM = {"exit_code": 1, "failure": (1, "rank 0: lost its connection to another rank"), "only_victims": True}
DEAD = (Reason.NODE_FAILURE, "node n1 failed")


@pytest.mark.parametrize(
    ("case", "evidence", "at_once", "in_the_next_start"),
    [
        ("srun says so", {"exit_code": 1, "lost_node": "n1"}, DEAD, DEAD),
        ("a rank has lost another one, too", {**VICTIM, "lost_node": "n1"}, DEAD, DEAD),
        ("its slurmstepd is gone", {"killed": "io error and missing step on node 1", "lost_node": "n1"}, DEAD, DEAD),
        (
            "srun is gone with its node",
            VICTIM,
            (Reason.CRASH, "crashed: rank 0: lost its connection to another rank"),
            (
                Reason.NODE_FAILURE,
                "a rank ended without a word: its node failed, or it was killed "
                "(rank 0: lost its connection to another rank)",
            ),
        ),
        (
            "a rank was killed, and the other one has lost it",
            {**VICTIM, "failure": None, "killed": "n1: task 1: Killed"},
            (Reason.CRASH, "crashed: n1: task 1: Killed"),
            (Reason.CRASH, "crashed: n1: task 1: Killed"),
        ),
        (
            "a rank failed by itself",
            {"exit_code": 1, "failure": (1, "rank 1: ValueError: x")},
            (Reason.CRASH, "crashed: rank 1: ValueError: x"),
            (Reason.CRASH, "crashed: rank 1: ValueError: x"),
        ),
    ],
)
def test_a_node_that_failed_is_told_from_the_crash_of_those_that_have_lost_it(
    case: str,
    evidence: dict[str, Any],
    at_once: tuple[Reason, str],
    in_the_next_start: tuple[Reason, str],
) -> None:
    """By the batch script, also before SLURM's record of the job says so; and by the next start, if SLURM was faster."""
    found = Evidence(**{"exit_code": 0, "facts": RUNNING, **evidence})
    outcome = decide_outcome(found, Policy())
    assert (outcome.reason, outcome.why) == at_once
    outcome = decide_abandoned_outcome(dataclasses.replace(found, facts=None), Policy())
    assert (outcome.reason, outcome.why) == in_the_next_start


@pytest.mark.parametrize(
    ("sentence", "next_step", "why"),
    [
        ("preempted; it is requeued", "it is requeued", "preempted"),
        (f"hung: {HUNG}", None, f"hung: {HUNG}"),
        (f"hung: {HUNG}; the job ended", "the job ended", f"hung: {HUNG}"),
        ("crashed: x; it is requeued", "it is submitted again", "crashed: x; it is requeued"),
        # Records of earlier versions do not say which part the next step is.
        ("preempted; it is requeued", None, "preempted"),
        ("preempted; it is submitted again", None, "preempted"),
        ("preempted; the next job of the chain continues", None, "preempted"),
        ("crashed: x; it starts again", None, "crashed: x"),
        ("crashed: x; then preempted; SLURM starts it again", None, "crashed: x; then preempted"),
        ("ended without a word; it was started again", None, "ended without a word"),
        ("crashed: x; y; its ranks start again in the same job", None, "crashed: x; y"),
        ("crashed: x; its ranks start again in the same job without n1 after 20 s", None, "crashed: x"),
        ("crashed: it is requeued; cancelled by scancel", None, "crashed: it is requeued; cancelled by scancel"),
    ],
)
def test_what_happens_next_is_told_apart_from_why_it_ended(sentence: str, next_step: str | None, why: str) -> None:
    assert why_of(sentence, next_step) == why


def test_a_preemption_or_a_cancellation_wins_over_a_hang() -> None:
    preempted = decide_outcome(Evidence(exit_code=1, hang=HUNG, preempted_when_told=True), Policy())
    assert (preempted.reason, preempted.stalled) == (Reason.PREEMPTED, False)
    cancelled = decide_outcome(Evidence(exit_code=1, hang=HUNG, request=RunAction.CANCEL), Policy())
    assert cancelled.verdict == Verdict.END
