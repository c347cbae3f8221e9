"""The page of one run: what is said at its top, and a function for each of its sections."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from slurmtrain.config.frozen import to_values
from slurmtrain.config.schema import Config
from slurmtrain.report.collect import step_times
from slurmtrain.report.compare import MISSING, config_differences
from slurmtrain.report.facts import RunFacts
from slurmtrain.report.goodput import Goodput
from slurmtrain.report.page import charts, sentences, units
from slurmtrain.report.page.charts import Curve, Series, Span
from slurmtrain.report.page.render import Chart, Grid, Page, Section
from slurmtrain.report.status.state import ATTEMPT_HEADER, RunStatus
from slurmtrain.runs.lookup import is_sweep
from slurmtrain.runs.software import words_for_changes
from slurmtrain.system.texts import roughly

MOODS = {
    RunStatus.FINISHED: "good",
    **dict.fromkeys((RunStatus.FAILED, RunStatus.LOST, RunStatus.UNREADABLE), "bad"),
    **dict.fromkeys((RunStatus.RUNNING, RunStatus.STARTING, RunStatus.STOPPING), "busy"),
}
# Metrics that are drawn in the chart of another.
SHARED = {"loss": "valid_loss", "mfu": "mfu_attended", "memory_allocated_gb": "memory_reserved_gb"}
SPEED = ("tokens_per_s", "samples_per_s", "step_time_s")
SPEED_OF_GPUS = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")  # not of a run on CPUs
TRAINING = ("lr", "grad_norm", "param_norm", "memory_allocated_gb")
PHASES = tuple(
    f"time_{name}_s"
    for name in ("data", "forward_backward", "communication", "optimizer", "checkpoint", "evaluation", "other")
)
TITLES = {"loss": "Loss", "memory_allocated_gb": "Peak memory"}
NOT_DRAWN = ("data_wait_s", "time_total_s", "communication_share", "valid_tokens")  # others say it
KNOWN = {"loss", *SPEED, *SPEED_OF_GPUS, *TRAINING, *SHARED.values(), *PHASES, *NOT_DRAWN}
OF_EVALUATIONS = ("valid_", "eval_", "test_", "eval/", "valid/", "perplexity", "bits_per_byte", "accuracy")
MOST_EVALUATIONS, MOST_OTHERS = 12, 24  # charts of metrics that nobody here knows
MOST_ROWS, MOST_SETTINGS = 60, 2000  # of the timeline, and of the table
VISIBLE = 1 / 2000  # of the length of the timeline


def run_page(facts: RunFacts) -> Page:
    """Return the page of a run."""
    series, steps = charts.series_of(facts.records), step_times(facts.records)
    what_it_took = (sentences.attempts_sentence(facts.attempts), sentences.what_was_lost(facts.goodput))
    return Page(
        f"{units.clean(facts.info.get('name'), 80)} · {units.clean(facts.run_dir.id, 80)}",
        facts.run_dir.id,
        str(facts.state.status),
        MOODS.get(facts.state.status, "still"),
        [sentences.what_it_is(facts), sentences.how_far(facts, series, steps), " ".join(filter(None, what_it_took))],
        sentences.what_to_do(facts, steps),
        [*_curves(facts, series), _attempts(facts), _goodput(facts.goodput), _config(facts)],
        sentences.made(facts.now),
        facts.state.alive,
        [units.clean(each) for each in dict.fromkeys(facts.troubles)],
        facts.run_dir.path.parent.name if is_sweep(facts.run_dir.path.parent) else "",
    )


def _curves(facts: RunFacts, series: Mapping[str, Series]) -> list[Section]:
    """Return the sections of the losses, of the speed, of the phases of a step, and of all other metrics."""
    span, places = charts.span_of(series.values()), {name: place for place, name in enumerate(series)}

    def drawn(names: Iterable[str]) -> list[Chart]:
        found = []
        for name in names:
            logged = [each for each in (name, SHARED.get(name, "")) if each in series]
            if not logged:
                continue
            first, words = logged[0], units.name_of(logged[0])
            curves = charts.with_means(series[first], words)
            curves += [Curve(series[each], units.name_of(each), 1) for each in logged[1:]]
            key, title = first if first in KNOWN else f"metric-{places[first]}", TITLES.get(first)
            found.append(charts.line_chart(key, title or units.capital(words), curves, span, unit=units.unit_of(first)))
        return [chart for chart in found if chart is not None]

    unknown = [name for name in series if name not in KNOWN]
    evaluations = [name for name in unknown if name.startswith(OF_EVALUATIONS)][:MOST_EVALUATIONS]
    others = [name for name in unknown if name not in evaluations]
    loss = drawn(["loss", *evaluations])
    speed = drawn([*SPEED, *(SPEED_OF_GPUS if facts.has_gpus else ())])
    further = drawn([*TRAINING, *others[:MOST_OTHERS]])
    cut = len(others) > MOST_OTHERS or len(series) == charts.MOST_METRICS
    return [
        Section("curves", "Loss and evaluation", [] if loss else ["Nothing has been logged yet."], loss),
        Section("throughput", "Throughput", [] if speed else ["No speed has been logged."], speed),
        _phases({units.name_of(name): series[name] for name in PHASES if name in series}, span),
        Section(
            "others",
            "Learning rate, norms, memory and others",
            ["Further metrics are not drawn; metrics.jsonl contains all of them."] if cut else [],
            further,
        ),
    ]


def _phases(logged: Mapping[str, Series], span: Span) -> Section:
    """Return the section of what the time of a step is spent on."""
    title = "Where the step time goes"
    parts = {name: each for name, each in logged.items() if (each.finite.values > 0).any()}
    if not parts:
        return Section("phases", title, ["The phases of the steps have not been logged."])
    means = {name: max(0.0, float(each.finite.values.mean())) for name, each in parts.items()}
    listed = units.listed((f"{name} {units.brief(mean)} s" for name, mean in means.items()), len(means))
    said = f"A step took {units.brief(sum(means.values()))} s on average, over all logged steps: {listed}."
    return Section(
        "phases", title, [said], [charts.stacked_chart("phases", "Step time by phase", parts, span, unit="s")]
    )


def _attempts(facts: RunFacts) -> Section:
    """Return the section of the attempts, with their timeline."""
    drawn = [_timeline(facts.goodput, facts)] if facts.goodput is not None and facts.goodput.segments else []
    if not facts.attempts:
        return Section("attempts", "Attempts", ["The run has not started yet."], drawn)
    rows = [[units.clean(cell) for cell in facts.state.attempt_cells(each, facts.now)] for each in facts.attempts]
    said = [sentences.attempts_sentence(facts.attempts), sentences.checkpoints_sentence(facts)]
    return Section("attempts", "Attempts", [*filter(None, said)], drawn, [Grid("Attempts", ATTEMPT_HEADER, rows)])


def _timeline(goodput: Goodput, facts: RunFacts) -> Chart:
    """Return the timeline: each attempt a row along the clock, what its time went into, and the wait that followed it."""
    ends = {each.number: each.reason or ("not ended" if each.ended is None else "not known") for each in facts.attempts}
    numbers = sorted({each.attempt for each in goodput.segments})
    rows = {
        number: f"{number}: {charts.plain(units.clean(ends[number], 24))}" if number in ends else "submitted"
        for number in numbers[-MOST_ROWS:]
    }
    data = []
    least = (goodput.end - goodput.segments[0].start) * VISIBLE
    shown = [each for each in goodput.segments if each.attempt in rows and each.seconds >= least]
    for cause, words in sentences.CAUSES.items():
        if found := [each for each in shown if each.cause is cause]:
            said = [f"{words}, {roughly(each.seconds)}, from {units.moment(each.start)}" for each in found]
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": words,
                    "y": [rows[each.attempt] for each in found],
                    "base": [units.moment(each.start) for each in found],
                    "x": [round(1000 * each.seconds, 1) for each in found],
                    "marker": {"color": f"--{cause}", "line": {"color": "--strong-edge", "width": 0.5}},
                    "hovertext": said,
                    "hoverinfo": "text",
                }
            )
    layout = {
        "height": 70 + 34 * len(rows),
        "xaxis": {"type": "date"},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "categoryarray": [*rows.values()]},
        "barmode": "overlay",
        "bargap": 0.5,
    }
    left = len(numbers) - len(rows)
    note = f"{units.plural(left, 'earlier attempt')} not drawn; the table shows all." if left else ""
    title, summary = "Timeline of the attempts, and why each ended", f"Attempts: {', '.join([*rows.values()][-20:])}"
    return Chart("timeline", title, {"data": data, "layout": layout}, note=note, summary=summary, wide=True)


def _goodput(goodput: Goodput | None) -> Section:
    """Return the section of where the time of the run went, as far as it is known, and what interruptions cost."""
    title = "Goodput: where the time went"
    if goodput is None or not goodput.wall_s > 0:
        return Section("goodput", title, ["It is not known yet where the time went."])
    gpus = goodput.gpu_hours > 0

    def amounts(seconds: float, gpu_seconds: float) -> list[str]:
        return [roughly(seconds), *([units.hours(gpu_seconds)] if gpus else [])]

    spent = [
        [words, units.percent(goodput.shares.get(cause, 0.0)), *amounts(seconds, goodput.gpu_seconds.get(cause, 0.0))]
        for cause, words in sentences.CAUSES.items()
        if (seconds := goodput.seconds.get(cause, 0.0)) > 0
    ]
    costs = [
        [
            units.clean(reason, 40),
            str(goodput.interruptions.get(reason, 0)),
            *amounts(seconds, goodput.lost_gpu_seconds.get(reason, 0.0)),
        ]
        for reason, seconds in goodput.lost_s.items()
    ]
    hours = ["GPU hours"] if gpus else []
    grids = [
        Grid("Time by cause", ("cause", "share of the held time", "time", *hours), spent),
        Grid("What interruptions cost", ("reason", "attempts", "time lost", *hours), costs),
    ]
    return Section("goodput", title, [], grids=[each for each in grids if each.rows])


def _config(facts: RunFacts) -> Section:
    """Return the section of what it runs and where: its config as far as it differs from the defaults, and code."""
    info, code = facts.info, facts.info.get("code")
    revision = code.get("revision") if isinstance(code, Mapping) else None
    known: dict[str, object] = {
        "code": f"revision {units.clean(revision, 80)}{words_for_changes(code.get('dirty'))}"
        if code and revision
        else "",
        "jobs": ", ".join(map(str, info.get("job_ids") or ())),
        "overrides": " ".join(info.get("overrides") or ()),
        "run directory": facts.run_dir.path,
        "submitted from": info.get("submit_dir"),
    }
    changed = [
        (units.clean(key, 120), _setting(value), _setting(default))
        for key, default, value in config_differences(to_values(Config()), facts.config or {})
        if value is not MISSING
    ]
    grids = [
        Grid("Config fields that differ from the defaults", ("field", "value", "default"), changed[:MOST_SETTINGS]),
        Grid("The run", ("item", "value"), [(key, units.clean(value)) for key, value in known.items() if value]),
    ]
    said = ["The config cannot be read."] if facts.config is None else []
    return Section("config", "Config and code", said, grids=[each for each in grids if each.rows])


def _setting(value: Any) -> str:
    """Return a value of a config as it is written in YAML's flow style, without secrets."""
    if value is MISSING:
        return "(no such field)"
    return units.clean(value) or '""' if isinstance(value, str) else units.clean(json.dumps(value, default=str))
