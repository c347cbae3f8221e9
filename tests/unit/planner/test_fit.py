"""What cannot fit into a GPU is refused before it queues, with what would."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.rules import validate
from slurmtrain.errors import ConfigError
from slurmtrain.parallel.pipeline import Pipeline, stage_numbers
from slurmtrain.planner.fit import check_fits, in_flight, memory_of

SHORT = ["parallel.param_dtype=null", "data.seq_len=256"]  # so that parameters take most of the memory
EIGHT_B = ["cluster=h100x8", "model=llama3_8b", "train.global_batch_size=512", "train.micro_batch_size=1", *SHORT]


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    assert main([*words, "submit", "--dry-run"]) == 78
    sentence, hint = capsys.readouterr().err.splitlines()
    return sentence, hint


def test_a_replica_of_8b_does_not_fit_and_what_is_proposed_does(capsys: pytest.CaptureFixture[str]) -> None:
    """8.03 billion parameters in float32, with gradients and two moments: 16 bytes each."""
    sentence, hint = refusal(EIGHT_B, capsys)
    assert "8 ranks = 8 data-parallel groups needs" in sentence
    assert "parameters 29.9, gradients 29.9, optimiser 59.8" in sentence
    assert "cluster.gpu_memory_gb=79" in sentence
    proposals = re.findall(r"(parallel\.[^(]+?) \(\d+ GB\)", hint)
    assert proposals[0] == "parallel.dp_shard=2"
    for proposal in proposals:
        config = compose([*EIGHT_B, *proposal.split()])
        check_fits(config, validate(config))


def test_70b_on_one_node_is_refused_with_the_nodes_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster=h100x8", "model=llama3_70b", "train.global_batch_size=512"]
    _, hint = refusal(words, capsys)
    proposal = hint.partition("what would fit: ")[2].partition(" (")[0].split()
    assert 8 * 79 * 2**30 < 16 * 70_553_706_496 < 16 * 79 * 2**30  # so one node cannot do, and two might
    assert proposal[0] == "cluster.nodes=2"
    config = compose([*words, *proposal])
    check_fits(config, validate(config))


def test_adapters_are_refused_only_if_the_frozen_weights_do_not_fit() -> None:
    """32.8 billion frozen parameters on four GPUs of 79 GB: 30.5 GB each, where 122 GB would be needed to train them."""
    words = ["cluster=a100x4", "model=qwen2_5_32b", "parallel=fsdp", "parallel.activation_checkpointing=full"]
    words += ["train.micro_batch_size=1"]
    with pytest.raises(ConfigError, match="needs"):
        check_fits(config := compose(words), validate(config))
    check_fits(config := compose([*words, "lora.r=16"]), validate(config))
    small = compose([*words, "lora.r=16", "cluster.gpu_memory_gb=20"])
    with pytest.raises(ConfigError) as refused:
        check_fits(small, validate(small))
    for proposal in re.findall(r"((?:cluster|parallel)\.[^(;]+?) \(\d+ GB\)", refused.value.hint or ""):
        config = compose([*words, "lora.r=16", "cluster.gpu_memory_gb=20", *proposal.split()])
        check_fits(config, validate(config))


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.gpu_memory_gb=null"],
        ["model._target_=my.Model"],
        ["~model.vocab_size"],
        ["job=command", "job.command=true"],
    ],
)
def test_what_cannot_be_counted_is_not_refused(overrides: list[str]) -> None:
    assert main([*EIGHT_B, *overrides, "submit", "--dry-run"]) == 0


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_as_many_micro_batches_are_in_flight_as_torch_schedules(schedule: str, pp: int, micro_batches: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=pp)
    try:
        assert dist.group.WORLD is not None
        numbers, count = stage_numbers(0, pp, schedule)
        pipeline = Pipeline(
            [nn.Linear(1, 1) for _ in numbers],
            numbers,
            count,
            schedule=schedule,
            micro_batches=micro_batches,
            device=torch.device("cpu"),
            group=dist.group.WORLD,
            loss=lambda logits, targets: logits.sum(),
        )
        order = pipeline._schedule.pipeline_order
    finally:
        dist.destroy_process_group()
    change = {"FORWARD": 0.5, "FULL_BACKWARD": -0.5, "BACKWARD_WEIGHT": -0.5}  # each of two stages has half the layers
    for rank, most in enumerate(in_flight(schedule, pp, micro_batches)):
        changes = [change.get(action.computation_type.name, 0) for action in order[rank] if action is not None]
        assert max(itertools.accumulate(changes)) == most


def test_compute_in_bfloat16_and_gpipe_count() -> None:
    """GPipe keeps all eight micro batches of the step, 1F1B on the first of two stages two."""
    words = [*EIGHT_B, "parallel.pp=2", "train.global_batch_size=32", "data.seq_len=4096"]
    found = {}
    for name in ("parallel.pp_schedule=1f1b", "parallel.pp_schedule=gpipe", "parallel.param_dtype=bfloat16"):
        config = compose([*words, name])
        stages = memory_of(config, validate(config))
        assert stages is not None and len(stages) == 2 and stages[0].activations is not None
        found[name] = stages[0].activations
    one, all_of_them, half = found.values()
    assert all_of_them == 4 * one
    assert half == pytest.approx(one / 2, rel=1e-6)
