"""Gradients that are sent in fewer bytes: as many as they should be, nearly the same steps, and the same bits after a stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.models import Decoder
from slurmtrain.parallel.parallelize import parallelize
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.training.forward_backward import build_forward_backward
from tests.distributed.test_training import SLOW_RATE, StopAt, fit, losses
from tests.support.gloo import GlooRanks
from tests.support.local_runs import assert_same_tensors
from tests.support.reading import checkpoint_tensors

WIDTH, VOCABULARY, FFN = 32, 64, 96
MATRICES = [(VOCABULARY, WIDTH), *[(WIDTH, WIDTH)] * 4, *[(FFN, WIDTH)] * 3]  # a block, and a tied embedding
VECTORS = 3 * WIDTH
ELEMENTS = sum(n * m for n, m in MATRICES) + VECTORS
REPLICAS = {"dp_replicate": 2}


def bytes_sent(distributed: DistributedContext, layout: dict[str, int], options: dict[str, str | int]) -> int:
    """Among replicas, in the third step: DDP has its final buckets, PowerSGD has begun."""
    model = Decoder(vocab_size=VOCABULARY, dim=WIDTH, n_layers=1, n_heads=2, hidden_dim=FFN, max_seq_len=16)
    distributed_model = parallelize(
        model,
        ParallelConfig(**options),  # type: ignore[arg-type]
        ParallelDims(**layout),
        rank=distributed.environment.rank,
        device=distributed.device,
        group=distributed.device_group,
        fill=lambda held: held,
    )
    tokens = torch.randint(VOCABULARY, (1, 16))
    forward_backward = build_forward_backward(distributed_model, 2, 1)
    sent, all_reduce = 0, dist.all_reduce

    def counting(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        nonlocal sent
        sent += tensor.nbytes
        return all_reduce(tensor, *args, **kwargs)  # type: ignore[arg-type]

    dist.all_reduce = counting
    for _ in range(3):
        sent = 0
        forward_backward.train([{"inputs": tokens, "targets": tokens}] * 2, global_tokens=lambda: 1)
    dist.all_reduce = all_reduce
    return sent


@pytest.mark.parametrize(
    ("layout", "options", "expected"),
    [
        (REPLICAS, {"gradient_compression": "bf16"}, 2 * ELEMENTS),
        ({**REPLICAS, "dp_shard": 2}, {"reduce_dtype": "bfloat16"}, 2 * ELEMENTS // 2),
        (
            REPLICAS,
            {"gradient_compression": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 2},
            4 * (sum(2 * (n + m) for n, m in MATRICES) + VECTORS),
        ),
    ],
    ids=["bf16", "HSDP in bfloat16", "powersgd"],
)
def test_a_step_sends_so_many_bytes_once_for_all_its_micro_batches(
    gloo_ranks: GlooRanks, layout: dict[str, int], options: dict[str, str | int], expected: int
) -> None:
    ranks = ParallelDims(**layout).world_size
    assert gloo_ranks(ranks, bytes_sent, layout, options) == [expected] * ranks


SMALL = [*SLOW_RATE, "train.steps=6", "cluster.tasks_per_node=2", "train.eval_every=0", "checkpoint.every_steps=0"]
POWERSGD = ["parallel.gradient_compression=powersgd", "parallel.powersgd_start_step=2", "parallel.powersgd_rank=2"]

# A number is off by at most u of itself when it is rounded to bfloat16 (u = 2**-9) or float16 (2**-11). Each rank's gradient
# is rounded, and their sum. With two ranks whose gradients have little in common, each has sqrt(2) times the norm of the mean.
ROUNDINGS = 1 + 2**0.5
BOUNDS = {"bf16": ROUNDINGS * 2**-9, "fp16": ROUNDINGS * 2**-11}


def all_kinds(distributed: DistributedContext, folder: Path) -> None:
    fit(distributed, folder / "none", SMALL)
    for how in BOUNDS:
        fit(distributed, folder / how, [*SMALL, f"parallel.gradient_compression={how}"])
    fit(distributed, folder / "powersgd", [*SMALL, *POWERSGD])
    stop = StopAt(4) if distributed.environment.rank == 1 else None
    assert fit(distributed, folder / "stopped", [*SMALL, *POWERSGD], stop).step == 4
    assert fit(distributed, folder / "stopped", [*SMALL, *POWERSGD], attempt=2).first_step == 4


def test_compressed_steps_are_nearly_those_of_whole_gradients_and_go_on_after_a_stop_with_the_same_bits(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    gloo_ranks(2, all_kinds, tmp_path)
    whole = losses(tmp_path / "none", "grad_norm")
    for how, bound in BOUNDS.items():
        norms = losses(tmp_path / how, "grad_norm")
        differences = [abs(norms[step] - whole[step]) / whole[step] for step in whole]
        assert 0 < max(differences) < bound, how

    norms = losses(tmp_path / "powersgd", "grad_norm")
    assert [step for step in whole if norms[step] != whole[step]] == [3, 4, 5, 6]  # from its start on
    for field in ("loss", "grad_norm", "valid_loss"):
        assert losses(tmp_path / "stopped", field) == losses(tmp_path / "powersgd", field)
    stopped, undisturbed = (checkpoint_tensors(tmp_path / run / "checkpoints") for run in ("stopped", "powersgd"))
    assert_same_tensors(stopped, undisturbed)
    # What more ranks have not seen is forgotten by all of them: else they would wait for each other in different collectives.
    four = [*SMALL, *POWERSGD, "cluster.tasks_per_node=4", "train.steps=8", "checkpoint.allow=[config]"]
    gloo_ranks(4, fit, tmp_path / "stopped", four, None, 3)
    assert sorted(losses(tmp_path / "stopped")) == list(range(1, 9))
