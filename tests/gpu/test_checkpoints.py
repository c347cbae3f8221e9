"""Checkpoints of a model on a GPU: the state at the call, whatever the GPU computes meanwhile, and from and to any device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer


def model_on(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 512)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=device == "cuda")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value.detach().cpu().clone() for key, value in optimizer.state[parameter].items()}
    return found


def restored(folder: Path, device: str, **options: Any) -> dict[str, torch.Tensor]:
    model, optimizer = model_on(device)
    checkpointer = Checkpointer(folder)
    assert checkpointer.restore(model=model, optimizer=optimizer, **options) is not None
    checkpointer.close()
    return values(model, optimizer)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_save_holds_the_state_at_its_call_while_the_gpu_goes_on(tmp_path: Path, device: str) -> None:
    model, optimizer = model_on("cuda")
    for step in (1, 2, 3):
        checkpointer = Checkpointer(tmp_path / str(step))
        train(model, optimizer, 2)
        torch.cuda._sleep(200_000_000)  # some 0.1 s of the stream that computes: the state is there only after it
        train(model, optimizer, 1)
        checkpointer.save(step, model=model, optimizer=optimizer)
        snapshot = [parameter.detach().clone() for parameter in model.parameters()]
        train(model, optimizer, 5)
        checkpointer.close()
        found = restored(tmp_path / str(step), device)
        for (name, _), value in zip(model.named_parameters(), snapshot, strict=True):
            assert torch.equal(found[name], value.cpu()), (step, name)
