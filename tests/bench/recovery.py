"""How long a crash costs: from the kill -9 of a rank to the first step after it, in three ways, side by side in one run.

python -m tests.bench recovery [--rounds 3] [--ranks 2]

- in place: the ranks start again in the same job (requeue.in_place, the default).
- requeued: the job goes back into SLURM's queue, and starts again when SLURM lets it (requeue.in_place=false). SLURM is asked
  to start it at once, and nobody else wants the node.
- torchrun --max-restarts: the same training, started by torchrun on this machine. It begins anew each time, and so has nothing
  to restore.

Wanted: in place is no slower than torchrun, and at most half of a requeue.
"""

from __future__ import annotations

import argparse
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

from slurmtrain import sandbox
from slurmtrain.runs import attempts
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir

TRAINING = (
    "+experiment=smoke train.steps=100000 train.log_every=1 train.eval_every=0 checkpoint.every_steps=20 "
    "train.tensorboard=false job.snapshot=none"
).split()
STEPS = 30  # that an attempt does before it is killed
POLL_S = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench recovery")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    options, _ = parser.parse_known_args()
    spec = sandbox.SandboxSpec(nodes=1, cpus=max(4, options.ranks), kill_wait_s=10)
    cluster = sandbox.up(spec, sandbox.default_directory(f"bench-{os.getpid()}"))
    found: dict[str, list[float]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="bench-recovery-", ignore_cleanup_errors=True) as folder:
            environment = {**os.environ, **cluster.env()}
            for name, in_place in (("in place", "true"), ("requeued", "false")):
                found[name] = measure_job(Path(folder, name), environment, options.rounds, options.ranks, in_place)
            name = "torchrun --max-restarts"
            found[name] = measure_torchrun(Path(folder, name), options.rounds, options.ranks)
    finally:
        cluster.down()
    print(f"kill -9 of a rank to the next step, {options.ranks} ranks, {len(os.sched_getaffinity(0))} cores")
    for name, seconds in found.items():
        each = ", ".join(f"{value:.1f}" for value in seconds)
        print(f"  {name:24} median {statistics.median(seconds):6.1f} s   ({each})")
    ours = statistics.median(found["in place"])
    for name, wanted in (("requeued", 0.5), ("torchrun --max-restarts", 1.0)):
        ratio = ours / statistics.median(found[name])
        print(f"  in place against {name}: {ratio:.2f}   wanted <= {wanted}: {'met' if ratio <= wanted else 'MISSED'}")


def measure_job(folder: Path, environment: dict[str, str], rounds: int, ranks: int, in_place: str) -> list[float]:
    """Return the seconds that each of some kills of a rank has cost a run on the sandbox."""
    folder.mkdir()
    words = ["+cluster=sandbox", "cluster.sandbox=null", "cluster.nodes=1", f"cluster.tasks_per_node={ranks}"]
    words += ["requeue.restart_delay_s=0", f"requeue.in_place={in_place}", *TRAINING, "submit"]
    subprocess.run([sys.executable, "-m", "slurmtrain", *words], cwd=folder, env=environment, check=True)
    (run,) = all_runs(folder / "runs")
    seconds = []
    for number in range(1, rounds + 1):
        wait_until(partial(has_done, partial(steps_done, run, number), STEPS))
        seconds.append(kill_and_wait(rank_pids(run)[-1], partial(has_done, partial(steps_done, run, number + 1), 1)))
        stages = attempts.read_attempt(run, number + 1).start_up_s
        print(f"  {folder.name}: {seconds[-1]:.1f} s; its start: {stages}", flush=True)
    subprocess.run(["scancel", run.info()["job_ids"][-1]], env=environment, check=True)
    return seconds


def measure_torchrun(folder: Path, rounds: int, ranks: int) -> list[float]:
    """Return the seconds that each of some kills of a worker has cost a training under torchrun."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--max-restarts={rounds}"]
    command += ["--monitor-interval=0.1", "-m", "slurmtrain", *TRAINING, "train"]
    seconds = []
    with (folder / "log").open("w") as log:
        launcher = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            for number in range(1, rounds + 1):
                wait_until(partial(has_done, partial(torchrun_steps, folder, number), STEPS))
                last = max(child_pids(launcher.pid))
                seconds.append(kill_and_wait(last, partial(has_done, partial(torchrun_steps, folder, number + 1), 1)))
                print(f"  {folder.name}: {seconds[-1]:.1f} s", flush=True)
        finally:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    return seconds


def kill_and_wait(pid: int, done: Callable[[], bool]) -> float:
    """Kill a process, and return the seconds until `done`."""
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_until(done)
    return time.monotonic() - began


def wait_until(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            raise SystemExit(f"nothing came within {timeout_s:.0f} s")
        time.sleep(POLL_S)


def has_done(count: Callable[[], int], steps: int) -> bool:
    return count() >= steps


def steps_done(run: RunDir, number: int) -> int:
    """Return how many steps attempt `number` has done, as far as its log shows."""
    attempt = attempts.read_attempt(run, number) if number in run.attempt_numbers() else None
    if attempt is None or attempt.first_step is None or attempt.stepping is None:
        return 0
    if (
        not run.metrics_file.exists() or run.metrics_file.stat().st_mtime < attempt.stepping
    ):  # what it has written since is none of its steps
        return 0
    return (attempts.last_logged_step(run) or 0) - attempt.first_step


def torchrun_steps(folder: Path, number: int) -> int:
    """Return how many steps the run of start `number` has logged: each start makes a run of its own."""
    runs = (
        sorted(all_runs(folder / "runs"), key=lambda run: run.path.stat().st_ctime)
        if (folder / "runs").exists()
        else []
    )
    return attempts.last_logged_step(runs[number - 1]) or 0 if len(runs) >= number else 0


def rank_pids(run: RunDir) -> list[int]:
    """Return the processes of the run's ranks, in order."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"train" in words and str(run.path).encode() in words and b"python" in words[0]:
            found.append(int(entry.name))
    return sorted(found)


def child_pids(parent: int) -> list[int]:
    """Return the processes that `parent` has started."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


if __name__ == "__main__":
    main()
