"""Somebody's training loop with Accelerate; the lines marked `# +` stop, save, requeue and resume it.

python jobs/accelerate_loop.py                                                by itself
python -m slurmtrain +cluster=a100x4 submit -- python jobs/accelerate_loop.py
"""

import argparse
import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import slurmtrain  # +
from slurmtrain.integrations.accelerate import AcceleratorCheckpointer  # +

parser = argparse.ArgumentParser()
parser.add_argument("--output", default=os.path.join(os.environ.get("SLURMTRAIN_RUN_DIR", "."), "weights.pt"))
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save-steps", type=int, default=20)
options = parser.parse_args()

accelerator = Accelerator(
    cpu=not torch.cuda.is_available(), dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
)
set_seed(0)
inputs = torch.randn(1024, 8)
data = TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)))
model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

slurmtrain.warm_up_ddp_buckets(model)  # +
checkpointer = AcceleratorCheckpointer(accelerator)  # +
done = checkpointer.load_state()  # +  was: done = 0
for epoch in range(done // len(loader), options.epochs):  # +  was: for epoch in range(options.epochs):
    loader.set_epoch(epoch)
    skipped = checkpointer.skip_first_batches(loader, done - epoch * len(loader))  # +
    for features, target in skipped:  # +  was: for features, target in loader:
        loss = (model(features) - target).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        done += 1
        if done % 10 == 0:
            accelerator.print(f"step {done}  loss {loss.item():.6f}", flush=True)
        checkpointer.save_at_stop(done)  # +
        if done % options.save_steps == 0:
            checkpointer.save_state(done)  # +  was: accelerator.save_state(f"state-{done}")
accelerator.wait_for_everyone()
accelerator.save(accelerator.unwrap_model(model).state_dict(), options.output)
accelerator.end_training()
