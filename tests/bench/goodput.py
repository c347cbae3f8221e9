"""The share of the time that is training, when ranks are killed, stand still and are preempted at set steps.

python -m tests.bench goodput [--steps 2400] [--only ours,torchrun,...]

The same loop (two ranks on one node of a sandbox, a checkpoint every 10 steps, a hang counts as one after 20 s) runs

- ours        `submit -- python loop.py`, with the lines of slurmtrain in it and its Checkpointer;
- torchrun    sbatch --requeue with torchrun --max-restarts, saving by torch.save and a rename;
- submitit    a callable that is submitted again by itself (DelayedSubmission), saving in the same way;
- lightning   its Trainer with SLURMEnvironment(auto_requeue=True) and ModelCheckpoint, where it is installed: left out with a
              sentence where it is not. It requeues at the warning before a time limit; after a TERM it leaves, and is not.

With fewer steps two of these meet: a loop that ignores TERM trains on for GraceTime and KillWait, 40 s or more, after the
preemption, and what comes within that time hides what the preemption has cost.

A job that ends without having finished is submitted again by this program, as a person would, at once; that is counted, and a
real person would take longer. goodput = steps x undisturbed step time / time from the submission to the last step, with the
least median step time of all of them, so that nobody gains by slow steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain import sandbox

HANG_S = 20
PATIENCE_S = 1500.0  # for one loop; it counts as not finished then
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

TORCHRUN = """#!/bin/bash
#SBATCH --partition=low --nodes=1 --ntasks-per-node=1 --cpus-per-task=2 --mem=1G --time=30 --requeue --open-mode=append
#SBATCH --output=torchrun.log
srun --cpus-per-task=2 {python} -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 100 loop.py
"""

LIGHTNING = '''
"""The same loop as a LightningModule."""
import datetime, json, os, pathlib, time
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
FOLDER = pathlib.Path(os.environ["BENCH_FOLDER"])
STEPS, HANG_S = int(os.environ["BENCH_STEPS"]), int(os.environ["BENCH_HANG_S"])

class Loop(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Linear(64, 64)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters())
    def on_train_start(self):
        (FOLDER / f"rank-{self.global_rank}.pid").write_text(str(os.getpid()))
    def training_step(self, batch, index):
        time.sleep(0.1)
        return self.model(batch[0]).square().mean()
    def on_train_batch_end(self, *arguments):
        if self.global_rank == 0:
            with (FOLDER / "progress").open("a") as file:
                file.write(json.dumps([self.global_step, time.time()]) + "\\n")

saving = ModelCheckpoint(dirpath=FOLDER / "checkpoints", every_n_train_steps=10, save_last=True)
trainer = lightning.Trainer(
    max_steps=STEPS, accelerator="cpu", devices=2, callbacks=[saving], default_root_dir=FOLDER, logger=False,
    strategy=DDPStrategy(process_group_backend="gloo", timeout=datetime.timedelta(seconds=HANG_S)),
    plugins=[SLURMEnvironment(auto_requeue=True)], enable_progress_bar=False, enable_model_summary=False)
samples = torch.utils.data.TensorDataset(torch.randn(2 * 8 * STEPS, 64))
trainer.fit(Loop(), torch.utils.data.DataLoader(samples, batch_size=8), ckpt_path="last")
'''

LIGHTNING_SCRIPT = """#!/bin/bash
#SBATCH --partition=low --nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --mem=2G --time=30 --requeue --open-mode=append
#SBATCH --output=lightning.log --signal=SIGUSR1@90
export MASTER_ADDR=127.0.0.1  # the names of a sandbox's nodes do not resolve
srun --cpus-per-task=1 --kill-on-bad-exit=1 {python} lightning_loop.py
"""


@dataclass
class Race:
    """One loop on its way through the schedule.

    Attributes:
        start: submits it once, and returns its job.
        again: how often it was submitted again because its job had ended.
    """

    name: str
    folder: Path
    steps: int
    environment: dict[str, str]
    start: Callable[[Race], str]
    again: int = 0
    happened: list[str] = field(default_factory=list)

    def progress(self) -> list[tuple[int, float]]:
        """Each step that was done, also twice, and when."""
        path = self.folder / "progress"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("]")]

    def run(self) -> float | None:
        """Seconds from the submission to the last step; None: it has not got there."""
        begun, left = time.time(), [(int(share * self.steps), what) for share, what in SCHEDULE]
        job = self.start(self)
        try:
            while time.time() < begun + PATIENCE_S:
                done = self.progress()
                furthest = max((step for step, _ in done), default=0)
                if furthest >= self.steps:
                    return done[-1][1] - begun
                if left and furthest >= left[0][0] and done[-1][0] >= left[0][0]:
                    self.disturb(left.pop(0)[1])
                state = self.call("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T").split()
                over = not state or state[0] in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
                if over and max((step for step, _ in self.progress()), default=0) < self.steps:
                    self.again += 1
                    job = self.start(self)
                time.sleep(0.3)
            return None
        finally:
            self.call("scancel", job)

    def disturb(self, what: str) -> None:
        self.happened.append(what)
        if what == "preempt":
            options = ["--partition=high", "--exclusive", "--nodes=1", "--nodelist=n0", "--output=/dev/null"]
            self.call("sbatch", *options, "--wrap", "sleep 1")
            return
        os.kill(int((self.folder / "rank-1.pid").read_text()), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def call(self, *words: str) -> str:
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout

    def longest(self) -> str:
        """The pauses that the schedule has cost, in seconds from one step to the next."""
        done = self.progress()
        gaps = [(b[1] - a[1], b[0]) for a, b in itertools.pairwise(done) if b[1] - a[1] > 2.0]
        return ", ".join(f"{gap:.1f} s before it did step {step}" for gap, step in gaps) or "no pause"

    def step_s(self) -> float:
        """The median time between two steps in a row, in seconds."""
        done = self.progress()
        return statistics.median([b[1] - a[1] for a, b in itertools.pairwise(done) if b[0] == a[0] + 1] or [math.inf])


def start_ours(race: Race) -> str:
    words = "+cluster=sandbox cluster.sandbox=null cluster.nodes=1 cluster.tasks_per_node=2 train.device=cpu"
    command = [sys.executable, "-m", "slurmtrain", *words.split(), "submit", "--json", "--", sys.executable, "loop.py"]
    runs = sorted(race.folder.glob("runs/*/*/run.json"))
    if runs:
        said = race.call(sys.executable, "-m", "slurmtrain", "resume", runs[-1].parent.name, "--json")
    else:
        said = race.call(*command)
    return str(json.loads(said)["job_ids"][-1])


def start_torchrun(race: Race) -> str:
    (race.folder / "torchrun.sbatch").write_text(TORCHRUN.format(python=sys.executable))
    return race.call("sbatch", "--parsable", "torchrun.sbatch").strip()


def start_submitit(race: Race) -> str:
    (race.folder / "start.py").write_text(SUBMITIT)
    return race.call(sys.executable, "start.py").split()[-1]


def start_lightning(race: Race) -> str:
    (race.folder / "lightning_loop.py").write_text(LIGHTNING)
    (race.folder / "lightning.sbatch").write_text(LIGHTNING_SCRIPT.format(python=sys.executable))
    return race.call("sbatch", "--parsable", "lightning.sbatch").strip()


CONTENDERS = {"ours": start_ours, "torchrun": start_torchrun, "submitit": start_submitit, "lightning": start_lightning}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench goodput")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--only", default="ours,torchrun,submitit,lightning")
    options, _ = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and the sandbox ends, too
    names = options.only.split(",")
    if "lightning" in names and importlib.util.find_spec("lightning") is None:
        print("lightning is left out: it is not installed")
        names.remove("lightning")
    cluster = sandbox.up(
        sandbox.SandboxSpec(nodes=1, cpus=4), sandbox.default_directory(f"bench-{os.getpid()}"), ends_with=os.getpid()
    )
    try:
        with tempfile.TemporaryDirectory(prefix="bench-goodput-") as folder:
            races = [race_of(name, Path(folder), options.steps, cluster.env()) for name in CONTENDERS if name in names]
            results = []
            for race in races:
                results.append((race, race.run()))
                wall = results[-1][1]
                print(
                    f"{race.name}: {'not finished' if wall is None else f'{wall:.1f} s'}; {race.longest()}", flush=True
                )
            report(results)
    finally:
        cluster.down()


def race_of(name: str, folder: Path, steps: int, slurm: dict[str, str]) -> Race:
    own = folder / name
    own.mkdir()
    (own / "loop.py").write_text(LOOP)
    environment = {
        **os.environ,
        **slurm,
        "BENCH_FOLDER": str(own),
        "BENCH_STEPS": str(steps),
        "BENCH_HANG_S": str(HANG_S),
        "BENCH_OURS": str(int(name == "ours")),
        "XDG_STATE_HOME": str(own / "state"),
        "OMP_NUM_THREADS": "1",
    }
    return Race(name, own, steps, environment, CONTENDERS[name])


def report(results: list[tuple[Race, float | None]]) -> None:
    step_s = min(race.step_s() for race, _ in results)
    print(
        f"{'':10}{'wall':>8}{'goodput':>9}{'steps done':>12}{'submitted again':>17}   median step {1000 * step_s:.0f} ms, "
        f"load average {os.getloadavg()[0]:.1f} at the end"
    )
    for race, wall in results:
        if wall is None:
            furthest = max((step for step, _ in race.progress()), default=0)
            print(
                f"{race.name:10}   step {furthest} of {race.steps} after {PATIENCE_S:.0f} s ({', '.join(race.happened)})"
            )
            continue
        goodput = race.steps * step_s / wall
        print(
            f"{race.name:10}{wall:7.1f}s{goodput:9.1%}{len(race.progress()):12}{race.again:17}   {', '.join(race.happened)}"
        )


if __name__ == "__main__":
    main()
