"""Somebody's loop with DeepSpeed; the lines marked `# +` stop, save, requeue and resume it.

python -m slurmtrain +cluster=a100x4 submit -- python jobs/deepspeed_zero.py --stage 2
torchrun --nproc-per-node 2 jobs/deepspeed_zero.py                            without SLURM
"""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import slurmtrain  # +
from slurmtrain.integrations.deepspeed import EngineCheckpoints  # +

parser = argparse.ArgumentParser()
parser.add_argument("--output", default=os.path.join(os.environ.get("SLURMTRAIN_RUN_DIR", "."), "weights.pt"))
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
parser.add_argument("--save-steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=8, help="samples per step and rank")
options = parser.parse_args()

slurmtrain.init()  # +  was: deepspeed.init_distributed()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))
config = {
    "train_micro_batch_size_per_gpu": options.batch,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": options.stage},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
torch.manual_seed(1 + dist.get_rank())  # each rank draws its own samples

checkpoints = EngineCheckpoints(engine, steps=options.steps)  # +
first = checkpoints.restore()  # +  was: first = 0
for step in range(first, options.steps):
    inputs = torch.randn(options.batch, 8).to(engine.device)
    loss = (engine(inputs) - torch.sin(inputs.sum(1, keepdim=True))).square().mean()
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)
    checkpoints.save_at_stop(step + 1)  # +
    if (step + 1) % options.save_steps == 0:
        checkpoints.save(step + 1)  # +  was: engine.save_checkpoint("checkpoints")
checkpoints.save(options.steps)  # +
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), options.output)
dist.destroy_process_group()
