"""Somebody's own loop with two models, two optimisers and a schedule. All is saved by name, and comes back by the same names.

The generator learns to draw what the discriminator cannot tell from points on a circle.

python jobs/own_two_models.py                                                       by itself
torchrun --nproc-per-node 2 jobs/own_two_models.py                                  under torchrun
python -m slurmtrain +cluster=a100x4 submit -- python jobs/own_two_models.py
"""

import argparse
import math
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import slurmtrain

NOISE = 4  # numbers that one sample is drawn from

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=64, help="samples per step and rank")
parser.add_argument("--save-every", type=int, default=20, help="steps")
parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, to have time to interrupt")
options = parser.parse_args()

run = slurmtrain.init()  # instead of dist.init_process_group; signals are seen from here on
torch.manual_seed(0)
draw = nn.Sequential(nn.Linear(NOISE, 32), nn.Tanh(), nn.Linear(32, 2)).to(run.device)
judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1)).to(run.device)
generator: nn.Module = draw
discriminator: nn.Module = judge
if run.world_size > 1:
    generator, discriminator = DistributedDataParallel(draw), DistributedDataParallel(judge)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
discriminator_optimizer = torch.optim.AdamW(discriminator.parameters(), lr=4e-3, betas=(0.5, 0.99))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(generator_optimizer, options.steps)
torch.manual_seed(1 + run.rank)  # each rank draws its own samples


def noise() -> Tensor:
    return torch.randn(options.batch, NOISE).to(run.device)


def ring() -> Tensor:
    angle = 2 * math.pi * torch.rand(options.batch)
    return torch.stack([angle.cos(), angle.sin()], dim=1).to(run.device)


def teach_discriminator() -> Tensor:
    with torch.no_grad():
        drawn = draw(noise())
    verdicts = discriminator(torch.cat([ring(), drawn])).squeeze(1)
    real, forged = verdicts.chunk(2)
    loss = F.softplus(-real).mean() + F.softplus(forged).mean()
    discriminator_optimizer.zero_grad()
    loss.backward()
    discriminator_optimizer.step()
    return loss.detach()


def teach_generator() -> Tensor:
    judge.requires_grad_(False)  # it judges, and learns nothing from it
    loss = F.softplus(-judge(generator(noise()))).mean()
    generator_optimizer.zero_grad()
    loss.backward()
    judge.requires_grad_(True)
    generator_optimizer.step()
    scheduler.step()
    return loss.detach()


checkpointer = slurmtrain.Checkpointer()
state: dict[str, Any] = {
    "generator": generator,
    "discriminator": discriminator,
    "generator_optimizer": generator_optimizer,
    "discriminator_optimizer": discriminator_optimizer,
    "scheduler": scheduler,
}
# More than two ranks: the same bits after a restart.
slurmtrain.warm_up_ddp_buckets(generator, lambda: generator(noise()).sum().backward())
slurmtrain.warm_up_ddp_buckets(discriminator, lambda: discriminator(ring()).sum().backward())
restored = checkpointer.restore(**state)
for step in range(restored.step if restored else 0, options.steps):
    losses = teach_discriminator(), teach_generator()
    time.sleep(options.pause)
    if run.rank == 0 and step % 10 == 9:
        shown = "  ".join(f"{loss.item():.6f}" for loss in losses)
        print(f"step {step + 1}/{options.steps}  losses {shown}", flush=True)
    stop = slurmtrain.should_stop()
    if stop or (step + 1) % options.save_every == 0:
        checkpointer.save(step + 1, **state)  # it is written while the next steps are done
    if stop:
        slurmtrain.exit_for_requeue()  # which waits for what is being written
checkpointer.save(options.steps, **state).result()
if dist.is_initialized():
    dist.destroy_process_group()
