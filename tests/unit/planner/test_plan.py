"""Plans of whole configs: what fits, what is fastest, and up to how many nodes more of them help."""

from __future__ import annotations

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.config.rules import validate
from slurmtrain.planner.plan import Plan, on_nodes, plan_of

EIGHT_B = ["cluster=h100x8", "model=llama3_8b", "parallel=fsdp", "parallel.param_dtype=bfloat16", "data.seq_len=8192"]


def planned(words: list[str]) -> Plan:
    config = compose(words)
    return plan_of(config, validate(config))


def test_the_cost_follows_from_speed_and_goodput() -> None:
    config = compose([*EIGHT_B, "cluster.nodes=16", "train.global_batch_size=1024", "train.micro_batch_size=1"])
    plan = plan_of(config, validate(config), tokens=15 * 10**12)
    assert plan.step is not None and plan.gpu_hours is not None
    seconds = 15e12 / plan.step.tokens_per_s / plan.goodput
    assert plan.gpu_hours == pytest.approx(128 * seconds / 3600)
    shorter = planned([*EIGHT_B, "train.steps=100", "train.global_batch_size=16"])
    assert shorter.tokens == 100 * 16 * 8192


# More nodes.


def test_more_nodes_are_worth_it_until_communication_shows() -> None:
    """With 100 Gbit/s a node, adding up 8 billion gradients hides behind the sequences of 2 nodes, and not of 32."""
    words = ["cluster=h100x8", "model=llama3_8b", "parallel=hsdp", "parallel.param_dtype=bfloat16", "data.seq_len=8192"]
    words += ["cluster.network_gb_per_s=12.5", "cluster.nodes=2", "train.global_batch_size=1024"]
    plan = planned([*words, "train.micro_batch_size=2", "parallel.activation_checkpointing=full"])
    wasted = [each for each in plan.more_nodes if not each.worth_it]
    assert plan.more_nodes[0].worth_it
    assert {each.cause for each in wasted} == {"dp_replicate"}


def test_a_global_batch_ends_with_one_sequence_for_each_rank() -> None:
    words = ["train.global_batch_size=32", "train.micro_batch_size=4", "parallel.activation_checkpointing=full"]
    plan = planned([*EIGHT_B, *words])
    assert [each.after.nodes for each in plan.more_nodes] == [2, 4]
    assert plan.no_further is not None
    assert plan.no_further.startswith("8 nodes: train.global_batch_size=32 does not divide by 64 ranks")


def test_a_layout_without_an_open_axis_grows_by_its_data_parallel_one() -> None:
    config = compose([*EIGHT_B, "parallel.dp_replicate=1", "parallel.dp_shard=8", "train.global_batch_size=64"])
    sized = on_nodes(config, 4)
    assert not isinstance(sized, str)
    assert (sized.parallel.dp_shard, sized.cluster.nodes) == (32, 4)
    replicas = compose([*EIGHT_B, "parallel.dp_replicate=1", "parallel.tp=8", "parallel.dp_shard=1"])
    sized = on_nodes(replicas, 2)
    assert not isinstance(sized, str)
    assert sized.parallel.dp_replicate == 2
