"""Sweepers that choose by results, on a real SLURM: Optuna.

That a search whose shell is killed goes on where it was is shown by tests/unit/sweep/test_search.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slurmtrain.runs import attempts
from slurmtrain.runs.reasons import Reason
from slurmtrain.runs.sweep_dir import Sweep
from tests.support.slurm_cluster import Cluster


def words(cluster: Cluster, *overrides: str) -> list[str]:
    job = ["cluster.nodes=1", "cluster.tasks_per_node=1", "job=command", "job.command=python objective.py"]
    sweeper = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=7", "hydra.sweeper.n_jobs=2"]
    return [sys.executable, "-m", "slurmtrain", "-m", *cluster.words, *job, *sweeper, *overrides, "submit"]


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


def test_a_slow_trial_holds_no_other_up_and_a_bad_one_is_stopped(sandbox: Cluster, tmp_path: Path) -> None:
    (tmp_path / "objective.py").write_text(PACED)
    pruner = ["search.pruner=median", "search.startup_trials=2", "search.prune_after_steps=2"]
    command = words(sandbox, "optim.lr=interval(0.001,0.9)", "requeue.max_attempts_without_progress=3", *pruner)
    done = sandbox.run([*command, "--json"], cwd=tmp_path)
    trials = {each["run"]: each for each in json.loads(done.stdout)["trials"]}
    (path,) = tmp_path.glob("runs/*.sweep-*")
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

    again = sandbox.run(command, cwd=tmp_path)  # nothing is left to do, and the table is there once more
    assert "6 complete, 1 pruned" in again.stdout and len(sweep.points()) == 7
    assert "pruned" in sandbox.run([*command[:3], "sweep", "status", sweep.id], cwd=tmp_path).stdout
    retried = sandbox.run([*command[:3], "sweep", "retry", sweep.id], cwd=tmp_path, check=False)
    assert len(attempts.all_attempts(sweep.run_dir(bad))) == 1 and bad not in retried.stdout
