"""Runs rows and counts outcomes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.rows import Outcome, Row, Tally, Trial

ROOT = Path(__file__).parents[2]


class Matrix:
    """A process in which rows are run, in some lanes at a time. Use it in a with statement.

    Args:
        directory: where trials write; default: one that is removed at the end.
        skew_s: ranks of a kill trial write so much apart, at most.
    """

    def __init__(self, directory: Path | None = None, *, lanes: int = 6, seed: int = 0, skew_s: float = 2.0):
        self._own = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="slurmtrain-faults-"))
        self._lanes, self._seed, self._skew_s = lanes, seed, skew_s
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            cwd=ROOT,
            env={**keep, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, row: Row, trials: int, **memory: Any) -> Tally:
        """Run so many trials; `memory` is handed to the lanes."""
        tally, started = Tally(row.name), time.monotonic()
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {
            "row": row.name,
            "trials": trials,
            "lanes": row.lanes or self._lanes,
            "seed": self._seed,
            "memory": {"skew_s": self._skew_s, **memory},
            "directory": tempfile.mkdtemp(dir=self.directory),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        while "done" not in (message := json.loads(self._process.stdout.readline() or '{"done": ""}')):
            if "skipped" in message:
                tally.skipped = message["skipped"]
            else:
                tally.add(Trial(Outcome[message["outcome"]], message["detail"]))
        if not message["done"]:
            tally.add(Trial(Outcome.UNEXPLAINED, f"the harness ended with {self._process.wait()}"))
        tally.seconds = time.monotonic() - started
        return tally

    def __enter__(self) -> Matrix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if error is not None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        if self._own:
            shutil.rmtree(self.directory, ignore_errors=True)
