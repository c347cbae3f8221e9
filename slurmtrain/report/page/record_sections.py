"""Sections of what is on record: attempts, where the time went, nodes, machines and config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmtrain.report.compare import MISSING
from slurmtrain.report.goodput.causes import Cause, Goodput
from slurmtrain.report.page import figures, sentences, units
from slurmtrain.report.page.contents import Section, grid
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.timeline import timeline_of
from slurmtrain.report.status.state import RunStatus
from slurmtrain.report.trouble import SlowRanks, slow_ranks
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.node_blame import records_of
from slurmtrain.runs.software import words_for_changes
from slurmtrain.slurm.node_ledger import NodeEvent

MOST_SLOW, MOST_GPUS, MOST_SETTINGS = 50, 512, 2000  # rows
SETTINGS = ("gpu_type", "partition", "account", "qos", "time_limit_min", "container.image")


def attempts_section(facts: RunFacts) -> Section:
    """Return the section of the attempts, with their timeline."""
    timeline = timeline_of(facts)
    charts = (timeline,) if timeline is not None else ()
    if not facts.attempts:
        return Section("attempts", "Attempts", charts=charts, missing="The run has not started yet.")
    header = ("attempt", "job", "nodes", "started", "took", "steps", "reason", "details, and what came next")
    table = grid("Attempts", header, [_attempt_cells(each, facts) for each in facts.attempts])
    saved = sentences.checkpoints_sentence(facts.events)
    about = sentences.attempts_sentence(facts.attempts)
    return Section("attempts", "Attempts", about, charts, (table,), (saved,) if saved else ())


def _attempt_cells(attempt: Attempt, facts: RunFacts) -> tuple[str, ...]:
    newest = attempt is facts.attempts[-1]
    end = attempt.ended or (facts.now if newest and facts.state.status == RunStatus.RUNNING else None)
    first, last = attempt.first_step, attempt.last_step
    if last is None and newest:
        last = facts.state.step
    steps = f"{'?' if first is None else f'{first:,}'} to {'?' if last is None else f'{last:,}'}"
    return (
        str(attempt.number),
        units.clean(attempt.job_id or "-", 40),
        units.listed((units.clean(node, 64) for node in attempt.nodes), 4) or "-",
        units.moment(attempt.started),
        units.duration(end - attempt.started) if end and attempt.started else "-",
        steps if (first, last) != (None, None) else "-",
        units.clean(attempt.reason or ("not ended" if attempt.ended is None else "not known"), 40),
        units.clean(attempt.sentence or ""),
    )


def goodput_section(goodput: Goodput | None) -> Section:
    """Return the section of where the time of the run went, as far as it is known, and what interruptions cost."""
    title = "Goodput: where the time went"
    if goodput is None or not goodput.wall_s > 0:
        return Section("goodput", title, missing="It is not known yet where the time went.")
    spent = [(cause, goodput.seconds[cause]) for cause in Cause if goodput.seconds.get(cause, 0.0) > 0]
    parts = [(sentences.CAUSES[cause], f"--{cause}", seconds, units.duration(seconds)) for cause, seconds in spent]
    charts = (figures.share_chart("goodput", "All time since the run was submitted", parts),)
    gpus, shares = goodput.gpu_hours > 0, goodput.shares
    rows = [
        (
            sentences.CAUSES[cause],
            units.duration(seconds),
            units.percent(shares[cause]) if cause in shares else "-",
            *([units.hours(goodput.gpu_seconds[cause]) if cause in goodput.gpu_seconds else "-"] if gpus else []),
        )
        for cause, seconds in spent
    ]
    header = ("cause", "time", "share of the allocated time", *(["GPU hours"] if gpus else []))
    grids = [grid("Time by cause", header, rows)]
    if goodput.startup_s:
        stages = [(units.clean(stage, 60), units.duration(seconds)) for stage, seconds in goodput.startup_s.items()]
        grids.append(grid("Start-up by stage, over all attempts", ("stage", "time"), stages, folded=True))
    if goodput.lost_s:
        costs = [
            (
                sentences.reason_words(reason),
                str(goodput.interruptions.get(reason, 0)),
                units.duration(seconds),
                *([units.hours(goodput.lost_gpu_seconds.get(reason, 0.0))] if gpus else []),
            )
            for reason, seconds in goodput.lost_s.items()
        ]
        lost = ("reason", "attempts", "time lost", *(["GPU hours lost"] if gpus else []))
        grids.append(grid("What interruptions cost", lost, costs))
    return Section("goodput", title, sentences.what_was_lost(goodput), charts, tuple(grids))


def nodes_section(facts: RunFacts) -> Section:
    """Return the section of nodes with problems, slow ranks, and nodes that the job excludes."""
    problems = [
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
    slow = [_slow_cells(each) for each in slow_ranks(facts.events)[-MOST_SLOW:]]
    excluded = [
        (units.clean(each.node, 64), units.clean(each.why), units.moment(each.until)) for each in facts.left_out
    ]
    found = (
        grid("Problems on nodes", ("time", "node", "problem", "attempt", "details"), problems),
        grid(
            "Slow ranks",
            ("ranks", "node", "phase of the step", "how slow", "share of the step lost", "attempt", "steps"),
            slow,
        ),
        grid("Nodes that the job excludes", ("node", "why", "until"), excluded),
    )
    grids = tuple(each for each in found if each.rows)
    missing = "" if grids else "No rank was slower than the others, and no node had problems."
    return Section("nodes", "Conspicuous nodes", grids=grids, missing=missing)


def _slow_cells(slow: SlowRanks) -> tuple[str, ...]:
    until = f"{slow.until:,}" if slow.until is not None else "the end, or now"
    return (
        units.listed(map(str, slow.ranks), 16),
        units.clean(slow.node, 64),
        units.clean(slow.phase.replace("_", " "), 60),
        "much longer" if slow.ratio is None else f"{units.brief(slow.ratio)} times as long as the others",
        "-" if slow.share is None else units.percent(slow.share),
        "-" if slow.attempt is None else str(slow.attempt),
        f"step {slow.since:,} to {until}",
    )


def system_section(facts: RunFacts) -> Section:
    """Return the section of the machines and the environment of the run."""
    info, last = facts.info, facts.attempts[-1] if facts.attempts else None
    parallel, code = facts.setting("parallel"), info.get("code")
    sizes = parallel if isinstance(parallel, Mapping) else {}
    axes = [
        f"{name} {sizes[name]}"
        for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp")
        if sizes.get(name) not in (None, 1)
    ]
    changes = ""
    if isinstance(code, Mapping) and code.get("revision"):
        changes = f"revision {units.clean(code['revision'], 80)}{words_for_changes(code.get('dirty'))}"
    known: dict[str, object] = {
        "nodes of the newest attempt": units.listed((units.clean(node, 64) for node in last.nodes), 16) if last else "",
        "ranks": (last.world_size or None) if last else None,
        "host of rank 0": last.host if last else None,
        "GPUs": f"{facts.goodput.gpu_count:g}" if facts.goodput is not None and facts.goodput.gpu_count else None,
        **{f"cluster.{key}": facts.setting(f"cluster.{key}") for key in SETTINGS},
        "parallel axes": ", ".join(axes),
        "jobs": ", ".join(map(str, info.get("job_ids") or ())),
        "code": changes,
        "config hash": info.get("config_hash"),
        "overrides": " ".join(info.get("overrides") or ()),
        "run directory": facts.run_dir.path,
        "submitted from": info.get("submit_dir"),
    }
    rows = [(key, units.clean(value)) for key, value in known.items() if value not in (None, "", [], {})]
    grids = [grid("The run and its machines", ("item", "value"), rows)]
    used = _gpu_rows(facts)
    if used:
        header = ("node", "GPU", "busy", "idle", "power", "peak memory", "highest temperature", "errors")
        grids.append(grid("GPUs in the newest attempt", header, used, folded=len(used) > 16))
    return Section("system", "Machines and code", grids=tuple(grids))


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


def config_section(facts: RunFacts) -> Section:
    """Return the section of the config: what differs from the defaults."""
    if facts.config is None:
        return Section("config", "Config", missing="The config cannot be read.")
    changed = facts.changed_settings
    rows = [(units.clean(key, 120), _setting(value), _setting(default)) for key, default, value in changed]
    grids = [grid("Fields that differ from the defaults", ("field", "value", "default"), rows[:MOST_SETTINGS])]
    about = f"{units.plural(len(changed), 'field')} differ{'s' if len(changed) == 1 else ''} from the defaults."
    return Section("config", "Config", about, grids=tuple(each for each in grids if each.rows))


def _setting(value: Any) -> str:
    """Return a value of a config as it is written in YAML's flow style, without secrets."""
    if value is MISSING:
        return "(no such field)"
    return units.clean(value) or '""' if isinstance(value, str) else units.clean(units.json_words(value))
