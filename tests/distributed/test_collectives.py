"""What ranks do together: agree on a stop, tell each other plain values, and send what a step has to and no more."""

from __future__ import annotations

import os
import pickle
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slurmtrain.checkpoint import ranks
from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError, SupersededError
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.errors import SlurmtrainError
from slurmtrain.models import Decoder
from slurmtrain.parallel.parallelize import DistributedModel, parallelize
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.system import signals
from slurmtrain.training.agreement import StopAgreement
from slurmtrain.training.forward_backward import build_forward_backward
from tests.support.gloo import GlooRanks
from tests.support.pickles import Evil


def step_until_told(distributed: DistributedContext, told_rank: int, told_at: int, between: bool) -> tuple[int, str]:
    stop = signals.install_signal_handlers()
    agreement = StopAgreement(stop, distributed.control_group)

    def tell(step: int) -> None:
        if distributed.environment.rank == told_rank and step == told_at:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert stop.wait(60)

    step = 0
    while step < 100:
        if not between:
            tell(step)
        agreement.begin()
        if between:
            tell(step)
        if agreement.finish().stop:
            break
        step += 1
    first = stop.first
    assert first is not None
    return step, first.cause


def test_when_one_rank_is_told_all_stop_after_the_same_step(gloo_ranks: GlooRanks) -> None:
    answers = gloo_ranks(4, step_until_told, 2, 7, False)
    assert answers == [(7, "another rank"), (7, "another rank"), (7, "SIGUSR2"), (7, "another rank")]


def test_a_signal_after_the_ranks_have_handed_in_their_flags_stops_all_one_step_later(gloo_ranks: GlooRanks) -> None:
    assert [step for step, _ in gloo_ranks(2, step_until_told, 0, 3, True)] == [4, 4]


def test_a_checkpoint_that_was_asked_for_waits_for_a_moment_for_one() -> None:
    flag = signals.StopFlag()
    flag.save_asked.set()
    agreement = StopAgreement(flag, None)
    agreement.begin()  # in the midst of an evaluation, say
    assert not agreement.finish().save
    agreement.begin(save=False)
    assert agreement.finish().save
    agreement.begin(save=False)
    assert not agreement.finish().save


