"""The picture of a table: what is decided before anything is drawn, and that real files come out."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.collect import add_collect_options, print_collected
from slurmtrain.errors import UsageError
from slurmtrain.report.collect import Cell, Goal, Table
from slurmtrain.report.plot import HEIGHT, WIDTH, Axis, draw, drawn_as_text, panels

Out = pytest.CaptureFixture[str]


def table(keys: tuple[str, ...], *points: tuple[Cell, ...], mode: str = "min") -> Table:
    """Points of values of the keys, and the metric."""
    rows = tuple((number, *point) for number, point in enumerate(points))
    return Table(("point", *keys, "best_loss"), rows, keys, Goal("loss", mode))


def options(*words: str) -> argparse.Namespace:
    parser = Parser(prog="collect")
    add_collect_options(parser)
    return parser.parse_args(words)


# What is drawn.


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ((1e-4, 1e-2), "log"),
        ((1e-4, 9.9e-3), "linear"),
        ((0, 1, 1000), "linear"),
        ((-1.0, 1000.0), "linear"),
        ((5,), "linear"),
        ((1, 1000, "auto"), "category"),
        ((True, False), "category"),
        ((1.0, math.inf), "category"),
    ],
)
def test_an_axis_is_as_its_values_are(values: tuple[Cell, ...], kind: str) -> None:
    (panel,) = panels(table(("x",), *((value, 1.0) for value in values)))
    assert panel.x.kind == kind


def test_categories_stand_in_the_order_of_their_first_appearance() -> None:
    (panel,) = panels(table(("model",), ("tiny", 3.0), ("small", 2.0), ("tiny", 1.0)))
    assert panel.x == Axis("category", ("tiny", "small"))
    assert panel.xs == (0.0, 1.0, 0.0) and panel.best == 2


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 0)])
def test_there_is_a_panel_for_each_key_with_the_same_best_point(mode: str, best: int) -> None:
    found = panels(table(("lr", "width"), (0.1, 64, 3.0), (0.2, 32, 1.0), (0.3, 16, 2.0), mode=mode))
    assert [panel.key for panel in found] == ["lr", "width"]
    assert [panel.best for panel in found] == [best, best]


def test_points_without_a_value_are_left_out_and_counted() -> None:
    (panel,) = panels(table(("x",), (1, None), (2, math.nan), (3, math.inf), (None, 1.0), (4, 2.0)))
    assert (panel.xs, panel.ys, panel.best, panel.left_out) == ((4.0,), (2.0,), 0, 4)
    assert "4 of 5 points have none" in drawn_as_text(table(("x",), (1, None), (2, 2.0), *[(3, None)] * 3))


@pytest.mark.parametrize(
    ("empty", "sentence"),
    [
        (table(("x",), (1, None)), "no point has a value of loss yet"),
        (table((), (1.0,)), "no key differs"),
        (Table(("point", "x"), ((0, 1),), ("x",)), "no point has a value of a metric yet"),
    ],
)
def test_when_there_is_nothing_to_draw_one_sentence_says_why(empty: Table, sentence: str, tmp_path: Path) -> None:
    for attempt in (lambda: drawn_as_text(empty), lambda: draw(empty, tmp_path / "x.svg")):
        with pytest.raises(UsageError, match=sentence):
            attempt()
    assert list(tmp_path.iterdir()) == []


# In text.


def test_plain_text_puts_the_points_where_their_values_are(capsys: Out) -> None:
    drawn = table(("lr",), (1e-4, 4.0), (1e-3, 1.0), (1e-2, 2.5), (1e-4, 4.0))
    print_collected(drawn, options("--plot", "-"))
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "best_loss (min: 1)"
    grid = [line.partition("|")[2].ljust(WIDTH) for line in lines[:HEIGHT]]
    assert grid[0][0] == "8"  # two points at the left end, the highest
    assert grid[-1].strip() == "*" and grid[-1].index("*") in (29, 30)  # the middle decade, the lowest
    assert grid[HEIGHT // 2][WIDTH - 1] == "o"
    assert lines[0].startswith("4 |") and lines[HEIGHT - 1].startswith("1 |")
    assert lines[-2].split() == ["0.0001", "0.01"] and lines[-1].strip() == "lr, log"
    assert max(map(len, lines)) <= 80


def test_plain_text_names_categories_or_the_outer_ones_when_they_are_many() -> None:
    few = drawn_as_text(table(("m",), ("tiny", 1.0), ("small", 2.0), ("large", 3.0)))
    assert few.splitlines()[-2].split() == ["tiny", "small", "large"]
    one = drawn_as_text(table(("m",), ("tiny", 1.0)))
    assert one.splitlines()[-2].split() == ["tiny"]
    many = drawn_as_text(table(("m",), *((f"a-rather-long-name-{index}", 1.0 + index) for index in range(9))))
    assert many.splitlines()[-2].split() == ["a-rather-long-name-0", "a-rather-long-name-8"]
    assert max(map(len, many.splitlines())) <= 80


# In files.


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_a_picture_is_a_file_of_its_kind_with_the_names_as_they_are(name: str, tmp_path: Path, capsys: Out) -> None:
    pytest.importorskip("matplotlib")
    before = "matplotlib.pyplot" in sys.modules  # another test of this process may have imported it
    drawn = table(("optim.lr", "$m_1"), (1e-4, "a$b$", 4.0), (1e-3, "c_d", 300.0), (1e-2, "a$b$", 2.5))
    print_collected(drawn, options("--plot", str(tmp_path / name)))
    assert "loss over optim.lr, $m_1" in capsys.readouterr().out
    content = (tmp_path / name).read_bytes()
    if name.endswith("png"):
        assert content.startswith(b"\x89PNG\r\n") and len(content) > 10_000
    else:
        assert ElementTree.fromstring(content).tag.endswith("svg")
        # matplotlib notes each text that it draws as glyphs.
        assert all(f"<!-- {word} -->".encode() in content for word in ("optim.lr", "$m_1", "a$b$", "best_loss"))
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot draw into 'x.pdf'"):
        draw(table(("x",), (1, 1.0)), tmp_path / "x.pdf")


def test_without_matplotlib_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match="needs matplotlib") as error:
        draw(table(("x",), (1, 1.0)), tmp_path / "x.png")
    assert error.value.hint is not None and "slurmtrain[sweeps]" in error.value.hint and "--plot -" in error.value.hint
