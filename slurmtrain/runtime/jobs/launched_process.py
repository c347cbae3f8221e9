"""One process that torchrun starts: it starts the program, and stands between the two.

torchrun ends all processes of a node when one leaves with another code than 0, at the latest after 30 s, and hides its
code; and it does the same when it hears SIGTERM itself. So this process tells its code to the task that has
started the launcher, in a file, and leaves with 0 when that is a stop; and a launcher hears no signals: they are
blocked from its start. The program gets the signals of SLURM, as every process of the step does; this one passes on
those of the launcher only.

It runs as a file of its own, without any package: python -I -S launched_process.py FOLDER SIGNALS CODES PROGRAM...

FOLDER: where it writes how the program has ended. SIGNALS: names of the stop signals for which the program starts with the
default, separated by commas. CODES: exit codes after which the other processes of the node go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Collection

# What SLURM, the task around the launcher, or a launcher may send. All are blocked in a launcher and in this process.
STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
LAG_S = 1.0  # the program may have a signal of SLURM this much sooner than this process


def reset_signals(heard: Collection[signal.Signals]) -> None:
    """Give a new process the defaults, except that it ignores SLURM's stop signals other than `heard`.

    A program that handles those sets its own handlers.
    """
    for number in {signal.SIGTERM, signal.SIGUSR2, *heard}:
        signal.signal(number, signal.SIG_DFL if number in heard else signal.SIG_IGN)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python itself ignores
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def run(words: list[str], heard: Collection[signal.Signals]) -> tuple[int, bool]:
    """Run the program, and return its exit code (minus the number of a signal that killed it), and whether it was to stop."""
    launcher = os.getppid()
    watched = STOPS | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    program = os.fork()
    if program == 0:
        try:
            os.setpgid(0, 0)  # torchrun signals the group of this process
            reset_signals(heard)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            os.execvp(words[0], words)
        except OSError as error:
            print(f"slurmtrain: cannot start {words[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        finally:
            os._exit(127)
    with contextlib.suppress(OSError):  # as it does itself: whoever comes first
        os.setpgid(program, program)
    told = False
    while True:
        found = signal.sigwaitinfo(watched)
        if found.si_signo != signal.SIGCHLD:
            if found.si_pid == launcher:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program, found.si_signo)
            else:
                told = True
            continue
        pid, status = os.waitpid(program, os.WNOHANG)
        if pid:
            break
    code = os.waitstatus_to_exitcode(status)
    late = signal.sigtimedwait(STOPS, 0.0 if told or code >= 0 else LAG_S)
    return code, told or (late is not None and late.si_pid != launcher)


def code_for_launcher(code: int, *, told: bool, quiet: Collection[int]) -> int:
    """Return the code to leave with: 0 where the launcher should leave the other processes alone."""
    if told or code in quiet:
        return 0
    return code if code >= 0 else 128 - code


def main(words: list[str]) -> int:
    """Run a program as the words of the module's docstring say, and return the exit code for the launcher."""
    folder, heard, quiet, *program = words
    open(os.path.join(folder, f"{os.getpid()}.pid"), "x").close()
    code, told = run(program, [signal.Signals[name] for name in heard.split(",")])
    if code:
        end = {"rank": int(os.environ.get("RANK", "0")), "code": code, "time": time.time()}
        try:
            with open(os.path.join(folder, f"{os.getpid()}.json"), "w") as file:
                json.dump(end, file)
        except OSError as error:
            print(f"slurmtrain: cannot write how rank {end['rank']} has ended: {error}", file=sys.stderr, flush=True)
            quiet = ""  # 0 would be taken for the end of all work
    return code_for_launcher(code, told=told, quiet=[int(each) for each in quiet.split(",") if each])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
