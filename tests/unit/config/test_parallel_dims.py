"""Layouts: which rank stands where. What cannot be is in test_bad_input.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.config.compose import compose
from slurmtrain.config.parallel_dims import AXES, ParallelDims, parallel_dims_of

KNOWN = [
    *("cluster=a100x8", "cluster.nodes=8", "parallel.tp=4", "parallel.pp=2"),
    *("model.n_kv_heads=4", "model.tie_embeddings=false"),
]


def test_64_gpus_are_8_data_parallel_groups_x_tp_4_x_pp_2() -> None:
    dims = parallel_dims_of(compose(KNOWN))
    assert str(dims) == "64 ranks = 8 data-parallel groups x TP 4 x PP 2"
    assert dims.coordinates(13) == {"pp": 0, "dp_replicate": 3, "dp_shard": 0, "cp": 0, "tp": 1}
    groups = {axis: dims.group(13, axis) for axis in AXES}
    assert groups == {
        "pp": [13, 45],
        "dp_replicate": [1, 5, 9, 13, 17, 21, 25, 29],
        "dp_shard": [13],
        "cp": [13],
        "tp": [12, 13, 14, 15],
    }


@given(st.lists(st.integers(1, 4), min_size=5, max_size=5), st.data())
def test_every_rank_has_a_place_of_its_own_and_groups_partition_the_ranks(
    sizes: list[int], data: st.DataObject
) -> None:
    layout = ParallelDims(**dict(zip(AXES, sizes, strict=True)))
    ranks = range(layout.world_size)
    assert [layout.rank_at(layout.coordinates(rank)) for rank in ranks] == list(ranks)
    axes = data.draw(st.lists(st.sampled_from(AXES), unique=True))
    groups = {tuple(layout.group(rank, *axes)) for rank in ranks}
    assert sorted(rank for group in groups for rank in group) == list(ranks)
    dp = data.draw(st.sampled_from(ranks))
    same_samples = [rank for rank in ranks if layout.dp_rank(rank) == layout.dp_rank(dp)]
    assert same_samples == layout.group(dp, "pp", "cp", "tp")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "8 ranks = 8 data-parallel groups"),
        (["parallel=fsdp"], "8 ranks = 8 data-parallel groups (8 shards)"),
        (["cluster.nodes=2", "parallel=hsdp"], "16 ranks = 16 data-parallel groups (2 replicas x 8 shards)"),
        (["parallel=fsdp_tp"], "8 ranks = 4 data-parallel groups (4 shards) x TP 2"),
        (
            ["parallel=fsdp_tp_pp", "model.tie_embeddings=false"],
            "8 ranks = 2 data-parallel groups (2 shards) x TP 2 x PP 2",
        ),
        (["parallel.cp=8"], "8 ranks = 1 data-parallel group x CP 8"),
    ],
)
def test_the_shipped_layouts(overrides: list[str], text: str) -> None:
    assert str(parallel_dims_of(compose(["cluster=a100x8", *overrides]))) == text


def test_a_step_has_a_micro_batch_for_every_stage_unless_told_otherwise() -> None:
    rows = (
        ("parallel.cp=1", 1, 2),
        ("parallel.cp=2", 1, 4),
        ("parallel.pp=2", 2, 2),
        ("train.micro_batch_size=1", 2, 1),
    )
    for override, count, size in rows:
        config = compose(["cluster=a100x8", "model.tie_embeddings=false", override])
        dims = parallel_dims_of(config)
        assert (dims.micro_batches(config.train), dims.micro_batch_size(config.train)) == (count, size)
