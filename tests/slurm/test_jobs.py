"""Jobs of every shape on a real SLURM: arrays, own programs, by hand, side by side, edited meanwhile, wrongly started."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.runs.lookup import all_runs
from slurmtrain.slurm.nodelist import expand_nodelist
from tests.slurm.project import Project, Run, make_project
from tests.support.slurm_cluster import Cluster

ONE = ["cluster.nodes=1", "cluster.tasks_per_node=1"]
# So that steps beside the ranks start in a job with GPUs, too. No program can compute on those of a sandbox.
WITH_GPUS = ["cluster.gpus_per_node=2", "train.device=cpu"]
PYTHON = sys.executable


@pytest.fixture
def project(sandbox: Cluster, tmp_path: Path) -> Project:
    return make_project(tmp_path / "50%j", sandbox)  # SLURM's own names of files have % in them


def test_team_mates_save_and_end_a_run_with_files_and_status_tells_how_far_it_is(project: Project) -> None:
    run = project.submit("train.steps=400", "+model.pause_s=0.1", "checkpoint.every_steps=0", *ONE, nodes="n0")
    waits = project.submit("+cluster.sbatch.begin=now+2hours", *ONE)
    run.wait_for_step(3)
    runs, waiting = json.loads(run.cli("status", "--json"))
    assert (runs["state"], runs["steps"], waiting["steps"]) == ("running", 400, 20)
    record = next(each for each in run.losses() if each["step"] == runs["step"])
    assert runs["loss"] == record["loss"] and runs["eta_s"] == (400 - runs["step"]) * runs["step_time_s"] > 30
    assert runs["tokens_per_s"] > 0 and abs(time.time() - runs["logged"]) < 30
    assert (waiting["reason"], waiting["loss"]) == ("BeginTime", None)
    assert 7000 < waiting["expected_start"] - time.time() <= 7200
    (row,) = [line for line in run.cli("status").splitlines() if waits.run_dir.id in line]
    assert "its begin time has not been reached (BeginTime)" in row
    assert "expects to start it in about " in run.cli("status", waits.run_dir.id)
    waits.cli("cancel", waits.run_dir.id)
    (run.run_dir.path / "save").touch()
    run.wait_until(lambda: len(committed(run.run_dir.checkpoints)) == 1, "saved")
    assert run.attempts()[-1].ended is None
    (run.run_dir.path / "stop").touch()
    last = run.wait_for_end()
    assert (last.reason, last.verdict) == ("cancelled", "end")
    assert "stopped by the file `stop`" in (last.sentence or "") and len(run.attempts()) == 1
    assert step_of(committed(run.run_dir.checkpoints)[-1]) == last.last_step
    assert "stopped" in run.status()


# It knows nothing of us, keeps its own count in a file, and dies of the signal, as programs do.
COUNTS = """
import os, pathlib, socket, sys, time
from length import TOTAL

rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
socket.create_server(("", int(os.environ["MASTER_PORT"]))) if rank == "0" else None
state = pathlib.Path(os.environ["SLURMTRAIN_RUN_DIR"]) / f"count-{rank}"
count = int(state.read_text()) if state.exists() else 0
while count < TOTAL:
    while count == 20 and os.environ["SLURMTRAIN_ATTEMPT"] == "1":
        time.sleep(0.1)  # until it is preempted
    count += 1; new = state.with_suffix(".new"); new.write_text(str(count)); new.replace(state)
