"""Somebody's own PyTorch loop, made to stop, save, requeue and resume by the lines marked `# +`.

python jobs/own_loop.py                                                       by itself
torchrun --nproc-per-node 2 jobs/own_loop.py                                  under torchrun
python -m slurmtrain +cluster=a100x4 submit -- python jobs/own_loop.py
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

import slurmtrain  # +

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=32, help="samples per step and rank")
parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, to have time to interrupt")
options = parser.parse_args()

run = slurmtrain.init()  # +  instead of dist.init_process_group; signals are seen from here on
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1)).to(run.device)
if run.world_size > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + run.rank)  # each rank draws its own samples
target = torch.linspace(-1, 1, 8, device=run.device)

checkpointer = slurmtrain.Checkpointer()  # +
example = torch.zeros(options.batch, 8, device=run.device)  # +
slurmtrain.warm_up_ddp_buckets(model, lambda: model(example).sum().backward())  # +  over two ranks: the same bits again
restored = checkpointer.restore(model=model, optimizer=optimizer)  # +
first = restored.step if restored else 0  # +
for step in range(first, options.steps):  # +  was: range(options.steps)
    inputs = torch.randn(options.batch, 8).to(run.device)
    loss = (model(inputs).squeeze(1) - torch.sin(inputs @ target)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(options.pause)
    if run.rank == 0 and step % 10 == 9:
        print(f"step {step + 1}/{options.steps}  loss {loss.item():.6f}", flush=True)
    if slurmtrain.should_stop():  # +
        checkpointer.save(step + 1, model=model, optimizer=optimizer)  # +
        slurmtrain.exit_for_requeue()  # +
checkpointer.save(options.steps, model=model, optimizer=optimizer).result()  # +  it is written in the background
if dist.is_initialized():
    dist.destroy_process_group()
