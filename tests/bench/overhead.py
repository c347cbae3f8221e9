"""What the watch over a training costs: watchdog, heartbeats and the check of its numbers, on against off.

Wanted: at most 0.5 % of the time of a step.

python -m tests.bench overhead [--blocks 40] [--steps 20]

One training of two ranks (DDP), in which the watch is switched on and off after every short block of steps, so that whatever
else the machine does meets both alike. It costs, first, processor time of the thread that trains: shown is the ratio of the
median step with it to that without, with the standard error over pairs of neighbouring blocks. Second, the processor time of
the watch's own threads, in the same unit. Their sum is to be small. The ratio by the clock is shown beside it, too, but cannot
resolve so little on a machine that does other things.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slurmtrain.config.schema import WatchdogConfig
from slurmtrain.data import BatchLoader
from slurmtrain.runtime.addresses import HeldPort
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.watchdog.progress import Position
from slurmtrain.runtime.watchdog.watchdog import Watchdog
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.signals import install_signal_handlers
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.hooks.nonfinite_guard import NonfiniteGuard
from slurmtrain.training.state import TrainingState
from tests.bench import throughput
from tests.bench.throughput import RANKS

SKIPPED = 3  # steps at the beginning of a block, in which threads start or end


def main() -> None:
    measure_in_blocks("overhead", run_rank)


def measure_in_blocks(name: str, run_rank: Callable[[int, int, str, argparse.Namespace], None]) -> None:
    """Read the options of a benchmark that switches something on and off in blocks of steps, and run its ranks.

    Args:
        name: of the benchmark.
        run_rank: a function of a module, which each rank calls with its number, a free port, an empty folder and the
            options `blocks` and `steps`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench {name}")
    parser.add_argument("--blocks", type=int, default=40, help="of each kind")
    parser.add_argument("--steps", type=int, default=20, help="of a block; a step takes about a tenth of a second")
    options, _ = parser.parse_known_args()
    port = HeldPort()
    with TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(port.take(), folder, options), nprocs=RANKS)


class Switch:
    """Whether the watch is on now."""

    on = False


SWITCH = Switch()


class SwitchedGuard(NonfiniteGuard):
    """The check of the numbers, while the watch is on."""


def _switch(event: str) -> None:
    original = getattr(NonfiniteGuard, event)

    def switched(self: NonfiniteGuard, *arguments: Any) -> Any:
        return original(self, *arguments) if SWITCH.on else None

    setattr(SwitchedGuard, event, switched)


for _event in ("gives_up", "before_optimizer_step", "skips_update", "numbers_known", "wants_rollback", "after_step"):
    if _event in vars(NonfiniteGuard):
        _switch(_event)


class Spent(NamedTuple):
    """Seconds by the clock, and of processor time of the thread that trains."""

    wall: float
    cpu: float

    @staticmethod
    def now() -> Spent:
        return Spent(time.perf_counter(), time.thread_time())

    def since(self, before: Spent) -> Spent:
        return Spent(self.wall - before.wall, self.cpu - before.cpu)


class Blocks(TrainingHook):
    """Switches the watch on and off, and measures every step.

    Attributes:
        spent: of each block, off or on in turns, its steps.
        threads_s: processor time of the watch's threads, in seconds, in `on_s` seconds.
    """

    def __init__(self, distributed: DistributedContext, agreement: StopAgreement, steps: int):
        self._distributed, self._agreement, self._steps = distributed, agreement, steps
        self._watchdog: Watchdog | None = None
        self._began: Spent | None = None
        self.spent: list[list[Spent]] = []
        self.threads_s, self.on_s, self._started = 0.0, 0.0, 0.0

    def before_step(self, state: TrainingState) -> None:
        if self._began is not None:
            self.spent[-1].append(Spent.now().since(self._began))
        if state.step % self._steps == 0:
            dist.barrier()
            self.spent.append([])
            SWITCH.on = len(self.spent) % 2 == 0
            if SWITCH.on:
                self._watchdog = Watchdog(WatchdogConfig(), self._distributed, None)
                self._watchdog.follow(lambda: Position(self._agreement.rounds, state.step, True))
                self._started = time.monotonic()
            elif self._watchdog is not None:
                self._close()
            dist.barrier()
        self._began = Spent.now()

    def close(self, state: TrainingState) -> None:
        if SWITCH.on and self._watchdog is not None:
            self._close()

    def _close(self) -> None:
        assert self._watchdog is not None
        self.threads_s += sum(map(cpu_seconds, threading.enumerate()))
        self.on_s += time.monotonic() - self._started
        self._watchdog.close()


def cpu_seconds(thread: threading.Thread) -> float:
    """The processor time of one of the watch's threads; 0 of another one."""
    if thread.name not in ("watchdog", "heartbeats"):
        return 0.0
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def run_rank(rank: int, port: int, folder: str, options: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signals = install_signal_handlers()
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    setattr(throughput, "NonfiniteGuard", SwitchedGuard)  # noqa: B010 (what the trainer of the other benchmark is built with)
    agreement = StopAgreement(signals, control := dist.new_group())
    environment = Environment(
        source="local", rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS, tasks_per_node=(RANKS,)
    )
    distributed = DistributedContext(
        environment, torch.device("cpu"), dist.group.WORLD, control, store_address=("127.0.0.1", port)
    )
    bench = throughput.Bench(rank, Path(folder), 2 * options.blocks * options.steps, agreement, control)
    blocks = Blocks(distributed, agreement, options.steps)
    loader = bench.loader(BatchLoader, throughput.LAYOUTS["DDP"])
    with (Path(folder) / f"log-{rank}").open("w") as log, redirect_stdout(log):
        bench.trainer("DDP", loader, [blocks]).fit()
    kept = [block[SKIPPED:] for block in blocks.spent[2:]]  # the first two warm up
    wall, cpu = ([statistics.median(values) for values in numbers_of(kept, name)] for name in ("wall", "cpu"))
    if rank == 0:
        print(
            f"{RANKS} ranks, {options.blocks} blocks of {options.steps} steps each way, {wall[0] * 1e3:.0f} ms a step; "
            f"load average {os.getloadavg()[0]:.1f}"
        )
        say("by the clock, on to off", wall)
        more, error = say("processor time of the thread that trains, on to off", cpu)
        share = blocks.threads_s / blocks.on_s * statistics.median(wall) / statistics.median(cpu)
        print(
            f"the threads of the watch: {blocks.threads_s / blocks.on_s:.3%} of a processor, {share:.3%} of a step's time"
        )
        print(f"in all: {more - 1 + share:+.2%} +- {error:.2%} of a step's processor time; wanted <= 0.5%")
    dist.destroy_process_group()


def numbers_of(blocks: Sequence[Sequence[Spent]], name: str) -> list[list[float]]:
    """Return one of the two numbers of each step of each block."""
    return [[getattr(each, name) for each in block] for block in blocks]


def say(what: str, values: Sequence[float]) -> tuple[float, float]:
    """Print and return the ratio of blocks that are on to their neighbours that are off, and its standard error."""
    ratios = [one / other for other, one in zip(values[::2], values[1::2], strict=False)]
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    print(f"{what}: {mean:.4f} +- {error:.4f} (median {statistics.median(ratios):.4f})")
    return mean, error


if __name__ == "__main__":
    main()
