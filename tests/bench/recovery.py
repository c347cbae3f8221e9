"""How long a crash costs: from the kill -9 of a rank to the first step after it, in several ways, side by side in one run.

python -m tests.bench recovery [--rounds 5] [--ranks 2] [--only "in place" ...]

- in place: the ranks start again in the same job (requeue.in_place, the default).
- standby ranks: as in place, with ranks that have loaded PyTorch and wait (requeue.standby_ranks).
- requeued: the job goes back into SLURM's queue, and starts again when SLURM lets it (requeue.in_place=false). SLURM is asked
  to start it at once, and nobody else wants the node.
- torchrun --max-restarts: the same training, started by torchrun on this machine. It begins anew each time, and so has nothing
  to restore.

Each round makes a run of each kind, one after another, kills its last rank once and ends it, so that whatever else the machine
does meets all alike; one round more comes before, in which Python compiles its modules. Shown are where the time goes, the
medians over the rounds, and the ratios of two kinds in the same round with their range.

Wanted, on two idle cores: the first step 2 s after a crash in place, and 3 s after SLURM has started a job again.
"""

from __future__ import annotations

import argparse
import itertools
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
from slurmtrain.runs import attempts, reached_step
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import process
from tests.support.ranks import rank_pids

TRAINING = (
    "+experiment=smoke train.steps=100000 train.log_every=1 train.eval_every=0 checkpoint.every_steps=20 "
    "train.tensorboard=false job.snapshot=none"
).split()
STEPS = 30  # that a run does before it is killed
POLL_S = 0.01
JOBS = {
    "in place": ["requeue.in_place=true"],
    "standby ranks": ["requeue.in_place=true", "requeue.standby_ranks=true"],
    "requeued": ["requeue.in_place=false"],
}
TORCHRUN = "torchrun --max-restarts"
# What is compared with what, and the ratio that is wanted.
RATIOS = (
    ("in place", "requeued", 0.5),
    ("standby ranks", "in place", 0.7),
    ("in place", TORCHRUN, 1.0),
    ("standby ranks", TORCHRUN, 1.0),
)
SCRIPT_STARTS = "SLURM has started the job"
GOALS = {"standby ranks": 2.0}  # seconds, from the crash
GOAL_AFTER_START_S = 3.0

Stages = dict[str, float]
"""What has happened, in its order, and how many seconds after what came before."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench recovery")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[*JOBS, TORCHRUN], choices=[*JOBS, TORCHRUN])
    options, _ = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and the sandbox ends, too
    spec = sandbox.SandboxSpec(nodes=1, cpus=max(4, options.ranks), kill_wait_s=10)
    cluster = sandbox.up(spec, sandbox.default_directory(f"bench-{os.getpid()}"), ends_with=os.getpid())
    rounds: list[dict[str, Stages]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="bench-recovery-", ignore_cleanup_errors=True) as folder:
            environment = {**os.environ, **cluster.env(), "PYTHONPYCACHEPREFIX": f"{folder}/modules"}
            environment["XDG_STATE_HOME"] = f"{folder}/state"  # the killed ranks blame no node of this person's
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as on machines of users
            for number in range(options.rounds + 1):
                found = {}
                for name in options.only:
                    own = Path(folder, f"{number}-{name}")
                    own.mkdir()
                    measure = measure_torchrun if name == TORCHRUN else partial(measure_job, words=JOBS[name])
                    found[name] = measure(own, environment, options.ranks)
                    print(f"round {number}: {name}: {sum(found[name].values()):.1f} s", flush=True)
                rounds.append(found)
    finally:
        cluster.down()
    report(rounds[1:], options.ranks)


def report(rounds: list[dict[str, Stages]], ranks: int) -> None:
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"kill -9 of a rank to the next step, {ranks} ranks, {cores} cores; load average {load:.1f} at the end")
    for name in rounds[0]:
        totals = [sum(each[name].values()) for each in rounds]
        print(f"  {name}: {spread(totals)} s" + verdict(statistics.median(totals), GOALS.get(name)))
        for stage in rounds[0][name]:
            print(f"    {statistics.median(each[name].get(stage, 0.0) for each in rounds):7.2f} s   {stage}")
        if SCRIPT_STARTS in rounds[0][name]:
            later = [after(each[name], SCRIPT_STARTS) for each in rounds]
            print(f"    {spread(later)} s from then on" + verdict(statistics.median(later), GOAL_AFTER_START_S))
    for one, other, wanted in RATIOS:
        if one in rounds[0] and other in rounds[0]:
            ratios = [sum(each[one].values()) / sum(each[other].values()) for each in rounds]
            print(f"  {one} / {other}: {spread(ratios)}" + verdict(statistics.median(ratios), wanted))


def spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def verdict(value: float, wanted: float | None) -> str:
    return "" if wanted is None else f"   wanted <= {wanted}: {'met' if value <= wanted else 'MISSED'}"


def after(stages: Stages, name: str) -> float:
    """Return the seconds of all stages after `name`."""
    return sum(list(stages.values())[list(stages).index(name) + 1 :])


def measure_job(folder: Path, environment: dict[str, str], ranks: int, words: list[str]) -> Stages:
    """Return what the kill of a rank has cost a run on the sandbox."""
    line = ["+cluster=sandbox", "cluster.sandbox=null", "cluster.nodes=1", f"cluster.tasks_per_node={ranks}"]
    line += ["requeue.restart_delay_s=0", *words, *TRAINING, "submit"]
    submit = [sys.executable, "-m", "slurmtrain", *line]
    subprocess.run(submit, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    (run,) = all_runs(folder / "runs")
    try:
        wait_until(lambda: steps_done(run, 1) >= STEPS)
        if "requeue.standby_ranks=true" in words:
            wait_until(lambda: standby_ranks(run) == ranks)
        pids = list(rank_pids(run).values())
        killed = time.time()
        os.kill(pids[-1], signal.SIGKILL)
        wait_until(lambda: not any(map(process.lives, pids)))
        gone = time.time()
        wait_until(lambda: steps_done(run, 2) >= 1)
        return between(killed, {"all ranks are gone": gone, **moments(run), "the first step is done": time.time()})
    finally:
        subprocess.run(["scancel", run.info()["job_ids"][-1]], env=environment, check=True)
        wait_until(lambda: not rank_pids(run))


def moments(run: RunDir) -> dict[str, float]:
    """Return when what has happened between the kill and the first step, in unix seconds."""
    first, second = attempts.read_attempt(run, 1), attempts.read_attempt(run, 2)
    assert first.ended is not None and second.stepping is not None
    found = {"the outcome is decided": first.ended}
    script = script_started(second.job_id or "")
    if script > first.ended:
        found[SCRIPT_STARTS] = script
    found["the next attempt is claimed"] = float((run.attempt(2).path / "job").read_text().split()[2])
    moment = second.stepping - sum(second.start_up_s.values())
    found["rank 0 begins"] = moment
    for name, seconds in second.start_up_s.items():
        moment += seconds
        found[name] = moment
    return found


def between(begin: float, moments: dict[str, float]) -> Stages:
    pairs = itertools.pairwise([begin, *moments.values()])
    return {name: later - earlier for name, (earlier, later) in zip(moments, pairs, strict=True)}


def script_started(job_id: str) -> float:
    """Return when SLURM has started the batch script of a job that runs on this machine, in unix seconds."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for pid, known in process.stats().items():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue
        if any(word.endswith(f"job{int(job_id):05}/slurm_script") for word in words):
            return booted + known.start / os.sysconf("SC_CLK_TCK")
    raise SystemExit(f"the batch script of job {job_id} is not found")


