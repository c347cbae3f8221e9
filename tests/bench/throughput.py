"""Training speed against bare PyTorch loops with the same features (DDP, FSDP2, tensor parallel): the same model, optimiser,
batch and data. Wanted: at least 0.98 each.

Both run in the same two processes, one step of the one after one step of the other, so that whatever else the machine does
meets both alike; what is shown is the median over all these pairs, with its standard error from several runs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
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
from slurmtrain.data.loader import Step
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

RANKS, STEPS, ROUNDS, BATCH, SEQUENCE = 2, 100, 4, 16, 256
SETTLING = 5  # steps of each run that do not count
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
        ratios, rates = [], []
        for _ in range(ROUNDS):
            pairs = time_steps(rank, text, name, layout, control, StopAgreement(signals, control))
            ratios.append(statistics.median(bare / ours for bare, ours in pairs))
            rates.append(BATCH * SEQUENCE / statistics.median(ours for _, ours in pairs))
        if rank == 0:
            print(
                f"{name}: our trainer {statistics.median(rates):,.0f} tokens/s; ratio to the bare loop: "
                f"{statistics.mean(ratios):.3f} +- {statistics.stdev(ratios) / ROUNDS**0.5:.3f} "
                f"({', '.join(f'{ratio:.3f}' for ratio in ratios)})",
                flush=True,
            )
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
    for layer in model.blocks:
        block = f"blocks.{layer}"
        plan |= {f"{block}.attention.{column}": ColwiseParallel() for column in columns} | {
            f"{block}.attention_norm": SequenceParallel(),
            f"{block}.feed_forward_norm": SequenceParallel(),
            f"{block}.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            f"{block}.attention.out": RowwiseParallel(output_layouts=Shard(1)),
            f"{block}.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            f"{block}.feed_forward.gate": ColwiseParallel(),
            f"{block}.feed_forward.up": ColwiseParallel(),
            f"{block}.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)


def bare_loop(rank: int, text: StdlibText, name: str, layout: Layout) -> Iterator[None]:
    """The loop that everybody writes first, a step at a time."""
    torch.manual_seed(0)
    model = bare_model(name)
    optimizer = build_optimizer(model, OptimConfig())
    order = torch.randperm(len(text.train), generator=torch.Generator().manual_seed(0)).numpy()
    share = BATCH // layout.dp
    windows = [order[(step * layout.dp + layout.dp_rank(rank)) * share :][:share] for step in range(STEPS + 1)]
    batches = [text.train.get_batch(indices) for indices in windows]  # in memory
    for batch in batches:
        logits = model(batch["inputs"])
        with loss_parallel() if layout.tp > 1 else nullcontext():
            loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


class Alternating(BatchLoader):
    """Where our trainer asks for the data of its next step, a step of the bare loop comes first.

    Attributes:
        bare, ours: seconds of each step.
    """

    bare_steps: Iterator[None]

    def __next__(self) -> Step:
        arrived = time.perf_counter()
        if self.samples_consumed:
            self.ours.append(arrived - self.began)
        else:
            self.bare, self.ours = [], []
        next(self.bare_steps)
        self.began = time.perf_counter()
        self.bare.append(self.began - arrived)
        return super().__next__()


def time_steps(
    rank: int, text: StdlibText, name: str, layout: Layout, control: dist.ProcessGroup, stop: StopAgreement
) -> list[tuple[float, float]]:
    """Seconds of a step of the bare loop and of our trainer's next one, with everything that it does besides, of each pair."""
    torch.manual_seed(0)
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
    loader = Alternating(
        text.train,
        seed=0,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // layout.dp,
        dp_rank=layout.dp_rank(rank),
        dp_size=layout.dp,
    )
    loader.bare_steps = bare_loop(rank, text, name, layout)
    trainer = Trainer(
        train=TrainConfig(steps=STEPS, global_batch_size=BATCH, eval_every=0, log_every=10),
        optim=OptimConfig(warmup_steps=0),
        checkpoint=CheckpointConfig(),
        laid=laid,
        loader=loader,
        passes=passes,
        evaluator=Evaluator(laid, passes, {}, Measures(laid, (), {}), counts=None, stop=stop),
        ranks=Ranks(rank, dist.group.WORLD, control),
        checkpointer=None,
        stop=stop,
        make_reporter=lambda step, evaluated_at: SilentReporter(),
    )
    trainer.fit()
    return list(zip(loader.bare, loader.ours, strict=False))[SETTLING:]


if __name__ == "__main__":
    main()
