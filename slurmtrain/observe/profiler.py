"""The profile of some steps on one rank: a trace of torch.profiler, its table, and a snapshot of the GPU's memory."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmtrain.system.files import temporary_beside, write_text
from slurmtrain.system.modes import file_mode

log = logging.getLogger(__name__)

TABLE_ROWS = 50
MEMORY_EVENTS = 200_000  # allocations and frees that are remembered, with their stacks, in the host's memory


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
        self._remembers = False  # allocations are recorded

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
            if self._on_gpu:
                self._remembers = True
                _record_memory(max_entries=MEMORY_EVENTS)

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
                self._forget()  # where it ended before it recorded a step, nothing was written

    def _write(self, profile: Any) -> None:
        """Write the files; called by torch when the steps are done, or when it is stopped before."""
        import torch

        if not self._wanted:
            return
        self._wanted = False
        trace = self._folder / f"rank-{self._rank}.trace.json.gz"
        packed = temporary_beside(trace, ".json.gz")
        try:
            profile.export_chrome_trace(str(packed))
            packed.chmod(file_mode(self._folder))
            packed.replace(trace)
            if self._remembers:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"rank-{self._rank}.memory.pickle"))
        finally:
            self._forget()
            packed.unlink(missing_ok=True)
        by = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=by, row_limit=TABLE_ROWS, max_name_column_width=60)
        write_text(self._folder / f"rank-{self._rank}.txt", table, durable=False)

    def _forget(self) -> None:
        """Stop recording allocations, and free what is recorded."""
        if self._remembers:
            self._remembers = False
            _record_memory(enabled=None)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Log an error in the block, and profile no more."""
        try:
            yield
        except Exception as error:
            log.warning("no profile of rank %d: %s: %s", self._rank, type(error).__name__, error)
            profile, self._profile, self._wanted = self._profile, None, False
            with contextlib.suppress(Exception):
                self._forget()
            with contextlib.suppress(Exception):
                profile.stop()


def _record_memory(**options: Any) -> None:
    import torch

    torch.cuda.memory._record_memory_history(**options)
