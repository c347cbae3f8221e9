"""How long `status` of 3,000 finished runs takes, against reading and parsing three files of each: processor time.

Wanted: at most 5 times as much, with and without a slurm.conf that the runs name. SLURM's answer, that it knows none of their
jobs, comes from a script.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from slurmtrain.cli import main as slurmtrain
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.reached_step import TAIL_BYTES
from tests.support.run_info import run_info

RUNS, STEPS, LAST_BYTES, ROUNDS = 3000, 300, TAIL_BYTES, 5
WANTED = 5.0
VALUES = {
    "loss": 2.123456789012345,
    "grad_norm": 0.5123456789,
    "lr": 3e-4,
    "tokens_per_s": 12345.6789,
    "step_time_s": 0.1,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        conf, squeue = folder / "slurm.conf", folder / "bin" / "squeue"
        squeue.parent.mkdir()
        squeue.write_text("#!/bin/sh\n")
        squeue.chmod(0o755)
        conf.write_text("ClusterName=bench\n")
        os.environ["PATH"] = f"{squeue.parent}:{os.environ['PATH']}"
        os.environ.pop("SLURM_CONF", None)
        for what, slurm_conf in (("this machine's cluster", None), ("a slurm.conf", str(conf))):
            runs = folder / ("runs-of-it" if slurm_conf else "runs")
            make_runs(runs, slurm_conf)
            os.environ["SLURMTRAIN_RUNS"] = str(runs)
            ours, bare = [], []
            for number in range(ROUNDS + 1):
                seconds = processor_time(status), processor_time(lambda runs=runs: read_all(runs))  # type: ignore[misc]
                if number:  # the first is a warm-up
                    ours.append(seconds[0])
                    bare.append(seconds[1])
            ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
            print(
                f"status of {RUNS} runs on {what}: {statistics.median(ours):.2f} s of CPU, {ratio:.1f} x reading three files "
                f"of each   wanted <= {WANTED:.0f}: {'met' if ratio <= WANTED else 'MISSED'}"
            )


def processor_time(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def status() -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert slurmtrain(["status"]) == 0
    assert said.getvalue().count("finished") >= RUNS and "cannot be asked" not in said.getvalue()


def read_all(runs: Path) -> None:
    for name in os.listdir(runs):
        for run in os.listdir(runs / name):
            path = f"{runs}/{name}/{run}"
            for file in ("run.json", "attempts/0001/attempt.json"):
                with open(f"{path}/{file}", "rb") as opened:
                    json.loads(opened.read())
            with open(f"{path}/metrics.jsonl", "rb") as opened:
                opened.seek(max(0, os.fstat(opened.fileno()).st_size - LAST_BYTES))
                json.loads(opened.read().splitlines()[-1])


def make_runs(runs: Path, slurm_conf: str | None) -> None:
    """Finished runs of five names: one attempt, three checkpoints, and the log of 300 steps each."""
    lines = [json.dumps({"step": step, **VALUES}) + "\n" for step in range(1, STEPS + 1)]
    lines.insert(-10, json.dumps({"step": STEPS - 10, "valid_loss": 2.2}) + "\n")
    ended, log = time.time(), "".join(lines)
    for number in range(RUNS):
        clock = f"{number // 3600:02d}{number // 60 % 60:02d}{number % 60:02d}"
        run, job_id = runs / f"name{number % 5}" / f"20260101-{clock}-000aa", str(1000 + number)
        attempt = run / "attempts" / "0001"
        attempt.mkdir(parents=True)
        for step in range(STEPS - 20, STEPS + 1, 10):
            checkpoint = run / "checkpoints" / f"checkpoint_{step:07d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "COMPLETE").write_text("0" * 64 + "\n")
        facts = run_info(id=run.name, name=run.parent.name, created=ended, slurm_conf=slurm_conf, job_ids=[job_id])
        facts |= {"overrides": ["optim.lr=1e-3"], "config_hash": "0" * 12, "host": "login"}
        facts |= {"steps": STEPS, "workdir": "code", "submit_dir": str(runs)}
        (run / "run.json").write_text(json.dumps(facts, indent=1))
        record = Attempt(
            1, job_id=job_id, nodes=["node1"], world_size=8, pid=1, host="node1", started=ended - 600, ended=ended
        )
        said = {"first_step": 0, "last_step": STEPS, "said": "finished", "exit_code": 0}
        outcome = {"reason": "finished", "verdict": "done", "sentence": "finished"}
        (attempt / "attempt.json").write_text(json.dumps({**asdict(record), **said, **outcome}, indent=1))
        (run / "metrics.jsonl").write_text(log)
        (run / "events.jsonl").write_text(json.dumps({"time": ended, "event": "submitted", "job_id": job_id}) + "\n")
        (run / f"slurm-{job_id}.log").touch()


if __name__ == "__main__":
    main()
