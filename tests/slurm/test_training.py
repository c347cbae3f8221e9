"""Whole training jobs on a real SLURM: submitted, interrupted in every way there is, and finished with the same bits."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmtrain.report.goodput import Cause
from slurmtrain.system.process import lives
from tests.slurm.project import Project, Run, assert_same_bits, events, make_project
from tests.support.children import children
from tests.support.interrupted_run import check_time_adds_up
from tests.support.local_runs import assert_steps_join
from tests.support.slurm_cluster import Cluster

STEPS = 60
LONG = [f"train.steps={STEPS}", "+model.pause_s=0.15"]
EVERY_TENTH = range(10, STEPS, 10)  # is saved while it goes on


@pytest.fixture(scope="module")
def project(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("work") / "project", sandbox)


@pytest.fixture(scope="module", autouse=True)
def time_limited(project: Project) -> Run:
    """Runs into its time limit on a node of its own, which takes minutes: submitted first, looked at last."""
    return project.submit(
        "cluster.nodes=1",
        "cluster.tasks_per_node=2",
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
    """The run that all others are compared with: 2 nodes x 2 ranks, never interrupted."""
    run = project.submit(f"train.steps={STEPS}", nodes="n0,n1")
    run.finish()
    return run


@pytest.fixture
def interrupted(project: Project) -> Iterator[Run]:
    """The same run, slow enough to interfere with."""
    run = project.submit(*LONG, nodes="n0,n1")
    yield run
    project.cluster.run(["scancel", run.job_id], check=False)


def test_four_ranks_on_two_nodes_learn_what_one_process_learns(undisturbed: Run, project: Project) -> None:
    """Same global batch, same samples: the losses differ by the order of float additions only.

    A float32 sum of n terms in another order differs by up to about sqrt(n) * 2**-24 relative; n is at most the 512
    tokens of a batch here, so 1.4e-6 a step, and every step feeds the difference of the one before on. Without dropout,
    whose masks depend on the rank, 20 steps stay within 20 times that.
    """
    same = ["train.steps=20", "model.dropout=0.0", "cluster.time_limit_min=10"]
    four = project.submit(*same, nodes="n0,n1")
    one = project.submit(*same, "cluster.nodes=1", "cluster.tasks_per_node=1", nodes="n2")
    four.finish()
    one.finish()
    single = {record["step"]: record["loss"] for record in one.losses() if "loss" in record}
    spread = {record["step"]: record["loss"] for record in four.losses() if "loss" in record}
    assert single.keys() == spread.keys() == set(range(1, 21))
    tolerance = 20 * 512**0.5 * 2**-24
    assert all(abs(spread[step] - loss) <= tolerance * loss for step, loss in single.items())
    assert spread != single or spread[20] < spread[1]


def test_preempted_three_times_it_finishes_with_the_same_bits(undisturbed: Run, interrupted: Run) -> None:
    dice = random.Random(str(os.getpid()))
    for number in (1, 2, 3):
        interrupted.wait_for_attempt(number)
        start = interrupted.attempts()[-1].first_step or 0
        interrupted.wait_for_step(start + dice.randint(1, 8))
        interrupted.preempt_by_high()
    interrupted.finish()
    assert [attempt.reason for attempt in interrupted.attempts()] == ["preempted"] * 3 + ["finished"]
    assert_steps_join(interrupted, total=STEPS)
    assert_same_bits(interrupted, undisturbed)
    spent = check_time_adds_up(interrupted.run_dir)
    assert spent.interruptions == {"preempted": 3} and spent.lost_s["preempted"] > 0
    assert Cause.REDONE not in spent.seconds and spent.seconds[Cause.QUEUE] > 0


def wait_for_steps_of(run: Run, number: int) -> None:
    run.wait_for_attempt(number)
    run.wait_for_step((run.attempts()[number - 1].first_step or 0) + 3)


@pytest.fixture(scope="module")
def stopped(project: Project) -> Run:
    """The same run, stopped in three ways one after the other: a signal to one rank, our verb, and SLURM's."""
    run = project.submit(*LONG, nodes="n0,n1")
    run.wait_for_step(5)
    os.kill(run.rank_pids()[3], signal.SIGUSR2)
    wait_for_steps_of(run, 2)
    run.cli("requeue", run.run_dir.id)
    wait_for_steps_of(run, 3)
    run.cluster.run(["scontrol", "requeue", run.job_id])
    run.finish()
    return run


def test_one_signalled_rank_stops_all_at_the_same_step(stopped: Run) -> None:
    first = stopped.attempts()[0]
    said = [(stopped.run_dir.attempt(1).path / f"rank-{rank}.log").read_text() for rank in range(4)]
    assert all(f"leaving after step {first.last_step}" in log for log in said)
    assert first.exit_code == 75


