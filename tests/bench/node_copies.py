"""Copies on the nodes against checkpoints in the run directory: what a save costs, and how long a restore takes.

python -m tests.bench node_copies [--gb 0.5] [--rounds 5] [--layouts replicated sharded] [--disk PATH] [--memory /dev/shm]

Two processes, each a node of its own, hold parameters with Adam. A save of each kind is made in turn in the same processes,
with nothing else to do: by how long it holds training up, and how long it takes to the commit. Then the state is restored from
the copies on the nodes; with one node's copy gone; and from the run directory, out of the page cache and from the disk. The
run directory is on a disk of this machine here, which is faster than what a thousand nodes share. Each ratio is one of two
measurements of the same round; shown is the median, and the range.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.restore.restorer import Restored
from slurmtrain.checkpoint.save.pending_save import PendingSave
from tests.bench.checkpoint import LAYOUTS, RANKS, Training, rotated, timed
from tests.bench.checkpoint_reference import drop_from_page_cache

PAIRS = {
    "stall: copy on the nodes": "stall: checkpoint",
    "to the commit: copy on the nodes": "to the commit: checkpoint",
    "restore: copies on the nodes": "restore: checkpoint, from the disk",
    "restore: one node's copy gone": "restore: checkpoint, from the disk",
    "restore: checkpoint, from the page cache": "restore: checkpoint, from the disk",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench node_copies")
    parser.add_argument("--gb", type=float, default=0.5, help="parameters and both moments of Adam, in all")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more comes before as a warm-up")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--disk", default=os.environ.get("TMPDIR", "."), help="where the run directory is")
    parser.add_argument("--memory", default="/dev/shm", help="where the copies are")
    options, _ = parser.parse_known_args()
    for layout in options.layouts:
        with (
            tempfile.TemporaryDirectory(prefix="bench-copies-", dir=options.disk) as disk,
            tempfile.TemporaryDirectory(prefix="bench-copies-", dir=options.memory) as memory,
        ):
            os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
            mp.spawn(run_rank, args=(layout, Path(disk).resolve(), Path(memory), options), nprocs=RANKS)


def run_rank(rank: int, layout: str, disk: Path, memory: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{disk}/store", rank=rank, world_size=RANKS)
    bench = Bench(rank, layout, disk / "checkpoints", memory, options.gb)
    for number in range(options.rounds + 1):
        bench.round(number)
        if number == 0:
            bench.seconds.clear()  # a warm-up
    if rank == 0:
        bench.report(layout, options)
    dist.destroy_process_group()


class Bench:
    """All measurements, on one rank. `seconds`: by name, one value a round, that of the slower rank."""

    def __init__(self, rank: int, layout: str, directory: Path, memory: Path, gb: float):
        self.rank, self.directory = rank, directory
        self.memory = memory / f"node{rank}"
        self.memory.mkdir()
        self.training = Training(layout, gb, 0.01)
        self.objects: dict[str, Any] = {"model": self.training.model, "optimizer": self.training.optimizer}
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.group = dist.new_group(backend="gloo")
        self.step = 0

    def note(self, name: str, seconds: float) -> None:
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.seconds[name].append(slowest.item())

    def round(self, number: int) -> None:
        checkpointer = self.checkpointer()
        checkpointer.restore(**self.objects)  # reserves memory, as a run does before its first step
        for measure in rotated((self.save, self.save_copy), number):
            measure(checkpointer)
        checkpointer.close()
        self.restores()

    def checkpointer(self, *, local: bool = True) -> Checkpointer:
        return Checkpointer(
            self.directory, group=self.group, local=self.memory if local else None, node=f"node{self.rank}"
        )

    def save(self, checkpointer: Checkpointer) -> None:
        """A checkpoint of the run directory alone: without the copy that comes after its commit."""
        checkpointer.hurry()
        self.measure_save("checkpoint", lambda step: checkpointer.save(step, **self.objects))

    def save_copy(self, checkpointer: Checkpointer) -> None:
        self.measure_save("copy on the nodes", lambda step: checkpointer.save_local(step, **self.objects))

    def measure_save(self, name: str, save: Callable[[int], PendingSave]) -> None:
        self.step += 1
        dist.barrier()
        saved = save(self.step).result()
        self.note(f"stall: {name}", saved.stall_s)
        self.note(f"to the commit: {name}", saved.seconds)
        dist.barrier()

    def restores(self) -> None:
        # A copy that is newer than the checkpoint.
        checkpointer = self.checkpointer()
        checkpointer.restore(**self.objects)
        self.step += 1
        checkpointer.save_local(self.step, **self.objects).result()
        checkpointer.close()
        self.restore("copies on the nodes", self.step, local=True)
        if self.rank == 0:
            shutil.rmtree(self.memory)
            self.memory.mkdir()
        self.restore("one node's copy gone", self.step, local=True)
        for where in ("from the page cache", "from the disk"):
            if where == "from the disk":
                os.sync()
                drop_from_page_cache([file for path in committed(self.directory) for file in path.iterdir()])
            self.restore(f"checkpoint, {where}", None, local=False)

    def restore(self, name: str, step: int | None, *, local: bool) -> None:
        checkpointer = self.checkpointer(local=local)
        dist.barrier()
        restored: list[Restored | None] = []
        seconds = timed(lambda: restored.append(checkpointer.restore(**self.objects)))
        found = restored[0]
        assert found is not None
        assert step is None or (found.step == step and found.origin)
        self.note(f"restore: {name}", seconds)
        checkpointer.close()

    def report(self, layout: str, options: argparse.Namespace) -> None:
        print(f"{layout}, {options.gb:g} GB of state on {RANKS} nodes; copies in {options.memory}")
        for name, seconds in self.seconds.items():
            print(f"  {name:44} {statistics.median(seconds):7.3f} s   {min(seconds):.3f} to {max(seconds):.3f}")
        for ours, theirs in PAIRS.items():
            ratios = [one / other for one, other in zip(self.seconds[ours], self.seconds[theirs], strict=True)]
            print(f"  {ours} / {theirs}: {statistics.median(ratios):.2f}   {min(ratios):.2f} to {max(ratios):.2f}")
