"""A sweep of many points: from enter to submitted, against hydra-submitit-launcher on the same sandbox.

python -m tests.bench sweep [--points 1000] [--large 10000]

Wanted: at least 5 times as fast with 1 call of sbatch, beside the question --test-only; `status` of all runs, each with a long
log, under 0.5 s beyond its one call of squeue; resident memory of submitting `--large` points under 300 MB. The launcher has to
be installed: pip install hydra-submitit-launcher. It waits for its jobs; it is stopped when sbatch has answered, and its jobs
are cancelled. Ours are to begin in an hour.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slurmtrain.sandbox import SandboxSpec, up

PEER = """
import hydra

@hydra.main(config_path="{conf}", config_name="config", version_base="1.3")
def main(config):
    pass

main()
"""
# In front of the real commands: one line for each call, and when it had ended.
COUNTING = """#!/bin/bash
case " $* " in *" --test-only "*) exec {real} "$@" ;; esac
began=$(date +%s.%N)
{real} "$@"
code=$?
echo "$began $(date +%s.%N)" >> {log}
exit $code
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench sweep")
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--large", type=int, default=10_000)
    options, _ = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="bench-sweep-") as name:
        folder = Path(name)
        sandbox = up(SandboxSpec(nodes=1), folder / "sandbox")
        try:
            environment = {**os.environ, **sandbox.env(), "PATH": f"{folder}/front:{os.environ['PATH']}"}
            for command in ("sbatch", "squeue", "sacct"):
                count_calls(folder, command)
            run(folder, environment, str(sandbox.slurm_conf), options.points, options.large)
        finally:
            sandbox.down()


def run(folder: Path, environment: dict[str, str], slurm_conf: str, points: int, large: int) -> None:
    ours, ours_calls = submit_ours(folder, environment, slurm_conf, points)
    print(f"{points} points, ours: {ours:6.2f} s, {ours_calls} call(s) of sbatch   wanted 1: {met(ours_calls == 1)}")
    give_metrics(folder / "runs")
    (folder / "squeue.log").unlink(missing_ok=True)
    words = [sys.executable, "-m", "slurmtrain", "sweep", "status", "last", "--json"]
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        answer = subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True, text=True)
        seconds.append(time.perf_counter() - began)
    assert len(json.loads(answer.stdout)["points"]) == points
    calls = calls_of(folder, "squeue")
    asked = sum(ended - start for start, ended in calls) / 3
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "slurmtrain", "sweep", "--help"], check=True, capture_output=True)
    bare = time.perf_counter() - began
    beyond = min(seconds) - asked
    print(
        f"status of {points} runs: {min(seconds):.2f} s, of which {asked:.2f} s for {len(calls) / 3:.0f} call(s) of squeue; "
        f"--help takes {bare:.2f} s   wanted <= 0.5 s beyond: {met(beyond <= 0.5)} ({beyond:.2f} s)"
    )
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        print("hydra-submitit-launcher is not installed, so there is nothing to compare with")
    else:
        theirs, theirs_calls = submit_theirs(folder, environment, points)
        print(f"{points} points, hydra-submitit-launcher: {theirs:6.2f} s, {theirs_calls} call(s) of sbatch")
        print(f"  {theirs / ours:.1f} times as fast   wanted >= 5: {met(theirs >= 5 * ours)}")
    seconds_large, _ = submit_ours(folder, environment, slurm_conf, large, first=points)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    print(
        f"{large} points: {seconds_large:.1f} s, at most {peak:.0f} MB resident   wanted <= 300 MB: {met(peak <= 300)}"
    )


def give_metrics(runs: Path) -> None:
    """Every run has trained for a while: what its status is read from is as long as it gets."""
    values = {"loss": 2.123456789012345, "grad_norm": 0.5123456789, "lr": 3e-4, "tokens_per_s": 12345.6789}
    lines = [json.dumps({"step": step, **values, "step_time_s": 0.123456789}) + "\n" for step in range(1000)]
    for path in runs.glob("*/*/run.json"):
        (path.parent / "metrics.jsonl").write_text(
            "".join([*lines[:900], '{"step": 900, "valid_loss": 2.2}\n', *lines[900:]])
        )


def submit_ours(
    folder: Path, environment: dict[str, str], slurm_conf: str, points: int, *, first: int = 0
) -> tuple[float, int]:
    (folder / "sbatch.log").unlink(missing_ok=True)
    words = ["-m", "+cluster=sandbox", "cluster.sandbox=null", f"cluster.slurm_conf={slurm_conf}", "cluster.nodes=1"]
    words += [
        "cluster.tasks_per_node=1",
        "+cluster.sbatch.begin=now+1hour",
        f"train.seed=range({first},{first + points})",
    ]
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "slurmtrain", *words, "submit"],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - began, len(calls_of(folder, "sbatch"))


def submit_theirs(folder: Path, environment: dict[str, str], points: int) -> tuple[float, int]:
    """Our own configs, by a bare Hydra app."""
    from slurmtrain.config.compose import compose
    from slurmtrain.config.frozen import freeze

    (folder / "conf").mkdir()
    (folder / "conf" / "config.yaml").write_text(freeze(compose(["cluster=sandbox"])))
    (folder / "app.py").write_text(PEER.format(conf=folder / "conf"))
    (folder / "sbatch.log").unlink(missing_ok=True)
    launcher = ["partition=low", "timeout_min=60", "array_parallelism=1"]
    words = ["hydra/launcher=submitit_slurm", *(f"hydra.launcher.{word}" for word in launcher)]
    log = (folder / "theirs.log").open("w")
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "app.py", "-m", *words, f"train.seed=range({points})"],
        cwd=folder,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        while not calls_of(folder, "sbatch"):
            if process.poll() is not None:
                raise SystemExit(f"the launcher ended: {(folder / 'theirs.log').read_text()[-2000:]}")
            time.sleep(0.02)
        return time.perf_counter() - began, len(calls_of(folder, "sbatch"))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()
        subprocess.run(["scancel", "--partition=low"], env=environment, check=False)


def count_calls(folder: Path, command: str) -> None:
    front = folder / "front"
    front.mkdir(exist_ok=True)
    real = subprocess.run(["which", command], check=True, capture_output=True, text=True).stdout.strip()
    (front / command).write_text(COUNTING.format(real=real, log=folder / f"{command}.log"))
    (front / command).chmod(0o755)


def calls_of(folder: Path, command: str) -> list[tuple[float, float]]:
    log = folder / f"{command}.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(float(begin), float(end)) for begin, end in (line.split() for line in lines)]


def met(fine: bool) -> str:
    return "met" if fine else "MISSED"


if __name__ == "__main__":
    main()
