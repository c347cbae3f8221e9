"""The one process that owns a sandbox: it starts the daemons of its plan, adopts orphaned processes, and ends everything.

It knows nothing of SLURM. Each daemon runs in a *cell*: a small process that is a child subreaper, so that everything a
daemon ever starts (slurmd forks slurmstepd twice, to get rid of it) stays below that cell. A node's cell is the node:
killing it and all below it is what a power failure does.

On SIGTERM, or when the process that it is to end with has ended, it kills everything and removes the directory. It restarts
nothing. If it is killed itself, it leaves `processes.json` behind, from which control.py finishes the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from slurmtrain.sandbox.directory import PLAN, PROCESSES, SOCKET, is_free
from slurmtrain.system.process import Process, become_subreaper, below, kill_trees, set_name, wait_until


@dataclass(frozen=True)
class Daemon:
    """A program to run in the foreground, and the file or local port whose appearance shows that it is ready.

    Attributes:
        prepare: commands that are run before it, one after the other. If one fails, the program is not started.
    """

    name: str
    argv: tuple[str, ...]
    prepare: tuple[tuple[str, ...], ...] = ()
    ready_file: str | None = None
    ready_port: int | None = None

    def is_ready(self) -> bool:
        if self.ready_file is not None:
            return os.path.exists(self.ready_file)
        if self.ready_port is not None:
            return not is_free(self.ready_port)  # no connection: the daemon would log it as an error
        return True


@dataclass
class Cell:
    """A subreaper process with one daemon in it, and the processes that the daemon left behind."""

    name: str
    process: Process  # the cell itself
    daemon: Process
    exit_status: int | None = None  # exit status of the daemon, once nothing is left in the cell


@dataclass
class Supervisor:
    """The supervisor process: it owns the daemons of a sandbox and all processes below them.

    Attributes:
        owner: descriptor of the process that the sandbox ends with (pidfd_open(2)); None: it lives until it is told to end.
    """

    directory: Path
    daemons: dict[str, Daemon]
    env: dict[str, str]
    stop_commands: list[list[str]]
    owner: int | None = None
    cells: list[Cell] = field(default_factory=list)

    def run(self) -> None:
        self._me = Process.mine()
        become_subreaper()
        set_name("sandbox")
        self._listen()
        self._record()
        try:
            self._start_all()
            while not self._stopping:
                self._serve_once()
        finally:
            self._end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _listen(self) -> None:
        """Listen for signals and on the socket, with one select() for both."""
        self._stopping = False
        self._wakeup, self._wakeup_write = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_write.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_write.fileno())
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake up select()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / SOCKET))
        os.chmod(self.directory / SOCKET, 0o600)  # whatever the umask: who may write to it may kill nodes
        self._listener.listen()

    def _serve_once(self) -> None:
        watched: list[socket.socket | int] = [self._wakeup, self._listener]
        if self.owner is not None:
            watched.append(self.owner)
        readable, _, _ = select.select(watched, [], [])
        if self.owner in readable:
            self._stopping = True
        if self._wakeup in readable:
            self._wakeup.recv(4096)
            self._reap()
        if self._listener in readable:
            self._answer()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _start_all(self) -> None:
        """Start the daemons in order, each when the one before is ready.

        The process that waits for us sees if one is not.
        """
        for daemon in self.daemons.values():
            cell = self._start(daemon)
            wait_until(partial(self._need_not_wait, daemon, cell), timeout_s=30.0)
            if self._stopping or not cell.daemon.alive():
                return

    def _need_not_wait(self, daemon: Daemon, cell: Cell) -> bool:
        return daemon.is_ready() or self._stopping or not cell.daemon.alive()

    def _start(self, daemon: Daemon) -> Cell:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            signal.set_wakeup_fd(-1)
            self._listener.close()
            try:
                _live_in_cell(daemon, self.env, self.directory, write)
            except BaseException:  # whatever it was: a forked child must not run on in its parent's code
                traceback.print_exc()  # into the supervisor's log
            finally:
                os._exit(127)
        os.close(write)
        with open(read) as pipe:
            answer = pipe.read()
        this = Process.of(pid)
        assert this is not None, "nobody else reaps our child"
        inner = Process.of(int(answer)) if answer else None
        cell = Cell(daemon.name, this, inner or this)
        self.cells.append(cell)
        self._record()
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

    def _answer(self) -> None:
        """Answer one request; request and answer are one line of JSON each."""
        connection, _ = self._listener.accept()
        connection.settimeout(10.0)  # a caller may be suspended, and others must not wait for long
        with connection, connection.makefile("rw") as stream:
            try:
                request = json.loads(stream.readline())
                error = self._do(request["op"], request["daemon"], request.get("only_daemon", False))
            except (OSError, ValueError, KeyError) as problem:
                error = f"not understood: {problem!r}"
            with contextlib.suppress(OSError):  # the caller may have exited
                stream.write(json.dumps({"error": error}) + "\n")
                stream.flush()

    def _do(self, operation: str, name: str, only_daemon: bool) -> str | None:
        """Carry out a request; return a sentence if that is not possible."""
        if name not in self.daemons:
            return f"there is no {name} here"
        cells = [c for c in self.cells if c.name == name]
        running = [c for c in cells if c.daemon.alive()]
        if operation == "start":
            if running:
                return f"{name} is running"
            self._start(self.daemons[name])
        elif operation == "kill":
            if only_daemon:
                for cell in running:
                    cell.daemon.signal(signal.SIGKILL)
            else:
                kill_trees(c.process for c in cells)
            wait_until(lambda: not any(c.daemon.alive() for c in running), timeout_s=5.0)
        else:
            return f"{operation} is no request"
        return None

    def _record(self) -> None:
        self.cells = [c for c in self.cells if c.exit_status is None or c is self._last(c.name)]
        state = {"supervisor": asdict(self._me), "cells": [asdict(c) for c in self.cells]}
        draft = self.directory / f"{PROCESSES}.tmp"
        draft.write_text(json.dumps(state))
        draft.replace(self.directory / PROCESSES)

    def _last(self, name: str) -> Cell:
        return [c for c in self.cells if c.name == name][-1]

    def _end(self) -> None:
        """Kill everything below us, but first have SLURM tell every srun in somebody's terminal that its job is over."""
        served = {c.name for c in self.cells} == self.daemons.keys()
        null = subprocess.DEVNULL
        last_words = [
            subprocess.Popen(command, env=self.env, stdout=null, stderr=null)
            for command in self.stop_commands
            if served
        ]
        wait_until(lambda: all(p.poll() is not None for p in last_words), timeout_s=2.0)
        kill_trees(below([self._me]))
        with contextlib.suppress(ChildProcessError):  # an init that is slow to reap would show our dead for minutes
            while os.waitpid(-1, 0):
                pass


def _live_in_cell(daemon: Daemon, env: dict[str, str], directory: Path, announce: int) -> None:
    """Run a cell: prepare and start the daemon, report its pid, then reap dead processes until none is left."""
    for signum in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    become_subreaper()
    set_name(f"sandbox-{daemon.name}")
    with open(directory / "log" / f"{daemon.name}.out", "ab") as out:
        for command in daemon.prepare:
            done = subprocess.run(
                command, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False
            )
            if done.returncode != 0:
                os._exit(done.returncode & 0xFF or 1)
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
    plan = json.loads((directory / PLAN).read_text())
    daemons = [
        Daemon(**{**d, "argv": tuple(d["argv"]), "prepare": tuple(map(tuple, d.get("prepare", ())))})
        for d in plan["daemons"]
    ]
    Supervisor(directory, {d.name: d for d in daemons}, plan["env"], plan["stop_commands"], owner=owner).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
