"""Whole training jobs on a real SLURM: submitted, interrupted in every way there is, and finished with the same bits."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.report.goodput.causes import Cause
from slurmtrain.system.process import lives
from tests.slurm.project import Project, Run, events, make_project
from tests.support.children import children
from tests.support.interrupted_run import check_time_adds_up
from tests.support.local_runs import assert_same_bits, assert_steps_join
from tests.support.slurm_cluster import Cluster

STEPS = 60
LONG = [f"train.steps={STEPS}", "+model.pause_s=0.15"]
PAIR = ["cluster.tasks_per_node=1"]  # one rank on each of two nodes, where it is no matter how many a node has
EVERY_TENTH = range(10, STEPS, 10)  # is saved while it goes on


@pytest.fixture(scope="module")
def project(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("work") / "project", sandbox)


@pytest.fixture(scope="module", autouse=True)
def time_limited(project: Project) -> Run:
    """Runs into its time limit on a node of its own, which takes minutes: submitted first, looked at last."""
    return project.submit(
        "cluster.nodes=1",
        "cluster.tasks_per_node=1",
        "cluster.time_limit_min=2",
        "cluster.signal_lead_s=30",
        "train.steps=150",
        "+model.pause_s=1.0",
        "train.eval_every=0",
        "checkpoint.every_steps=0",
        nodes="n3",
    )


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> Run:
    """What runs of 2 nodes x 2 ranks are compared with: never interrupted."""
    run = project.submit(f"train.steps={STEPS}", nodes="n0,n1")
    run.finish()
    return run


@pytest.fixture(scope="module")
def undisturbed_pair(project: Project) -> Run:
    """The same with one rank on each node."""
    run = project.submit(f"train.steps={STEPS}", *PAIR, nodes="n0,n1")
    run.finish()
    return run


def test_four_ranks_on_two_nodes_train_together(undisturbed: Run) -> None:
    """That such ranks learn what one process learns is shown by test_elastic.py, and for every layout by tests/parity."""
    (attempt,) = undisturbed.attempts()
    assert (attempt.world_size, attempt.nodes) == (4, ["n0", "n1"])
    losses = {record["step"]: record["loss"] for record in undisturbed.losses() if "loss" in record}
    assert list(losses) == list(range(1, STEPS + 1)) and losses[STEPS] < losses[1]


def wait_for_steps_of(run: Run, number: int) -> None:
    run.wait_for_attempt(number)
    run.wait_for_step((run.attempts()[number - 1].first_step or 0) + 3)


class Stopped(NamedTuple):
    """A run that was told to stop in every way, and what was seen of the data workers of its first attempt.

    Attributes:
        workers: how many its ranks had.
        lived: whether each was there some steps after it had got the signals of a stop.
        attempts: that the run had had by then.
    """

    run: Run
    workers: int
    lived: list[bool]
    attempts: int


@pytest.fixture(scope="module")
def stopped(project: Project) -> Stopped:
    """Preempted, and stopped by a signal to one rank, our verb, and SLURM's, one after the other, each after some steps."""
    run = project.submit(*LONG, "train.data_workers=2", nodes="n0,n1")
    run.wait_for_step(3)
    # What a rank starts by the way, to ask SLURM, is called otherwise.
    workers = [child for rank in run.rank_pids() for child in children(rank) if command(child) == command(rank)]
    for pid in workers:
        os.kill(pid, signal.SIGUSR2)
        os.kill(pid, signal.SIGTERM)
    run.wait_for_step(run.step() + 5)
    seen = Stopped(run, len(workers), [lives(pid) for pid in workers], len(run.attempts()))
    run.preempt_by_high()  # the whole step is signalled, workers too
    wait_for_steps_of(run, 2)
    os.kill(run.rank_pids()[3], signal.SIGUSR2)
    wait_for_steps_of(run, 3)
    run.cli("requeue", run.run_dir.id)
    wait_for_steps_of(run, 4)
    run.cluster.run(["scontrol", "requeue", run.job_id])
    run.finish()
    return seen


def test_data_workers_live_through_the_signals(stopped: Stopped) -> None:
    assert stopped.workers == 2 * 4
    assert all(stopped.lived)
    assert stopped.attempts == 1  # the ranks were not told to stop: the signals were the workers'


