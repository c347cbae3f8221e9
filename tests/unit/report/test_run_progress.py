"""How far runs are and why they wait, as `status` and `sweep status` tell it."""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli.columns import table_lines
from slurmtrain.report.progress import Progress, lowest
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.pending_reasons import in_words
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import RUN_ID, Job, add_attempt, no_waiting, printed, shown, submitted_run

TRAINED = (
    {"step": 50, "loss": 2.5, "tokens_per_s": 900.0, "step_time_s": 9.0},
    {"step": 50, "valid_loss": 2.25, "valid_tokens": 7},
    {"step": 60, "loss": 2.125, "tokens_per_s": 12345.0, "step_time_s": 2.0},
)


def text_of(*logged: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in logged)


# From the log.

UNKNOWN = dict.fromkeys(("step", "loss", "valid_loss", "tokens_per_s", "step_time_s", "eta_s"))
KNOWN = {"step": 60, "loss": 2.125, "valid_loss": 2.25, "tokens_per_s": 12345.0, "step_time_s": 2.0, "eta_s": 280.0}
STOPPED = {**KNOWN, "tokens_per_s": None, "step_time_s": None, "eta_s": None}
ODD = '{"step": 4, "loss": 1.5, "step_time_s": 1.0}\n{"step": 5, "loss": NaN, "step_time_s": NaN}\n'
ODD += '{"step": "x", "valid_loss": "y"}\n{"step": 6, "lo'


LOGGED: list[tuple[str, int | None, str, dict[str, Any]]] = [
    # metrics.jsonl, steps of the run, state of its job -> what `status` shows
    (text_of(*TRAINED), 200, "RUNNING", KNOWN),
    (text_of(*TRAINED), 200, "PENDING", STOPPED),  # an earlier speed says nothing about now
    (text_of(*TRAINED), 200, "logged before it began", STOPPED),
    (text_of(*TRAINED), None, "RUNNING", {**KNOWN, "eta_s": None}),
    ("", 200, "RUNNING", UNKNOWN),
    (ODD, 10, "RUNNING", {**UNKNOWN, "loss": "NaN"}),
    (text_of(*TRAINED), 200, "SUSPENDED", STOPPED),  # no end in sight
]


