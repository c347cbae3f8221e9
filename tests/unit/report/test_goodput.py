"""Each second of a run has one cause, whatever has happened to it and whatever its files say."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.report.causes import AttemptTimes, History, of_history
from slurmtrain.runs.attempts import Attempt
from tests.support.fake_slurm import FakeSlurm
from tests.support.interrupted_run import GPUS, T0, RunFiles, interrupted_run
from tests.support.runs import RUN_ID, at_moment, no_waiting, shown


@pytest.fixture
def runs(tmp_path: Path, slurm: FakeSlurm, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    no_waiting(monkeypatch)
    return tmp_path / "runs"


@pytest.fixture
def files(runs: Path) -> RunFiles:
    made = RunFiles(runs / "train" / RUN_ID, user="root")
    made.event(0, "submitted", job_id="7")
    return made


def goodput(monkeypatch: pytest.MonkeyPatch, at: float = 10_000) -> dict[str, Any]:
    """What `status` says of the time of the only run, so many seconds after T0; its seconds add up to those on the clock."""
    with monkeypatch.context() as clock:
        at_moment(clock, T0 + at)
        found: dict[str, Any] = shown("status", "last")["goodput"]
    assert math.fsum(found["seconds"].values()) == pytest.approx(found["wall_s"], abs=1e-3)
    return found


def rounded(amounts: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in amounts.items()}


def test_the_time_of_a_run_with_every_kind_of_interruption_adds_up_by_cause_and_by_why(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_run(runs / "train" / RUN_ID)
    found = goodput(monkeypatch)
    assert found["wall_s"] == pytest.approx(5210) and not found["running"]
    assert rounded(found["seconds"]) == {
        "queue": 100 + 125 + 120 + 200 + 80 + 10,
        "startup": 40 + 20 + 30 + 30 + 20 + 30 + 30,
        "productive": 105 + 53 + 10 + 92 + 1 + 140 + 170 + 70 + 50 + 100,
        "checkpoint": 2 + 8 + 20,
        "evaluation": 10,
        "redone": 50 + 140 + 50 + 40,
        "hung": 40,
        "idle_end": 5 + 4 + 10,
        "between": 5,
        "stopped": 3200,
    }
    assert found["gpu_hours"] == pytest.approx(GPUS * found["held_s"] / 3600)
    assert found["goodput"] == pytest.approx(791 / (5210 - 635 - 3200))
    assert found["interruptions"] == {"crash": 2, "preempted": 1, "hang": 1, "node failure": 1, "bad node": 1}
    held = {
        "crash": 5 + 5 + 20 + 50 + 30 + 40,  # leaving, the way back in place; and after a person had resumed it
        "preempted": 4 + 30,
        "hang": 40 + 30 + 140,
        "node failure": 20,  # the start that failed
        "bad node": 30,
        "rolled back": 50,
    }
    assert rounded(found["lost_gpu_seconds"]) == {why: GPUS * seconds for why, seconds in held.items()}
    queued = {"preempted": 125, "hang": 120, "node failure": 200, "bad node": 80}
    assert rounded(found["lost_s"]) == {why: seconds + queued.get(why, 0) for why, seconds in held.items()}


def test_the_steps_after_the_last_checkpoint_of_a_run_that_has_ended_for_good_are_lost(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = interrupted_run(runs / "train" / RUN_ID)
    (run.attempt(7).path / "job").unlink()
    (run.attempt(7).record_file).unlink()
    found = goodput(monkeypatch)
    assert found["seconds"]["lost"] == pytest.approx(30)
    assert found["lost_gpu_seconds"]["crash"] == pytest.approx(GPUS * (5 + 5 + 20 + 50 + 30))


FINISHED: dict[str, Any] = {"reason": "finished", "verdict": "done"}
VERDICTS = {"finished": "done", "preempted": "requeue", "cancelled": "end", "superseded": "end", "crash": "end"}
RESUMED = ((9000, "resume asked"), (9001, "submitted", None, {"job_id": "8"}))
TRAINED = ((20, "training started", 1, {"step": 0}), (130, "training finished", 1, {"step": 11}))


def tried(
    claimed: float, started: float, ended: float | None = None, why: str | None = None, **fields: Any
) -> dict[str, Any]:
    """An attempt, in seconds after T0."""
    verdict = None if why is None else VERDICTS.get(why, "requeue")
    return {"claimed": claimed, "started": started, "ended": ended, "reason": why, "verdict": verdict, **fields}


A_TRAINING = tried(10, 12, 130, "finished", stepping=20, first_step=0, last_step=11)


def case(
    what: str,
    *tries: dict[str, Any],
    seconds: dict[str, float] | None = None,
    events: tuple[Any, ...] = (),
    slurm: str = "",
    at: float = 10_000,
    **more: Any,
) -> Any:
    """Args: slurm: the state of job 7, or of the job that is named; at: when it is looked at; more: of `goodput`."""
    expected = more if seconds is None else {**more, "seconds": seconds}
    return pytest.param((tries, events, slurm, at, expected), id=what)


CASES = [
    case("it waits", slurm="7 PENDING", at=50, seconds={"queue": 50}, running=True, gpu_hours=0, goodput=None),
    case("cancelled in the queue", at=50, running=False, wall_s=0),
    case("it runs", tried(10, 12, stepping=20), slurm="7 RUNNING", at=100,
         seconds={"queue": 10, "startup": 10, "productive": 80}, running=True),
    case("requeued, and waits", tried(10, 12, 60, "preempted", stepping=20), slurm="7 PENDING", at=100,
         seconds={"queue": 50, "startup": 10, "productive": 40}, running=True, lost_s={"preempted": 40}),
    case("the ranks of a node that was cut off go on while the job has started elsewhere",
         tried(10, 12, 300, "superseded", stepping=20, first_step=0),
         tried(100, 105, 200, "finished", restart=1, stepping=110),
         seconds={"queue": 10, "startup": 20, "productive": 170}),
    case("clocks were set", tried(500, 20, 60, "preempted", stepping=30, last_step=3),
         tried(40, 9e6, 8e6, "finished", restart=1, stepping=50),
         events=((-1000, "caught up", 2, {"step": 3}),
                 (2e6, "checkpoint", 2, {"step": 9, "seconds": 1e9, "stall_s": 1e9})),
         at=1000, wall_s=1000),
    case("no event tells when it had caught up: by its pace",
         tried(10, 12, 120, "crash", stepping=20, first_step=0, last_step=50) | {"verdict": "in-place"},
         tried(120, 121, 325, "finished", stepping=125, first_step=40, last_step=80),
         seconds={"queue": 10, "startup": 15, "redone": 50, "productive": 250}),
    case("resumed by a person, and waits", tried(10, 10, 20, "crash"), events=RESUMED, slurm="8 PENDING",
         seconds={"queue": 10 + 1000, "startup": 10, "stopped": 8980}),
    case("died without a word, and resumed by a person",
         tried(10, 10, 9010, "node failure", stepping=10, first_step=0, committed_step=90, last_sign=100, last_step=90),
         tried(9010, 9010, 9100, "finished", job="8", stepping=9020, first_step=90, last_step=150),
         events=RESUMED, seconds={"queue": 10 + 10, "productive": 90 + 80, "stopped": 8900, "startup": 10},
         lost_s={"node failure": 10}),
    case("cancelled while it waited, and resumed by a person",
         tried(9010, 9020, 9500, "cancelled", job="8", stepping=9020),
         events=((100, "cancel asked"), *RESUMED),
         seconds={"queue": 100 + 10, "stopped": 8900, "startup": 10, "productive": 480}),
    case("it evaluates", tried(10, 12, 60, "finished", stepping=20, kind="evaluate"),
         seconds={"queue": 10, "startup": 10, "evaluation": 40}),
    case("a reason that nobody knows", tried(10, 12, 60, "\x1b[2J", stepping=20), interruptions={"not recorded": 1}),
    case("a first step as long as the others", A_TRAINING, events=(*TRAINED, (30, "first step done", 1, {"step": 1})),
         seconds={"queue": 10, "startup": 10, "productive": 110}),
    case("a first step that takes a minute: what it takes longer is start-up", A_TRAINING,
         events=(*TRAINED, (80, "first step done", 1, {"step": 1})),
         seconds={"queue": 10, "startup": 10 + 60 - 5, "productive": 55}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_runs_time_went_into(
    case: tuple[Any, ...], files: RunFiles, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, events, slurm_says, at, expected = case
    for number, fields in enumerate(tries, 1):
        files.attempt(number, **fields)
    for moment, name, *rest in events:
        files.event(moment, name, *rest[:1], **(rest[1] if len(rest) > 1 else {}))
    if RESUMED[1] in events:
        files.run.update_info(job_ids=["7", "8"])
    if slurm_says:
        job_id, state = slurm_says.split()
        slurm.add(job_id, state=state)
    found = goodput(monkeypatch, at)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-3), name


def test_an_attempt_that_is_gone_counts_until_it_last_wrote_something(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.attempt(1, 10, started=12, stepping=20, first_step=0)
    log = files.run.attempt(1).rank_log(0)
    log.write_text("step 1\n")
    for path in (log, files.run.attempt(1).record_file):
        os.utime(path, (T0 + 60, T0 + 60))
    found = goodput(monkeypatch)
    assert rounded(found["seconds"]) == {"queue": 10, "startup": 10, "productive": 40}
    assert not found["running"] and found["interruptions"] == {"not recorded": 1}


def test_a_program_is_productive_between_its_reports_and_unknown_without_any(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.config(job={"name": "train", "kind": "command", "command": "bash loop.sh"})
    files.attempt(1, 10, started=15, ended=120, **FINISHED, kind="command")
    found = goodput(monkeypatch)
    assert rounded(found["seconds"]) == {"queue": 10, "startup": 5, "unknown": 105}
    assert found["goodput"] is None and found["gpu_hours"] == pytest.approx(110 * GPUS / 3600)
    record = json.loads(files.run.attempt(1).record_file.read_text())
    record |= {"reason": "preempted", "verdict": "requeue", "last_logged": T0 + 100, "reported_step": 9}
    files.run.attempt(1).record_file.write_text(json.dumps(record))
    files.attempt(
        2, 220, restart=1, started=225, reported_before=9, last_logged=390, ended=400, **FINISHED, kind="command"
    )
    files.event(40, "first report", 1, step=1)
    files.event(240, "first report", 2, step=5)
    files.event(300, "caught up", 2, step=9)
    assert rounded(goodput(monkeypatch)["seconds"]) == {
        "queue": 10 + 100,
        "startup": 5 + 5,
        "unknown": 25 + 20 + 15 + 10,
        "productive": 60 + 90,
        "redone": 60,
    }


MOMENTS = st.one_of(st.none(), st.integers(-10, 300).map(float), st.just(9e8))
STEPS = st.one_of(st.none(), st.integers(0, 50))
ATTEMPTS = st.fixed_dictionaries(
    {
        "claimed": st.integers(0, 250).map(float),
        **dict.fromkeys(("ended", "stepping", "last_sign", "last_logged", "idle_since"), MOMENTS),
        **dict.fromkeys(("first_step", "last_step", "committed_step", "reported_before"), STEPS),
        "reason": st.sampled_from([None, "crash", "hang", "preempted", "node failure", "finished", "odd"]),
        "verdict": st.sampled_from([None, "done", "end", "requeue", "in-place", "next"]),
        "restart_count": st.integers(0, 2),
        "start_up_s": st.dictionaries(st.sampled_from(["rendezvous", "restore"]), st.floats(-5, 1e300), max_size=2),
    }
)
NAMES = (
    *("checkpoint", "evaluated", "caught up", "rolled back", "first step done", "first report", "training started"),
    *("training finished", "training stopped", "resume asked", "submitted"),
)
EVENTS = st.fixed_dictionaries(
    {
        "event": st.sampled_from(NAMES),
        "time": st.integers(-100, 400).map(lambda at: T0 + at),
        "attempt": st.one_of(st.integers(0, 5), st.just("x")),
        "step": st.one_of(st.integers(-1, 60), st.just("x")),
        "seconds": st.one_of(st.none(), st.floats(-10, 1e6), st.just("long")),
        "stall_s": st.one_of(st.none(), st.floats(-10, 1e6)),
    }
)
TIMES = ("ended", "stepping", "last_sign", "last_logged", "idle_since")


@given(
    tries=st.lists(ATTEMPTS, max_size=5),
    events=st.lists(EVENTS, max_size=25),
    alive=st.sampled_from([None, True, False]),
    kind=st.sampled_from([None, "train", "command", "evaluate"]),
    submitted=MOMENTS,
)
def test_whatever_is_on_record_each_second_counts_once(
    tries: list[dict[str, Any]], events: list[Any], alive: bool | None, kind: str | None, submitted: float | None
) -> None:
    found = []
    for number, values in enumerate(tries, 1):
        moved = {name: T0 + at if name in TIMES and at is not None else at for name, at in values.items()}
        begun = moved.pop("claimed")
        record = Attempt(number, job_id="7", started=T0 + begun + 1, nodes=["n1"], **moved)
        found.append(AttemptTimes(T0 + begun, record, ("7", record.restart_count), record.last_sign, 4.0))
    history = History(None if submitted is None else T0 + submitted, kind, False, found, events)
    goodput = of_history(history, alive=alive, now=T0 + 500)
    assert all(a.end == b.start for a, b in pairwise(goodput.segments))
    assert all(each.seconds > 0 for each in goodput.segments)
    wall = goodput.segments[-1].end - goodput.segments[0].start if goodput.segments else 0.0
    assert goodput.wall_s == pytest.approx(wall, abs=1e-3) and wall <= 500 + 10
    assert goodput.share is None or 0 <= goodput.share <= 1
    assert math.fsum(goodput.lost_s.values()) <= wall + 1e-3
    late = goodput.since(T0 + 100)
    after = sum(max(0.0, each.end - max(each.start, T0 + 100)) for each in goodput.segments)
    assert late.wall_s == pytest.approx(after, abs=1e-3)
