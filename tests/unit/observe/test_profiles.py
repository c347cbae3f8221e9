"""RUN/profile: that it is taken once, and that nothing of it ends a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from slurmtrain.observe.profiling import ProfileSwitch, Profiling
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


def test_a_touch_asks_once_and_says_who_asked(run: RunDir) -> None:
    switch = ProfileSwitch(run)
    for touch, asked in ((False, False), (True, True), (False, True)):
        if touch:
            run.profile_switch.touch()
        switch.look()
        assert switch.asked is asked and not run.profile_switch.exists()
    assert [event["event"] for event in run.events()] == ["profile file found"]


def test_a_profile_that_cannot_begin_ends_nothing(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    run.profiles.write_text("a file where the folder should be")
    switch = ProfileSwitch(run)
    profiling = Profiling(run, OneRank(), on_gpu=False, switch=switch)
    run.profile_switch.touch()
    switch.look()
    assert profiling.wanted
    profiling.begin(10)
    assert not profiling.active and not profiling.wanted and str(run.profiles) in caplog.text
