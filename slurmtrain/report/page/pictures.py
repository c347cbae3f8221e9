"""Charts as pictures on disk, drawn by matplotlib: for slides and papers."""

from __future__ import annotations

import functools
import html
import io
import math
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import UsageError
from slurmtrain.report.page.contents import Chart, Page
from slurmtrain.report.page.render import TEMPLATES
from slurmtrain.report.page.units import slug
from slurmtrain.report.table_files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI, PIXELS_PER_INCH = 150, 72
MARKERS = {
    "circle": "o", "triangle-up": "^", "triangle-down": "v", "line-ns": "|", "diamond": "D", "x": "x",
    "star": "*", "square": "s", "cross": "P",
}  # fmt: skip
MOST_NAMED = 20  # things that a legend lists


def draw_all(page: Page, folder: Path) -> list[Path]:
    """Draw every chart of a page into a folder, which is made if need be, and return the files.

    Raises:
        UsageError: matplotlib is not installed, or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}", hint="give another folder") from None
    paths = [folder / f"{slug(chart.key)}.png" for chart in page.charts]
    for chart, path in zip(page.charts, paths, strict=True):
        draw(chart, path)
    return paths


def draw(chart: Chart, path: Path) -> None:
    """Draw a chart into a PNG or SVG file.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            f"a picture needs matplotlib, which cannot be imported ({error})",
            hint="pip install 'slurmtrain[pictures]'; the page itself needs no matplotlib",
        ) from None
    content = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False}):  # a name may have dollar signs
        # A Figure of its own, without pyplot: no display is looked for.
        figure = Figure(
            figsize=(7.5, max(1.6, chart.figure["layout"]["height"] / PIXELS_PER_INCH)), layout="constrained"
        )
        axis = figure.subplots()
        _draw_figure(axis, chart.figure)
        axis.set_title(chart.title, fontsize="medium")
        if chart.unit:
            axis.set_ylabel(chart.unit)
        if 1 < len(chart.legend) <= MOST_NAMED:
            beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if chart.wide else {}
            axis.legend(fontsize="x-small", **beside)
        figure.savefig(content, format=path.suffix.removeprefix("."), dpi=DPI)
    write_whole(path, content.getvalue())


def _draw_figure(axis: Axes, figure: Mapping[str, Any]) -> None:
    """Draw what of plotly's figures `figures` and `timeline` make use of."""
    layout, traces = figure["layout"], figure["data"]
    x_axis, y_axis = layout["xaxis"], layout["yaxis"]
    dated, rows = x_axis.get("type") == "date", y_axis.get("categoryarray", [])
    areas = [trace for trace in traces if "stackgroup" in trace]
    if areas:
        names, colors = [_name(each) for each in areas], [_color(each["fillcolor"]) for each in areas]
        axis.stackplot(areas[0]["x"], [each["y"] for each in areas], labels=names, colors=colors)
    for trace in traces:
        if "stackgroup" in trace:
            continue
        xs = [_day(each) if dated and isinstance(each, str) else each for each in trace["x"]]
        ys = [rows.index(each) if rows else math.nan if each is None else each for each in trace["y"]]
        if trace["type"] == "bar":
            begins = [_day(each) if dated else each for each in trace["base"]]
            widths = [each / 86_400_000 for each in xs] if dated else xs
            axis.barh(ys, widths, left=begins, height=0.5, color=_color(trace["marker"]["color"]), label=_name(trace))
            continue
        marker, line = trace["marker"], trace.get("line", {})
        axis.plot(
            [html.unescape(each) if isinstance(each, str) else each for each in xs],
            ys,
            linestyle="-" if "lines" in trace["mode"] else "",
            linewidth=line.get("width", 1) * 0.8,
            marker=MARKERS[marker.get("symbol", "circle")] if "markers" in trace["mode"] else "",
            markersize=marker["size"] * 0.6,
            color=_color(marker["color"]),
            alpha=trace.get("opacity", 1),
            label=_name(trace),
        )
        for x, y, text in zip(xs, ys, trace.get("text", ()), strict=False):
            axis.annotate(html.unescape(text), (x, y), xytext=(4, 4), textcoords="offset points", fontsize="x-small")
    if dated:
        axis.xaxis_date()
    for scale, set_scale in ((x_axis, axis.set_xscale), (y_axis, axis.set_yscale)):
        if scale.get("type") == "log":
            set_scale("log")
    if "tickvals" in x_axis:
        axis.set_xticks(x_axis["tickvals"], [html.unescape(each) for each in x_axis["ticktext"]])
    if rows:
        axis.set_yticks(range(len(rows)), rows)
    if y_axis.get("visible") is False:
        axis.set_yticks([])
    if y_axis.get("autorange") == "reversed":
        axis.invert_yaxis()
    axis.set_xlabel(html.unescape(x_axis.get("title", {}).get("text", "")))
    axis.grid(alpha=0.3)


def _name(trace: Mapping[str, Any]) -> str:
    return html.unescape(trace["name"]) or "_nolegend_"


def _color(variable: str) -> str:
    return _palette()[variable.removeprefix("--")]


@functools.cache
def _palette() -> dict[str, str]:
    """Return the colours of the light theme by the names of their variables."""
    light = (TEMPLATES / "page.css").read_text().partition("@media")[0]
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light))


def _day(moment: str) -> float:
    """Return matplotlib's number for a local time: days since 1970."""
    return (datetime.fromisoformat(moment) - datetime(1970, 1, 1)).total_seconds() / 86_400
