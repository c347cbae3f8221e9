"""What a crash and a preemption cost: from the kill -9 of a rank to the next step, and from a TERM until every rank is out.

- in place: the ranks start again in the same job (requeue.in_place, the default).
- standby ranks: as in place, with ranks that have loaded PyTorch and wait (requeue.standby_ranks).
- requeued: the job goes back into SLURM's queue, and starts again when SLURM lets it (requeue.in_place=false). SLURM is asked
  to start it at once, and nobody else wants the node.
- torchrun: the same training, started by torchrun --max-restarts on this machine. It begins anew each time, and so has nothing
  to restore.
- preemption: a TERM instead of the kill. Each rank is to be out at most a second after the running step and one save, both
  measured in the same run.

Each round makes a run of each kind on one sandbox, one after another, does this to it once and ends it. Wanted, on two idle
cores: the first step 2 s after a crash with standby ranks.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from slurmtrain import sandbox
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import process
from tests.bench.side_by_side import REPOSITORY, Row, in_turn, options, ratio, run, show, wait_until
from tests.support.children import children
from tests.support.ranks import rank_pids

TRAINING = (
    "+experiment=smoke train.steps=100000 train.log_every=1 train.eval_every=0 checkpoint.every_steps=20 "
    "train.tensorboard=false job.snapshot=none"
).split()
STEPS = 30  # that a run does before it is disturbed
JOBS = {
    "in place": ("requeue.in_place=true", "requeue.standby_ranks=false"),
    "standby ranks": ("requeue.in_place=true", "requeue.standby_ranks=true"),
    "requeued": ("requeue.in_place=false",),
}
KINDS = (*JOBS, "torchrun", "preemption")


def main(words: list[str]) -> None:
    chosen = options(__doc__, words, rounds=5, ranks=2, only=KINDS)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and the sandbox ends, too
    spec = sandbox.SandboxSpec(nodes=1, cpus=max(4, chosen.ranks), kill_wait_s=10)
    cluster = sandbox.up(spec, sandbox.default_directory(f"bench-{os.getpid()}"), ends_with=os.getpid())
    try:
        with tempfile.TemporaryDirectory(prefix="bench-recovery-", ignore_cleanup_errors=True) as folder:
            environment = {**os.environ, **cluster.env(), "PYTHONPYCACHEPREFIX": f"{folder}/modules"}
            environment["XDG_STATE_HOME"] = f"{folder}/state"  # the killed ranks blame no node of this person's
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as on machines of users
            variants: dict[str, Callable[[], float]] = {
                name: partial(job, Path(folder), environment, chosen.ranks, JOBS.get(name, ()), name == "preemption")
                for name in chosen.only
            }
            if "torchrun" in chosen.only:
                variants["torchrun"] = partial(torchrun, Path(folder), environment, chosen.ranks)
            found = in_turn(variants, chosen.rounds)  # in the warm-up Python compiles its modules
    finally:
        cluster.down()
    limits = {"standby ranks": "<= 2", "preemption": "<= 1"}
    what = {"preemption": "TERM to all ranks out, beyond a step and a save"}
    rows = []
    for name, values in found.items():
        rows.append(Row(what.get(name, f"kill to the next step: {name}"), values, wanted=limits.get(name, "")))
    pairs = {
        ("in place", "requeued"): "<= 0.5",
        ("standby ranks", "in place"): "<= 0.7",
        ("in place", "torchrun"): "<= 1",
    }
    for (one, other), wanted in pairs.items():
        if one in found and other in found:
            rows.append(ratio(f"{one} / {other}", found[one], found[other], wanted))
    show(f"{chosen.ranks} ranks", rows)


def job(folder: Path, environment: dict[str, str], ranks: int, words: tuple[str, ...], preempted: bool) -> float:
    """Return the seconds that the kill of a rank, or a TERM, has cost a run on the sandbox."""
    own = Path(tempfile.mkdtemp(dir=folder))
    line = ["+cluster=sandbox", "cluster.sandbox=null", "cluster.nodes=1", f"cluster.tasks_per_node={ranks}"]
    line += ["requeue.restart_delay_s=0", *words, *TRAINING]
    answer = run([sys.executable, "-m", "slurmtrain", *line, "submit", "--json"], own, environment)
    job_id = json.loads(answer)["job_ids"][-1]
    run_dir = next((own / "runs").glob("*/*/run.json")).parent
    try:
        wait_until(lambda: steps_done(run_dir, 1) >= STEPS)
        if "requeue.standby_ranks=true" in words:
            log = run_dir / "attempts" / "0001" / "standby.log"
            wait_until(lambda: log.exists() and log.read_text().splitlines().count("ready") == ranks)
        pids = list(rank_pids(RunDir(run_dir)).values())
        began = time.time()
        if preempted:
            subprocess.run(["scancel", "--signal=TERM", job_id], env=environment, check=True)
            wait_until(lambda: not any(map(process.lives, pids)))
            out = time.time() - began
            return out - statistics.median(step_times(run_dir)[-20:]) - save_s(run_dir)
        os.kill(pids[-1], signal.SIGKILL)
        wait_until(lambda: steps_done(run_dir, 2) >= 1)
        return time.time() - began
    finally:
        subprocess.run(["scancel", job_id], env=environment, check=True)
        wait_until(lambda: not rank_pids(RunDir(run_dir)))


def torchrun(folder: Path, environment: dict[str, str], ranks: int) -> float:
    """Return the seconds that the kill of a worker has cost a training under torchrun."""
    own = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--max-restarts=1"]
    command += ["--monitor-interval=0.1", "-m", "slurmtrain", *TRAINING, "train"]

    def steps(start: int) -> int:  # each start makes a run of its own
        logs = sorted((own / "runs").glob("*/*/metrics.jsonl"), key=lambda log: log.parent.stat().st_ctime)
        return log_length(logs[start - 1]) if len(logs) >= start else 0

    with (own / "log").open("w") as log:
        variables = {**environment, "PYTHONPATH": str(REPOSITORY)}
        launcher = subprocess.Popen(command, cwd=own, env=variables, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until(lambda: steps(1) >= STEPS)
            began = time.time()
            os.kill(max(children(launcher.pid)), signal.SIGKILL)
            wait_until(lambda: steps(2) >= 1)
            return time.time() - began
        finally:
            # The workers have sessions of their own, and would train on.
            pids = [launcher.pid, *(children(launcher.pid) if launcher.poll() is None else [])]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            launcher.wait()
            wait_until(lambda: not any(map(process.lives, pids)))


def log_length(log: Path) -> int:
    return log.read_text().count("\n") if log.exists() else 0


def step_times(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step_time_s"] for line in lines if line.endswith("}")]


def save_s(run_dir: Path) -> float:
    """Return how long the save at the stop took."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return float(next(event["save_s"] for event in events if event["event"] == "training stopped"))


def steps_done(run_dir: Path, number: int) -> int:
    """Return how many steps attempt `number` has done, as far as its log shows."""
    path, log = run_dir / "attempts" / f"{number:04d}" / "attempt.json", run_dir / "metrics.jsonl"
    try:
        attempt: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return 0
    stepping = attempt.get("stepping")
    if stepping is None or not log.exists() or log.stat().st_mtime < stepping:  # what is there is of an earlier attempt
        return 0
    complete = [line for line in log.read_text().splitlines() if line.endswith("}")]
    return int(json.loads(complete[-1])["step"]) - int(attempt["first_step"]) if complete else 0
