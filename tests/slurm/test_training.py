"""Whole training jobs on a real SLURM: submitted, interrupted in every way there is, and finished with the same bits."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.report.goodput import Cause
from slurmtrain.system.process import lives
from tests.slurm.project import Project, Run, assert_counted_once, counting, make_project
from tests.support.children import children
from tests.support.interrupted_run import check_time_adds_up
from tests.support.local_runs import assert_same_bits, assert_steps_join
from tests.support.slurm_cluster import Cluster

STEPS = 60
LONG = [f"train.steps={STEPS}", "+model.pause_s=0.15"]
PAIR = ["cluster.tasks_per_node=1"]  # one rank on each of two nodes
ONE = ["cluster.nodes=1", "cluster.tasks_per_node=1"]
EVERY_TENTH = range(10, STEPS, 10)  # is saved while it goes on

Lane = tuple[str, str, str]
LANES: tuple[Lane, ...] = (("n0", "n1", "n2"), ("n3", "n4", "n5"))


def pair(lane: Lane) -> str:
    return ",".join(lane[:2])


def undisturbed(project: Project, lane: Lane) -> Run:
    """What runs of two ranks are compared with: never interrupted."""
    run = project.submit(f"train.steps={STEPS}", *PAIR, nodes=pair(lane))
    run.finish()
    return run


def wait_for_steps_of(run: Run, number: int) -> None:
    run.wait_for_attempt(number)
    run.wait_for_step((run.attempts()[number - 1].first_step or 0) + 3)


def stopped(project: Project, lane: Lane) -> Run:
    """Preempted, stopped by a signal to one rank, and requeued by SLURM's command, one after the other, each after some steps.

    With data workers, which the first of them signals, too. The verb `requeue` is shown by test_sweeps.py.
    """
    run = project.submit(*LONG, *PAIR, "train.data_workers=2", nodes=pair(lane))
    run.wait_for_step(3)
    run.preempt_by_high()
    wait_for_steps_of(run, 2)
    os.kill(run.rank_pids()[1], signal.SIGUSR2)
    wait_for_steps_of(run, 3)
    run.cluster.run(["scontrol", "requeue", run.job_id])
    run.finish()
    return run


def broken(project: Project, lane: Lane) -> Run:
    """One rank is killed, and in the next attempt the other one is stopped, each after a checkpoint."""
    limits = ["watchdog.min_s=8", "watchdog.factor=2", "watchdog.save_s=20", "watchdog.evaluation_s=20"]
    run = project.submit(*LONG, *PAIR, *limits, nodes=pair(lane))  # it may be stopped while it saves or evaluates
    run.wait_for_checkpoint()
    os.kill(run.rank_pids()[0], signal.SIGKILL)
    run.wait_for_attempt(2)
    saved = run.attempts()[0].committed_step or 0
    run.wait_until(lambda: step_of(committed(run.run_dir.checkpoints)[-1]) > saved, "saved again")
    os.kill(run.rank_pids()[1], signal.SIGSTOP)
    run.wait_for_attempt(3)
    run.finish()
    return run


class Orphaned(NamedTuple):
    """A run whose supervisor is killed, and after it is resumed its srun.

    Attributes:
        state: of the job, after the first.
        said: by `status` then.
        left: the ranks that had outlived it.
    """

    run: Run
    state: str
    said: str
    left: list[int]


def orphaned(project: Project, lane: Lane) -> Orphaned:
    """Both by SIGKILL, while the ranks of a program count: that no bit differs is shown in tests/distributed."""
    run = project.submit(*counting(STEPS, pause_s=0.15), "cluster.nodes=2", small=False, nodes=pair(lane))
    run.wait_for_step(13)
    ranks = run.rank_pids()
    os.kill(run.supervisor_pids()[0], signal.SIGKILL)
    state = run.cluster.wait_for(run.job_id, {"COMPLETED", "FAILED", "CANCELLED"})["JobState"]
    left = [pid for pid in ranks if lives(pid)]
    said = run.status()
    done = run.step()
    run.cli("resume", run.run_dir.id)
    run.wait_for_step(done + 3)
    srun = run.supervisor_pids()[1]
    for pid in (*children(srun), srun):  # the process that it has forked would end the ranks at once
        os.kill(pid, signal.SIGKILL)
    run.await_next_start()
    run.finish()
    return Orphaned(run, state, said, left)


def bereft(project: Project, lane: Lane) -> tuple[Run, str]:
    """One of its nodes dies; the third one of the lane is free. A program that counts; below, a training is requeued."""
    others = ",".join(sorted(set(project.cluster.nodes) - set(lane)))
    words = [*counting(STEPS, pause_s=0.15), "cluster.nodes=2", f"cluster.exclude='{others}'"]
    run = project.submit(*words, small=False)
    run.wait_for_step(3)
    dead = run.attempts()[0].nodes[1]
    run.cluster.kill_node(dead)
    try:
        run.await_next_start()
        run.finish()
    finally:
        run.cluster.start_node(dead)
    return run, dead


def with_a_spare_node(project: Project, lane: Lane) -> tuple[Run, Lane]:
    """The slurmd of one of its nodes is killed: SLURM takes it for dead, and its ranks may run on for a while.

    A program that counts; a training is started again in its job in `broken`.
    """
    words = [*counting(STEPS, pause_s=0.15), "cluster.nodes=2", "cluster.spare_nodes=1"]
    run = project.submit(*words, small=False, nodes=",".join(lane))
    run.wait_for_step(3)
    run.cluster.kill_node(lane[1], only_daemon=True)
    try:
        run.await_next_start()
        run.finish()
    finally:
        run.cluster.start_node(lane[1])
    return run, lane


def cancelled(project: Project, node: str) -> Run:
    """By scancel; then resumed, and cancelled by our verb. A program that counts; Ctrl-C ends a training elsewhere."""
    run = project.submit(*counting(200, pause_s=0.15), small=False, nodes=node)
    run.wait_for_step(8)
    run.cluster.run(["scancel", run.job_id])
    run.wait_for_end()
    run.cluster.wait_for(run.job_id, "CANCELLED")
    assert len(run.attempts()) == 1 and "resume" in run.status()
    done = run.step()
    run.cli("resume", run.run_dir.id)
    run.wait_for_step(done + 3)
    run.cli("cancel", run.run_dir.id)
    run.wait_for_end()
    return run


def told_too_early(project: Project, node: str) -> Run:
    """Preempted before its rank has handlers: the interpreter takes its time, as one on a slow file system does."""
    slow, started, preempted = (project.path.parent / name for name in ("slow-python", "started", "preempted"))
    wait = f"touch {started}.$SLURM_PROCID; until [ -e {preempted} ]; do sleep 0.05; done"
    slow.write_text(f'#!/bin/bash\n{wait}\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    run = project.submit("train.steps=20", *ONE, f"cluster.python={slow}", nodes=node)
    # Not that of `submit`, which asks the interpreter where it finds packages.
    run.wait_until(started.with_name("started.0").exists, "started")
    run.cluster.submit_high(nodes=[node], seconds=0.1)
    run.cluster.wait_for(run.job_id, lambda job: job["PreemptTime"] != "None")
    preempted.touch()
    run.finish()
    return run


def time_limited(project: Project, node: str) -> Run:
    """Runs into its time limit, which takes minutes: a program that counts. A training obeys such a signal, too: see below."""
    limit = ["cluster.time_limit_min=2", "cluster.signal_lead_s=30"]
    run = project.submit(*counting(150, pause_s=1.0), *limit, small=False, nodes=node)
    run.wait_until(lambda: len(run.attempts()) == 2, "in attempt 2", 600)
    run.finish()
    return run


SCENES: tuple[Callable[[Project, Lane], object], ...] = (
    *(stopped, broken, undisturbed, bereft, with_a_spare_node, orphaned),
)
SCENES_ON_ONE_NODE: tuple[Callable[[Project, str], object], ...] = (cancelled, told_too_early)
Scenes = dict[Callable[..., object], Future[Any]]


@pytest.fixture(scope="module")
def scenes(project: Project) -> Iterator[Scenes]:
    """All scenes, each on nodes of its own: most of the time they wait for SLURM.

    Two at a time, and beside them the longest, and those on one node, one after the other.
    """
    lanes: SimpleQueue[Lane] = SimpleQueue()
    for lane in LANES:
        lanes.put(lane)

    def play(scene: Callable[[Project, Lane], object]) -> object:
        lane = lanes.get()
        try:
            return scene(project, lane)
        finally:
            lanes.put(lane)

    with ThreadPoolExecutor(1 + len(LANES)) as pool, ThreadPoolExecutor(1) as beside:
        found: Scenes = {time_limited: pool.submit(time_limited, project, "n7")}
        found |= {scene: pool.submit(play, scene) for scene in SCENES}
        yield found | {scene: beside.submit(scene, project, "n6") for scene in SCENES_ON_ONE_NODE}


def test_ranks_on_two_nodes_train_together(scenes: Scenes) -> None:
    """That such ranks learn what one process learns is shown by test_elastic.py, and for every layout by tests/parity."""
    run = scenes[undisturbed].result()
    (attempt,) = run.attempts()
    assert (attempt.world_size, len(set(attempt.nodes))) == (2, 2)
    losses = {record["step"]: record["loss"] for record in run.losses() if "loss" in record}
    assert list(losses) == list(range(1, STEPS + 1)) and losses[STEPS] < losses[1]


def test_one_signalled_rank_stops_all_at_the_same_step(scenes: Scenes) -> None:
    run = scenes[stopped].result()
    second = run.attempts()[1]
    said = [(run.run_dir.attempt(2).path / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert all(f"leaving after step {second.last_step}" in log for log in said)
    assert second.exit_code == 75


def test_stopped_in_every_way_it_finishes_with_the_same_bits(scenes: Scenes) -> None:
    """A preemption, a signal to one rank, and `scontrol requeue`."""
    run = scenes[stopped].result()
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "asked", "requeued", "finished"]
    assert_steps_join(run, total=STEPS)
    assert_same_bits(run, scenes[undisturbed].result())
    spent = check_time_adds_up(run.run_dir)
    assert spent.interruptions == {"preempted": 1, "asked": 1, "requeued": 1}
    assert all(spent.lost_s[why] > 0 for why in spent.interruptions)
    assert Cause.REDONE not in spent.seconds and spent.seconds[Cause.QUEUE] > 0


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_no_more(scenes: Scenes) -> None:
    """And not the job: the ranks start again in it."""
    run = scenes[broken].result()
    first, second = run.attempts()[:2]
    assert (first.reason, first.verdict, first.failed_on) == ("crash", "in-place", first.nodes[0]), first.sentence
    assert "Killed" in (first.sentence or "")
    assert second.first_step == first.committed_step in EVERY_TENTH
    assert [(each.job_id, each.restart_count) for each in (first, second)] == [(run.job_id, 0)] * 2


def test_a_node_whose_ranks_are_stopped_is_named_and_training_goes_on_in_the_same_job(scenes: Scenes) -> None:
    """No rank of that node could say so, or end them: the process beside them does, or SLURM where they had just begun."""
    run = scenes[broken].result()
    second, third = run.attempts()[1:]
    one, other = second.nodes
    assert (second.reason, second.verdict, second.failed_on) == ("hang", "in-place", other), second.sentence
    assert (second.sentence or "").startswith(f"hung: rank 1 on {other} ")
    page = (run.run_dir.attempt(2).path / "hang.md").read_text()
    assert page.index(f"## Rank 1 on {other}") < page.index("## Ranks that waited") < page.index(f"| 0 | {one} |")
    assert third.first_step == second.committed_step in EVERY_TENTH
    assert third.job_id == second.job_id and third.restart_count == 0


def test_what_breaks_a_run_changes_no_bit_and_its_time_is_told(scenes: Scenes) -> None:
    run = scenes[broken].result()
    assert_same_bits(run, scenes[undisturbed].result())
    spent = check_time_adds_up(run.run_dir)
    assert spent.interruptions == {"crash": 1, "hang": 1} and spent.seconds[Cause.BETWEEN] > 0
    again = [(before.last_step or 0) > (after.first_step or 0) for before, after in pairwise(run.attempts())]
    assert (spent.seconds.get(Cause.REDONE, 0.0) > 0) == any(again)
    assert 7 < spent.seconds[Cause.HUNG] < 60  # after 8 s at least, and then the processes beside them have to find out
    assert spent.lost_s["hang"] > spent.seconds[Cause.HUNG]


def test_ranks_whose_supervisor_or_srun_is_killed_save_and_leave_and_the_run_goes_on_there(scenes: Scenes) -> None:
    run, state, said, left = scenes[orphaned].result()
    assert (state, left) == ("FAILED", [])
    assert f"its supervisor was killed; `resume {run.run_dir.id}` continues it" in said
    assert len(run.attempts()) == 3
    assert_counted_once(run, STEPS)


def test_a_dead_node_is_survived_on_other_nodes(scenes: Scenes) -> None:
    run, dead = scenes[bereft].result()
    first, second = run.attempts()
    assert first.reason == "node failure"
    assert dead not in second.nodes
    assert run.step() == STEPS


def test_a_spare_node_takes_the_place_of_a_dead_one_in_the_same_job(scenes: Scenes) -> None:
    run, (one, dead, spare) = scenes[with_a_spare_node].result()
    first, second = run.attempts()
    assert (first.reason, first.verdict, first.failed_on) == ("node failure", "in-place", dead)
    assert (first.nodes, second.nodes) == ([one, dead], [one, spare])
    assert [(each.job_id, each.restart_count) for each in run.attempts()] == [(run.job_id, 0)] * 2
    assert run.step() == STEPS


def test_scancel_and_cancel_by_verb_save_and_end_and_resume_goes_on_there(scenes: Scenes) -> None:
    run = scenes[cancelled].result()
    assert [(each.reason, each.verdict) for each in run.attempts()] == [("cancelled", "end")] * 2
    assert run.step() >= 8 + 3
    assert_counted_once(run, run.step())


def test_a_rank_without_handlers_yet_survives_the_signal_and_obeys_it(scenes: Scenes) -> None:
    run = scenes[told_too_early].result()
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
    assert run.events("restored") == []  # told to stop before the first step: nothing to save, nothing lost


def test_the_time_limit_saves_requeues_and_finishes(scenes: Scenes) -> None:
    run = scenes[time_limited].result()
    *limited, last = [attempt.reason for attempt in run.attempts()]  # a busy machine needs more than two attempts
    assert {*limited} == {"time limit"} and last == "finished"
    assert_counted_once(run, 150)


def test_where_the_jobs_own_signal_announces_preemption_it_works_the_same(user_signal: Cluster, tmp_path: Path) -> None:
    words = counting(STEPS, pause_s=0.15)
    run = make_project(tmp_path / "project", user_signal).submit(*words, small=False, nodes="n0")
    run.wait_for_step(7)
    run.preempt_by_high()
    run.finish()
    assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
    assert run.attempts()[0].cause == "SIGUSR2"
    assert_counted_once(run, STEPS)
