"""logs: print the output of one rank or of all, and follow it from attempt to attempt."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from slurmtrain.report.rank_logs import Tail, attempt_number, log_file
from slurmtrain.report.status.state import WAITING, RunStatus, is_over, state
from slurmtrain.report.status.waiting import EndWatch
from slurmtrain.runs import lookup
from slurmtrain.runs.attempts import read_attempt
from slurmtrain.runs.reasons import exit_code_of_run
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.paths import runs_root

log = logging.getLogger(__name__)

FOLLOW_POLL_S = 0.2  # seconds between looks at a log: a shared file system has no event to await

NOT_YET = (*WAITING, RunStatus.STARTING)  # states in which there is no output yet


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    run_dir = lookup.find(options.run, runs_root())
    if options.follow:
        if options.attempt is not None:
            attempt_number(run_dir, options.attempt)
        return follow(run_dir, options.rank, options.attempt)
    number = attempt_number(run_dir, options.attempt)
    marked = run_dir.attempt(number).rank_logs() if options.rank is None else {}
    for rank, file in (marked or {0: log_file(run_dir, options.rank or 0, number)}).items():
        tail = Tail(file, rank if marked else None)
        for text in tail.pieces():
            sys.stdout.write(text)
        sys.stdout.write(tail.rest())
    return 0


def follow(run_dir: RunDir, rank: int | None, attempt: int | None) -> int:
    """Print a rank's output as it comes (None: that of all ranks), from attempt to attempt, until the run has ended.

    What `status` knows of a run that waits or sets up is logged.
    """
    number, tails = attempt or (run_dir.attempt_numbers() or [1])[-1], dict[int, Tail]()
    ended, said = False, ""
    watch = EndWatch(ask_first=not is_over(run_dir))
    watch.add([run_dir])
    while True:
        directory, came = run_dir.attempt(number), False
        for each in [rank] if rank is not None else list(directory.rank_logs()):
            tails.setdefault(each, Tail(directory.rank_log(each), each if rank is None else None))
        for each in sorted(tails):
            for text in tails[each].pieces():
                came = True
                sys.stdout.write(text)
        sys.stdout.flush()
        if came:
            continue
        goes_on = attempt is None and number + 1 in run_dir.attempt_numbers()
        if goes_on or ended:
            sys.stdout.write("".join(tails[each].rest() for each in sorted(tails)))
            if not goes_on:
                return 0
            number, tails = number + 1, {}
            continue
        ended = bool(list(watch.look()))
        if attempt is not None:
            ended = ended or read_attempt(run_dir, attempt).ended is not None or run_dir.attempt_numbers()[-1] > attempt
        now = watch.seen.get(run_dir)
        known = f"{now.status}: {now.explanation}" if now is not None and now.status in NOT_YET else said
        if known != said:
            log.info(said := known)
        time.sleep(FOLLOW_POLL_S)


def follow_to_the_end(run_dir: RunDir) -> int:
    """Follow for `submit --follow`: return how the run has ended (0, 75, 78 or 1, as `exit_code_of_run`).

    Ctrl-C does not affect the job, and returns 130.
    """
    try:
        follow(run_dir, 0, None)
    except KeyboardInterrupt:
        print(f"\nthe job continues; to follow it again: logs {run_dir.id} -f")
        return 130
    now = state(run_dir)
    why = "" if now.explanation == now.status else f": {now.explanation}"
    print(f"run {run_dir.id}: {now.status}{why}")
    if now.status == RunStatus.FINISHED or not now.attempts:
        return 0 if now.status == RunStatus.FINISHED else 1
    last = now.attempts[-1]
    return exit_code_of_run(last.verdict, last.reason, last.exit_code) or 1
