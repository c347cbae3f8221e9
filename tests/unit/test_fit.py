"""What cannot fit into a GPU is refused before it queues, with what would."""

from __future__ import annotations

import re

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.layout import layout_of
from slurmtrain.planner.fit import check_fits, memory_of

EIGHT_B = ["cluster=h100x8", "model=llama3_8b", "train.global_batch_size=512", "train.micro_batch_size=1"]


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
        check_fits(compose([*EIGHT_B, *proposal.split()]))


def test_70b_on_one_node_is_refused_with_the_nodes_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster=h100x8", "model=llama3_70b", "train.global_batch_size=512"]
    _, hint = refusal(words, capsys)
    proposal = hint.partition("what would fit: ")[2].partition(" (")[0].split()
    assert "cluster.nodes=4" in proposal
    check_fits(compose([*words, *proposal]))


@pytest.mark.parametrize(
    "overrides",
    [["cluster.gpu_memory_gb=null"], ["model._target_=my.Model"], ["job=command", "job.command=true"]],
)
def test_what_cannot_be_counted_is_not_refused(overrides: list[str]) -> None:
    check_fits(compose([*EIGHT_B, *overrides]))


def test_compute_in_bfloat16_and_gpipe_count() -> None:
    """GPipe keeps all eight micro batches of the step, 1F1B on the first of two stages two."""
    words = [*EIGHT_B, "parallel.pp=2", "train.global_batch_size=32", "data.seq_len=4096"]
    found = {}
    for name in ("parallel.pp_schedule=1f1b", "parallel.pp_schedule=gpipe", "parallel.param_dtype=bfloat16"):
        config = compose([*words, name])
        stages = memory_of(config, layout_of(config))
        assert stages is not None and len(stages) == 2
        found[name] = stages[0].activations
    one, all_of_them, half = found.values()
    assert all_of_them == 4 * one
    assert half == pytest.approx(one / 2, rel=1e-6)