@pytest.mark.parametrize("case", LOGGED)
def test_a_run_tells_its_step_losses_speed_and_the_time_left_as_far_as_they_are_known(
    case: tuple[str, int | None, str, dict[str, Any]], tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, steps, state, shows = case
    no_waiting(monkeypatch)
    job = Job.waiting(tmp_path / "runs", slurm, monkeypatch)
    job.run.update_info(steps=steps)
    slurm.add("7", state="RUNNING" if "before" in state else state)
    ended: dict[str, Any] = {"ended": time.time(), "verdict": "requeue"} if state == "PENDING" else {}
    job.attempt(started=time.time() - 60, **ended)
    job.run.metrics_file.write_text(text)
    if "before" in state:
        os.utime(job.run.metrics_file, (1000.0, 1000.0))
    found = shown("status", RUN_ID)
    assert {name: found[name] for name in shows} == shows and found["steps"] == steps


def test_the_best_point_so_far_is_by_validation_loss_where_there_is_one() -> None:
    points = [(0, Progress(loss=1.0, valid_loss=3.0)), (1, Progress(loss=2.0, valid_loss=2.5)), (2, Progress(loss=0.1))]
    assert lowest(points) == ("valid loss", 2.5, 1)
    assert lowest([(4, Progress(loss=math.nan)), (5, Progress(loss=9.0))]) == ("loss", 9.0, 5)
    assert lowest([(4, Progress(loss=math.nan))]) is None


# Reasons.


@pytest.mark.parametrize(
    ("reason", "says", "advises"),
    [
        ("Priority", "higher priority", ""),
        ("BeginTime", "begin time", "`requeue R` starts it now"),
        ("DependencyNeverSatisfied", "will never start", "`cancel R`"),
        ("JobArrayTaskLimit", "limit of parallel points", ""),
        ("JobHeldUser", "owner", "`requeue R` releases"),
        ("JobHeldAdmin", "administrator", "only an administrator can release it"),
        ("launch failed requeued held", "could not start", "`requeue R`"),
        ("QOSMaxJobsPerUserLimit", "your jobs have reached the limit of its QOS", "have ended"),
        ("AssocGrpCpuLimit", "all jobs of its account", "have ended"),
        ("AssocGrpGRESMinutes", "the time of its account is used up", "ask"),
        ("AssocGrpCPURunMinutesLimit", "limit on remaining time", "have ended"),
        ("QOSMaxWallDurationPerJobLimit", "more than its QOS allows for a single job", "`cancel R`; ask for less"),
        ("PartitionTimeLimit", "exceeds that of its partition", "cluster.time_limit_min"),
        ("PartitionNodeLimit", "number or kind of nodes", "cluster.spare_nodes"),
        ("PartitionDown", "starts no jobs", "`sinfo`"),
        ("ReqNodeNotAvail, UnavailableNodes:n[0-3]", "down, drained or reserved", "`sinfo -R`"),
        ("ReqNodeNotAvail, Reserved for maintenance", "reserved for maintenance", "cluster.time_limit_min"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "drained", ""),
        ("BadConstraints", "no node meets its requirements", "cluster.constraint"),
        ("InvalidAccount", "account", "cluster.account"),
        ("InvalidQOS", "QOS", "cluster.qos"),
    ],
)
def test_a_reason_is_said_in_words_with_what_to_do(reason: str, says: str, advises: str) -> None:
    words = in_words(reason, "R")
    meaning, _, advice = words.partition(f" ({reason})")
    assert says in meaning and advises in advice and bool(advice) >= bool(advises)


# On the terminal.


def test_the_table_shows_how_far_each_run_is_and_why_one_waits(project: Path, slurm: FakeSlurm) -> None:
    def stamp(moment: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment))

    runs = [submitted_run(project, "cluster=a100x4", "train.steps=200", job_ids=[job_id]) for job_id in ("1", "2", "3")]
    trains, waits, _ = runs
    soon = time.time() + 7825
    add_attempt(trains, job_id="1", started=time.time() - 60, host="elsewhere", pid=1)
    trains.metrics_file.write_text(text_of(*TRAINED))
    slurm.add("1", state="RUNNING", start=stamp(time.time() - 60))
    slurm.add("2", reason="Resources", start=stamp(soon))
    slurm.add("3", reason="Priority", start=stamp(time.time() - 60))
    header, _, *rows = printed("status").splitlines()
    assert [row.split()[0] for row in rows] == sorted((run.id for run in runs), reverse=True)
    rows = sorted(rows, key=lambda row: [run.id for run in runs].index(row.split()[0]))
    assert len(slurm.calls("squeue")) == 1
    assert header.split() == "run name state step loss valid loss tokens/s ETA attempts".split()
    assert " ".join(rows[0].split()) == f"{trains.id} train running 60/200 2.1250 2.2500 12.3k 5 min 1 attempt 1, job 1"
    assert "waits for free resources (Resources); SLURM expects to start it in about 2 h 10 min (" in rows[1]
    assert rows[2].rstrip().endswith("jobs of higher priority come first (Priority)")  # its estimate has passed by
    found = {run["id"]: run for run in shown("status")}
    assert [found[run.id]["expected_start"] for run in runs] == [None, int(soon), None]
    assert found[trains.id]["eta_s"] == 280.0 and found[waits.id]["reason"] == "Resources"
    said = printed("status", trains.id)
    assert "  progress: step 60/200, loss 2.1250, valid loss 2.2500, tokens/s 12.3k, ETA 5 min; logged " in said


def test_the_points_of_a_sweep_are_summed_up_first(project: Path, slurm: FakeSlurm) -> None:
    sweep = json.loads(printed("-m", "cluster=a100x4", "train.steps=40,50,60", "submit", "--json"))
    for task in ("0", "1"):
        slurm.change(f"101_{task}", state="RUNNING", reason="None")
    slurm.change("101_2", reason="JobArrayTaskLimit")
    runs = [RunDir(path.parent) for path in sorted(Path(sweep["path"]).glob("*/run.json"))]
    assert [run.info()["steps"] for run in runs] == [40, 50, 60]
    for number, run in enumerate(runs[:2]):
        add_attempt(run, job_id=f"101_{number}", started=time.time() - 60, host="elsewhere", pid=1)
        logged = {"step": 10, "loss": 2.0 - number, "tokens_per_s": 50.0, "step_time_s": 60.0}
        run.metrics_file.write_text(text_of(logged))
    headline, _, header, _, *rows = printed("sweep", "status", "last").splitlines()
    # 30 + 40 + 60 steps of a minute, two at a time
    assert headline == f"{sweep['sweep']}: 2 running, 1 waiting; about 1 h 5 min left; lowest loss 1.0000 (point 1)"
    assert header.split() == "point train.steps state step loss tokens/s ETA attempts run".split()
    assert rows[0].split()[:9] == "0 40 running 10/40 2.0000 50 30 min 1".split()
    assert "its sweep has reached its limit of parallel points (JobArrayTaskLimit)" in rows[2]
    points = shown("sweep", "status", "last")["points"]
    assert [point["eta_s"] for point in points] == [1800.0, 2400.0, None] and points[2]["steps"] == 60


