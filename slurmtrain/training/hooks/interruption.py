"""An interruption of training at a chosen step, for `drill`: wait until the process is told to stop, or kill it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from slurmtrain.checkpoint.format.directory import newest_committed_step
from slurmtrain.runs.run_dir import RUN_DIR_VARIABLE, RunDir
from slurmtrain.system.files import write_json
from slurmtrain.system.signals import install_signal_handlers
from slurmtrain.training.hooks.base import TrainingHook, TrainingState

COMMIT_WAIT_S = 60.0
POLL_S = 0.05


class Interruption(TrainingHook):
    """Holds training before a step until somebody tells the process to stop, or kills it with SIGKILL. Once in a run.

    The first rank holds, which holds up all others; the last rank is killed.

    Args:
        after_step: number of steps done before; the run stops after one more.
        kill: kill the process, as soon as a checkpoint is committed.
        within_s: longest time to hold, in seconds; training goes on after it.
        leaving_s: seconds to wait after the process was told to stop, as a long step and a long save would.
    """

    def __init__(self, *, after_step: int, kill: bool = False, within_s: float = 300.0, leaving_s: float = 0.0):
        self._after_step, self._kill = after_step, kill
        self._within_s, self._leaving_s = within_s, leaving_s

    def before_step(self, state: TrainingState) -> None:
        """Interrupt training if it is time."""
        who = state.ranks.size - 1 if self._kill else 0
        if state.step < self._after_step or state.ranks.rank != who or RUN_DIR_VARIABLE not in os.environ:
            return
        run_dir = RunDir(Path(os.environ[RUN_DIR_VARIABLE]))
        reached = run_dir.interrupted_file
        if reached.exists():
            return
        flag = install_signal_handlers()
        deadline = time.monotonic() + COMMIT_WAIT_S
        while self._kill and newest_committed_step(run_dir.checkpoints) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        write_json(reached, {"step": state.step, "time": time.time()})
        if self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        elif flag.wait(self._within_s):
            time.sleep(self._leaving_s)
