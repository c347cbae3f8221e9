"""Profiles: that nothing of them ends a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from slurmtrain.observe.profiling import Profiling
from slurmtrain.runs.run_dir import RunDir

T = TypeVar("T")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "attempts" / "0001").mkdir(parents=True)
    (tmp_path / "checkpoints").mkdir()
    return RunDir(tmp_path)


class OneRank:
    rank, size = 0, 1

    def on_rank_0(self, work: Callable[[], T]) -> T:
        return work()


def test_a_profile_that_cannot_begin_ends_nothing(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    run.profiles.write_text("a file where the folder should be")
    profiling = Profiling(run, OneRank(), on_gpu=False)
    profiling.begin(10)
    assert not profiling.left and str(run.profiles) in caplog.text
