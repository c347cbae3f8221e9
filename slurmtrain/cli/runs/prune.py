"""runs prune: remove the directories of runs that have ended."""

from __future__ import annotations

import argparse
import math
import sys
import time

from slurmtrain.cli.columns import format_size
from slurmtrain.cli.status import say_doubts, say_unreadable
from slurmtrain.errors import UsageError
from slurmtrain.report import prune
from slurmtrain.runs import lookup


def prune_runs(options: argparse.Namespace) -> int:
    """Remove runs that have ended, or say which would be removed."""
    if options.older_than is None and options.state is None and not options.dry_run:
        raise UsageError(
            "this would remove every run that has ended, with its checkpoints",
            hint=f"say which: --older-than DAYS, or --state {' '.join(prune.ENDED)}; --dry-run shows them",
        )
    days = options.older_than or 0.0
    if not (math.isfinite(days) and days >= 0):
        raise UsageError(f"--older-than {days:g} is not a number of days", hint="such as 30, or 0.5 for twelve hours")
    say_unreadable(lookup.runs_root())
    decided = prune.plan(
        lookup.runs_root(),
        now=time.time(),
        words=options.state or prune.ENDED,
        older_than_s=days * 86400,
        keep_checkpoints=options.keep_checkpoints,
    )
    for run_id, reason in decided.stays.items():
        print(f"{run_id} stays: {reason}")
    freed, failed = 0, 0
    for removal in decided.removals:
        if not options.dry_run:
            try:
                if not prune.remove(removal, now=time.time()):
                    print(f"{removal.path.name} is kept: it has just changed")
                    continue
            except OSError as error:
                print(f"{removal.path.name} cannot be removed: {error.strerror}", file=sys.stderr)
                failed += 1
                continue
        freed += removal.size
        left = ", all but its checkpoints" if removal.keep else ""
        verb = "would remove" if options.dry_run else "removed"
        print(f"{verb} {removal.path.name} ({removal.what}, {format_size(removal.size)}{left})")
    if decided.removals:
        print(f"{format_size(freed)} {'would be' if options.dry_run else 'were'} freed ({freed} bytes)")
    else:
        print("nothing to remove")
    say_doubts(decided.states.values())
    return 1 if failed else 0