place = [os.environ[name] for name in ("NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
print("counted to", count, "as", rank, "of", world, *place, sys.argv[1:])
"""
# It is told to stop, and does so when it may.
STOPS_LATER = (
    "trap 'touch {folder}/told' TERM; touch {folder}/ready; until [ -e {folder}/go ]; do sleep 0.1; done; exit 75\n"
)


class Preempted(NamedTuple):
    """Runs that were preempted at the same moment; the last one was then cancelled by scancel, in its grace time."""

    sharing: tuple[Run, Run]
    cancelled: Run


@pytest.fixture(scope="module")
def preempted(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Preempted:
    folder = tmp_path_factory.mktemp("preempted")
    project = make_project(folder / "project", sandbox)
    (project.path / "length.py").write_text("TOTAL = 40\n")
    (project.path / "count.py").write_text(COUNTS)
    (folder / "later").write_text(STOPS_LATER.format(folder=folder))
    sizes = ["cluster.tasks_per_node=2", "cluster.cpus_per_task=1", "cluster.gpus_per_node=0"]
    counts = ("--", PYTHON, "count.py", "two words", "$HOME")
    first, second = (project.submit(*sizes, small=False, nodes="n0,n1", words=counts) for _ in range(2))
    cancelled = project.submit("job=command", f"job.command='bash {folder}/later'", *ONE, small=False, nodes="n3")
    for name in ("length.py", "count.py"):
        (project.path / name).write_text("edited, not to be run\n")
    for run in (first, second):
        run.wait_until((run.run_dir.path / "count-3").exists, "counting")
    cancelled.wait_until((folder / "ready").exists, "running")
    for nodes in (["n0", "n1"], ["n3"]):
        sandbox.submit_high(nodes=nodes, seconds=0.1)
    cancelled.wait_until((folder / "told").exists, "told to stop")
    # The end that SLURM has announced stands there: by it the cancel, which brings an earlier one, is told from the preemption.
    stop = cancelled.run_dir.attempt(1).path / "stop.json"
    cancelled.wait_until(lambda: stop.exists() and json.loads(stop.read_text())["facts"], "SLURM's answer is recorded")
    sandbox.run(["scancel", cancelled.job_id])
    (folder / "go").touch()
    return Preempted((first, second), cancelled)


def test_any_program_as_it_was_submitted_gets_ranks_and_a_requeue_and_shares_its_nodes(preempted: Preempted) -> None:
    """Its second attempt has imported everything again, and the work tree has been edited before the first one ended."""
    for run in preempted.sharing:
        run.finish()
        assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
        logs = [(run.run_dir.attempt(2).path / f"rank-{rank}.log").read_text() for rank in range(4)]
        assert [log.strip().splitlines()[-1] for log in logs] == [
            f"counted to 40 as {rank} of 4 {rank // 2} {rank % 2} 2 ['two words', '$HOME']" for rank in range(4)
        ]
        assert run.cluster.job(run.job_id)["ExitCode"] == "0:0"
    first, second = (run.attempts()[0] for run in preempted.sharing)
    assert first.nodes == second.nodes == ["n0", "n1"] and first.ended is not None and second.ended is not None
    assert max(first.started, second.started) < min(first.ended, second.ended), "they did not run side by side"


def test_a_bare_scancel_in_the_grace_time_of_a_preemption_is_not_undone(preempted: Preempted) -> None:
    run = preempted.cancelled
    run.cluster.wait_for(run.job_id, "CANCELLED")
    (only,) = run.attempts()
    assert (only.reason, only.verdict) == ("cancelled", "end"), run.logs()
    assert int(run.cluster.job(run.job_id)["Restarts"]) == 0


def ignores_usr2(last_words: Sequence[str]) -> bool:
    """Whether a Python whose command line ends so runs on this machine and ignores USR2."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")[:-1]
            if words[-len(last_words) :] == list(last_words) and words[0] == PYTHON:
                (ignored,) = re.findall(r"^SigIgn:\s*(\w+)", (folder / "status").read_text(), re.MULTILINE)
                return bool(int(ignored, 16) & 1 << signal.SIGUSR2 - 1)
    return False


@pytest.mark.slow
def test_a_job_with_spare_nodes_whose_first_node_dies_is_requeued_by_another_one(
    project: Project, tmp_path: Path
) -> None:
    """The step that looks after the node of the batch script outlives a TERM to all steps, at which it looks at once."""
    (tmp_path / "program").write_text(f"trap '' TERM; until [ -e {tmp_path}/go ]; do sleep 0.1; done\n")
    program = f"job.command='bash {tmp_path}/program'"
    words = ["cluster.nodes=1", "cluster.tasks_per_node=1", "cluster.spare_nodes=1"]
    run = project.submit("job=command", program, *words, *WITH_GPUS, small=False)
    run.wait_until(lambda: bool(run.attempts()) and bool(run.attempts()[0].nodes), "running")
    cluster, first = run.cluster, run.cluster.job(run.job_id)["BatchHost"]

    def steps() -> list[str]:
        found = cluster.run(["squeue", "--noheader", "--steps", f"--jobs={run.job_id}", "--format=%i"]).stdout
        return [step for step in found.split() if step.rpartition(".")[2].isdigit()]

    # A watch that has just begun would die of the TERM. It blocks that, which the system doesn't show of a process that waits
    # for the signal, and then ignores USR2.
    run.wait_until(lambda: len(steps()) == 2 and ignores_usr2(["--watch", first, "--job", run.job_id]), "watched")
    (watch,) = [step for step in steps() if step != run.attempts()[0].step_id]
    cluster.kill_node(first)
    try:
        run.wait_until(lambda: first not in expand_nodelist(cluster.job(run.job_id)["NodeList"]), "the node is lost")
        cluster.run(["scancel", "--signal=TERM", watch])  # once: it also ends the commands by which the watch looks
        run.wait_until(lambda: cluster.job(run.job_id)["Restarts"] == "1", "requeued")
        (tmp_path / "go").touch()
        assert run.wait_for_end().reason == "finished", run.logs()
    finally:
        cluster.start_node(first)
    assert [(each.job_id, each.restart_count) for each in run.attempts()] == [(run.job_id, 0), (run.job_id, 1)]


@pytest.mark.slow
def test_srun_by_hand_makes_one_run_of_all_its_ranks(project: Project) -> None:
    words = ["+experiment=smoke", "train.steps=3", "train"]
    srun = ["sh", "-c", 'scontrol show hostnames >allocated; exec srun "$@"', "sh", PYTHON, "-m", "slurmtrain", *words]
    done = project.cluster.run(["salloc", "-N2", "--ntasks-per-node=1", *srun], cwd=project.path)
    (run_dir,) = all_runs(project.path / "runs")
    attempt = json.loads((run_dir.attempt(1).path / "attempt.json").read_text())
    assert (attempt["world_size"], attempt["reason"]) == (2, "finished"), done.stdout + done.stderr
    assert attempt["nodes"] == (project.path / "allocated").read_text().split()
    assert run_dir.attempt_numbers() == [1]
