"""The page of one run: which sections it has, what is said at its top, and the numbers that a person looks for first."""

from __future__ import annotations

from collections.abc import Iterable

from slurmtrain.report.page import sentences, units
from slurmtrain.report.page.contents import Page, Tile
from slurmtrain.report.page.curve_sections import CurveSections
from slurmtrain.report.page.record_sections import (
    attempts_section,
    config_section,
    goodput_section,
    nodes_section,
    system_section,
)
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.series import Series
from slurmtrain.report.status.state import RunStatus
from slurmtrain.runs.lookup import is_sweep

MOODS = {
    RunStatus.FINISHED: "good",
    **dict.fromkeys((RunStatus.FAILED, RunStatus.LOST, RunStatus.UNREADABLE), "bad"),
    **dict.fromkeys((RunStatus.RUNNING, RunStatus.STARTING, RunStatus.STOPPING), "busy"),
}


def run_page(facts: RunFacts) -> Page:
    """Return the page of a run."""
    title = f"{units.clean(facts.name, 80)} · {units.clean(facts.run_dir.id, 80)}"
    took = (sentences.attempts_sentence(facts.attempts), sentences.what_was_lost(facts.goodput))
    said = (sentences.what_it_is(facts), sentences.how_far(facts), " ".join(filter(None, took)))
    curves = CurveSections(facts)
    sections = (
        curves.loss(),
        curves.throughput(),
        curves.phases(),
        attempts_section(facts),
        goodput_section(facts.goodput),
        nodes_section(facts),
        curves.training(),
        curves.others(),
        system_section(facts),
        config_section(facts),
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
    if mfu is not None and facts.has_gpus:
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
