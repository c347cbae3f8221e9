"""Checkpoints against what the machine can do (memcpy, dd, plain reads, SHA-256) and against torch.distributed.checkpoint.

python -m tests.bench checkpoint [--gb 3] [--rounds 3] [--layouts replicated sharded] [--only stalls writes ...]

Two processes hold parameters with Adam; everything is measured in turn in the same processes, the order changing from round
to round, and each ratio is one of two measurements of the same round. Wanted, each by its median:

    stall of a training step by an asynchronous save    <= 0.5 x DCP async_save, thread or process; <= 1.2 x memcpy
                                                        <= 1 x DCP async_save that keeps its buffers
    all time lost by it                                 <= 1 x the best of DCP
    durable write, digests and fsync included           >= 0.8 x dd with fsync, ahead of dcp.save + fsync
    verify, from the page cache                         >= 0.9 x SHA-256 of memory with as many threads
    restore, everything verified                        >= 0.7 x plain reads of the same files, from the disk
                                                        >= 0.7 x SHA-256 of memory by all cores, from the page cache
    flag of preemption to commit                        <= 1.3 x memcpy + dd
    planning for 4,096 ranks x 1,000 tensors            <= 5 s and 500 MB on rank 0

The replicated layout is what DDP has: every rank holds everything, ours stages and writes one half on each of two ranks, and
DCP stages everything on each of them and writes one half. In the sharded one (FSDP2) both stage what a rank holds.
Memcpy and dd move what a rank of ours stages and writes. A stall is what `save` takes and what the optimiser's step behind it
takes longer than usual: right behind it ("at once", where nothing hides the copying), or after forward and backward. "All time
lost" counts what the background takes from the steps until it is over, too, where ours also reads back what it wrote. "Of a
save" are the parts of the call of `save` itself. From the page cache, a restore is bound by SHA-256, 1.5 to 2 GB/s of a core,
and not by reading, which is shown all the same. Needs
six times the state in memory (eight where it is replicated) and six times in free disk space.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.format.manifest import read_manifest
from slurmtrain.checkpoint.save import staging
from slurmtrain.checkpoint.save.fingerprints import fingerprint
from tests.bench import checkpoint_planning
from tests.bench.checkpoint_reference import (
    Action,
    DcpAsync,
    copy_into,
    dcp_save_synced,
    dcp_state,
    dd,
    digest_memory,
    drop_from_page_cache,
    give_back_memory,
    make_source,
    read_part,
    remove,
)

RANKS, WIDTH, UNDISTURBED_STEPS = 2, 2048, 3
LAYOUTS = ("replicated", "sharded")
MEASUREMENTS = ("stalls", "writes", "reads", "verify", "planning")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench checkpoint")
    parser.add_argument("--gb", type=float, default=3.0, help="parameters and both moments of Adam, in all")
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more comes before as a warm-up")
    parser.add_argument("--compute", type=float, default=1.0, help="seconds of forward and backward of a step")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument(
        "--kinds", nargs="+", default=DcpAsync.KINDS, choices=DcpAsync.KINDS, help="of DCP; each takes memory"
    )
    parser.add_argument("--only", nargs="+", default=MEASUREMENTS, choices=MEASUREMENTS, help="leave out the others")
    options, _ = parser.parse_known_args()
    if set(options.only) - {"planning"}:
        measure_layouts(options)
    if "planning" in options.only:
        checkpoint_planning.main()


def measure_layouts(options: argparse.Namespace) -> None:
    check_memory(options.gb, 8 if "replicated" in options.layouts else 6)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder is removed
    # Not in memory, as /tmp may be.
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=os.environ.get("TMPDIR", ".")) as name:
        folder = Path(name).resolve()
        check_disk(folder, options.gb)
        for layout in options.layouts:
            run_ranks(layout, folder / layout, options)


def check_memory(gb: float, times: int) -> None:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    if available < times * gb * 1e9:
        raise SystemExit(f"--gb {gb:g} wants {times * gb:.0f} GB of memory, and {available / 1e9:.0f} GB are free")


def check_disk(folder: Path, gb: float) -> None:
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < 6 * gb * 1e9:
        raise SystemExit(f"--gb {gb:g} wants {6 * gb:.0f} GB in {folder.parent}, and {free / 1e9:.0f} GB are free")


def run_ranks(layout: str, folder: Path, options: argparse.Namespace) -> None:
    folder.mkdir()
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
    context = mp.spawn(run_rank, args=(layout, folder, options), nprocs=RANKS, join=False)
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
        remove(folder)


def run_rank(rank: int, layout: str, folder: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of DCP, about gloo and stagers
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    bench = Bench(rank, layout, folder, options)
    for number in range(options.rounds + 1):
        for measure in rotated(
            tuple(getattr(bench, name) for name in MEASUREMENTS[:-1] if name in options.only), number
        ):
            measure(number)
            give_back_memory()
        if number == 0:
            bench.seconds.clear()  # a warm-up
    if rank == 0:
        bench.report()
    bench.close()
    dist.destroy_process_group()


def rotated(items: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    return items[number % len(items) :] + items[: number % len(items)]


class Step(NamedTuple):
    """Seconds of a training step: forward and backward, and the optimiser's."""

    compute: float
    optimizer: float


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
        self._products = self._calibrate(compute_s)

    def tensors(self) -> list[Tensor]:
        """What this rank holds of parameters and moments. (Adam's counts of steps are too small to matter.)"""
        moments = [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        held = [tensor.detach() for tensor in (*self.model.parameters(), *moments)]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]

    def forward_and_backward(self) -> None:
        factor = torch.ones(512, 512)
        for _ in range(self._products):
            factor @ factor

    def _calibrate(self, compute_s: float) -> int:
        self._products = 50
        seconds = min(timed(self.forward_and_backward) for _ in range(3))
        counts = torch.tensor([compute_s / seconds * self._products])
        dist.all_reduce(counts)
        return round(counts.item() / RANKS)


