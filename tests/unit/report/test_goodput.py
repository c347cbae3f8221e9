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

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.goodput.causes import Cause, Goodput, over_all
from slurmtrain.report.goodput.history import AttemptTimes, History
from slurmtrain.report.goodput.run import goodput_of, of_history
from slurmtrain.report.usage import Grouping, usage_of
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.run_dir import RunDir
from tests.support.interrupted_run import GPUS, T0, RunFiles, interrupted_run

NOW = T0 + 10_000


def check_adds_up(found: Goodput, begin: float, end: float) -> None:
    """The segments follow each other from `begin` to `end`, seconds after T0, and the sums are theirs."""
    assert (found.segments[0].start - T0, found.segments[-1].end - T0) == (begin, end)
    assert all(a.end == b.start for a, b in pairwise(found.segments))
    assert all(each.seconds > 0 for each in found.segments)
    assert found.wall_s == pytest.approx(end - begin, abs=1e-3)


def rounded(amounts: object) -> dict[str, float]:
    assert isinstance(amounts, dict)
    return {str(name): round(value, 3) for name, value in amounts.items()}


def causes(found: Goodput) -> list[tuple[int, float, float, str]]:
    return [(each.attempt, round(each.start - T0, 3), round(each.end - T0, 3), each.cause) for each in found.segments]


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    made = RunFiles(tmp_path / "train" / "20260101-000000-000aa")
    made.event(0, "submitted", job_id="7")
    return made


