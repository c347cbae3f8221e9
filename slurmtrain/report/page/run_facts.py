"""Everything that the report of a run is made from, read once. What cannot be read is told, and left out of the page."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.config.frozen import to_values
from slurmtrain.config.schema import Config
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.collect import metrics_of
from slurmtrain.report.compare import MISSING, config_differences
from slurmtrain.report.goodput.causes import Goodput
from slurmtrain.report.goodput.run import goodput_of
from slurmtrain.report.page.series import Series, series_of
from slurmtrain.report.status.look import state
from slurmtrain.report.status.state import RunState
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.node_blame import left_out_of
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.node_ledger import Blamed

MOST_EVENTS = 20_000  # of the newest ones


@dataclass(frozen=True)
class RunFacts:
    """The records of a run.

    Attributes:
        info: run.json.
        config: config.yaml as plain values; None if it cannot be read.
        events: oldest first.
        series: the metrics by name, each step as it counts.
        metrics_left_out: number of further metrics, which are not shown.
        goodput: its time by cause; None if it is not known.
        left_out: nodes that its latest job leaves out.
        sampled: GPUs were seen at work in the newest attempt.
        hang_pages: number of an attempt that hung -> the page with the stacks of its ranks.
        troubles: why parts could not be read, each in a sentence.
        now: unix seconds at which all this was read.
    """

    run_dir: RunDir
    info: Mapping[str, Any]
    state: RunState
    config: Mapping[str, Any] | None
    events: tuple[Mapping[str, Any], ...]
    series: Mapping[str, Series]
    now: float
    metrics_left_out: int = 0
    goodput: Goodput | None = None
    left_out: tuple[Blamed, ...] = ()
    hang_pages: Mapping[int, str] = field(default_factory=dict)
    sampled: bool = False
    troubles: tuple[str, ...] = ()

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts, oldest first."""
        return self.state.attempts

    @property
    def name(self) -> str:
        """The name that the person gave the run."""
        return str(self.info.get("name") or self.run_dir.path.parent.name)

    @property
    def has_gpus(self) -> bool:
        """Whether it has held GPUs, or may have."""
        return self.goodput is None or self.goodput.gpu_hours > 0 or self.sampled or not self.attempts

    def setting(self, key: str) -> Any:
        """Return the value of a dotted key of the config; None if there is none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @functools.cached_property
    def changed_settings(self) -> list[tuple[str, Any, Any]]:
        """The (dotted key, default, value of this run) of each field of the config that differs from its default."""
        if self.config is None:
            return []
        found = config_differences(to_values(Config()), self.config)
        return [(key, default, value) for key, default, value in found if value is not MISSING]


def read_run(run_dir: RunDir, *, now: float) -> RunFacts:
    """Read the records of a run.

    Args:
        now: unix seconds.

    Raises:
        UnreadableRecordError: its run.json or the records of its attempts cannot be used.
    """
    known = state(run_dir)
    troubles: list[str] = []

    def tried(read: Any, otherwise: Any) -> Any:
        try:
            return read()
        except UnreadableRecordError as error:
            troubles.append(error.message)
            return otherwise

    config = tried(run_dir.config_values, None)
    events = tried(run_dir.events, [])
    series, left_out = series_of(tried(lambda: metrics_of(run_dir), []))
    pages = {each.number: run_dir.attempt(each.number).hang_page for each in known.attempts if each.reason == "hang"}
    return RunFacts(
        run_dir,
        run_dir.info(),
        known,
        _shallow(config) if isinstance(config, Mapping) else None,
        tuple(events[-MOST_EVENTS:]),
        series,
        now,
        left_out,
        tried(lambda: goodput_of(run_dir, alive=known.alive, now=now), None),
        tuple(tried(lambda: left_out_of(run_dir, known.job_id), [])),
        {number: str(page) for number, page in pages.items() if page.exists()},
        bool(known.attempts) and bool(run_dir.attempt(known.attempts[-1].number).gpu_files()),
        tuple(dict.fromkeys(troubles)),
    )


def _shallow(value: Any, depth: int = 12) -> Any:
    """Return a config without what is nested deeper than ours ever is."""
    if isinstance(value, Mapping):
        return {key: _shallow(each, depth - 1) for key, each in value.items()} if depth else "..."
    if isinstance(value, list):
        return [_shallow(each, depth - 1) for each in value] if depth else "..."
    return value
