"""Sections of curves: loss and evaluation, throughput, training, and metrics that nobody here knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slurmtrain.report.page import charts, units
from slurmtrain.report.page.charts import Chart, Curve
from slurmtrain.report.page.contents import Section
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.run_sections.phases import PHASES
from slurmtrain.report.page.series import Series, trailing_mean

SPEED = (
    "tokens_per_s",
    "samples_per_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "step_time_s",
    "slowest_rank_ratio",
)
TRAINING = ("lr", "grad_norm", "param_norm")
MEMORY = ("memory_allocated_gb", "memory_reserved_gb")
LAYERS = ("grad_norm/", "param_norm/")  # followed by the name of a layer
TOLD_BY_OTHERS = ("data_wait_s", "time_total_s", "mfu_attended", "communication_share", "slowest_rank", "valid_tokens")
MOST_OTHERS = 24  # charts of metrics that nobody here knows
MOST_LAYERS = 64  # curves of one chart
SMOOTHED_PARTS = 50  # the mean of a curve is over this part of its points
SMOOTHED_LEAST = 4  # points of a mean: one of fewer is not drawn


def loss_section(facts: RunFacts, span: tuple[float, float], columns: int) -> Section:
    """Return the section of the training loss and of the metrics of evaluations."""
    found: list[Chart | None] = []
    loss, valid = facts.series.get("loss"), facts.series.get("valid_loss")
    curves = (
        with_mean(loss, "training loss", mean="training loss, mean of {points:,} logged steps")
        if loss is not None
        else []
    )
    if valid is not None:
        curves.append(Curve(valid, "validation loss", 1, points=True))
    if curves:
        found.append(charts.line_chart("loss", "Loss", curves, span, unit="nats per token", columns=columns))
    found += [
        charts.line_chart(
            chart_key(name, number),
            _title(name),
            [Curve(facts.series[name], units.name_of(name), 1, points=True)],
            span,
            unit=units.unit_of(name),
            columns=columns,
        )
        for number, name in enumerate(evaluation_metrics(facts.series))
    ]
    drawn = tuple(chart for chart in found if chart is not None)
    missing = "" if drawn else "Nothing has been logged yet, so there is no curve."
    about = "Each step appears once in the curves: values of steps that were repeated replace the earlier ones."
    return Section("curves", "Loss and evaluation", about if drawn else "", drawn, missing=missing)


def with_mean(series: Series, name: str, *, mean: str = "mean of {points:,} logged steps") -> list[Curve]:
    """Return a curve; of many points thin, and with the mean over a fiftieth of them."""
    points = len(series.values) // SMOOTHED_PARTS
    if points < SMOOTHED_LEAST:
        return [Curve(series, name, points=True)]
    return [
        Curve(series, name, thin=True),
        Curve(trailing_mean(series, points), mean.format(points=points), derived=True),
    ]


def evaluation_metrics(series: Mapping[str, Series]) -> list[str]:
    """Return the metrics of evaluations, the validation loss excepted: those whose steps have no training loss, or few.

    They are told by their names, too: valid_..., eval_..., test_...
    """
    trained = series["loss"].steps if "loss" in series else np.empty(0)
    found = []
    for name, each in series.items():
        if name in ("loss", "valid_loss", *PHASES, *SPEED, *TRAINING, *MEMORY, *TOLD_BY_OTHERS):
            continue
        named = name.startswith(("valid_", "eval_", "test_", "eval/", "valid/"))
        apart = len(trained) > 0 and len(each.steps) < len(trained) and not np.isin(each.steps, trained).any()
        if named or apart or (len(trained) > 0 and _only_of_evaluations(name)):
            found.append(name)
    return found[:12]


def _only_of_evaluations(name: str) -> bool:
    return name in ("perplexity", "bits_per_byte", "accuracy")


def chart_key(name: str, number: int) -> str:
    """Return the key of the chart of a metric, which no other has.

    Args:
        number: its place among the metrics of its section.
    """
    if name in units.NAMES:
        return name
    return f"metric-{name}" if units.slug(name) == name else f"metric-{units.slug(name)}-{number}"


def _title(name: str) -> str:
    words = units.name_of(name)
    return words[:1].upper() + words[1:] if words != name else words


def throughput_section(facts: RunFacts, span: tuple[float, float], columns: int) -> Section:
    """Return the section of the speed of training."""
    drawn = _single(facts, SPEED, span, columns)
    missing = "" if drawn else "No speed has been logged. A program of your own may report none."
    return Section("throughput", "Throughput", "", drawn, missing=missing)


def _single(facts: RunFacts, names: Sequence[str], span: tuple[float, float], columns: int) -> tuple[Chart, ...]:
    found = [
        charts.line_chart(
            chart_key(name, number),
            _title(name),
            _curves_of(facts.series, name),
            span,
            unit=units.unit_of(name),
            columns=columns,
            log=None if name in ("lr", "grad_norm") else False,
        )
        for number, name in enumerate(names)
        if name in facts.series
    ]
    return tuple(chart for chart in found if chart is not None)


def _curves_of(series: Mapping[str, Series], name: str) -> list[Curve]:
    """Return the curves of the chart of one metric."""
    if name == "lr":  # which is exact: a mean would only blur it
        return [Curve(series[name], units.name_of(name))]
    curves = with_mean(series[name], units.name_of(name))
    if name == "mfu" and "mfu_attended" in series:
        curves.append(Curve(series["mfu_attended"], "only attention within documents counted", 1, thin=True))
    return curves


def training_section(facts: RunFacts, span: tuple[float, float], columns: int) -> Section | None:
    """Return the section of the learning rate, norms and memory; None: none of them has been logged."""
    drawn = list(_single(facts, TRAINING, span, columns))
    held = [
        Curve(facts.series[name], units.name_of(name), color)
        for color, name in enumerate(MEMORY)
        if name in facts.series
    ]
    memory = charts.line_chart("memory", "Peak memory per GPU", held, span, unit="GiB", columns=columns, log=False)
    drawn += [memory] if memory is not None else []
    drawn += [chart for prefix in LAYERS if (chart := _layers(facts, prefix, span, columns)) is not None]
    return Section("training", "Learning rate, norms and memory", "", tuple(drawn)) if drawn else None


def _layers(facts: RunFacts, prefix: str, span: tuple[float, float], columns: int) -> Chart | None:
    """Return the norms of all layers in one chart, the first layers in the first colour."""
    names = [name for name in facts.series if name.startswith(prefix)][:MOST_LAYERS]
    curves = [
        Curve(facts.series[name], units.clean(name.removeprefix(prefix), 60), index * charts.COLORS // len(names))
        for index, name in enumerate(names)
    ]
    title = f"{_title(prefix.rstrip('/'))} per layer"
    return charts.line_chart(f"layers-{units.slug(prefix)}", title, curves, span, columns=columns)


def others_section(facts: RunFacts, span: tuple[float, float], columns: int) -> Section | None:
    """Return the section of metrics that no other section draws; None: there are none."""
    known = {
        *PHASES,
        *SPEED,
        *TRAINING,
        *MEMORY,
        "loss",
        "valid_loss",
        *TOLD_BY_OTHERS,
        *evaluation_metrics(facts.series),
    }
    names = [name for name in facts.series if name not in known and not name.startswith(LAYERS)]
    if not names:
        return None
    about = ""
    hidden = len(names) - MOST_OTHERS + facts.metrics_left_out if len(names) > MOST_OTHERS else facts.metrics_left_out
    if hidden:
        about = f"{units.plural(hidden, 'more metric')} not drawn; metrics.jsonl contains all of them."
    return Section("others", "Other metrics", about, _single(facts, names[:MOST_OTHERS], span, columns))
