"""Training speed against a bare PyTorch DDP loop: the same model, optimiser, batch and data. Wanted: at least 0.98.

Both run in the same two processes, in turn, so that whatever else the machine does meets both alike.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from slurmtrain.config.layout import Layout
from slurmtrain.config.schema import CheckpointConfig, OptimConfig, ParallelConfig, TrainConfig
from slurmtrain.data import BatchLoader, StdlibText
from slurmtrain.models import Decoder
from slurmtrain.observe import SilentReporter
from slurmtrain.parallel.lay import lay
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.runtime.signals import arm
from slurmtrain.training.optim import build_optimizer
from slurmtrain.training.trainer import Ranks, Trainer

RANKS, STEPS, ROUNDS, BATCH, SEQUENCE = 2, 40, 9, 16, 256
MODEL = {"vocab_size": 256, "width": 96, "layers": 3, "heads": 4, "kv_heads": 2, "max_seq_len": SEQUENCE}


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
    ratios, rates = [], []
    for _ in range(ROUNDS + 1):
        bare = time_bare_loop(rank, text)
        ours = time_trainer(rank, text, control, StopAgreement(signals, control))
        ratios.append(bare / ours)
        rates.append(STEPS * BATCH * SEQUENCE / ours)
    if rank == 0:
        ratios, rates = ratios[1:], rates[1:]  # the first is a warm-up
        print(f"{RANKS} ranks, batch {BATCH} x {SEQUENCE}, {STEPS} steps a round, {ROUNDS} rounds")
        print(f"our trainer: {statistics.median(rates):,.0f} tokens/s")
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"ratio of tokens/s to the bare loop: median {statistics.median(ratios):.3f} ({spread})")
    dist.destroy_process_group()


def time_bare_loop(rank: int, text: StdlibText) -> float:
    """Seconds for STEPS steps of the loop that everybody writes first."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Decoder(**MODEL), gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, OptimConfig())
    order = torch.randperm(len(text.train), generator=torch.Generator().manual_seed(0)).numpy()
    share = BATCH // RANKS
    windows = [order[(step * RANKS + rank) * share :][:share] for step in range(STEPS + 2)]
    batches = [text.train.get_batch(indices) for indices in windows]  # in memory
    for step, batch in enumerate(batches):
        if step == 2:  # after DDP has settled its buckets, as our trainer does before its first step
            dist.barrier()
            began = time.perf_counter()
        logits = model(batch["inputs"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    return time.perf_counter() - began


def time_trainer(rank: int, text: StdlibText, control: dist.ProcessGroup, stop: StopAgreement) -> float:
    """Seconds from the first step to the end of `fit`, with everything it does besides: order, counts, agreement."""
    torch.manual_seed(0)
    began = [0.0]

    def make_reporter(step: int, evaluated_at: int) -> SilentReporter:
        dist.barrier()
        began[0] = time.perf_counter()
        return SilentReporter()

    trainer = Trainer(
        train=TrainConfig(steps=STEPS, global_batch_size=BATCH, eval_every=0, log_every=10),
        optim=OptimConfig(warmup_steps=0),
        checkpoint=CheckpointConfig(),
        laid=lay(
            Decoder(**MODEL),
            ParallelConfig(),
            Layout(dp_replicate=RANKS),
            rank=rank,
            device=torch.device("cpu"),
            group=dist.group.WORLD,
            fill=lambda model: model,
        ),
        loader=BatchLoader(
            text.train, seed=0, global_batch_size=BATCH, micro_batch_size=BATCH // RANKS, dp_rank=rank, dp_size=RANKS
        ),
        valid=None,
        ranks=Ranks(rank, dist.group.WORLD, control),
        checkpointer=None,
        stop=stop,
        make_reporter=make_reporter,
    )
    trainer.fit()
    dist.barrier()
    return time.perf_counter() - began[0]


if __name__ == "__main__":
    main()
