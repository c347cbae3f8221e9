"""The profile of some steps on one rank: a trace of torch.profiler, its table, and a snapshot of the GPU's memory."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from slurmtrain.observe.profile_switch import ProfileRequest
from slurmtrain.system.files import replace_file, temporary_beside, write_text
from slurmtrain.system.modes import file_mode

log = logging.getLogger(__name__)

TABLE_ROWS = 50
MEMORY_EVENTS = 200_000  # allocations and frees that are remembered, with their stacks, in the host's memory


class StepProfiler:
    """Profiles steps on this rank, and writes the result when they are done.

    What goes wrong is written to a file beside the others: a training does not end for its profile.

    Args:
        folder: the folder of the profile.
        warmup: steps before those that are recorded.
        on_gpu: the model is on a GPU.
    """

    def __init__(self, folder: Path, rank: int, request: ProfileRequest, *, warmup: int, on_gpu: bool):
        self._folder, self._rank, self._on_gpu = folder, rank, on_gpu
        self._request, self._warmup = request, warmup
        self._profile: Any = None
        self._wanted = True
        self._remembers = False  # allocations are recorded

    def start(self) -> None:
        """Begin, before the first of the steps."""
        import torch.profiler as torch_profiler  # this module is also read where torch is not

        try:
            activities = [torch_profiler.ProfilerActivity.CPU]
            activities += [torch_profiler.ProfilerActivity.CUDA] if self._on_gpu else []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no warm-up, at the first step of an attempt
                schedule = torch_profiler.schedule(wait=0, warmup=self._warmup, active=self._request.steps, repeat=1)
                self._profile = torch_profiler.profile(
                    activities=activities,
                    schedule=schedule,
                    on_trace_ready=self._write,
                    record_shapes=True,
                    with_stack=self._request.stacks,
                )
                self._profile.start()
            if self._on_gpu:
                self._remembers = True
                self._memory(max_entries=MEMORY_EVENTS)
        except Exception as error:
            self._failed(error)

    def step(self) -> None:
        """Note that a step has ended. After the last one the files are written."""
        if self._profile is not None:
            try:
                self._profile.step()
            except Exception as error:
                self._failed(error)

    def stop(self, *, write: bool) -> None:
        """End, and write what has been recorded so far, or drop it."""
        self._wanted &= write
        profile, self._profile = self._profile, None
        if profile is not None:
            try:
                if not self._wanted:
                    self._forget()
                profile.stop()
                self._forget()  # where it ended before it recorded a step, nothing was written
            except Exception as error:
                self._failed(error)

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
            if self._on_gpu:
                self._write_memory()
        by = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        write_text(
            self._folder / f"rank-{self._rank}.txt",
            profile.key_averages().table(sort_by=by, row_limit=TABLE_ROWS, max_name_column_width=60),
            durable=False,
        )

    def _write_memory(self) -> None:
        import torch

        path = self._folder / f"rank-{self._rank}.memory.pickle"
        raw = temporary_beside(path)
        try:
            torch.cuda.memory._dump_snapshot(str(raw))
            raw.replace(path)
        finally:
            self._forget()
            raw.unlink(missing_ok=True)

    def _forget(self) -> None:
        """Stop recording allocations, and free what is recorded."""
        if self._remembers:
            self._remembers = False
            self._memory(enabled=None)

    def _memory(self, **options: Any) -> None:
        import torch

        torch.cuda.memory._record_memory_history(**options)

    def _failed(self, error: Exception) -> None:
        """Say what went wrong, and profile no more."""
        profile, self._profile, self._wanted = self._profile, None, False
        log.warning("no profile of rank %d: %s: %s", self._rank, type(error).__name__, error)
        for end in (self._forget, *([profile.stop] if profile is not None else [])):
            try:
                end()
            except Exception as another:
                log.debug("the profiler could not be stopped: %s", another)
        try:
            text = f"{type(error).__name__}: {error}\n"
            replace_file(self._folder / f"rank-{self._rank}.failed", text.encode(), durable=False)
        except OSError:  # the same full disk
            return