def standby_ranks(run: RunDir) -> int:
    """Return how many ranks are ready for the second attempt."""
    log = run.attempt(1).path / "standby.log"
    return log.read_text().splitlines().count("ready") if log.exists() else 0


def measure_torchrun(folder: Path, environment: dict[str, str], ranks: int) -> Stages:
    """Return what the kill of a worker has cost a training under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--max-restarts=1"]
    command += ["--monitor-interval=0.1", "-m", "slurmtrain", *TRAINING, "train"]
    with (folder / "log").open("w") as log:
        launcher = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_until(lambda: torchrun_steps(folder, 1) >= STEPS)
            pids = child_pids(launcher.pid)
            killed = time.time()
            os.kill(max(pids), signal.SIGKILL)
            wait_until(lambda: not any(map(process.lives, pids)))
            gone = time.time()
            wait_until(lambda: torchrun_steps(folder, 2) >= 1)
            return between(killed, {"all ranks are gone": gone, "the first step is done": time.time()})
        finally:
            # The workers have sessions of their own, and would train on.
            pids = child_pids(launcher.pid) if launcher.poll() is None else []
            for pid in [launcher.pid, *pids]:
                os.kill(pid, signal.SIGKILL)
            launcher.wait()
            wait_until(lambda: not any(map(process.lives, pids)))


def wait_until(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            raise SystemExit(f"nothing came within {timeout_s:.0f} s")
        time.sleep(POLL_S)


def steps_done(run: RunDir, number: int) -> int:
    """Return how many steps attempt `number` has done, as far as its log shows."""
    attempt = attempts.read_attempt(run, number) if number in run.attempt_numbers() else None
    if attempt is None or attempt.first_step is None or attempt.stepping is None:
        return 0
    # What it has written since is none of its steps.
    if not run.metrics_file.exists() or run.metrics_file.stat().st_mtime < attempt.stepping:
        return 0
    return (reached_step.last_logged_step(run) or 0) - attempt.first_step


def torchrun_steps(folder: Path, number: int) -> int:
    """Return how many steps the run of start `number` has logged: each start makes a run of its own."""
    runs = (
        sorted(all_runs(folder / "runs"), key=lambda run: run.path.stat().st_ctime)
        if (folder / "runs").exists()
        else []
    )
    return reached_step.last_logged_step(runs[number - 1]) or 0 if len(runs) >= number else 0


def child_pids(parent: int) -> list[int]:
    """Return the processes that `parent` has started."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


if __name__ == "__main__":
    main()
