"""The charts of a page as PNG files, drawn by matplotlib: for slides and papers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import UsageError
from slurmtrain.report.page.charts import Chart, Parallel, Timeline
from slurmtrain.report.page.contents import Page, Section, ShareBar
from slurmtrain.report.page.series import column_means, m4
from slurmtrain.report.page.tables import make_folder
from slurmtrain.report.page.units import slug
from slurmtrain.report.table_files import EXTRA_HINT, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI, COLUMNS = 150, 1200
COLORS = ("#0b62c4", "#b85400", "#1c7a3e", "#7b3fb5", "#00707a", "#c0272d", "#7a5a00", "#5f6873")
CAUSES = {
    "productive": "#2c8a57", "startup": "#6a8ac5", "checkpoint": "#8a63c7", "evaluation": "#2a8a97", "redone": "#c9661c",
    "hung": "#b3261e", "lost": "#d0575f", "idle_end": "#808893", "queue": "#c3c9d1", "stopped": "#dfe3e8",
    "between": "#9a7f22", "unknown": "#7f8f8a",
}  # fmt: skip
MARKS = {
    "checkpoint": "^", "told": "|", "preempted": "D", "hang": "X", "failed": "x", "in_place": "v", "finished": "*",
    "stopped": "s", "trouble": "2",
}  # fmt: skip


def draw_all(page: Page, folder: Path) -> list[Path]:
    """Draw every chart of a page into a folder, which is made if need be, and return the files.

    Raises:
        UsageError: matplotlib is not installed, or a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            f"pictures need matplotlib, which cannot be imported ({error})",
            hint=f"{EXTRA_HINT}; the page itself needs no matplotlib",
        ) from None
    make_folder(folder)
    written = []

    def save(name: str, draw: Any, height: float = 3.6) -> None:
        # A Figure of its own, without pyplot: no display is looked for.
        figure = Figure(figsize=(7.5, height), layout="constrained")
        axis = figure.subplots()
        draw(axis)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=DPI)
        path = folder / f"{slug(name)}.png"
        write_whole(path, content.getvalue())
        written.append(path)

    for section in page.sections:
        for chart in section.charts:
            save(chart.key, lambda axis, chart=chart: _curves(axis, chart))
        for number, bar in enumerate(section.bars):
            save(f"{section.key}-{number}", lambda axis, bar=bar: _shares(axis, bar), 1.0 + 0.3 * len(bar.parts))
        _further(section, save)
    return written


def _further(section: Section, save: Any) -> None:
    timeline, parallel = section.timeline, section.parallel
    if timeline is not None:
        save("timeline", lambda axis: _timeline(axis, timeline), 1.8 + 0.3 * len(timeline.rows))
    if parallel is not None:
        save("parallel", lambda axis: _parallel(axis, parallel))


def _curves(axis: Axes, chart: Chart) -> None:
    names = chart.table.header[1:]
    if chart.stacked:
        steps, means = column_means(list(chart.series), COLUMNS)
        colors = [COLORS[line.color] for line in chart.lines]
        axis.stackplot(steps, means, labels=[_plain(name) for name in names], colors=colors)
    else:
        low, high = chart.data["x"]
        for line, name, series in zip(chart.lines, names, chart.series, strict=True):
            kept = m4(series, COLUMNS, low, high)
            style: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.5} if line.thin else {"linewidth": 1.6}
            if line.dots:
                style |= {"marker": "o", "markersize": 3.0}
            axis.plot(kept.steps, kept.values, color=COLORS[line.color], label=_plain(name), **style)
        if chart.log:
            axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel(_plain(chart.unit), parse_math=False)
    axis.set_title(_plain(chart.title), fontsize="medium", parse_math=False)
    axis.grid(alpha=0.3)
    if 1 < len(names) <= 12:
        _without_math(axis.legend(fontsize="small"))


def _shares(axis: Axes, bar: ShareBar) -> None:
    for number, part in enumerate(reversed(bar.parts)):
        color = CAUSES.get(part.color) or COLORS[int(part.color[1:])]
        axis.barh(number, part.width, color=color)
        axis.text(
            part.width + 0.5, number, f"{part.percent} ({part.value})", va="center", fontsize="small", parse_math=False
        )
    axis.set_yticks(range(len(bar.parts)), [_plain(part.name) for part in reversed(bar.parts)], parse_math=False)
    axis.set_xlim(0, 125)
    axis.set_xlabel("percent")
    axis.set_title(_plain(bar.title), fontsize="medium", parse_math=False)


def _timeline(axis: Axes, line: Timeline) -> None:
    words, named = dict(line.colors), set()
    for number, row in enumerate(reversed(line.rows)):
        for bar in row.bars:
            label = None if bar.color in named else words.get(bar.color)
            named.add(bar.color)
            axis.barh(
                number, bar.width, left=bar.begin, height=0.5, color=CAUSES.get(bar.color, "#888888"), label=label
            )
        for mark in row.marks:
            height = number - 0.38 if mark.shape == "checkpoint" else number
            size = 12 if mark.shape == "checkpoint" else 40
            axis.scatter(mark.at, height, marker=MARKS.get(mark.shape, "s"), color="black", s=size, zorder=3)
    axis.set_yticks(range(len(line.rows)), [_plain(row.name) for row in reversed(line.rows)])
    axis.set_xticks([tick.at for tick in line.x_ticks], [tick.text for tick in line.x_ticks])
    axis.set_xlabel(f"time since {line.begins}")
    axis.set_title("Timeline of the attempts", fontsize="medium")
    _without_math(axis.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0)))


def _parallel(axis: Axes, lines: Parallel) -> None:
    places = range(len(lines.axes))
    best_last = zip(lines.threads, reversed(lines.raw), strict=True)
    for thread, values in best_last:
        style: dict[str, Any] = {"linewidth": 2.5} if thread.best else {"linewidth": 1.0, "alpha": 0.6}
        axis.plot(list(places), list(values), color=COLORS[thread.color], **style)
    for place, each in enumerate(lines.axes):
        axis.axvline(place, color="#7d858f", linewidth=1)
        for mark in each.marks:
            height = 1 - (mark.at - 14) / (lines.height - 28)
            axis.text(place + 0.03, height, _plain(mark.text), fontsize="x-small", va="center", parse_math=False)
    axis.set_xticks(list(places), [_plain(each.name) for each in lines.axes], fontsize="small", parse_math=False)
    axis.set_yticks([])
    axis.set_title("Parallel coordinates", fontsize="medium")


def _plain(text: str) -> str:
    """Return a text whose dollar signs begin no formula of matplotlib."""
    return text.replace("$", "\\$")


def _without_math(legend: Any) -> None:
    for text in legend.get_texts():
        text.set_parse_math(False)
