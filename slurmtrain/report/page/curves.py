"""The curves of a run over its steps: which metrics share a chart, and which charts stand in which section."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from slurmtrain.report.page import units
from slurmtrain.report.page.contents import Chart, Section
from slurmtrain.report.page.figures import COLORS, Curve, Steps, line_chart, stacked_chart, with_mean
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.series import Series, aligned

OF_GPUS = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")  # say nothing of a run on CPUs
SPEED = ("tokens_per_s", "samples_per_s", *OF_GPUS, "step_time_s", "slowest_rank_ratio")
TRAINING = ("lr", "grad_norm", "param_norm", "memory", "grad_norm/", "param_norm/")
PHASES = (
    *("time_data_s", "time_forward_backward_s", "time_communication_s", "time_optimizer_s"),
    *("time_checkpoint_s", "time_evaluation_s", "time_other_s"),
)
NOT_DRAWN = ("data_wait_s", "time_total_s", "communication_share", "slowest_rank", "valid_tokens")  # others say it
KNOWN = frozenset({"loss", *SPEED, *TRAINING, *PHASES, *NOT_DRAWN})
TOGETHER = {  # metric -> key of the chart that it shares with others
    "valid_loss": "loss",
    "mfu_attended": "mfu",
    "memory_allocated_gb": "memory",
    "memory_reserved_gb": "memory",
}
LAYERS = ("grad_norm/", "param_norm/")  # followed by the name of a layer; a chart shows all of them
TITLES = {
    "loss": "Loss",
    "memory": "Peak memory",
    "grad_norm/": "Gradient norm per layer",
    "param_norm/": "Parameter norm per layer",
}
EXACT = ("lr", "memory")  # a mean would only blur them
SPANS_DECADES = ("loss", "lr", "grad_norm", *LAYERS)
OF_EVALUATIONS = ("perplexity", "bits_per_byte", "accuracy")
MOST_EVALUATIONS = 12  # charts of metrics of evaluations
MOST_OTHERS = 24  # charts of metrics that nobody here knows
MOST_LAYERS = 64  # curves of one chart


def curve_sections(facts: RunFacts) -> tuple[Section, Section, Section, Section | None]:
    """Return the sections of the losses, of the speed, of the phases of a step, and of other metrics if there are any."""
    series = facts.series
    steps = Steps.of([*series.values()])
    charts: dict[str, list[str]] = {}  # key of a chart -> its metrics
    for name in series:
        prefix = next((prefix for prefix in LAYERS if name.startswith(prefix)), None)
        charts.setdefault(TOGETHER.get(name) or prefix or name, []).append(name)
    unknown = [key for key in charts if key not in KNOWN]
    evaluations = [key for key in unknown if _is_of_evaluations(key, series)][:MOST_EVALUATIONS]
    others = [key for key in unknown if key not in evaluations]
    ids = {key: _id_of(key, number) for number, key in enumerate(charts)}

    def drawn(keys: Iterable[str]) -> list[Chart]:
        found = [_chart(key, ids[key], charts[key], series, steps) for key in keys if key in charts]
        return [chart for chart in found if chart is not None]

    loss = drawn(["loss", *evaluations])
    about = "Each step appears once in the curves: values of steps that were repeated replace the earlier ones."
    unlogged = "" if loss else "Nothing has been logged yet, so there is no curve."
    speed = drawn(name for name in SPEED if facts.has_gpus or name not in OF_GPUS)
    unmeasured = "" if speed else "No speed has been logged. A program of your own may report none."
    hidden = max(0, len(others) - MOST_OTHERS) + facts.metrics_left_out
    left = f"{units.plural(hidden, 'more metric')} not drawn; metrics.jsonl contains all of them." if hidden else ""
    further = drawn([*TRAINING, *others[:MOST_OTHERS]])
    return (
        Section("curves", "Loss and evaluation", about if loss else "", loss, missing=unlogged),
        Section("throughput", "Throughput", "", speed, missing=unmeasured),
        _phases(series, steps),
        Section("others", "Learning rate, norms, memory and others", left, further) if further else None,
    )


def _id_of(key: str, number: int) -> str:
    """Return what names a chart in the page; `number` is its own."""
    if key in KNOWN:
        return key.replace("/", "-")
    return f"metric-{key}" if units.slug(key) == key else f"metric--{number}"


def _chart(key: str, id_: str, names: list[str], series: Mapping[str, Series], steps: Steps) -> Chart | None:
    """Return the chart of these metrics, of which the first is shown with its mean."""
    first, *further = names[:MOST_LAYERS]
    words = units.name_of(first)
    title = TITLES.get(key) or (units.capital(words) if words != first else words)
    if key in LAYERS:  # the first layers in the first colour
        curves = [
            Curve(series[name], units.clean(name.removeprefix(key), 60), index * COLORS // len(names))
            for index, name in enumerate([first, *further])
        ]
    else:
        curves = [Curve(series[first], words)] if key in EXACT else with_mean(series[first], words)
        curves += [Curve(series[name], units.name_of(name), 1) for name in further]
    unit = "" if key in LAYERS else units.unit_of(first)
    return line_chart(id_, title, curves, steps, unit=unit, may_be_log=key in SPANS_DECADES)


def _is_of_evaluations(name: str, series: Mapping[str, Series]) -> bool:
    """Return whether a metric is one of evaluations, by its name, or by its steps, which have no training loss."""
    if name.startswith(("valid_", "eval_", "test_", "eval/", "valid/")):
        return True
    if name not in series or "loss" not in series:
        return False
    steps, trained = series[name].steps, series["loss"].steps
    return name in OF_EVALUATIONS or (len(steps) < len(trained) and not np.isin(steps, trained).any())


def _phases(series: Mapping[str, Series], steps: Steps) -> Section:
    """Return the section of what the time of a step is spent on."""
    title, parts = "Where the step time goes", phases_of(series)
    chart = stacked_chart("phases", "Step time by phase", parts, steps, unit="s") if parts else None
    if chart is None:
        return Section("phases", title, missing="The phases of the steps have not been logged.")
    means = {name: max(0.0, float(each.finite.values.mean())) for name, each in parts.items()}
    total = sum(means.values())
    parts_s = units.listed((f"{name} {units.brief(mean)} s" for name, mean in means.items()), len(means))
    about = f"A step took {units.brief(total)} s on average, over all logged steps: {parts_s}."
    share = means.get("communication, not hidden")
    if share is not None and total > 0:
        about += f" {units.percent(share / total)} of it was communication that no computation hid."
    return Section("phases", title, about, [chart])


def phases_of(series: Mapping[str, Series]) -> dict[str, Series]:
    """Return the phases of a step in seconds, by name, those that are never more than 0 left out.

    Where the phases are not logged, a step is the wait for its data and the rest.
    """
    found = {units.name_of(name): series[name] for name in PHASES if name in series}
    if found or "data_wait_s" not in series or "step_time_s" not in series:
        return {name: each for name, each in found.items() if bool((each.finite.values > 0).any())}
    steps, (waits, times) = aligned((series["data_wait_s"], series["step_time_s"]))
    rest = Series("rest", steps, np.maximum(0.0, times - waits))
    return {"wait for data": Series("data_wait_s", steps, waits), "rest of the step": rest} if len(steps) else {}
