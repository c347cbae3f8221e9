"""Checkpoints against torch.distributed.checkpoint (DCP). Wanted: a stall of half of DCP's.

Two processes hold parameters with Adam, and both take turns in them; a value is that of the slower rank. Needs six times the
state in memory (eight where it is replicated) and seven times in free disk space, in TMPDIR or here: /tmp may be in memory.

    stall of a step by an asynchronous save         <= 0.5 x DCP async_save
    all time lost by it                             <= 1 x DCP async_save
    save and wait for the commit, digests included  <= 1 x dcp.save + fsync

The replicated layout is what DDP has: ours stages and writes one half on each of two ranks, and DCP stages everything on each
of them and writes one half. In the sharded one (FSDP2) both stage what a rank holds. A stall is what `save` takes and what the
optimiser's step right behind it takes longer than usual, where nothing hides the copying; all time lost has what the background
takes from the steps until it is over, too.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import slurmtrain
from tests.bench.side_by_side import Row, in_turn, options, ratio, seconds_of, show
from tests.support.gloo import rank_variables

RANKS, WIDTH, USUAL_STEPS, COMPUTE_S = 2, 2048, 3, 1.0


def main(words: list[str]) -> None:
    chosen = options(__doc__, words, gb=3.0, rounds=3, layouts=("replicated", "sharded"))
    for layout in chosen.layouts:
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=os.environ.get("TMPDIR", ".")) as name:
            mp.spawn(run_rank, args=(layout, Path(name).resolve(), chosen.gb, chosen.rounds), nprocs=RANKS)


def run_rank(rank: int, layout: str, folder: Path, gb: float, rounds: int) -> None:
    os.environ.update(rank_variables(rank, RANKS), OMP_NUM_THREADS="1")
    warnings.simplefilter("ignore")  # of DCP, about gloo and stagers
    os.chdir(folder)  # where the ranks meet by a file
    slurmtrain.init(device="cpu")
    bench = Bench(rank, Training(layout, gb), folder)
    lost = in_turn({name: partial(bench.lost, save) for name, save in bench.asynchronous.items()}, rounds)
    written = in_turn({"ours": bench.write_ours, "DCP": bench.write_dcp}, rounds)
    if rank == 0:
        rows = []
        for place, (what, wanted) in enumerate((("stall", "<= 0.5"), ("all time lost", "<= 1"))):
            ours, theirs = ([both[place] for both in lost[name]] for name in ("ours", "DCP"))
            rows += [Row(f"{what}: ours", ours), Row(f"{what}: DCP", theirs), ratio(what, ours, theirs, wanted)]
        rows += [Row(f"save and wait: {name}", values) for name, values in written.items()]
        rows.append(ratio("save and wait: ours / dcp.save + fsync", written["ours"], written["DCP"], "<= 1"))
        show(f"{layout}: a rank holds {sum(t.nbytes for t in bench.training.tensors()) / 1e9:.2f} GB", rows)
    bench.checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


class Training:
    """A model with Adam. Its gradients are always there, and forward and backward are a fixed amount of arithmetic."""

    def __init__(self, layout: str, gb: float):
        torch.manual_seed(0)
        layers = max(1, round(gb * 1e9 / 3 / 4 / WIDTH**2))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        if layout == "sharded":
            mesh = init_device_mesh("cpu", (RANKS,))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        gradients: dict[Any, Tensor] = {}  # one for all parameters of a shape: they are no part of what is measured
        for parameter in self.model.parameters():
            parameter.grad = gradients.setdefault(parameter.shape, torch.full_like(parameter, 1e-3))
        self.optimizer.step()
        for tensor in self.tensors():
            tensor.uniform_()  # not what a disk could make short work of
        self._products = 50
        seconds = min(seconds_of(self.forward_and_backward) for _ in range(3))
        self._products = round(50 * COMPUTE_S / slowest(seconds))

    def tensors(self) -> list[Tensor]:
        """What this rank holds of parameters and moments. (Adam's counts of steps are too small to matter.)"""
        moments = [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        held = [tensor.detach() for tensor in (*self.model.parameters(), *moments)]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]

    def forward_and_backward(self) -> None:
        factor = torch.ones(512, 512)
        for _ in range(self._products):
            factor @ factor

    def step(self) -> None:
        self.forward_and_backward()
        self.optimizer.step()

    def dcp_state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}


class Bench:
    """All measurements, on one rank.

    Attributes:
        asynchronous: by name, what begins a save and returns whether it is over: committed, and cleaned up.
    """

    def __init__(self, rank: int, training: Training, folder: Path):
        self.rank, self.training, self.directory = rank, training, folder / "dcp"
        self.checkpointer = slurmtrain.Checkpointer(folder / "ours")
        self.group = dist.new_group(backend="gloo")
        self.asynchronous = {"ours": self._begin_ours, "DCP": self._begin_dcp}

    def _save_ours(self) -> Any:
        step = (self.checkpointer.last_step or 0) + 1
        return self.checkpointer.save(step, model=self.training.model, optimizer=self.training.optimizer)

    def _begin_ours(self) -> Callable[[], bool]:
        pending = self._save_ours()
        return lambda: pending.done() and not self.checkpointer._writer.is_alive()

    def _begin_dcp(self) -> Callable[[], bool]:
        writer = dcp.FileSystemWriter(self.directory)
        written: Any = dcp.async_save(self.training.dcp_state(), storage_writer=writer, process_group=self.group)
        return lambda: bool(written.done())

    def lost(self, begin: Callable[[], Callable[[], bool]]) -> tuple[float, float]:
        """What a save costs: in its call and the optimiser's step behind it, and with all steps until it is over."""
        usual_optimizer = statistics.median(seconds_of(self.training.optimizer.step) for _ in range(USUAL_STEPS))
        usual = statistics.median(seconds_of(self.training.step) for _ in range(USUAL_STEPS))
        dist.barrier()
        began = time.perf_counter()
        is_over = begin()
        self.training.optimizer.step()  # a hook waits for what is still being copied
        in_all = at_once = time.perf_counter() - began - usual_optimizer
        while slowest(0.0 if is_over() else 1.0):
            in_all += seconds_of(self.training.step) - usual
        self._remove()
        return slowest(at_once), slowest(in_all)

    def write_ours(self) -> float:
        """With nothing else to do, as at a preemption."""
        took = self._together(lambda: self._save_ours().result())
        while self.checkpointer._writer.is_alive():
            time.sleep(0.01)
        return took

    def write_dcp(self) -> float:
        """With what makes it durable: fsync of every file and directory, of which DCP leaves out some."""

        def save() -> None:
            writer = dcp.FileSystemWriter(self.directory)
            dcp.save(self.training.dcp_state(), storage_writer=writer, process_group=self.group)
            for path in (*self.directory.iterdir(), self.directory) if self.rank == 0 else ():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

        took = self._together(save)
        self._remove()
        return took

    def _together(self, action: Callable[[], object]) -> float:
        """Seconds that `action` takes on the slower rank, begun on all at once."""
        dist.barrier()
        return slowest(seconds_of(action))

    def _remove(self) -> None:
        """And wait for the disk: freeing gigabytes must not fall into the next measurement."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.sync()
        dist.barrier()


def slowest(value: float) -> float:
    """Return the largest value of all ranks."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()
