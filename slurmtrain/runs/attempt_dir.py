"""The folder of an attempt, and the names of all files in it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slurmtrain.system.files import write_json

STOP_NAME = "stop.json"
RANK_LOG = re.compile(r"rank-([0-9]{1,9})\.log")


def path_below(name: str) -> cached_property[Path]:
    """Return a property that is the path of a file or folder by its name below the `path` of its object."""
    return cached_property(lambda owner: owner.path / name)


def rank_log_name(rank: int | str) -> str:
    """Return the name of a rank's log, for srun with "%t" as the rank."""
    return f"rank-{rank}.log"


@dataclass(frozen=True)
class AttemptDir:
    """The paths in the folder of one attempt, attempts/NNNN. Holds no state of its own."""

    path: Path

    def names(self) -> list[str] | None:
        """Return the names of all files in it, in no particular order; None if it cannot be listed."""
        try:
            return os.listdir(self.path)
        except OSError:
            return None

    def write_record(self, path: Path, value: dict[str, Any]) -> None:
        """Write a record of the attempt. If the disk is full, leave an empty file that says so, which takes no room.

        Raises:
            OSError: the record cannot be written.
        """
        try:
            write_json(path, value)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                with contextlib.suppress(OSError):
                    self.full_disk_marker.touch()
            raise

    # An empty file: the disk was full, so a record of this attempt is missing or out of date.
    full_disk_marker = path_below("disk-full")

    # Files of the launchers and of the supervisor.
    claim_file = path_below("job")  # the job, its restart count, and when the supervisor claimed the attempt
    setup_failure_file = path_below(
        "setup-failed"
    )  # the message about a set-up that failed before any rank was started
    srun_log = path_below("srun.log")  # what srun itself writes to stderr
    request_file = path_below("request.json")  # the person's request that this attempt took from the run's folder
    hook_log = path_below("hook.log")  # output of the hook after the attempt; it exists as soon as one was started

    # What the pods of a run tell each other (supervise/platforms/pods.py).
    pods = path_below("pods")

    def pod_left_file(self, index: int) -> Path:
        """Return the file in which a pod says that its ranks have left, and with which exit code."""
        return self.pods / f"left-{index}.json"

    # Files of rank 0.
    record_file = path_below("attempt.json")  # see `Attempt`
    environment_file = path_below("environment.json")  # packages, driver, variables; see `software`
    stop_file = path_below(STOP_NAME)  # why the ranks were told to stop
    master_file = path_below("master.json")  # its address and port, for programs that rendezvous by themselves
    preflight_file = path_below("preflight.json")  # what the checks before training have found
    prepared_file = path_below("prepared")  # empty: rank 0 of a preparation of data needs no other rank any more
    stopping_file = path_below("stopping")  # empty: a rank of a preparation of data was told to stop, so all stop

    # Files of the watchdog, when a rank hangs.
    hang_page = path_below("hang.md")  # which ranks did not come, where they were, and which ranks waited for them
    hang_file = path_below("hang.json")  # sentence and nodes of a hang, for the outcome of the attempt
    heartbeat_file = path_below("heartbeat.json")  # of a rank that is alone, for the supervisor; there while it runs

    def hang_report(self, rank: int) -> Path:
        """Return the file in which a live rank writes what it knows of a hang, until it is on the page."""
        return self.path / f"hang-{rank}.json"

    def hang_reports(self) -> dict[int, Path]:
        """Return those files by rank, in no particular order."""
        found = {path.stem.removeprefix("hang-"): path for path in self.path.glob("hang-*.json")}
        return {int(rank): path for rank, path in found.items() if rank.isdecimal()}

    def stacks_file(self, rank: int) -> Path:
        """Return the file for the stacks of a rank, and of the processes that it has forked; it is there while it runs."""
        return self.path / f"stacks-{rank}.log"

    def stacks_files(self) -> list[Path]:
        """Return those files."""
        return list(self.path.glob("stacks-*.log"))

    # Files of every rank.
    def rank_log(self, rank: int) -> Path:
        """Return the log of a rank's stdout and stderr."""
        return self.path / rank_log_name(rank)

    def rank_logs(self) -> dict[int, Path]:
        """Return the logs that exist by rank, in the order of the ranks."""
        found = ((RANK_LOG.fullmatch(path.name), path) for path in self.path.glob("rank-*.log"))
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def failure_file(self, rank: int) -> Path:
        """Return the record of a rank's failure."""
        return self.path / f"failed-{rank}.json"

    def failure_files(self) -> list[Path]:
        """Return the records of failures of all ranks, in no particular order."""
        return list(self.path.glob("failed-*.json"))

    def ended_file(self, rank: int) -> Path:
        """Return an empty file: the user's own program has ended on that rank, and has not failed."""
        return self.path / f"ended-{rank}"

    def count_ended_and_failed(self) -> tuple[int, int]:
        """List the folder once, and return on how many ranks the user's own program has ended, and how many have failed.

        Raises:
            OSError: the folder cannot be listed.
        """
        names = os.listdir(self.path)
        return sum(name.startswith("ended-") for name in names), sum(name.startswith("failed-") for name in names)
