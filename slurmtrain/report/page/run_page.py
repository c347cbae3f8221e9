"""The page of one run: which sections it has, and what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from slurmtrain.report.compare import MISSING
from slurmtrain.report.goodput.causes import HOLDS_NO_GPUS, Cause, Goodput
from slurmtrain.report.page import charts, sentences, units
from slurmtrain.report.page.charts import Chart, Curve
from slurmtrain.report.page.contents import Grid, Page, Section, ShareBar, Tile, grid
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.series import Series, common_steps, trailing_mean
from slurmtrain.report.page.timeline import MOST_ROWS, timeline_of
from slurmtrain.report.status.state import RunStatus
from slurmtrain.report.trouble import SlowRanks, slow_ranks
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.code_record import words_for_changes
from slurmtrain.runs.lookup import is_sweep
from slurmtrain.runs.node_blame import records_of
from slurmtrain.slurm.node_ledger import NodeEvent

PHASES = (
    *("time_data_s", "time_forward_backward_s", "time_communication_s", "time_optimizer_s"),
    *("time_checkpoint_s", "time_evaluation_s", "time_other_s"),
)
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
MOST_EVENTS = 300  # rows of the table of events
MOST_SETTINGS = 2000
MOST_GPUS = 512  # rows
MOST_SLOW = 50  # rows
MOST_LAYERS = 64  # curves of one chart
SMOOTHED_PARTS = 50  # the mean of a curve is over this part of its points
SMOOTHED_LEAST = 4  # points of a mean: one of fewer is not drawn
MOODS = {
    **dict.fromkeys((RunStatus.FINISHED,), "good"),
    **dict.fromkeys((RunStatus.FAILED, RunStatus.LOST, RunStatus.UNREADABLE), "bad"),
    **dict.fromkeys((RunStatus.RUNNING, RunStatus.STARTING, RunStatus.STOPPING), "busy"),
}


def run_page(facts: RunFacts) -> Page:
    """Return the page of a run."""
    title = f"{units.clean(facts.name, 80)} · {units.clean(facts.run_dir.id, 80)}"
    said = (
        sentences.what_it_is(facts),
        sentences.how_far(facts),
        " ".join(
            each
            for each in (sentences.attempts_sentence(facts.attempts), sentences.what_was_lost(facts.goodput))
            if each
        ),
    )
    span = charts.span_of([*facts.series.values()])
    columns = charts.columns_for(len(facts.series) + 2)
    sections = (
        _curves(facts, span, columns),
        _speed(facts, span, columns),
        _phases(facts, span),
        _attempts(facts),
        _goodput(facts.goodput),
        _nodes(facts),
        _training(facts, span, columns),
        _others(facts, span, columns),
        _system(facts),
        _config(facts),
        _events(facts),
    )
    return Page(
        title,
        facts.run_dir.id,
        str(facts.state.status),
        MOODS.get(facts.state.status, "still"),
        said,
        tuple(sentences.what_to_do(facts)),
        tuple(_tiles(facts)),
        tuple(each for each in sections if each is not None),
        sentences.made(facts.now),
        facts.state.alive,
        tuple(units.clean(each) for each in facts.troubles),
        facts.run_dir.path.parent.name if is_sweep(facts.run_dir.path.parent) else "",
    )


def _tiles(facts: RunFacts) -> Iterable[Tile]:
    progress, goodput = facts.state.progress, facts.goodput
    if progress.step is not None:
        of_all = f"of {progress.steps:,}" if progress.steps else ""
        yield Tile("steps done", f"{progress.step:,}", of_all)
    loss = facts.series.get("loss")
    if loss is not None and loss.last is not None:
        yield Tile("training loss", units.number(loss.last), "nats per token")
    best = sentences.best_of(facts)
    if best is not None:
        metric, step, value = best
        unit = units.unit_of(metric)
        yield Tile(
            f"best {units.name_of(metric)}", units.number(value), f"{f'{unit}, ' if unit else ''}step {step:,.0f}"
        )
    speed = _mean_of_last_half(facts.series.get("tokens_per_s"))
    if speed is not None:
        yield Tile(
            "tokens per second", f"{speed:,.0f}" if speed >= 100 else units.number(speed), "mean of the last half"
        )
    mfu = _mean_of_last_half(facts.series.get("mfu"))
    if mfu is not None:
        yield Tile("MFU", units.percent(mfu), "of the GPUs' peak")
    if goodput is not None and goodput.share is not None:
        yield Tile("goodput", units.percent(goodput.share), "of the allocated time")
    if goodput is not None and goodput.gpu_hours > 0:
        lost = sum(goodput.lost_gpu_seconds.values())
        yield Tile("GPU hours", units.hours(3600 * goodput.gpu_hours), f"{units.hours(lost)} lost" if lost > 0 else "")
    elif goodput is not None and goodput.held_s > 0:
        yield Tile("allocated time", units.duration(goodput.held_s))
    if facts.attempts:
        yield Tile("attempts", str(len(facts.attempts)))


def _mean_of_last_half(series: Series | None) -> float | None:
    return series.last_half().mean if series is not None else None


def with_mean(series: Series, name: str, *, mean: str = "mean of {points:,} logged steps") -> list[Curve]:
    """Return a curve; of many points thin, and with the mean over a fiftieth of them."""
    points = len(series.values) // SMOOTHED_PARTS
    if points < SMOOTHED_LEAST:
        return [Curve(series, name, points=True)]
    return [
        Curve(series, name, thin=True),
        Curve(trailing_mean(series, points), mean.format(points=points), derived=True),
    ]


def _curves(facts: RunFacts, span: tuple[float, float], columns: int) -> Section:
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


def _speed(facts: RunFacts, span: tuple[float, float], columns: int) -> Section:
    drawn = _single(facts, SPEED, span, columns)
    missing = "" if drawn else "No speed has been logged. A program of your own may report none."
    return Section("throughput", "Throughput", "", drawn, missing=missing)


def phases_of(series: Mapping[str, Series]) -> list[tuple[str, Series]]:
    """Return the phases of a step in seconds, by name, those that are never more than 0 left out.

    Where the phases are not logged, as by earlier versions, a step is the wait for its data and the rest.
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


