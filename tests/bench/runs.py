"""`status` of 3,000 runs, beside the reading of four files of each. Wanted: 5 times.

Each run was preempted once, has saved 20 times in each of two attempts, and has logged 300 steps. SLURM's answers, that it
knows none of their jobs and keeps no accounting, come from scripts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from slurmtrain.cli import main as slurmtrain
from tests.bench.side_by_side import Row, in_turn, options, ratio, show
from tests.support.run_info import run_info

STEPS, SAVES, TAIL_BYTES = 300, 20, 4096
END = 1_700_000_000.0
VALUES = {"loss": 2.123456789, "grad_norm": 0.512345, "lr": 3e-4, "tokens_per_s": 12345.6789, "step_time_s": 0.1}


def main(words: list[str]) -> None:
    chosen = options(__doc__, words, rounds=5, runs=3000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command, body in (("squeue", "exit 0"), ("sacct", "echo disabled >&2; exit 1")):
            path = folder / "bin" / command
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(0o755)
        os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
        os.environ.pop("SLURM_CONF", None)
        os.environ["SLURMTRAIN_RUNS"] = str(folder / "runs")
        for number in range(chosen.runs):
            clock = f"{number // 3600:02d}{number // 60 % 60:02d}{number % 60:02d}"
            write_run(folder / "runs" / f"name{number % 5}" / f"20260101-{clock}-000aa", str(1000 + number))
        assert status().count("finished") >= chosen.runs
        variants = {"reading": partial(timed, partial(read_all, folder / "runs")), "status": partial(timed, status)}
        found = in_turn(variants, chosen.rounds)
    cpu = {name: [both[1] for both in times] for name, times in found.items()}
    rows = [Row("status, by the clock", [both[0] for both in found["status"]])]
    rows.append(ratio("status / reading four files, processor time", cpu["status"], cpu["reading"], "<= 5"))
    show(f"{chosen.runs} runs", rows)


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return seconds by the clock, and of this process's processor time."""
    began = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def status() -> str:
    """Return what `status` prints, in this process."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert slurmtrain(["status"]) == 0
    assert "cannot be asked" not in told.getvalue()
    return told.getvalue()


def read_all(runs: Path) -> None:
    for run in runs.glob("*/*"):
        for file in ("run.json", "attempts/0001/attempt.json", "attempts/0002/attempt.json"):
            json.loads((run / file).read_bytes())
        with (run / "metrics.jsonl").open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
            json.loads(log.read().splitlines()[-1])


def write_run(run: Path, job_id: str) -> None:
    """A finished run on 16 GPUs: an hour, a preemption, and another hour."""
    events: list[dict[str, Any]] = [{"time": END - 8000, "event": "submitted", "job_id": job_id}]
    for number, begun in ((1, END - 7900), (2, END - 4000)):
        attempt, last, half = run / "attempts" / f"{number:04d}", number == 2, STEPS // 2
        attempt.mkdir(parents=True)
        (attempt / "job").write_text(f"{job_id} {number - 1} {begun}\n")
        shape = {"nodes": ["n1", "n2"], "host": "n1", "world_size": 16, "gpus": 16.0, "kind": "train", "pid": 1}
        start_up = {"interpreter and imports": 10.0, "rendezvous": 5.0, "restore": 15.0}
        times = {"started": begun + 5, "stepping": begun + 40, "ended": begun + 3600, "start_up_s": start_up}
        steps = {"first_step": half * (number - 1), "last_step": half * number, "exit_code": 0 if last else 75}
        reason, verdict = ("finished", "done") if last else ("preempted", "requeue")
        record = {"number": number, "job_id": job_id, "restart_count": number - 1, **shape, **times, **steps}
        record |= {"reason": reason, "verdict": verdict, "sentence": reason}
        (attempt / "attempt.json").write_text(json.dumps(record, indent=1))
        events.append({"time": begun + 40, "event": "training started", "attempt": number})
        step_s = 3500 / SAVES
        for save in range(SAVES):
            saved = {"time": begun + 50 + step_s * save, "event": "checkpoint", "step": save, "seconds": step_s / 9}
            events.append({**saved, "stall_s": step_s / 90, "attempt": number})
        ended = {"time": begun + 3595, "step": half * number, "attempt": number}
        events.append({**ended, "event": "training finished" if last else "training stopped"})
    for step in range(STEPS - 20, STEPS + 1, 10):
        (run / "checkpoints" / f"checkpoint_{step:07d}").mkdir(parents=True)
        (run / "checkpoints" / f"checkpoint_{step:07d}" / "COMPLETE").write_text("0" * 64 + "\n")
    facts = run_info(id=run.name, name=run.parent.name, created=END - 8000, job_ids=[job_id], steps=STEPS)
    (run / "run.json").write_text(json.dumps(facts, indent=1))
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    logged = [json.dumps({"step": step, **VALUES}) + "\n" for step in range(1, STEPS + 1)]
    (run / "metrics.jsonl").write_text("".join(logged))
    (run / f"slurm-{job_id}.log").touch()
