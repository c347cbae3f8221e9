"""From a set of runs to a table: what is in it, in every format it can be written in."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.collect import add_collect_options, columns_that_fit, print_collected
from slurmtrain.errors import UsageError
from slurmtrain.observe import MetricsLog
from slurmtrain.report.collect import Goal, Point, Table, as_it_counts, table_of
from slurmtrain.report.table_files import column_kind, format_of, table_bytes, write_whole
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.run_dir import RunDir

MakePoint = Callable[..., Point]
Out = pytest.CaptureFixture[str]
NAN = math.nan


@pytest.fixture
def point(tmp_path: Path) -> MakePoint:
    """A point whose run has logged these records."""
    numbers = iter(range(10_000))

    def make(varied: dict[str, Any], *records: dict[str, Any], best: tuple[str, str] | None = None) -> Point:
        run = create_run_dir(tmp_path / "runs", "sweep")
        if best is not None:
            run.config_file.write_text(yaml.safe_dump({"checkpoint": {"best_metric": best[0], "best_mode": best[1]}}))
        log = MetricsLog(run.metrics_file, -1)
        for record in records:
            log.write(**record)
        log.close()
        return Point(next(numbers), varied, run, "finished")

    return make


def rows(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


# What is in it.


def test_there_is_a_row_for_every_point_also_for_one_that_never_ran(point: MakePoint) -> None:
    ran = point({"lr": 0.1}, {"step": 10, "loss": 2.0, "valid_loss": 2.5}, {"step": 20, "loss": 1.0, "valid_loss": 3.0})
    silent = point({"lr": 0.2})
    gone = Point(7, {"lr": 0.3}, RunDir(Path("/nowhere/sweep/x")), "lost")
    unborn = Point(8, {"lr": 0.4}, None, "planned")
    table = table_of([ran, silent, gone, unborn])
    assert table.columns == ("point", "run", "state", "lr", "step", "best_valid_loss", "valid_loss", "loss")
    assert ran.run_dir is not None and silent.run_dir is not None
    assert table.rows == (
        (0, ran.run_dir.id, "finished", 0.1, 20, 2.5, 3.0, 1.0),
        (1, silent.run_dir.id, "finished", 0.2, None, None, None, None),
        (7, "x", "lost", 0.3, None, None, None, None),
        (8, None, "planned", 0.4, None, None, None, None),
    )


def test_varied_keys_have_a_column_each_in_the_order_of_their_first_appearance(point: MakePoint) -> None:
    table = table_of([point({"b.x": 1, "a": None}), point({"c": [1, "z"], "b.x": True}), point({})])
    assert table.varied == ("b.x", "a", "c") == table.columns[3:6]
    # null was chosen, while an empty cell was not.
    assert [row[3:6] for row in table.rows] == [(1, "null", None), (True, None, '[1, "z"]'), (None, None, None)]


def test_the_last_value_is_the_last_that_was_measured_of_each_metric(point: MakePoint) -> None:
    table = table_of(
        [
            point(
                {},
                {"step": 1, "valid_loss": 4.0, "note": "text"},
                {"step": 2, "loss": 3.0, "ok": True},
                {"step": 3, "loss": None},
            )
        ]
    )
    assert table.columns[3:] == ("step", "best_valid_loss", "valid_loss", "loss")
    assert table.rows[0][3:] == (2, 4.0, 4.0, 3.0)


def test_what_a_resumed_run_has_logged_again_counts_once_and_its_old_future_is_no_best(point: MakePoint) -> None:
    steps = [(10, 5.0), (20, 4.0), (30, 0.5), (40, 0.4), (30, 3.0), (40, 2.0)]
    table = table_of([point({}, *({"step": step, "valid_loss": loss} for step, loss in steps))])
    assert rows(table)[0]["best_valid_loss"] == 2.0 and rows(table)[0]["valid_loss"] == 2.0
    assert as_it_counts(steps) == [(10, 5.0), (20, 4.0), (30, 3.0), (40, 2.0)]
    assert as_it_counts([(30, 1.0), (20, 2.0)]) == [(20, 2.0)]


def test_a_torn_line_of_a_killed_run_is_left_out(point: MakePoint) -> None:
    made = point({}, {"step": 1, "loss": 3.0})
    assert made.run_dir is not None
    with made.run_dir.metrics_file.open("a") as file:
        file.write('{"step": 2, "lo{"step": 3, "loss": 1.0}\n[1]\n{"step": 4, "loss": 2.0}\n{"step": 5, "loss": 0.')
    assert rows(table_of([made]))[0]["step"] == 4
    assert rows(table_of([made]))[0]["best_loss"] == 2.0


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ([2.0, 1.0, 3.0], "min", 1.0),
        ([2.0, 1.0, 3.0], "max", 3.0),
        ([NAN, 2.0, -math.inf], "min", 2.0),
        ([NAN, math.inf], "max", None),
        ([], "min", None),
    ],
)
def test_neither_nan_nor_infinity_is_the_best(values: list[float], mode: str, best: float | None) -> None:
    assert Goal("x", mode).best(values) == best


# What points are compared by.


def test_the_best_is_that_of_the_configs_metric(point: MakePoint) -> None:
    first = point({}, {"step": 1, "acc": 0.9, "loss": 1.0}, {"step": 2, "acc": 0.5, "loss": 2.0}, best=("acc", "max"))
    table = table_of([Point(0, {}, None, "planned"), first])
    assert table.goal == Goal("acc", "max")
    assert rows(table)[1]["best_acc"] == 0.9
    # Also when it is asked for by name; the config knows what is good.
    assert table_of([first], metric="acc").goal == Goal("acc", "max")
    assert table_of([first], metric="acc", mode="min").goal == Goal("acc", "min")


def test_without_that_metric_the_loss_is_taken_and_without_any_nothing(point: MakePoint) -> None:
    assert table_of([point({}, {"step": 1, "loss": 1.0})]).goal == Goal("loss", "min")
    assert table_of([point({}, {"step": 1, "loss": 1.0})], mode="max").goal == Goal("loss", "max")
    neither = table_of([point({}, {"step": 1, "speed": 1.0})])
    assert neither.goal is None and neither.columns[-2:] == ("step", "speed")
    assert table_of([]).rows == ()


def test_a_metric_that_nobody_logged_is_refused_with_the_nearest(point: MakePoint) -> None:
    with pytest.raises(UsageError, match="no run has logged the metric 'vaild_loss'") as error:
        table_of([point({}, {"step": 1, "valid_loss": 1.0})], metric="vaild_loss")
    assert error.value.hint == "did you mean valid_loss?"
    # Before any has logged anything, it may still come.
    assert table_of([point({})], metric="vaild_loss").columns[-2:] == ("best_vaild_loss", "vaild_loss")


def test_whether_high_or_low_is_good_is_not_guessed(point: MakePoint) -> None:
    made = point({}, {"step": 1, "accuracy": 1.0, "train_loss": 1.0})
    with pytest.raises(UsageError, match="whether high or low accuracy is better"):
        table_of([made], metric="accuracy")
    assert table_of([made], metric="accuracy", mode="max").goal == Goal("accuracy", "max")
    assert table_of([made], metric="train_loss").goal == Goal("train_loss", "min")


def test_a_metric_called_like_another_column_keeps_one_of_its_own(point: MakePoint) -> None:
    table = table_of([point({"loss": "l1"}, {"step": 1, "loss": 1.0, "state": 3, "best_loss": 9.0})])
    assert len(set(table.columns)) == len(table.columns)
    row = rows(table)[0]
    assert (row["loss"], row["metric.loss"], row["state"], row["metric.state"]) == ("l1", 1.0, "finished", 3)
    assert (row["best_loss"], row["metric.best_loss"]) == (1.0, 9.0)


# Formats.

CELLS = Table(
    ("point", "model.name", "on", "x", "best_loss"),
    (
        (0, 'a,"b"\nc', True, 1, 0.1 + 0.2),
        (1, "p|q\\|r", None, 2.5, NAN),
        (2, "*x* é", False, None, -math.inf),
    ),
    ("model.name", "on", "x"),
    Goal("loss", "min"),
)


def test_csv_is_that_of_rfc_4180_with_every_digit() -> None:
    content = table_bytes(CELLS, "csv")
    assert content.startswith(b'point,model.name,on,x,best_loss\r\n0,"a,""b""\nc",true,1,0.30000000000000004\r\n')
    read = list(csv.reader(io.StringIO(content.decode(), newline="")))
    assert read[1][1] == 'a,"b"\nc' and float(read[1][4]) == 0.1 + 0.2
    assert read[2][2:] == ["", "2.5", "nan"] and read[3][3:] == ["", "-inf"]


def test_markdown_has_one_line_a_row_whatever_is_in_a_cell() -> None:
    lines = table_bytes(CELLS, "markdown").decode().splitlines()
    assert lines == [
        "| point | model.name | on | x | best_loss |",
        "| --- | --- | --- | --- | --- |",
        '| 0 | a,"b" c | true | 1 | 0.3 |',
        "| 1 | p\\|q\\\\\\|r |  | 2.5 | nan |",
        "| 2 | \\*x\\* é | false |  | -inf |",
    ]


def test_json_is_strict_and_tells_not_a_number_from_not_known() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    read = json.loads(table_bytes(CELLS, "json"), parse_constant=refuse)
    assert read[0] == {"point": 0, "model.name": 'a,"b"\nc', "on": True, "x": 1, "best_loss": 0.1 + 0.2}
    assert [row["best_loss"] for row in read[1:]] == ["NaN", "-Infinity"]
    assert read[1]["on"] is None


def test_parquet_keeps_numbers_as_numbers(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_whole(tmp_path / "t.parquet", table_bytes(CELLS, "parquet"))
    read = parquet.read_table(tmp_path / "t.parquet")
    assert [str(field.type) for field in read.schema] == ["int64", "string", "bool", "double", "double"]
    assert read.column("x").to_pylist() == [1.0, 2.5, None]
    assert read.column("best_loss").to_pylist()[0] == 0.1 + 0.2
    assert math.isnan(read.column("best_loss").to_pylist()[1])
    empty = Table(("point", "run"), ())
    (tmp_path / "empty.parquet").write_bytes(table_bytes(empty, "parquet"))
    assert parquet.read_table(tmp_path / "empty.parquet").column_names == ["point", "run"]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ([1, 2, None], "int"),
        ([1, 2.5], "float"),
        ([True, None], "bool"),
        ([True, 1], "text"),
        ([1, "auto"], "text"),
        ([2**63], "text"),
        ([None], "float"),
        ([], "float"),
    ],
)
def test_a_column_has_one_type_that_holds_all_its_cells(cells: list[Any], kind: str) -> None:
    assert column_kind(cells) == kind


def test_without_pyarrow_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="needs pyarrow") as error:
        table_bytes(CELLS, "parquet")
    assert error.value.hint == "pip install 'slurmtrain[sweeps]'"


def test_the_format_is_that_of_the_name() -> None:
    for name, kind in {"a.csv": "csv", "b.MD": "markdown", "c.json": "json", "d.parquet": "parquet"}.items():
        assert format_of(Path(name)) == kind
    with pytest.raises(UsageError, match=r"'table.xlsx' does not say"):
        format_of(Path("table.xlsx"))


# Files.


def test_a_file_is_replaced_in_one_step_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "t.csv", tmp_path / "link.csv"
    target.write_text("old")
    link.symlink_to(target)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UsageError, match="No space left"):
        write_whole(link, b"new")
    assert target.read_text() == "old"
    monkeypatch.undo()
    write_whole(link, b"new")
    assert target.read_text() == "new" and link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.csv", "t.csv"]
    assert stat.S_IMODE(target.stat().st_mode) & 0o400


def test_a_pipe_that_is_named_is_written_into_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that the writer need not wait for one
    write_whole(pipe, b"table")
    assert os.read(reader, 100) == b"table" and stat.S_ISFIFO(pipe.lstat().st_mode)
    os.close(reader)
    read_end, write_end = os.pipe()
    write_whole(Path(f"/dev/fd/{write_end}"), b"page")  # as /dev/stdout, or >(...) of bash
    os.close(write_end)
    assert os.read(read_end, 100) == b"page"
    os.close(read_end)


@pytest.mark.parametrize("name", ["nowhere/t.csv", "."])
def test_a_file_that_cannot_be_written_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        write_whole(tmp_path / name, b"")
    assert list(tmp_path.iterdir()) == []


# What is typed.


def options(*words: str) -> argparse.Namespace:
    parser = Parser(prog="collect")
    add_collect_options(parser)
    return parser.parse_args(words)


def test_a_table_is_printed_or_written_as_the_options_say(tmp_path: Path, capsys: Out) -> None:
    print_collected(Table(("point", "m\x1b"), ((0, "\x1b[31mx"),)), options())
    assert "m?" in (shown := capsys.readouterr().out) and "?[31mx" in shown and "\x1b" not in shown
    print_collected(CELLS, options("--format", "csv"))
    assert capsys.readouterr().out.encode() == table_bytes(CELLS, "csv")
    print_collected(CELLS, options("-o", str(tmp_path / "t.json")))
    assert capsys.readouterr().out == f"{tmp_path}/t.json: 3 points, 5 columns\n"
    assert len(json.loads((tmp_path / "t.json").read_text())) == 3
    print_collected(CELLS, options("-o", str(tmp_path / "t.txt"), "--format", "markdown"))
    assert (tmp_path / "t.txt").read_text().startswith("| point |")
    with pytest.raises(UsageError, match="Parquet is nothing for a terminal"):
        print_collected(CELLS, options("--format", "parquet"))


def test_columns_that_a_terminal_has_no_room_for_are_named(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    names = ("point", "best_loss", *(f"metric_{index}" for index in range(30)))
    wide = Table(names, ((0, 1.0, *[2.0] * 30),), goal=Goal("loss", "min"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    print_collected(wide, options())
    *lines, sentence = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert "more columns have no room: " in sentence and sentence.endswith("metric_29")
    assert 60 < max(map(len, lines)) <= 80


def test_a_table_fits_a_terminal_of_80_letters_and_keeps_what_it_is_for() -> None:
    header = ["point", "run", "state", "optim.lr", "optim.weight_decay", "step", "best_valid_loss", "valid_loss"]
    widths = [5, 21, 8, 8, 18, 5, 15, 10]
    assert columns_that_fit(header, widths, 7, None) == list(range(8))
    assert columns_that_fit(header, widths, 7, 120) == list(range(8))
    assert columns_that_fit(header, widths, 7, 80) == [0, 2, 3, 4, 5, 6]
    assert columns_that_fit(header, widths, 7, 70) == [0, 2, 3, 4, 6]
    assert columns_that_fit(header, widths, 7, 10) == [0, 3, 4, 6]
