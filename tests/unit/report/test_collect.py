"""`sweep collect`: the points of a sweep as a table, in every format that it can be written in."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.errors import EXIT_USAGE
from slurmtrain.report.collect import step_times
from tests.support.fake_slurm import FakeSlurm
from tests.support.interrupted_run import T0, RunFiles
from tests.support.runs import printed

Out = pytest.CaptureFixture[str]
FIRST_COLUMNS = ["point", "run", "state"]


class SweepFiles:
    """A sweep of files: each point is a run that has logged some records and has finished."""

    def __init__(self, path: Path):
        self.path, self.count = path, 0
        (path / "arrays").mkdir(parents=True)
        submitted: dict[str, object] = {"created": T0, "slurm_conf": None, "pack": 1, "backend": "slurm"}
        (path / "sweep.json").write_text(json.dumps({**submitted, "overrides": [], "token": "t"}))

    def point(self, varied: dict[str, str], *records: dict[str, Any], left: str = "all", **best: str) -> str:
        """The id of the run of a new point.

        Args:
            left: "all" or "nothing" of its run directory.
            best: best_metric and best_mode of its config.
        """
        run_id = f"20260101-000000-{self.count:03d}aa"
        line = {"number": self.count, "varied": varied, "identity": run_id, "shape": "s", "run_id": run_id}
        with (self.path / "points.jsonl").open("a") as points:
            points.write(json.dumps(line) + "\n")
        self.count += 1
        if left == "all":
            run = RunFiles(self.path / run_id, name="s")
            run.attempt(1, 1, started=2, ended=9, verdict="done", reason="finished")
            if best:
                run.config(checkpoint=best)
            run.run.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return run_id

    def rows(self, *words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(printed("sweep", "collect", self.path.name, "--json", *words))
        return found

    def written(self, *words: str) -> str:
        return printed("sweep", "collect", self.path.name, *words)

    def refused(self, capsys: Out, *words: str) -> str:
        capsys.readouterr()
        assert main(["sweep", "collect", self.path.name, *words]) == EXIT_USAGE
        return capsys.readouterr().err


@pytest.fixture
def sweep(tmp_path: Path, slurm: FakeSlurm, project: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFiles:
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    return SweepFiles(tmp_path / "runs" / "s.sweep-1")


# What is in it.


def test_there_is_a_row_for_every_point_with_its_last_and_best_values_also_for_one_that_never_ran(
    sweep: SweepFiles,
) -> None:
    logged = ({"step": 10, "loss": 2.0, "valid_loss": 2.5}, {"step": 20, "loss": 1.0, "valid_loss": 3.0})
    ran = sweep.point({"lr": "1e-1"}, *logged)
    silent = sweep.point({"lr": "2", "b.x": "true"})
    sweep.point({"model": "[1, z]"}, left="nothing")
    found = sweep.rows()
    metrics = ("step", "best_valid_loss", "valid_loss", "loss")
    assert list(found[0]) == [*FIRST_COLUMNS, "lr", "b.x", "model", *metrics]  # keys as they first appear
    # Numbers are numbers, whatever a sweep keeps them as.
    assert [list(row.values()) for row in found] == [
        [0, ran, "finished", 0.1, None, None, 20, 2.5, 3.0, 1.0],
        [1, silent, "finished", 2, True, None, None, None, None, None],
        [2, None, "removed", None, None, "[1, z]", None, None, None, None],
    ]


AGAIN = ((10, 5.0), (20, 4.0), (30, 0.5), (40, 0.4), (30, 3.0), (40, 2.0))
LOGGED: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    (
        [{"step": 1, "valid_loss": 4.0, "note": "text"}, {"step": 2, "loss": 3.0, "ok": True}, {"step": 3, "loss": None}],
        {"step": 2, "best_valid_loss": 4.0, "valid_loss": 4.0, "loss": 3.0},
    ),
    # What a resumed run has logged again counts once, and its old future is no best.
    (
        [{"step": step, "valid_loss": loss} for step, loss in AGAIN],
        {"step": 40, "best_valid_loss": 2.0, "valid_loss": 2.0},
    ),
    ([{"step": 30, "loss": 1.0}, {"step": 20, "loss": 2.0}], {"step": 20, "best_loss": 2.0, "loss": 2.0}),
    # Neither nan nor infinity is the best.
    (
        [{"step": 1, "loss": math.nan}, {"step": 2, "loss": -math.inf}, {"step": 3, "loss": 2.0}],
        {"step": 3, "best_loss": 2.0, "loss": 2.0},
    ),
    ([{"step": 1, "loss": math.nan}], {"step": 1, "best_loss": None, "loss": "NaN"}),
    ([{"step": 1, "speed": 1.0}], {"step": 1, "speed": 1.0}),  # nothing to compare by
]  # fmt: skip


@pytest.mark.parametrize(("records", "row"), LOGGED)
def test_each_metric_has_its_last_value_and_the_best_of_what_counts(
    records: list[dict[str, Any]], row: dict[str, Any], sweep: SweepFiles
) -> None:
    sweep.point({}, *records)
    (found,) = sweep.rows()
    assert {name: value for name, value in found.items() if name not in FIRST_COLUMNS} == row


ACC = {"acc": [0.9, 0.5], "loss": [1.0, 2.0], "train_loss": [1.0, 1.0]}
CHOSEN: list[tuple[bool, str, str]] = [
    # whether the config says that high acc is good; options; the column, or the error
    (True, "", "best_acc 0.9"),
    (True, "--metric acc --mode min", "best_acc 0.5"),
    (True, "--metric loss", "best_loss 1.0"),
    (True, "--metric lossy", "no run has logged the metric 'lossy'"),
    (False, "--metric acc", "whether high or low acc is better"),
    (False, "--metric train_loss", "best_train_loss 1.0"),
]


@pytest.mark.parametrize(("knows", "words", "found"), CHOSEN)
def test_points_are_compared_by_the_metric_of_the_config_or_by_one_that_is_named(
    knows: bool, words: str, found: str, sweep: SweepFiles, capsys: Out
) -> None:
    sweep.point({}, left="nothing")
    logged = [{"step": step + 1, **{name: values[step] for name, values in ACC.items()}} for step in (0, 1)]
    sweep.point({}, *logged, **({"best_metric": "acc", "best_mode": "max"} if knows else {}))
    if found.startswith("best_"):
        column, value = found.split()
        assert sweep.rows(*words.split())[1][column] == float(value)
    else:
        assert found in sweep.refused(capsys, *words.split())


# Formats.


@pytest.fixture
def odd(sweep: SweepFiles) -> SweepFiles:
    """Points whose cells are hard to write."""
    sweep.point({"model.name": 'a,"b"\nc', "on": "true", "x": "1"}, {"step": 1, "loss": 0.1 + 0.2})
    sweep.point({"model.name": "p|q\\|r", "x": "2.5"}, {"step": 1, "loss": math.nan})
    sweep.point({"model.name": "*x* \u00e9\x1b[31m", "on": "false"}, {"step": 1, "loss": -math.inf})
    return sweep


def test_each_format_writes_what_is_in_a_cell_so_that_it_can_be_read_again(odd: SweepFiles, tmp_path: Path) -> None:
    told = odd.written("-o", str(tmp_path / "t.csv"))
    assert told == f"{tmp_path}/t.csv: 3 points, 9 columns\n"
    content = (tmp_path / "t.csv").read_bytes()
    assert content.startswith(
        b"point,run,state,model.name,on,x,step,best_loss,loss\r\n0,20260101-000000-000aa,finished,"
    )
    read = [row[3:] for row in csv.reader(io.StringIO(content.decode(), newline=""))]
    assert read[1] == ['a,"b"\nc', "true", "1", "1", "0.30000000000000004", "0.30000000000000004"]  # every digit
    assert read[2][1:] == ["", "2.5", "1", "", "nan"] and read[3][1:] == ["false", "", "1", "", "-inf"]
    assert odd.written("--format", "csv").encode() == content

    def refuse(word: str) -> None:
        raise AssertionError(word)

    rows = json.loads(odd.written("--format", "json"), parse_constant=refuse)
    assert (rows[0]["model.name"], rows[0]["on"], rows[0]["loss"]) == ('a,"b"\nc', True, 0.1 + 0.2)
    assert [(row["best_loss"], row["loss"]) for row in rows[1:]] == [(None, "NaN"), (None, "-Infinity")]


# The time of a step, and of its parts, as a run has logged them.
def record(step: int, step_time_s: float = 1.0, **parts: float) -> dict[str, Any]:
    return {"step": step, "step_time_s": step_time_s, **{f"time_{name}_s": each for name, each in parts.items()}}


USUAL = {"data": 0.1, "forward_backward": 0.7, "communication": 0.15, "optimizer": 0.05, "other": 0.0}
TIMES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a step is the sum of its parts without pauses": (
        [record(step, **USUAL, checkpoint=3.0) for step in range(4)],
        {"step_s": pytest.approx(1.0), "parts": USUAL},
    ),
    "the first half, in which steps allocate and compile, does not count": (
        [record(step, forward_backward=seconds) for step, seconds in enumerate((60.0, 5.0, 1.0, 1.0))],
        {"step_s": 1.0},
    ),
    "without parts it is the mean that was logged last": (
        [{"step": 1, "step_time_s": 9.0}, {"step": 2, "step_time_s": 2.0, "data_wait_s": 0.5}],
        {"step_s": 2.0, "parts": {"data": 0.5}},
    ),
}


@pytest.mark.parametrize("case", TIMES)
def test_the_time_of_a_step(case: str) -> None:
    logged, expected = TIMES[case]
    found = step_times(logged)
    assert {name: getattr(found, name) for name in expected} == expected