def _phases(facts: RunFacts, span: tuple[float, float]) -> Section:
    parts = phases_of(facts.series)
    chart = charts.stacked_chart("phases", "Step time by phase", parts, span, unit="s") if parts else None
    if chart is None:
        return Section("phases", "Where the step time goes", missing="The phases of the steps have not been logged.")
    means = [(name, max(0.0, series.mean or 0.0)) for name, series in parts]
    total = sum(mean for _, mean in means)
    bar = charts.shares(
        [
            (name, f"c{index % charts.COLORS}", mean, f"{units.brief(mean)} s")
            for index, (name, mean) in enumerate(means)
        ]
    )
    about = f"A step took {units.brief(total)} s on average, over all logged steps."
    share = dict(means).get("communication, not hidden")
    if share is not None and total > 0:
        about += f" {units.percent(share / total)} of it was communication that no computation hid."
    bars = (ShareBar("Mean share of each phase", tuple(bar)),)
    return Section("phases", "Where the step time goes", about, (chart,), bars)


def _attempts(facts: RunFacts) -> Section:
    timeline = timeline_of(facts)
    if not facts.attempts:
        return Section("attempts", "Attempts", timeline=timeline, missing="The run has not started yet.")
    about = sentences.attempts_sentence(facts.attempts)
    if timeline is not None and timeline.left_out:
        about += f" The timeline shows the last {MOST_ROWS} of them, the table shows all."
    table = grid("Attempts", ATTEMPTS, [attempt_cells(each, facts) for each in facts.attempts])
    saved = sentences.checkpoints_sentence(facts.events)
    return Section("attempts", "Attempts", about, timeline=timeline, grids=(table,), notes=(saved,) if saved else ())


ATTEMPTS = ("attempt", "job", "nodes", "started", "took", "steps", "reason", "details, and what came next")


def attempt_cells(attempt: Attempt, facts: RunFacts) -> tuple[str, ...]:
    """Return the row of an attempt, as text."""
    end = attempt.ended or (
        facts.now if attempt is facts.attempts[-1] and facts.state.status == RunStatus.RUNNING else None
    )
    first, last = attempt.first_step, attempt.last_step
    if last is None and attempt is facts.attempts[-1]:
        last = facts.state.step
    steps = f"{'?' if first is None else f'{first:,}'} to {'?' if last is None else f'{last:,}'}"
    return (
        str(attempt.number),
        units.clean(attempt.job_id or "-", 40),
        units.listed((units.clean(node, 64) for node in attempt.nodes), 4) or "-",
        units.moment(attempt.started),
        units.duration(end - attempt.started) if end and attempt.started else "-",
        steps if (first, last) != (None, None) else "-",
        units.clean(attempt.reason or ("not ended" if end is None or attempt.ended is None else "not known"), 40),
        units.clean(attempt.sentence or ""),
    )