def test_requeue_by_verb_and_from_outside_are_stops_like_any_other(stopped: Run, undisturbed: Run) -> None:
    assert [attempt.reason for attempt in stopped.attempts()][1:] == ["asked", "requeued", "finished"]
    assert_steps_join(stopped, total=STEPS)
    assert_same_bits(stopped, undisturbed)


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_no_more(
    undisturbed: Run, interrupted: Run
) -> None:
    """And not the job: the ranks start again in it."""
    interrupted.wait_for_checkpoint()
    os.kill(interrupted.rank_pids()[2], signal.SIGKILL)
    interrupted.wait_for_attempt(2)
    first, second = interrupted.attempts()[:2]
    assert (first.reason, first.verdict, first.failed_on) == ("crash", "in-place", "n1")
    assert "Killed" in (first.sentence or "")
    assert second.first_step == first.committed_step in EVERY_TENTH
    assert [(each.job_id, each.restart_count) for each in (first, second)] == [(interrupted.job_id, 0)] * 2
    interrupted.finish()
    assert len(interrupted.attempts()) == 2
    assert_same_bits(interrupted, undisturbed)
    spent = check_time_adds_up(interrupted.run_dir)
    assert (spent.seconds.get(Cause.REDONE, 0.0) > 0) == ((first.last_step or 0) > (second.first_step or 0))
    assert spent.interruptions == {"crash": 1} and spent.seconds[Cause.BETWEEN] > 0


def test_a_node_whose_ranks_are_stopped_is_named_and_training_goes_on_in_the_same_job(
    undisturbed: Run, project: Project
) -> None:
    """No rank of that node could say so, or end them: the process beside them does, or SLURM where they had just begun."""
    limits = ["watchdog.min_s=5", "watchdog.factor=2", "watchdog.save_s=20", "watchdog.evaluation_s=20"]
    run = project.submit(*LONG, *limits, nodes="n0,n1")  # they may be stopped while they save or evaluate
    run.wait_for_checkpoint()
    for pid in run.rank_pids()[2:]:
        os.kill(pid, signal.SIGSTOP)
    run.wait_for_attempt(2)
    first, second = run.attempts()[:2]
    assert (first.reason, first.verdict, first.failed_on) == ("hang", "in-place", "n1")
    assert (first.sentence or "").startswith("hung: rank 2 on n1 ")
    assert "; rank 3 on n1 " in (first.sentence or "")
    page = (run.run_dir.attempt(1).path / "hang.md").read_text()
    assert page.index("## Rank 3 on n1") < page.index("## Ranks that waited") < page.index("| 0 | n0 |")
    assert second.job_id == first.job_id
    run.finish()
    assert_same_bits(run, undisturbed)
    spent = check_time_adds_up(run.run_dir)
    assert 4 < spent.seconds[Cause.HUNG] < 60  # after 5 s at least, and then the processes beside them have to find out
    assert spent.lost_s["hang"] > spent.seconds[Cause.HUNG]


