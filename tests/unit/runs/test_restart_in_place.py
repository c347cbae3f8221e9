"""Restart in place, decided: whether the ranks start again in the same job, on which nodes, after which pause."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.choices import RequeueMode
from slurmtrain.config.compose import compose
from slurmtrain.config.schema import ClusterConfig, Config, RequeueConfig
from slurmtrain.config.validate import validate
from slurmtrain.errors import ConfigError
from slurmtrain.runs import attempt_history, attempts, requests
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.evidence import Evidence, Policy
from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.runs.node_fault import nodes_of_next_start
from slurmtrain.runs.outcome import (
    IN_PLACE_LEAST_S,
    PAUSES_S,
    QUICK_FAILURE_S,
    AttemptOutcome,
    decide_after_pause,
    decide_outcome,
)
from slurmtrain.runs.reasons import Reason, RunAction, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.srun_log import node_of_killed_tasks
from slurmtrain.runtime import in_place
from slurmtrain.runtime.finish_attempt import finish_attempt
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.slurm.node_states import is_dead, is_usable
from tests.support.runs import add_attempt

NODES = ("n0", "n1")
RUNNING = JobFacts("RUNNING", "None", start_time=1000.0, nodes="n[0-1]")
PREEMPTED = dataclasses.replace(RUNNING, preempt_time=1500.0)
CANCELLED = dataclasses.replace(RUNNING, state="COMPLETING")
REQUEUED = dataclasses.replace(RUNNING, state="COMPLETING", restarts=1)
TIMED_OUT = dataclasses.replace(CANCELLED, reason="TimeLimit")
POLICY = Policy(in_place=True, node_counts=(2,))
CRASH = Evidence(137, killed="n1: task 3: Killed", failed_on="n1", facts=RUNNING, usable_nodes=NODES, lasted_s=500.0)


def crash(**changes: Any) -> Evidence:
    return dataclasses.replace(CRASH, **changes)


@pytest.mark.parametrize(
    ("why", "evidence", "verdict"),
    [
        ("a rank was killed", crash(), "in-place"),
        ("a rank raised an error", crash(killed=None, failure=(1, "rank 0: boom")), "in-place"),
        ("the last start was good, and a node died", crash(dead_nodes=("n2",)), "in-place"),
        ("saved and told to stop", crash(exit_code=75, killed=None, said="stopped", cause="SIGTERM"), "requeue"),
        ("preempted", crash(facts=PREEMPTED), "requeue"),
        ("cancelled by scancel", crash(facts=CANCELLED), "end"),
        ("cancelled by a person", crash(request="cancel"), "end"),
        ("stopped by a person", crash(request="stop"), "end"),
        ("a person wants it to leave its nodes", crash(request="preempt"), "requeue"),
        ("a person wants it to be requeued", crash(request="requeue"), "requeue"),
        ("numbers that broke", crash(killed=None, failure=(78, "rank 0: step 3 has loss nan"), diverged=True), "end"),
        ("the config is wrong", crash(failure=(78, "rank 0: no such file")), "end"),
        ("a newer job goes on", crash(superseded="attempt 3 in job 12 goes on with this run"), "end"),
        ("SLURM starts it again already", crash(facts=REQUEUED), "restarting"),
        ("the budget is spent", crash(stalled_before=2), "end"),
        ("SLURM says nothing of the job", crash(facts=None), "requeue"),
        ("SLURM says nothing of the nodes", crash(usable_nodes=()), "requeue"),
        ("too few nodes are left", crash(usable_nodes=("n0",), dead_nodes=("n1",)), "requeue"),
        ("killed processes are still there", crash(step_left=True), "requeue"),
        ("no time is left", crash(seconds_to_limit=120.0 + 90.0 + IN_PLACE_LEAST_S - 1), "requeue"),
        ("time enough is left", crash(seconds_to_limit=120.0 + 90.0 + IN_PLACE_LEAST_S), "in-place"),
        ("a set-up failed on a node", crash(killed=None, set_up="no GPU", trained_before=True), "requeue"),
        (
            "it cannot start on a node, and there is no other",
            crash(killed=None, failure=(78, "rank 1: no GPU"), trained_before=True),
            "requeue",
        ),
    ],
)
def test_ranks_start_again_in_the_same_job_after_a_crash_and_only_then(
    why: str, evidence: Evidence, verdict: str
) -> None:
    outcome = decide_outcome(evidence, POLICY)
    assert outcome.verdict == verdict, outcome.sentence
    assert (outcome.nodes == NODES) == (verdict == "in-place")
    assert decide_outcome(evidence, Policy()).verdict != "in-place"


@pytest.mark.parametrize("action", [RunAction.PREEMPT, RunAction.REQUEUE])
def test_a_run_that_crashes_when_it_is_asked_to_leave_leaves(action: RunAction) -> None:
    outcome = decide_outcome(crash(request=action), POLICY)
    said = f"crashed: n1: task 3: Killed; meanwhile asked to stop by `{action} RUN`; it is requeued"
    assert (outcome.reason, outcome.verdict, outcome.sentence) == (Reason.CRASH, "requeue", said)
    stays = decide_outcome(crash(request=action), dataclasses.replace(POLICY, mode=RequeueMode.OFF))
    assert stays.verdict == "end" and "it is not requeued" in stays.sentence


def test_a_node_without_a_gpu_is_replaced_by_a_spare_one() -> None:
    evidence = crash(
        killed=None,
        failure=(78, "rank 1: no GPU"),
        failed_on="n1",
        trained_before=True,
        usable_nodes=("n0", "n1", "n2"),
    )
    outcome = decide_outcome(evidence, POLICY)
    assert (outcome.verdict, outcome.reason, outcome.nodes) == ("in-place", "bad node", ("n0", "n2"))
    assert outcome.sentence.endswith("start again in the same job without n1")


def test_nodes_that_the_checks_before_training_find_unfit_are_replaced_by_spare_ones_at_the_first_start() -> None:
    unfit = crash(
        killed=None,
        failure=(78, "rank 0: preflight, gpu_missing: n1: 7 GPUs are visible"),
        failed_on="n1",
        unfit_nodes=("n1", "n3"),
        usable_nodes=("n0", "n1", "n2", "n3"),
    )
    outcome = decide_outcome(unfit, POLICY)
    assert (outcome.verdict, outcome.nodes, outcome.bad_nodes) == ("in-place", ("n0", "n2"), ("n1", "n3"))
    outcome = decide_outcome(dataclasses.replace(unfit, usable_nodes=("n0", "n1", "n3")), POLICY)
    assert (outcome.verdict, outcome.bad_nodes) == ("requeue", ("n1", "n3"))


@pytest.mark.parametrize("mode", [RequeueMode.REQUEUE, RequeueMode.RESUBMIT, RequeueMode.CHAIN, RequeueMode.OFF])
def test_every_mode_starts_ranks_in_place_also_where_no_other_job_is_left(mode: RequeueMode) -> None:
    assert decide_outcome(CRASH, dataclasses.replace(POLICY, mode=mode, links_left=0)).verdict == "in-place"


def test_a_dead_node_is_what_the_attempt_failed_of() -> None:
    outcome = decide_outcome(crash(dead_nodes=("n1",), usable_nodes=("n0", "n2"), killed="n0: task 0: Killed"), POLICY)
    assert (outcome.reason, outcome.nodes) == (Reason.NODE_FAILURE, ("n0", "n2"))
    assert outcome.sentence.startswith("node n1 failed; ")


@pytest.mark.parametrize(
    ("allocated", "counts", "refused", "avoided", "chosen"),
    [
        ("abc", (2,), "", "", "ab"),
        ("abc", (2,), "", "a", "bc"),
        ("abc", (2,), "", "b", "ac"),
        ("abc", (2,), "", "ba", "ac"),  # of two that failed, the one that failed last is left out
        ("abc", (2,), "", "abc", "bc"),
        ("abc", (3,), "", "a", "abc"),  # without spare nodes, it has to do
        ("abc", (2,), "a", "", "bc"),
        ("abc", (2,), "ab", "", None),
        ("ab", (2,), "", "x", "ab"),
        ("a", (2,), "", "", None),
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
        ({"lasted_s": 3.0, "stalled_before": 2}, PAUSES_S[2]),
        ({"lasted_s": 3.0, "stalled_before": 8}, PAUSES_S[-1]),
        ({"lasted_s": QUICK_FAILURE_S, "stalled_before": 2}, 0.0),  # it worked for a while
        ({"lasted_s": 3.0, "stalled_before": 2, "progressed": True}, 0.0),
    ],
)
def test_attempts_that_fail_at_once_follow_each_other_ever_more_slowly(changes: dict[str, Any], wait_s: float) -> None:
    outcome = decide_outcome(crash(**changes), dataclasses.replace(POLICY, max_attempts_without_progress=20))
    assert (outcome.verdict, outcome.wait_s) == ("in-place", wait_s)
    assert (f"after {wait_s:.0f} s" in outcome.sentence) == bool(wait_s)


# The pause.

WAITING = AttemptOutcome(
    Reason.CRASH,
    Verdict.IN_PLACE,
    "crashed: x",
    "its ranks start again in the same job",
    nodes=NODES,
    wait_s=5.0,
    stalled=True,
)


@pytest.mark.parametrize(
    ("request_", "facts", "verdict", "said"),
    [
        (None, RUNNING, "in-place", "its ranks start again"),
        ("preempt", RUNNING, "requeue", "crashed: x; then asked to stop by `preempt RUN`; it is requeued"),
        ("requeue", RUNNING, "requeue", "crashed: x; then asked to stop by `requeue RUN`; it is requeued"),
        ("preempt", PREEMPTED, "requeue", "crashed: x; then preempted; it is requeued"),
        ("cancel", RUNNING, "end", "crashed: x; then cancelled by `cancel RUN`"),
        ("stop", RUNNING, "end", "crashed: x; then stopped by the file `stop`"),
        ("cancel", CANCELLED, "end", "crashed: x; then cancelled by `cancel RUN`"),
        (None, CANCELLED, "end", "crashed: x; then cancelled by scancel"),
        (None, PREEMPTED, "requeue", "crashed: x; then preempted; it is requeued"),
        (None, REQUEUED, "restarting", "crashed: x; SLURM starts it again"),
        (None, TIMED_OUT, "requeue", "crashed: x; it is requeued"),
        (None, None, "requeue", "crashed: x; it is requeued"),
    ],
)
def test_what_comes_during_the_pause_decides(
    request_: str | None, facts: JobFacts | None, verdict: str, said: str
) -> None:
    outcome = decide_after_pause(WAITING, CRASH, POLICY, request=request_, facts=facts)
    assert outcome.verdict == verdict and said in outcome.sentence
    assert outcome.reason is Reason.CRASH and outcome.stalled  # it used up the budget, whatever came after it
    assert bool(outcome.nodes) == (verdict == "in-place")


def test_what_comes_during_the_pause_cuts_nothing_off_the_cause() -> None:
    """Also where the cause has a "; " of its own, as that of a hang does."""
    why = "hung: rank 1 on n1 did not come; 3 other ranks waited"
    hung = dataclasses.replace(WAITING, why=why, next_step=None)
    cancelled = decide_after_pause(hung, CRASH, POLICY, request="cancel", facts=RUNNING)
    assert (cancelled.sentence, cancelled.next_step) == (f"{why}; then cancelled by `cancel RUN`", None)
    preempted = decide_after_pause(hung, CRASH, POLICY, request=None, facts=PREEMPTED)
    assert (preempted.why, preempted.next_step) == (f"{why}; then preempted", "it is requeued")


class Slurm(SlurmClient):
    """A cluster that says one thing after the other of a job; the last one for ever."""

    def __init__(self, *facts: JobFacts | None, states: dict[str, str] | None = None, lives: int = 0):
        self.facts, self.states, self.lives = list(facts), states or {"n0": "mixed", "n1": "mixed"}, lives

    def job(self, job_id: str) -> JobFacts | None:
        return self.facts.pop(0) if len(self.facts) > 1 else self.facts[0]

    def node_states(self, nodes: str) -> dict[str, str]:
        return self.states

    def step_lives(self, step_id: str) -> bool:
        self.lives -= 1
        return self.lives >= 0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name, value in {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n0", "SLURM_RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    return create_run_dir(tmp_path, "train")


def pause(run: RunDir, client: SlurmClient, during: Callable[[], object] = lambda: None) -> tuple[AttemptOutcome, int]:
    """What `await_next_start` returns, and how often it has waited, without waiting."""
    waits = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        during()
        return len(waits) > 9

    attempt = add_attempt(run, job_id="7", verdict="in-place", reason="crash", sentence=WAITING.sentence)
    outcome = in_place.await_next_start(run, attempt, WAITING, CRASH, POLICY, client, wait)
    record = attempts.read_attempt(run, attempt.number)
    assert (record.verdict, record.sentence, record.why) == (outcome.verdict, outcome.sentence, outcome.why)
    return outcome, len(waits)


def test_a_signal_ends_the_pause(run: RunDir) -> None:
    assert pause(run, Slurm(RUNNING)) == (WAITING, 10)


@pytest.mark.parametrize("facts", [CANCELLED, PREEMPTED, REQUEUED, None])
def test_what_slurm_says_during_the_pause_ends_it(run: RunDir, facts: JobFacts | None) -> None:
    outcome, waits = pause(run, Slurm(RUNNING, RUNNING, facts))
    assert outcome.verdict != "in-place" and waits == 3


@pytest.mark.parametrize("action", [RunAction.PREEMPT, RunAction.REQUEUE])
def test_a_run_that_is_asked_to_leave_between_two_attempts_leaves(run: RunDir, action: RunAction) -> None:
    outcome, waits = pause(run, Slurm(RUNNING), lambda: requests.write_request(run, action))
    assert (outcome.verdict, waits) == ("requeue", 1)


@pytest.mark.parametrize("action", [RunAction.CANCEL, RunAction.STOP])
def test_a_cancel_that_is_typed_between_two_attempts_ends_the_run(run: RunDir, action: RunAction) -> None:
    outcome, waits = pause(run, Slurm(RUNNING), lambda: requests.write_request(run, action))
    assert (outcome.verdict, waits) == ("end", 1)
    assert attempt_history.came_to_an_end(run, attempts.read_attempt(run, 1))


def test_the_file_stop_ends_the_run_between_two_attempts(run: RunDir) -> None:
    outcome, waits = pause(run, Slurm(RUNNING), run.stop_switch.touch)
    assert (outcome.verdict, waits) == ("end", 1) and not run.stop_switch.exists()


# The attempt's end, as the batch script has it judged.


def finish(run: RunDir, client: Slurm, monkeypatch: pytest.MonkeyPatch, **cluster: Any) -> AttemptOutcome:
    attempt = add_attempt(run, job_id="7", step_id="7.0", nodes=["n0", "n1"])
    run.attempt(attempt.number).srun_log.write_text("srun: error: n1: task 3: Killed\n")
    monkeypatch.setattr(in_place, "STEP_POLL_S", 0.0)
    monkeypatch.setattr(in_place, "REGISTRATION_POLL_S", 0.0)
    config = Config(cluster=ClusterConfig(nodes=2, **cluster))
    return finish_attempt(run, attempt.number, 137, config, client, can_start_again=True)


def test_the_record_of_a_crash_names_the_node_of_the_killed_rank(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finish(run, Slurm(RUNNING, lives=3), monkeypatch).verdict == "in-place"
    record = attempts.read_attempt(run, 1)
    assert (record.failed_on, record.verdict) == ("n1", "in-place")


@pytest.mark.parametrize(
    ("killed", "node"),
    [
        ("n1: task 3: Killed", "n1"),
        ("rack1-n02: tasks 0-3: Segmentation fault (core dumped)", "rack1-n02"),
        ("n[0-1]: tasks 0-3: Killed", None),
        ("n0,n2: tasks 0,3: Killed", None),
        ("io error and missing step on node 1", None),
    ],
)
def test_srun_names_the_node_of_killed_ranks_if_it_is_one(killed: str, node: str | None) -> None:
    assert node_of_killed_tasks(killed) == node


def test_ranks_start_again_in_place_although_the_signal_after_a_crash_made_rank_0_say_that_it_was_stopped(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program of the user's own does, whose other rank was killed."""
    monkeypatch.setattr(in_place, "STEP_POLL_S", 0.0)
    add_attempt(run, job_id="7", step_id="7.0", nodes=["n0", "n1"], said="stopped", cause="SIGTERM")
    record_failure(run.attempt(1), 1, Failure(137, "python ended with signal 9 (SIGKILL)"))
    config = Config(cluster=ClusterConfig(nodes=2))
    assert finish_attempt(run, 1, 137, config, Slurm(RUNNING), can_start_again=True).verdict == "in-place"


