"""The report: what a person reads of a run or a sweep on one HTML page, from run directories as they are and as they may be."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.errors import EXIT_USAGE, UnreadableRecordError
from slurmtrain.report.facts import RunFacts
from slurmtrain.report.page import units
from slurmtrain.report.page.render import Chart, Page, render
from slurmtrain.report.page.run_page import run_page
from slurmtrain.report.status.state import state
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import files
from tests.support.fake_slurm import FakeSlurm
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


def log(run: RunDir, *records: dict[str, Any]) -> None:
    with run.metrics_file.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def page_of(run: RunDir) -> Page:
    return run_page(RunFacts(run, state(run), NOW))


def shown(run: RunDir) -> Read:
    return Read(render(page_of(run), library=False))


def charts_of(page: Page) -> dict[str, Chart]:
    return {chart.key: chart for section in page.sections for chart in section.charts}


def figures_in(html: str) -> dict[str, Any]:
    """The figures of a page by the keys of their charts, which a text of a run cannot end early."""
    found = re.findall(
        r'id="chart-([^"]*)"(?:(?!</figure>).)*?<script type="application/json">(.*?)</script>', html, re.S
    )
    return {key: json.loads(figure) for key, figure in found}


def test_a_report_says_what_the_run_is_how_far_it_got_and_what_was_lost(runs: Path) -> None:
    words = shown(interrupted_run(runs)).words
    for said in (
        "was submitted on 2026-09-21",
        "by ada on login1",
        "with 8 ranks on 2 nodes and 8 GPUs",
        "has done 3,000 of 3,000 steps (100 %)",
        "tokens per second (40 % MFU)",
        "It took 4 attempts: 2 ended by preemption and 1 ended by hang. 1 restart kept the same job.",
        "Attempt 2 hung: rank 5 (gpu12) did not come to the all_reduce of step 1571",
        "8 checkpoints were committed. In the median: 412 MB, committed in 2.4 s, and training waited 0.8 s for it.",
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


def test_a_failed_run_is_explained_up_to_what_to_do_about_it(runs: Path) -> None:
    run = finished_run(runs / "lm", "20260921-141320-000ab")
    why = f"diverged: its samples are {', '.join(map(str, range(1000, 1100)))}. `resume last optim.lr=...` goes on"
    changed(run.attempt(1).record_file, reason="diverged", verdict="end", sentence=why, exit_code=78)
    found = told()
    assert found["advice"][0].startswith(f"It failed: {why}")
    assert any(each.startswith("It failed and has done 1,000 of 1,000 steps") for each in found["sentences"])


def slow_rank(run: RunDir, attempt: int, since: int, until: int | None, share: float, node: str) -> None:
    """A finding of a slow rank, as a run writes it."""
    facts: dict[str, Any] = {"attempt": attempt, "node": node, "ranks": [3], "phase": "data", "ratio": 1.6}
    facts |= {"excess_s": share, "step_s": 1.0}
    with run.events_file.open("a") as file:
        file.write(json.dumps({"time": BEGAN, "event": "straggler", "step": since, **facts}) + "\n")
        if until is not None:
            file.write(json.dumps({"time": BEGAN, "event": "straggler over", "step": until, **facts}) + "\n")


def test_of_slow_ranks_those_are_named_that_cost_most_and_none_of_an_attempt_long_over_that_cost_nothing(
    runs: Path,
) -> None:
    run = interrupted_run(runs)
    slow_rank(run, 1, 800, None, 0.05, "n1")  # the attempt ended at step 840
    slow_rank(run, 2, 1000, 1500, 0.6, "n2")
    slow_rank(run, 4, 2990, None, 0.02, "n4")  # which is still so
    named = [each for each in told()["advice"] if "times as long" in each]
    assert [node for each in named for node in ("n1", "n2", "n4") if f" on {node} " in each] == ["n2", "n4"]
    assert "That cost 10 % of the time of all steps." in named[0]


def test_the_timeline_shows_each_attempt_with_how_it_ended_and_the_restart_in_place(runs: Path) -> None:
    chart = charts_of(page_of(interrupted_run(runs)))["timeline"]
    traces = {trace["name"]: trace for trace in chart.figure["data"]}
    rows = ["submitted", "1: preempted", "2: hang", "3: preempted", "4: finished"]
    assert chart.figure["layout"]["yaxis"]["categoryarray"] == rows
    # A wait stands in the row of the attempt before it; the third attempt kept the nodes of the second.
    assert traces["waiting in the queue"]["y"] == [rows[0], rows[1], rows[3]]
    assert traces["between attempts in the same job"]["y"] == [rows[2]]
    assert set(traces["hangs"]["y"]) == {rows[2]} and set(traces["repeated steps"]["y"]) == {rows[3]}
    assert "productive steps" in traces


def test_a_page_loads_nothing_and_allows_nothing_but_its_own_scripts(runs: Path) -> None:
    page = page_of(interrupted_run(runs))
    assert 4e6 < len(render(page)) < 6e6
    html = render(page, library=False)
    read = Read(html)
    assert not read.open
    for tag, attributes in read.elements:
        assert tag not in ("img", "iframe", "object", "embed", "form", "base")
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        for name in ("src", "href", "action", "data", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,"))
    policy = next(each["content"] for tag, each in read.elements if tag == "meta" and "http-equiv" in each)
    assert policy is not None and policy.startswith("default-src 'none'; ")
    scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert re.fullmatch(r"script-src 'sha256-\S+' 'sha256-\S+'", scripts) and "connect-src" not in policy
    ids = [each["id"] for _, each in read.elements if "id" in each]
    assert len(ids) == len(set(ids))


def test_each_chart_of_curves_is_told_in_a_sentence_for_those_who_do_not_see_it(runs: Path) -> None:
    charts = {key: each for key, each in charts_of(page_of(interrupted_run(runs))).items() if each.over_steps}
    assert charts.keys() >= set("loss tokens_per_s phases lr memory_allocated_gb mfu".split())
    assert "Perplexity" in {chart.title for chart in charts.values()}
    assert all(re.search(r"minimum [\d.,e-]+ \(step [\d,]+\)", chart.summary) for chart in charts.values())


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
        file.write(json.dumps({"time": BEGAN + 9e3, "event": "checkpoint", "attempt": [evil], "step": evil}) + "\n")
    log(run, *({"step": step, evil: 0.5, f"valid_{evil}": 1.0} for step in (3010, 3020)))
    config = {"model": {"_target_": evil, evil: evil}, "job": {"command": evil, "kind": "command"}}
    run.config_file.write_text(json.dumps(config))

    page = page_of(run)
    assert not re.findall(r"\\x(?!a0)|\\u202e|\\ud8", repr(page))
    html = render(page, library=False)
    read = Read(html)
    usual = Read(render(page_of(interrupted_run(runs, "20260921-141321-512a0")), library=False))
    assert {tag for tag, _ in read.elements} <= {tag for tag, _ in usual.elements}
    names = {name for _, each in usual.elements for name in each}
    assert {name for _, each in read.elements for name in each} <= names
    assert sum(tag == "script" for tag, each in read.elements if each.get("type") != "application/json") == 2
    assert not [letter for letter in html if not letter.isprintable() and letter != "\n"]
    assert html.isascii()
    found = figures_in(html)
    assert found.keys() == charts_of(page).keys()
    assert "<" not in json.dumps(found)  # in text, plotly takes tags for what they are in HTML
    if evil.isprintable() and "{" not in evil:
        assert units.clean(evil) in read.words


def test_values_that_are_not_finite_leave_a_gap_and_are_counted(runs: Path) -> None:
    run = finished_run(runs / "lm", "20260921-141320-000ab")
    lines = run.metrics_file.read_text().splitlines()
    for number, value in ((24, math.nan), (25, math.inf), (26, -math.inf), (27, 1e308)):
        lines[number] = json.dumps({**json.loads(lines[number]), "loss": value})
    run.metrics_file.write_text("".join(f"{line}\n" for line in lines))
    chart = charts_of(page_of(run))["loss"]
    assert "4 values of training loss not finite" in chart.note
    assert chart.figure["data"][0]["y"].count(None) == 4
    json.dumps(chart.figure, allow_nan=False)


def test_a_program_that_logs_nothing_has_a_page_without_curves(runs: Path) -> None:
    run = RunDir(runs / "lm" / "20260921-141320-000ab")
    run.checkpoints.mkdir(parents=True)
    run.attempts.mkdir()
    files.write_json(run.info_file, run_info(name="lm", created=BEGAN, job_ids=["4711"]))
    write_config(run, job__kind="command", job__command="python my_train.py --lr <3>")
    end = {"reason": "finished", "verdict": "done", "ended": BEGAN + 400.0, "sentence": "finished", "kind": "command"}
    write_attempt(run, 1, started=BEGAN + 20.0, **end)
    page = page_of(run)
    assert "It runs the command python my_train.py --lr <3>" in shown(run).words
    assert [*charts_of(page)] == ["timeline"]
    assert charts_of(page)["timeline"].figure["layout"]["yaxis"]["categoryarray"] == ["submitted", "1: finished"]


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
            state(run)
        return
    words = shown(run).words
    assert "root:" not in words
    if kind in ("a link", "a folder"):
        assert "Parts could not be read:" in words


def test_a_sweep_has_its_points_their_results_over_each_key_and_curves_together(runs: Path, capsys: Out) -> None:
    sweep = sweep_of_eight(runs)
    assert main(["report", str(sweep), "--out", "sweep.html"]) == 0
    html = Path("sweep.html").read_text()
    read = Read(html)
    assert not read.open
    assert "8 points over optim.lr and model" in read.words
    assert "reached by point 6 (optim.lr=0.0024, model=small)" in read.words
    assert "Point 7 did not finish" in read.words
    assert "The best point has the largest optim.lr that was tried (0.0024)" in read.words
    found = figures_in(html)
    assert list(found) == ["key-0", "key-1", "sweep-0", "sweep-1"]
    (points,), axis = found["key-0"]["data"], found["key-0"]["layout"]["xaxis"]
    assert (points["x"][0], len(points["y"]), axis["type"]) == (0.0024, 8, "linear")  # the best is the first
    assert set(found["key-1"]["data"][0]["x"]) == {"small", "medium"}
    assert len(found["sweep-0"]["data"]) == len(found["sweep-1"]["data"]) == 8
    assert "rank 3: RuntimeError: CUDA error" in read.words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "nobody"], "no run's id begins with 'nobody'"),
        (["report", "last", "--port", "8000"], "--port needs --serve"),
        (["report", "last", "--serve", "--port", "80"], "a port from 1024 to 65535"),
        (["report", "last", "--serve", "--out", "x.html"], "--serve does not write files"),
        (["report", "last", "--metric", "loss"], "--metric and --mode are for a sweep"),
        (["report", "last", "--out", "no/such/folder/x.html"], "cannot write"),
    ],
)
def test_a_wrong_command_is_refused_in_a_sentence(runs: Path, words: list[str], said: str, capsys: Out) -> None:
    interrupted_run(runs)
    assert main(words) == EXIT_USAGE
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) <= 3
