"""The share of the time that is training, when ranks are killed, stand still and are preempted, against torchrun and submitit.

The same loop (two ranks on one node of a sandbox, a checkpoint every 10 steps, a hang counts as one after 20 s) runs

- ours        `submit -- python loop.py`, with the lines of slurmtrain in it and its Checkpointer;
- torchrun    sbatch --requeue with torchrun --max-restarts, saving by torch.save and a rename;
- submitit    a callable that is submitted again by itself (DelayedSubmission), saving in the same way.

With far fewer steps the disturbances meet: a loop that ignores TERM trains on for GraceTime and KillWait, 40 s or more, after
the preemption, and what comes within that time hides what the preemption has cost. A job that ends without having finished is
submitted again by this program, as a person would, at once; that is counted. goodput = steps x undisturbed step time / time
from the submission to the last step, with the least median step time of all of them, so that nobody gains by slow steps.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurmtrain import sandbox
from tests.bench.side_by_side import REPOSITORY, Row, options, show

HANG_S = 20
PATIENCE_S = 1500.0  # for one loop
# At which share of the steps what happens.
SCHEDULE = ((0.2, "kill"), (0.5, "preempt"), (0.8, "hang"))

LOOP = '''
"""A loop of two ranks: by slurmtrain if OURS is set, else by hand."""
import datetime, json, os, pathlib, time
FOLDER = pathlib.Path(os.environ["BENCH_FOLDER"])
STEPS, HANG_S = int(os.environ["BENCH_STEPS"]), int(os.environ["BENCH_HANG_S"])
OURS = os.environ.get("BENCH_OURS") == "1"

def train():
    if OURS:
        import slurmtrain
        slurmtrain.init(device="cpu", watchdog=HANG_S)
    import torch, torch.distributed as dist
    if not OURS:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=HANG_S))
    rank = dist.get_rank()
    (FOLDER / f"rank-{rank}.pid").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    saved, first = FOLDER / "saved.pt", 0
    if OURS:
        checkpointer = slurmtrain.Checkpointer()
        restored = checkpointer.restore(model=model, optimizer=optimizer)
        first = restored.step if restored else 0
    elif saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"]); first = state["step"]
    for step in range(first, STEPS):
        model(torch.randn(8, 64)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step(); optimizer.zero_grad()
        time.sleep(0.1)
        if rank == 0:
            with (FOLDER / "progress").open("a") as file:
                file.write(json.dumps([step + 1, time.time()]) + "\\n")
        due = (step + 1) % 10 == 0
        if OURS:
            stop = slurmtrain.should_stop()
            if due or stop:
                checkpointer.save(step + 1, model=model, optimizer=optimizer)
            if stop:
                slurmtrain.exit_for_requeue()
        elif due and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, saved.with_suffix(".new")); saved.with_suffix(".new").replace(saved)
    dist.barrier()
    if OURS:
        checkpointer.save(STEPS, model=model, optimizer=optimizer).result()
    dist.destroy_process_group()

class Loop:
    def __call__(self):
        import submitit
        submitit.helpers.TorchDistributedEnvironment().export()
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # the names of a sandbox's nodes do not resolve
        train()
    def checkpoint(self):
        import submitit
        return submitit.helpers.DelayedSubmission(Loop())

if __name__ == "__main__":
    train()
'''

SUBMITIT = """
import sys, submitit
from submitit.slurm.slurm import SlurmExecutor
from loop import Loop
executor = SlurmExecutor("submitit", max_num_timeout=100)
executor.update_parameters(job_name="loop", partition="low", nodes=1, ntasks_per_node=2, cpus_per_task=1, mem="1GB", time=30,
                           srun_args=["--kill-on-bad-exit=1"], signal_delay_s=60, stderr_to_stdout=True)
