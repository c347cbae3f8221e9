"""cluster.nodes as a range: which sizes can be used, and what stays the same on each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.fields import NodeRange
from slurmtrain.config.frozen import freeze, to_config
from slurmtrain.config.parallel_dims import (
    at_most,
    at_size,
    extreme_sizes,
    on_given_nodes,
    parallel_dims_of,
    usable_sizes,
)
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, EnvironmentMismatchError
from slurmtrain.planner.fit import check_fits
from tests.support.fake_slurm import FakeSlurm

BASE = compose(["cluster=a100x4", "train.global_batch_size=96"])


def elastic(nodes: int | str, batch: int = 96) -> Config:
    return replace(BASE, cluster=replace(BASE.cluster, nodes=nodes), train=replace(BASE.train, global_batch_size=batch))


@pytest.mark.parametrize(
    ("value", "least", "most", "kept"), [(4, 4, 4, 4), ("4", 4, 4, 4), ("2-4", 2, 4, "2-4"), ("3-3", 3, 3, "3-3")]
)
def test_a_number_of_nodes_or_a_range_is_understood(value: int | str, least: int, most: int, kept: int | str) -> None:
    config = to_config({"cluster": {"nodes": value}})
    assert config.cluster.node_range == NodeRange(least, most) and config.cluster.nodes == kept
    assert f"  nodes: {kept}\n" in freeze(config)


@given(least=st.integers(1, 6), more=st.integers(0, 6), shares=st.integers(1, 60), micro=st.none() | st.integers(1, 6))
def test_every_usable_size_has_the_same_global_batch_and_no_larger_micro_batch(
    least: int, more: int, shares: int, micro: int | None
) -> None:
    batch = shares * 4 * least * (micro or 1)
    config = elastic(f"{least}-{least + more}", batch)
    config.train.micro_batch_size = micro
    validate(config)
    largest = at_most(config)
    limit = parallel_dims_of(largest).micro_batch_size(largest.train)
    for nodes in usable_sizes(config):
        sized = at_size(config, nodes)
        dims = parallel_dims_of(sized)
        size = dims.micro_batch_size(sized.train)
        assert dims.world_size == nodes * sized.cluster.tasks_per_node
        assert size * dims.micro_batches(sized.train) * dims.dp == batch
        assert size == micro if micro is not None else size <= limit


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [(96, [2, 3, 4]), (64, [2, 4]), (24, [2, 3])],  # 64 sequences do not divide by 12 ranks
)
def test_sizes_that_cannot_divide_are_skipped(batch: int, sizes: list[int]) -> None:
    assert usable_sizes(elastic("2-4", batch)) == sizes


def test_nodes_that_could_not_be_used_at_all_are_not_asked_for() -> None:
    with pytest.raises(
        ConfigError, match=r"cluster\.nodes=3-4: train\.global_batch_size=64 does not divide"
    ) as refusal:
        validate(elastic("3-4", 64))
    assert refusal.value.hint == "cluster.nodes=4 begins with a size that can be used"


def test_ranks_follow_the_nodes_that_they_were_started_on() -> None:
    config = elastic("2-4", 64)
    assert on_given_nodes(config, 2).cluster.nodes == 2 and on_given_nodes(config, 2).world_size == 8
    with pytest.raises(EnvironmentMismatchError, match=r"3 nodes, but cluster\.nodes=2-4 can use 2, 4") as refusal:
        on_given_nodes(config, 3)
    assert refusal.value.hint == "start them with --nodes=2"
    fixed = elastic(3)
    assert on_given_nodes(fixed, 2) is fixed  # `check_world_size` refuses that


def test_a_model_that_fits_only_on_the_most_nodes_is_refused() -> None:
    config = compose(["cluster=a100x8", "cluster.nodes=2-8", "model=llama3_8b", "parallel=fsdp", "data.seq_len=512"])
    config.train.global_batch_size, config.train.micro_batch_size = 128, 1
    config.parallel.param_dtype = None
    smallest, largest = extreme_sizes(config)
    assert (smallest.cluster.nodes, largest.cluster.nodes) == (2, 8)
    config.cluster.gpu_memory_gb = 15
    check_fits(replace(config, cluster=replace(config.cluster, nodes=8)), validate(largest))
    with pytest.raises(ConfigError, match="16 ranks = 16 data-parallel groups"):
        check_fits(config, validate(config))


@pytest.mark.parametrize(("given", "used"), [(4, 4), (3, 2), (2, 2)])
def test_ranks_start_on_what_can_be_used_of_what_was_given(
    given: int, used: int, project: Path, slurm: FakeSlurm
) -> None:
    sizes = ["cluster.nodes=2-4", "train.global_batch_size=64", "parallel=fsdp"]
    assert main(["+cluster=a100x4", *sizes, "submit"]) == 0
    slurm.command("srun", 'echo "$@" >>"$here/starts"; exit 78')
    slurm.run("101", SLURM_JOB_NUM_NODES=str(given))
    (start,) = [line for line in (slurm.directory / "starts").read_text().splitlines() if " train " in line]
    options = [word for word in start.split() if word.startswith(("--nodes", "--ntasks"))]
    assert options == [f"--nodes={used}", f"--ntasks={4 * used}", "--ntasks-per-node=4"]
