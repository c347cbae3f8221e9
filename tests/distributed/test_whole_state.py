"""Everything that a training state is made of: restored together, and training goes on as if nothing had happened."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.restore.restorer import Restored
from slurmtrain.data.loading.loader import BatchLoader
from slurmtrain.parallel.ddp import apply_ddp
from slurmtrain.rank.distributed_context import DistributedContext
from tests.support.gloo import GlooRanks
from tests.support.logs import collect_messages
from tests.support.own_objects import Bare, Own


def curriculum_state(step: int) -> dict[str, Any]:
    return {
        "seen": torch.arange(5) + step,
        "by_number": {3: torch.full((2, 2), float(step)), (1, 2): "pair", None: -0.0},
        "list": [torch.tensor(step), {"deep": torch.tensor([], dtype=torch.bool)}, 2**70],
    }


class Numbers:
    """Sample i is the number i."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)])}


class Pair:
    """A generator and a discriminator, say: two models, two optimisers, and what else belongs to the state of one rank."""

    def __init__(self, distributed: DistributedContext, directory: Path, *, seed: int, **options: Any):
        self.rank = distributed.environment.rank
        torch.manual_seed(seed)
        group = distributed.device_group
        plain = nn.Sequential(nn.Linear(1, 6), nn.Dropout(0.5), nn.Linear(6, 1))
        self.plain, self.one = plain, apply_ddp(plain, torch.device("cpu"), group)
        self.two = apply_ddp(nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4)), torch.device("cpu"), group)
        self.averaged = torch.optim.swa_utils.AveragedModel(
            plain,
            multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9),
        )
        groups = [{"params": [p], "lr": 0.01 * (number + 1)} for number, p in enumerate(self.one.parameters())]
        self.first = torch.optim.AdamW(groups, betas=(0.8, 0.9))
        self.second = torch.optim.SGD(self.two.parameters(), lr=0.05, momentum=0.9)
        self.warmup = torch.optim.lr_scheduler.LambdaLR(self.first, lambda step: min(1.0, (step + 1) / 5))
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.second, patience=1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.curriculum = Bare({})
        self.loader = BatchLoader(
            Numbers(),
            seed=3,
            global_batch_size=12,
            micro_batch_size=2,
            dp_rank=self.rank,
            dp_size=distributed.environment.world_size,
        )
        self.mine = Bare({})
        random.seed(1000 * seed + self.rank)
        np.random.seed(1000 * seed + self.rank)
        torch.manual_seed(1000 * seed + self.rank)
        self.checkpointer = Checkpointer(directory, group=distributed.checkpoint_group, **options)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            for batch in next(self.loader).micro_batches:
                x = batch["x"] / 100 + random.random() + np.random.random()
                loss = self.one(x).square().mean() + self.two(x).square().mean()
                self.scaler.scale(loss).backward()
                losses.append(loss.item())
            for optimizer in (self.first, self.second):
                self.scaler.step(optimizer)
                optimizer.zero_grad()
            self.scaler.update()
            self.warmup.step()
            self.plateau.step(1.0)
            self.averaged.update_parameters(self.plain)
        return losses

    @property
    def objects(self) -> dict[str, Any]:
        names = "one two averaged first second warmup plateau scaler curriculum loader".split()
        return {name: getattr(self, name) for name in names}

    def save(self, step: int) -> Path:
        self.curriculum.value = curriculum_state(step)
        self.mine.value = {
            "rank": self.rank,
            "noise": torch.full((self.rank + 1,), float(self.rank)),
            "text": "x" * self.rank,
        }
        saving = self.checkpointer.save(
            step, per_rank={"mine": self.mine}, metrics={"valid_loss": 1 / step}, note={"by": ["hand"]}, **self.objects
        )
        return saving.result(30).path

    def restore(self) -> Restored:
        restored = self.checkpointer.restore(per_rank={"mine": self.mine}, **self.objects)
        assert restored is not None
        return restored

    def everything(self) -> dict[str, Any]:
        """All state, as plain values that can be compared and sent."""
        return {name: plain_value(value.state_dict()) for name, value in self.objects.items()}

    def draws(self) -> list[float]:
        return [random.random(), float(np.random.random()), torch.rand(()).item(), random.gauss(0, 1)]


def plain_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ["tensor", str(value.dtype), list(value.shape), value.detach().flatten().tolist()]
    if isinstance(value, dict):
        return sorted(([plain_value(key), plain_value(item)] for key, item in value.items()), key=repr)
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain_value, value)]
    return value


def save_and_go_on(distributed: DistributedContext, root: Path) -> dict[str, Any]:
    pair = Pair(distributed, root, seed=1)
    pair.steps(3)
    steps = [state["step"].item() for state in pair.first.state.values()]
    before = pair.everything()
    path = pair.save(3)
    assert [state["step"].item() for state in pair.first.state.values()] == steps == [3.0] * len(steps)
    after = pair.everything()
    after["curriculum"], before["curriculum"] = [], []
    assert after == before, "saving changes nothing"
    answer = {
        "losses": pair.steps(4),
        "state": pair.everything(),
        "draws": pair.draws(),
        "metrics": dict(read_manifest(path).metrics),
        "note": read_manifest(path).state["note"],
    }
    pair.checkpointer.close()
    return answer


def restore_and_go_on(distributed: DistributedContext, root: Path) -> dict[str, Any]:
    pair = Pair(distributed, root, seed=2)
    pair.steps(1)  # with a state of its own, which must not show through
    assert pair.restore().step == 3
    assert plain_value(pair.curriculum.value) == plain_value(curriculum_state(3))
    assert pair.mine.value["rank"] == pair.rank and pair.mine.value["text"] == "x" * pair.rank
    assert pair.mine.value["noise"].tolist() == [float(pair.rank)] * (pair.rank + 1)
    answer = {"losses": pair.steps(4), "state": pair.everything(), "draws": pair.draws()}
    pair.checkpointer.close()
    return answer


