"""A sweep of 1,000 points from enter to submitted, against hydra-submitit-launcher. Wanted: 5 times as fast.

On the same sandbox, and with one call of sbatch (beside the question --test-only); `sweep status` of all, each with a long log,
within 0.5 s beyond its one call of squeue; and at most 300 MB of resident memory for submitting `--large` points. The launcher
has to be installed: pip install hydra-submitit-launcher. It waits for its jobs; it is stopped when sbatch has answered. Ours
begin in an hour.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from slurmtrain.sandbox import SandboxSpec, up
from tests.bench.side_by_side import Row, options, ratio, run, seconds_of, show, wait_until

PEER = """
import hydra

@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config):
    pass

main()
"""
# In front of the real commands: one line for each call, with what it took.
COUNTING = """#!/bin/bash
case " $* " in *" --test-only "*) exec {real} "$@" ;; esac
began=$(date +%s.%N)
{real} "$@"
code=$?
echo "$began $(date +%s.%N)" >> {log}
exit $code
"""
OURS = [sys.executable, "-m", "slurmtrain"]


def main(words: list[str]) -> None:
    chosen = options(__doc__, words, points=1000, large=10_000)
    with tempfile.TemporaryDirectory(prefix="bench-sweep-") as name:
        folder = Path(name)
        sandbox = up(SandboxSpec(nodes=1), folder / "sandbox", ends_with=os.getpid())
        try:
            (folder / "front").mkdir()
            for command in ("sbatch", "squeue", "sacct"):
                front = folder / "front" / command
                front.write_text(COUNTING.format(real=shutil.which(command), log=folder / f"{command}.log"))
                front.chmod(0o755)
            environment = {**os.environ, **sandbox.env(), "PATH": f"{folder}/front:{os.environ['PATH']}"}
            show("a sweep", measure(folder, environment, str(sandbox.slurm_conf), chosen.points, chosen.large))
        finally:
            sandbox.down()


def measure(folder: Path, environment: dict[str, str], slurm_conf: str, points: int, large: int) -> list[Row]:
    cluster = ["+cluster=sandbox", "cluster.sandbox=null", f"cluster.slurm_conf={slurm_conf}", "cluster.nodes=1"]
    cluster += ["cluster.tasks_per_node=1", "+cluster.sbatch.begin=now+1hour"]

    def submit(first: int, count: int) -> float:
        command = [*OURS, "-m", *cluster, f"train.seed=range({first},{first + count})", "submit"]
        return seconds_of(partial(run, command, folder, environment))

    ours = submit(0, points)
    rows = [Row(f"{points} points", [ours])]
    rows.append(Row("calls of sbatch", [len(calls_of(folder, "sbatch"))], "", "<= 1"))
    values = {"loss": 2.123456789, "grad_norm": 0.512345, "lr": 3e-4, "tokens_per_s": 12345.6789, "step_time_s": 0.1}
    log = "".join(json.dumps({"step": step, **values}) + "\n" for step in range(1000))
    for path in (folder / "runs").glob("*/*/run.json"):
        (path.parent / "metrics.jsonl").write_text(log)
    asking: list[float] = []
    for _ in range(3):
        (folder / "squeue.log").unlink(missing_ok=True)
        took = seconds_of(partial(run, [*OURS, "sweep", "status", "last", "--json"], folder, environment))
        asking.append(took - sum(calls_of(folder, "squeue")))
    rows.append(Row(f"status of {points} points, beyond squeue", asking, wanted="<= 0.5"))
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher"):
        theirs = submit_theirs(folder, environment, points)
        rows.append(Row("hydra-submitit-launcher", [theirs]))
        rows.append(ratio("hydra-submitit-launcher / ours", [theirs], [ours], ">= 5"))
    else:
        print("hydra-submitit-launcher is not installed, so there is nothing to compare with")
    rows.append(Row(f"{large} points", [submit(points, large)]))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    return [*rows, Row("resident memory", [peak], "MB", "<= 300")]


def submit_theirs(folder: Path, environment: dict[str, str], points: int) -> float:
    """Our own configs, by a bare Hydra app: seconds until sbatch has answered."""
    config = run([*OURS, "+cluster=sandbox", "--cfg", "job"], folder, environment)
    (folder / "conf").mkdir()
    (folder / "conf" / "config.yaml").write_text(config)
    (folder / "app.py").write_text(PEER)
    (folder / "sbatch.log").unlink()
    launcher = ["partition=low", "timeout_min=60", "array_parallelism=1"]
    words = ["hydra/launcher=submitit_slurm", *(f"hydra.launcher.{word}" for word in launcher)]
    words = [sys.executable, "app.py", "-m", *words, f"train.seed=range({points})"]
    began = time.perf_counter()
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: bool(calls_of(folder, "sbatch")) or process.poll() is not None)
        if process.poll() is not None:
            raise SystemExit("hydra-submitit-launcher ended before it had called sbatch")
        return time.perf_counter() - began
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        subprocess.run(["scancel", "--partition=low"], env=environment, check=False)


def calls_of(folder: Path, command: str) -> list[float]:
    """Return what each call of SLURM's command has taken."""
    log = folder / f"{command}.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [float(end) - float(begin) for begin, end in (line.split() for line in lines)]
