"""The report: what a person reads of a run or a sweep on one HTML page, from run directories as they are and as they may be."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from slurmtrain.cli import main
from slurmtrain.errors import EXIT_USAGE, UnreadableRecordError
from slurmtrain.report.page import units
from slurmtrain.report.page.charts import Timeline
from slurmtrain.report.page.contents import Page
from slurmtrain.report.page.render import TEMPLATES, render
from slurmtrain.report.page.run_facts import read_run
from slurmtrain.report.page.run_page import run_page
from slurmtrain.report.page.scales import Scale, scale_of, ticks
from slurmtrain.report.page.sentences import what_to_do
from slurmtrain.report.page.series import Series, m4, trailing_mean
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import files
from tests.support.commands import Cli
from tests.support.fake_slurm import FakeSlurm
from tests.support.interrupted_run import RunFiles
from tests.support.interrupted_run import interrupted_run as run_of_files
from tests.support.report_runs import (
    BEGAN,
    finished_run,
    interrupted_run,
    sweep_of_eight,
    write_attempt,
    write_config,
)
from tests.support.run_info import run_info
from tests.support.runs import no_waiting, printed

Out = pytest.CaptureFixture[str]
NOW = BEGAN + 30_000.0
VOID = frozenset("meta link br hr img input rect circle line path".split())


@pytest.fixture
def runs(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of runs of a cluster whose queue is empty."""
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    no_waiting(monkeypatch)
    return tmp_path / "runs"


