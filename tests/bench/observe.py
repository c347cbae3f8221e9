"""What the numbers of a training cost: times of the parts of a step, operations, norms, slow ranks; all of it on against off.

Wanted: at most 1 % of the time of a step.

python -m tests.bench observe [--blocks 40] [--steps 20]

As `overhead` does it: one training of two ranks (DDP), in which all of it is switched on and off after every short block of
steps, so that whatever else the machine does meets both alike. Both write every tenth step to metrics.jsonl; without, what was
written before there were these numbers: loss, gradient norm, learning rate, tokens/s. With, also the norms of each layer every
tenth step, and ranks compare every fifth, which is more often than a run does by default. It costs processor time of the
thread that trains: shown is the ratio of the median step with it to that without, over pairs of neighbouring blocks; the same
of the mean step, in which logged steps count; and both by the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import warnings
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from slurmtrain.config.schema import ObserveConfig, OptimConfig, ParallelConfig, TrainConfig
from slurmtrain.data import BatchLoader
from slurmtrain.data.loading import loader as loading
from slurmtrain.data.loading.row_counts import NO_ROWS, row_counts
from slurmtrain.models import Decoder
from slurmtrain.observe.phases import HostTimer, PhaseClock
from slurmtrain.parallel.parallelize import parallelize
from slurmtrain.planner.peaks import Peak
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.system.signals import install_signal_handlers
from slurmtrain.training.forward_backward import build_forward_backward
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.hooks.reporting import RunReporter, StepReports
from slurmtrain.training.hooks.stragglers import StragglerWatch
from slurmtrain.training.ranks import TrainingRanks
from slurmtrain.training.state import StepResult, TrainingState
from slurmtrain.training.trainer import Trainer
from tests.bench import throughput
from tests.bench.overhead import SKIPPED, Spent, measure_in_blocks, numbers_of, say
from tests.bench.throughput import BATCH, LAYOUTS, MODEL, RANKS

LOG_EVERY = 10


def main() -> None:
    measure_in_blocks("observe", run_rank)


class Reports(StepReports):
    """The reports of a run while all is on; otherwise those that there were before."""

    on = False

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if self.on:
            super().after_step(state, result)
        elif state.step % LOG_EVERY == 0:
            total, speed = state.ranks.sum(result.loss_sum), state.throughput
            values = {"loss": total.item() / result.tokens, "grad_norm": float(result.grad_norm)}
            values |= {"lr": result.learning_rate, "tokens_per_s": speed.tokens_per_s, "step_time_s": speed.step_time_s}
            state.hooks.log(state.step, {**values, "data_wait_s": speed.data_wait_s, "data_hash": "bench"})


class Watch(StragglerWatch):
    """The comparison of the ranks, while all is on."""

    on = False

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if self.on:
            super().after_step(state, result)
        else:
            self._look(state)


class Blocks(TrainingHook):
    """Switches everything on and off, and measures every step."""

    def __init__(self, steps: int, phases: PhaseClock, passes: object):
        self._steps, self._phases, self._passes = steps, phases, passes
        self._timer, self._began = HostTimer(), Spent.now()
        self.spent: list[list[Spent]] = []

    def before_step(self, state: TrainingState) -> None:
        if self.spent:
            self.spent[-1].append(Spent.now().since(self._began))
        if state.step % self._steps == 0:
            dist.barrier()
            self.spent.append([])
            self._switch(len(self.spent) % 2 == 0)
            dist.barrier()
        self._began = Spent.now()

    def _switch(self, on: bool) -> None:
        Reports.on = Watch.on = on
        self._phases._timer = self._timer if on else None
        self._phases.start()
        setattr(self._passes, "_notes_waits", on)  # noqa: B010 (of the class for one kind of layout)
        setattr(loading, "row_counts", row_counts if on else lambda batches: NO_ROWS)  # noqa: B010


def run_rank(rank: int, port: int, folder: str, options: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signals = install_signal_handlers()
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    agreement = StopAgreement(signals, control := dist.new_group())
    steps = 2 * options.blocks * options.steps
    loader = throughput.Bench(rank, Path(folder), steps, agreement, control).loader(BatchLoader, LAYOUTS["DDP"])
    torch.manual_seed(0)
    model = Decoder(**MODEL)
    flops = model.training_flops()
    distributed_model = parallelize(
        model,
        ParallelConfig(),
        LAYOUTS["DDP"],
        rank=rank,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
        fill=lambda model: model,
    )
    phases = PhaseClock(HostTimer())
    passes = build_forward_backward(distributed_model, 1, loader.micro_batch_size, phases)
    blocks = Blocks(options.steps, phases, passes)
    train = TrainConfig(steps=steps, global_batch_size=BATCH, eval_every=0, log_every=LOG_EVERY)
    writes = [RunReporter(Path(folder) / "metrics.jsonl", None)] if rank == 0 else []
    trainer = Trainer(
        train,
        OptimConfig(warmup_steps=0),
        distributed_model,
        loader,
        passes,
        ranks=TrainingRanks(rank, dist.group.WORLD, control),
        stop_check=agreement,
        hooks=[
            *writes,
            Reports(train, ObserveConfig(per_layer_every=LOG_EVERY), Peak(1.0, "the benchmark")),
            Watch(5, f"n{rank}"),
            blocks,
        ],
        phases=phases,
        flops=flops,
    )
    with (Path(folder) / f"log-{rank}").open("w") as log, redirect_stdout(log):
        trainer.fit()
    kept = [block[SKIPPED:] for block in blocks.spent[2 : 2 * (len(blocks.spent) // 2)]]  # the first two warm up
    if rank == 0:
        found = {name: numbers_of(kept, name) for name in ("wall", "cpu")}
        print(
            f"{RANKS} ranks, {options.blocks} blocks of {options.steps} steps each way, "
            f"{statistics.median(found['wall'][0]) * 1e3:.0f} ms a step; load average {os.getloadavg()[0]:.1f}"
        )
        for words, measure in (("the median step", statistics.median), ("the mean step", statistics.mean)):
            say(f"{words} by the clock, on to off", [measure(block) for block in found["wall"]])
            more, error = say(f"{words} by processor time, on to off", [measure(block) for block in found["cpu"]])
        print(f"in all: {more - 1:+.2%} +- {error:.2%} of the mean step's processor time; wanted <= 1%")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
