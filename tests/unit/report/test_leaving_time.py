"""`preempt RUN` says how long leaving took, or that SLURM would have killed the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.report.leaving_time import leaving_sentence, time_to_leave, wait_until_left
from slurmtrain.runs.attempts import Attempt, read_attempt, write_attempt
from slurmtrain.runs.create import create_run_dir
from slurmtrain.slurm.preemption import PreemptionTimes

LOW = PreemptionTimes(kill_wait_s=30.0, grace_s=20.0, grace_of="partition low")


@pytest.mark.parametrize(
    ("times", "seconds"), [(LOW, 50.0), (PreemptionTimes(30.0), 30.0), (PreemptionTimes(), None), (None, None)]
)
def test_what_a_preempted_job_is_given(times: PreemptionTimes | None, seconds: float | None) -> None:
    assert time_to_leave(times) == seconds


def test_leaving_is_awaited_until_it_is_over_or_too_late(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path, "train")
    number = run_dir.new_attempt()
    write_attempt(run_dir, Attempt(number=number, started=100.0))
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if 7.0 < clock[0] < 8.0:
            attempt = read_attempt(run_dir, number)
            attempt.ended, attempt.last_step = 112.5, 40
            write_attempt(run_dir, attempt)

    assert wait_until_left(run_dir, number, 5.0, clock=lambda: clock[0], sleep=sleep) is None
    left = wait_until_left(run_dir, number, 50.0, clock=lambda: clock[0], sleep=sleep)
    assert left is not None and clock[0] < 9.0
    assert leaving_sentence(left, 105.0, 50.0, LOW) == (
        "it stopped after step 40, 7.5 s after it was told to stop; partition low gives 50 s"
    )
    assert "has not stopped within the 50 s that partition low gives" in leaving_sentence(None, 105.0, 50.0, LOW)
    assert "SLURM's KillWait gives" in leaving_sentence(None, 105.0, 30.0, PreemptionTimes(30.0))