class Read(HTMLParser):
    """What a browser would make of a page: its text, its elements with their attributes, and whether each is closed."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        self.words = " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)


def new_run(runs: Path, **info: Any) -> RunDir:
    """A run of which nothing but its run.json exists."""
    run = RunDir(runs / "lm" / "20260921-141320-000ab")
    run.checkpoints.mkdir(parents=True)
    run.attempts.mkdir()
    files.write_json(run.info_file, run_info(name="lm", created=BEGAN, **info))
    return run


def log(run: RunDir, *records: dict[str, Any]) -> None:
    with run.metrics_file.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def page_of(run: RunDir) -> Page:
    return run_page(read_run(run, now=NOW))


def shown(run: RunDir) -> Read:
    return Read(render(page_of(run)))


def timeline_in(page: Page) -> Timeline:
    return next(section.timeline for section in page.sections if section.timeline is not None)


def test_a_report_says_what_the_run_is_how_far_it_got_and_what_was_lost(runs: Path) -> None:
    words = shown(interrupted_run(runs)).words
    for said in (
        "was submitted on 2026-09-21",
        "by ada on login1",
        "with 8 ranks on 2 nodes and 8 GPUs",
        "has done 3,000 of 3,000 steps (100 %)",
        "It took 4 attempts, with 2 preemptions and 1 hang. One restart was in place, in the same job.",
        "Attempt 2 hung: rank 5 (gpu12) did not come to the all_reduce of step 1571",
        "8 checkpoints were committed, the last at step 3,000. On average: 412 MB, committed in 2.4 s, "
        "training waited 0.8 s for it.",
        "3 gpu07 data 1.62 times as long as the others 5.4 % step 2,400 to 2,640",
        "optim.lr 0.0006 0.003",  # what differs from the defaults
    ):
        assert said in words
    assert re.search(r"\([\d.]+ GPU hours\), of which \d\d % were productive", words)


def told() -> dict[str, list[str]]:
    """What `report` says of the last run beside its curves."""
    found: dict[str, list[str]] = json.loads(printed("report", "last", "--out", "page.html", "--json"))
    return found


def test_a_report_tells_waiting_in_the_queue_from_a_run_that_nobody_had_resumed(runs: Path) -> None:
    run_of_files(runs / "train" / "20260101-000000-000aa")
    said = " ".join(told()["sentences"])
    assert re.search(
        r"In addition, it waited for 1\d min.* in the queue and was stopped for 53 min.*, until somebody resumed", said
    )


@pytest.mark.parametrize("backend", ["slurm", "local"])
def test_start_up_comes_with_advice_only_where_a_setting_would_have_shortened_it(runs: Path, backend: str) -> None:
    files = RunFiles(runs / "train" / "20260101-000000-000aa")
    write_config(files.run, cluster__backend=backend)
    crashed: dict[str, Any] = {"reason": "crash", "verdict": "in-place", "sentence": "crashed: x"}
    files.attempt(1, 0, started=1, stepping=1000, ended=1010, **crashed)
    files.attempt(2, 1010, started=1011, stepping=2010, ended=2020, reason="finished", verdict="done")
    advice = [each for each in told()["advice"] if "of the allocated time went into starting up" in each]
    if backend == "slurm":
        assert "requeue.standby_ranks=true shortens restarts in the same job" in advice[0]
    else:
        assert advice == []  # where it is refused


def test_only_a_run_that_shards_over_nodes_is_advised_to_shard_within_one(runs: Path) -> None:
    facts = read_run(interrupted_run(runs), now=BEGAN + 1e5)
    steps = facts.series["loss"].steps
    share = Series("communication_share", steps, np.full(len(steps), 0.5))
    of_ddp = replace(facts, series={**facts.series, share.name: share})
    assert of_ddp.config is not None
    parallel = {**of_ddp.config["parallel"], "dp_replicate": 1, "dp_shard": -1}
    of_fsdp = replace(of_ddp, config={**of_ddp.config, "parallel": parallel})
    said = "Steps spend 50 % of their time on communication that no computation hides: larger micro batches "
    ddp, fsdp = (next(each for each in what_to_do(found) if each.startswith(said)) for found in (of_ddp, of_fsdp))
    assert "sharding" not in ddp and "or sharding only within a node" in fsdp


def test_a_failed_run_is_explained_up_to_what_to_do_about_it(runs: Path) -> None:
    run = finished_run(runs / "lm", "20260921-141320-000ab")
    why = f"diverged: its samples are {', '.join(map(str, range(1000, 1100)))}. `resume last optim.lr=...` goes on"
    changed(run.attempt(1).record_file, reason="diverged", verdict="end", sentence=why, exit_code=78)
    found = told()
    assert found["advice"][0].startswith(f"It failed: {why}")
    assert any(each.startswith("It failed and has done 1,000 of 1,000 steps") for each in found["sentences"])


def test_the_timeline_shows_each_attempt_with_how_it_ended_and_the_restart_in_place(runs: Path) -> None:
    line = timeline_in(page_of(interrupted_run(runs)))
    assert [row.name for row in line.rows] == ["Attempt 1", "Attempt 2", "Attempt 3", "Attempt 4"]
    endings = [
        next(mark.shape for mark in row.marks if mark.shape in ("preempted", "hang", "finished")) for row in line.rows
    ]
    assert endings == ["preempted", "hang", "preempted", "finished"]
    assert [row for row, _ in line.links] == [1]
    waits = [[bar.color for bar in row.bars if bar.color in ("queue", "between")] for row in line.rows]
    assert waits == [["queue"], ["queue", "between"], [], ["queue"]]  # the third attempt kept the nodes of the second
    assert "hung" in [bar.color for bar in line.rows[1].bars]
    assert "redone" in [bar.color for bar in line.rows[2].bars]
    assert sum(mark.shape == "checkpoint" for row in line.rows for mark in row.marks) == 8
    for row in line.rows:
        assert all(0 <= bar.begin <= bar.begin + bar.width <= 100.01 for bar in row.bars)


def test_a_page_loads_nothing_and_allows_nothing_but_its_own_style_and_script(runs: Path) -> None:
    html = render(page_of(interrupted_run(runs)))
    read = Read(html)
    assert not read.open
    for tag, attributes in read.elements:
        assert tag not in ("img", "iframe", "object", "embed", "form", "base")
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        for name in ("src", "href", "action", "data", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,"))
    policy = next(each["content"] for tag, each in read.elements if tag == "meta" and "http-equiv" in each)
    assert policy is not None and policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy and "connect-src" not in policy
    ids = [each["id"] for _, each in read.elements if "id" in each]
    assert len(ids) == len(set(ids))


def test_each_chart_has_its_numbers_as_a_table(runs: Path) -> None:
    page = page_of(interrupted_run(runs))
    assert {chart.key for chart in page.charts} >= set(
        "loss tokens_per_s phases lr memory mfu metric-perplexity".split()
    )
    for chart in page.charts:
        assert 2 <= len(chart.table.rows) <= 40
        assert len(chart.table.header) == len(chart.lines) + 1
        assert chart.summary
    assert page.charts[0].table.rows[-1][0] == "3,000"


EVIL = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7*7 }}{% raw %}",
    "\x1b[2J\x07\x00\u202e",
    "javascript:alert(1)",
    "<!--<script>",
    "' onmouseover='alert(1)",
    "\ud800",
    "=cmd|' /C calc'!A0",
)


@pytest.mark.parametrize("evil", EVIL)
def test_text_of_a_run_directory_is_shown_as_text_wherever_it_stands(runs: Path, evil: str) -> None:
    run = interrupted_run(runs)
    everywhere = dict.fromkeys(("name", "user", "host", "submit_dir"), evil)
    code = {"revision": evil, "dirty": True}
    changed(run.info_file, **everywhere, overrides=[evil], packages={evil: evil}, code=code)
    record = run.attempt(2).record_file
    fault = {**json.loads(record.read_text())["fault"], "said": evil}
    changed(record, sentence=evil, nodes=[evil], host=evil, start_up_s={evil: 1.0}, reason=evil, fault=fault)
    with run.events_file.open("a") as file:
        file.write(json.dumps({"time": BEGAN + 9e3, "event": evil, "attempt": 2, "error": evil, evil: evil}) + "\n")
    log(run, *({"step": step, evil: 0.5, f"valid_{evil}": 1.0} for step in (3010, 3020)))
    config = {"model": {"_target_": evil, evil: evil}, "job": {"command": evil, "kind": "command"}}
    run.config_file.write_text(json.dumps(config))

    page = page_of(run)
    assert not re.findall(r"\\x(?!a0)|\\u202e|\\ud8", repr(page))
    read = Read(render(page))
    usual = Read(render(page_of(interrupted_run(runs, "20260921-141321-512a0"))))
    assert {tag for tag, _ in read.elements} <= {tag for tag, _ in usual.elements}
    names = {name for _, each in usual.elements for name in each}
    assert {name for _, each in read.elements for name in each} <= names
    assert sum(tag == "script" for tag, each in read.elements if each.get("type") != "application/json") == 1
    html = render(page)
    assert not [letter for letter in html if not letter.isprintable() and letter != "\n"]
    assert html.isascii()
    for each in re.findall(
        r'<script type="application/json">(.*?)</script>', html
    ):  # of which no text ends the element
        json.loads(each)
    if evil.isprintable() and "{" not in evil:
        assert units.clean(evil) in read.words


def test_values_that_are_not_finite_leave_a_gap_and_are_counted(runs: Path) -> None:
    run = finished_run(runs / "lm", "20260921-141320-000ab")
    lines = run.metrics_file.read_text().splitlines()
    for number, value in ((24, math.nan), (25, math.inf), (26, -math.inf), (27, 1e308)):
        lines[number] = json.dumps({**json.loads(lines[number]), "loss": value})
    run.metrics_file.write_text("".join(f"{line}\n" for line in lines))
    chart = page_of(run).charts[0]
    assert "4 values of training loss not finite" in chart.note
    assert chart.lines[0].path.count("M") == 2
    assert "NaN" not in json.dumps(chart.data)


def test_a_run_that_has_not_started_has_a_page_that_says_so(runs: Path) -> None:
    words = shown(new_run(runs)).words
    assert "It has not started yet." in words and "The config cannot be read." in words
    assert "Nothing has been logged yet, so there is no curve." in words


def test_a_program_that_logs_nothing_has_a_page_without_curves(runs: Path) -> None:
    run = new_run(runs, job_ids=["4711"])
    write_config(run, job__kind="command", job__command="python my_train.py --lr <3>")
    end = {"reason": "finished", "verdict": "done", "ended": BEGAN + 400.0, "sentence": "finished", "kind": "command"}
    write_attempt(run, 1, started=BEGAN + 20.0, **end)
    page = page_of(run)
    assert "It runs the command python my_train.py --lr <3>" in Read(render(page)).words
    assert page.charts == [] and [row.name for row in timeline_in(page).rows] == ["Attempt 1"]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "events.jsonl", "evaluations.jsonl"])
@pytest.mark.parametrize("kind", ["a link", "a folder", "torn", "another's"])
def test_a_file_that_cannot_be_used_leaves_its_part_out(runs: Path, name: str, kind: str) -> None:
    run = interrupted_run(runs)
    path = run.path / name
    if kind == "torn":
        path.write_bytes(path.read_bytes()[:-7] if path.exists() else b'{"step": 1')
    else:
        path.unlink(missing_ok=True)
        make = {"a link": lambda: path.symlink_to("/etc/passwd"), "a folder": path.mkdir}
        make.get(kind, lambda: path.write_text("[]"))()
    if name == "metrics.jsonl" and kind in ("a link", "a folder"):  # then `status` refuses the run, too
        with pytest.raises(UnreadableRecordError):
            read_run(run, now=NOW)
        return
    words = shown(run).words
    assert "root:" not in words
    if kind in ("a link", "a folder"):
        assert "Parts could not be read:" in words


def test_a_metric_with_a_name_for_each_step_does_not_fill_the_page(runs: Path) -> None:
    run = finished_run(runs / "lm", "20260921-141320-000ab", steps=10)
    log(run, *({"step": step, f"m{step}": 1.0, "x" * 5000: 2.0} for step in range(20, 3020)))
    html = render(page_of(run))
    assert len(html) < 2_000_000
    assert "not drawn; metrics.jsonl contains all of them" in Read(html).words


def test_a_run_of_many_attempts_shows_the_last_ones(runs: Path) -> None:
    run = new_run(runs, job_ids=["4711"])
    write_config(run)
    end = {"reason": "preempted", "verdict": "end"}
    for number in range(1, 201):
        begin = BEGAN + 100.0 * number
        write_attempt(run, number, started=begin, stepping=begin + 5, ended=begin + 60, **end)
    line = timeline_in(page_of(run))
    assert [line.rows[0].name, line.rows[-1].name] == ["Attempt 141", "Attempt 200"]
    assert line.left_out == 140


def test_a_sweep_has_its_points_parallel_coordinates_and_curves_together(runs: Path, capsys: Out) -> None:
    sweep = sweep_of_eight(runs)
    assert main(["report", str(sweep), "--out", "sweep.html"]) == 0
    read = Read(Path("sweep.html").read_text())
    assert not read.open
    assert "8 points over optim.lr and model" in read.words
    assert "reached by point 6 (optim.lr=0.0024, model=small)" in read.words
    assert "Point 7 did not finish" in read.words
    assert "The best point has the largest optim.lr that was tried (0.0024)" in read.words
    threads = [each for tag, each in read.elements if tag == "path" and "data-thread" in each]
    assert len(threads) == 8
    assert sum("best" in str(each["class"]) for each in threads) == 1
    curves = [each for tag, each in read.elements if tag == "path" and str(each.get("class")).startswith("line s")]
    assert len(curves) == 8 + 2 * 8
    assert "rank 3: RuntimeError: CUDA error" in read.words


def test_a_sweep_is_found_by_a_part_of_its_name_and_compared_by_another_metric(runs: Path) -> None:
    sweep_of_eight(runs)
    assert main(["report", "4f1c2a", "--metric", "tokens_per_s", "--mode", "max", "--out", "sweep.html"]) == 0
    assert "The highest tokens per second is" in Read(Path("sweep.html").read_text()).words


def test_tab_completes_runs_and_sweeps_after_report(runs: Path, cli: Cli) -> None:
    interrupted_run(runs)
    sweep = sweep_of_eight(runs)
    words = cli("-sc", "query=bash", COMP_LINE="slurmtrain report ", SLURMTRAIN_RUNS=str(runs)).stdout.split()
    assert {"last", "--serve", "--png", "20260921-141320-512a0", sweep.name} <= set(words)
    assert words.count("last") == 1


def test_the_numbers_come_as_tables_and_pictures_too(runs: Path, capsys: Out) -> None:
    pytest.importorskip("matplotlib")
    interrupted_run(runs)
    assert main(["report", "last", "--png", "png", "--tables", "csv", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert all(Path(each).stat().st_size > 0 for each in answer["files"])
    assert answer["state"] == "finished"
    pictures = {path.name for path in Path("png").iterdir()}
    assert pictures >= {"loss.png", "timeline.png", "phases.png", "goodput-0.png", "tokens_per_s.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in Path("png").iterdir())
    with open("csv/loss.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0][:2] == ["step", "training loss"]
    logged = [json.loads(line) for line in (runs / "lm/20260921-141320-512a0/metrics.jsonl").read_text().splitlines()]
    assert float(rows[1][1]) == logged[0]["loss"]
    assert len(rows) == 301
    attempts = Path("csv/attempts-attempts.csv").read_text()
    assert [line.split(",")[0] for line in attempts.splitlines()[1:]] == ["1", "2", "3", "4"]


def test_a_table_holds_no_formula_for_a_spreadsheet(runs: Path) -> None:
    run = interrupted_run(runs)
    changed(run.attempt(1).record_file, sentence="=HYPERLINK(1)")
    assert main(["report", "last", "--tables", "csv"]) == 0
    assert "'=HYPERLINK(1)" in Path("csv/attempts-attempts.csv").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report"], "the following arguments are required"),
        (["report", "nobody"], "no run's id begins with 'nobody'"),
        (["report", "last", "--port", "8000"], "--port needs --serve"),
        (["report", "last", "--serve", "--port", "80"], "a port from 1024 to 65535"),
        (["report", "last", "--serve", "--every", "0"], "--every: '0' is not a number of at least 1"),
        (["report", "last", "--serve", "--out", "x.html"], "--serve does not write files"),
        (["report", "last", "--metric", "loss"], "--metric and --mode are for a sweep"),
        (["report", "last", "--out", "."], "is a folder"),
        (["report", "last", "--out", "no/such/folder/x.html"], "cannot write"),
    ],
)
def test_a_wrong_command_is_refused_in_a_sentence(runs: Path, words: list[str], said: str, capsys: Out) -> None:
    interrupted_run(runs)
    assert main(words) == EXIT_USAGE
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) <= 3


def test_a_report_goes_to_standard_output_or_into_a_file_named_by_the_run(runs: Path, capsys: Out) -> None:
    interrupted_run(runs)
    assert main(["report", "last", "--out", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")
    assert os.listdir() == [each for each in os.listdir() if not each.startswith("report-")]
    assert main(["report", "last"]) == 0
    assert Path("report-20260921-141320-512a0.html").exists()


# What is drawn.


def luminance(color: str) -> float:
    """Relative luminance as WCAG 2.1 defines it."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_and_what_is_drawn_stand_out_from_what_is_behind_them(theme: str) -> None:
    style = (TEMPLATES / "page.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", light if theme == "light" else dark))
    assert len(found) == 33
    for background in ("bg", "card"):
        for name in ("text", "muted", "accent"):
            assert contrast(found[name], found[background]) >= 4.5, name
    assert contrast(found["text"], found["mark"]) >= 4.5
    for mood in ("good", "bad", "busy", "still"):
        assert contrast(found["on"], found[mood]) >= 4.5, mood
    # Waits are pale on purpose, and have an edge.
    drawn = found.keys() - {"bg", "card", "text", "muted", "edge", "on", "mark", "queue", "stopped"}
    assert {name: ratio for name in drawn if (ratio := contrast(found[name], found["card"])) < 3} == {}


