"""The runs of a scaling test: their configs, and what cannot be tested."""

from __future__ import annotations

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.sweep.scaling import parse_sizes, scaling_configs, sizes_up_to

WORDS = ["cluster=h100x8", "model=llama3_8b", "train.global_batch_size=64"]


def test_sizes_are_doublings_up_to_all_nodes() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(8) == [1, 2, 4, 8]
    assert sizes_up_to(6) == [1, 2, 4, 6]


def test_a_strong_test_shrinks_micro_batches_that_no_longer_divide_the_batch() -> None:
    configs = scaling_configs(compose([*WORDS, "train.micro_batch_size=4"]), [1, 2, 4], strong=True, steps=10)
    assert [each.train.micro_batch_size for each in configs] == [4, 4, 2]


def test_runs_save_and_evaluate_at_the_end_only_and_are_not_requeued() -> None:
    (config, _) = scaling_configs(compose([*WORDS, "checkpoint=auto"]), [1, 2], strong=False, steps=10)
    saving = config.checkpoint
    assert (saving.every_steps, saving.every_minutes, saving.auto) == (0, 0, False)
    assert (config.train.eval_every, config.requeue.mode) == (0, "off")


@pytest.mark.parametrize(
    ("words", "sizes", "sentence"),
    [
        (["job=command", "job.command=true"], [1, 2], "scale works with the built-in trainer"),
        (["cluster=local"], [1, 2], "cluster.backend=local has one node"),
        (["cluster.nodes=3", "train.global_batch_size=48"], [1, 2, 4], "4 nodes: "),
        (["cluster.nodes=8", "train.global_batch_size=63"], [1, 3], "is not a whole number of sequences on 1"),
        (["parallel.tp=3"], [1, 2], "parallel.tp=3 does not divide"),
    ],
)
def test_what_cannot_be_tested_is_refused(words: list[str], sizes: list[int], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scaling_configs(compose([*WORDS, *words]), sizes, strong="cluster.nodes=3" in words, steps=10)
    assert sentence in caught.value.message


@pytest.mark.parametrize("text", ["", "1", "2,2", "0,1", "1,a", "1;2", "-1,2"])
def test_sizes_are_two_numbers_of_nodes_at_least(text: str) -> None:
    with pytest.raises(UsageError, match="--nodes"):
        parse_sizes(text)
    assert parse_sizes("4, 1,2") == [1, 2, 4]