@pytest.fixture
def rows_of_status(project: Path, slurm: FakeSlurm) -> tuple[str, ...]:
    """What the rows begin with, newest first: a finished run, one called other that waits, a sweep, a failed run."""

    def ended(run_id: str, *words: str, **fields: Any) -> str:
        run = submitted_run(project, "cluster=a100x4", *words, job_ids=["1"] if not fields else [])
        if fields:
            add_attempt(run, ended=2.0, sentence="x", **fields)
        run.path.rename(run.path.with_name(run_id))
        return run_id

    slurm.add("1", reason="Resources")
    failed = ended("20200101-000000-000aa", verdict="end", reason="crash")
    RunDir(project / "runs/train" / failed).update_info(created=1577836800.0)
    sweep = json.loads(printed("-m", "cluster=a100x4", "train.steps=40,50,60", "submit", "--json"))
    for number, path in enumerate(sorted(Path(sweep["path"]).glob("2*"))):
        (path / "metrics.jsonl").write_text(text_of({"step": 10, "loss": 2.0 - number}))
    other = ended("20990101-000000-000aa", "job.name=other")
    return ended("20990102-000000-000aa", verdict="done", reason="finished"), other, sweep["sweep"], failed


def test_status_shows_the_newest_first_and_a_sweep_as_one_row(rows_of_status: tuple[str, ...]) -> None:
    rows = printed("status").splitlines()[2:]
    assert [row.split()[0] for row in rows] == list(rows_of_status)
    assert re.search(r"sweep +3 points: 3 waiting; lowest loss 0\.0000 in 20", rows[2])
    assert printed("status", rows_of_status[2]) == printed("sweep", "status", rows_of_status[2])


# What is asked for -> which of these rows are shown, and how many more there are.
ASKED = [
    ("--limit 2", [0, 1], "\n2 more: --limit 4 shows all"),
    ("--limit 4", [0, 1, 2, 3], ""),
    ("--name oth*", [1], ""),
    ("--state waiting", [1, 2], ""),
    ("--state failed", [3], ""),
    ("--since 7d", [0, 1, 2], ""),
    ("--since 7d --state waiting --limit 1", [1], "\n1 more: --limit 2 shows all"),
]


def test_status_shows_only_what_is_asked_for_and_how_many_more_there_are_and_a_point_its_own_values(
    rows_of_status: tuple[str, ...], project: Path
) -> None:
    for words, shown_rows, left in ASKED:
        text = printed("status", *words.split())
        rows = [line.split()[0] for line in text.partition("\n\n")[0].splitlines()[2:]]
        assert rows == [rows_of_status[i] for i in shown_rows], words
        assert left in text and ("more" in text) == bool(left), words
        if 2 not in shown_rows:
            found = [run["id"] for run in shown("status", *words.split())]
            assert found == [rows_of_status[i] for i in reversed(shown_rows)], words
    point = (project / "runs" / rows_of_status[2] / "points.jsonl").read_text().splitlines()[1]
    assert f"\n  sweep: point 1 of {rows_of_status[2]}: train.steps=50\n" in printed(
        "status", json.loads(point)["run_id"]
    )


def test_a_terminal_that_is_wide_has_the_last_column_beside_and_a_narrow_one_below() -> None:
    header = ["run", "step", "loss", ""]
    rows = [["a", "1", "", "one two three four five six seven eight"], ["b", "", "", "x"]]
    beside = ["run   step", "-" * 52, "a     1      one two three four five six seven eight", "b            x"]
    assert table_lines(header, rows) == beside
    broken = ["a     1      one two three four five six", "             seven eight", "b            x"]
    assert table_lines(header, rows, 43)[2:] == broken
    below = ["-" * 37, "a     1", "    one two three four five six seven", "    eight", "b            x"]
    assert table_lines(header, rows, 40)[1:] == below


def test_what_a_program_has_left_as_its_last_words_steers_no_terminal() -> None:
    assert table_lines(["run", ""], [["a", "x\n\x1b[31mred"]])[2] == "a     x  [31mred"
