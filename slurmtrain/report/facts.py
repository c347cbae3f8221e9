"""The records of a run, each read when it is first asked for. What cannot be read is left out, and `troubles` says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.causes import goodput_of
from slurmtrain.report.goodput import Goodput
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.reasons import Event, Reason
from slurmtrain.runs.run_dir import RunDir

if TYPE_CHECKING:
    from slurmtrain.report.findings import SlowRanks
    from slurmtrain.slurm.node_ledger import Blamed

MOST_EVENTS = 20_000  # of the newest ones
# Events of which there is something to say.
TROUBLES = frozenset(
    {
        *(Event.UPDATE_SKIPPED, Event.ROLLED_BACK, Event.STRAGGLER),
        *(Event.NO_CHECKPOINT_SEEN, Event.INCOMPLETE_CHECKPOINT, Event.PREFLIGHT),
    }
)
T = TypeVar("T")


@dataclass(frozen=True)
class RunFacts:
    """A run as `status RUN` and its page show it.

    Attributes:
        state: what it does, as SLURM and its files say.
        now: unix seconds at which it is read.
        troubles: why parts could not be read, each in a sentence.
    """

    run_dir: RunDir
    state: RunState
    now: float
    troubles: list[str] = field(default_factory=list)

    def tried(self, read: Callable[[], T], otherwise: T) -> T:
        """Return what is read; if it cannot be, note why, and return the other."""
        try:
            return read()
        except UnreadableRecordError as error:
            self.troubles.append(error.message)
            return otherwise

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts, oldest first."""
        return self.state.attempts

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """The contents of run.json."""
        return self.run_dir.info()

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The contents of config.yaml as plain values; None if it cannot be read."""
        found = self.tried(self.run_dir.config_values, None)
        return found if isinstance(found, Mapping) else None

    def setting(self, key: str) -> Any:
        """Return the value of a dotted key of the config; None if there is none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The newest events, oldest first."""
        found: list[dict[str, Any]] = self.tried(self.run_dir.events, [])
        return found[-MOST_EVENTS:]

    @property
    def slow_ranks(self) -> list[SlowRanks]:
        """The slow ranks that it has named, oldest first."""
        from slurmtrain.report.findings import slow_ranks

        return slow_ranks(self.events)

    @property
    def findings(self) -> dict[str, str]:
        """What has happened to its numbers, its ranks and its checkpoints, and what its checks have found, a phrase each."""
        if not any(event["event"] in TROUBLES for event in self.events):
            return {}
        from slurmtrain.report import findings

        record = None
        if self.attempts and any(event["event"] == Event.PREFLIGHT for event in self.events):
            folder = self.run_dir.attempt(self.attempts[-1].number)
            record = self.tried(partial(findings.read_preflight, folder), None)
        return {
            "numbers": findings.trouble(self.events),
            "slow ranks": findings.trouble_of_ranks(self.slow_ranks),
            "checkpoints": findings.trouble_of_checkpoints(self.events),
            "preflight": findings.in_words(record.findings) if record is not None else "",
        }

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """What it has logged, by step, each value once, as it counts."""
        from slurmtrain.report.collect import metrics_of

        return self.tried(lambda: metrics_of(self.run_dir), [])

    @cached_property
    def goodput(self) -> Goodput | None:
        """Its time by cause; None if that cannot be read. A run of which SLURM cannot be asked counts as alive."""
        alive = None if self.state.status == RunStatus.UNKNOWN else self.state.alive
        return self.tried(lambda: goodput_of(self.run_dir, alive=alive, now=self.now), None)

    @cached_property
    def left_out(self) -> list[Blamed]:
        """The nodes that its latest job leaves out."""
        if not any(event["event"] == Event.NODES_LEFT_OUT for event in self.events):
            return []
        from slurmtrain.runs.node_blame import left_out_of

        return self.tried(lambda: left_out_of(self.run_dir, self.state.job_id), [])

    @property
    def hang_pages(self) -> dict[int, Path]:
        """The pages with the stacks of the ranks of attempts that hung, by their numbers."""
        hung = (each.number for each in self.attempts if each.reason == Reason.HANG)
        return {number: page for number in hung if (page := self.run_dir.attempt(number).hang_page).exists()}

    @property
    def has_gpus(self) -> bool:
        """Whether it has held GPUs, or may have."""
        return self.goodput is None or self.goodput.gpu_hours > 0 or not self.attempts
