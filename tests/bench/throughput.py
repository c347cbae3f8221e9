"""Training speed against bare PyTorch loops with the same features (DDP, FSDP2, tensor parallel): the same model, optimiser,
batch and data. Wanted: at least 0.98 each; DDP 0.99, by processor time.

python -m tests.bench throughput [--only DDP FSDP2 TP "as used"] [--rounds 4] [--steps 100]

Both run in the same two processes, one step of the one after one step of the other, so that whatever else the machine does
meets both alike; what is shown is the median over all these pairs, with its standard error from several runs, and beside it the
ratio of the processor time of all of them.

"as used" is DDP with what a run has besides: metrics.jsonl, TensorBoard, progress, the hash of the samples, and a save every
SAVE_EVERY steps. All that it takes counts, by the sums of all steps and of leaving: against the bare loop, which saves nothing
(wanted: at least 0.9), and against one that saves the same by `torch.distributed.checkpoint.async_save` as often (wanted: at
least 1).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import CheckpointConfig, OptimConfig, ParallelConfig, TrainConfig
from slurmtrain.data import BatchLoader, StdlibText
from slurmtrain.data.loading.loader import Step
from slurmtrain.models import Decoder
from slurmtrain.parallel.parallelize import parallelize
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.system.signals import install_signal_handlers
from slurmtrain.training.forward_backward import build_forward_backward
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.hooks.checkpointing import Checkpointing
from slurmtrain.training.hooks.nonfinite_guard import NonfiniteGuard
from slurmtrain.training.hooks.reporting import RunReporter, StepReports
from slurmtrain.training.optim import build_optimizer
from slurmtrain.training.ranks import TrainingRanks
from slurmtrain.training.trainer import Trainer
from tests.bench.checkpoint_reference import DcpAsync

L = TypeVar("L", bound=BatchLoader)
RANKS, BATCH, SEQUENCE = 2, 16, 256
WARM_UP_STEPS = 5  # steps of each run that do not count
SAVE_EVERY = 50  # as the config has it; a step of this model takes a tenth of a second
MODEL: dict[str, Any] = {
    "vocab_size": 256,
    "dim": 96,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "max_seq_len": SEQUENCE,
    "tie_embeddings": False,
}
LAYOUTS = {"DDP": ParallelDims(dp_replicate=RANKS), "FSDP2": ParallelDims(dp_shard=RANKS), "TP": ParallelDims(tp=RANKS)}
AS_USED = "as used"


class Spent(NamedTuple):
    """Seconds by the clock, and of processor time of this rank."""

    wall: float
    cpu: float

    @staticmethod
    def now() -> Spent:
        return Spent(time.perf_counter(), time.process_time())

    def since(self, before: Spent) -> Spent:
        return Spent(self.wall - before.wall, self.cpu - before.cpu)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench throughput")
    parser.add_argument("--only", nargs="+", default=(*LAYOUTS, AS_USED), choices=(*LAYOUTS, AS_USED))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    options, _ = parser.parse_known_args()
    with TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(folder, options), nprocs=RANKS)


def run_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of DCP, about gloo
    signals = install_signal_handlers()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    bench = Bench(rank, Path(folder), options.steps, StopAgreement(signals, control := dist.new_group()), control)
    if rank == 0:
        print(f"{RANKS} ranks, batch {BATCH} x {SEQUENCE}, {options.steps} steps a round, {options.rounds} rounds")
    for name in options.only:
        if name == AS_USED:
            bench.compare_as_used(options.rounds)
        else:
            bench.compare(name, options.rounds)
    dist.destroy_process_group()


def bare_model(name: str) -> nn.Module:
    """As one writes it by hand."""
    model = Decoder(**MODEL)
    if name == "DDP":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name == "FSDP2":
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)
        return model
    columns = ["query", "key", "value"]
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    for number in model.blocks:
        prefix = f"blocks.{number}"
        plan |= {f"{prefix}.attention.{column}": ColwiseParallel() for column in columns} | {
            f"{prefix}.attention_norm": SequenceParallel(),
            f"{prefix}.feed_forward_norm": SequenceParallel(),
            f"{prefix}.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            f"{prefix}.attention.out": RowwiseParallel(output_layouts=Shard(1)),
            f"{prefix}.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            f"{prefix}.feed_forward.gate": ColwiseParallel(),
            f"{prefix}.feed_forward.up": ColwiseParallel(),
            f"{prefix}.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)


class Alternating(BatchLoader):
    """Where our trainer asks for the data of its next step, a step of the bare loop comes first.

    Attributes:
        bare, ours: what each step has taken.
    """

    bare_steps: Iterator[None]
    began: Spent
    bare: list[Spent]
    ours: list[Spent]

    def __next__(self) -> Step:
        arrived = Spent.now()
        if self.samples_consumed:
            self.ours.append(arrived.since(self.began))
        else:
            self.bare, self.ours = [], []
        next(self.bare_steps)
        self.began = Spent.now()
        self.bare.append(self.began.since(arrived))
        return super().__next__()


class Beginning(BatchLoader):
    """Knows when the first step that counts has begun."""

    def __next__(self) -> Step:
        if self.samples_consumed == WARM_UP_STEPS * BATCH:
            dist.barrier()
            self.began = Spent.now()
        return super().__next__()


class Bench:
    """All comparisons, on one rank."""

    def __init__(self, rank: int, folder: Path, steps: int, stop: StopAgreement, control: dist.ProcessGroup):
        self.rank, self.folder, self.steps, self.stop, self.control = rank, folder, steps, stop, control
        self.text = StdlibText(SEQUENCE, max_bytes=4_000_000)
        self.saving = dist.new_group(backend="gloo")

    def compare(self, name: str, rounds: int) -> None:
        ratios, of_cpu, rates = [], [], []
        for _ in range(rounds):
            loader = self.loader(Alternating, LAYOUTS[name])
            loader.bare_steps = self.bare_loop(name)
            self.trainer(name, loader).fit()
            pairs = list(zip(loader.bare, loader.ours, strict=False))[WARM_UP_STEPS:]
            ratios.append(statistics.median(bare.wall / ours.wall for bare, ours in pairs))
            of_cpu.append(sum(bare.cpu for bare, _ in pairs) / sum(ours.cpu for _, ours in pairs))
            rates.append(BATCH * SEQUENCE / statistics.median(ours.wall for _, ours in pairs))
        self.say(
            f"{name}: our trainer {statistics.median(rates):,.0f} tokens/s; ratio to the bare loop", ratios, of_cpu
        )

    def compare_as_used(self, rounds: int) -> None:
        spent: dict[str, list[Spent]] = {"bare": [], "ours": [], "DCP": []}
        runs = {"bare": self.bare_run, "ours": self.our_run, "DCP": self.dcp_run}
        for number in range(rounds + 1):
            for turn in range(len(runs)):
                name = list(runs)[(number + turn) % len(runs)]
                with TemporaryDirectory(dir=self.folder) as own:
                    folders = [own]
                    dist.broadcast_object_list(folders)
                    spent[name].append(self.of_all(runs[name](Path(folders[0]))))
                    dist.barrier()
        for name, other in (("bare", "the bare loop"), ("DCP", "one that saves by DCP's async_save")):
            pairs = list(zip(spent[name], spent["ours"], strict=True))[1:]  # the first one is a warm-up
            self.say(
                f"DDP as used, a save every {SAVE_EVERY} steps: ratio to {other}",
                [theirs.wall / ours.wall for theirs, ours in pairs],
                [theirs.cpu / ours.cpu for theirs, ours in pairs],
            )

    def of_all(self, spent: Spent) -> Spent:
        """The slower rank's seconds, and the processor time of all."""
        wall, cpu = torch.tensor(spent.wall), torch.tensor(spent.cpu)
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        return Spent(wall.item(), cpu.item())

    def say(self, what: str, ratios: list[float], of_cpu: list[float]) -> None:
        if self.rank == 0:
            print(f"{what}: {spread(ratios)}; by processor time {spread(of_cpu)}", flush=True)

    def bare_loop(self, name: str, after_step: Callable[[int, nn.Module, Any], None] | None = None) -> Iterator[None]:
        """The loop that everybody writes first, a step at a time."""
        torch.manual_seed(0)
        dims = LAYOUTS[name]
        model = bare_model(name)
        optimizer = build_optimizer(model, OptimConfig())
        order = torch.randperm(len(self.text.train), generator=torch.Generator().manual_seed(0)).numpy()
        share = BATCH // dims.dp
        first = [(step * dims.dp + dims.dp_rank(self.rank)) * share for step in range(self.steps + 1)]
        batches = [self.text.train.get_batch(order[at : at + share]) for at in first]  # in memory
        for step, batch in enumerate(batches):
            logits = model(batch["inputs"])
            with loss_parallel() if dims.tp > 1 else nullcontext():
                loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if after_step is not None:
                after_step(step + 1, model, optimizer)
            yield

    def bare_run(self, folder: Path) -> Spent:
        return self.timed_loop(self.bare_loop("DDP"))

    def dcp_run(self, folder: Path) -> Spent:
        """With a save as often as ours, of which the last two stay."""
        saves: list[tuple[DcpAsync, Path]] = []

        def save(step: int, model: nn.Module, optimizer: Any) -> None:
            if step % SAVE_EVERY and step < self.steps:
                return
            if saves:
                saves[-1][0].wait()
            if len(saves) > 2 and self.rank == 0:
                shutil.rmtree(saves[-3][1])
            saves.append((DcpAsync("DCP thread", self.saving), folder / f"{step}"))
            saves[-1][0].save(model, optimizer, saves[-1][1])

        return self.timed_loop(self.bare_loop("DDP", save), lambda: saves[-1][0].wait())

    def timed_loop(self, steps: Iterator[None], close: Callable[[], None] = lambda: None) -> Spent:
        for _ in range(WARM_UP_STEPS):
            next(steps)
        dist.barrier()
        began = Spent.now()
        for _ in range(self.steps - WARM_UP_STEPS):
            next(steps)
        close()
        return Spent.now().since(began)

    def our_run(self, folder: Path) -> Spent:
        """With all that a run has."""
        loader = self.loader(Beginning, LAYOUTS["DDP"])
        checkpointer = Checkpointer(folder / "checkpoints", group=self.saving)

        reporter = RunReporter(folder / "metrics.jsonl", folder / "tensorboard")
        hooks = [Checkpointing(checkpointer, CheckpointConfig(every_steps=SAVE_EVERY))]
        trainer = self.trainer("DDP", loader, [reporter, *hooks] if self.rank == 0 else hooks, data_hash="bench")
        with (folder / f"log-{self.rank}").open("w") as log, redirect_stdout(log), redirect_stderr(log):
            trainer.fit()
        return Spent.now().since(loader.began)

    def loader(self, kind: type[L], dims: ParallelDims) -> L:
        return kind(
            self.text.train,
            seed=0,
            global_batch_size=BATCH,
            micro_batch_size=BATCH // dims.dp,
            dp_rank=dims.dp_rank(self.rank),
            dp_size=dims.dp,
        )

    def trainer(
        self, name: str, loader: BatchLoader, hooks: Sequence[TrainingHook] = (), data_hash: str = ""
    ) -> Trainer:
        torch.manual_seed(0)
        distributed_model = parallelize(
            Decoder(**MODEL),
            ParallelConfig(),
            LAYOUTS[name],
            rank=self.rank,
            device=torch.device("cpu"),
            group=dist.group.WORLD,
            fill=lambda model: model,
        )
        forward_backward = build_forward_backward(distributed_model, 1, loader.micro_batch_size)
        train = TrainConfig(steps=self.steps, global_batch_size=BATCH, eval_every=0, log_every=10)
        return Trainer(
            train,
            OptimConfig(warmup_steps=0),
            distributed_model,
            loader,
            forward_backward,
            ranks=TrainingRanks(self.rank, dist.group.WORLD, self.control),
            stop_check=self.stop,
            hooks=[StepReports(train), NonfiniteGuard(train), *hooks],
            data_hash=data_hash,
        )


def spread(ratios: list[float]) -> str:
    error = f" +- {statistics.stdev(ratios) / len(ratios) ** 0.5:.3f}" if len(ratios) > 1 else ""
    return f"{statistics.mean(ratios):.3f}{error} ({', '.join(f'{ratio:.3f}' for ratio in ratios)})"


if __name__ == "__main__":
    main()
