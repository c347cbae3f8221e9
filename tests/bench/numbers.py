"""CPU time of a step with the check of loss and gradients on and off: two trainers in one process that take turns.

    python -m tests.bench numbers [--steps 300]

Off: a trainer without `NonfiniteGuard`, which then reads no numbers either.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import torch

from slurmtrain.config.compose import compose
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.jobs.train import build_trainer
from slurmtrain.runtime.startup_times import Timeline
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import signals
from slurmtrain.training.hooks.nonfinite_guard import NonfiniteGuard
from slurmtrain.training.trainer import Trainer

WARM_UP = 120  # the window of losses is full
PARTS = 10  # of all steps, by whose medians the error is estimated


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench numbers", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args(sys.argv[2:]).steps
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        on, off = (_trainer(Path(folder, name), guarded) for name, guarded in (("on", True), ("off", False)))
        times: list[tuple[float, float]] = []
        gc.collect()
        gc.freeze()  # as in a training
        with redirect_stdout(sys.stderr):
            for number in range(WARM_UP + steps):
                first, second = (on, off) if number % 2 else (off, on)  # neither always comes second
                took = {each is on: _step_s(each) for each in (first, second)}
                times.append((took[True], took[False]))
        for trainer in (on, off):
            trainer._close()
    measured = times[WARM_UP:]
    step_s = statistics.median(without for _, without in measured)
    parts = [measured[number::PARTS] for number in range(PARTS)]
    more = [statistics.median(with_it - without for with_it, without in part) for part in parts]
    more_s, error_s = statistics.mean(more), statistics.stdev(more) / PARTS**0.5
    print(
        f"step {1e3 * step_s:.2f} ms of one CPU; the check adds {1e6 * more_s:.0f} +- {1e6 * error_s:.0f} us "
        f"({more_s / step_s:+.2%} +- {error_s / step_s:.2%}); wanted <= 0.5%; load average {os.getloadavg()[0]:.1f}"
    )


def _trainer(folder: Path, guarded: bool) -> Trainer:
    folder.mkdir()
    words = ["experiment=smoke", "train.tensorboard=false", "train.steps=1000000", "optim.lr=1e-4"]
    config = compose([*words, "train.global_batch_size=16", "train.eval_every=0", "checkpoint.every_steps=0"])
    where = AttemptContext(RunDir(folder), 1, supervised=True)
    where.attempt_dir.path.mkdir(parents=True)
    world = DistributedContext(Environment(source="single"), torch.device("cpu"))
    agreement = StopAgreement(signals.StopFlag(), None)
    kept = NonfiniteGuard(config.train)
    built = build_trainer(config, world, where, agreement, Timeline())
    model, state = built._distributed_model, built.state
    return Trainer(
        config.train,
        config.optim,
        model,
        state.loader,
        built._forward_backward,
        ranks=state.ranks,
        stop_check=agreement,
        hooks=[kept] if guarded else [],
        data_hash="bench",
    )


def _step_s(trainer: Trainer) -> float:
    began = time.thread_time()
    trainer._train_step()
    return time.thread_time() - began