def test_the_time_of_a_run_with_every_kind_of_interruption_adds_up_by_cause(tmp_path: Path) -> None:
    found = goodput_of(interrupted_run(tmp_path / "train" / "run"), now=NOW)
    check_adds_up(found, 0, 5210)
    assert rounded(found.seconds) == {
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
    assert found.gpu_hours == pytest.approx(GPUS * found.held_s / 3600)
    assert found.share == pytest.approx(791 / (5210 - 635 - 3200))
    assert found.effective_share == pytest.approx(791 / (5210 - 3200))
    assert not found.running


def test_what_an_interruption_has_cost_is_told_by_why_the_attempt_ended(tmp_path: Path) -> None:
    found = goodput_of(interrupted_run(tmp_path / "train" / "run"), now=NOW)
    assert found.interruptions == {"crash": 2, "preempted": 1, "hang": 1, "node failure": 1, "bad node": 1}
    held = {
        "crash": 5 + 5 + 20 + 50 + 30 + 40,  # leaving, the way back in place; and after a person had resumed it
        "preempted": 4 + 30,
        "hang": 40 + 30 + 140,
        "node failure": 20,  # the start that failed
        "bad node": 30,
        "rolled back": 50,
    }
    assert rounded(found.lost_gpu_seconds) == {why: GPUS * seconds for why, seconds in held.items()}
    queued = {"preempted": 125, "hang": 120, "node failure": 200, "bad node": 80}
    assert rounded(found.lost_s) == {why: seconds + queued.get(why, 0) for why, seconds in held.items()}


def test_the_stages_of_the_start_ups_add_up_to_the_start_up(tmp_path: Path) -> None:
    found = goodput_of(interrupted_run(tmp_path / "train" / "run"), now=NOW)
    assert math.fsum(found.startup_s.values()) == pytest.approx(found.seconds[Cause.STARTUP])
    assert found.startup_s["interpreter and imports"] == 20 and found.startup_s["rendezvous"] == 10
    assert found.startup_s["unfinished"] == 20


def test_launching_a_run_on_this_machine_is_start_up_of_the_attempt_that_it_leads_to(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "train" / "20260101-000000-000aa", backend="local", job_ids=[])
    files.event(0, "submitted")
    here: dict[str, Any] = {"nodes": ["laptop"], "job": None, "gpus": 0.0, "start_up_s": {"restore": 1.0}}
    files.attempt(
        1, 3, started=4, stepping=9, ended=59, reason="cancelled", verdict="end", first_step=0, last_step=5, **here
    )
    files.event(159, "resume asked")
    files.attempt(
        2,
        161,
        started=162,
        stepping=166,
        ended=200,
        reason="finished",
        verdict="done",
        first_step=5,
        last_step=9,
        **here,
    )
    found = goodput_of(files.run, now=NOW)
    assert causes(found) == [
        (1, 0, 9, "startup"),
        (1, 9, 59, "productive"),
        (1, 59, 159, "stopped"),
        (2, 159, 166, "startup"),
        (2, 166, 200, "productive"),
    ]
    assert rounded(found.startup_s) == {"launch": 8 + 6, "restore": 2}
    assert rounded(found.lost_s) == {"cancelled": 7}
    (row,) = usage_of([files.run], by=Grouping.NODE, now=NOW).rows  # none of it is missing by node
    assert row.who == "laptop" and row.goodput.held_s == pytest.approx(found.held_s) == 100


def test_the_steps_after_the_last_checkpoint_of_a_run_that_has_ended_for_good_are_lost(tmp_path: Path) -> None:
    run = interrupted_run(tmp_path / "train" / "run")
    (run.attempt(7).path / "job").unlink()
    (run.attempt(7).record_file).unlink()
    found = goodput_of(run, now=NOW)
    assert causes(found)[-2:] == [(6, 1750, 1770, "productive"), (6, 1770, 1800, "lost")]
    assert found.lost_gpu_seconds["crash"] == pytest.approx(GPUS * (5 + 5 + 20 + 50 + 30))


def test_what_the_first_step_takes_longer_counts_as_start_up(files: RunFiles) -> None:
    files.attempt(
        1, 10, started=12, stepping=20, ended=130, reason="finished", verdict="done", first_step=0, last_step=11
    )
    files.event(20, "training started", 1, step=0)
    files.event(30, "first step done", 1, step=1)  # the other ten took 10 s each, less the save at the end
    files.event(130, "training finished", 1, step=11)
    found = goodput_of(files.run, now=NOW)
    assert found.seconds[Cause.STARTUP] == pytest.approx(10)  # it took no longer than they
    files.events[2]["time"] = T0 + 80
    files.event(130, "hook ended", 1)
    found = goodput_of(files.run, now=NOW)
    assert found.startup_s["first step"] == pytest.approx(60 - 50 / 10)
    check_adds_up(found, 0, 130)


def test_a_run_that_waits_has_waited_until_now(files: RunFiles) -> None:
    found = goodput_of(files.run, alive=True, now=T0 + 50)
    assert causes(found) == [(0, 0, 50, "queue")] and found.running and found.gpu_hours == 0
    assert found.share is None


def test_a_run_that_was_cancelled_in_the_queue_has_no_time(files: RunFiles) -> None:
    assert goodput_of(files.run, alive=False, now=NOW).segments == ()


def test_a_running_attempt_counts_until_now(files: RunFiles) -> None:
    files.attempt(1, 10, started=12, stepping=20, first_step=0)
    files.run.metrics_file.write_text('{"step": 40, "loss": 1.0}\n')
    found = goodput_of(files.run, alive=True, now=T0 + 100)
    assert causes(found) == [(0, 0, 10, "queue"), (1, 10, 20, "startup"), (1, 20, 100, "productive")]
    assert found.running and found.gpu_seconds[Cause.PRODUCTIVE] == 80 * GPUS


def test_an_attempt_that_is_gone_counts_until_it_last_wrote_something(files: RunFiles) -> None:
    files.attempt(1, 10, started=12, stepping=20, first_step=0)
    log = files.run.attempt(1).rank_log(0)
    log.write_text("step 1\n")
    for path in (log, files.run.attempt(1).record_file):
        os.utime(path, (T0 + 60, T0 + 60))
    found = goodput_of(files.run, alive=False, now=NOW)
    assert causes(found)[-1] == (1, 20, 60, "productive")
    assert not found.running and found.interruptions == {"not recorded": 1}


def test_a_requeued_run_waits_until_now(files: RunFiles) -> None:
    files.attempt(1, 10, started=12, stepping=20, ended=60, reason="preempted", verdict="requeue")
    found = goodput_of(files.run, now=T0 + 100)
    assert causes(found)[-1] == (1, 60, 100, "queue") and found.running
    assert found.lost_s == {"preempted": 40}
    assert causes(goodput_of(files.run, alive=False, now=T0 + 100))[-1] == (1, 20, 60, "productive")


def test_two_attempts_at_once_count_once(files: RunFiles) -> None:
    """The ranks of a node that was cut off go on while the job has started elsewhere."""
    files.attempt(1, 10, started=12, stepping=20, ended=300, reason="superseded", verdict="end", first_step=0)
    files.attempt(2, 100, restart=1, started=105, stepping=110, ended=200, reason="finished", verdict="done")
    found = goodput_of(files.run, now=NOW)
    check_adds_up(found, 0, 200)
    assert causes(found)[-3:] == [(1, 20, 100, "productive"), (2, 100, 110, "startup"), (2, 110, 200, "productive")]


def test_clocks_that_are_set_make_no_time(files: RunFiles) -> None:
    files.attempt(1, 500, started=20, stepping=30, ended=60, reason="preempted", verdict="requeue", last_step=3)
    files.attempt(2, 40, restart=1, started=9e6, stepping=50, ended=8e6, reason="finished", verdict="done")
    files.event(-1000, "caught up", 2, step=3)
    files.event(2e6, "checkpoint", 2, step=9, seconds=1e9, stall_s=1e9)
    found = goodput_of(files.run, now=T0 + 1000)
    check_adds_up(found, 0, 1000)


def test_a_run_without_the_events_of_today_is_estimated_by_its_pace(files: RunFiles) -> None:
    files.attempt(
        1, 10, started=12, stepping=20, ended=120, reason="crash", verdict="in-place", first_step=0, last_step=50
    )
    files.attempt(
        2, 120, started=121, stepping=125, ended=325, reason="finished", verdict="done", first_step=40, last_step=80
    )
    found = goodput_of(files.run, now=NOW)
    assert found.seconds[Cause.REDONE] == pytest.approx(10 * 200 / 40)
    check_adds_up(found, 0, 325)


def test_the_gpus_of_an_attempt_that_does_not_say_them_are_those_of_the_script(files: RunFiles) -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=a100:4\n"
    files.run.script.write_text(script)
    files.attempt(1, 10, started=12, stepping=20, ended=120, reason="finished", verdict="done", gpus=None)
    assert goodput_of(files.run, now=NOW).gpu_count == 8
    (files.run.path.parent / "sweep.json").write_text('{"pack": 4}')
    files.run.info_file.write_text(json.dumps({**files.run.info(), "packed": True}))
    assert goodput_of(files.run, now=NOW).gpu_count == 2


def program(files: RunFiles) -> None:
    files.run.config_file.write_text("job:\n  name: train\n  kind: command\n  command: bash loop.sh\n")


def test_a_program_that_reports_nothing_is_unknown_and_not_productive(files: RunFiles) -> None:
    program(files)
    files.attempt(1, 10, started=15, ended=120, reason="finished", verdict="done")
    found = goodput_of(files.run, now=NOW)
    assert causes(found) == [(0, 0, 10, "queue"), (1, 10, 15, "startup"), (1, 15, 120, "unknown")]
    assert found.share is None and found.gpu_hours == pytest.approx(110 * GPUS / 3600)


@pytest.mark.parametrize("local", [True, False])
def test_a_run_that_died_without_a_word_was_stopped_until_a_person_resumed_it(tmp_path: Path, local: bool) -> None:
    facts: dict[str, Any] = {"backend": "local", "job_ids": []} if local else {}
    files = RunFiles(tmp_path / "train" / "20260101-000000-000aa", **facts)
    files.event(0, "submitted")
    jobs: list[dict[str, Any]] = [{"job_id": None if local else name} for name in ("7", "8")]
    died: dict[str, Any] = {
        "ended": 9010,
        "last_sign": 100,
        "reason": "node failure",
        "verdict": "restarting",
        "last_step": 90,
    }
    files.attempt(1, 10, started=10, stepping=10, first_step=0, committed_step=90, **died, **jobs[0])
    files.event(9000, "resume asked")
    ended: dict[str, Any] = {"ended": 9100, "reason": "finished", "verdict": "done"}
    files.attempt(2, 9010, started=9010, stepping=9020, first_step=90, last_step=150, **ended, **jobs[1])
    found = goodput_of(files.run, now=NOW)
    launched = [(2, 9000, 9020, "startup")] if local else [(1, 9000, 9010, "queue"), (2, 9010, 9020, "startup")]
    assert causes(found)[2:-1] == [(1, 100, 9000, "stopped"), *launched]
    assert found.held_s <= 10 + 90 + 10 + 90 and found.lost_s["node failure"] <= 20


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_was_cancelled_while_it_waited_was_stopped_until_a_person_resumed_it(
    files: RunFiles, first: bool
) -> None:
    if not first:
        files.attempt(1, 10, started=10, ended=10, reason="preempted", verdict="requeue")
    files.event(100, "cancel asked")
    files.event(9000, "resume asked")
    files.event(9001, "submitted", job_id="8")
    files.attempt(2, 9010, job="8", started=9020, stepping=9020)
    files.event(9500, "cancel asked")
    begin = 0 if first else 10
    assert causes(goodput_of(files.run, now=NOW))[-5:-2] == [
        (0 if first else 1, begin, 100, "queue"),
        (0 if first else 1, 100, 9000, "stopped"),
        (0 if first else 1, 9000, 9010, "queue"),
    ]


def test_a_run_that_a_person_has_resumed_waits_from_then_on(files: RunFiles) -> None:
    files.attempt(1, 10, started=10, ended=20, reason="crash", verdict="end")
    files.event(9000, "resume asked")
    files.event(9001, "submitted", job_id="8")
    found = goodput_of(files.run, alive=True, now=NOW)
    assert causes(found)[-2:] == [(1, 20, 9000, "stopped"), (1, 9000, 10_000, "queue")] and found.running


def test_a_program_is_productive_between_its_reports(files: RunFiles) -> None:
    program(files)
    files.attempt(1, 10, started=15, ended=120, reason="preempted", verdict="requeue", last_logged=100, reported_step=9)
    files.attempt(2, 220, restart=1, started=225, reported_before=9, last_logged=390)
    files.event(40, "first report", 1, step=1)
    files.event(240, "first report", 2, step=5)
    files.event(300, "caught up", 2, step=9)
    path = files.run.attempt(2).record_file
    path.write_text(json.dumps({**json.loads(path.read_text()), "ended": T0 + 400, "verdict": "done"}))
    assert causes(goodput_of(files.run, now=NOW))[2:] == [
        (1, 15, 40, "unknown"),
        (1, 40, 100, "productive"),
        (1, 100, 120, "unknown"),
        (1, 120, 220, "queue"),
        (2, 220, 225, "startup"),
        (2, 225, 240, "unknown"),
        (2, 240, 300, "redone"),
        (2, 300, 390, "productive"),
        (2, 390, 400, "unknown"),
    ]


def test_a_job_that_evaluates_spends_its_time_on_evaluation(files: RunFiles) -> None:
    files.attempt(1, 10, started=12, stepping=20, ended=60, reason="finished", verdict="done", kind="evaluate")
    assert goodput_of(files.run, now=NOW).seconds[Cause.EVALUATION] == 40


def test_many_saves_are_told_apart_and_added_up(files: RunFiles) -> None:
    """A run of 100,000 steps that saves every ten."""
    files.attempt(
        1, 0, started=0, stepping=0, ended=100_000, reason="finished", verdict="done", first_step=0, last_step=100_000
    )
    files.events += [
        {"time": T0 + at + 3, "event": "checkpoint", "attempt": 1, "step": at, "seconds": 3.0, "stall_s": 1.0}
        for at in range(10, 100_000, 10)
    ]
    files.event(100_000, "training finished", 1, step=100_000)
    found = goodput_of(files.run, now=T0 + 200_000)
    assert found.seconds[Cause.CHECKPOINT] == pytest.approx(9999)
    check_adds_up(found, 0, 100_000)


def test_only_the_time_after_a_moment_counts(tmp_path: Path) -> None:
    found = goodput_of(interrupted_run(tmp_path / "train" / "run"), now=NOW)
    late = found.since(T0 + 5100)
    check_adds_up(late, 5100, 5210)
    assert rounded(late.seconds) == {"productive": 80, "checkpoint": 20, "idle_end": 10} and late.lost_s == {}
    assert found.since(T0 - 1) is found and found.since(T0 + 6000).segments == ()


def test_the_sum_over_runs_is_that_of_each(tmp_path: Path) -> None:
    found = goodput_of(interrupted_run(tmp_path / "train" / "run"), now=NOW)
    both = over_all([found, found])
    assert both.wall_s == pytest.approx(2 * found.wall_s) and both.gpu_hours == pytest.approx(2 * found.gpu_hours)
    assert both.share == pytest.approx(found.share)
    assert both.interruptions["crash"] == 4


def test_the_goodput_of_runs_of_different_size_is_that_of_their_gpu_hours() -> None:
    large = Goodput(seconds={Cause.PRODUCTIVE: 3600.0}, gpu_seconds={Cause.PRODUCTIVE: 512 * 3600.0})
    small = Goodput(seconds={Cause.STARTUP: 3600.0}, gpu_seconds={Cause.STARTUP: 3600.0})
    both = over_all([large, small])
    assert both.share == pytest.approx(512 / 513)
    assert both.shares == pytest.approx({Cause.PRODUCTIVE: 512 / 513, Cause.STARTUP: 1 / 513})


def test_torn_and_foreign_records_cost_only_what_they_say(tmp_path: Path) -> None:
    run = interrupted_run(tmp_path / "train" / "run")
    with run.events_file.open("a") as file:
        file.write('{"time": "soon", "event": "checkpoint"}\n[1]\n{"time": NaN, "event": "evaluated", "attempt": 1}\n')
        file.write(json.dumps({"time": T0 + 200, "event": "evaluated", "attempt": 1, "seconds": "long"}) + "\n")
        file.write(json.dumps({"time": T0 + 200, "event": "caught up", "attempt": [1]}) + "\n")
        file.write('{"time": 1700000200.0, "event": "evalu')
    (run.attempt(3).path / "hang.json").write_text('{"since": "yesterday", "time": null')
    (run.attempt(1).path / "failed-0.json").write_text('{"time": -1}')
    found = goodput_of(run, now=NOW)
    check_adds_up(found, 0, 5210)
    assert Cause.HUNG not in found.seconds and found.seconds[Cause.CHECKPOINT] == 30


def test_a_record_of_another_shape_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run = interrupted_run(tmp_path / "train" / "run")
    run.attempt(2).record_file.write_text('{"stepping": "soon"}')
    with pytest.raises(UnreadableRecordError, match="stepping is"):
        goodput_of(run, now=NOW)


def test_a_reason_that_nobody_knows_is_not_repeated(files: RunFiles) -> None:
    files.attempt(1, 10, started=12, stepping=20, ended=60, reason="\x1b[2J", verdict="requeue")
    assert goodput_of(files.run, now=T0 + 100).interruptions == {"not recorded": 1}


def test_an_empty_run_directory_has_no_time(tmp_path: Path) -> None:
    made = RunFiles(tmp_path / "train" / "run", job_ids=[])
    assert goodput_of(made.run, now=NOW) == Goodput()
    with pytest.raises(UnreadableRecordError, match="cannot be read"):
        goodput_of(RunDir(tmp_path / "nothing"), now=NOW)


MOMENTS = st.one_of(st.none(), st.integers(-10, 300).map(float), st.just(9e8))
STEPS = st.one_of(st.none(), st.integers(0, 50))
ATTEMPTS = st.fixed_dictionaries(
    {
        "claimed": st.integers(0, 250).map(float),
        "ended": MOMENTS,
        "stepping": MOMENTS,
        "last_sign": MOMENTS,
        "last_logged": MOMENTS,
        "hung_since": MOMENTS,
        "failed": MOMENTS,
        "first_step": STEPS,
        "last_step": STEPS,
        "committed_step": STEPS,
        "reported_before": STEPS,
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
TIMES = ("ended", "stepping", "last_sign", "last_logged")


@given(
    tries=st.lists(ATTEMPTS, max_size=5),
    events=st.lists(EVENTS, max_size=25),
    alive=st.sampled_from([None, True, False]),
    kind=st.sampled_from([None, "train", "command", "evaluate"]),
    submitted=MOMENTS,
)
def test_whatever_is_on_record_each_second_counts_once(
    tries: list[dict[str, Any]],
    events: list[dict[str, Any]],
    alive: bool | None,
    kind: str | None,
    submitted: float | None,
) -> None:
    found = []
    for number, values in enumerate(tries, 1):
        moved = {name: T0 + at if name in TIMES and at is not None else at for name, at in values.items()}
        begun, since, failed = (moved.pop(name) for name in ("claimed", "hung_since", "failed"))
        record = Attempt(number, job_id="7", started=T0 + begun + 1, nodes=["n1"], **moved)
        hung, gone = (None if moment is None else T0 + moment for moment in (since, failed))
        found.append(AttemptTimes(T0 + begun, record, ("7", record.restart_count), hung, gone, record.last_sign, 4.0))
    history = History(None if submitted is None else T0 + submitted, kind, False, found, events)
    goodput = of_history(history, alive=alive, now=T0 + 500)
    assert all(a.end == b.start for a, b in pairwise(goodput.segments))
    assert all(each.seconds > 0 for each in goodput.segments)
    wall = goodput.segments[-1].end - goodput.segments[0].start if goodput.segments else 0.0
    assert goodput.wall_s == pytest.approx(wall, abs=1e-3) and wall <= 500 + 10
    assert goodput.end - goodput.begin == pytest.approx(wall, abs=1e-3)
    assert math.fsum(goodput.startup_s.values()) <= goodput.seconds.get(Cause.STARTUP, 0.0) + 1e-3
    assert all(0 <= value <= 1 for value in (goodput.share, goodput.effective_share) if value is not None)
    assert math.fsum(goodput.lost_s.values()) <= wall + 1e-3
    sums = of_history(history, alive=alive, now=T0 + 500, with_segments=False)
    assert (sums.seconds, sums.gpu_seconds, sums.lost_s) == (goodput.seconds, goodput.gpu_seconds, goodput.lost_s)
    late = goodput.since(T0 + 100)
    assert late.wall_s == pytest.approx(
        sum(max(0.0, s.end - max(s.start, T0 + 100)) for s in goodput.segments), abs=1e-3
    )