def _goodput(goodput: Goodput | None) -> Section:
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


def _nodes(facts: RunFacts) -> Section:
    title = "Conspicuous nodes"
    rows = [
        (
            units.moment(each.time),
            units.clean(each.node, 64),
            str(each.event),
            str(each.attempt),
            units.clean(each.said),
        )
        for each in records_of(facts.run_dir.id, facts.attempts)
        if each.event is not NodeEvent.TRAINED and each.node
    ]
    grids = [grid("Problems on nodes", ("time", "node", "problem", "attempt", "details"), rows)] if rows else []
    slow = [_slow_cells(each) for each in slow_ranks(facts.events)[-MOST_SLOW:]]
    if slow:
        header = ("ranks", "node", "phase of the step", "how slow", "share of the step lost", "steps")
        grids.append(grid("Slow ranks", header, slow))
    left_out = [
        (units.clean(each.node, 64), units.clean(each.why), units.moment(each.until)) for each in facts.left_out
    ]
    if left_out:
        grids.append(grid("Nodes that the job excludes", ("node", "why", "until"), left_out))
    missing = "" if grids else "No rank was slower than the others, and no node had problems."
    return Section("nodes", title, grids=tuple(grids), missing=missing)


def _slow_cells(slow: SlowRanks) -> tuple[str, ...]:
    until = f"{slow.until:,}" if slow.until is not None else "the end, or now"
    return (
        units.listed(map(str, slow.ranks), 16),
        units.clean(slow.node, 64),
        units.clean(slow.phase.replace("_", " "), 60),
        "much longer" if slow.ratio is None else f"{units.brief(slow.ratio)} times as long as the others",
        "-" if slow.share is None else units.percent(slow.share),
        f"step {slow.since:,} to {until}",
    )


def _training(facts: RunFacts, span: tuple[float, float], columns: int) -> Section | None:
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


def _others(facts: RunFacts, span: tuple[float, float], columns: int) -> Section | None:
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