def test_all_ranks_killed_during_a_save_resume_from_the_checkpoint_before(
    undisturbed: Run, project: Project, tmp_path: Path
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
    words = ["model._target_=holding.Paced", "requeue.in_place=false"]
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
    assert_same_bits(run, undisturbed)


def test_a_dead_node_is_survived_on_other_nodes(undisturbed: Run, project: Project) -> None:
    # time_limited has n3; n0 to n2 are free, and two of them are enough after one has died.
    run = project.submit(*LONG, "cluster.exclude=n3")
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
    assert_same_bits(run, undisturbed)


def test_a_spare_node_takes_the_place_of_a_dead_one_in_the_same_job(undisturbed: Run, project: Project) -> None:
    """Of one whose slurmd was killed: SLURM takes it for dead, and its ranks may run on for a while."""
    run = project.submit(*LONG, "cluster.spare_nodes=1", nodes="n[0-2]")
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
    assert_same_bits(run, undisturbed)


def test_a_restart_in_place_goes_on_from_the_copies_on_the_nodes(
    undisturbed: Run, project: Project, tmp_path: Path
) -> None:
    """With one node's copy gone, from that of its neighbour; the run directory has no checkpoint yet.

    The ranks are those that have waited for it (requeue.standby_ranks).
    """
    copies = [f"checkpoint.local={tmp_path}", "checkpoint.local_every_steps=4", "checkpoint.every_steps=0"]
    run = project.submit(*LONG, *copies, "requeue.standby_ranks=true", nodes="n0,n1")
    run.wait_until(lambda: len(list(tmp_path.glob("*/*/n*/checkpoint_???????/COMPLETE"))) == 2, "copied")
    standby = run.run_dir.attempt(1).path / "standby.log"
    run.wait_until(lambda: standby.exists() and standby.read_text().count("ready\n") == 4, "ready for the next start")
    (of_n1,) = tmp_path.glob("*/*/n1")
    shutil.rmtree(of_n1)
    os.kill(run.rank_pids()[2], signal.SIGKILL)
    run.wait_for_attempt(2)
    of_second = [command(pid) for pid in run.rank_pids()]
    run.finish()
    first, second = run.attempts()
    assert (first.verdict, first.committed_step, second.job_id) == ("in-place", None, first.job_id)
    assert len(of_second) == 4
    assert all(b"--standby" in words for words in of_second)
    assert second.first_step
    assert second.first_step % 4 == 0
    assert "n1 had none: the parts came from the other nodes" in events(run, "restored")[0]["origin"]
    assert_same_bits(run, undisturbed)
    assert list(tmp_path.iterdir()) == []


def test_scancel_and_cancel_by_verb_save_and_end(interrupted: Run) -> None:
    """And the run does not come back by itself, but goes on where it was when it is resumed."""
    interrupted.wait_for_step(8)
    interrupted.cluster.run(["scancel", interrupted.job_id])
    last = interrupted.wait_for_end()
    interrupted.cluster.wait_for(interrupted.job_id, "CANCELLED")
    assert last.reason == "cancelled"
    assert last.committed_step == last.last_step
    assert last.last_step is not None and last.last_step >= 8
    assert len(interrupted.attempts()) == 1
    assert "resume" in interrupted.status()
    interrupted.cli("resume", interrupted.run_dir.id)
    wait_for_steps_of(interrupted, 2)
    assert interrupted.attempts()[1].first_step == last.last_step
    interrupted.cli("cancel", interrupted.run_dir.id)
    last = interrupted.wait_for_end()
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
        "requeue.max_attempts_without_progress=3",
        nodes="n2",  # which therefore cannot be left out after the second attempt
    )
    run.wait_for_end()
    assert [attempt.reason for attempt in run.attempts()] == ["crash", "crash", "crash"]
    run.cluster.wait_for(run.job_id, "FAILED")
    status = run.status()
    assert "the seventh seal" in status
    assert "3 attempts in a row without a new checkpoint" in status


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def test_data_workers_live_through_the_signals(undisturbed: Run, project: Project) -> None:
    run = project.submit(*LONG, "train.data_workers=2", nodes="n0,n1")
    run.wait_for_step(3)
    # What a rank starts by the way, to ask SLURM, is called otherwise.
    ranks = run.rank_pids()
    found = [child for rank in ranks for child in children(rank) if command(child) == command(rank)]
    assert len(found) == 2 * len(ranks) == 8
    for pid in found:
        os.kill(pid, signal.SIGUSR2)
        os.kill(pid, signal.SIGTERM)
    here = run.step()
    run.wait_for_step(here + 5)
    assert all(map(lives, found))
    assert len(run.attempts()) == 1  # the ranks were not told to stop: the signals were the workers'
    run.preempt_by_high()  # the whole step is signalled, workers too
    run.finish()
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
    assert_steps_join(run, total=STEPS)
    assert_same_bits(run, undisturbed)


def test_a_rank_without_handlers_yet_survives_the_signal_and_obeys_it(project: Project, tmp_path: Path) -> None:
    """The interpreter of the first attempt takes its time, as one on a slow file system does."""
    slow = tmp_path / "slow-python"
    started, preempted = tmp_path / "started", tmp_path / "preempted"
    slow.write_text(
        f"#!/bin/bash\ntouch {started}.$SLURM_PROCID; until [ -e {preempted} ]; do sleep 0.05; done\n"
        f'exec {sys.executable} "$@"\n'
    )
    slow.chmod(0o755)
    run = project.submit("train.steps=20", f"cluster.python={slow}", nodes="n0,n1")
    run.wait_until(lambda: all(Path(f"{started}.{rank}").exists() for rank in range(4)), "started")
    run.cluster.submit_high(nodes=["n0", "n1"], seconds=0.1)
    run.cluster.wait_for(run.job_id, lambda job: job["PreemptTime"] != "None")
    preempted.touch()
    run.finish()
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
    assert events(run, "restored") == []  # told to stop before the first step: nothing to save, nothing lost


def test_where_the_jobs_own_signal_announces_preemption_it_works_the_same(
    user_signal_sandbox: Cluster, undisturbed: Run, tmp_path: Path
) -> None:
    project = make_project(tmp_path / "project", user_signal_sandbox)
    run = project.submit(*LONG)
    run.wait_for_step(7)
    hold = run.run_dir.path / "hold"
    hold.touch()  # no rank tells another before the signal has reached rank 0
    run.cluster.submit_high(nodes=run.attempts()[0].nodes, seconds=0.1)
    run.wait_until(lambda: run.attempts()[0].cause is not None, "told to stop")
    hold.unlink()
    run.finish()
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
    assert run.attempts()[0].cause == "SIGUSR2"
    assert_steps_join(run, total=STEPS)
    assert_same_bits(run, undisturbed)


def test_the_time_limit_saves_requeues_and_finishes(time_limited: Run) -> None:
    time_limited.wait_for_attempt(2, timeout_s=600)
    time_limited.finish()
    assert [attempt.reason for attempt in time_limited.attempts()[:-1]] == ["time limit"] * (
        len(time_limited.attempts()) - 1
    )
    assert len(time_limited.attempts()) >= 2
    assert_steps_join(time_limited, total=150)
