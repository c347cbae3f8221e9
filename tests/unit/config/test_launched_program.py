"""A program of one's own before the queue: a launcher that every rank would start, and settings of programs alone."""

from __future__ import annotations

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.config.launched_program import repeated_launcher
from slurmtrain.config.validate import validate
from slurmtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "command", "several"),
    [
        (["cluster.tasks_per_node=4"], "torchrun --nproc-per-node 4 train.py", "each of the 4 ranks starts torchrun"),
        (["cluster.nodes=2"], "python -m torch.distributed.run --nproc-per-node 4 train.py", "each of the 2 ranks"),
        (["cluster.tasks_per_node=4"], "/v/bin/accelerate launch train.py", "ranks starts accelerate"),
        (["cluster.tasks_per_node=4"], "deepspeed train.py", "ranks starts deepspeed"),
        ([], "torchrun --nproc-per-node 4 train.py", None),
        (["cluster.nodes=2"], "torchrun --nnodes=2 --rdzv-endpoint=$MASTER_ADDR:29500 train.py", None),
        (["cluster.tasks_per_node=4"], "accelerate env", None),
    ],
)
def test_a_launcher_that_every_rank_would_start_is_named(words: list[str], command: str, several: str | None) -> None:
    one = ["cluster.nodes=1", "cluster.tasks_per_node=1", *words]
    sentence = repeated_launcher(compose(["cluster=a100x4", "job=command", f"job.command='{command}'", *one]))
    assert sentence is None if several is None else several in (sentence or "")


def test_a_signal_to_stop_is_for_programs_only() -> None:
    with pytest.raises(ConfigError, match=r"job\.stop_signal=SIGUSR1 needs job=command"):
        validate(compose(["cluster=a100x4", "job.stop_signal=SIGUSR1"]))
