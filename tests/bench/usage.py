"""How long `usage` of 3,000 runs takes on the clock, beside `status` of the same runs.

Wanted: at most 2 s, and the line of one run of 100,000 steps and 10,000 saves within 0.5 s. Each run was preempted once and has
saved 20 times in each of its two attempts. SLURM's answers, that it knows none of their jobs and keeps no accounting, come
from scripts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from slurmtrain.cli import main as slurmtrain
from slurmtrain.report.goodput.run import goodput_of
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.run_dir import RunDir
from tests.support.run_info import run_info

RUNS, SAVES, LONG_SAVES, ROUNDS = 3000, 20, 5_000, 5  # saves of each of two attempts
WANTED_S, WANTED_OF_ONE_S = 2.0, 0.5
END = 1_700_000_000.0


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = folder / "bin"
        commands.mkdir()
        for command, body in (("squeue", "exit 0"), ("sacct", "echo disabled >&2; exit 1")):
            (commands / command).write_text(f"#!/bin/sh\n{body}\n")
            (commands / command).chmod(0o755)
        os.environ["PATH"] = f"{commands}:{os.environ['PATH']}"
        os.environ.pop("SLURM_CONF", None)
        runs = folder / "runs"
        for number in range(RUNS):
            clock = f"{number // 3600:02d}{number // 60 % 60:02d}{number % 60:02d}"
            write_run(runs / f"name{number % 5}" / f"20260101-{clock}-000aa", str(1000 + number), SAVES)
        os.environ["SLURMTRAIN_RUNS"] = str(runs)
        for words in (["usage"], ["usage", "--by", "run"], ["usage", "--by", "node"], ["usage", "--since", "4w"]):
            measured = [(seconds(words), seconds(["status"])) for _ in range(ROUNDS + 1)][1:]  # the first is a warm-up
            ours = statistics.median(both[0] for both in measured)
            ratio = statistics.median(both[0] / both[1] for both in measured)
            verdict = "met" if ours <= WANTED_S else "MISSED"
            print(
                f"{' '.join(words)} of {RUNS} runs on {len(os.sched_getaffinity(0))} CPUs: {ours:.2f} s, {ratio:.1f} x `status`"
                f"   wanted <= {WANTED_S:.0f} s: {verdict}"
            )
        long = runs / "long" / "20260102-000000-000bb"
        write_run(long, "9", LONG_SAVES)
        with (long / "metrics.jsonl").open("w") as file:
            file.writelines(f'{{"step": {step}, "loss": 2.5, "step_time_s": 0.1}}\n' for step in range(1, 100_001))
        taken = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            found = goodput_of(RunDir(long))
            taken.append(time.perf_counter() - began)
        verdict = "met" if statistics.median(taken) <= WANTED_OF_ONE_S else "MISSED"
        print(
            f"the time by cause of a run of 100,000 steps and {2 * LONG_SAVES} saves, {len(found.segments)} segments: "
            f"{statistics.median(taken):.2f} s   wanted <= {WANTED_OF_ONE_S} s: {verdict}"
        )


def seconds(words: list[str]) -> float:
    """Seconds that a verb takes in this process."""
    said = io.StringIO()
    began = time.perf_counter()
    with contextlib.redirect_stdout(said):
        assert slurmtrain(words) == 0
    return time.perf_counter() - began


def write_run(run: Path, job_id: str, saves: int) -> None:
    """A finished run on 16 GPUs: an hour, a preemption, and another hour."""
    facts = run_info(id=run.name, name=run.parent.name, created=END - 8000, job_ids=[job_id])
    events = [{"time": END - 8000, "event": "submitted", "job_id": job_id}]
    for number, begun in ((1, END - 7900), (2, END - 4000)):
        attempt = run / "attempts" / f"{number:04d}"
        attempt.mkdir(parents=True)
        (attempt / "job").write_text(f"{job_id} {number - 1} {begun}\n")
        last = number == 2
        record = Attempt(
            number,
            job_id=job_id,
            restart_count=number - 1,
            nodes=["n1", "n2"],
            world_size=16,
            gpus=16.0,
            kind="train",
            started=begun + 5,
            stepping=begun + 40,
            ended=begun + 3600,
            start_up_s={"interpreter and imports": 10.0, "rendezvous": 5.0, "restore": 15.0},
            first_step=1000 * (number - 1),
            last_step=1000 * number,
            reason="finished" if last else "preempted",
            verdict="done" if last else "requeue",
        )
        (attempt / "attempt.json").write_text(json.dumps(asdict(record), indent=1))
        of_attempt = {"attempt": number}
        events.append({"time": begun + 40, "event": "training started", **of_attempt})
        step_s = 3500 / saves
        for save in range(saves):
            event = {"time": begun + 50 + step_s * save, "event": "checkpoint", "step": save, "seconds": step_s / 9}
            events.append({**event, "stall_s": step_s / 90, **of_attempt})
        word = "training finished" if last else "training stopped"
        events.append({"time": begun + 3595, "event": word, "step": 1000 * number, **of_attempt})
    (run / "checkpoints").mkdir()
    (run / "run.json").write_text(json.dumps(facts, indent=1))
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


if __name__ == "__main__":
    main()
