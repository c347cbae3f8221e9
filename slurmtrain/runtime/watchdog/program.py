"""The watch over a program of the user's own (job=command): by a file that it changes as long as it gets on.

What the program does inside is not known. Its processes are looked at from outside: their state in the kernel, whether
they run, and their stacks if they have `faulthandler` enabled. Loads no torch.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slurmtrain.config.schema import WatchdogConfig
from slurmtrain.hangs import evidence, page
from slurmtrain.hangs.beats import ActiveClock, Beat
from slurmtrain.hangs.judge import Report
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import process

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
LOOKS = 10  # at the processes: one that runs in most of them does not wait for anything
LEAVE_S = 5.0  # from TERM to KILL
RANK = "$RANK"


class ProgramWatch:
    """Watches one rank's program until `close`, and ends it when its file has not changed for too long.

    Attributes:
        fired: it has ended the program.

    Args:
        limits: the config group `watchdog`; heartbeat_file is set.
        folders: where a relative name is looked for.
        pid: the program.
        is_stopping: returns whether the program was told to stop; it may then take as long as SLURM allows.
    """

    def __init__(
        self,
        limits: WatchdogConfig,
        folders: Sequence[Path],
        environment: Environment,
        attempt_dir: AttemptDir,
        pid: int,
        is_stopping: Callable[[], bool],
    ):
        self._limits, self._environment, self._attempt_dir = limits, environment, attempt_dir
        self._name = str(limits.heartbeat_file).replace(RANK, str(environment.rank))
        self._folders, self._pid, self._is_stopping = folders, pid, is_stopping
        self.fired = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop to watch: the program has ended."""
        self._closed.set()
        if self.fired:
            self._thread.join()

    def _run(self) -> None:
        clock = ActiveClock(time.monotonic())
        newest, changed, limit_s = self._newest(), 0.0, float(self._limits.first_step_s)
        while not self._closed.wait(LOOK_EVERY_S) and not self._is_stopping():
            now = clock.look(time.monotonic())
            if (found := self._newest()) != newest:
                newest, changed, limit_s = found, now, float(self._limits.program_s)
            if now - changed >= limit_s and not any(map(evidence.is_traced, self._pids())):
                self.fired = True
                try:
                    self._report(now - changed, limit_s)
                except OSError as error:  # a full disk; the program is ended all the same
                    log.warning("cannot write the page on a hang: %s", error)
                self._end()
                return

    def _newest(self) -> float | None:
        """Return when the newest of the files was changed; None if there is none, or none can be seen now."""
        times = []
        for folder in self._folders:
            for name in glob.glob(str(folder / self._name), recursive=True):
                with contextlib.suppress(OSError):  # it is being replaced
                    times.append(os.stat(name).st_mtime)
        return max(times, default=None)

    def _pids(self) -> list[int]:
        return [self._pid, *process.living_descendants(self._pid)]

    def _report(self, idle_s: float, limit_s: float) -> None:
        """Write down what is known of the program's processes, and the page if no lower rank does."""
        rank, world_size = self._environment.rank, self._environment.world_size
        waits, where = self._look_at_processes()
        beat = Beat(
            rank=rank,
            number=0,
            time=time.time(),
            node=self._environment.node,
            pid=self._pid,
            born=process.born(self._pid),
            step=None,
            phase=f"{self._name} has not changed for {idle_s:.0f} s",
            waits=waits,
            idle_s=round(idle_s, 1),
            limit_s=limit_s,
        )
        log_file = self._attempt_dir.rank_log(rank)
        # One that has enabled faulthandler writes its stacks at SIGABRT, and ends.
        workers = evidence.describe_processes(self._pids(), log_file, signal.SIGABRT)
        page.write_together(self._attempt_dir, Report(beat, where, workers=workers), world_size, LOOK_EVERY_S)

    def _look_at_processes(self) -> tuple[bool, str]:
        """Return whether all processes seem to wait for something, and what the first that does not is doing."""
        seen: dict[int, list[str]] = {pid: [] for pid in self._pids()}
        for _ in range(LOOKS):
            for pid, states in seen.items():
                found = process.stat(pid)
                states.append(found.state if found is not None else "X")
            time.sleep(0.1)
        said = {}
        for pid, states in seen.items():
            busy = states.count("R") > LOOKS / 2  # also one that waits for a processor
            if states[-1] not in "ZX":
                doing = "is busy" if busy else evidence.describe({"state": states[-1], "stacks": ""})
                said[pid] = f"pid {pid} ({process.command_line(pid)[:60]}) {doing}"
            if busy or states[-1] in "TtD":
                return False, said[pid]
        return True, next(iter(said.values()), "")

    def _end(self) -> None:
        pids = {pid: process.born(pid) for pid in self._pids()}
        process.send(signal.SIGTERM, pids)
        self._closed.wait(LEAVE_S)
        for pid, born in pids.items():
            evidence.kill_tree(pid, born)
