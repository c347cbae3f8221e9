"""Profiles of a running job: all ranks begin one at the same step, the chosen ones write it.

A person asks for one by a file: `touch RUN/profile`. Rank 0 alone sees it, and sets a flag. The ranks' agreement after each
step, which is there anyway, carries one bit of it; only when a profile begins do they exchange more.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import file_mode, folder_mode, temporary_beside, write_text
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

STEPS = 3  # of a profile that somebody asks for
TABLE_ROWS = 50

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of the job. All of them call each method together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, and return its JSON value on all."""


class Profiling:
    """The profiles of an attempt. On all ranks.

    Attributes:
        left: steps until the profile that is under way is done, on this rank or another; 0: none is.

    Args:
        run_dir: the run.
        ranks: this rank and its peers.
        writers: the ranks that write a profile (observe.profile_ranks); none: all.
        on_gpu: the model is on a GPU.
        event: records an event; used on rank 0.
    """

    def __init__(
        self,
        run_dir: RunDir,
        ranks: Ranks,
        writers: Collection[int] = (),
        *,
        on_gpu: bool,
        event: Callable[[Event, dict[str, Any]], None] = lambda event, values: None,
    ):
        self._run_dir, self._ranks, self._writers, self._on_gpu = run_dir, ranks, sorted(writers), on_gpu
        self._record = event
        self._profiler: StepProfiler | None = None
        self.left = 0  # with the one that warms up
        self._steps, self._first, self._folder = 0, 0, Path()  # of the profile that is under way

    def begin(self, step: int, *, most: int | None = None) -> None:
        """Begin a profile before step `step`. All ranks call it together.

        Args:
            most: steps that are left to do.
        """
        plan = self._ranks.on_rank_0(lambda: self._plan(step, most))
        if plan is None:
            return
        self._steps, warmup, folder = plan
        self.left, self._first, self._folder = warmup + self._steps, step + warmup, Path(folder)
        rank = self._ranks.rank
        if not self._writers or rank in self._writers:
            self._profiler = StepProfiler(self._folder, rank, self._steps, warmup=warmup, on_gpu=self._on_gpu)
            self._profiler.start()

    def _plan(self, step: int, most: int | None) -> tuple[int, int, str] | None:
        """Decide on rank 0 how many steps are profiled and how many warm up, and make the folder."""
        if self._writers and self._writers[0] >= self._ranks.size:
            log.warning("no profile: observe.profile_ranks=%s, and there are %d ranks", self._writers, self._ranks.size)
            return None
        warmup = 0 if most == 1 else 1
        steps = STEPS if most is None else min(STEPS, most - warmup)
        try:
            return steps, warmup, str(_new_folder(self._run_dir, step + warmup))
        except OSError as error:
            log.warning("no profile: %s", printable(str(error)))
            return None

    def step(self) -> str | None:
        """Note that a step has ended, while a profile is under way.

        Returns:
            On rank 0, when the profile is done, a sentence that says so; else None.
        """
        self.left -= 1
        if self._profiler is not None:
            self._profiler.step()
        if self.left > 0:
            return None
        self._end(write=True)
        if self._ranks.rank != 0:
            return None
        first, last_one, folder = self._first, self._first + self._steps - 1, str(self._folder)
        with contextlib.suppress(OSError):  # a full disk must not end a training for it
            facts = {"first": first, "last": last_one, "ranks": self._writers, "folder": folder}
            self._record(Event.PROFILED, facts)
        return f"profile of step{f's {first} to {last_one}' if last_one > first else f' {first}'}: {folder}"

    def abandon(self) -> None:
        """Drop the profile that is under way, if one is: the attempt ends before it is done."""
        if not self.left:
            return
        self._end(write=False)
        if self._ranks.rank == 0:
            for path in (self._folder, self._folder.parent):
                with contextlib.suppress(OSError):  # other ranks have left files in it
                    path.rmdir()

    def _end(self, *, write: bool) -> None:
        """End this rank's part."""
        self.left = 0
        if self._profiler is not None:
            self._profiler.stop(write=write)
            self._profiler = None


def _new_folder(run_dir: RunDir, first: int) -> Path:
    """Make the folder of a profile that begins with step `first`: profiles/step_0000100; of a second one with .2 behind.

    Raises:
        OSError: it cannot be made.
    """
    run_dir.profiles.mkdir(mode=folder_mode(run_dir.path), exist_ok=True)
    number = 1
    while True:
        folder = run_dir.profile(first, number)
        try:
            folder.mkdir(mode=folder_mode(run_dir.profiles))
            return folder
        except FileExistsError:
            number += 1


# The profile of some steps on one rank: a trace of torch.profiler, and its table.


class StepProfiler:
    """Profiles steps on this rank, and writes the result when they are done.

    An error is logged and ends the profile, never the training.

    Args:
        folder: the folder of the profile.
        steps: number of steps to record, after `warmup` others.
        on_gpu: the model is on a GPU.
    """

    def __init__(self, folder: Path, rank: int, steps: int, *, warmup: int, on_gpu: bool):
        self._folder, self._rank, self._on_gpu = folder, rank, on_gpu
        self._steps, self._warmup = steps, warmup
        self._profile: Any = None
        self._wanted = True

    def start(self) -> None:
        """Begin, before the first of the steps."""
        import torch.profiler as torch_profiler  # this module is also read where torch is not

        kinds = torch_profiler.ProfilerActivity
        with self._guarded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no warm-up, at the first step of an attempt
            self._profile = torch_profiler.profile(
                activities=[kinds.CPU, *([kinds.CUDA] if self._on_gpu else [])],
                schedule=torch_profiler.schedule(wait=0, warmup=self._warmup, active=self._steps, repeat=1),
                on_trace_ready=self._write,
                record_shapes=True,
            )
            self._profile.start()

    def step(self) -> None:
        """Note that a step has ended. After the last one the files are written."""
        if self._profile is not None:
            with self._guarded():
                self._profile.step()

    def stop(self, *, write: bool) -> None:
        """End, and write what has been recorded so far, or drop it."""
        self._wanted &= write
        profile, self._profile = self._profile, None
        if profile is not None:
            with self._guarded():
                profile.stop()

    def _write(self, profile: Any) -> None:
        """Write the files; called by torch when the steps are done, or when it is stopped before."""
        if not self._wanted:
            return
        self._wanted = False
        trace = self._folder / f"rank-{self._rank}.trace.json.gz"
        packed = temporary_beside(trace, ".json.gz")
        try:
            profile.export_chrome_trace(str(packed))
            packed.chmod(file_mode(self._folder))
            packed.replace(trace)
        finally:
            packed.unlink(missing_ok=True)
        by = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=by, row_limit=TABLE_ROWS, max_name_column_width=60)
        write_text(self._folder / f"rank-{self._rank}.txt", table, durable=False)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Log an error in the block, and profile no more."""
        try:
            yield
        except Exception as error:
            log.warning("no profile of rank %d: %s: %s", self._rank, type(error).__name__, error)
            profile, self._profile, self._wanted = self._profile, None, False
            with contextlib.suppress(Exception):
                profile.stop()
