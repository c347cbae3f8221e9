"""SLURM's words for the state of a job are spelled in one place, and equal what SLURM says."""

from __future__ import annotations

import re
from pathlib import Path

import slurmtrain
from slurmtrain.slurm.job_states import ENDED, GONE, LIVE, JobState

PACKAGE = Path(slurmtrain.__file__).parent
WITH_OTHER_WORDS = ("slurm/job_states.py", "observe/mlflow_logger.py")  # MLflow has states of its own


def test_a_state_equals_the_word_that_slurm_says() -> None:
    said, later = "RUNNING", "A_LATER_WORD"
    assert said == JobState.RUNNING and f"{JobState.RUNNING}" == said
    assert said in LIVE and said not in GONE and later not in (*LIVE, *GONE)


def test_no_state_is_of_two_kinds_that_exclude_each_other() -> None:
    not_started = {JobState.PENDING, JobState.CONFIGURING}
    assert not set(GONE) & {*LIVE, *not_started}
    assert set(ENDED) & set(LIVE) == {JobState.COMPLETING}
    assert {*GONE, *LIVE, *not_started, JobState.REQUEUED} == set(JobState)


def test_no_other_module_spells_a_state() -> None:
    word = re.compile(f'"({"|".join(JobState)})"')
    modules = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    spelling = {name for name, path in modules.items() if word.search(path.read_text(encoding="utf-8"))}
    assert spelling == set(WITH_OTHER_WORDS)
