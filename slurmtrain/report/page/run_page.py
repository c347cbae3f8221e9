"""The page of one run: what is said at its top, and its sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmtrain.report.compare import MISSING
from slurmtrain.report.goodput.causes import Cause, Goodput
from slurmtrain.report.page import sentences, units
from slurmtrain.report.page.contents import Grid, Page, Section
from slurmtrain.report.page.curves import curve_sections
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.timeline import timeline_of
from slurmtrain.report.status.state import RunStatus
from slurmtrain.report.trouble import slow_ranks
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.lookup import is_sweep
from slurmtrain.runs.software import words_for_changes

MOODS = {
    RunStatus.FINISHED: "good",
    **dict.fromkeys((RunStatus.FAILED, RunStatus.LOST, RunStatus.UNREADABLE), "bad"),
    **dict.fromkeys((RunStatus.RUNNING, RunStatus.STARTING, RunStatus.STOPPING), "busy"),
}
MOST_SLOW, MOST_SETTINGS = 50, 2000  # sentences, and rows


def run_page(facts: RunFacts) -> Page:
    """Return the page of a run."""
    took = (sentences.attempts_sentence(facts.attempts), sentences.what_was_lost(facts.goodput))
    losses, speed, phases, others = curve_sections(facts)
    sections = [losses, speed, phases, _attempts(facts), _goodput(facts.goodput), _nodes(facts), others, _system(facts)]
    return Page(
        f"{units.clean(facts.name, 80)} · {units.clean(facts.run_dir.id, 80)}",
        facts.run_dir.id,
        str(facts.state.status),
        MOODS.get(facts.state.status, "still"),
        [sentences.what_it_is(facts), sentences.how_far(facts), " ".join(filter(None, took))],
        sentences.what_to_do(facts),
        [each for each in sections if each is not None],
        sentences.made(facts.now),
        facts.state.alive,
        [units.clean(each) for each in facts.troubles],
        facts.run_dir.path.parent.name if is_sweep(facts.run_dir.path.parent) else "",
    )


def _attempts(facts: RunFacts) -> Section:
    """Return the section of the attempts, with their timeline."""
    timeline = timeline_of(facts)
    charts = [timeline] if timeline is not None else []
    if not facts.attempts:
        return Section("attempts", "Attempts", charts=charts, missing="The run has not started yet.")
    header = ("attempt", "job", "nodes", "started", "took", "steps", "reason", "details, and what came next")
    table = Grid("Attempts", header, [_attempt_cells(each, facts) for each in facts.attempts])
    saved = sentences.checkpoints_sentence(facts.events)
    about = sentences.attempts_sentence(facts.attempts)
    return Section("attempts", "Attempts", about, charts, [table], [saved] if saved else [])


def _attempt_cells(attempt: Attempt, facts: RunFacts) -> list[str]:
    newest = attempt is facts.attempts[-1]
    end = attempt.ended or (facts.now if newest and facts.state.status == RunStatus.RUNNING else None)
    first, last = attempt.first_step, attempt.last_step
    if last is None and newest:
        last = facts.state.step
    steps = " to ".join("?" if step is None else f"{step:,}" for step in (first, last))
    return [
        str(attempt.number),
        units.clean(attempt.job_id or "-", 40),
        units.listed((units.clean(node, 64) for node in attempt.nodes), 4) or "-",
        units.moment(attempt.started),
        units.duration(end - attempt.started) if end and attempt.started else "-",
        steps if (first, last) != (None, None) else "-",
        units.clean(attempt.reason or ("not ended" if attempt.ended is None else "not known"), 40),
        units.clean(attempt.sentence or ""),
    ]


def _goodput(goodput: Goodput | None) -> Section:
    """Return the section of where the time of the run went, as far as it is known, and what interruptions cost."""
    title = "Goodput: where the time went"
    if goodput is None or not goodput.wall_s > 0:
        return Section("goodput", title, missing="It is not known yet where the time went.")

    gpus = goodput.gpu_hours > 0

    def amounts(seconds: float, gpu_seconds: float) -> list[str]:
        return [units.duration(seconds), *([units.hours(gpu_seconds)] if gpus else [])]

    spent = [
        [
            sentences.CAUSES[cause],
            units.percent(goodput.shares[cause]) if cause in goodput.shares else "-",
            *amounts(goodput.seconds[cause], goodput.gpu_seconds.get(cause, 0.0)),
        ]
        for cause in Cause
        if goodput.seconds.get(cause, 0.0) > 0
    ]
    costs = [
        [
            sentences.reason_words(reason),
            str(goodput.interruptions.get(reason, 0)),
            *amounts(seconds, goodput.lost_gpu_seconds.get(reason, 0.0)),
        ]
        for reason, seconds in goodput.lost_s.items()
    ]
    stages = [(units.clean(stage, 60), units.duration(seconds)) for stage, seconds in goodput.startup_s.items()]
    hours = ["GPU hours"] if gpus else []
    grids = [
        Grid("Time by cause", ("cause", "share", "time", *hours), spent),
        Grid("What interruptions cost", ("reason", "attempts", "time lost", *hours), costs),
        Grid("Start-up by stage, over all attempts", ("stage", "time"), stages, folded=True),
    ]
    return Section("goodput", title, sentences.what_was_lost(goodput), grids=[each for each in grids if each.rows])


def _nodes(facts: RunFacts) -> Section | None:
    """Return the section of slow ranks, and of nodes that the job excludes; None: there are none."""
    said = [units.capital(str(each)) for each in slow_ranks(facts.events)[-MOST_SLOW:]]
    said += [f"The job excludes {each.sentence(facts.now)}" for each in facts.left_out]
    return Section("nodes", "Conspicuous nodes", notes=[f"{units.clean(each)}." for each in said]) if said else None


def _system(facts: RunFacts) -> Section:
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
        (units.clean(key, 120), _setting(value), _setting(default)) for key, default, value in facts.changed_settings
    ]
    grids = [
        Grid("Config fields that differ from the defaults", ("field", "value", "default"), changed[:MOST_SETTINGS]),
        Grid("The run", ("item", "value"), [(key, units.clean(value)) for key, value in known.items() if value]),
    ]
    missing = "" if facts.config is not None else "The config cannot be read."
    return Section("config", "Config and code", grids=[each for each in grids if each.rows], missing=missing)


def _setting(value: Any) -> str:
    """Return a value of a config as it is written in YAML's flow style, without secrets."""
    if value is MISSING:
        return "(no such field)"
    return units.clean(value) or '""' if isinstance(value, str) else units.clean(units.json_words(value))