def test_ranks_do_not_start_beside_killed_ones_that_are_not_gone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "STEP_GONE_S", 0.05)
    assert finish(run, Slurm(RUNNING, lives=10**9), monkeypatch).verdict == "requeue"


@pytest.mark.parametrize(
    ("nodes", "shown", "reason", "verdict", "chosen"),
    [
        ("n[0-2]", {}, "crash", "in-place", ("n0", "n2")),
        ("n[0,2]", {}, "node failure", "in-place", ("n0", "n2")),  # SLURM has taken n1 out of the job
        ("n[0-2]", {"n1": "down*"}, "node failure", "in-place", ("n0", "n2")),
        ("n[0-2]", {"n1": "mixed*"}, "node failure", "in-place", ("n0", "n2")),
        ("n[0-2]", {"n2": "draining"}, "crash", "in-place", ("n0", "n1")),
        ("n[0-2]", {"n1": "down*", "n2": "draining"}, "node failure", "requeue", ()),
        ("n[1-2]", {}, "node failure", "requeue", ()),  # the node of the batch script itself
    ],
)
def test_what_slurm_says_of_the_nodes_decides_where_the_ranks_start_again(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    nodes: str,
    shown: dict[str, str],
    reason: str,
    verdict: str,
    chosen: tuple[str, ...],
) -> None:
    slurm = Slurm(dataclasses.replace(RUNNING, nodes=nodes), states={f"n{i}": "mixed" for i in range(3)} | shown)
    outcome = finish(run, slurm, monkeypatch, spare_nodes=1)
    assert (outcome.reason, outcome.verdict, outcome.nodes) == (reason, verdict, chosen)