def test_one_signalled_rank_stops_all_at_the_same_step(stopped: Stopped) -> None:
    second = stopped.run.attempts()[1]
    said = [(stopped.run.run_dir.attempt(2).path / f"rank-{rank}.log").read_text() for rank in range(4)]
    assert all(f"leaving after step {second.last_step}" in log for log in said)
    assert second.exit_code == 75


def test_stopped_in_every_way_it_finishes_with_the_same_bits(stopped: Stopped, undisturbed: Run) -> None:
    """A preemption, a signal to one rank, the verb `requeue`, and SLURM's."""
    run = stopped.run
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "asked", "asked", "requeued", "finished"]
    assert_steps_join(run, total=STEPS)
    assert_same_bits(run, undisturbed)
    spent = check_time_adds_up(run.run_dir)
    assert spent.interruptions == {"preempted": 1, "asked": 2, "requeued": 1}
    assert all(spent.lost_s[why] > 0 for why in spent.interruptions)
    assert Cause.REDONE not in spent.seconds and spent.seconds[Cause.QUEUE] > 0


@pytest.fixture(scope="module")
def broken(project: Project) -> Run:
    """A run one rank of which is killed, and in the next attempt all ranks of a node are stopped, each after a checkpoint."""
    limits = ["watchdog.min_s=5", "watchdog.factor=2", "watchdog.save_s=20", "watchdog.evaluation_s=20"]
    run = project.submit(*LONG, *limits, nodes="n0,n1")  # they may be stopped while they save or evaluate
    run.wait_for_checkpoint()
    os.kill(run.rank_pids()[1], signal.SIGKILL)
    run.wait_for_attempt(2)
    saved = run.attempts()[0].committed_step or 0
    run.wait_until(lambda: step_of(committed(run.run_dir.checkpoints)[-1]) > saved, "saved again")
    for pid in run.rank_pids()[2:]:
        os.kill(pid, signal.SIGSTOP)
    run.wait_for_attempt(3)
    run.finish()
    return run


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_no_more(broken: Run) -> None:
    """And not the job: the ranks start again in it."""
    first, second = broken.attempts()[:2]
    assert (first.reason, first.verdict, first.failed_on) == ("crash", "in-place", "n0"), first.sentence
    assert "Killed" in (first.sentence or "")
    assert second.first_step == first.committed_step in EVERY_TENTH
    assert [(each.job_id, each.restart_count) for each in (first, second)] == [(broken.job_id, 0)] * 2


def test_a_node_whose_ranks_are_stopped_is_named_and_training_goes_on_in_the_same_job(broken: Run) -> None:
    """No rank of that node could say so, or end them: the process beside them does, or SLURM where they had just begun."""
    second, third = broken.attempts()[1:]
    assert (second.reason, second.verdict, second.failed_on) == ("hang", "in-place", "n1"), second.sentence
    assert (second.sentence or "").startswith("hung: rank 2 on n1 ")
    assert "; rank 3 on n1 " in (second.sentence or "")
    page = (broken.run_dir.attempt(2).path / "hang.md").read_text()
    assert page.index("## Rank 3 on n1") < page.index("## Ranks that waited") < page.index("| 0 | n0 |")
    assert third.first_step == second.committed_step in EVERY_TENTH
    assert third.job_id == second.job_id and third.restart_count == 0


def test_what_breaks_a_run_changes_no_bit_and_its_time_is_told(broken: Run, undisturbed: Run) -> None:
    assert_same_bits(broken, undisturbed)
    spent = check_time_adds_up(broken.run_dir)
    assert spent.interruptions == {"crash": 1, "hang": 1} and spent.seconds[Cause.BETWEEN] > 0
    again = [(before.last_step or 0) > (after.first_step or 0) for before, after in pairwise(broken.attempts())]
    assert (spent.seconds.get(Cause.REDONE, 0.0) > 0) == any(again)
    assert 4 < spent.seconds[Cause.HUNG] < 60  # after 5 s at least, and then the processes beside them have to find out
    assert spent.lost_s["hang"] > spent.seconds[Cause.HUNG]


