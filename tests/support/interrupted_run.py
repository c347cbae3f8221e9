"""Runs that were interrupted: one made of files, without a job, and a check that the time of any run adds up."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurmtrain.report.causes import goodput_of
from slurmtrain.report.goodput import Cause, Goodput
from slurmtrain.runs.attempts import Attempt, all_attempts
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from tests.support.run_info import run_info

WITHIN = 0.01  # of the time on the clock, to which the seconds by cause have to add up
T0 = 1_700_000_000.0  # when the run was submitted, in unix seconds
GPUS = 16.0
TIMES = ("started", "stepping", "ended", "last_sign", "last_logged", "idle_since")


class RunFiles:
    """Writes the files of one run. Times are seconds after T0, or unix seconds."""

    def __init__(self, path: Path, **facts: object):
        self.run = RunDir(path)
        (path / "attempts").mkdir(parents=True)
        (path / "checkpoints").mkdir()
        info = run_info(**{"id": path.name, "name": path.parent.name, "created": T0, "job_ids": ["7"], **facts})
        (path / "run.json").write_text(json.dumps(info))
        (path / "config.yaml").write_text("job:\n  name: train\n  kind: train\n")
        self.events: list[dict[str, Any]] = []

    def event(self, at: float, name: str, attempt: int | None = None, **facts: object) -> None:
        number = {} if attempt is None else {"attempt": attempt}
        self.events.append({"time": T0 + at, "event": name, **number, **facts})
        self.run.events_file.write_text("".join(json.dumps(event) + "\n" for event in self.events))

    def attempt(self, number: int, claimed: float | None, job: str = "7", restart: int = 0, **fields: Any) -> None:
        folder = self.run.attempt(number).path
        folder.mkdir()
        if claimed is not None:
            at = claimed if claimed > T0 else T0 + claimed
            (folder / "job").write_text(f"{job} {restart} {at:.6f}\n")
        values = {
            name: T0 + value if name in TIMES and value is not None and value < T0 else value
            for name, value in fields.items()
        }
        nodes = values.pop("nodes", ["n1", "n2"])
        record = Attempt(
            number, **{"job_id": job, "restart_count": restart, "gpus": GPUS, "nodes": nodes, "kind": "train", **values}
        )
        (folder / "attempt.json").write_text(json.dumps(asdict(record)))

    def config(self, **sections: object) -> None:
        """Write its config anew, with these sections beside those of a training."""
        self.run.config_file.write_text(json.dumps({"job": {"name": "train", "kind": "train"}, **sections}))


def interrupted_run(path: Path) -> RunDir:
    """A run that crashed, was restarted in place, preempted, hung, lost a node, could not start, diverged, and was resumed."""
    files = RunFiles(path)
    files.event(0, "submitted", job_id="7")
    stages = {"interpreter and imports": 10.0, "rendezvous": 5.0, "restore": 5.0}

    # 1: 100 s in the queue; crashes at 300, 50 steps after its only checkpoint.
    files.attempt(1, 100, started=110, stepping=140, start_up_s=stages, first_step=0, last_step=150, idle_since=300)
    _end(files, 1, 305, "crash", "in-place", committed_step=100)
    files.event(140, "training started", 1, step=0)
    files.event(250, "checkpoint", 1, step=100, seconds=5.0, stall_s=2.0)

    # 2: in place; does 50 steps again until 380, evaluates for 10 s, is preempted and saves at its end for 8 s.
    files.attempt(2, 310, started=315, stepping=330, start_up_s=stages, first_step=100, last_step=250)
    _end(files, 2, 505, "preempted", "requeue", committed_step=250)
    files.event(330, "training started", 2, step=100)
    files.event(380, "caught up", 2, step=150)
    files.event(400, "evaluated", 2, step=170, seconds=10.0)
    files.event(500, "checkpoint", 2, step=250, seconds=8.0, stall_s=1.0)
    files.event(501, "training stopped", 2, step=250)

    # 3: requeued; a rank hangs at 800.
    files.attempt(3, 630, restart=1, started=640, stepping=660, first_step=250, last_step=390, idle_since=800)
    _end(files, 3, 840, "hang", "requeue", committed_step=250)
    files.event(660, "training started", 3, step=250)

    # 4: does 140 steps again until 1130; its node dies at 1300, and only attempt 5 closes its record.
    files.attempt(4, 960, restart=2, started=970, stepping=990, first_step=250, last_step=550, last_sign=1300)
    _end(files, 4, 1505, "node failure", "restarting", committed_step=550)
    files.event(990, "training started", 4, step=250)
    files.event(1130, "caught up", 4, step=390)

    # 5: cannot start.
    files.attempt(5, 1500, restart=3, started=1502, nodes=["n1", "n3"])
    _end(files, 5, 1520, "bad node", "requeue")

    # 6: goes back 50 steps at 1700, has done them again at 1750, and crashes for good 50 steps after its last checkpoint.
    files.attempt(6, 1600, restart=4, started=1610, stepping=1630, first_step=550, last_step=700)
    _end(files, 6, 1800, "crash", "end", committed_step=650)
    files.event(1630, "training started", 6, step=550)
    files.event(1700, "rolled back", 6, step=550, from_step=600)
    files.event(1750, "caught up", 6, step=600)
    files.event(1780, "checkpoint", 6, step=650, seconds=10.0, stall_s=0.0)

    # 7: resumed by a person an hour later; does the 50 steps again until 5080, and finishes.
    files.event(5000, "resume asked")
    files.event(5001, "submitted", job_id="8")
    files.attempt(7, 5010, job="8", started=5020, stepping=5040, first_step=650, last_step=900)
    _end(files, 7, 5210, "finished", "done", committed_step=900)
    files.event(5040, "training started", 7, step=650)
    files.event(5080, "caught up", 7, step=700)
    files.event(5200, "checkpoint", 7, step=900, seconds=20.0, stall_s=1.0)
    files.event(5200, "training finished", 7, step=900)
    return files.run


def _end(files: RunFiles, number: int, ended: float, reason: str, verdict: str, **fields: object) -> None:
    path = files.run.attempt(number).record_file
    record = {**json.loads(path.read_text()), "ended": T0 + ended, "reason": reason, "verdict": verdict, **fields}
    path.write_text(json.dumps(record))


def check_time_adds_up(run: RunDir) -> Goodput:
    """Its time by cause, which has to add up to the time from its submission, or its first start, to its last end."""
    found = goodput_of(run)
    tries = all_attempts(run)
    submitted = [event["time"] for event in run.events() if event["event"] == Event.SUBMITTED]
    begin = submitted[0] if submitted else tries[0].started
    wall = (tries[-1].ended or 0.0) - begin
    assert abs(math.fsum(found.seconds.values()) - wall) <= WITHIN * wall, (found.seconds, wall)
    trained = math.fsum((each.ended or 0.0) - (each.stepping or each.ended or 0.0) for each in tries)
    stepping = wall - math.fsum(found.seconds.get(cause, 0.0) for cause in BEFORE_STEPS)
    assert stepping <= trained + WITHIN * wall, (found.seconds, trained)
    assert found.seconds[Cause.PRODUCTIVE] > 0 and not found.running
    return found


BEFORE_STEPS = (Cause.QUEUE, Cause.STOPPED, Cause.STARTUP, Cause.BETWEEN)
