"""Two quick starts at once on one machine against one alone, by processor time and by the clock.

python -m tests.bench quickstart [--steps 60] [--rounds 3]

A shared login node is where people try this first, so that two of them must share its cores, and not spin while they wait for
each other. One alone has all cores, so two at once cannot each be as fast: wanted are at most 1.3 times the processor time for
each of them, and at most 2.2 times the time by the clock. All in turn; each is the command of the README, begun in a folder of
its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

WANTED_CPU, WANTED_WALL = 1.3, 2.2


class Spent(NamedTuple):
    """Seconds by the clock, and of processor time of user and system."""

    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench quickstart")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options, _ = parser.parse_known_args()
    spent: dict[int, list[Spent]] = {1: [], 2: []}  # by how many run at once, for each of them
    for number in range(options.rounds):
        for count in (1, 2) if number % 2 else (2, 1):
            with tempfile.TemporaryDirectory(prefix="bench-quickstart-") as folder:
                spent[count].append(run_at_once(count, Path(folder), options.steps))
    print(f"quick start of {options.steps} steps on {len(os.sched_getaffinity(0))} cores, medians of {options.rounds}")
    for kind, wanted in (("cpu", WANTED_CPU), ("wall", WANTED_WALL)):
        alone, at_once = ([getattr(one, kind) for one in spent[count]] for count in (1, 2))
        ratio = statistics.median(two / one for one, two in zip(alone, at_once, strict=True))
        print(
            f"  {kind:4} alone {statistics.median(alone):6.1f} s, each of two at once {statistics.median(at_once):6.1f} s: "
            f"{ratio:.2f} times   wanted <= {wanted}: {'met' if ratio <= wanted else 'MISSED'}"
        )


def run_at_once(count: int, folder: Path, steps: int) -> Spent:
    """Return the mean of what each of `count` quick starts takes that begin together."""
    words = ["+cluster=local", f"train.steps={steps}", "train.eval_every=0", "submit"]
    began = time.perf_counter()
    processes = []
    for number in range(count):
        own = folder / str(number)
        own.mkdir()
        command = [sys.executable, "-m", "slurmtrain", *words]
        processes.append(subprocess.Popen(command, cwd=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    found = []
    for process in processes:
        _, status, used = os.wait4(process.pid, 0)  # with all that it has waited for itself
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"a quick start ended with {process.returncode}")
        found.append(Spent(time.perf_counter() - began, used.ru_utime + used.ru_stime))
    return Spent(statistics.mean(one.wall for one in found), statistics.mean(one.cpu for one in found))


if __name__ == "__main__":
    main()
