"""Somebody's training loop with Accelerate; the lines marked `# +` stop, save, requeue and resume it.

python jobs/accelerate_loop.py                                                by itself
python -m slurmtrain +cluster=a100x4 submit -- python jobs/accelerate_loop.py
"""

import argparse
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils import data

import slurmtrain  # +

parser = argparse.ArgumentParser()
parser.add_argument("--output", default=os.path.join(os.environ.get("SLURMTRAIN_RUN_DIR", "."), "weights.pt"))
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save-steps", type=int, default=20)
options = parser.parse_args()

slurmtrain.init()  # +
accelerator = Accelerator(cpu=not torch.cuda.is_available())
set_seed(0)
inputs = torch.randn(1024, 8)
samples = data.TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)))
model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
sampler: Any = data.DistributedSampler(samples, accelerator.num_processes, accelerator.process_index)
loader = slurmtrain.DataLoader(  # +  was: loader = data.DataLoader(
    samples, 8, sampler=sampler
)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

slurmtrain.warm_up_ddp_buckets(model)  # +
state = {"model": model, "optimizer": optimizer.optimizer, "scheduler": scheduler, "loader": loader}  # +
checkpointer = slurmtrain.Checkpointer()  # +
checkpointer.restore(**state)  # +
for epoch in range(loader.epoch, options.epochs):  # +  was: for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for batch in loader:
        features, target = (each.to(accelerator.device) for each in batch)
        loss = (model(features) - target).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        checkpointer.after_step(loader.step, every=options.save_steps, **state)  # +
    accelerator.print(f"epoch {epoch} is done", flush=True)
accelerator.wait_for_everyone()
accelerator.save(accelerator.unwrap_model(model).state_dict(), options.output)
accelerator.end_training()
