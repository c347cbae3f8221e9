"""Ranks that should hold the same: compared at every save, so that no mixture of them is ever committed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.errors import CheckpointError
from slurmtrain.parallel.ddp import apply_ddp
from slurmtrain.runtime.distributed_context import DistributedContext
from tests.support.gloo import GlooRanks
from tests.support.logs import collect_messages


class Own:
    def __init__(self, value: Any):
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Average:
    """Keeps an average of parameters, and computes with what it was given back."""

    def __init__(self, model: nn.Module):
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def model_of(width: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, width, bias=False)


def save_replicas(distributed: DistributedContext, root: Path) -> dict[str, Any]:
    """What came of each save, as this rank sees it."""
    rank = distributed.environment.rank
    said = collect_messages()
    answers: dict[str, Any] = {"said": said}
    with closing(Checkpointer(root, group=distributed.checkpoint_group, max_failures=0)) as checkpointer:

        def save(what: str, step: int, **objects: Any) -> None:
            try:
                checkpointer.save(step, **objects).result(60)
                answers[what] = "saved"
            except CheckpointError as error:
                answers[what] = error.message

        same, small, large = model_of(), model_of(), model_of(1024)  # the last is split among the ranks
        save("same", 1, model=same, large=large)
        with torch.no_grad():
            small.weight[0, 0] += rank
            large.weight[900, 3] += rank
        save("small", 2, model=small)
        for number in range(8):  # a part of the tensor each time
            save(f"large {number}", 3 + number, model=large)
        save("order", 11, sampler=Own(torch.randperm(8, generator=torch.Generator().manual_seed(rank))))
        save("per rank", 12, model=same, per_rank={"sampler": Own(torch.arange(8) + rank)})
        del said[:]
        norm = nn.BatchNorm1d(4)
        norm(torch.randn(8, 4) * (1 + rank) + rank)
        save("buffers", 13, norm=norm)
        save("buffers again", 14, norm=norm)
        answers["of buffers"] = list(said)
    del said[:]
    with closing(Checkpointer(root, group=distributed.checkpoint_group)) as checkpointer:
        ddp = apply_ddp(nn.BatchNorm1d(4), torch.device("cpu"), distributed.device_group)
        ddp(torch.randn(8, 4) + rank)
        save("buffers of DDP", 15, norm=ddp)
        answers["of DDP"] = list(said)
        save("plain", 16, counter=Own(rank), model=same)
        answers["of plain"] = list(said)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.1)
        ddp(torch.randn(8, 4)).sum().backward()
        zero.step()
        save("ZeRO", 17, norm=ddp, optimizer=zero)
        answers["FSDP1"] = save_fsdp1(checkpointer)
    answers["warned"] = save_drifted(distributed, root / "warned")
    answers["averages"] = averages_go_on(distributed, root / "averages")
    return answers


def save_drifted(distributed: DistributedContext, root: Path) -> dict[str, Any]:
    """What is said of replicas that differ with on_replica_drift=warn, and whether rank 0's come back everywhere."""
    said = collect_messages()
    rank = distributed.environment.rank
    with closing(Checkpointer(root, group=distributed.checkpoint_group, on_replica_drift="warn")) as checkpointer:
        model = nn.ModuleDict({"small": model_of(), "large": model_of(1024)})
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(rank * 1e-6)
            checkpointer.save(step, model=model).result(60)
        told = list(said)
        assert checkpointer.restore(model=model)
    return {"said": told, "rank 0's": all(torch.equal(before[name], one) for name, one in model.named_parameters())}


def save_fsdp1(checkpointer: Checkpointer) -> str:
    wrapped = FullyShardedDataParallel(model_of(), device_id=torch.device("cpu"))
    with pytest.raises(CheckpointError) as caught:
        checkpointer.save(18, model=wrapped)
    return caught.value.message


def averages_go_on(distributed: DistributedContext, root: Path) -> bool:
    """An average of sharded parameters gets sharded ones back."""

    def make() -> tuple[nn.Module, Average]:
        model = model_of(6)
        fully_shard(model, mesh=init_device_mesh("cpu", (distributed.environment.world_size,)))
        return model, Average(model)

    def change(model: nn.Module, average: Average) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        average.update(model)

    with closing(Checkpointer(root, group=distributed.checkpoint_group)) as checkpointer:
        model, average = make()
        change(model, average)
        checkpointer.save(1, model=model, average=average).result(60)
        other_model, other = make()
        assert checkpointer.restore(model=other_model, average=other)
    for each, its in ((model, average), (other_model, other)):
        change(each, its)
    pairs = [(average.shadow[name], other.shadow[name]) for name in average.shadow]
    assert all(isinstance(tensor, DTensor) for pair in pairs for tensor in pair)
    return all(torch.equal(local(one), local(two)) for one, two in pairs)


def local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("checkpoints")
    with GlooRanks(tmp_path_factory.mktemp("worlds")) as ranks:
        found = ranks(2, save_replicas, root)
    found[0]["committed"] = [path.name for path in committed(root)]
    return found


def test_replicas_that_differ_are_refused_by_name_and_ranks(answers: list[dict[str, Any]]) -> None:
    for each in answers:
        assert each["same"] == each["per rank"] == "saved"
        for what, name in (("small", "model.weight"), ("order", "sampler.value")):
            assert each[what] == f"{name} is another one on rank 0 than on rank 1, and should be the same"


def test_a_replica_that_has_drifted_in_one_element_is_found_within_a_few_saves(answers: list[dict[str, Any]]) -> None:
    for each in answers:
        found = [each[f"large {number}"] for number in range(8)]
        assert found.count("saved") == 7
        assert "model.weight is another one on rank 0 than on rank 1, and should be the same" in found


def test_buffers_that_differ_are_told_once_and_those_of_ddp_are_not(answers: list[dict[str, Any]]) -> None:
    first = answers[0]
    assert first["buffers"] == first["buffers again"] == first["buffers of DDP"] == "saved"
    (sentence,) = first["of buffers"]
    assert sentence.startswith(
        "norm.running_mean is another one on rank 0 than on rank 1 (and 1 more): that of the lowest"
    )
    assert first["of DDP"] == []


def test_replicas_that_have_drifted_are_saved_as_rank_0_has_them_when_that_is_asked_for(
    answers: list[dict[str, Any]],
) -> None:
    for each in answers:
        assert each["warned"]["rank 0's"]
    (sentence,) = answers[0]["warned"]["said"]
    assert "is another one on rank 0 than on rank 1 (and 1 more): that of the lowest rank is saved" in sentence


def test_plain_values_that_differ_are_told(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["plain"] == "saved"
    assert any(
        "the state of counter is another one on rank 1 than on rank 0" in line for line in answers[0]["of plain"]
    )


def test_what_keeps_its_state_on_other_ranks_is_refused_when_it_is_saved(answers: list[dict[str, Any]]) -> None:
    for each in answers:
        assert "is a ZeroRedundancyOptimizer" in each["ZeRO"]
        assert "FullyShardedDataParallel (FSDP1)" in each["FSDP1"]


def test_an_average_of_sharded_parameters_goes_on_with_the_same_bits(answers: list[dict[str, Any]]) -> None:
    assert all(each["averages"] for each in answers)