class Bench:
    """All measurements, on one rank. `seconds`: by name, one value a round, that of the slower rank."""

    def __init__(self, rank: int, layout: str, folder: Path, options: argparse.Namespace):
        self.rank, self.layout, self.folder = rank, layout, folder
        self.training = Training(layout, options.gb, options.compute)
        self.compute_s, self.kinds = options.compute, tuple(options.kinds)
        # What a rank of ours stages and writes: of replicas its share, of shards all.
        self.own = [share_of(tensor, rank) if layout == "replicated" else tensor for tensor in self.training.tensors()]
        self.own_bytes = sum(tensor.nbytes for tensor in self.own)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.checkpointer = Checkpointer(folder / "ours", group=dist.new_group(backend="gloo"))
        self.dcp_group = dist.new_group(backend="gloo")
        self.parts = Parts()
        self.source = folder / "source"
        self.sample = memoryview(os.urandom(256 << 20)) if rank == 0 else memoryview(b"")
        self.on_rank_0(lambda: make_source(self.source, self.own_bytes))

    # How things are measured.

    def together(self, name: str, action: Action) -> float:
        """Seconds that `action` takes on the slower rank, begun on all at once."""
        dist.barrier()
        return self.note(name, timed(action))

    def note(self, name: str, seconds: float) -> float:
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.seconds[name].append(slowest.item())
        return slowest.item()

    def on_rank_0(self, action: Action) -> None:
        if self.rank == 0:
            action()
        dist.barrier()

    def remove(self, path: Path) -> None:
        self.on_rank_0(lambda: remove(path))

    # The measurements.

    def stalls(self, number: int) -> None:
        """An asynchronous save of each kind; right behind it the optimiser steps, or forward and backward come first."""
        self.memcpy("memcpy")
        for kind in rotated(("ours", *self.kinds), number):
            save = OurAsync(self.checkpointer) if kind == "ours" else DcpAsync(kind, self.dcp_group)
            with quiet_children():  # the process of DCP tells everything that it does
                self.stall(save, self.train_step())  # a warm-up: buffers and processes are made
            undisturbed = [self.train_step() for _ in range(UNDISTURBED_STEPS)]
            usual = Step(*(statistics.median(times) for times in zip(*undisturbed, strict=True)))
            for when, compute in (("at once", False), ("after compute", True)):
                lost, lost_in_all = self.stall(save, usual, compute=compute)
                self.note(f"{kind}, {when}", lost)
                if isinstance(save, OurAsync) and not compute:
                    self.note("of a save: fingerprints of replicas", self.parts.fingerprints_s)
                    self.note("of a save: copy of the state", self.parts.stage_s - self.parts.fingerprints_s)
                    self.note("of a save: everything else", save.stall_s - self.parts.stage_s)
                self.note(f"{kind}, {when}: all time lost", lost_in_all)
            save.close()

    def stall(self, save: OurAsync | DcpAsync, usual: Step, *, compute: bool = True) -> tuple[float, float]:
        """Seconds that a save costs: by itself and in the optimiser's step behind it; and with all that its work in the
        background takes from steps until it is over."""
        directory = self.folder / "dcp"
        self.parts.forget()
        dist.barrier()
        lost = timed(lambda: save.save(self.training.model, self.training.optimizer, directory))
        step = self.train_step(compute=compute, ready=save.before_optimizer_step)
        lost += step.optimizer - usual.optimizer
        lost_in_all = lost + (step.compute - usual.compute if compute else 0.0)
        while not self.all_agree(save.done()):
            lost_in_all += sum(self.train_step()) - sum(usual)
        save.wait()
        self.remove(directory)
        return lost, lost_in_all

    def train_step(self, *, compute: bool = True, ready: Action = lambda: None) -> Step:
        forward = timed(self.training.forward_and_backward) if compute else 0.0
        began = time.perf_counter()
        ready()
        self.training.optimizer.step()
        return Step(forward, time.perf_counter() - began)

    def all_agree(self, value: bool) -> bool:
        agreed = torch.tensor(int(value))
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return bool(agreed)

    def memcpy(self, name: str) -> None:
        buffer = torch.empty(self.own_bytes // 4).fill_(1.0)  # its pages are there
        self.together(name, lambda: copy_into(buffer, self.own))

    def writes(self, number: int) -> None:
        """Durable: ours with nothing else to do, as at a preemption; dcp.save with fsync; dd by both ranks."""
        for measure in rotated((self.preemption, self.dcp_synced, self.two_dd), number):
            self.on_rank_0(os.sync)
            measure()

    def preemption(self) -> None:
        save = OurAsync(self.checkpointer)
        self.memcpy("memcpy at preemption")
        dist.barrier()
        began = time.perf_counter()
        save.save(self.training.model, self.training.optimizer)
        self.checkpointer.wait_staged()
        staged = time.perf_counter()
        save.wait()
        committed = time.perf_counter()
        self.note("save and wait", committed - began)
        self.note("ours written", committed - staged)
        save.wait_until_idle()

    def dcp_synced(self) -> None:
        directory = self.folder / "dcp"
        state = dcp_state(self.training.model, self.training.optimizer)
        self.together("dcp.save + fsync", lambda: dcp_save_synced(state, directory, self.dcp_group))
        self.remove(directory)

    def two_dd(self) -> None:
        target = self.folder / f"dd-{self.rank}"
        self.together("dd", lambda: dd(self.source, target, self.own_bytes))
        remove(target)

    def reads(self, number: int) -> None:
        """The last checkpoint into the live model, and its files by plain reads; from the disk and from the page cache."""
        files = sorted(self.newest().iterdir())
        model, optimizer = self.training.model, self.training.optimizer

        def restore() -> None:
            self.own[0].zero_()
            assert self.checkpointer.restore(model=model, optimizer=optimizer)
            assert self.own[0].any()

        plain = partial(read_part, files, self.rank, RANKS)
        for name, action in rotated((("restore", restore), ("plain reads", plain)), number):
            self.on_rank_0(lambda: drop_from_page_cache(files))
            self.together(f"{name}, cold", action)
            self.together(f"{name}, warm", action)

    def newest(self) -> Path:
        """The last checkpoint that another measurement has left, or a first one."""
        dist.barrier()
        if not committed(self.folder / "ours"):
            save = OurAsync(self.checkpointer)
            save.save(self.training.model, self.training.optimizer)
            save.wait_until_idle()
        return committed(self.folder / "ours")[-1]

    def verify(self, number: int) -> None:
        """All files' digests against SHA-256 of as many bytes in memory, by rank 0."""
        path = self.newest()
        files = read_manifest(path).files
        size = sum(record.size for record in files.values())
        self.on_rank_0(lambda: read_part([path / name for name in files], 0, 1))
        for name, action in rotated((("verify", self.find_damage), ("SHA-256", self.digest_sample)), number):
            self.together(name, partial(action, path, size) if self.rank == 0 else lambda: None)

    def find_damage(self, path: Path, size: int) -> None:
        manifest = read_manifest(path)
        damage = blocks.find_damage(path, sorted(manifest.files.items()), mapped=True)
        assert not damage, damage

    def digest_sample(self, path: Path, size: int) -> None:
        with blocks.threads() as pool:
            digest_memory(self.sample, size, pool)

    def close(self) -> None:
        self.checkpointer.close()
        dist.barrier()

    # What is printed.

    def report(self) -> None:
        held = sum(tensor.nbytes for tensor in self.training.tensors())
        print(
            f"{self.layout}: a rank holds {held / 1e9:.2f} GB; ours stages and writes {self.own_bytes / 1e9:.2f} GB of it, "
            f"DCP stages {held / 1e9:.2f} GB; a step computes for {self.compute_s:g} s"
        )
        for name, values in sorted(self.seconds.items()):
            print(f"  {name:44} {spread(values)} s   {self.rate(name)}")
        of = self.seconds  # nothing of what was not measured
        plain, kept = ([kind for kind in self.kinds if ("kept" in kind) is keeps] for keeps in (False, True))
        lost = "after compute: all time lost"
        bound = [copy + write for copy, write in zip(of["memcpy at preemption"], of["dd"], strict=True)]
        for name, numerator, denominator, wanted in (
            ("stall / better DCP async_save", of["ours, at once"], self.best(plain, "at once"), "<= 0.5"),
            ("stall / better DCP async_save, kept buffers", of["ours, at once"], self.best(kept, "at once"), "<= 1"),
            ("stall / memcpy", of["ours, at once"], of["memcpy"], "<= 1.2"),
            ("stall after compute / memcpy", of["ours, after compute"], of["memcpy"], "<= 1.2"),
            ("fingerprints of replicas / memcpy", of["of a save: fingerprints of replicas"], of["memcpy"], ""),
            ("copy of the state / memcpy", of["of a save: copy of the state"], of["memcpy"], "<= 1.2"),
            ("all time lost / best DCP async_save", of[f"ours, {lost}"], self.best(plain + kept, lost), "<= 1"),
            ("write speed / dd", of["dd"], of["ours written"], ">= 0.8"),
            ("write speed with copying / dd", of["dd"], of["save and wait"], ""),
            ("write speed with copying / dcp.save + fsync", of["dcp.save + fsync"], of["save and wait"], ">= 1"),
            ("verify speed / SHA-256", of["SHA-256"], of["verify"], ">= 0.9"),
            ("restore speed / SHA-256, warm", of["SHA-256"], of["restore, warm"], ">= 0.7"),
            ("restore speed / plain reads, cold", of["plain reads, cold"], of["restore, cold"], ">= 0.7"),
            ("restore speed / plain reads, warm", of["plain reads, warm"], of["restore, warm"], ""),
            ("preemption to commit / (memcpy + dd)", of["save and wait"], bound, "<= 1.3"),
        ):
            if not (numerator and denominator):  # not measured
                continue
            ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
            print(f"  {name:44} {spread(ratios)}   {verdict(statistics.median(ratios), wanted)}")

    def best(self, kinds: Sequence[str], what: str) -> list[float]:
        return [min(values) for values in zip(*(self.seconds[f"{kind}, {what}"] for kind in kinds), strict=True)]

    def rate(self, name: str) -> str:
        """Of all ranks together."""
        whole = ("dd", "dcp.save", "ours written", "restore", "plain", "verify", "SHA", "memcpy", "save and wait")
        if not name.startswith(whole):
            return ""
        return f"{RANKS * self.own_bytes / 1e9 / statistics.median(self.seconds[name]):6.2f} GB/s"


class Parts:
    """Where the time of a save of ours goes before training goes on.

    Attributes:
        stage_s: seconds of the copy into host memory, with fingerprints.
        fingerprints_s: of them, of what other ranks hold, too.
    """

    def __init__(self) -> None:
        self.forget()
        stage = staging.Staging.stage

        def timed_stage(*args: Any, **kwargs: Any) -> staging.Image:
            began = time.perf_counter()
            image = stage(*args, **kwargs)
            self.stage_s += time.perf_counter() - began
            return image

        def timed_fingerprint(tensor: Tensor) -> Tensor:
            began = time.perf_counter()
            found = fingerprint(tensor)
            self.fingerprints_s += time.perf_counter() - began
            return found

        staging.Staging.stage = timed_stage  # type: ignore[method-assign]
        setattr(staging, "fingerprint", timed_fingerprint)  # noqa: B010 (a name that it has imported)

    def forget(self) -> None:
        self.stage_s = self.fingerprints_s = 0.0


class OurAsync:
    """The same face as `DcpAsync`."""

    def __init__(self, checkpointer: Checkpointer):
        self._checkpointer = checkpointer
        self._pending_save: Any = None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path | None = None) -> None:
        step = (self._checkpointer.last_step or 0) + 1
        self._pending_save = self._checkpointer.save(step, model=model, optimizer=optimizer)

    @property
    def stall_s(self) -> float:
        """What the call of `save` took."""
        return float(self._pending_save.stall_s)

    def before_optimizer_step(self) -> None:
        """A hook on the optimiser waits for what is still being copied."""

    def done(self) -> bool:
        """Committed, read back, and older ones removed."""
        return self._pending_save.done() and self._checkpointer._saves._thread.idle

    def wait(self) -> None:
        """Until the commit."""
        self._pending_save.result()

    def wait_until_idle(self) -> None:
        """Until there is nothing left to do."""
        while not self.done():
            time.sleep(0.01)
        dist.barrier()

    def close(self) -> None:
        """The checkpointer stays, as it does in a run."""


@contextmanager
def quiet_children() -> Iterator[None]:
    """What is started meanwhile has no stderr."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def share_of(tensor: Tensor, rank: int) -> Tensor:
    rows = len(tensor)
    return tensor[rows * rank // RANKS : rows * (rank + 1) // RANKS]


def timed(action: Action) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def verdict(value: float, wanted: str) -> str:
    if not wanted:
        return ""
    comparison, limit = wanted.split()
    met = value <= float(limit) if comparison == "<=" else value >= float(limit)
    return f"wanted {wanted}: {'met' if met else 'MISSED'}"


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):7.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
