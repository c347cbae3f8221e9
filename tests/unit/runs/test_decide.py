"""Why an attempt ended and what comes next: one row for every way an attempt can end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.choices import RequeueMode
from slurmtrain.runs.decide import (
    IN_PLACE_LEAST_S,
    PAUSES_S,
    decide_abandoned_outcome,
    decide_outcome,
)
from slurmtrain.runs.evidence import Evidence, Policy, fault_of_node, nodes_of_next_start
from slurmtrain.runs.reasons import QUICK_FAILURE_S, Reason, Verdict
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.slurm.node_ledger import NodeEvent

# What SLURM 22.05 says of a job while its batch script still runs.
RUNNING = JobFacts("RUNNING", "None", restarts=0, start_time=1000.0)
PREEMPTED = JobFacts("RUNNING", "None", start_time=1000.0, preempt_time=1500.0)
PREEMPTED_BY_SLURM = JobFacts("COMPLETING", "None", restarts=1, start_time=1000.0, preempt_time=1500.0)
CANCELLED = JobFacts("COMPLETING", "None", start_time=1000.0)
REQUEUED = JobFacts("COMPLETING", "None", restarts=1, start_time=1000.0)
TIMED_OUT = JobFacts("COMPLETING", "TimeLimit", start_time=1000.0)
NODE_DOWN = JobFacts("COMPLETING", "NodeDown", start_time=1000.0)
OVER = JobFacts("CANCELLED", "None", start_time=1000.0)
PREEMPTED_LAST_TIME = JobFacts("RUNNING", "None", restarts=1, start_time=2000.0, preempt_time=1500.0)

# With PreemptMode=CANCEL, too. At the end of a grace time both its times are set anew.
IN_GRACE = JobFacts("RUNNING", "None", start_time=1000.0, preempt_time=1500.0, end_time=1510.0)
CANCELLED_IN_GRACE = JobFacts("COMPLETING", "None", start_time=1000.0, preempt_time=1500.0, end_time=1504.0)
GRACE_IS_OVER = JobFacts("COMPLETING", "None", start_time=1000.0, preempt_time=1510.0, end_time=1511.0)
GRACE_ENDS_NOW = JobFacts("COMPLETING", "None", start_time=1000.0, preempt_time=1510.0, end_time=1510.0)

HUNG = "rank 1 on n2 was stopped (SIGSTOP) in step 17, forward/backward; 3 other ranks waited"
STOPPED = {"exit_code": 75, "said": "stopped", "progressed": True}
SLURM_TERM = {**STOPPED, "cause": "SIGTERM"}
EARLY = {**STOPPED, "cause": "SIGUSR2", "seconds_left": 150.0}
SAVED_AND_SAID_0 = {"exit_code": 75, "said": "stopped", "program_code": 0}
KILLED = {"exit_code": 137, "killed": "n1: task 3: Killed"}

# What an attempt ends with: how it ended, evidence, a part of the sentence.
ENDINGS: dict[tuple[str, str], list[tuple[str, dict[str, Any], str]]] = {
    ("finished", "done"): [
        ("finished", {"exit_code": 0, "said": "finished", "facts": RUNNING}, "finished"),
        ("finished while being preempted", {"exit_code": 0, "said": "finished", "facts": PREEMPTED}, ""),
        ("finished after a cancel", {"exit_code": 0, "said": "finished", "request": "cancel"}, ""),
        ("finished by the file that says so, after a signal",
         {"exit_code": 0, "said": "finished", "cause": "SIGTERM", "program_code": 0, "finished_when": "done"},
         "done is there (job.finished_when)"),
        ("finished by the exit code that says so",
         {"exit_code": 0, "said": "finished", "program_code": 9, "finished_when": "9"},
         "exit code 9 (job.finished_when)"),
    ],
    ("crash", "requeue"): [
        ("srun says 0, and no rank has said anything", {"exit_code": 0}, "ended without a word"),
        ("one rank killed", {**KILLED, "facts": RUNNING}, "crashed: n1: task 3: Killed; it is requeued"),
        ("one rank killed after a signal", {**KILLED, "cause": "SIGTERM"}, "task 3: Killed"),
        ("user code raised", {"exit_code": 1, "failure": (1, "rank 2: ValueError: no"), "facts": RUNNING},
         "crashed: rank 2: ValueError: no"),
        ("user code raised while stopping",
         {"exit_code": 1, "cause": "SIGTERM", "failure": (1, "rank 0: OSError: full"), "facts": RUNNING},
         "OSError: full"),
        ("srun lost its ranks and says 0",
         {"exit_code": 0, "killed": "io error and missing step on node 0", "facts": RUNNING}, "missing step on node 0"),
        ("crashed without a word", {"exit_code": 139, "facts": RUNNING}, "exit code 139"),
    ],
    ("cancelled", "end"): [
        ("srun says 0, and no rank has said anything, cancelled", {"exit_code": 0, "facts": CANCELLED}, "scancel"),
        ("scancel, saved in time", {**SLURM_TERM, "facts": CANCELLED}, "scancel"),
        ("scancel in the grace time of a preemption",
         {**SLURM_TERM, "facts": CANCELLED_IN_GRACE, "told": IN_GRACE, "preempted_when_told": True}, "scancel"),
        ("`cancel RUN`", {**SLURM_TERM, "facts": CANCELLED, "request": "cancel"}, "`cancel RUN`"),
        ("`cancel RUN` of a local run", {**SLURM_TERM, "request": "cancel"}, "`cancel RUN`"),
        ("Ctrl-C", {**STOPPED, "cause": "SIGINT"}, "Ctrl-C"),
        ("a program saved and exited with 0, cancelled", {**SAVED_AND_SAID_0, "cause": "SIGTERM", "facts": CANCELLED},
         "scancel"),
        ("scancel in its second life", {**SLURM_TERM, "facts": REQUEUED, "restart_count": 1}, "scancel"),
        ("scancel, over by the time that SLURM is asked", {**KILLED, "facts": OVER}, "scancel"),
        ("a rank hangs, and a person cancels it", {"exit_code": 1, "hang": HUNG, "request": "cancel"}, ""),
    ],
    ("pruned", "end"): [
        ("pruned by its search", {**STOPPED, "request": "prune", "cause": "SIGUSR2"}, "by its search"),
        ("pruned while it was preempted", {**SLURM_TERM, "request": "prune", "facts": PREEMPTED}, "pruned"),
        ("pruned, and crashed as it left", {"exit_code": 1, "request": "prune"}, "pruned by its search"),
    ],
    ("preempted", "requeue"): [
        ("preempted, saved and left in time", {**SLURM_TERM, "facts": PREEMPTED}, "requeued"),
        ("preempted with the job's own signal", {**STOPPED, "cause": "SIGUSR2", "facts": PREEMPTED}, "preempted"),
        ("preempted, and SLURM does not answer afterwards", {**SLURM_TERM, "preempted_when_told": True}, "preempted"),
        ("preempted, grace time over, where SLURM cancels",
         {**KILLED, "cause": "SIGTERM", "facts": GRACE_IS_OVER, "told": IN_GRACE, "preempted_when_told": True},
         "preempted"),
        ("preempted, grace time over, both times in the same second",
         {**KILLED, "cause": "SIGTERM", "facts": GRACE_ENDS_NOW, "told": IN_GRACE, "preempted_when_told": True},
         "preempted"),
        ("a set-up that a preemption interrupted",
         {"exit_code": 78, "set_up": "set-up failed with code 143: sleep", "facts": PREEMPTED}, "preempted"),
        ("a program saved and exited with 0 when preempted",
         {**SAVED_AND_SAID_0, "cause": "SIGTERM", "facts": PREEMPTED},
         "exit code 0 after it was told to stop is not taken for finished"),
        ("told to stop, and nobody said that it has finished", {"exit_code": 0, "cause": "SIGTERM", "facts": PREEMPTED},
         ""),
        ("a rank hangs in a preemption", {"exit_code": 1, "hang": HUNG, "preempted_when_told": True}, ""),
    ],
    ("preempted", "restarting"): [
        ("preempted, grace time over", {**KILLED, "cause": "SIGTERM", "facts": PREEMPTED_BY_SLURM},
         "SLURM starts it again"),
        ("preempted, and put back into the queue by the time that SLURM is asked",
         {**SLURM_TERM, "facts": REQUEUED, "preempted_when_told": True}, "SLURM starts it again"),
    ],
    ("time limit", "requeue"): [
        ("early warning of the time limit", {**EARLY, "facts": RUNNING}, "time limit is near"),
        ("the warning reached another rank", {**EARLY, "cause": "another rank", "facts": RUNNING}, "near"),
        ("the clock gave the warning", {**STOPPED, "cause": "deadline"}, "near"),
        ("time limit hit while saving", {**KILLED, "cause": "SIGUSR2", "facts": TIMED_OUT}, "before"),
        ("a program saved and exited with 0 before the time limit",
         {**SAVED_AND_SAID_0, "cause": "SIGUSR2", "seconds_left": 150.0, "facts": RUNNING},
         "job.finished_when says when"),
    ],
    ("asked", "requeue"): [
        ("`preempt RUN`", {**SLURM_TERM, "facts": RUNNING, "request": "preempt"}, "asked to stop by `preempt RUN`"),
        ("`requeue RUN`", {**STOPPED, "cause": "SIGUSR2", "facts": RUNNING, "request": "requeue"}, "`requeue RUN`"),
        ("somebody's signal", {**SLURM_TERM, "facts": RUNNING}, "told to stop by SIGTERM"),
        ("somebody's USR2 long before the limit", {**EARLY, "seconds_left": 5000.0, "facts": RUNNING}, "SIGUSR2"),
        ("a command died of the signal", {"exit_code": 143, "cause": "SIGTERM"}, "SIGTERM"),
        ("exit code 0 without the file that says finished",
         {**SAVED_AND_SAID_0, "finished_when": "done", "facts": RUNNING},
         "wants to be started again (its program ended with exit code 0, but done is not there"),
        ("an old preemption is not this one's", {**SLURM_TERM, "facts": PREEMPTED_LAST_TIME, "restart_count": 1},
         "SIGTERM"),
        ("SLURM cannot be asked", {**SLURM_TERM, "facts": None}, "SIGTERM"),
    ],
    ("requeued", "restarting"): [("scontrol requeue", {**SLURM_TERM, "facts": REQUEUED}, "scontrol requeue")],
    ("node failure", "restarting"): [
        ("a node died", {"exit_code": 143, "facts": REQUEUED}, "a node failed"),
        ("a node died, srun saw it", {**KILLED, "facts": REQUEUED}, "a node failed"),
    ],
    ("config", "end"): [
        ("config error", {"exit_code": 78, "failure": (78, "rank 0: no GPU")}, "no GPU"),
        ("a set-up that fails", {"exit_code": 78, "set_up": "set-up failed with code 1: x"}, "code 1: x"),
        ("config error after it has trained",
         {"exit_code": 78, "failure": (78, "rank 0: no such set"), "trained_before": True, "trained": True},
         "no such set"),
        ("exit code 78 alone", {"exit_code": 78}, "exit code 78"),
    ],
    ("bad node", "requeue"): [
        ("a node on which it cannot start, though it has trained elsewhere",
         {"exit_code": 78, "failure": (78, "rank 0: no GPU"), "failed_on": "n2", "trained_before": True,
          "facts": RUNNING}, "the fault of n2"),
        ("a set-up that fails, though it has worked elsewhere",
         {"exit_code": 78, "set_up": "set-up failed with code 1: module", "failed_on": "n2", "trained_before": True},
         "set-up failed with code 1: module (the fault of n2"),
    ],
    ("diverged", "end"): [
        ("numbers that broke before it had trained again: no node's fault",
         {"exit_code": 78, "failure": (78, "rank 0: step 7 has loss nan"), "failed_on": "n2", "trained_before": True,
          "diverged": True}, "diverged: rank 0: step 7 has loss nan"),
    ],
    ("superseded", "end"): [
        ("a newer job is at work for the run",
         {"exit_code": 1, "failure": (1, "rank 0: may not commit"),
          "superseded": "attempt 3 in job 12 goes on with this run", "facts": RUNNING},
         "superseded: attempt 3 in job 12 goes on"),
    ],
    ("hang", "requeue"): [
        ("a rank hangs", {**KILLED, "hang": HUNG, "failed_on": "n2"}, f"hung: {HUNG}; it is requeued"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("end", "evidence", "sentence"),
    [pytest.param(end, *row[1:], id=row[0]) for end, rows in ENDINGS.items() for row in rows],
)
def test_every_end_has_its_reason_and_its_consequence(
    end: tuple[str, str], evidence: dict[str, Any], sentence: str
) -> None:
    outcome = decide_outcome(Evidence(**evidence), Policy())
    assert (outcome.reason, outcome.verdict) == end
    assert sentence in outcome.sentence


# The budget.

BOOM = {"exit_code": 1, "failure": (1, "rank 0: boom"), "facts": RUNNING}
AT_THE_CLOCK = {**STOPPED, "progressed": False, "cause": "deadline"}
WANTS_MORE = {"exit_code": 75, "said": "stopped"}


@pytest.mark.parametrize(
    ("budget", "evidence", "verdict"),
    [
        (3, {**BOOM, "stalled_before": 1}, "requeue"),
        (3, {**BOOM, "stalled_before": 2}, "end"),
        (1, BOOM, "end"),
        (3, {**BOOM, "stalled_before": 5, "progressed": True}, "requeue"),
        (3, {**AT_THE_CLOCK, "stalled_before": 2}, "end"),
        # A program with checkpoints of its own may reach the time limit every day.
        (3, {**AT_THE_CLOCK, "stalled_before": 9, "progress_visible": False}, "requeue"),
        (3, {**WANTS_MORE, "stalled_before": 2}, "end"),
        (3, {**BOOM, "stalled_before": 1, "alike_before": True, "lasted_s": 5.0, "trained_before": True}, "requeue"),
        (3, {**BOOM, "stalled_before": 1, "alike_before": True, "lasted_s": QUICK_FAILURE_S}, "requeue"),
        # What is not the run's own fault
        (3, {**SLURM_TERM, "progressed": False, "facts": PREEMPTED, "stalled_before": 9}, "requeue"),
        (3, {**SLURM_TERM, "progressed": False, "facts": PREEMPTED_BY_SLURM, "stalled_before": 9}, "restarting"),
        # A node that fails under a run without progress may be the run's work.
        (1, {"exit_code": 143, "facts": NODE_DOWN}, "end"),
        (1, {"exit_code": 143, "facts": NODE_DOWN, "progressed": True}, "requeue"),
        (1, {"exit_code": 137, "hang": HUNG}, "end"),
    ],
)
def test_attempts_without_progress_that_end_by_their_own_fault_end_a_run_with_its_budget(
    budget: int, evidence: dict[str, Any], verdict: str
) -> None:
    outcome = decide_outcome(Evidence(**evidence), Policy(max_attempts_without_progress=budget))
    assert outcome.verdict == verdict
    assert ("giving up" in outcome.sentence) == (verdict == "end")


# A program of the user's own may show no progress at all.

UNSEEN = {"progress_visible": False, "program_code": 1, "facts": RUNNING}
LONG, SHORT = {**UNSEEN, "lasted_s": 7200.0}, {**UNSEEN, "lasted_s": 60.0}
AT_THE_LIMIT = {**WANTS_MORE, "cause": "SIGUSR2", "seconds_left": 60.0}
TOLD_BY_NOBODY = {**WANTS_MORE, "cause": "SIGTERM", "program_code": 0}

EFFORTS = [
    # how it ended, evidence -> uses up the budget, that of long attempts, was long
    ("a short crash", {**SHORT, **BOOM}, (True, False, False)),
    ("a crash after hours", {**LONG, **BOOM}, (False, True, True)),
    ("a crash after hours, its progress is visible", {**LONG, **BOOM, "progress_visible": True}, (True, False, False)),
    ("a chunk done in a minute, and not reported", {**SHORT, **WANTS_MORE, "program_code": 75}, (True, False, False)),
    ("a chunk of hours, not reported", {**LONG, **WANTS_MORE, "program_code": 75}, (False, True, True)),
    ("a short time limit, from scratch each time", {**SHORT, **AT_THE_LIMIT}, (False, True, True)),
    ("the time limit, with progress", {**LONG, **AT_THE_LIMIT, "progressed": True}, (False, False, True)),
    ("exit code 0 after a TERM of nobody's, in a minute", {**SHORT, **TOLD_BY_NOBODY}, (True, False, False)),
    ("the same on request", {**SHORT, **TOLD_BY_NOBODY, "request": "preempt"}, (False, False, False)),
    ("the same in a preemption", {**SHORT, **TOLD_BY_NOBODY, "facts": PREEMPTED}, (False, False, False)),
]


@pytest.mark.parametrize(("evidence", "effort"), [row[1:] for row in EFFORTS], ids=[row[0] for row in EFFORTS])
def test_what_uses_up_which_budget(evidence: dict[str, Any], effort: tuple[bool, bool, bool]) -> None:
    outcome = decide_outcome(Evidence(**evidence), Policy())
    assert (outcome.stalled, outcome.unseen, outcome.lasted) == effort
    assert outcome.verdict == Verdict.REQUEUE


@pytest.mark.parametrize("ending", [BOOM, AT_THE_LIMIT, {**WANTS_MORE, "program_code": 75}])
def test_a_program_that_shows_no_progress_is_told_of_it_each_time_and_does_not_go_on_for_ever(
    ending: dict[str, Any],
) -> None:
    early, late = (decide_outcome(Evidence(**{**LONG, **ending}, unseen_before=n), Policy()) for n in (3, 9))
    assert early.verdict == Verdict.REQUEUE and "there is no sign of progress (4 of 10 such" in early.sentence
    assert late.verdict == Verdict.END and "giving up (requeue.max_unseen_attempts)" in late.sentence
    assert "slurmtrain progress STEP" in early.sentence and "slurmtrain progress STEP" in late.sentence


# Where SLURM does not requeue: the same reasons, other consequences.

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
        ({**EARLY, "facts": RUNNING}, "time limit"),
        ({"exit_code": 143, "facts": NODE_DOWN}, "node failure"),
        (KILLED, "crash"),
    ],
)
def test_each_mode_goes_on_in_its_own_way_and_says_so(mode: str, evidence: dict[str, Any], reason: str) -> None:
    policy, verdict, words = GOES_ON[mode]
    outcome = decide_outcome(Evidence(**evidence), policy)
    assert (outcome.reason, outcome.verdict) == (reason, verdict)
    assert words in outcome.sentence


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
        if each.verdict not in (Verdict.DONE, Verdict.END):
            assert each.next_step is not None


ONLY_LOST = "rank 0: lost its connection to another rank"
VICTIM = {"exit_code": 1, "failure": (1, ONLY_LOST), "only_victims": True}
DEAD = (Reason.NODE_FAILURE, "node n1 failed")
NO_WORD = f"a rank ended without a word: its node failed, or it was killed ({ONLY_LOST})"
KILLED_1, RAISED_1 = (Reason.CRASH, "crashed: n1: task 1: Killed"), (Reason.CRASH, "crashed: rank 1: ValueError: x")
LOST_NODES: dict[str, tuple[dict[str, Any], tuple[Reason, str], tuple[Reason, str]]] = {
    # evidence -> reason and why by the batch script, also before SLURM's record of the job says so; and by the next start,
    # if SLURM was faster
    "srun says so": ({"exit_code": 1, "lost_node": "n1"}, DEAD, DEAD),
    "srun is gone with its node": (
        VICTIM, (Reason.CRASH, f"crashed: {ONLY_LOST}"), (Reason.NODE_FAILURE, NO_WORD)
    ),
    "a rank was killed, and the other one has lost it": (
        {**VICTIM, "failure": None, "killed": "n1: task 1: Killed"}, KILLED_1, KILLED_1
    ),
    "a rank failed by itself": ({"exit_code": 1, "failure": (1, "rank 1: ValueError: x")}, RAISED_1, RAISED_1),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST_NODES)
def test_a_node_that_failed_is_told_from_the_crash_of_those_that_have_lost_it(case: str) -> None:
    evidence, at_once, in_the_next_start = LOST_NODES[case]
    found = Evidence(**{"exit_code": 0, "facts": RUNNING, **evidence})
    outcome = decide_outcome(found, Policy())
    assert (outcome.reason, outcome.why) == at_once
    outcome = decide_abandoned_outcome(dataclasses.replace(found, facts=None), Policy())
    assert (outcome.reason, outcome.why) == in_the_next_start


# Restart in place.

IN_PLACE = Policy(in_place=True, node_counts=(2,))
NODES = ("n0", "n1")
ON_NODES = dataclasses.replace(RUNNING, nodes="n[0-1]")
CRASH = Evidence(137, killed="n1: task 3: Killed", failed_on="n1", facts=ON_NODES, usable_nodes=NODES, lasted_s=500.0)


NO_GPU = {"killed": None, "failure": (78, "rank 1: no GPU"), "trained_before": True}


def crash(**changes: Any) -> Evidence:
    return dataclasses.replace(CRASH, **changes)


@pytest.mark.parametrize(
    ("why", "evidence", "verdict"),
    [
        ("a rank was killed", crash(), "in-place"),
        ("a rank raised an error", crash(killed=None, failure=(1, "rank 0: boom")), "in-place"),
        ("the last start was good, and a node died", crash(dead_nodes=("n2",)), "in-place"),
        ("preempted", crash(facts=PREEMPTED), "requeue"),
        ("cancelled by scancel", crash(facts=CANCELLED), "end"),
        ("cancelled by a person", crash(request="cancel"), "end"),
        ("a person wants it to leave its nodes", crash(request="preempt"), "requeue"),
        ("the config is wrong", crash(failure=(78, "rank 0: no such file")), "end"),
        ("SLURM starts it again already", crash(facts=REQUEUED), "restarting"),
        ("the budget is spent", crash(stalled_before=2), "end"),
        ("SLURM says nothing of the job", crash(facts=None), "requeue"),
        ("SLURM says nothing of the nodes", crash(usable_nodes=()), "requeue"),
        ("too few nodes are left", crash(usable_nodes=("n0",), dead_nodes=("n1",)), "requeue"),
        ("killed processes are still there", crash(step_left=True), "requeue"),
        ("no time is left", crash(seconds_to_limit=120.0 + 90.0 + IN_PLACE_LEAST_S - 1), "requeue"),
        ("time enough is left", crash(seconds_to_limit=120.0 + 90.0 + IN_PLACE_LEAST_S), "in-place"),
        ("it cannot start on a node, and there is no other", crash(**NO_GPU), "requeue"),
    ],
)
def test_ranks_start_again_in_the_same_job_after_a_crash_and_only_then(
    why: str, evidence: Evidence, verdict: str
) -> None:
    outcome = decide_outcome(evidence, IN_PLACE)
    assert outcome.verdict == verdict, outcome.sentence
    assert (outcome.nodes == NODES) == (verdict == "in-place")
    assert decide_outcome(evidence, Policy()).verdict != "in-place"


def test_nodes_that_the_checks_before_training_find_unfit_are_replaced_by_spare_ones_at_the_first_start() -> None:
    said = (78, "rank 0: preflight, gpu_missing: n1: 7 GPUs are visible")
    unfit = crash(killed=None, failure=said, unfit_nodes=("n1", "n3"), usable_nodes=("n0", "n1", "n2", "n3"))
    outcome = decide_outcome(unfit, IN_PLACE)
    assert (outcome.verdict, outcome.nodes, outcome.bad_nodes) == ("in-place", ("n0", "n2"), ("n1", "n3"))
    outcome = decide_outcome(dataclasses.replace(unfit, usable_nodes=("n0", "n1", "n3")), IN_PLACE)
    assert (outcome.verdict, outcome.bad_nodes) == ("requeue", ("n1", "n3"))


@pytest.mark.parametrize(
    ("allocated", "counts", "refused", "avoided", "chosen"),
    [
        ("abc", (2,), "", "", "ab"),
        ("abc", (2,), "", "a", "bc"),
        ("abc", (2,), "", "ba", "ac"),  # of two that failed, the one that failed last is left out
        ("abc", (2,), "", "abc", "bc"),
        ("abc", (3,), "", "a", "abc"),  # without spare nodes, it has to do
        ("abc", (2,), "a", "", "bc"),
        ("abc", (2,), "ab", "", None),
        ("abc", (4, 2), "", "", "ab"),  # the best number of nodes for which there are enough
        ("abcd", (4, 2), "d", "", "ab"),
    ],
)
def test_a_node_that_failed_is_left_out_where_a_spare_one_can_take_its_place(
    allocated: str, counts: tuple[int, ...], refused: str, avoided: str, chosen: str | None
) -> None:
    found = nodes_of_next_start(list(allocated), counts, refused=set(refused), avoided=list(avoided))
    assert found == (None if chosen is None else tuple(chosen))


@pytest.mark.parametrize(
    ("changes", "wait_s"),
    [
        ({"lasted_s": 3.0}, 0.0),
        ({"lasted_s": 3.0, "stalled_before": 1}, PAUSES_S[1]),
        ({"lasted_s": 3.0, "stalled_before": 8}, PAUSES_S[-1]),
        ({"lasted_s": QUICK_FAILURE_S, "stalled_before": 2}, 0.0),  # it worked for a while
        ({"lasted_s": 3.0, "stalled_before": 2, "progressed": True}, 0.0),
    ],
)
def test_attempts_that_fail_at_once_follow_each_other_ever_more_slowly(changes: dict[str, Any], wait_s: float) -> None:
    outcome = decide_outcome(crash(**changes), dataclasses.replace(IN_PLACE, max_attempts_without_progress=20))
    assert (outcome.verdict, outcome.wait_s) == ("in-place", wait_s)
    assert (f"after {wait_s:.0f} s" in outcome.sentence) == bool(wait_s)


# Whose fault it is: the node's or the program's.

NOW = 1_000_000.0
FAST: dict[str, Any] = {"exit_code": 1, "failed_on": "n3", "lasted_s": 1.0, "run": "a", "number": 2, "now": NOW}
RAISED: dict[str, Any] = {**FAST, "failure": (1, "rank 2: ValueError: no"), "failed_nodes": ("n3",)}


AGAINST_A_NODE: list[tuple[Any, ...]] = [
    ("a crash in the first second", RAISED, Reason.CRASH, NodeEvent.CRASH),
    ("a crash after an hour", {**RAISED, "lasted_s": 3600.0}, Reason.CRASH, None),
    ("a crash after progress", {**RAISED, "progressed": True}, Reason.CRASH, None),
    ("ranks of two nodes that raise", {**RAISED, "failed_nodes": ("n3", "n4")}, Reason.CRASH, None),
    ("a segmentation fault", {**FAST, "killed": "n3: task 3: Segmentation fault"}, Reason.CRASH, NodeEvent.CRASH),
    ("a rank that was killed", {**FAST, "killed": "n3: task 3: Killed"}, Reason.CRASH, None),
    ("too little memory on the GPU", {**RAISED, "failure": (1, "rank 0: torch.OutOfMemoryError: CUDA out of memory.")},
     Reason.CRASH, None),
    ("a full disk", {**FAST, "disk_full": True}, Reason.CRASH, None),
    ("a program that was killed", {**RAISED, "failure": (137, "rank 0: python ended with signal 9 (SIGKILL)")},
     Reason.CRASH, None),
    ("a rank whose peer has gone",
     {**RAISED, "failure": (1, "rank 0: RuntimeError: Read error: Connection reset by peer")}, Reason.CRASH, None),
    ("broken memory of a GPU after an hour",
     {**RAISED, "lasted_s": 3600.0, "failure": (1, "rank 1: CUDA error: uncorrectable ECC error encountered")},
     Reason.CRASH, NodeEvent.HARDWARE),
    ("a program that has asked for no GPU",
     {**FAST, "lasted_s": 3600.0, "failure": (1, "rank 1: CUDA error: no CUDA-capable device is detected")},
     Reason.CRASH, None),
    ("a GPU that is gone",
     {**RAISED, "failure": (1, "rank 1: GPU has fallen off the bus"), "failed_nodes": ("n3", "n4")}, Reason.CRASH,
     NodeEvent.HARDWARE),
    ("a bus error after an hour", {**FAST, "lasted_s": 3600.0, "killed": "n3: task 3: Bus error"}, Reason.CRASH,
     NodeEvent.CRASH),
    ("a start that fails", {**FAST, "set_up": "set-up failed: module"}, Reason.BAD_NODE, NodeEvent.BAD_START),
    ("a rank that hangs", {**FAST, "hang": "rank 3 did not come", "lasted_s": 900.0}, Reason.HANG, NodeEvent.HANG),
    ("a node that failed", {**FAST, "lost_node": "n3"}, Reason.NODE_FAILURE, NodeEvent.LOST),
    ("a preemption", FAST, Reason.PREEMPTED, None),
]  # fmt: skip


@pytest.mark.parametrize(("what", "evidence", "reason", "event"), AGAINST_A_NODE)
def test_what_speaks_against_a_node(
    what: str, evidence: dict[str, Any], reason: Reason, event: NodeEvent | None
) -> None:
    fault = fault_of_node(Evidence(**evidence), reason)
    assert (fault.event if fault else None) == event, what
    assert fault is None or (fault.node, fault.run, fault.attempt, fault.time) == ("n3", "a", 2, NOW)
