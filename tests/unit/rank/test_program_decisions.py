"""Pure decisions on programs of the user's own: what their ends mean, whom a stop is told, and how long they may take then."""

from __future__ import annotations

import math
import signal

import pytest

from slurmtrain.rank.jobs.command import FinishedWhen, contract_code, signal_lag_s
from slurmtrain.rank.jobs.program_stop import ProgramProcess, end_of_grace, to_tell
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.system.signals import StopCause

MEANINGS = {
    # told to stop, job.finished_when, its file is there: {the program's own code: the contract's code}
    (False, None, False): {0: 0, 75: 75, 3: 3, -15: -15},
    (True, None, False): {0: 75, 78: 78, 3: 75, -15: 75},
    (False, "done", False): {0: 75, -15: -15},
    (False, "done", True): {
        0: 0,
        -15: -15,
        3: 3,
    },  # somebody else has killed it; a crash is a crash: the file may be old
    (True, "done", True): {0: 0, -15: 0, 75: 75},  # it was done, and then died of the signal
    (True, "0", False): {0: 0},  # a program whose 0 can be relied on
    (False, "9", False): {9: 0, 0: 75, 3: 3},
    (True, "9", False): {9: 0},
}


def test_what_the_end_of_a_program_means() -> None:
    for (told, rule, there), codes in MEANINGS.items():
        for code, meaning in codes.items():
            assert contract_code(code, told=told, rule=FinishedWhen.of(rule), there=there) == meaning, (rule, code)


def test_a_signal_that_is_noticed_after_the_end_of_a_program_may_have_been_its_cause() -> None:
    for code, after_s in ((0, 0.9), (-15, 0.9), (3, 0.2)):
        assert after_s <= signal_lag_s(code)
    for code, after_s in ((3, 0.9), (-9, 0.1)):  # all were told to stop because of this crash
        assert after_s > signal_lag_s(code)


TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
DEAF = [ProgramProcess(1, 10), ProgramProcess(2, 20)]
HANDLES_USR2 = [ProgramProcess(1, 10, frozenset({USR2})), ProgramProcess(2, 10)]
HANDLES_USR1 = [ProgramProcess(1, 10, frozenset({USR1})), ProgramProcess(2, 10)]


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
        (HANDLES_USR2, TERM, StopCause.DEADLINE, "slurm", [1, 2]),
        (DEAF, TERM, StopCause.SIGINT, "local", [1, 2]),
        # A signal of the program's own choice.
        (HANDLES_USR1, USR1, StopCause.SIGTERM, "slurm", [1]),
        (DEAF, USR1, StopCause.SIGTERM, "slurm", [1, 2]),
        (HANDLES_USR2, USR2, StopCause.SIGUSR2, "slurm", []),
        (HANDLES_USR2, USR2, StopCause.SIGTERM, "slurm", [1]),
    ],
)
def test_each_process_hears_of_a_stop_once_and_by_the_signal_that_it_wants(
    processes: list[ProgramProcess], stop_signal: signal.Signals, cause: StopCause, source: str, told: list[int]
) -> None:
    assert to_tell(processes, stop_signal, cause, source=source, own_group=10) == told
    if (cause, stop_signal, source) == (StopCause.SIGTERM, TERM, "slurm"):  # one that was started after it is told, too
        assert to_tell(processes, stop_signal, cause, source=source, own_group=10, missed=True) == [1, 2]


def test_a_program_is_ended_before_slurm_would_lose_the_run() -> None:
    """By SLURM's own clock, which is not that of the node."""
    for grace_s, state, left_s, until in (
        (None, None, None, math.inf),
        (None, "RUNNING", None, math.inf),
        (None, "RUNNING", 120.0, 1110.0),  # before the time limit
        (None, "RUNNING", 30.0, 1025.0),  # a preemption's grace time
        (None, "COMPLETING", 0.0, math.inf),  # cancelled: SLURM has ended it already
        (60, "RUNNING", 120.0, 1060.0),
        (300, "RUNNING", 120.0, 1110.0),
        (60, "COMPLETING", 0.0, 1060.0),
    ):
        end_time = None if left_s is None else 9000.0 + left_s
        facts = JobFacts(state, end_time=end_time, as_of=9000.0) if state is not None else None
        assert end_of_grace(1000.0, grace_s, facts) == until, (grace_s, state, left_s)