def talk(distributed: DistributedContext, canary: Path) -> list[Any]:
    """What this rank hears; of what fails, the error's type and message."""
    told = RankGroup(distributed.checkpoint_group)
    rank = told.rank
    heard: list[Any] = []

    def fail(error: Exception, on: int) -> None:
        if rank == on:
            raise error

    def hear(question: Any) -> None:
        try:
            heard.append(question())
        except SlurmtrainError as error:
            heard.append([type(error).__name__, error.message])

    def send_pickles(question: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(ranks, "_encode", lambda value: pickle.dumps(Evil(canary)))
            hear(question)

    long = "a" * (100_000 * rank)
    hear(lambda: told.all_do(lambda: [rank, "\0", {"a": None}], list))
    hear(lambda: told.on_rank_0(lambda: ["from", rank]))
    hear(lambda: told.broadcast(rank, source=1))
    hear(lambda: told.all_do(lambda: long, lambda all_: [len(each) for each in all_]))
    hear(lambda: told.all_do(lambda: fail(CheckpointMismatchError("another model"), 1)))
    hear(lambda: told.all_do(lambda: fail(SupersededError("a newer one"), 1), lambda all_: "not reached"))
    hear(lambda: told.on_rank_0(lambda: fail(FileNotFoundError(2, "no", "/there"), 0)))
    send_pickles(lambda: told.all_do(lambda: rank, list))
    send_pickles(lambda: told.all_do(lambda: rank, lambda all_: all_))
    hear(lambda: told.all_do(lambda: rank, list))
    return heard


def test_plain_values_and_failures_are_heard_by_all_and_a_pickle_is_refused_and_not_executed(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    one, other = gloo_ranks(2, talk, tmp_path / "canary")
    assert one == other
    *fine, gathered, collected, last = one
    assert fine == [
        [[0, "\0", {"a": None}], [1, "\0", {"a": None}]],
        ["from", 0],
        1,
        [0, 100_000],
        ["CheckpointMismatchError", "another model"],
        ["SupersededError", "a newer one"],
        ["CheckpointError", "rank 0: /there: No such file or directory"],
    ]
    for kind, message in (gathered, collected):
        assert kind == CheckpointError.__name__
        assert "is not the beginning of a message between ranks; it was ignored" in message
    assert last == [0, 1]
    assert not (tmp_path / "canary").exists()


L = 2  # blocks of the Decoder, which is L + 1 units of FSDP
UNITS = L + 1


def laid_out(
    distributed: DistributedContext, model: Decoder, layout: dict[str, int], **options: Any
) -> DistributedModel:
    return parallelize(
        model,
        ParallelConfig(**options),
        ParallelDims(**layout),
        rank=distributed.environment.rank,
        device=distributed.device,
        group=distributed.device_group,
        fill=lambda held: held,
    )


def counts(distributed: DistributedContext, names: list[str]) -> dict[str, dict[str, int]]:
    """Of each of these cases, which have the same ranks, one after the other."""
    return {name: counts_of(distributed, *CASES[name][1:4]) for name in names}


def counts_of(
    distributed: DistributedContext, layout: dict[str, int], options: dict[str, Any], micro_batches: int
) -> dict[str, int]:
    """Of the second step: the first finds out shapes."""
    torch.manual_seed(0)
    model = Decoder(
        vocab_size=64,
        dim=32,
        n_layers=L,
        n_heads=4,
        n_kv_heads=2,
        max_seq_len=16,
        tie_embeddings=layout.get("pp", 1) == 1,
    )
    distributed_model = laid_out(distributed, model, layout, **options)
    tokens = torch.randint(64, (1, 16))
    forward_backward = build_forward_backward(distributed_model, micro_batches, 1)
    for _ in range(2):
        with Collectives() as seen:
            forward_backward.train([{"inputs": tokens, "targets": tokens}] * micro_batches, global_tokens=lambda: 1)
    return dict(seen.found)


# What an operation does, and so its name among those of torch.distributed and those of DTensors.
NAMES = {
    **dict.fromkeys(("_allgather_base_", "all_gather_into_tensor"), "gather"),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_tensor"), "scatter"),
    **dict.fromkeys(("allreduce_", "all_reduce"), "sum"),
    "alltoall_base_": "exchange",
    "send": "send",
    "recv_": "receive",
}
SEND_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")


class Collectives(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it will be back with what it is made of
        name = func.name().partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in SEND_NOTHING:
            small = any(isinstance(each, torch.Tensor) and each.dtype == torch.bfloat16 for each in tree_leaves(args))
            self.found[NAMES[name] + " in bfloat16" * small] += 1
        return func(*args, **(kwargs or {}))


def fsdp(micro_batches: int = 1) -> dict[str, int]:
    """The root's parameters are gathered once, those of the blocks once more for backward."""
    return {"gather": micro_batches * (UNITS + L), "scatter": micro_batches * UNITS}


# Forward: attention and feed-forward gather a block's stretches and scatter their sums, the embedding scatters, the output
# gathers. Backward does the same the other way round. The norms' gradients are sums over stretches; the loss takes two.
TP = {"gather": 2 * (2 * L + 1), "scatter": 2 * (2 * L + 1), "sum": 2 * L + 1 + 2}

CASES: dict[str, tuple[int, dict[str, int], dict[str, Any], int, dict[str, int]]] = {
    "FSDP": (2, {"dp_shard": 2}, {}, 1, fsdp()),
    "FSDP, accumulation": (2, {"dp_shard": 2}, {}, 3, fsdp(3)),
    "FSDP, accumulation, nothing freed": (
        2,
        {"dp_shard": 2},
        {"reshard_after_forward": False},
        3,
        {"gather": UNITS, "scatter": 3 * UNITS},
    ),
    "HSDP, accumulation": (4, {"dp_replicate": 2, "dp_shard": 2}, {}, 3, {**fsdp(3), "sum": UNITS}),
    "HSDP, gradients in bfloat16": (
        4,
        {"dp_replicate": 2, "dp_shard": 2},
        {"reduce_dtype": "bfloat16"},
        2,
        {"gather": 2 * (UNITS + L), "scatter in bfloat16": 2 * UNITS, "sum in bfloat16": UNITS},
    ),
    "TP": (2, {"tp": 2}, {}, 1, TP),
    "TP without sequence parallel": (2, {"tp": 2}, {"sequence_parallel": False}, 1, {"sum": 2 * (2 * L + 1) + 2}),
    "FSDP x TP": (4, {"dp_shard": 2, "tp": 2}, {}, 1, {name: TP[name] + fsdp().get(name, 0) for name in TP}),
    # Keys and values together, once a block, and back as gradients.
    "CP": (2, {"cp": 2}, {}, 1, {"gather": UNITS + L + L, "scatter": UNITS + L}),
    # Queries, keys and values together, and the result back; the same for gradients.
    "CP, ulysses": (2, {"cp": 2}, {"cp_method": "ulysses"}, 1, {**fsdp(), "exchange": 4 * L}),
    # A stage has one block and one of the ends: two units, gathered once and scattered once, however many micro batches.
    "PP x FSDP": (4, {"dp_shard": 2, "pp": 2}, {}, 3, {"gather": 2, "scatter": 2, "send": 3, "receive": 3}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    """What each rank has counted, by case. Those of one size share their ranks."""
    by_name: dict[str, list[dict[str, int]]] = {}
    with GlooRanks(tmp_path_factory.mktemp("collectives")) as ranks:
        for size in sorted({case[0] for case in CASES.values()}):
            names = [name for name, case in CASES.items() if case[0] == size]
            answers = ranks(size, counts, names)
            by_name |= {name: [answer[name] for answer in answers] for name in names}
    return by_name


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_no_more_than_it_has_to(found: dict[str, list[dict[str, int]]], name: str) -> None:
    ranks, *_, expected = CASES[name]
    assert found[name] == [expected] * ranks
