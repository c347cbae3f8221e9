"""How long `report` of a run of 100,000 logged steps takes as a command, and how large its page is.

Wanted: under 3 s and under 2 MB. Judged by the processor time, which other work on the machine disturbs least; beside it
stand the time on the clock, and the processor time of json.loads of each line of the same log, in a Python of its own.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.support.report_runs import interrupted_run, step_record

STEPS, ROUNDS = 100_000, 5
WANTED_S, WANTED_MB = 3.0, 2.0
READ = "import json, sys\nfor line in open(sys.argv[1]):\n    json.loads(line)\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = interrupted_run(folder / "runs")
        random = Random(1)
        with run.metrics_file.open("w") as file:
            for step in range(1, STEPS + 1):
                file.write(json.dumps(step_record(step, random)) + "\n")
                if step % 1000 == 0:
                    file.write(json.dumps({"step": step, "valid_loss": 2.0, "perplexity": 7.4}) + "\n")
        squeue = folder / "bin" / "squeue"
        squeue.parent.mkdir()
        squeue.write_text("#!/bin/sh\n")
        squeue.chmod(0o755)
        environment = {**os.environ, "PATH": f"{squeue.parent}:{os.environ['PATH']}"}
        page = folder / "report.html"
        ours, theirs, clock = [], [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            ours.append(
                processor_s(
                    [sys.executable, "-m", "slurmtrain", "report", str(run.path), "--out", str(page)], environment
                )
            )
            clock.append(time.perf_counter() - began)
            theirs.append(processor_s([sys.executable, "-c", READ, str(run.metrics_file)], environment))
        size, log = page.stat().st_size / 1e6, run.metrics_file.stat().st_size / 1e6
    took = statistics.median(ours)
    met = "met" if took <= WANTED_S and size <= WANTED_MB else "MISSED"
    print(
        f"report of {STEPS:,} logged steps ({log:.0f} MB): {took:.2f} s of CPU ({min(ours):.2f} to {max(ours):.2f}), "
        f"{statistics.median(clock):.2f} s on the clock ({min(clock):.2f} to {max(clock):.2f}), {size:.2f} MB; "
        f"json.loads of its lines: {statistics.median(theirs):.2f} s   wanted <= {WANTED_S:g} s, {WANTED_MB:g} MB: {met}"
    )


def processor_s(command: list[str], environment: dict[str, str]) -> float:
    """Seconds of processor time of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
