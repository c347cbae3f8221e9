"""The section of what the time of a step is spent on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slurmtrain.report.page import charts, units
from slurmtrain.report.page.contents import Section, ShareBar
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.series import Series, common_steps

PHASES = (
    *("time_data_s", "time_forward_backward_s", "time_communication_s", "time_optimizer_s"),
    *("time_checkpoint_s", "time_evaluation_s", "time_other_s"),
)


def phases_section(facts: RunFacts, span: tuple[float, float]) -> Section:
    """Return the section of what the time of a step is spent on."""
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
