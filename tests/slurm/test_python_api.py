"""`slurmtrain.submit` and `slurmtrain.map` on a real SLURM: a notebook that is killed comes back to its jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from slurmtrain.runs import attempts
from slurmtrain.runs.run_dir import RunDir
from tests.support.gloo import wait_until
from tests.support.slurm_cluster import Cluster

# Item 1 raises. Item 3 counts its attempts, and in the first one waits for a preemption.
NOTEBOOK = """
import json, os, sys, time
import slurmtrain

ON = ["cluster.sandbox=null", f"cluster.slurm_conf={sys.argv[1]}", "requeue.restart_delay_s=3"]

def call(item):
    if item == 1:
        raise ValueError(f"no luck with {item}")
    tries = os.path.join(os.environ["SLURMTRAIN_RUN_DIR"], "tries")
    with open(tries, "a") as file:
        file.write("try\\n")
    while item == 3 and len(open(tries).readlines()) == 1:
        if slurmtrain.stop_requested():
            open(tries, "a").write("saved\\n")
            slurmtrain.exit_for_requeue()
        time.sleep(0.05)
    return 10 * item

program = "import os; open(os.environ['SLURMTRAIN_RUN_DIR'] + '/metrics.jsonl', 'a').write('{\\"step\\": 5}' + chr(10))"
run = slurmtrain.submit(
    ["+cluster=sandbox", "cluster.nodes=1", "cluster.tasks_per_node=1", *ON], command=[sys.executable, "-c", program]
)
calls = slurmtrain.map(call, range(4), cluster="sandbox", overrides=ON)
print(json.dumps([str(run.path), str(calls.path)]), flush=True)
calls[3].result()
"""

AGAIN = """
import json, sys, traceback
import slurmtrain

run, calls = slurmtrain.open_run(sys.argv[1]), slurmtrain.open_map(sys.argv[2])
state = run.wait(timeout_s=120).state
results = {}
for call in calls.as_completed(timeout_s=120):
    try:
        results[call.index] = call.result()
    except ValueError as error:
        results[call.index] = f"{error} in {'line' in str(error.__cause__)}"
try:
    calls.results()
except ValueError as error:
    raised = str(error)
print(json.dumps([state, run.metrics(), results, raised, [each.state for each in calls.states()], repr(run)]))
"""


def test_a_killed_notebook_comes_back_to_its_run_and_to_calls_one_of_which_was_preempted(
    sandbox: Cluster, tmp_path: Path
) -> None:
    env = sandbox.env(SLURMTRAIN_RUNS=str(tmp_path / "runs"))
    words = [sys.executable, "-c", NOTEBOOK, str(sandbox.sandbox.slurm_conf)]
    notebook = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert notebook.stdout is not None
        run, calls = json.loads(notebook.stdout.readline())
        last = RunDir(next(Path(calls).glob("*-0003")))
        others = [RunDir(path) for path in sorted(Path(calls).glob("*-000[012]"))]
        wait_until(lambda: (last.path / "tries").exists(), "in its first try")
        wait_until(lambda: all(ended(each) for each in [*others, RunDir(Path(run))]), "ended")
        assert notebook.poll() is None
    finally:
        notebook.kill()
        notebook.wait()

    nodes = attempts.all_attempts(last)[-1].nodes
    sandbox.submit_high(nodes=nodes, seconds=0.1)
    done = sandbox.run([sys.executable, "-c", AGAIN, run, calls], cwd=tmp_path, env=env)
    state, metrics, results, raised, states, shown = json.loads(done.stdout)
    assert (state, metrics) == ("finished", [{"step": 5}]) and "(command): finished" in shown
    assert results == {"0": 0, "1": "no luck with 1 in True", "2": 20, "3": 30}
    assert raised == "no luck with 1" and states == ["finished", "failed", "finished", "finished"]

    assert (last.path / "tries").read_text() == "try\nsaved\ntry\n"
    tries = attempts.all_attempts(last)
    assert [each.reason for each in tries] == ["preempted", "finished"]
    assert all(len(attempts.all_attempts(each)) == 1 for each in others), "one that raises is not called again"
    sandbox.wait_for(str(others[1].info()["job_ids"][-1]), "FAILED")


def ended(run: RunDir) -> bool:
    tries = attempts.all_attempts(run)
    return bool(tries) and tries[-1].verdict is not None
