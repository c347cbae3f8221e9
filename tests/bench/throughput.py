"""Training speed against bare PyTorch loops with the same features (DDP, FSDP2, tensor parallel): the same model, optimiser,
batch and data. Wanted: at least 0.98 each.

Both run in the same two processes, in turn, so that whatever else the machine does meets both alike; ours is compared with
the mean of the bare loops right before and after it, so that a machine that becomes slower or faster makes no difference.
Where it does much else, the ratio of rank 0's processor time says more.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

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

from slurmtrain.config.layout import Layout
from slurmtrain.config.schema import CheckpointConfig, OptimConfig, ParallelConfig, TrainConfig
from slurmtrain.data import BatchLoader, StdlibText
from slurmtrain.models import Decoder
from slurmtrain.observe import SilentReporter
from slurmtrain.parallel.lay import lay
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.runtime.signals import arm
from slurmtrain.training.evaluation import Evaluator
from slurmtrain.training.measures import Measures
from slurmtrain.training.optim import build_optimizer
from slurmtrain.training.passes import passes_of
from slurmtrain.training.trainer import Ranks, Trainer

RANKS, STEPS, ROUNDS, BATCH, SEQUENCE = 2, 30, 11, 16, 256
MODEL = {
    "vocab_size": 256,
    "width": 96,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "max_seq_len": SEQUENCE,
    "tie_embeddings": False,
}
LAYOUTS = {"DDP": Layout(dp_replicate=RANKS), "FSDP2": Layout(dp_shard=RANKS), "TP": Layout(tp=RANKS)}


@dataclass(frozen=True)
class Seconds:
    """Attributes:
    cpu: of all threads of this process.
    """

    wall: float
    cpu: float

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


def main() -> None:
    with TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(str(Path(folder) / "store"),), nprocs=RANKS)


def run_rank(rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    signals = arm()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    control = dist.new_group(backend="gloo")
    text = StdlibText(SEQUENCE, max_bytes=4_000_000)
    if rank == 0:
        print(f"{RANKS} ranks, batch {BATCH} x {SEQUENCE}, {STEPS} steps a round, {ROUNDS} rounds")
    for name, layout in LAYOUTS.items():
        ratios, cpu_ratios, rates = [], [], []
        time_trainer(rank, text, layout, control, StopAgreement(signals, control))  # a warm-up
        before = time_bare_loop(rank, text, name, layout)
        for _ in range(ROUNDS):
            ours = time_trainer(rank, text, layout, control, StopAgreement(signals, control))
            after = time_bare_loop(rank, text, name, layout)
            ratios.append((before.wall + after.wall) / 2 / ours.wall)
            cpu_ratios.append((before.cpu + after.cpu) / 2 / ours.cpu)
            rates.append(STEPS * BATCH * SEQUENCE / ours.wall)
            before = after
        if rank == 0:
            print(
                f"{name}: our trainer {statistics.median(rates):,.0f} tokens/s; "
                f"ratio to the bare loop: {spread(ratios)}; of processor time: {spread(cpu_ratios)}",
                flush=True,
            )
    dist.destroy_process_group()


def spread(ratios: list[float]) -> str:
    return f"median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


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
    for layer in model.blocks:
        block = f"blocks.{layer}"
        plan |= {f"{block}.attention.{column}": ColwiseParallel() for column in columns} | {
            f"{block}.attention_norm": SequenceParallel(),
            f"{block}.feed_forward_norm": SequenceParallel(),
            f"{block}.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            f"{block}.attention.out": RowwiseParallel(output_layouts=Shard(1)),
            f"{block}.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            f"{block}.feed_forward.gate": ColwiseParallel(),
            f"{block}.feed_forward.up": ColwiseParallel(),
            f"{block}.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)


def time_bare_loop(rank: int, text: StdlibText, name: str, layout: Layout) -> Seconds:
    """For STEPS steps of the loop that everybody writes first."""
    torch.manual_seed(0)
    model = bare_model(name)
    optimizer = build_optimizer(model, OptimConfig())
    order = torch.randperm(len(text.train), generator=torch.Generator().manual_seed(0)).numpy()
    share = BATCH // layout.dp
    windows = [order[(step * layout.dp + layout.dp_rank(rank)) * share :][:share] for step in range(STEPS + 2)]
    batches = [text.train.get_batch(indices) for indices in windows]  # in memory
    for step, batch in enumerate(batches):
        if step == 2:  # after DDP has settled its buckets, as our trainer does before its first step
            dist.barrier()
            began = now()
        logits = model(batch["inputs"])
        with loss_parallel() if layout.tp > 1 else nullcontext():
            loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    return now() - began


def time_trainer(
    rank: int, text: StdlibText, layout: Layout, control: dist.ProcessGroup, stop: StopAgreement
) -> Seconds:
    """From the first step to the end of `fit`, with everything it does besides: order, counts, agreement."""
    torch.manual_seed(0)
    began = [now()]

    def make_reporter(step: int, evaluated_at: int) -> SilentReporter:
        dist.barrier()
        began[0] = now()
        return SilentReporter()

    laid = lay(
        Decoder(**MODEL),
        ParallelConfig(),
        layout,
        rank=rank,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
        fill=lambda model: model,
    )
    passes = passes_of(laid, 1, BATCH // layout.dp)
    trainer = Trainer(
        train=TrainConfig(steps=STEPS, global_batch_size=BATCH, eval_every=0, log_every=10),
        optim=OptimConfig(warmup_steps=0),
        checkpoint=CheckpointConfig(),
        laid=laid,
        loader=BatchLoader(
            text.train,
            seed=0,
            global_batch_size=BATCH,
            micro_batch_size=BATCH // layout.dp,
            dp_rank=layout.dp_rank(rank),
            dp_size=layout.dp,
        ),
        passes=passes,
        evaluator=Evaluator(laid, passes, {}, Measures(laid, (), {}), counts=None, stop=stop),
        ranks=Ranks(rank, dist.group.WORLD, control),
        checkpointer=None,
        stop=stop,
        make_reporter=make_reporter,
    )
    trainer.fit()
    dist.barrier()
    return now() - began[0]


if __name__ == "__main__":
    main()
