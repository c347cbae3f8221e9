"""What a person, or a search, asks of a run while it goes on: request.json, and which attempt it is meant for.

`cancel`, `preempt` and `requeue` write it; the supervisor takes it, once all ranks have exited, before it decides.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from slurmtrain.choices import Backend
from slurmtrain.runs.attempts import Attempt, claimed_at
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import process
from slurmtrain.system.files import own_user, write_json
from slurmtrain.system.records import Count, Time, read_json, typed_or_none

log = logging.getLogger(__name__)


class RunAction(StrEnum):
    """An action that a person, or the search that a run belongs to, has requested of it."""

    CANCEL = "cancel"
    STOP = "stop"  # by a file of this name in the run's directory
    PREEMPT = "preempt"
    REQUEUE = "requeue"
    PRUNE = "prune"  # by a search


ENDS_RUN = (RunAction.CANCEL, RunAction.STOP, RunAction.PRUNE)
STARTS_ANEW = (RunAction.PREEMPT, RunAction.REQUEUE)  # the run leaves its nodes, and goes on in a later start


@dataclass(frozen=True)
class Request:
    """A person's request to a run.

    Attributes:
        time: its time in unix seconds.
        attempt: the number of the last attempt that was seen then; 0 before the first one.
        by: the person.
    """

    action: RunAction
    time: Time = 0.0
    attempt: Count = 0
    by: str = ""

    def is_for_later(self, run_dir: RunDir, number: int) -> bool:
        """Return whether it came when an attempt after `number` had been claimed already."""
        if self.attempt > number:
            return True
        later = next((each for each in run_dir.attempt_numbers() if each > number), None)
        claimed = None if later is None else claimed_at(run_dir, later)
        return claimed is not None and self.time >= claimed

    def is_for(self, run_dir: RunDir, attempt: Attempt) -> bool:
        """Return whether it was asked of this attempt, not of an earlier or a later one.

        The clocks of two hosts may differ, and a shared file system may show an attempt late: number or time is enough.
        """
        if self.is_for_later(run_dir, attempt.number):
            return False
        return self.attempt == attempt.number or self.time >= (claimed_at(run_dir, attempt.number) or 0.0)


def read_request(path: Path) -> Request | None:
    """Return a request; None when there is none, or the file is no request."""
    return typed_or_none(Request, read_json(path))


def take_request(run_dir: RunDir, attempt: Attempt) -> RunAction | None:
    """Take the request to this attempt, but not to an earlier one.

    The file is moved into the attempt's folder atomically, so that a request that is found in the run's folder
    afterwards has come too late for this attempt, and was not seen when the outcome was decided.
    """
    taken = run_dir.attempt(attempt.number).request_file
    found = read_request(run_dir.request_file)
    if found is not None and found.is_for_later(run_dir, attempt.number):  # it stays, for that one
        found = read_request(taken)
        return found.action if found is not None and found.is_for(run_dir, attempt) else None
    try:
        run_dir.request_file.rename(taken)
    except FileNotFoundError:
        pass
    except OSError:  # it is read where it is, and may be found once more
        taken = run_dir.request_file
    request = read_request(taken)
    return request.action if request is not None and request.is_for(run_dir, attempt) else None


def ended_after(run_dir: RunDir, last: Attempt | None) -> RunAction | None:
    """Return the action, such as `cancel RUN`, that came after the outcome of the last attempt was decided; None if none did.

    For an attempt without an outcome, one that came after that attempt was claimed.
    """
    request = read_request(run_dir.request_file)  # requests that an outcome has used have been moved away
    if request is None or request.action not in ENDS_RUN:
        return None
    is_later = last is None or request.is_for_later(run_dir, last.number) or request.is_for(run_dir, last)
    return request.action if is_later else None


def ask_to_cancel(run_dir: RunDir) -> None:
    """Write the request to cancel a run whose job is ended by scancel next, which has to do where it cannot be written.

    The disk may be full, and this very run may have filled it.
    """
    try:
        write_request(run_dir, RunAction.CANCEL)
    except OSError as error:
        why = error.strerror or error
        log.warning("the request to cancel run %s cannot be written: %s; SLURM is told all the same", run_dir.id, why)


def write_request(run_dir: RunDir, action: RunAction) -> None:
    """Write a person's request to the run, with the number of its last attempt."""
    last = (run_dir.attempt_numbers() or [0])[-1]
    write_json(run_dir.request_file, asdict(Request(action, time.time(), last, own_user())))


def signal_ranks(run_dir: RunDir, attempt: Attempt, number: int) -> None:
    """Send a signal to the ranks of an attempt on this host: to rank 0, which tells the others.

    With cluster=local each rank gets it with all that it has started, as SLURM does it: a program of the user's own hears
    nothing from rank 0.

    Raises:
        ProcessLookupError, PermissionError: rank 0 has left, or is somebody else's.
    """
    if attempt.pid is None or process.state(attempt.pid) is None:
        raise ProcessLookupError(errno.ESRCH, "no rank 0 has begun, or it has left")
    if run_dir.info()["backend"] != Backend.LOCAL or os.getpgid(attempt.pid) != attempt.pid:
        os.kill(attempt.pid, number)
        return
    siblings: list[int] = []
    with contextlib.suppress(psutil.Error):  # one of them has just left
        launcher = psutil.Process(attempt.pid).parent()
        siblings = [] if launcher is None else [each.pid for each in launcher.children() if each.pid != attempt.pid]
    os.killpg(attempt.pid, number)
    for pid in siblings:
        if f" train {run_dir.path}" in process.command_line(pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
