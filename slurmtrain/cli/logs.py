"""logs: print the output of one rank or of all, and follow it from attempt to attempt."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator

from slurmtrain.cli.arguments import RUN_HELP, Parser
from slurmtrain.report.rank_logs import Tail, attempt_number, log_file
from slurmtrain.report.status.look import is_over, state
from slurmtrain.report.status.state import WAITING, RunStatus
from slurmtrain.runs import lookup
from slurmtrain.runs.attempts import read_attempt
from slurmtrain.runs.reasons import Verdict, exit_code_of_run
from slurmtrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)

FOLLOW_POLL_S = 0.2  # seconds between looks at a log: a shared file system has no event to await
ASK_EVERY_S = 5.0  # the controller belongs to everybody


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser.of(verb)
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="follow it through all attempts until the run has ended"
    )
    parser.add_argument(
        "--rank",
        type=_rank,
        default=0,
        metavar="N|all",
        help="rank number; all prints each line with its rank (default: 0)",
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="default: the latest")
    options = parser.parse_args(words)
    run_dir = lookup.find(options.run, lookup.runs_root())
    attempt = options.attempt
    if options.follow:
        if attempt is not None:
            attempt_number(run_dir, attempt)
        return follow(run_dir, options.rank, attempt)
    number = attempt_number(run_dir, attempt)
    marked = options.rank is None and run_dir.attempt(number).rank_logs()
    logs = marked or {0: log_file(run_dir, options.rank or 0, number)}
    for rank, log in logs.items():
        tail = Tail(log, rank if marked else None)
        for text in tail.pieces():
            sys.stdout.write(text)
        sys.stdout.write(tail.rest())
    return 0


def _rank(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a rank number nor all")
    return int(text)


def follow(run_dir: RunDir, rank: int | None, attempt: int | None) -> int:
    """Print a rank's output as it comes (None: that of all ranks), from attempt to attempt, until the run has ended."""
    for text in lines_as_they_come(run_dir, rank, attempt):
        sys.stdout.write(text)
        sys.stdout.flush()
    return 0


def lines_as_they_come(run_dir: RunDir, rank: int | None, attempt: int | None) -> Iterator[str]:
    """Yield the output of the ranks as it comes, and log what `status` knows of a run that waits or sets up."""
    said = ""
    number = attempt or (run_dir.attempt_numbers() or [1])[-1]
    tails: dict[int, Tail] = {}
    asked = time.monotonic() - ASK_EVERY_S
    ended = looked = False
    while True:
        ranks = [rank] if rank is not None else list(run_dir.attempt(number).rank_logs())
        for each in ranks:
            if each not in tails:
                tails[each] = Tail(run_dir.attempt(number).rank_log(each), each if rank is None else None)
        came = False
        for each in ranks:
            for text in tails[each].pieces():
                came = True
                yield text
        if came:
            continue
        if attempt is None and number + 1 in run_dir.attempt_numbers():
            yield "".join(tail.rest() for tail in tails.values())
            number, tails, looked = number + 1, {}, False
            continue
        if ended:
            yield "".join(tail.rest() for tail in tails.values())
            return
        # The run's own files show first that it is over; the queue is asked seldom, for runs that cannot write.
        record = read_attempt(run_dir, number)
        if attempt is not None:
            ended = record.ended is not None or run_dir.attempt_numbers()[-1] > attempt
        elif not looked and record.verdict in (Verdict.DONE, Verdict.END):
            ended, looked = is_over(run_dir), True  # not if it has been submitted again
        if not ended and time.monotonic() - asked >= ASK_EVERY_S:
            now = state(run_dir)
            ended, asked = not now.alive, time.monotonic()
            if now.status in (*WAITING, RunStatus.STARTING) and said != (said := f"{now.status}: {now.explanation}"):
                log.info(said)
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
