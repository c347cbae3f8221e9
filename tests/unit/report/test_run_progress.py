"""How far runs are and why they wait, as `status` and `sweep status` tell it; and `--watch`."""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slurmtrain.cli import main
from slurmtrain.cli.columns import PROGRESS, table_lines
from slurmtrain.cli.sweep import _headline
from slurmtrain.cli.watch import View, pause_s, watch
from slurmtrain.report.progress import Lowest, Progress, at_about, eta_of_all, lowest, read_progress, roughly
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.slurm.pending_reasons import in_words, is_held
from tests.support.commands import FakeSlurm
from tests.support.runs import add_attempt, submitted_run

Out = pytest.CaptureFixture[str]
Make = Callable[..., RunDir]


@pytest.fixture
def make(project: Path) -> Make:
    """A run that is submitted as this job, with what it logged."""

    def run(job_id: str = "1", *overrides: str, logged: tuple[dict[str, object], ...] = ()) -> RunDir:
        run_dir = submitted_run(project, "cluster=a100x4", "train.steps=200", *overrides, job_ids=[job_id])
        if logged:
            run_dir.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in logged))
        return run_dir

    return run


def attempt(run: RunDir, **fields: Any) -> None:
    add_attempt(run, **{"job_id": "1", "started": time.time() - 60, "host": "elsewhere", "pid": 1, **fields})


def stamp(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment))


TRAINED = (
    {"step": 50, "loss": 2.5, "tokens_per_s": 900.0, "step_time_s": 9.0},
    {"step": 50, "valid_loss": 2.25, "valid_tokens": 7},
    {"step": 60, "loss": 2.125, "tokens_per_s": 12345.0, "step_time_s": 2.0},
)


# From the log.


def test_a_run_tells_its_step_losses_speed_and_the_time_left(make: Make) -> None:
    run = make(logged=TRAINED)
    os.utime(run.metrics_file, (1000.0, 1000.0))
    found = read_progress(run, 200, running_since=900.0)
    assert found == Progress(60, 200, 2.125, 2.25, 1000.0, 12345.0, 2.0)
    assert found.eta_s == 140 * 2.0


@pytest.mark.parametrize("since", [None, 1001.0])
def test_a_run_that_does_not_run_or_has_not_logged_since_it_began_has_no_speed(make: Make, since: float | None) -> None:
    run = make(logged=TRAINED)
    os.utime(run.metrics_file, (1000.0, 1000.0))
    found = read_progress(run, 200, running_since=since)
    assert (found.step, found.loss, found.tokens_per_s, found.eta_s) == (60, 2.125, None, None)


def test_what_is_not_known_stays_empty(make: Make) -> None:
    assert read_progress(make(), None, running_since=0.0) == Progress()
    # A log of before the number of steps was written down.
    found = read_progress(make(logged=TRAINED), None, running_since=0.0)
    assert (found.step, found.tokens_per_s, found.eta_s) == (60, 12345.0, None)


def test_a_log_with_torn_lines_and_odd_values_is_read(make: Make) -> None:
    run = make()
    run.metrics_file.write_text(
        '{"step": 4, "loss": 1.5, "step_time_s": 1.0}\n{"step": 5, "loss": NaN, "step_time_s": NaN}\n'
        '{"step": "x", "valid_loss": "y"}\n{"step": 6, "lo'
    )
    found = read_progress(run, 10, running_since=0.0)
    assert found.loss is not None and math.isnan(found.loss)
    assert (found.step, found.valid_loss, found.step_time_s, found.eta_s) == (None, None, None, None)


def test_the_number_of_steps_is_in_the_run_and_an_own_program_has_none(make: Make) -> None:
    assert make("1", "train.steps=77").info()["steps"] == 77
    assert make("1", "job=command", "job.command=true").info()["steps"] is None


def test_all_of_a_sweep_takes_as_long_as_its_steps_at_this_pace_and_the_slowest_at_least() -> None:
    running = [Progress(50, 100, step_time_s=1.0), Progress(0, 100, step_time_s=3.0)]
    assert eta_of_all([], running) == 300.0
    assert eta_of_all([Progress(None, 100)] * 9, running) == (900 + 150) * 2.0 / 2
    assert eta_of_all([Progress(None, 100)], [Progress(10, 100)]) is None