def columns_of(series: Series, columns: int, low: float, high: float) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
        found.setdefault(min(columns - 1, int((step - low) * (columns / (high - low)))), []).append(value)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_of_each_column_of_pixels_the_first_last_least_and_greatest_value_are_drawn(seed: int) -> None:
    random = Random(seed)
    steps = sorted(random.sample(range(100_000), 20_000))
    series = Series.of("loss", steps, [random.gauss(0, 1) for _ in steps])
    kept = m4(series, 200, 0, 100_000)
    assert len(kept.steps) <= 4 * 200
    before, after = columns_of(series, 200, 0, 100_000), columns_of(kept, 200, 0, 100_000)
    assert before.keys() == after.keys()
    for column, values in before.items():
        left = after[column]
        assert (left[0], left[-1], min(left), max(left)) == (values[0], values[-1], min(values), max(values))


def test_a_column_with_a_value_that_is_not_finite_keeps_a_gap() -> None:
    values = [1.0] * 10_000
    values[5000:5050] = [math.nan] * 50
    values[7000] = math.inf
    kept = m4(Series.of("loss", range(10_000), values), 100, 0, 10_000)
    assert sum(math.isnan(value) for value in kept.values.tolist()) == 2
    assert len(kept.steps) <= 5 * 100


def test_the_mean_over_a_window_passes_over_what_is_not_finite() -> None:
    found = trailing_mean(Series.of("loss", range(5), [1.0, 3.0, math.nan, 5.0, math.inf]), 2)
    assert list(found.values) == [1.0, 2.0, 3.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (Scale(0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (Scale(0, 3000), [0, 1000, 2000, 3000]),
        (Scale(1e-5, 1, True), [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1]),
        (Scale(2, 30, True), [2, 5, 10, 20]),
    ],
)
def test_axes_are_marked_at_round_values(scale: Scale, expected: list[float]) -> None:
    assert ticks(scale, 6 if scale.log else 5) == pytest.approx(expected)


@pytest.mark.parametrize("values", [[5.0], [0.0], [-3.0, -3.0], [1e-300, 1e149], [-1e149, 1e149], [1e149] * 2])
def test_every_value_has_a_place_on_its_axis(values: list[float]) -> None:
    scale = scale_of(values)
    assert all(0 <= scale.at(value) <= 1 for value in values)
    assert len(ticks(scale)) <= 21


def test_numbers_are_short_and_exact_enough_and_durations_have_their_two_largest_units() -> None:
    numbers = {0.0: "0", 1234567.0: "1,234,567", 0.00012: "0.00012", 1.23456789: "1.2346", 2.5e20: "2.5e+20"}
    assert {value: units.number(value) for value in numbers} == numbers and units.number(math.nan) == "nan"
    seconds = {0.0: "0 s", 0.42: "0.42 s", 59.6: "1 min", 3601.0: "1 h", 7810.0: "2 h 10 min", 1e6: "11 d 13 h"}
    assert {value: units.duration(value) for value in seconds} == seconds
