"""Somebody's LightningModule and Trainer; the lines marked `# +` stop, save, requeue and resume it.

python jobs/lightning_module.py                                               by itself
python -m slurmtrain +cluster=a100x4 cluster.nodes=2 submit -- python jobs/lightning_module.py --nodes 2 --devices 4
"""

import argparse
import os
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import slurmtrain  # +
from slurmtrain.integrations.lightning import SlurmtrainCallback, SlurmtrainEnvironment, resume_from  # +

parser = argparse.ArgumentParser()
parser.add_argument("--output", default=os.path.join(os.environ.get("SLURMTRAIN_RUN_DIR", "."), "weights.pt"))
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save-steps", type=int, default=20)
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--devices", type=int, default=1, help="ranks of each node")
options = parser.parse_args()


class Sine(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, targets = batch
        loss: Tensor = (self.net(inputs) - targets).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        inputs, targets = batch
        self.log("error", (self.net(inputs) - targets).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


lightning.seed_everything(0)
inputs = torch.randn(1024, 8)
samples = TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)))
model = Sine()
trainer = lightning.Trainer(
    max_epochs=options.epochs,
    accelerator="gpu" if torch.cuda.is_available() else "cpu",
    devices=options.devices,
    num_nodes=options.nodes,
    logger=False,
    enable_progress_bar=False,
    callbacks=[SlurmtrainCallback(save_every=options.save_steps)],  # +
    plugins=[SlurmtrainEnvironment()],  # +
)
sampler: Any = DistributedSampler(samples, trainer.world_size, trainer.global_rank)
loader = slurmtrain.DataLoader(samples, 8, sampler=sampler)  # +  was: loader = DataLoader(samples, 8, sampler=sampler)
trainer.fit(
    model,
    loader,
    DataLoader(samples, batch_size=64),
    ckpt_path=resume_from(),  # +
)
if trainer.is_global_zero:
    torch.save(model.state_dict(), options.output)
