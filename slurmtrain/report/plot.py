"""A picture of a table: the result of each point over each varied key. One panel per key, the best point marked.

What is drawn is decided first and can be tested as data (`panels`); it is drawn by matplotlib, or in plain text.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import UsageError
from slurmtrain.report.collect import Cell, Table
from slurmtrain.report.table_files import EXTRA_HINT, plain, short, write_whole
from slurmtrain.system.records import is_scalar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = ("png", "svg")
DECADES = 100.0  # a linear axis shows nothing of the smaller values when they span more
WIDTH, HEIGHT = 60, 9  # size of a plain panel in characters


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        kind: "linear", "log" or "category".
        names: names of the categories, in the order of their positions 0, 1, ...
    """

    kind: str
    names: tuple[str, ...] = ()

    def fraction(self, value: float, values: Sequence[float]) -> float:
        """Return where a value lies between the least and the greatest of all, 0 to 1."""
        scale = math.log10 if self.kind == "log" else float
        low, high = scale(min(values)), scale(max(values))
        return 0.5 if low == high else (scale(value) - low) / (high - low)


@dataclass(frozen=True)
class Panel:
    """One varied key.

    Attributes:
        xs: values of the key; for categories, their positions.
        ys: values of the metric.
        best: index of the best point.
        left_out: number of points that have no finite value of the metric, or do not have the key.
    """

    key: str
    x: Axis
    y: Axis
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    best: int
    left_out: int


def panels(table: Table) -> list[Panel]:
    """Return what to draw: the goal's best value over every varied key.

    Raises:
        UsageError: there is nothing to draw.
    """
    if not table.varied:
        raise UsageError("no key differs between the points, so there is no axis to plot them over")
    metric = table.column(table.goal.column) if table.goal is not None else []
    drawn = [_panel(table, key, metric) for key in table.varied]
    found = [panel for panel in drawn if panel is not None]
    if not found:
        name = table.goal.metric if table.goal is not None else "a metric"
        raise UsageError(f"no point has a value of {name} yet, so there is nothing to draw")
    return found


def _panel(table: Table, key: str, metric: Sequence[Cell]) -> Panel | None:
    pairs = [
        (x, float(y))
        for x, y in zip(table.column(key), metric, strict=False)
        if x is not None and isinstance(y, int | float) and math.isfinite(y)
    ]
    if not pairs or table.goal is None:
        return None
    cells, ys = [x for x, _ in pairs], tuple(y for _, y in pairs)
    x_axis, xs = _positions(cells)
    best = table.goal.best(ys)
    assert best is not None
    return Panel(key, x_axis, Axis(_scale(ys)), xs, ys, ys.index(best), len(table.rows) - len(pairs))


def _positions(cells: Sequence[Cell]) -> tuple[Axis, tuple[float, ...]]:
    numbers = [float(cell) for cell in cells if is_scalar(cell) and math.isfinite(cell)]
    if len(numbers) == len(cells):
        return Axis(_scale(numbers)), tuple(numbers)
    names = tuple(dict.fromkeys(plain(cell) for cell in cells))
    return Axis("category", names), tuple(float(names.index(plain(cell))) for cell in cells)


def _scale(values: Sequence[float]) -> str:
    return "log" if min(values) > 0 and max(values) / min(values) >= DECADES else "linear"


def kind_of_picture(path: Path) -> str:
    """Return the kind of picture that a file's name asks for, "png" or "svg".

    Raises:
        UsageError: another kind of file.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in SUFFIXES:
        raise UsageError(f"cannot draw into {path.name!r}", hint="give a name that ends in .png or .svg, or - for text")
    return kind


def load_figure_class() -> type[Figure]:
    """Return matplotlib's Figure, which takes a moment to import.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            f"a picture needs matplotlib, which cannot be imported ({error})",
            hint=f"{EXTRA_HINT}; --plot - draws with text",
        ) from None
    return Figure


