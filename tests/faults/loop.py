"""A training script with data workers, written with the package's names, as somebody's own.

Prints a line for every step: `step N LOSS`, the loss in hex. Run it alone; it resumes what it finds in ./checkpoints.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import slurmtrain

BATCH = 4


class Samples(Dataset[Tensor]):
    """Sample i is a function of i."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context", default="fork")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    slurmtrain.init(device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpointer = slurmtrain.Checkpointer()
    restored = checkpointer.restore(model=model, optimizer=optimizer)
    first = restored.step if restored else 0
    loader = DataLoader(
        Samples(),
        batch_size=BATCH,
        sampler=range(first * BATCH, options.steps * BATCH),
        num_workers=options.workers,
        worker_init_fn=slurmtrain.ignore_stop_signals,
        multiprocessing_context=options.context if options.workers else None,
        generator=torch.Generator().manual_seed(0),  # its own: starting workers must not draw from the model's
    )
    for step, batch in enumerate(loader, first + 1):
        loss = (model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options.pause)
        print(f"step {step} {loss.item().hex()}", flush=True)
        if slurmtrain.should_stop():
            checkpointer.save(step, model=model, optimizer=optimizer).result()
            slurmtrain.exit_for_requeue()
    checkpointer.save(options.steps, model=model, optimizer=optimizer).result()


if __name__ == "__main__":
    main()
