"""DeepSpeed itself, on two ranks: an engine of each ZeRO stage is stopped, and goes on bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurmtrain.runtime.distributed_context import DistributedContext
from tests.support.gloo import GlooRanks

STEPS = 12


def engines(world: DistributedContext, folder: Path) -> dict[int, tuple[list[int], bool]]:
    """For each stage: the steps from which training went on, and whether the weights are those of an undisturbed one."""
    import os

    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    from slurmtrain.integrations.deepspeed import EngineCheckpoints
    from slurmtrain.runtime import api

    api.init(device="cpu")
    rank = world.environment.rank

    def train(path: Path, stage: int, stop_at: int | None = None) -> tuple[int, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        torch.manual_seed(1 + rank)
        checkpoints = EngineCheckpoints(engine, path)
        first = checkpoints.restore()
        for step in range(first, STEPS):
            inputs = torch.randn(4, 8)
            engine.backward((engine(inputs) - inputs.sum(1, keepdim=True)).square().mean())
            engine.step()
            if step + 1 == stop_at:
                checkpoints.save(step + 1)
                break
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return first, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    found = {}
    for stage in (1, 2, 3):
        _, undisturbed = train(folder / f"undisturbed-{stage}", stage)
        path = folder / f"stopped-{stage}"
        train(path, stage, stop_at=5)
        if rank == 0:  # a save that a kill has torn has a name that nobody looks for
            (path / ".step_000000009.tmp-0").mkdir()
        world.leave_together()
        firsts = [train(path, stage, stop_at=9)[0]]
        if stage == 1 and rank == 0:  # the disk has lost the end of a file of the newest checkpoint
            large = max((path / "step_000000009").rglob("*.pt"), key=lambda file: file.stat().st_size)
            os.truncate(large, large.stat().st_size // 2)
        if stage == 3 and rank == 0:  # a byte of what only rank 1 reads is another one
            part = max((path / "step_000000009").rglob("*zero_pp_rank_1_*"), key=lambda file: file.stat().st_size)
            with part.open("r+b") as file:
                file.seek(part.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
        world.leave_together()
        first, weights = train(path, stage)
        same = all(torch.equal(tensor, weights[name]) for name, tensor in undisturbed.items())
        found[stage] = [*firsts, first], same
    return found


def test_an_engine_of_each_stage_goes_on_bit_by_bit_and_before_damage_of_any_rank(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
    for found in gloo_ranks(2, engines, tmp_path, timeout_s=300):
        assert found == {1: ([5, 5], True), 2: ([5, 9], True), 3: ([5, 5], True)}
