"""Sweepers that choose by results, on a real SLURM: Optuna, also when the shell that waits is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmtrain.observe import read_metrics
from slurmtrain.runs import attempts
from slurmtrain.runs.reasons import Reason
from slurmtrain.runs.sweep_dir import Sweep
from tests.support.slurm_cluster import Cluster

TRIALS = 12
BEST = 0.3

# A program of the user's own: what it is to minimise, and no torch, which would take a second of each trial.
OBJECTIVE = """
import glob, json, os, sys, time, yaml
run = os.environ["SLURMTRAIN_RUN_DIR"]
lr = yaml.safe_load(open(run + "/config.yaml"))["optim"]["lr"]
with open(run + "/started", "a") as file:
    file.write("once\\n")
while os.path.exists({hold!r}) and len(glob.glob(run + "/../*/metrics.jsonl")) >= 5:
    time.sleep(0.05)
if lr > 0.95:
    sys.exit("no luck with " + str(lr))
with open(run + "/metrics.jsonl", "a") as file:
    file.write(json.dumps({{"step": 1, "valid_loss": (lr - {best}) ** 2}}) + "\\n")
"""


def words(cluster: Cluster, *overrides: str) -> list[str]:
    where = ["+cluster=sandbox", "cluster.sandbox=null", f"cluster.slurm_conf={cluster.sandbox.slurm_conf}"]
    job = ["cluster.nodes=1", "cluster.tasks_per_node=1", "job=command", "job.command=python objective.py"]
    sweeper = ["hydra/sweeper=optuna", f"hydra.sweeper.n_trials={TRIALS}", "requeue.max_attempts_without_progress=1"]
    return [sys.executable, "-m", "slurmtrain", "-m", *where, *job, *sweeper, *overrides, "submit"]


def finished(sweep: Sweep) -> list[str]:
    """Ids of the runs that have a result."""
    return [run_id for run_id, run_dir in sweep.run_dirs().items() if run_dir.metrics_file.exists()]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "objective.py").write_text(OBJECTIVE.format(hold=str(tmp_path / "hold"), best=BEST))
    return tmp_path


def test_a_search_whose_shell_is_killed_goes_on_where_it_was(sandbox: Cluster, project: Path) -> None:
    # Four guesses and then by what it has learnt; seeded, so that it learns the same in every test.
    sampler = [f"hydra.sweeper.sampler.{each}" for each in ("seed=1", "n_startup_trials=4")]
    command = words(sandbox, "optim.lr=interval(0.001,0.9)", *sampler)
    (project / "hold").touch()  # when some have a result, the others wait until the shell has been killed
    shell = subprocess.Popen(command, cwd=project, env=sandbox.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 240
        while (
            not (found := list(project.glob("runs/*.sweep-*/sweep.json"))) or len(finished(Sweep(found[0].parent))) < 5
        ):
            assert shell.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        sweep = Sweep(found[0].parent)
        refused = sandbox.run(command, cwd=project, check=False)
        assert refused.returncode == 1 and f"process {shell.pid}" in refused.stderr, refused.stderr
    finally:
        shell.kill()
        shell.communicate()
        (project / "hold").unlink()

    done = sandbox.run(command, cwd=project, timeout_s=400)
    assert f"sweep {sweep.id} is there already" in done.stderr and "is done" in done.stdout
    losses = {}
    for point in sweep.points():
        run_dir = sweep.run_dir(point.run_id)
        assert (run_dir.path / "started").read_text() == "once\n"
        assert [attempt.reason for attempt in attempts.all_attempts(run_dir)] == [Reason.FINISHED]
        losses[float(point.varied["optim.lr"])] = read_metrics(run_dir.metrics_file)[-1]["valid_loss"]
    assert len(losses) == TRIALS == len(sweep.points())
    assert abs(min(losses, key=lambda lr: losses[lr]) - BEST) < 0.05
    table = json.loads(sandbox.run([*command[:3], "sweep", "collect", sweep.id, "--json"], cwd=project).stdout)
    assert len(table) == TRIALS


# Who is first of all to begin is slow, and ends when four others have; who is sixth does badly, and never ends by itself.
PACED = """
import glob, itertools, json, os, time
run = os.environ["SLURMTRAIN_RUN_DIR"]
for place in itertools.count():
    try:
        os.mkdir(run + "/../../../place-" + str(place))
        os.mkdir(run + "/place-" + str(place))
        break
    except FileExistsError:
        pass
while place == 0 and len(glob.glob(run + "/../*/metrics.jsonl")) < 4:
    time.sleep(0.05)
for step in itertools.count(1):
    with open(run + "/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "valid_loss": 1 / step + (5 if place == 5 else 0)}) + "\\n")
    if step >= 3 and place != 5:
        break
    time.sleep(0.05 if place == 5 else 0)
"""


@pytest.mark.slow
def test_a_slow_trial_holds_no_other_up_and_a_bad_one_is_stopped(sandbox: Cluster, project: Path) -> None:
    (project / "objective.py").write_text(PACED)
    pruner = ["search.pruner=median", "search.startup_trials=2", "search.prune_after_steps=2"]
    sweeper = ["hydra.sweeper.n_trials=7", "hydra.sweeper.n_jobs=2", "requeue.max_attempts_without_progress=3"]
    command = words(sandbox, "optim.lr=interval(0.001,0.9)", *sweeper, *pruner)
    done = sandbox.run([*command, "--json"], cwd=project)
    trials = {each["run"]: each for each in json.loads(done.stdout)["trials"]}
    (path,) = project.glob("runs/*.sweep-*")
    sweep = Sweep(path)
    assert len(trials) == 7 and sorted(each["state"] for each in trials.values()) == ["complete"] * 6 + ["pruned"]
    ran = {run_id: attempts.all_attempts(run_dir) for run_id, run_dir in sweep.run_dirs().items()}
    assert {len(each) for each in ran.values()} == {1}
    begun = {run_id: each[0].started for run_id, each in ran.items()}
    ended = {run_id: each[0].ended or 0.0 for run_id, each in ran.items()}
    (slow,) = (run_id for run_id in ran if (sweep.run_dir(run_id).path / "place-0").is_dir())
    assert sum(ended[run_id] < ended[slow] for run_id in ran) >= 3  # in two slots
    assert all(sum(begun[each] < moment < ended[each] for each in ran) <= 2 for moment in begun.values())
    bad = next(run_id for run_id, trial in trials.items() if trial["state"] == "pruned")
    assert ran[bad][0].reason == Reason.PRUNED and trials[bad]["pruned_at"] == 2
    assert "pruned at step 2" in done.stderr

    again = sandbox.run(command, cwd=project)  # nothing is left to do, and the table is there once more
    assert "6 complete, 1 pruned" in again.stdout and len(sweep.points()) == 7
    assert "pruned" in sandbox.run([*command[:3], "sweep", "status", sweep.id], cwd=project).stdout
    retried = sandbox.run([*command[:3], "sweep", "retry", sweep.id], cwd=project, check=False)
    assert len(attempts.all_attempts(sweep.run_dir(bad))) == 1 and bad not in retried.stdout
