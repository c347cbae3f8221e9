"""How long the table of 1,000 runs with 1,000 logged lines each takes, against json.loads of every line."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

from slurmtrain.report.collect import Point, table_of
from slurmtrain.runs.run_dir import RunDir

RUNS, LINES, ROUNDS = 1000, 1000, 3
RECORD = {"loss": 2.3456789, "grad_norm": 1.23456789, "lr": 3e-4, "tokens_per_s": 12345.678, "step_time_s": 0.123}


def main() -> None:
    log = "".join(json.dumps({"step": 10 * step, **RECORD}) + "\n" for step in range(1, LINES + 1))
    with tempfile.TemporaryDirectory() as folder:
        points = []
        for number in range(RUNS):
            run = RunDir(Path(folder) / f"{number:04d}")
            run.path.mkdir()
            run.metrics_file.write_text(log)
            points.append(Point(number, {"optim.lr": number}, run, "finished"))
        ours, theirs = [], []
        for _ in range(ROUNDS):
            began = time.process_time()
            table_of(points)
            between = time.process_time()
            for point in points:
                assert point.run_dir is not None
                for line in point.run_dir.metrics_file.read_text().splitlines():
                    json.loads(line)
            ours.append(between - began)
            theirs.append(time.process_time() - between)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"table of {RUNS} runs, {LINES} lines each: {statistics.median(ours):.2f} s of CPU, {ratio:.2f} x json.loads")