def test_all_ranks_killed_during_a_save_resume_from_the_checkpoint_before(
    undisturbed_pair: Run, project: Project, tmp_path: Path
) -> None:
    """The model's module, which is the user's, holds the second save just before its commit."""
    held = tmp_path / "held"
    (project.path / "holding.py").write_text(
        "import os, pathlib, time\n"
        "from paced import Paced\n"
        "from slurmtrain.checkpoint.store import commit\n"
        "original = commit.commit\n"
        f"held = pathlib.Path({str(held)!r})\n"
        "def hold(temporary, manifest, incarnation):\n"
        "    if manifest.step == 20 and not held.exists():\n"
        "        held.write_text(str(temporary))\n"
        "        time.sleep(600)\n"
        "    return original(temporary, manifest, incarnation)\n"
        "commit.commit = hold\n"
    )
    words = ["model._target_=holding.Paced", "requeue.in_place=false", *PAIR]
    run = project.submit(f"train.steps={STEPS}", *words, nodes="n0,n1")
    run.wait_until(held.exists, "saving")
    for pid in run.rank_pids():
        with contextlib.suppress(ProcessLookupError):  # srun was faster, after the first
            os.kill(pid, signal.SIGKILL)
    run.finish()
    tries = run.attempts()
    assert (tries[0].committed_step, tries[1].first_step) == (10, 10)
    assert [(each.verdict, each.restart_count) for each in tries] == [("requeue", 0), ("done", 1)]
    assert not Path(held.read_text()).exists()  # what the kill left behind is gone
    assert_same_bits(run, undisturbed_pair)


def test_a_dead_node_is_survived_on_other_nodes(undisturbed_pair: Run, project: Project) -> None:
    # time_limited has n3; n0 to n2 are free, and two of them are enough after one has died.
    run = project.submit(*LONG, *PAIR, "cluster.exclude=n3")
    run.wait_for_checkpoint()
    dead = run.attempts()[0].nodes[1]
    run.cluster.kill_node(dead)
    try:
        run.wait_for_attempt(2)
        first, second = run.attempts()[:2]
        assert first.reason == "node failure"
        assert dead not in second.nodes
        assert second.first_step == first.committed_step in EVERY_TENTH
        run.finish()
    finally:
        run.cluster.start_node(dead)
    assert_same_bits(run, undisturbed_pair)


def test_a_spare_node_takes_the_place_of_a_dead_one_in_the_same_job(undisturbed_pair: Run, project: Project) -> None:
    """Of one whose slurmd was killed: SLURM takes it for dead, and its ranks may run on for a while."""
    run = project.submit(*LONG, *PAIR, "cluster.spare_nodes=1", nodes="n[0-2]")
    run.wait_for_checkpoint()
    run.cluster.kill_node("n1", only_daemon=True)
    try:
        run.wait_for_attempt(2)
        first, second = run.attempts()[:2]
        assert (first.reason, first.verdict, first.failed_on) == ("node failure", "in-place", "n1")
        assert (first.nodes, second.nodes) == (["n0", "n1"], ["n0", "n2"])
        assert second.first_step == first.committed_step in EVERY_TENTH
        run.finish()
    finally:
        run.cluster.start_node("n1")
    assert [(each.job_id, each.restart_count) for each in run.attempts()] == [(run.job_id, 0)] * 2
    assert_same_bits(run, undisturbed_pair)


def test_a_restart_in_place_goes_on_from_the_copies_on_the_nodes(
    undisturbed_pair: Run, project: Project, tmp_path: Path
) -> None:
    """With one node's copy gone, from that of its neighbour; the run directory has no checkpoint yet.

    The ranks are those that have waited for it (requeue.standby_ranks).
    """
    copies = [f"checkpoint.local={tmp_path}", "checkpoint.local_every_steps=4", "checkpoint.every_steps=0"]
    run = project.submit(*LONG, *PAIR, *copies, "requeue.standby_ranks=true", nodes="n0,n1")
    run.wait_until(lambda: len(list(tmp_path.glob("*/*/n*/checkpoint_???????/COMPLETE"))) == 2, "copied")
    standby = run.run_dir.attempt(1).path / "standby.log"
    run.wait_until(lambda: standby.exists() and standby.read_text().count("ready\n") == 2, "ready for the next start")
    (of_n1,) = tmp_path.glob("*/*/n1")
    shutil.rmtree(of_n1)
    os.kill(run.rank_pids()[1], signal.SIGKILL)
    run.wait_for_attempt(2)
    of_second = [command(pid) for pid in run.rank_pids()]
    run.finish()
    first, second = run.attempts()
    assert (first.verdict, first.committed_step, second.job_id) == ("in-place", None, first.job_id)
    assert len(of_second) == 2
    assert all(b"--standby" in words for words in of_second)
    assert second.first_step
    assert second.first_step % 4 == 0
    assert "n1 had none: the parts came from the other nodes" in events(run, "restored")[0]["origin"]
    assert_same_bits(run, undisturbed_pair)
    assert list(tmp_path.iterdir()) == []


