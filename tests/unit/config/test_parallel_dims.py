"""Layouts: which rank stands where. What cannot be is in test_bad_input.py."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.cli import main
from slurmtrain.cli.plan import ranks_text
from slurmtrain.config.compose import compose
from slurmtrain.config.parallel_dims import AXES, ParallelDims, parallel_dims_of

KNOWN = [
    *("cluster=a100x8", "cluster.nodes=8", "parallel.tp=4", "parallel.pp=2"),
    *("model.n_kv_heads=4", "model.tie_embeddings=false"),
]


def run_layout(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words, "layout"]) == 0
    return capsys.readouterr().out


def test_64_gpus_are_8_data_parallel_groups_x_tp_4_x_pp_2(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_layout(KNOWN, capsys).splitlines()
    assert lines[0] == "64 ranks = 8 data-parallel groups x TP 4 x PP 2"
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()][1:]
    assert rows[0] == "0 0 0 of 0,32 0 of 0-28:4 0 of 0-3".split()
    assert rows[37] == "37 4 1 of 5,37 1 of 33-61:4 1 of 36-39".split()
    assert len(rows) == 64


def test_as_json_every_rank_has_its_node_place_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run_layout([*KNOWN, "--json"], capsys))
    assert found["axes"] == {"pp": 2, "dp_replicate": 8, "dp_shard": 1, "cp": 1, "tp": 4}
    assert found["ranks"][13] == {
        "rank": 13,
        "node": 1,
        "local_rank": 5,
        "coordinates": {"pp": 0, "dp_replicate": 3, "dp_shard": 0, "cp": 0, "tp": 1},
        "groups": {
            "pp": [13, 45],
            "dp_replicate": [1, 5, 9, 13, 17, 21, 25, 29],
            "dp_shard": [13],
            "cp": [13],
            "tp": [12, 13, 14, 15],
        },
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


@pytest.mark.parametrize(("ranks", "text"), [([3], "3"), ([0, 32], "0,32"), ([4, 5, 6], "4-6"), ([1, 5, 9], "1-9:4")])
def test_ranks_are_written_as_slurm_writes_them(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
