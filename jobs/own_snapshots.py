"""Somebody's script for torchrun that writes a snapshot after each epoch, and finds it again: not a line is slurmtrain's.

torchrun --nproc-per-node 2 jobs/own_snapshots.py                        by itself
python -m slurmtrain +cluster=a100x8 cluster.nodes=4 'job.checkpoints=snapshots/epoch-*.pt' \
    submit -- python jobs/own_snapshots.py --folder '$SLURMTRAIN_RUN_DIR'
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path())
parser.add_argument("--epochs", type=int, default=6)
options = parser.parse_args()

dist.init_process_group()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
inputs = torch.randn(320, 20)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True) + torch.randn(320, 1))
model = nn.Linear(20, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)

snapshots = options.folder / "snapshots"
snapshots.mkdir(parents=True, exist_ok=True)
first = 0
if found := sorted(snapshots.glob("epoch-*.pt")):
    snapshot = torch.load(found[-1], map_location=device)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    first = snapshot["epoch"]
ddp = nn.parallel.DistributedDataParallel(model)
for epoch in range(first, options.epochs):
    sampler.set_epoch(epoch)
    for features, target in loader:
        loss = (ddp(features.to(device)) - target.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}/{options.epochs}  loss {loss.item():.6f}", flush=True)
        state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, snapshots / f"epoch-{epoch + 1:04d}.pt")
if dist.get_rank() == 0:
    torch.save(model.state_dict(), options.folder / "weights.pt")
dist.destroy_process_group()