def test_a_node_whose_slurmd_is_just_restarting_has_not_failed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    class Restarting(Slurm):
        looks = 0

        def node_states(self, nodes: str) -> dict[str, str]:
            self.looks += 1
            return {"n0": "mixed", "n1": "mixed*" if self.looks < 5 else "mixed"}

    outcome = finish(run, Restarting(RUNNING), monkeypatch)
    assert (outcome.reason, outcome.verdict, outcome.nodes) == ("crash", "in-place", ("n0", "n1"))


def test_a_script_of_an_earlier_version_is_never_told_to_start_ranks_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = add_attempt(run, job_id="7", nodes=["n0", "n1"])
    config = Config(cluster=ClusterConfig(nodes=2))
    assert finish_attempt(run, attempt.number, 1, config, Slurm(RUNNING)).verdict == "requeue"


@pytest.mark.parametrize(
    ("state", "usable", "dead"),
    [
        ("mixed", True, False),
        ("allocated", True, False),
        ("mixed-", True, False),
        ("maint", True, False),
        ("draining", False, False),
        ("inval", False, False),
        ("down*", False, True),
        ("allocated*", False, True),
        ("down", False, True),
        ("", True, False),
    ],
)
def test_the_states_of_nodes(state: str, usable: bool, dead: bool) -> None:
    assert (is_usable(state), is_dead(state)) == (usable, dead)