def test_the_best_point_so_far_is_by_validation_loss_where_there_is_one() -> None:
    points = [(0, Progress(loss=1.0, valid_loss=3.0)), (1, Progress(loss=2.0, valid_loss=2.5)), (2, Progress(loss=0.1))]
    assert lowest(points) == Lowest("valid loss", 2.5, 1)
    assert lowest([(4, Progress(loss=math.nan)), (5, Progress(loss=9.0))]) == Lowest("loss", 9.0, 5)
    assert lowest([(4, Progress(loss=math.nan))]) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (89, "89 s"),
        (90, "2 min"),
        (3590, "1 h"),
        (7800, "2 h 10 min"),
        (86370, "1 d"),
        (100_000, "1 d 4 h"),
    ],
)
def test_durations_are_said_as_a_person_does(seconds: float, words: str) -> None:
    assert roughly(seconds) == words


def test_a_moment_has_its_day_unless_that_is_today() -> None:
    noon = time.mktime((2026, 5, 4, 12, 20, 0, 0, 0, -1))
    assert at_about(noon + 7800, noon) == "in about 2 h 10 min (14:30)"
    assert at_about(noon + 86400, noon) == "in about 1 d (05-05 12:20)"


# Reasons.


@pytest.mark.parametrize(
    ("reason", "says", "advises"),
    [
        ("Priority", "higher priority", ""),
        ("Resources", "waits for free resources", ""),
        ("BeginTime", "begin time", "`requeue R` starts it now"),
        ("DependencyNeverSatisfied", "will never start", "`cancel R`"),
        ("JobArrayTaskLimit", "limit of parallel points", ""),
        ("JobHeldUser", "owner", "`requeue R` releases"),
        ("JobHeldAdmin", "administrator", "only an administrator can release it"),
        ("launch failed requeued held", "could not start", "`requeue R`"),
        ("launch_failed_requeued_held", "could not start", "`requeue R`"),
        ("QOSMaxJobsPerUserLimit", "your jobs have reached the limit of its QOS", "have ended"),
        ("QOSMaxGRESPerUser", "your jobs have reached the limit of its QOS", "have ended"),
        ("AssocMaxJobsLimit", "your jobs have reached the limit of its account", "have ended"),
        ("MaxGRESPerAccount", "all jobs of its account", "have ended"),
        ("AssocGrpCpuLimit", "all jobs of its account", "have ended"),
        ("QOSGrpGRES", "all jobs of its QOS", "have ended"),
        ("AssocGrpGRESMinutes", "the time of its account is used up", "ask"),
        ("AssocGrpCPURunMinutesLimit", "limit on remaining time", "have ended"),
        ("QOSMaxWallDurationPerJobLimit", "more than its QOS allows for a single job", "`cancel R`; ask for less"),
        ("AssocMaxNodePerJobLimit", "more than its account allows for a single job", "ask for less"),
        ("AssociationResourceLimit", "its account is at a limit", ""),
        ("QOSMinGRES", "less than its QOS requires", "ask for more"),
        ("PartitionTimeLimit", "exceeds that of its partition", "cluster.time_limit_min"),
        ("PartitionNodeLimit", "number or kind of nodes", "cluster.spare_nodes"),
        ("PartitionDown", "starts no jobs", "`sinfo`"),
        ("ReqNodeNotAvail, UnavailableNodes:n[0-3]", "down, drained or reserved", "`sinfo -R`"),
        ("ReqNodeNotAvail, Reserved for maintenance", "reserved for maintenance", "cluster.time_limit_min"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "drained",
            "sinfo",
        ),
        ("BadConstraints", "no node meets its requirements", "cluster.constraint"),
        ("InvalidAccount", "account", "cluster.account"),
        ("InvalidQOS", "QOS", "cluster.qos"),
    ],
)
def test_a_reason_is_said_in_words_with_what_to_do(reason: str, says: str, advises: str) -> None:
    words = in_words(reason, "R")
    meaning, _, advice = words.partition(f" ({reason})")
    assert says in meaning and advises in advice and bool(advice) >= bool(advises)


def test_a_reason_that_nobody_knows_is_shown_as_it_is() -> None:
    assert in_words("FluxCapacitor", "R") == "FluxCapacitor"


def test_what_is_held_is_told_from_what_waits() -> None:
    held = ("JobHeldUser", "JobHeldAdmin", "launch failed requeued held", "JobHoldMaxRequeue", "RequeueExitHold")
    assert all(map(is_held, held)) and not any(
        map(is_held, ("QOSUsageThreshold", "Priority", "BeginTime", "Resources", "Dependency"))
    )


# On the terminal.


