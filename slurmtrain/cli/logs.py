"""logs: print the output of one rank or of all, and follow it from attempt to attempt."""

from __future__ import annotations

import argparse
import codecs
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from slurmtrain.cli.arguments import RUN_HELP, Parser
from slurmtrain.errors import UsageError
from slurmtrain.report.status import WAITING, RunStatus, is_over, state
from slurmtrain.runs import lookup
from slurmtrain.runs.attempts import read_attempt
from slurmtrain.runs.outcome import Verdict, exit_code_of_run
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records

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
        help="all prints each line with its rank (default: 0)",
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="default: the latest")
    options = parser.parse_args(words)
    run_dir = lookup.find(options.run, lookup.runs_root())
    numbers, attempt = run_dir.attempt_numbers(), options.attempt
    if attempt is not None and attempt not in numbers:
        raise UsageError(
            f"run {run_dir.id} has no attempt {attempt}", hint=f"it has: {', '.join(map(str, numbers)) or 'none yet'}"
        )
    if options.follow:
        return follow(run_dir, options.rank, attempt)
    if not numbers:
        raise UsageError(
            f"run {run_dir.id} has not started yet, so there is no log",
            hint=f"status {run_dir.id}; logs -f waits for it",
        )
    number = attempt or numbers[-1]
    marked = options.rank is None and run_dir.attempt(number).rank_logs()
    logs = marked or {0: _log_file(run_dir, options.rank or 0, number)}
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
        raise argparse.ArgumentTypeError(f"{text!r} is neither a rank's number nor all")
    return int(text)


def _log_file(run_dir: RunDir, rank: int, number: int) -> Path:
    attempt_dir = run_dir.attempt(number)
    log = attempt_dir.rank_log(rank)
    if os.path.lexists(log):
        return log
    ranks = list(attempt_dir.rank_logs())
    for other in (attempt_dir.setup_failure_file, attempt_dir.srun_log):
        if not ranks and os.path.lexists(other):
            return other
    raise UsageError(
        f"attempt {number} of run {run_dir.id} has no log of rank {rank}",
        hint=f"it has ranks 0 to {ranks[-1]}" if ranks else f"no rank has started; see {run_dir.path}/slurm-*.log",
    )


def _marked(rank: int, text: str) -> str:
    """Put the rank in front of each line; a last line without an end gets one."""
    return "".join(f"[{rank}] {line}\n" for line in text.removesuffix("\n").split("\n"))


LONGEST_LINE = 1 << 20  # characters of a line that are held back until its end comes


class Tail:
    """The part of a log that has been added since the last look.

    Args:
        rank: number to mark each line with; then only whole lines are returned. None: text is returned as it comes.
    """

    def __init__(self, log: Path, rank: int | None):
        self._log, self._rank = log, rank
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in two parts
        self._rest = ""

    def pieces(self) -> Iterator[str]:
        """Yield what has been added, in pieces of at most 1 MiB: a log may be larger than the memory.

        Raises:
            UnreadableRecordError: it is not a regular file, or cannot be read.
        """
        for piece in records.pieces(self._log, self._position):
            self._position += len(piece)
            added = self._decoder.decode(piece)
            if self._rank is None:
                yield added
                continue
            whole, end, self._rest = (self._rest + added).rpartition("\n")
            if not end and len(self._rest) > LONGEST_LINE:
                whole, end, self._rest = self._rest, "\n", ""
            if end:
                yield _marked(self._rank, whole)

    def rest(self) -> str:
        """Return a last line without an end, when no more will come."""
        if self._rank is None:
            return self._decoder.decode(b"", final=True)
        self._rest += self._decoder.decode(b"", final=True)
        return _marked(self._rank, self._rest) if self._rest else ""


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
        print(f"\nthe job goes on; come back with: logs {run_dir.id} -f")
        return 130
    now = state(run_dir)
    print(f"run {run_dir.id}: {now.status}: {now.explanation}")
    if now.status == RunStatus.FINISHED or not now.attempts:
        return 0 if now.status == RunStatus.FINISHED else 1
    last = now.attempts[-1]
    return exit_code_of_run(last.verdict, last.reason, last.exit_code) or 1
