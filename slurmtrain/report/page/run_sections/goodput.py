"""The section of where the time of a run went, and what interruptions cost."""

from __future__ import annotations

from slurmtrain.report.goodput.causes import HOLDS_NO_GPUS, Cause, Goodput
from slurmtrain.report.page import charts, sentences, units
from slurmtrain.report.page.contents import Grid, Section, ShareBar, grid


def goodput_section(goodput: Goodput | None) -> Section:
    """Return the section of where the time of the run went, as far as it is known."""
    title = "Goodput: where the time went"
    if goodput is None or not goodput.wall_s > 0:
        return Section("goodput", title, missing="It is not known yet where the time went.")
    parts = [
        (
            sentences.CAUSES[cause],
            cause.value,
            goodput.seconds.get(cause, 0.0),
            units.duration(goodput.seconds.get(cause, 0.0)),
        )
        for cause in Cause
        if goodput.seconds.get(cause, 0.0) > 0
    ]
    held = [part for part in parts if part[1] not in HOLDS_NO_GPUS]
    bars = [ShareBar("All time since the run was submitted", tuple(charts.shares(parts)))]
    if len(held) < len(parts) and held:
        bars.append(ShareBar("Time in which the run held nodes", tuple(charts.shares(held))))
    grids = [_cause_grid(goodput)]
    if goodput.startup_s:
        rows = [(units.clean(stage, 60), units.duration(seconds)) for stage, seconds in goodput.startup_s.items()]
        grids.append(grid("Start-up by stage, over all attempts", ("stage", "time"), rows, folded=True))
    if goodput.lost_s:
        costs = [
            (
                sentences.reason_words(reason),
                str(goodput.interruptions.get(reason, 0)),
                units.duration(seconds),
                units.hours(goodput.lost_gpu_seconds.get(reason, 0.0)),
            )
            for reason, seconds in goodput.lost_s.items()
        ]
        header = ("reason", "attempts", "time lost", "GPU hours lost")
        grids.append(grid("What interruptions cost", header, costs))
    return Section("goodput", title, sentences.what_was_lost(goodput), bars=tuple(bars), grids=tuple(grids))


def _cause_grid(goodput: Goodput) -> Grid:
    gpus, shares = goodput.gpu_hours > 0, goodput.shares
    rows = []
    for cause in Cause:
        seconds = goodput.seconds.get(cause, 0.0)
        if seconds > 0:
            held = "-" if cause in HOLDS_NO_GPUS else units.hours(goodput.gpu_seconds.get(cause, 0.0))
            share = units.percent(shares[cause]) if cause in shares else "-"
            rows.append((sentences.CAUSES[cause], units.duration(seconds), share, *([held] if gpus else [])))
    header = ("cause", "time", "share of the allocated time", *(["GPU hours"] if gpus else []))
    return grid("Time by cause", header, rows)
