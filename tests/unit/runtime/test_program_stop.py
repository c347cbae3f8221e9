"""Which processes of a program are told to stop, and until when it may take, as pure functions."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmtrain.config.schema import JobConfig
from slurmtrain.runs import attempts
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runtime.jobs.program_start import _block_stops, heard_signals
from slurmtrain.runtime.jobs.program_stop import ProgramProcess, ProgramStopper, end_of_grace, to_tell, told_facts
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.system import descendants
from slurmtrain.system.signals import StopCause, StopFlag

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
DEAF = [ProgramProcess(1, 10), ProgramProcess(2, 20)]
HANDLES_USR2 = [ProgramProcess(1, 10, frozenset({USR2})), ProgramProcess(2, 10)]
HANDLES_USR1 = [
    ProgramProcess(1, 10, frozenset({USR1})),
    ProgramProcess(2, 10),
    ProgramProcess(3, 10, of_launcher=True),
]


@pytest.mark.parametrize(
    ("processes", "stop_signal", "cause", "source", "told"),
    [
        # SLURM has signalled all of them; a second SIGTERM would mean "at once" to some.
        (DEAF, TERM, StopCause.SIGTERM, "slurm", []),
        (DEAF, TERM, StopCause.SIGTERM, "local", [2]),  # the other one is in the rank's group
        # The early warning before the time limit.
        (DEAF, TERM, StopCause.SIGUSR2, "slurm", [1, 2]),
        (HANDLES_USR2, TERM, StopCause.SIGUSR2, "slurm", []),
        # What is no signal at all, or reached this package alone.
        (DEAF, TERM, StopCause.DEADLINE, "slurm", [1, 2]),
        (HANDLES_USR2, TERM, StopCause.DEADLINE, "slurm", [1, 2]),
        (DEAF, TERM, StopCause.SIGINT, "local", [1, 2]),
        # A signal of the program's own choice.
        (HANDLES_USR1, USR1, StopCause.SIGTERM, "slurm", [1, 3]),
        (HANDLES_USR1, USR1, StopCause.SIGUSR2, "slurm", [1, 3]),
        (DEAF, USR1, StopCause.SIGTERM, "slurm", [1, 2]),
        (DEAF, USR1, StopCause.SIGTERM, "local", [1, 2]),
        (HANDLES_USR2, USR2, StopCause.SIGUSR2, "slurm", []),
        (HANDLES_USR2, USR2, StopCause.SIGTERM, "slurm", [1]),
    ],
)
def test_each_process_hears_of_a_stop_once_and_by_the_signal_that_it_wants(
    processes: list[ProgramProcess], stop_signal: signal.Signals, cause: StopCause, source: str, told: list[int]
) -> None:
    assert to_tell(processes, stop_signal, cause, source=source, own_group=10) == told


def test_a_program_that_was_started_after_the_signal_is_told_all_the_same() -> None:
    told = to_tell(DEAF, TERM, StopCause.SIGTERM, source="slurm", own_group=10, missed=True)
    assert told == [1, 2]


def test_a_launcher_that_has_started_nothing_yet_is_ended_by_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears no stop signal, and what it starts later has not heard that of SLURM either."""
    with subprocess.Popen(["sleep", "60"], preexec_fn=_block_stops) as launcher:
        monkeypatch.setattr(descendants, "alive", lambda: {launcher.pid: "sleep 60"})
        context: Any = SimpleNamespace(attempt_dir=SimpleNamespace(stop_file=tmp_path / "stop.json"))
        flag = StopFlag()
        stopper = ProgramStopper(JobConfig(), "slurm", context, flag, tmp_path, 0)
        flag.request(StopCause.SIGTERM)
        assert launcher.wait(60) == -signal.SIGKILL
        stopper.close()


@pytest.mark.parametrize(
    ("grace_s", "state", "end_time", "until"),
    [
        (None, None, None, math.inf),
        (None, "RUNNING", None, math.inf),
        (None, "RUNNING", 1120.0, 1110.0),  # 120 s before the time limit
        (None, "RUNNING", 1030.0, 1025.0),  # a preemption's grace time of 30 s
        (None, "COMPLETING", 1000.0, math.inf),  # cancelled: SLURM has ended it already
        (60, "RUNNING", 1120.0, 1060.0),
        (300, "RUNNING", 1120.0, 1110.0),
        (60, "COMPLETING", 1000.0, 1060.0),
    ],
)
def test_a_program_is_ended_before_slurm_would_lose_the_run(
    grace_s: float | None, state: str | None, end_time: float | None, until: float
) -> None:
    facts = JobFacts(state, end_time=end_time) if state is not None else None
    assert end_of_grace(1000.0, grace_s, facts) == until


def test_a_shell_that_traps_the_early_warning_can_do_so(project: Path) -> None:
    """A shell cannot trap a signal that is ignored when it starts, as the early warning is for programs that know none."""
    (project / "plain.sh").write_text("python train.py")
    (project / "traps.sh").write_text("#!/usr/bin/env bash\ntrap save USR2\npython train.py & wait")
    (project / "train.py").write_text("signal.signal(signal.SIGUSR2, save)")
    both = ["SIGTERM", "SIGUSR2"]
    assert heard_signals("SIGTERM", ["python", "train.py"]) == ["SIGTERM"]
    assert heard_signals("SIGTERM", ["bash", "plain.sh"]) == ["SIGTERM"]
    assert heard_signals("SIGTERM", ["bash", "traps.sh"]) == both
    assert heard_signals("SIGTERM", ["./traps.sh", "x"]) == both
    assert heard_signals("SIGTERM", ["bash", "-c", "trap 'x' USR2; sleep 9"]) == both
    assert heard_signals("SIGUSR1", ["bash", "traps.sh"]) == ["SIGUSR1"]


def test_a_storage_that_fails_for_a_moment_leaves_a_program_s_grace_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = AttemptDir(tmp_path)
    assert told_facts(folder) is None
    facts = JobFacts("RUNNING", end_time=1000.0)
    attempts.record_stop(folder, cause="SIGTERM", cause_time=1.0, seconds_left=None, facts=None)
    assert told_facts(folder) is None
    attempts.record_stop(folder, cause="SIGTERM", cause_time=1.0, seconds_left=None, facts=facts)
    assert told_facts(folder) == facts

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "pread", fail)
        assert told_facts(folder) is None
    folder.stop_file.unlink()
    folder.stop_file.mkdir()
    assert told_facts(folder) is None
