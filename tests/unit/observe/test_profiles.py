"""Profiles: that nothing of them ends a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmtrain.observe.profiling import Profiling
from slurmtrain.runs.run_dir import RunDir


class OneRank:
    rank, size = 0, 1

    def on_rank_0(self, work: Any) -> Any:
        return work()


def test_a_profile_that_cannot_begin_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir(tmp_path)
    run.profiles.write_text("a file where the folder should be")
    profiling = Profiling(run, OneRank(), on_gpu=False)
    profiling.begin(10)
    assert not profiling.left and str(run.profiles) in caplog.text
