"""Sections of curves over the steps: loss and evaluation, throughput, phases of a step, norms and memory, and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from slurmtrain.report.page import figures, units
from slurmtrain.report.page.contents import Chart, Section
from slurmtrain.report.page.figures import Curve
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.series import Series, common_steps, trailing_mean

OF_GPUS = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")  # say nothing of a run on CPUs
SPEED = ("tokens_per_s", "samples_per_s", *OF_GPUS, "step_time_s", "slowest_rank_ratio")
TRAINING = ("lr", "grad_norm", "param_norm")
MEMORY = ("memory_allocated_gb", "memory_reserved_gb")
LAYERS = ("grad_norm/", "param_norm/")  # followed by the name of a layer
PHASES = (
    *("time_data_s", "time_forward_backward_s", "time_communication_s", "time_optimizer_s"),
    *("time_checkpoint_s", "time_evaluation_s", "time_other_s"),
)
TOLD_BY_OTHERS = ("data_wait_s", "time_total_s", "mfu_attended", "communication_share", "slowest_rank", "valid_tokens")
KNOWN = frozenset({"loss", "valid_loss", *SPEED, *TRAINING, *MEMORY, *PHASES, *TOLD_BY_OTHERS})
OF_EVALUATIONS = ("perplexity", "bits_per_byte", "accuracy")
MOST_EVALUATIONS = 12  # charts of metrics of evaluations
MOST_OTHERS = 24  # charts of metrics that nobody here knows
MOST_LAYERS = 64  # curves of one chart
SMOOTHED_PARTS = 50  # the mean of a curve is over this part of its points
SMOOTHED_LEAST = 4  # points of a mean: one of fewer is not drawn


class CurveSections:
    """The sections of curves of a run, all over the same steps."""

    def __init__(self, facts: RunFacts):
        self._facts, self._series = facts, facts.series
        self._span = figures.span_of([*facts.series.values()])
        self._columns = figures.columns_for(len(facts.series) + 2)
        self._evaluations = evaluation_metrics(facts.series)

    def loss(self) -> Section:
        """Return the section of the training loss and of the metrics of evaluations."""
        loss, valid = self._series.get("loss"), self._series.get("valid_loss")
        curves = with_mean(loss, "training loss") if loss is not None else []
        curves += [Curve(valid, "validation loss", 1)] if valid is not None else []
        drawn = [self._chart("loss", "Loss", curves, "nats per token"), *self._single(self._evaluations)]
        found = tuple(chart for chart in drawn if chart is not None)
        if not found:
            return Section(
                "curves", "Loss and evaluation", missing="Nothing has been logged yet, so there is no curve."
            )
        about = "Each step appears once in the curves: values of steps that were repeated replace the earlier ones."
        return Section("curves", "Loss and evaluation", about, found)

    def throughput(self) -> Section:
        """Return the section of the speed of training."""
        drawn = self._single(name for name in SPEED if self._facts.has_gpus or name not in OF_GPUS)
        missing = "" if drawn else "No speed has been logged. A program of your own may report none."
        return Section("throughput", "Throughput", "", tuple(drawn), missing=missing)

    def phases(self) -> Section:
        """Return the section of what the time of a step is spent on."""
        title, parts = "Where the step time goes", phases_of(self._series)
        chart = figures.stacked_chart("phases", "Step time by phase", parts, self._span, unit="s") if parts else None
        if chart is None:
            return Section("phases", title, missing="The phases of the steps have not been logged.")
        means = {name: max(0.0, series.mean or 0.0) for name, series in parts}
        total = sum(means.values())
        parts_s = units.listed((f"{name} {units.brief(mean)} s" for name, mean in means.items()), len(means))
        about = f"A step took {units.brief(total)} s on average, over all logged steps: {parts_s}."
        share = means.get("communication, not hidden")
        if share is not None and total > 0:
            about += f" {units.percent(share / total)} of it was communication that no computation hid."
        return Section("phases", title, about, (chart,))

    def training(self) -> Section | None:
        """Return the section of the learning rate, norms and memory; None: none of them has been logged."""
        held = [
            Curve(self._series[name], units.name_of(name), color)
            for color, name in enumerate(MEMORY)
            if name in self._series
        ]
        title = "Peak memory per GPU" if self._facts.has_gpus else "Peak memory"
        drawn = [*self._single(TRAINING), self._chart("memory", title, held, "GiB", log=False)]
        drawn += [self._layers(prefix) for prefix in LAYERS]
        found = tuple(chart for chart in drawn if chart is not None)
        return Section("training", "Learning rate, norms and memory", "", found) if found else None

    def others(self) -> Section | None:
        """Return the section of metrics that no other section draws; None: there are none."""
        known = KNOWN.union(self._evaluations)
        names = [name for name in self._series if name not in known and not name.startswith(LAYERS)]
        if not names:
            return None
        hidden = max(0, len(names) - MOST_OTHERS) + self._facts.metrics_left_out
        about = (
            f"{units.plural(hidden, 'more metric')} not drawn; metrics.jsonl contains all of them." if hidden else ""
        )
        return Section("others", "Other metrics", about, tuple(self._single(names[:MOST_OTHERS])))

    def _chart(self, key: str, title: str, curves: Sequence[Curve], unit: str, log: bool | None = None) -> Chart | None:
        return figures.line_chart(key, title, curves, self._span, unit=unit, columns=self._columns, log=log)

    def _single(self, names: Iterable[str]) -> list[Chart]:
        """Return a chart for each of these metrics that has been logged."""
        drawn = []
        for number, name in enumerate(names):
            if name not in self._series:
                continue
            words = units.name_of(name)
            curves = with_mean(self._series[name], words)
            if name == "lr":  # which is exact: a mean would only blur it
                curves = [Curve(self._series[name], words)]
            if name == "mfu" and "mfu_attended" in self._series:
                attended = "only attention within documents counted"
                curves.append(Curve(self._series["mfu_attended"], attended, 1, thin=True))
            title = words[:1].upper() + words[1:] if words != name else words
            log = None if name in ("lr", "grad_norm") else False
            drawn.append(self._chart(_key(name, number), title, curves, units.unit_of(name), log))
        return [chart for chart in drawn if chart is not None]

    def _layers(self, prefix: str) -> Chart | None:
        """Return the norms of all layers in one chart, the first layers in the first colour."""
        names = [name for name in self._series if name.startswith(prefix)][:MOST_LAYERS]
        curves = [
            Curve(self._series[name], units.clean(name.removeprefix(prefix), 60), index * figures.COLORS // len(names))
            for index, name in enumerate(names)
        ]
        words = units.name_of(prefix.rstrip("/"))
        return self._chart(f"layers-{units.slug(prefix)}", f"{words[:1].upper()}{words[1:]} per layer", curves, "")


def with_mean(series: Series, name: str) -> list[Curve]:
    """Return a curve; of many points thin, and with the mean over a fiftieth of them."""
    size = len(series.values) // SMOOTHED_PARTS
    if size < SMOOTHED_LEAST:
        return [Curve(series, name)]
    mean = Curve(trailing_mean(series, size), f"{name}, mean of {size:,} logged steps", derived=True)
    return [Curve(series, name, thin=True), mean]


def evaluation_metrics(series: Mapping[str, Series]) -> list[str]:
    """Return the metrics of evaluations, the validation loss excepted.

    They are told by their names, such as valid_..., or by their steps, which have no training loss.
    """
    trained = series["loss"].steps if "loss" in series else np.empty(0)
    found = []
    for name, each in series.items():
        named = name.startswith(("valid_", "eval_", "test_", "eval/", "valid/"))
        apart = len(trained) > 0 and len(each.steps) < len(trained) and not np.isin(each.steps, trained).any()
        if name not in KNOWN and (named or apart or (len(trained) > 0 and name in OF_EVALUATIONS)):
            found.append(name)
    return found[:MOST_EVALUATIONS]


def phases_of(series: Mapping[str, Series]) -> list[tuple[str, Series]]:
    """Return the phases of a step in seconds, by name, those that are never more than 0 left out.

    Where the phases are not logged, a step is the wait for its data and the rest.
    """
    found = [(units.name_of(name), series[name]) for name in PHASES if name in series]
    if found:
        return [(name, each) for name, each in found if bool((each.finite.values > 0).any())]
    waits, times = series.get("data_wait_s"), series.get("step_time_s")
    if waits is None or times is None:
        return []
    steps = common_steps([waits, times])
    waited = waits.at(steps)
    rest = Series("rest", steps, np.maximum(0.0, times.at(steps) - waited))
    return [("wait for data", Series("data_wait_s", steps, waited)), ("rest of the step", rest)]


def _key(name: str, number: int) -> str:
    """Return the key of the chart of a metric, the only one of its section with this number."""
    if name in units.NAMES:
        return name
    return f"metric-{name}" if units.slug(name) == name else f"metric-{units.slug(name)}-{number}"
