"""The one process that owns a sandbox: it starts the daemons of its plan, adopts orphaned processes, and ends everything.

It knows nothing of SLURM. Each daemon runs in a *cell*: a small process that is a child subreaper, so that everything a
daemon ever starts (slurmd forks slurmstepd twice, to get rid of it) stays below that cell. A node's cell is the node:
killing it and all below it is what a power failure does.

On SIGTERM, or when the process that it is to end with has ended, it kills everything and removes the directory. It restarts
nothing by itself, but the daemon that the file START names. If it is killed itself, it leaves
`processes.json` behind, from which control.py finishes the job.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slurmtrain.sandbox.directory import PLAN, PROCESSES, START, Cell, Daemon, Plan, Processes
from slurmtrain.system.files import replace_file
from slurmtrain.system.process import ProcessMark, become_subreaper, below, kill_trees, set_name, wait_until

SIGNALS = (signal.SIGTERM, signal.SIGCHLD)  # end; a child has ended
LOOK_S = 0.5  # between two looks at what sends no signal


def is_stopping() -> bool:
    """Return whether this process was told to end."""
    return signal.SIGTERM in signal.sigpending()


@dataclass
class Supervisor:
    """The supervisor process: it owns the daemons of a sandbox and all processes below them.

    Attributes:
        owner: descriptor of the process that the sandbox ends with (pidfd_open(2)); None: it lives until it is told to end.
    """

    directory: Path
    plan: Plan
    owner: int | None = None
    cells: list[Cell] = field(default_factory=list)

    def run(self) -> None:
        self._me = ProcessMark.own()
        become_subreaper()
        set_name("sandbox")
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # each is waited for below
        self._record()
        try:
            self._start_all()
            while not self._is_over():
                self._reap()
                self._start_asked()
        finally:
            self._end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _is_over(self) -> bool:
        """Wait for a signal, not for long, and return whether it is the end: SIGTERM, or that of the owner."""
        heard = signal.sigtimedwait(SIGNALS, LOOK_S)
        if heard is not None and heard.si_signo == signal.SIGTERM:
            return True
        return self.owner is not None and bool(select.select([self.owner], [], [], 0)[0])

    def _start_all(self) -> None:
        """Start the daemons in order, each when the one before is ready; whoever waits for us sees if one is not."""
        for daemon in self.plan.daemons:
            if is_stopping() or not self._start(daemon).daemon.lives():
                return

    def _start_asked(self) -> None:
        """Start the daemon that somebody asks for."""
        with contextlib.suppress(OSError):
            name = (self.directory / START).read_text()
            (self.directory / START).unlink()
            self._start(next(daemon for daemon in self.plan.daemons if daemon.name == name))

    def _start(self, daemon: Daemon) -> Cell:
        """Start a daemon, and wait until it is ready, or has ended."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                _live_in_cell(daemon, self.plan.env, self.directory, write)
            except BaseException:  # whatever it was: a forked child must not run on in its parent's code
                traceback.print_exc()  # into the supervisor's log
            finally:
                os._exit(127)
        os.close(write)
        with open(read) as pipe:
            answer = pipe.read()
        this = ProcessMark.of(pid)
        cell = Cell(daemon.name, this, ProcessMark.of(int(answer)) if answer else this)
        self.cells.append(cell)
        self._record()
        wait_until(lambda: daemon.is_ready() or is_stopping() or not cell.daemon.lives(), timeout_s=30.0)
        return cell

    def _reap(self) -> None:
        """Reap dead processes: cells, and the orphans of killed cells."""
        changed = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            for cell in self.cells:
                if cell.process.pid == pid:
                    cell.exit_status = os.waitstatus_to_exitcode(status)
                    changed = True
        if changed:
            self._record()

    def _record(self) -> None:
        self.cells = [c for c in self.cells if c.exit_status is None or c is self._last(c.name)]
        processes = msgspec.json.encode(Processes(self._me, self.cells))
        replace_file(self.directory / PROCESSES, processes, durable=False)

    def _last(self, name: str) -> Cell:
        return [c for c in self.cells if c.name == name][-1]

    def _end(self) -> None:
        """Kill everything below us, but first have SLURM tell every srun in somebody's terminal that its job is over."""
        served = {c.name for c in self.cells} == {daemon.name for daemon in self.plan.daemons}
        last_words = [
            subprocess.Popen(command, env=self.plan.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for command in self.plan.stop_commands
            if served
        ]
        wait_until(lambda: all(p.poll() is not None for p in last_words), timeout_s=2.0)
        kill_trees(below([self._me]))
        with contextlib.suppress(ChildProcessError):  # an init that is slow to reap would show our dead for minutes
            while os.waitpid(-1, 0):
                pass


def _live_in_cell(daemon: Daemon, env: dict[str, str], directory: Path, announce: int) -> None:
    """Run a cell: start the daemon, report its pid, then reap dead processes until none is left."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    become_subreaper()
    set_name(f"sandbox-{daemon.name}")
    with open(directory / "log" / f"{daemon.name}.out", "ab") as out:
        child = subprocess.Popen(daemon.argv, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    os.write(announce, str(child.pid).encode())
    os.close(announce)
    exit_status = 0
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            os._exit(exit_status & 0xFF)
        if pid == child.pid:
            exit_status = os.waitstatus_to_exitcode(status)


def main(directory: Path, ends_with: int | None = None) -> None:
    """Start the supervisor of a sandbox as a daemon.

    Args:
        ends_with: pid of the process that the sandbox ends with; None: of none.
    """
    owner = os.pidfd_open(ends_with) if ends_with is not None else None
    # A double fork: `up` need not reap us, and its terminal's hang-up does not reach us.
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    Supervisor(directory, msgspec.json.decode((directory / PLAN).read_bytes(), type=Plan), owner).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