def test_scancel_and_cancel_by_verb_save_and_end(project: Project) -> None:
    """And the run does not come back by itself, but goes on where it was when it is resumed."""
    run = project.submit(*LONG, *PAIR, nodes="n0,n1")
    run.wait_for_step(8)
    run.cluster.run(["scancel", run.job_id])
    last = run.wait_for_end()
    run.cluster.wait_for(run.job_id, "CANCELLED")
    assert last.reason == "cancelled"
    assert last.committed_step == last.last_step
    assert last.last_step is not None and last.last_step >= 8
    assert len(run.attempts()) == 1
    assert "resume" in run.status()
    run.cli("resume", run.run_dir.id)
    wait_for_steps_of(run, 2)
    assert run.attempts()[1].first_step == last.last_step
    run.cli("cancel", run.run_dir.id)
    last = run.wait_for_end()
    assert (last.reason, last.verdict) == ("cancelled", "end")
    assert last.committed_step == last.last_step


def test_a_crash_loop_ends_after_the_budget_and_says_why(project: Project) -> None:
    (project.path / "broken.py").write_text(
        "from paced import Paced\n"
        "class Broken(Paced):\n"
        "    def forward(self, tokens):\n"
        "        raise ValueError('the seventh seal')\n"
    )
    run = project.submit(
        "model._target_=broken.Broken",
        "cluster.nodes=1",
        "cluster.tasks_per_node=1",
        "requeue.max_attempts_without_progress=2",
        nodes="n2",  # which therefore cannot be left out after the second attempt
    )
    run.wait_for_end()
    assert [attempt.reason for attempt in run.attempts()] == ["crash", "crash"]
    run.cluster.wait_for(run.job_id, "FAILED")
    status = run.status()
    assert "the seventh seal" in status
    assert "2 attempts in a row without a new checkpoint" in status


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def test_a_rank_without_handlers_yet_survives_the_signal_and_obeys_it(project: Project, tmp_path: Path) -> None:
    """The interpreter of the first attempt takes its time, as one on a slow file system does."""
    slow = tmp_path / "slow-python"
    started, preempted = tmp_path / "started", tmp_path / "preempted"
    slow.write_text(
        f"#!/bin/bash\ntouch {started}.$SLURM_PROCID; until [ -e {preempted} ]; do sleep 0.05; done\n"
        f'exec {sys.executable} "$@"\n'
    )
    slow.chmod(0o755)
    run = project.submit("train.steps=20", *PAIR, f"cluster.python={slow}", nodes="n0,n1")
    run.wait_until(lambda: all(Path(f"{started}.{rank}").exists() for rank in range(2)), "started")
    run.cluster.submit_high(nodes=["n0", "n1"], seconds=0.1)
    run.cluster.wait_for(run.job_id, lambda job: job["PreemptTime"] != "None")
    preempted.touch()
    run.finish()
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
    assert events(run, "restored") == []  # told to stop before the first step: nothing to save, nothing lost


def test_where_the_jobs_own_signal_announces_preemption_it_works_the_same(user_signal: Cluster, tmp_path: Path) -> None:
    run = make_project(tmp_path / "project", user_signal).submit(*LONG, "cluster.nodes=1", "cluster.tasks_per_node=1")
    run.wait_for_step(7)
    run.preempt_by_high()
    run.finish()
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
    assert run.attempts()[0].cause == "SIGUSR2"
    assert_steps_join(run, total=STEPS)


def test_the_time_limit_saves_requeues_and_finishes(time_limited: Run) -> None:
    time_limited.wait_for_attempt(2, timeout_s=600)
    time_limited.finish()
    assert [attempt.reason for attempt in time_limited.attempts()[:-1]] == ["time limit"] * (
        len(time_limited.attempts()) - 1
    )
    assert len(time_limited.attempts()) >= 2
    assert_steps_join(time_limited, total=150)