# The config.


@pytest.mark.parametrize(
    ("requeue", "starts"),
    [
        (RequeueConfig(), True),
        (RequeueConfig(mode=RequeueMode.CHAIN), True),
        (RequeueConfig(in_place=False), False),
        (RequeueConfig(mode=RequeueMode.OFF), False),  # what has stopped stays stopped
        (RequeueConfig(mode=RequeueMode.OFF, in_place=True), True),
    ],
)
def test_ranks_start_again_in_place_unless_the_config_says_otherwise(requeue: RequeueConfig, starts: bool) -> None:
    assert requeue.starts_in_place is starts


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["requeue.in_place=false"], "ranks start again in the same job only with requeue.in_place=true"),
        (["requeue=off"], "ranks start again in the same job only with requeue.in_place=true"),
        (["sweep.pack=2"], "would disagree on its nodes"),
        (["cluster.spare_nodes=-1"], "must be at least 0"),
        (["cluster=local"], "has only this machine"),
    ],
)
def test_spare_nodes_that_nothing_could_use_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validate(compose(["cluster=sandbox", "cluster.spare_nodes=1", *words]))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["requeue.in_place=false"], "only with requeue.in_place=true"),
        (["job=command", "job.command=true"], "job.kind=command has no ranks"),
        (["cluster=local"], "has no job in which ranks could wait"),
        (["cluster.spare_nodes=1"], "may start on other nodes"),
        (["cluster.nodes=1-2"], "may start on other nodes"),
        (["cluster.container.kind=apptainer", "cluster.container.image=a.sif"], "a second container"),
        (["sweep.pack=2"], "runs share the job's memory"),
    ],
)
def test_standby_ranks_that_could_not_take_over_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validate(compose(["cluster=sandbox", "requeue.standby_ranks=true", *words]))
