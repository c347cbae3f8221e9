"""A state is a state, however it is laid out over ranks: saved by one layout, restored into any other, to the last bit."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.parallel.ddp import apply_ddp
from slurmtrain.rank.distributed_context import DistributedContext
from tests.support.gloo import GlooRanks

# ------------------------------------------------------------------------------------------------------------- the model


class Block(nn.Module):
    """For tensor parallelism: a layer that is cut in columns, and one in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20, bias=False)
        self.down = nn.Linear(20, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return x + down


class Model(nn.Module):
    """With extents that no number of ranks divides, and a parameter of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(12, 13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x * self.scale)
        return logits


def reference_model(seed: int) -> Model:
    """The same values on all ranks."""
    torch.manual_seed(seed)
    return Model()


def plain(model: Model, distributed: DistributedContext) -> nn.Module:
    return apply_ddp(model, torch.device("cpu"), distributed.device_group)


def fsdp(model: Model, distributed: DistributedContext) -> nn.Module:
    return shard(model, init_device_mesh("cpu", (distributed.environment.world_size,)))


def hsdp(model: Model, distributed: DistributedContext) -> nn.Module:
    return shard(
        model, init_device_mesh("cpu", (2, distributed.environment.world_size // 2), mesh_dim_names=("dp", "fsdp"))
    )


def shard(model: Model, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: Model, mesh: DeviceMesh) -> Model:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tp(model: Model, distributed: DistributedContext) -> nn.Module:
    return tensor_parallel(model, init_device_mesh("cpu", (distributed.environment.world_size,)))


def fsdp_tp(model: Model, distributed: DistributedContext) -> nn.Module:
    """Columns over pairs of ranks, rows of what they have over the others."""
    mesh = init_device_mesh("cpu", (distributed.environment.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    return shard(tensor_parallel(model, mesh["tp"]), mesh["dp"])


LAYOUTS: Mapping[str, Callable[[Model, DistributedContext], nn.Module]] = {
    "plain": plain,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tp": tp,
    "fsdp_tp": fsdp_tp,
}


@dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    checkpointer: Checkpointer

    def loss(self) -> Tensor:
        tokens = torch.arange(26).reshape(2, 13) % 13
        logits = self.model(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten())

    def step(self) -> float:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def full(self) -> dict[str, Tensor]:
        """Every tensor as one process would have it."""
        module = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
        found: dict[str, Tensor] = dict(module.state_dict())
        for name, parameter in module.named_parameters():
            for field, value in self.optimizer.state[parameter].items():
                found[f"{name}.{field}"] = value
        return {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in found.items()
        }


def training(distributed: DistributedContext, directory: Path, layout: str, *, seed: int) -> Training:
    model = LAYOUTS[layout](reference_model(seed), distributed)
    checkpointer = Checkpointer(directory, group=distributed.checkpoint_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return Training(model, optimizer, checkpointer)


def save_all(distributed: DistributedContext, root: Path, layouts: list[str]) -> dict[str, Any]:
    """Two steps in every layout, a save, and the loss of the step after."""
    losses = {}
    for layout in layouts:
        run = training(distributed, root / layout, layout, seed=1)
        run.step()
        run.step()
        saving = run.checkpointer.save(2, model=run.model, optimizer=run.optimizer)
        full = run.full()
        losses[layout] = [run.step() for _ in range(2)]
        run.checkpointer.wait(60)
        assert saving.done()
        if distributed.environment.rank == 0:
            torch.save(full, root / layout / "full.pt")
        run.checkpointer.close()
    return losses


def restore_all(distributed: DistributedContext, root: Path, into: list[tuple[str, str]]) -> dict[str, list[float]]:
    """From the checkpoint of one layout into another: the same full tensors, and the loss goes on."""
    losses = {}
    for saved, layout in into:
        run = training(distributed, root / saved, layout, seed=2)
        restored = run.checkpointer.restore(model=run.model, optimizer=run.optimizer)
        assert restored is not None and restored.step == 2 and restored.set_aside == ()
        full, expected = run.full(), torch.load(root / saved / "full.pt")
        assert full.keys() == expected.keys()
        different = [name for name in full if not same(full[name], expected[name])]
        assert different == [], f"{saved} -> {layout}: {different}"
        losses[f"{saved} -> {layout}"] = [run.step() for _ in range(2)]
        run.checkpointer.close()
    return losses


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


# -------------------------------------------------------------------------------------------------- all sorts of tensors


class Zoo(nn.Module):
    """Every kind of tensor that a model can have; `sign` tells apart what was saved from what was there before."""

    def __init__(self, sign: int, *, sharded: bool):
        super().__init__()
        torch.manual_seed(3)

        def parameter(tensor: Tensor) -> nn.Parameter:
            return nn.Parameter(tensor * sign, requires_grad=False)

        self.a_float64 = parameter(torch.randn(5, 7, dtype=torch.float64))
        self.a_bfloat16 = parameter(torch.randn(7, 3).bfloat16())
        self.a_float16 = parameter(torch.randn(3).half())
        self.a_float8 = nn.Parameter((torch.randn(9) * sign).to(torch.float8_e4m3fn), requires_grad=False)
        self.a_complex64 = parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.a_complex128 = parameter(torch.randn(3, dtype=torch.complex128))
        self.register_buffer("a_int64", torch.arange(11) * sign)
        self.register_buffer("a_int8", (torch.arange(3) * sign).to(torch.int8))
        self.register_buffer("a_bool", torch.tensor([True, False, True]) == (sign > 0))
        self.register_buffer("count", torch.tensor(7 * sign))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("not_saved", torch.tensor(sign), persistent=False)
        self.scalar = parameter(torch.tensor(1.5))
        self.channels_last = parameter(torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last))
        self.transposed = nn.Parameter((torch.randn(6, 5) * sign).t(), requires_grad=False)
        self.every_other = nn.Parameter((torch.randn(8, 6) * sign)[::2, 1:4], requires_grad=False)
        self.with_nan = parameter(torch.tensor([float("nan"), float("inf"), -0.0]))
        self.tied = self.a_float64
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for name, placement in SHARDED.items():
                tensor = distribute_tensor(getattr(self, name).detach(), mesh, [placement])
                setattr(self, name, nn.Parameter(tensor, requires_grad=False))
            self.tied = self.a_float64


SHARDED = {
    "a_float64": Shard(1),
    "a_bfloat16": Shard(0),
    "a_complex64": Shard(1),
    "scalar": Replicate(),
    "channels_last": Shard(2),
    "transposed": Shard(0),
}


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    data = bytes(whole.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    return str(whole.dtype), tuple(whole.shape), data


def save_zoo(distributed: DistributedContext, root: Path) -> None:
    for sharded in (False, True):
        checkpointer = Checkpointer(root / str(sharded), group=distributed.checkpoint_group)
        checkpointer.save(1, zoo=Zoo(1, sharded=sharded)).result(60)
        checkpointer.close()


def restore_zoo(distributed: DistributedContext, root: Path) -> list[tuple[bool, bool, list[str]]]:
    """The names of what differs, for every combination."""
    found = []
    for saved in (False, True):
        for sharded in (False, True):
            zoo, expected = Zoo(-1, sharded=sharded), Zoo(1, sharded=False)
            strides = {name: tensor.stride() for name, tensor in zoo.state_dict().items()}
            checkpointer = Checkpointer(root / str(saved), group=distributed.checkpoint_group)
            checkpointer.restore(zoo=zoo)
            checkpointer.close()
            assert zoo.tied is zoo.a_float64
            assert {name: tensor.stride() for name, tensor in zoo.state_dict().items()} == strides
            there = {name: bits(tensor) for name, tensor in zoo.state_dict().items()}
            wanted = {name: bits(tensor) for name, tensor in expected.state_dict().items()}
            found.append((saved, sharded, [name for name in wanted if there[name] != wanted[name]]))
    return found


# -------------------------------------------------------------------------------------------------------------- who writes


class Sizes(nn.Module):
    """16 MB in large tensors, with 200 small ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.ParameterList(
            nn.Parameter(torch.zeros(shape)) for shape in ((1000, 2000), (5, 300_000), (700_001,))
        )
        self.small = nn.ParameterList(nn.Parameter(torch.zeros(64)) for _ in range(200))


def save_sizes(distributed: DistributedContext, root: Path) -> int:
    expected = 0
    for layout in ("plain", "fsdp", "hsdp"):
        model: nn.Module = Sizes()
        expected = sum(tensor.numel() * tensor.itemsize for tensor in model.state_dict().values())
        if layout != "plain":
            shape, names = ((4,), ("fsdp",)) if layout == "fsdp" else ((2, 2), ("dp", "fsdp"))
            fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        checkpointer = Checkpointer(root / layout, group=distributed.checkpoint_group)
        checkpointer.save(1, model=model).result(60)
        checkpointer.close()
    return expected


# --------------------------------------------------------------------------------------------- what FSDP does to parameters


def evaluate_then_save(distributed: DistributedContext, root: Path) -> None:
    """After a forward pass without a backward pass FSDP's outermost parameters are whole on every rank."""
    run = training(distributed, root, "fsdp", seed=1)
    run.step()
    with torch.no_grad():
        run.loss()
    run.checkpointer.save(1, model=run.model, optimizer=run.optimizer).result(60)
    full = run.full()
    run.step()
    with torch.no_grad():
        run.loss()
    assert run.checkpointer.restore(model=run.model, optimizer=run.optimizer) is not None
    assert all(same(run.full()[name], full[name]) for name in full)
    run.checkpointer.close()


# ---------------------------------------------------------------------------------------------------------------- the tests

Case = tuple[Callable[..., Any], *tuple[Any, ...]]


def one_after_another(distributed: DistributedContext, root: Path, cases: Mapping[str, Case]) -> dict[str, Any]:
    """What each case returns, or its traceback. Ranks are started once for all of them: that is what takes the time."""
    answers: dict[str, Any] = {}
    for name, (function, *args) in cases.items():
        try:
            answers[name] = function(distributed, root / name.partition(" ")[0], *args)
        except Exception:
            answers[name] = Failure(traceback.format_exc())
    return answers


@dataclass(frozen=True)
class Failure:
    traceback: str


EVERY = list(LAYOUTS)
# (number of ranks, cases): what one world has saved, those after it restore.
WORLDS: list[tuple[int, dict[str, Case]]] = [
    (
        4,
        {
            "layouts by 4": (save_all, EVERY),
            "layouts into 4": (
                restore_all,
                [("plain", "fsdp_tp"), ("fsdp", "hsdp"), ("hsdp", "tp"), ("tp", "fsdp_tp"), ("fsdp_tp", "tp")],
            ),
            "sizes": (save_sizes,),
            "zoo by 4": (save_zoo,),
        },
    ),
    (
        3,
        {
            "layouts into 3": (
                restore_all,
                [*((layout, "fsdp") for layout in EVERY), ("fsdp", "plain")],
            ),
            "zoo into 3": (restore_zoo,),
        },
    ),
    (
        2,
        {
            "layouts into 2": (
                restore_all,
                [("plain", "tp"), ("fsdp", "tp"), ("hsdp", "tp"), ("fsdp_tp", "plain")],
            ),
            "evaluated": (evaluate_then_save,),
        },
    ),
]


@dataclass(frozen=True)
class Answers:
    """What the cases of all worlds have returned, and where they have saved."""

    root: Path
    by_name: Mapping[str, list[Any]]

    def __getitem__(self, name: str) -> list[Any]:
        """Of every rank; a failure fails the test."""
        for rank, answer in enumerate(self.by_name[name]):
            if isinstance(answer, Failure):
                pytest.fail(f"rank {rank}:\n{answer.traceback}", pytrace=False)
        return self.by_name[name]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    root = tmp_path_factory.mktemp("resharding")
    found: dict[str, list[Any]] = {}
    with GlooRanks(root) as ranks:
        for size, cases in WORLDS:
            results = ranks(size, one_after_another, root, cases, timeout_s=400)
            found.update({name: [result[name] for result in results] for name in cases})
        yield Answers(root, found)


@pytest.mark.parametrize("size", [3, 2, 4])
def test_layouts_and_world_sizes_change_and_nothing_else(answers: Answers, size: int) -> None:
    """Parameters and optimiser state are equal to the last bit, and the loss goes on."""
    saved = answers["layouts by 4"][0]
    for name, losses in answers[f"layouts into {size}"][0].items():
        assert losses == pytest.approx(saved[name.partition(" ")[0]], abs=1e-5), name


def test_a_single_process_reads_and_writes_for_all(answers: Answers, tmp_path: Path) -> None:
    for layout, losses in answers["layouts by 4"][0].items():
        model = reference_model(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        checkpointer = Checkpointer(answers.root / "layouts" / layout)
        assert checkpointer.restore(model=model, optimizer=optimizer) is not None
        single = Training(model, optimizer, checkpointer)
        full, expected = single.full(), torch.load(answers.root / "layouts" / layout / "full.pt")
        assert full.keys() == expected.keys() and all(same(full[name], expected[name]) for name in full)
        assert [single.step() for _ in range(2)] == pytest.approx(losses, abs=1e-5)
        checkpointer.close()


def test_tensors_of_all_kinds_come_back_to_the_last_bit(answers: Answers) -> None:
    assert answers["zoo by 4"]
    for found in answers["zoo into 3"]:
        assert found == [(saved, sharded, []) for saved in (False, True) for sharded in (False, True)]


def test_every_byte_is_written_once_and_by_all_ranks_alike(answers: Answers) -> None:
    expected = answers["sizes"][0]
    for layout in ("plain", "fsdp", "hsdp"):
        (path,) = committed(answers.root / "sizes" / layout)
        sizes = [record.size for name, record in read_manifest(path).files.items() if name.startswith("rank")]
        assert len(sizes) == 4
        # Beyond the tensors: headers and random states.
        assert expected < sum(sizes) < expected + 4 * 65536, layout
        if layout == "plain":  # elsewhere the layout decides who has how much
            assert max(sizes) < 1.1 * sum(sizes) / 4


def test_fsdp_can_be_saved_and_restored_after_an_evaluation(answers: Answers) -> None:
    assert answers["evaluated"]