def test_the_table_shows_how_far_each_run_is_and_why_one_waits(make: Make, fake_slurm: FakeSlurm, capsys: Out) -> None:
    trains, waits, late = make("1", logged=TRAINED), make("2"), make("3")
    attempt(trains)
    soon = time.time() + 7825
    fake_slurm.command(
        "squeue",
        'echo squeue >>"$here/asked"\n'
        f"echo '1|1_N/A|RUNNING|{stamp(time.time() - 60)}|None'\n"
        f"echo '2|2_N/A|PENDING|{stamp(soon)}|Resources'\n"
        f"echo '3|3_N/A|PENDING|{stamp(time.time() - 60)}|Priority'",
    )
    assert main(["status"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == "run name state step loss valid loss tokens/s ETA attempts".split()
    assert " ".join(rows[0].split()) == f"{trains.id} train running 60/200 2.1250 2.2500 12.3k 5 min 1 attempt 1, job 1"
    assert "waits for free resources (Resources); SLURM expects to start it in about 2 h 10 min (" in rows[1]
    assert rows[2].rstrip().endswith("jobs of higher priority come first (Priority)")  # its estimate has passed by
    assert (fake_slurm.directory / "asked").read_text() == "squeue\n"

    assert main(["status", "--json"]) == 0
    found = {run["id"]: run for run in json.loads(capsys.readouterr().out)}
    assert [found[run.id]["expected_start"] for run in (trains, waits, late)] == [None, int(soon), None]
    assert found[trains.id]["eta_s"] == 280.0 and found[waits.id]["reason"] == "Resources"

    assert main(["status", trains.id]) == 0
    said = capsys.readouterr().out
    assert "  step 60/200, loss 2.1250, valid loss 2.2500, 12.3k tokens/s, ends in about 5 min; logged " in said


def test_columns_that_are_empty_are_left_out(make: Make, fake_slurm: FakeSlurm, capsys: Out) -> None:
    make("1", "job=command", "job.command=true")
    fake_slurm.command("squeue", "echo '1|1_N/A|PENDING|N/A|Priority'")
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["run", "name", "state", "attempts"]


def test_the_points_of_a_sweep_are_summed_up_first(project: Path, fake_slurm: FakeSlurm, capsys: Out) -> None:
    fake_slurm.command(
        "squeue",
        'case "$*" in *%F\\|*) exit ;; esac\n'
        "echo '4711|4711_0|RUNNING|N/A|None'; echo '4712|4711_1|RUNNING|N/A|None'\n"
        "echo '4713|4711_2|PENDING|N/A|JobArrayTaskLimit'",
    )
    words = ["cluster=a100x4", "train.steps=40,50,60", "submit", "--json"]
    assert main(["-m", *words]) == 0
    sweep = json.loads(capsys.readouterr().out)
    runs = [RunDir(path.parent) for path in sorted(Path(sweep["path"]).glob("*/run.json"))]
    assert [run.info()["steps"] for run in runs] == [40, 50, 60]
    for number, run in enumerate(runs[:2]):
        attempt(run, job_id=f"4711_{number}")
        record = {"step": 10, "loss": 2.0 - number, "tokens_per_s": 50.0, "step_time_s": 60.0}
        run.metrics_file.write_text(json.dumps(record) + "\n")
    assert main(["sweep", "status", "last"]) == 0
    headline, _, header, _, *rows = capsys.readouterr().out.splitlines()
    # 30 + 40 + 60 steps of a minute, two at a time
    assert headline == f"{sweep['sweep']}: 2 running, 1 waiting; about 1 h 5 min left; lowest loss 1.0000 (point 1)"
    assert header.split() == "point train.steps state step loss tokens/s ETA attempts run".split()
    assert rows[0].split()[:9] == "0 40 running 10/40 2.0000 50 30 min 1".split()
    assert "its sweep has reached its limit of parallel points (JobArrayTaskLimit)" in rows[2]
    assert main(["sweep", "status", "last", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["eta_s"] for point in points] == [1800.0, 2400.0, None] and points[2]["steps"] == 60


def test_a_terminal_that_is_wide_has_the_last_column_beside_and_a_narrow_one_below() -> None:
    header, rows = (
        ["run", "step", "loss", ""],
        [["a", "1", "", "one two three four five six seven eight"], ["b", "", "", "x"]],
    )
    assert table_lines(header, rows) == [
        "run   step",
        "-" * 52,
        "a     1      one two three four five six seven eight",
        "b            x",
    ]
    assert table_lines(header, rows, 43)[2:] == [
        "a     1      one two three four five six",
        "             seven eight",
        "b            x",
    ]
    assert table_lines(header, rows, 40)[1:] == [
        "-" * 37,
        "a     1",
        "    one two three four five six seven",
        "    eight",
        "b            x",
    ]


def test_a_terminal_of_80_letters_has_the_run_its_state_its_step_and_its_eta() -> None:
    header = ["run", "name", "state", *PROGRESS, "attempts", ""]
    row = [
        "20260101-000000-aaaaa",
        "train",
        "running",
        "14/500",
        "2.3140",
        "2.4000",
        "12.3k",
        "30 min",
        "2",
        "a remark",
    ]
    shown = table_lines(header, [row], 80)
    assert all(len(line) <= 80 for line in shown)
    assert {"run", "state", "step", "ETA"} <= set(shown[0].split())
    assert "tokens/s" in table_lines(header, [row], 200)[0]


def test_what_a_program_has_left_as_its_last_words_steers_no_terminal() -> None:
    assert table_lines(["run", ""], [["a", "x\n\x1b[31mred"]])[2] == "a     x  [31mred"


# --watch


@pytest.mark.parametrize(
    ("took_s", "failures", "pause"),
    [
        (0.1, 0, 5.0),
        (1.0, 0, 9.0),
        (30.0, 0, 270.0),
        (0.1, 1, 10.0),
        (0.1, 3, 40.0),
        (0.1, 9999, 300.0),
        (60.0, 1, 540.0),
    ],
)
def test_who_answers_slowly_or_not_at_all_is_asked_less(took_s: float, failures: int, pause: float) -> None:
    assert pause_s(5.0, took_s, failures) == pytest.approx(pause)


class Terminal:
    """A terminal and its clock; `watch` sees these looks, which take no time."""

    def __init__(self, *looks: View):
        self.text = io.StringIO()
        self.console = Console(file=self.text, force_terminal=True, width=100, height=20, color_system=None)
        self.now, self.slept = 1000.0, list[float]()
        self.looks = iter(looks)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)

    def watch(self) -> int:
        return watch(lambda: next(self.looks), 5.0, console=self.console, clock=lambda: self.now, sleep=self.sleep)


def view(words: str, *doubts: str, over: bool = False) -> View:
    return View([words], list(doubts), over)


def test_watching_draws_in_place_until_all_is_over() -> None:
    terminal = Terminal(view("step 1"), view("step 2"), view("all ended", over=True))
    assert terminal.watch() == 0
    drawn = terminal.text.getvalue()
    assert drawn.index("step 1") < drawn.index("step 2") < drawn.rindex("all ended")
    assert terminal.slept == [5.0, 5.0]
    assert "\x1b[?25l" in drawn and drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # the cursor is back
    assert "Ctrl-C" not in drawn[drawn.rindex("all ended") :]


def test_what_does_not_fit_into_the_terminal_is_counted() -> None:
    terminal = Terminal(View([f"row {number}" for number in range(40)], [], over=False), view("all ended", over=True))
    terminal.watch()
    drawn = terminal.text.getvalue()
    assert "row 15\n" in drawn and "row 16" not in drawn and "... 24 more" in drawn


def test_while_slurm_is_silent_the_last_table_stays_with_its_age_and_it_is_asked_less() -> None:
    silent = [view("nothing known", "no controller")] * 3
    terminal = Terminal(view("step 1"), *silent, view("step 2"), view("all ended", over=True))
    assert terminal.watch() == 0
    drawn = terminal.text.getvalue()
    assert "nothing known" not in drawn
    assert "35 s ago; SLURM cannot be asked: no controller" in drawn  # 5 + 10 + 20
    assert terminal.slept == [5.0, 10.0, 20.0, 40.0, 5.0]


def test_before_slurm_has_answered_once_what_the_files_say_is_shown() -> None:
    terminal = Terminal(view("unknown", "no controller"), view("all ended", over=True))
    terminal.watch()
    assert "unknown" in terminal.text.getvalue()


def test_ctrl_c_leaves_with_the_terminal_as_it_was() -> None:
    terminal = Terminal(view("step 1"))

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    terminal.sleep = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        terminal.watch()
    drawn = terminal.text.getvalue()
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--watch"], "--watch needs a terminal"),
        (["--watch", "--json"], "--watch and --json exclude each other"),
        (["--watch", "--every", "0"], "--every 0: expected at least 1 second"),
        (["--watch", "--every", "nan"], "--every nan: expected at least 1 second"),
    ],
)
def test_what_cannot_be_watched_is_one_sentence(words: list[str], sentence: str, make: Make, capsys: Out) -> None:
    make()
    assert main(["status", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_the_time_left_of_a_sweep_counts_the_points_that_nobody_has_started_yet(tmp_path: Path) -> None:
    point = Progress(10, 100, step_time_s=2.0)
    now = {
        "a": RunState(RunStatus.RUNNING, "", True, [], None, point),
        "b": RunState(RunStatus.PREPARED, "", False, [], None, Progress(None, 100)),
        "c": RunState(RunStatus.FAILED, "", False, [], None, Progress(None, 100)),
    }
    assert "about 6 min left" in _headline(Sweep(tmp_path), [], now)
