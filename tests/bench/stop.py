"""How long a preemption takes, on a sandbox: from the TERM until every rank is out, and from the start to the next step.

Wanted: every rank is out at most one second after the running step and one save, both measured in the same run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slurmtrain import sandbox
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import read_json
from tests.support.ranks import rank_pids

ROUNDS = 5


def main() -> None:
    spec = sandbox.SandboxSpec(nodes=2, cpus=4, kill_wait_s=10)
    cluster = sandbox.up(spec, sandbox.default_directory(f"bench-{os.getpid()}"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), {**os.environ, **cluster.env()})
    finally:
        cluster.down()


def measure(folder: Path, environment: dict[str, str]) -> None:
    overrides = "+cluster=sandbox cluster.sandbox=null +experiment=smoke train.steps=100000 train.log_every=1 "
    overrides += "train.eval_every=0 checkpoint.every_steps=0 requeue.restart_delay_s=0 train.tensorboard=false"
    slurmtrain = [sys.executable, "-m", "slurmtrain"]
    subprocess.run([*slurmtrain, *overrides.split(), "submit"], cwd=folder, env=environment, check=True)
    (run_dir,) = all_runs(folder / "runs")
    excesses = []
    for number in range(1, ROUNDS + 1):
        first = wait_for_steps(run_dir, number)
        pids = rank_pids(run_dir).values()
        job_id = run_dir.info()["job_ids"][-1]
        sent = time.time()
        subprocess.run(["scancel", "--signal=TERM", job_id], env=environment, check=True)
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(0.005)
        out = time.time() - sent
        record = wait_for_verdict(run_dir, number)
        step = statistics.median(r["step_time_s"] for r in records(run_dir)[-20:])
        save = next(
            e["save_s"] for e in run_dir.events() if e["event"] == "training stopped" and e["attempt"] == number
        )
        excesses.append(out - step - save)
        print(
            f"attempt {number}: TERM to all ranks out {out:5.2f} s = step {step:.3f} + save {save:.3f} + {excesses[-1]:.2f};"
            f" outcome recorded {record['ended'] - sent:.2f} s after the TERM"
        )
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in record["start_up_s"].items())
        print(f"    its start: {stages}, first step {first:.2f} s")
    subprocess.run(["scancel", run_dir.info()["job_ids"][-1]], env=environment, check=True)
    print(
        f"beyond step + save: median {statistics.median(excesses):.2f} s, worst {max(excesses):.2f} s (wanted: at most 1)"
    )


def records(run_dir: RunDir) -> list[dict[str, Any]]:
    if not run_dir.metrics_file.exists():
        return []
    return [json.loads(line) for line in run_dir.metrics_file.read_text().splitlines() if line.endswith("}")]


def wait_for_steps(run_dir: RunDir, number: int, steps: int = 30) -> float:
    """Until attempt `number` has done `steps`; seconds of its first."""
    while True:
        attempt = read_json(run_dir.attempt(number).path / "attempt.json") or {}
        if attempt.get("first_step") is not None:
            own = [record for record in records(run_dir) if record["step"] > attempt["first_step"]]
            if len(own) >= steps:
                return float(own[0]["step_time_s"])
        time.sleep(0.05)


def wait_for_verdict(run_dir: RunDir, number: int) -> dict[str, Any]:
    while True:
        attempt = read_json(run_dir.attempt(number).path / "attempt.json") or {}
        if attempt.get("verdict"):
            return attempt
        time.sleep(0.01)


if __name__ == "__main__":
    main()
