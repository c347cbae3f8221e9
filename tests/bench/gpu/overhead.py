"""python -m tests.bench.gpu.overhead [--blocks 16] [--steps 25]: what the numbers of a training and its watch cost on a GPU.

One training on one GPU, in which all of it is switched on and off after every short block of steps: the check for numbers
that are not finite, loss and norms, the times of the parts of a step, operations, and the watchdog. Without it, loss, gradient
norm and speed are logged every tenth step, as in most loops. Shown is the ratio of the time of a step with it to that without,
over pairs of neighbouring blocks. A step of this model takes some 20 to 30 ms, so that what the host does in it shows.

Wanted: at most 1.5 % (1 % for the numbers, 0.5 % for the watch).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from slurmtrain.config.compose import compose
from slurmtrain.config.schema import WatchdogConfig
from slurmtrain.observe.phases import PhaseClock
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.jobs.train import build_trainer
from slurmtrain.runtime.startup_times import Timeline
from slurmtrain.runtime.watchdog.progress import Position
from slurmtrain.runtime.watchdog.watchdog import Watchdog
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import signals
from slurmtrain.training.hooks.base import TrainingHook, TrainingHooks
from slurmtrain.training.hooks.nonfinite_guard import NonfiniteGuard
from slurmtrain.training.hooks.reporting import StepReports
from slurmtrain.training.state import StepResult, TrainingState
from slurmtrain.training.trainer import Trainer
from tests.bench.overhead import SKIPPED, say

LOG_EVERY = 10
MODEL = ("dim=768", "n_layers=12", "n_heads=12", "n_kv_heads=4", "max_seq_len=1024", "vocab_size=32000")


class PlainLog(TrainingHook):
    """Logs what most loops log."""

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if state.step % LOG_EVERY == 0:
            values = {"loss": result.loss_sum.item() / result.tokens, "grad_norm": float(result.grad_norm)}
            state.hooks.log(state.step, {**values, "tokens_per_s": state.throughput.tokens_per_s})


class Blocks(TrainingHook):
    """Switches everything on and off, and measures the blocks.

    Attributes:
        seconds: of a step, by block; off and on in turns.
    """

    def __init__(self, trainer: Trainer, distributed: DistributedContext, steps: int):
        self._trainer, self._distributed, self._steps = trainer, distributed, steps
        state = trainer.state
        kept = [hook for hook in state.hooks if isinstance(hook, StepReports | NonfiniteGuard)]
        self._hooks = TrainingHooks([PlainLog(), self]), TrainingHooks([*kept, self])
        self._timer, self._undos = state.phases._timer, trainer._undos
        self._watchdog: Watchdog | None = None
        self._began, self.seconds = 0.0, list[float]()
        state.hooks = self._hooks[0]

    def before_step(self, state: TrainingState) -> None:
        within = state.step % self._steps
        if within == 0:
            self._end_block()
            self._switch(state, len(self.seconds) % 2 == 1)
        if within == SKIPPED:
            torch.cuda.synchronize()
            self._began = time.perf_counter()

    def close(self, state: TrainingState) -> None:
        self._end_block()
        if self._watchdog is not None:
            self._watchdog.close()

    def _end_block(self) -> None:
        if self._began:
            torch.cuda.synchronize()
            self.seconds.append((time.perf_counter() - self._began) / (self._steps - SKIPPED))

    def _switch(self, state: TrainingState, on: bool) -> None:
        trainer, phases = self._trainer, state.phases
        state.hooks = self._hooks[on]
        trainer._wants_numbers, trainer._undos = on, self._undos if on else []
        state.numbers.restore([])
        phases._timer = self._timer if on else None
        phases.start()
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if on:
            self._watchdog = Watchdog(WatchdogConfig(), self._distributed, None)
            self._watchdog.follow(lambda: Position(0, state.step, True))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.overhead")
    parser.add_argument("--blocks", type=int, default=16, help="of each kind")
    parser.add_argument("--steps", type=int, default=25, help="of a block")
    options = parser.parse_args(words)
    config = compose(
        [
            "experiment=smoke",
            *(f"model.{word}" for word in MODEL),
            "data._target_=tests.bench.gpu.__main__.RandomTokens",
            *("+data.vocab_size=${model.vocab_size}", "data.seq_len=1024", "parallel.param_dtype=bfloat16"),
            *("train.global_batch_size=8", f"train.steps={2 * options.blocks * options.steps}", "train.eval_every=0"),
            f"train.log_every={LOG_EVERY}",
        ]
    )
    distributed = DistributedContext(Environment(source="single"), torch.device("cuda", 0))
    with tempfile.TemporaryDirectory() as folder:
        where = AttemptContext(RunDir(Path(folder)), 1, supervised=True)
        where.attempt_dir.path.mkdir(parents=True)
        agreement = StopAgreement(signals.StopFlag(), None)
        trainer = build_trainer(config, distributed, where, agreement, Timeline())
        assert isinstance(trainer.state.phases, PhaseClock)
        blocks = Blocks(trainer, distributed, options.steps)
        trainer.fit()
    seconds = blocks.seconds[2:]  # the first two warm up
    print(f"{torch.cuda.get_device_name()}: {min(seconds) * 1e3:.1f} ms a step")
    more, error = say("time of a step, on to off", seconds)
    print(f"in all: {more - 1:+.2%} +- {error:.2%} of a step's time; wanted <= 1.5%")


if __name__ == "__main__":
    main()
