"""A picture of a scaling test: the speed of each size against the ideal, and its efficiency against the 80 % line."""

from __future__ import annotations

import io
from pathlib import Path

from slurmtrain.planner.scaling import WORTH_IT
from slurmtrain.report.plot import kind_of_picture, load_figure_class
from slurmtrain.report.scaling import ScalingTest
from slurmtrain.report.table_files import write_whole


def draw(test: ScalingTest, path: Path) -> None:
    """Draw both panels side by side into a PNG or SVG file.

    Raises:
        UsageError: another kind of file, matplotlib is not installed, or the file cannot be written.
    """
    kind = kind_of_picture(path)
    figure_class = load_figure_class()
    nodes = [each.nodes for each in test.measurements]
    speed = [each.size.tokens_per_s for each in test.measurements]
    figure = figure_class(figsize=(8.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(nodes, [speed[0] * each / nodes[0] for each in nodes], "--", color="tab:gray", label="ideal")
    left.plot(nodes, speed, "o-", color="tab:blue", label="measured")
    planned = [(each.nodes, each.size.tokens / each.planned_s) for each in test.measurements if each.planned_s]
    if planned:
        left.plot([x for x, _ in planned], [y for _, y in planned], "s:", color="tab:orange", label="planned")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_ylabel("tokens/s")
    left.legend()
    right.bar([str(each.after.nodes) for each in test.doublings], [100 * each.efficiency for each in test.doublings])
    right.axhline(100 * WORTH_IT, color="tab:red", linestyle="--")
    right.set_ylabel("% of ideal, against the size before")
    for index, found in enumerate(test.bottlenecks):
        if found is not None:
            name = found.kind if found.axis is None else f"{found.kind}\n({found.axis})"
            right.annotate(name, (index, 2), ha="center", color="white", fontsize="small")
    for panel in (left, right):
        panel.set_xlabel("nodes")
        panel.grid(alpha=0.3)
    left.set_xticks(nodes, [str(each) for each in nodes])
    figure.suptitle("strong scaling" if test.strong else "weak scaling", fontsize="medium")
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=150)
    write_whole(path, content.getvalue())
