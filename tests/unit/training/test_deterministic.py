"""train.deterministic is in force before anything is computed on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmtrain.config.compose import compose
from slurmtrain.rank import distributed_context, main
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import Environment

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC")


class JoinedError(Exception):
    """The ranks would meet now."""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    found: list[bool] = []

    def join(*_: Any, **__: Any) -> None:
        found.append(torch.are_deterministic_algorithms_enabled() and all(name in os.environ for name in VARIABLES))
        raise JoinedError

    monkeypatch.setattr(distributed_context, "init_distributed", join)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield found
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


@pytest.mark.parametrize("wanted", [True, False])
def test_kernels_are_deterministic_when_the_ranks_meet_if_the_config_says_so(fresh: list[bool], wanted: bool) -> None:
    config = compose(["experiment=smoke", f"train.deterministic={wanted}"])
    rank = main.Rank(None)
    rank.environment, rank.config = Environment("single"), config
    with pytest.raises(JoinedError):
        rank.join(lambda: RunDir(Path()))
    assert fresh == [wanted]
