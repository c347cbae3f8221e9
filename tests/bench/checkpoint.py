"""Checkpoints against torch.distributed.checkpoint (DCP) and memcpy. Wanted: a stall of half of DCP's.

Two processes hold parameters with Adam, and all take turns in them; a value is that of the slower rank. Needs six times the
state in memory (eight where it is replicated) and seven times in free disk space, in TMPDIR or here: /tmp may be in memory.

    stall of a step by an asynchronous save         <= 0.5 x DCP async_save, thread or process; <= 1.2 x memcpy
    all time lost by it                             <= 1 x the best of DCP
    save and wait for the commit, digests included  <= 1 x dcp.save + fsync

The replicated layout is what DDP has: ours stages and writes one half on each of two ranks, and DCP stages everything on each
of them and writes one half. In the sharded one (FSDP2) both stage what a rank holds. Memcpy moves what a rank of ours writes.
A stall is what `save` takes and what the optimiser's step right behind it takes longer than usual, where nothing hides the
copying; all time lost has what the background takes from the steps until it is over, too.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
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
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import slurmtrain
from tests.bench.side_by_side import Row, in_turn, options, ratio, seconds_of, show
from tests.support.gloo import rank_variables

RANKS, WIDTH, USUAL_STEPS = 2, 2048, 3
DCP = ("DCP thread", "DCP process")


def main(words: list[str]) -> None:
    layouts, only = ("replicated", "sharded"), ("stalls", "writes")
    chosen = options(__doc__, words, gb=3.0, rounds=3, compute=1.0, layouts=layouts, kinds=DCP, only=only)
    for layout in chosen.layouts:
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=os.environ.get("TMPDIR", ".")) as name:
            mp.spawn(run_rank, args=(layout, Path(name).resolve(), chosen), nprocs=RANKS)


def run_rank(rank: int, layout: str, folder: Path, chosen: argparse.Namespace) -> None:
    os.environ.update(rank_variables(rank, RANKS), OMP_NUM_THREADS="1")
    warnings.simplefilter("ignore")  # of DCP, about gloo and stagers
    os.chdir(folder)
    os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)  # the process of DCP tells everything that it does
    slurmtrain.init(device="cpu")
    bench = Bench(rank, layout, folder, chosen.gb, chosen.compute)
    rows: list[Row] = []
    if "stalls" in chosen.only:
        stalls = {kind: partial(bench.stall, kind) for kind in ("memcpy", "ours", *chosen.kinds)}
        rows += stall_rows(in_turn(stalls, chosen.rounds))
    if "writes" in chosen.only:
        writes = {"ours": bench.save_ours, "dcp": bench.save_dcp}
        rows += write_rows(in_turn(writes, chosen.rounds))
    if rank == 0:
        held = sum(tensor.nbytes for tensor in bench.training.tensors())
        show(f"{layout}: a rank holds {held / 1e9:.2f} GB, and ours writes {bench.own_bytes / 1e9:.2f} GB of it", rows)
    bench.checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


def stall_rows(found: dict[str, list[tuple[float, float]]]) -> list[Row]:
    at_once, in_all = ({name: [both[i] for both in values] for name, values in found.items()} for i in (0, 1))
    rows = [Row(f"stall: {name}", values) for name, values in at_once.items()]
    rows += [Row(f"all time lost: {name}", values) for name, values in in_all.items() if name != "memcpy"]
    rows.append(ratio("stall: ours / memcpy", at_once["ours"], at_once["memcpy"], "<= 1.2"))

    for what, of, wanted in (("stall", at_once, "<= 0.5"), ("all time lost", in_all, "<= 1")):
        if kinds := [kind for kind in of if kind in DCP]:
            best = [min(values) for values in zip(*(of[kind] for kind in kinds), strict=True)]
            rows.append(ratio(f"{what}: ours / better DCP", of["ours"], best, wanted))
    return rows


def write_rows(found: dict[str, list[float]]) -> list[Row]:
    rows = [Row(f"save and wait: {name}", values) for name, values in found.items()]
    return [*rows, ratio("save and wait: ours / dcp.save + fsync", found["ours"], found["dcp"], "<= 1")]


class Training:
    """A model with Adam. Its gradients are always there, and forward and backward are a fixed amount of arithmetic."""

    def __init__(self, layout: str, gb: float, compute_s: float):
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
        self._products = round(50 * compute_s / slowest(seconds))

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


class Bench:
    """All measurements, on one rank."""

    def __init__(self, rank: int, layout: str, folder: Path, gb: float, compute_s: float):
        self.rank, self.folder = rank, folder
        self.training = Training(layout, gb, compute_s)
        # What a rank of ours stages and writes: of replicas its share, of shards all.
        held = self.training.tensors()
        self.own = [tensor.chunk(RANKS)[rank] for tensor in held] if layout == "replicated" else held
        self.own_bytes = sum(tensor.nbytes for tensor in self.own)
        self.buffer = torch.empty(self.own_bytes // 4).fill_(1.0)  # its pages are there
        self.checkpointer = slurmtrain.Checkpointer(folder / "ours")
        self.group = dist.new_group(backend="gloo")

    def together(self, action: Callable[[], object]) -> float:
        """Seconds that `action` takes on the slower rank, begun on all at once."""
        dist.barrier()
        return slowest(seconds_of(action))

    def memcpy(self) -> float:
        """What no staging can do without."""

        def copy() -> None:
            for tensor, room in zip(self.own, self.buffer.split([t.numel() for t in self.own]), strict=True):
                room.view(tensor.shape).copy_(tensor)

        return self.together(copy)

    def stall(self, kind: str) -> tuple[float, float]:
        """What a save costs: in its call and the optimiser's step behind it, and with all steps until it is over."""
        if kind == "memcpy":
            return self.memcpy(), 0.0
        save = OurAsync(self.checkpointer) if kind == "ours" else DcpAsync(kind, self.group)
        self._stall(save)  # a warm-up: buffers and processes are made
        found = self._stall(save)
        save.close()
        return found

    def _stall(self, save: OurAsync | DcpAsync) -> tuple[float, float]:
        usual_optimizer = statistics.median(seconds_of(self.training.optimizer.step) for _ in range(USUAL_STEPS))
        usual = statistics.median(seconds_of(self.training.step) for _ in range(USUAL_STEPS))
        directory = self.folder / "dcp"
        dist.barrier()
        lost = seconds_of(lambda: save.save(self.training, directory))
        lost += (
            seconds_of(self.training.optimizer.step) - usual_optimizer
        )  # a hook waits for what is still being copied
        in_all = lost
        while slowest(0.0 if save.done() else 1.0):
            in_all += seconds_of(self.training.step) - usual
        self.remove(directory)
        return slowest(lost), slowest(in_all)

    def save_ours(self) -> float:
        """With nothing else to do, as at a preemption."""
        save = OurAsync(self.checkpointer)

        def commit() -> None:
            save.save(self.training, self.folder)
            save.pending.result()

        took = self.together(commit)
        while not save.done():
            time.sleep(0.01)
        return took

    def save_dcp(self) -> float:
        """With what makes it durable: fsync of every file and directory, of which DCP leaves out some."""
        directory = self.folder / "dcp"

        def save() -> None:
            dcp.save(dcp_state(self.training), storage_writer=dcp.FileSystemWriter(directory), process_group=self.group)
            for path in (*directory.iterdir(), directory, self.folder) if self.rank == 0 else ():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

        took = self.together(save)
        self.remove(directory)
        return took

    def remove(self, directory: Path) -> None:
        """And wait for the disk: freeing gigabytes must not fall into the next measurement."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            os.sync()
        dist.barrier()


class OurAsync:
    """A save with the same face as `DcpAsync`."""

    def __init__(self, checkpointer: slurmtrain.Checkpointer):
        self._checkpointer = checkpointer

    def save(self, training: Training, directory: Path) -> None:
        step = (self._checkpointer.last_step or 0) + 1
        self.pending = self._checkpointer.save(step, model=training.model, optimizer=training.optimizer)

    def done(self) -> bool:
        """Committed, read back, and older ones removed."""
        return self.pending.done() and self._checkpointer.idle

    def close(self) -> None:
        """The checkpointer stays, as it does in a run."""


class DcpAsync:
    """`dcp.async_save` on its own gloo group: a fresh copy each time, made before `async_save` returns."""

    def __init__(self, kind: str, group: dist.ProcessGroup):
        self._group = group
        self._type = AsyncCheckpointerType.PROCESS if "process" in kind else AsyncCheckpointerType.THREAD

    def save(self, training: Training, directory: Path) -> None:
        answer = dcp.async_save(
            dcp_state(training),
            storage_writer=dcp.FileSystemWriter(directory),
            process_group=self._group,
            async_checkpointer_type=self._type,
        )
        self._written = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer

    def done(self) -> bool:
        return self._written.done()

    def close(self) -> None:
        """Give back all memory. DCP's process keeps what it has written last, and would stay for good."""
        del self._written
        _async_process_executor._CHECKPOINT_PROCESS = None
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc keeps freed blocks of up to 32 MiB
            libc.malloc_trim(0)


def dcp_state(training: Training) -> dict[str, Any]:
    weights, moments = get_state_dict(training.model, training.optimizer)
    return {"model": weights, "optimizer": moments}


def slowest(value: float) -> float:
    """Return the largest value of all ranks."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()
