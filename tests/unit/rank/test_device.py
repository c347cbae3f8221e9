"""Which device a rank computes on: a job that asks for GPUs never trains on the CPU without a word."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmtrain.errors import EXIT_CONFIG, EnvironmentMismatchError
from slurmtrain.rank import distributed_context
from slurmtrain.rank.distributed_context import _check_own_gpu, choose_device
from slurmtrain.slurm.environment import Environment
from tests.support.commands import Cli

OF_A_JOB: dict[str, Any] = {"world_size": 4, "local_world_size": 2, "nodes": ("n0", "n1"), "tasks_per_node": (2, 2)}
RANK_3 = Environment("slurm", rank=3, local_rank=1, node_rank=1, **OF_A_JOB)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return monkeypatch


def see(gpus: pytest.MonkeyPatch, number: int) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: number)


def test_a_job_that_asks_for_gpus_and_sees_none_ends_with_78_and_does_not_train_on_the_cpu(cli: Cli) -> None:
    words = "+cluster=local cluster.gpus_per_node=1 optim.warmup_steps=0 train.steps=1 train.global_batch_size=2"
    answer = cli(*words.split(), "submit", CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == EXIT_CONFIG, answer.stdout + answer.stderr
    assert "cluster.gpus_per_node=1, but rank 0 on " in answer.stdout and "sees no GPU" in answer.stdout
    assert "training started" not in answer.stdout and "Traceback" not in answer.stdout


def test_auto_is_a_gpu_where_one_was_asked_for_or_is_visible_and_else_the_cpu(gpus: pytest.MonkeyPatch) -> None:
    see(gpus, 2)
    assert choose_device("auto", RANK_3, gpus_per_node=2) == torch.device("cuda", 1)
    assert choose_device("auto", RANK_3) == torch.device("cuda", 1)
    assert choose_device("cpu", RANK_3, gpus_per_node=2) == torch.device("cpu")
    see(gpus, 1)  # SLURM has given each rank its own
    assert choose_device("auto", RANK_3, gpus_per_node=2) == torch.device("cuda", 0)
    see(gpus, 0)
    assert choose_device("auto", RANK_3) == torch.device("cpu")
    with pytest.raises(EnvironmentMismatchError, match=r"cluster\.gpus_per_node=2, but rank 3 on n1 sees no GPU"):
        choose_device("auto", RANK_3, gpus_per_node=2)


def test_a_rank_that_sees_fewer_gpus_than_it_should_names_the_node_and_what_was_asked_for(
    gpus: pytest.MonkeyPatch,
) -> None:
    last = dataclasses.replace(RANK_3, rank=7, world_size=8, local_rank=3, local_world_size=4, tasks_per_node=(4, 4))
    see(gpus, 3)
    said = r"4 ranks on n1, but only 3 GPUs of cluster\.gpus_per_node=4"
    with pytest.raises(EnvironmentMismatchError, match=said) as caught:
        choose_device("auto", last, gpus_per_node=4)
    assert caught.value.exit_code == EXIT_CONFIG and "cluster.exclude=n1" in str(caught.value)
    assert isinstance(caught.value, EnvironmentMismatchError) and caught.value.nodes == ("n1",)


@pytest.mark.parametrize(
    ("cuda", "hidden", "source", "at_fault"),
    [
        ("12.8", None, "slurm", ("n1",)),
        ("12.8", "0,1", "slurm", ("n1",)),
        ("12.8", "", "slurm", ()),  # a variable hides them, on any node
        (None, None, "slurm", ()),  # torch is built for CPUs
        ("12.8", None, "local", ()),  # there is no other node
    ],
)
def test_a_node_without_a_gpu_is_at_fault_unless_something_else_hides_it(
    gpus: pytest.MonkeyPatch, cuda: str | None, hidden: str | None, source: str, at_fault: tuple[str, ...]
) -> None:
    see(gpus, 0)
    gpus.setattr(torch.version, "cuda", cuda)
    gpus.setattr(distributed_context, "ask_gpus", lambda: (None, "Driver/library version mismatch"))
    gpus.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        gpus.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(EnvironmentMismatchError) as caught:
        choose_device("auto", dataclasses.replace(RANK_3, source=source), gpus_per_node=2)
    assert caught.value.nodes == at_fault
    assert ("the driver says: Driver/library version mismatch" in caught.value.message) == (cuda is not None)


def test_two_ranks_that_see_one_and_the_same_gpu_are_refused(gpus: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "GPU-1"

    gpus.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    store = dist.HashStore()
    store.set("gpu/2", "GPU-0")
    _check_own_gpu(store, RANK_3, torch.device("cuda", 0))
    store.set("gpu/2", "GPU-1")
    with pytest.raises(EnvironmentMismatchError, match="ranks 2, 3 on n1 see the same GPU"):
        _check_own_gpu(store, RANK_3, torch.device("cuda", 0))