def _system(facts: RunFacts) -> Section:
    info, last = facts.info, facts.attempts[-1] if facts.attempts else None
    rows: list[tuple[str, str]] = []

    def add(name: str, value: object) -> None:
        if value not in (None, "", [], {}):
            rows.append((name, units.clean(value)))

    if last is not None:
        add("nodes of the newest attempt", units.listed((units.clean(node, 64) for node in last.nodes), 16))
        add("ranks", last.world_size or None)
        add("host of rank 0", last.host)
    if facts.goodput is not None and facts.goodput.gpu_count:
        add("GPUs", f"{facts.goodput.gpu_count:g}")
    kind = facts.setting("cluster.gpu_type")
    add("GPU type", kind)
    for key in (
        "cluster.partition",
        "cluster.account",
        "cluster.qos",
        "cluster.time_limit_min",
        "cluster.container.image",
    ):
        add(key, facts.setting(key))
    parallel = facts.setting("parallel")
    if isinstance(parallel, Mapping):
        sizes = {name: parallel.get(name) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp")}
        add("parallel axes", ", ".join(f"{name} {size}" for name, size in sizes.items() if size not in (None, 1)))
    add("jobs", ", ".join(map(str, info.get("job_ids") or ())))
    code = info.get("code")
    if isinstance(code, Mapping) and code.get("revision"):
        add("code", f"revision {units.clean(code['revision'], 80)}{words_for_changes(code.get('dirty'))}")
    add("config hash", info.get("config_hash"))
    add("overrides", " ".join(info.get("overrides") or ()))
    add("run directory", facts.run_dir.path)
    add("submitted from", info.get("submit_dir"))
    grids = [grid("The run and its machines", ("item", "value"), rows)]
    used = _gpu_rows(facts)
    if used:
        header = ("node", "GPU", "busy", "idle", "power", "peak memory", "highest temperature", "errors")
        grids.append(grid("GPUs in the newest attempt", header, used, folded=len(used) > 16))
    rest = environment_rows({**facts.environment, **info})
    if rest:
        grids.append(
            grid("Environment, as recorded when the run started", ("item", "value"), rest, folded=len(rest) > 12)
        )
    return Section("system", "System and environment", grids=tuple(grids))


def _gpu_rows(facts: RunFacts) -> list[tuple[str, ...]]:
    """Return the GPUs of the newest attempt, as NVML saw them."""
    rows: list[tuple[str, ...]] = []
    for node in sorted(facts.gpu_use, key=lambda each: each.node):
        for gpu in node.gpus:
            watched = gpu.sampled_s
            errors = [*(f"Xid {number}" for number in gpu.xids), *([f"{gpu.ecc_errors} ECC"] if gpu.ecc_errors else [])]
            errors += [f"lost for {units.duration(gpu.lost_s)}"] if gpu.lost_s else []
            rows.append(
                (
                    units.clean(node.node, 64),
                    f"{gpu.index} {units.clean(gpu.name, 40)}".strip(),
                    units.percent(gpu.utilization_s / watched / 100) if watched else "-",
                    units.percent(gpu.idle_s / watched) if watched else "-",
                    f"{gpu.power_w:.0f} W" if gpu.power_w is not None else "-",
                    f"{gpu.memory_gb:.1f} GB",
                    f"{gpu.temperature_c:.0f} °C",
                    units.listed(errors) or "none",
                )
            )
    return rows[:MOST_GPUS]


SHOWN_ELSEWHERE = frozenset(
    """name overrides backend user host created slurm_conf job_ids config_hash steps code workdir submit_dir packed
    own_checkpoints chain chain_after varied changing id""".split()
)


def environment_rows(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is recorded beyond what is shown elsewhere: packages, driver, CUDA, image, variables."""
    rows = []
    for key, value in _flat({name: value for name, value in info.items() if name not in SHOWN_ELSEWHERE}):
        if value not in (None, "", [], {}):
            rows.append((units.clean(key, 120), units.clean(value)))
    return rows[:400]


def _flat(value: Any, where: str = "", depth: int = 0) -> Iterable[tuple[str, Any]]:
    """Yield dotted keys and values; what is nested very deep stays as it is."""
    if isinstance(value, Mapping) and value and depth < 5:
        for key, each in value.items():
            yield from _flat(each, f"{where}.{key}" if where else str(key), depth + 1)
    elif isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        yield where, ", ".join(map(str, value[:50]))
    else:
        yield where, value


def setting_text(value: Any) -> str:
    """Return a value of a config as it is written in YAML's flow style, without secrets."""
    if value is MISSING:
        return "(no such field)"
    if isinstance(value, str):
        return units.clean(value) or '""'
    return units.clean(units.json_words(value))


def _config(facts: RunFacts) -> Section:
    title = "Config"
    if facts.config is None:
        return Section("config", title, missing="The config cannot be read.")
    changed = facts.changed_settings
    rows = [(units.clean(key, 120), setting_text(value), setting_text(default)) for key, default, value in changed]
    differs = grid("Fields that differ from the defaults", ("field", "value", "default"), rows[:MOST_SETTINGS])
    everything = [(units.clean(key, 120), setting_text(value)) for key, value in _flat(facts.config)]
    whole = grid("All fields", ("field", "value"), everything[:MOST_SETTINGS], folded=True)
    about = f"{units.plural(len(changed), 'field')} differ{'s' if len(changed) == 1 else ''} from the defaults."
    return Section("config", title, about, grids=(differs, whole) if rows else (whole,))


def _events(facts: RunFacts) -> Section:
    rows = [_event_cells(event) for event in facts.events[-MOST_EVENTS:]]
    if not rows:
        return Section("events", "Events", missing="No event has been recorded.")
    left = len(facts.events) - len(rows)
    about = f"The last {len(rows)} of {len(facts.events):,} events; events.jsonl contains all of them." if left else ""
    return Section(
        "events", "Events", about, grids=(grid("Events", ("time", "attempt", "event", "details"), rows, folded=True),)
    )


def _event_cells(event: Mapping[str, Any]) -> tuple[str, ...]:
    more = {name: value for name, value in event.items() if name not in ("time", "event", "attempt")}
    words = ", ".join(
        f"{name}: {value if isinstance(value, str) else units.json_words(value)}" for name, value in more.items()
    )
    attempt = event.get("attempt")
    return (
        units.moment(event["time"]),
        str(attempt) if isinstance(attempt, int) else "",
        units.clean(event["event"], 60),
        units.clean(words, 240),
    )