def draw(table: Table, path: Path) -> None:
    """Draw the panels side by side into a PNG or SVG file.

    Raises:
        UsageError: another kind of file, matplotlib is not installed, nothing to draw, or the file cannot be written.
    """
    kind = kind_of_picture(path)
    found = panels(table)
    figure_class = load_figure_class()
    assert table.goal is not None
    # A Figure of its own, without pyplot: no display is looked for.
    figure = figure_class(figsize=(4.2 * len(found), 3.6), layout="constrained")
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for panel, axis in zip(found, axes, strict=True):
        axis.scatter(panel.xs, panel.ys, s=24, color="tab:blue", alpha=0.8)
        axis.scatter(panel.xs[panel.best], panel.ys[panel.best], s=140, marker="*", color="tab:red", zorder=3)
        if panel.x.kind == "category":
            long = {"rotation": 30, "ha": "right"} if max(map(len, panel.x.names)) > 8 else {}
            axis.set_xticks(range(len(panel.x.names)), panel.x.names, parse_math=False, **long)
        else:
            axis.set_xscale(panel.x.kind)
        axis.set_yscale(panel.y.kind)
        axis.set_xlabel(panel.key, parse_math=False)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(table.goal.column, parse_math=False)
    figure.suptitle(_title(table, found[0]), fontsize="medium", parse_math=False)
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=150)
    write_whole(path, content.getvalue())


def drawn_as_text(table: Table) -> str:
    """Return the panels one below the other: `o` a point, `8` several, `*` the best."""
    return "\n".join(_text_panel(table, panel) for panel in panels(table))


def _text_panel(table: Table, panel: Panel) -> str:
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    for x, y in zip(panel.xs, panel.ys, strict=True):
        row, column = _place(panel, x, y)
        cells[row][column] = "o" if cells[row][column] == " " else "8"
    row, column = _place(panel, panel.xs[panel.best], panel.ys[panel.best])
    cells[row][column] = "*"
    labels = [""] * HEIGHT
    labels[0], labels[-1] = short(max(panel.ys)), short(min(panel.ys))
    margin = max(map(len, labels))
    lines = [
        _title(table, panel),
        *(f"{label:>{margin}} |{''.join(row)}" for label, row in zip(labels, cells, strict=True)),
    ]
    lines.append(f"{'':>{margin}} +{'-' * WIDTH}")
    names = panel.x.names or (short(min(panel.xs)), short(max(panel.xs)))
    kind = ", log" if panel.x.kind == "log" else ""
    lines.append(f"{'':>{margin}}  {_spread(names)}")
    lines.append(f"{'':>{margin}}  {f'{panel.key}{kind}':^{WIDTH}}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _place(panel: Panel, x: float, y: float) -> tuple[int, int]:
    """Return row and column of a point; the greatest value is in the first row."""
    right, up = panel.x.fraction(x, panel.xs), panel.y.fraction(y, panel.ys)
    return round((1 - up) * (HEIGHT - 1)), round(right * (WIDTH - 1))


def _spread(names: Sequence[str]) -> str:
    """Return names below their positions, from the left to the right edge; only the outer ones if there is no room for all."""
    if len(names) == 1:
        return f"{names[0]:^{WIDTH}}"
    if sum(len(name) + 2 for name in names) > WIDTH:
        names = (names[0][: WIDTH // 2 - 2], names[-1][: WIDTH // 2 - 2])
    line = [" "] * WIDTH
    for index, name in enumerate(names):
        middle = index * (WIDTH - 1) // (len(names) - 1)
        begin = min(max(0, middle - len(name) // 2), WIDTH - len(name))
        line[begin : begin + len(name)] = name
    return "".join(line)


def _title(table: Table, panel: Panel) -> str:
    assert table.goal is not None
    of_all = f", {panel.left_out} of {len(table.rows)} points have none" if panel.left_out else ""
    best = short(panel.ys[panel.best])
    return f"{table.goal.column} ({table.goal.mode}: {best}{of_all})"
