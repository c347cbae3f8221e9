"""The loop that most scripts have: epochs over a DataLoader, a scheduler, mixed precision. The lines `# +` make it exact.

python -m slurmtrain +cluster=a100x4 submit -- python jobs/own_epochs.py
"""

import argparse
import os
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

import slurmtrain  # +

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--out", default=os.environ.get("SLURMTRAIN_RUN_DIR", "."))
parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step")
options = parser.parse_args()

run = slurmtrain.init()  # +  was: dist.init_process_group()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(400, 8), torch.randint(0, 3, (400,)))
sampler: Any = DistributedSampler(dataset) if run.world_size > 1 else None
loader = slurmtrain.DataLoader(  # was: torch.utils.data.DataLoader(
    dataset, batch_size=10, shuffle=sampler is None, sampler=sampler, num_workers=2
)
model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3)).to(run.device)
if run.world_size > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(loader))
scaler = torch.amp.GradScaler(run.device.type)

state: Any = {"model": model, "optim": optimizer, "schedule": scheduler, "scaler": scaler, "loader": loader}  # +
checkpointer = slurmtrain.Checkpointer()  # +
checkpointer.restore(**state)  # +
for epoch in range(loader.epoch, options.epochs):  # was: range(options.epochs)
    for inputs, targets in loader:
        with torch.autocast(run.device.type, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs.to(run.device)), targets.to(run.device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        time.sleep(options.pause)
        checkpointer.after_step(loader.step, every=20, **state)  # +
    if run.rank == 0:
        print(f"epoch {epoch} is done", flush=True)
        torch.save(model.state_dict(), os.path.join(options.out, f"epoch-{epoch}.pt"))