def test_ranks_go_on_with_the_same_bits(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    saved = gloo_ranks(2, save_and_go_on, tmp_path)
    assert saved[0]["metrics"] == {"valid_loss": 1 / 3} and saved[0]["note"] == {"by": ["hand"]}
    assert saved[0]["draws"] != saved[1]["draws"]
    for rank, (expected, found) in enumerate(zip(saved, gloo_ranks(2, restore_and_go_on, tmp_path), strict=True)):
        assert found["losses"] == expected["losses"], rank
        assert [name for name in found["state"] if found["state"][name] != expected["state"][name]] == [], rank
        assert found["draws"] == expected["draws"], rank


def model_of(width: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, width, bias=False)


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


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
        for dtype in DTYPES:
            values = torch.zeros(7, dtype=dtype)
            values[-1] = rank
            save(str(dtype), 12, sampler=Own(values))
        save("odd", 12, odd=Own(print) if rank == 1 else Bare({}))
        save("shapes", 12, odd=Own(torch.zeros(rank + 1)))
        save("metrics", 12, model=same, metrics={"valid_loss": object()})
        save("per rank", 12, model=same, per_rank={"sampler": Own(torch.arange(8) + rank)})
        del said[:]
        norm = nn.BatchNorm1d(4)
        norm(torch.randn(8, 4) * (1 + rank) + rank)
        save("buffers", 13, norm=norm)
        answers["of buffers"] = list(said)
    del said[:]
    with closing(Checkpointer(root, group=distributed.checkpoint_group)) as checkpointer:
        ddp = apply_ddp(nn.BatchNorm1d(4), torch.device("cpu"), distributed.device_group)
        ddp(torch.randn(8, 4) + rank)
        save("plain", 16, counter=Own(rank), model=same)
        answers["of plain"] = list(said)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.1)
        ddp(torch.randn(8, 4)).sum().backward()
        zero.step()
        save("ZeRO", 17, norm=ddp, optimizer=zero)
        save("FSDP1", 18, model=FullyShardedDataParallel(model_of(), device_id=torch.device("cpu")))
    del said[:]
    with closing(Checkpointer(root / "one rank", group=distributed.checkpoint_group, max_failures=0)) as checkpointer:
        save("plain on one rank", 1, model=same, **({} if rank else {"counter": Own(1)}))
        answers["of plain on one rank"] = list(said)
    answers["averages"] = averages_go_on(distributed, root / "averages")
    return answers


def averages_go_on(distributed: DistributedContext, root: Path) -> bool:
    """An average of sharded parameters gets sharded ones back."""

    def make() -> tuple[nn.Module, Own]:
        model = model_of(6)
        fully_shard(model, mesh=init_device_mesh("cpu", (distributed.environment.world_size,)))
        return model, Own({name: parameter.detach().clone() for name, parameter in model.named_parameters()})

    def change(model: nn.Module, average: Own) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        for name, parameter in model.named_parameters():
            average.value[name].lerp_(parameter.detach(), 0.5)

    with closing(Checkpointer(root, group=distributed.checkpoint_group)) as checkpointer:
        model, average = make()
        change(model, average)
        checkpointer.save(1, model=model, average=average).result(60)
        other_model, other = make()
        assert checkpointer.restore(model=other_model, average=other)
    for each, its in ((model, average), (other_model, other)):
        change(each, its)
    pairs = [(average.value[name], other.value[name]) for name in average.value]
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
        for what, name in (
            ("small", "model.weight"),
            *((each, "sampler.value") for each in ("order", *map(str, DTYPES))),
        ):
            assert each[what] == f"{name} differs between rank 0 and rank 1, and should be the same on all of them"


def test_what_cannot_be_saved_is_told_on_all_ranks_and_the_next_save_works(answers: list[dict[str, Any]]) -> None:
    for each in answers:
        assert "odd.value is a builtin_function_or_method" in each["odd"]
        assert "odd.value is float32 [2] on one rank and float32 [1] on another" in each["shapes"]
        assert "valid_loss" in each["metrics"] and each["per rank"] == "saved"


def test_a_replica_that_has_drifted_in_one_element_is_found_within_a_few_saves(answers: list[dict[str, Any]]) -> None:
    for each in answers:
        found = [each[f"large {number}"] for number in range(8)]
        assert found.count("saved") == 7
        assert "model.weight differs between rank 0 and rank 1, and should be the same on all of them" in found


def test_buffers_may_differ(answers: list[dict[str, Any]]) -> None:
    assert all((each["buffers"], each["of buffers"]) == ("saved", []) for each in answers)


def test_plain_values_that_differ_are_told(answers: list[dict[str, Any]]) -> None:
    for what in ("plain", "plain on one rank"):
        assert answers[0][what] == "saved"
        told = answers[0][f"of {what}"]
        assert any("the state of counter differs between rank 0 and rank 1" in line for line in told)


def test_what_keeps_its_state_on_other_ranks_is_refused_when_it_is_saved(answers: list[dict[str, Any]]) -> None:
    for each in answers:
        assert "is a ZeroRedundancyOptimizer" in each["ZeRO"]
        assert "not the memory of a parameter or buffer" in each["FSDP1"]


def test_an_average_of_sharded_parameters_goes_on_with_the_same_bits(answers: list[dict[str, Any]]) -> None:
    assert all(each["averages"] for each in answers)