print(executor.submit(Loop()).job_id)
"""

TORCHRUN = f"""#!/bin/bash
#SBATCH --partition=low --nodes=1 --ntasks-per-node=1 --cpus-per-task=2 --mem=1G --time=30 --requeue --open-mode=append
#SBATCH --output=torchrun.log
srun --cpus-per-task=2 {sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 100 loop.py
"""


@dataclass
class Race:
    """One loop on its way through the schedule.

    Attributes:
        start: submits it once, and returns its job.
        again: how often it was submitted again because its job had ended.
    """

    folder: Path
    steps: int
    environment: dict[str, str]
    start: Callable[[Race], str]
    again: int = 0

    def progress(self) -> list[tuple[int, float]]:
        """Each step that was done, also twice, and when."""
        path = self.folder / "progress"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("]")]

    def furthest(self) -> int:
        return max((step for step, _ in self.progress()), default=0)

    def run(self) -> float:
        """Return the seconds from the submission to the last step."""
        begun, left = time.time(), [(int(share * self.steps), what) for share, what in SCHEDULE]
        job = self.start(self)
        try:
            while time.time() < begun + PATIENCE_S:
                done = self.progress()
                if self.furthest() >= self.steps:
                    return done[-1][1] - begun
                if left and self.furthest() >= left[0][0] and done[-1][0] >= left[0][0]:
                    self.disturb(left.pop(0)[1])
                state = self.call("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T").split()
                over = not state or state[0] in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
                if over and self.furthest() < self.steps:
                    self.again += 1
                    job = self.start(self)
                time.sleep(0.3)
            raise SystemExit(f"{self.folder.name} did step {self.furthest()} of {self.steps} in {PATIENCE_S:.0f} s")
        finally:
            self.call("scancel", job)

    def disturb(self, what: str) -> None:
        if what == "preempt":
            options = ["--partition=high", "--exclusive", "--nodes=1", "--nodelist=n0", "--output=/dev/null"]
            self.call("sbatch", *options, "--wrap", "sleep 1")
            return
        os.kill(int((self.folder / "rank-1.pid").read_text()), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def call(self, *words: str) -> str:
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout

    def rows(self, wall: float, step_s: float) -> list[Row]:
        name, done = self.folder.name, self.progress()
        pauses = sorted((later[1] - one[1] for one, later in itertools.pairwise(done)), reverse=True)[: len(SCHEDULE)]
        return [
            Row(f"{name}: goodput", [100 * self.steps * step_s / wall], "%"),
            Row(f"{name}: pause of a disturbance", pauses),
            Row(f"{name}: steps done twice", [len(done) - self.steps], ""),
            Row(f"{name}: submitted again", [self.again], "times"),
        ]

    def step_s(self) -> float:
        """Return the median time between two steps in a row."""
        return statistics.median(b[1] - a[1] for a, b in itertools.pairwise(self.progress()) if b[0] == a[0] + 1)


def start_ours(race: Race) -> str:
    words = "+cluster=sandbox cluster.sandbox=null cluster.nodes=1 cluster.tasks_per_node=2 train.device=cpu"
    command = [sys.executable, "-m", "slurmtrain", *words.split(), "submit", "--json", "--", sys.executable, "loop.py"]
    runs = sorted(race.folder.glob("runs/*/*/run.json"))
    if runs:
        command = [sys.executable, "-m", "slurmtrain", "resume", runs[-1].parent.name, "--json"]
    return str(json.loads(race.call(*command))["job_ids"][-1])


def start_torchrun(race: Race) -> str:
    (race.folder / "torchrun.sbatch").write_text(TORCHRUN)
    return race.call("sbatch", "--parsable", "torchrun.sbatch").strip()


def start_submitit(race: Race) -> str:
    (race.folder / "start.py").write_text(SUBMITIT)
    return race.call(sys.executable, "start.py").split()[-1]


LOOPS = {"ours": start_ours, "torchrun": start_torchrun, "submitit": start_submitit}


def main(words: list[str]) -> None:
    chosen = options(__doc__, words, steps=2400, only=tuple(LOOPS))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and the sandbox ends, too
    spec = sandbox.SandboxSpec(nodes=1, cpus=4)
    cluster = sandbox.up(spec, sandbox.default_directory(f"bench-{os.getpid()}"), ends_with=os.getpid())
    try:
        with tempfile.TemporaryDirectory(prefix="bench-goodput-", ignore_cleanup_errors=True) as folder:
            races = [race_of(name, Path(folder), chosen.steps, cluster.env()) for name in chosen.only]
            walls = []
            for race in races:
                walls.append(race.run())
                print(f"{race.folder.name}: {walls[-1]:.1f} s", flush=True)
            step_s = min(race.step_s() for race in races)
            rows = [row for race, wall in zip(races, walls, strict=True) for row in race.rows(wall, step_s)]
            show(f"{chosen.steps} steps with a kill, a preemption and a hang", rows)
    finally:
        cluster.down()


def race_of(name: str, folder: Path, steps: int, slurm: dict[str, str]) -> Race:
    own = folder / name
    own.mkdir()
    (own / "loop.py").write_text(LOOP)
    variables = {"BENCH_FOLDER": str(own), "BENCH_STEPS": str(steps), "BENCH_HANG_S": str(HANG_S)}
    variables |= {"BENCH_OURS": str(int(name == "ours")), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return Race(own, steps, {**os.environ, **slurm, **variables, "XDG_STATE_HOME": str(own / "state")}, LOOPS[name])
