"""What training reports: the numbers of a step, summed over all ranks, and the files and lines that rank 0 makes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slurmtrain.config.schema import Config, TrainConfig
from slurmtrain.observe.logger import Ending
from slurmtrain.observe.logger_thread import CLOSE_S, LoggerThread, follow, loggers_of
from slurmtrain.observe.metrics import MetricsLog
from slurmtrain.observe.phases import Phase, PhaseTimes, Speed
from slurmtrain.observe.progress import ProgressLine
from slurmtrain.planner.hardware import Peak
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.training.hooks.base import RecordingHook, StepResult, TrainingState

SHOWN = ("loss", "lr", "tokens_per_s")  # on the progress line
DIGITS = 7  # of a number that was measured
WAITING_TOO_LONG = 0.1  # share of a step's time spent waiting for data


class StepReports:
    """Reports every train.log_every-th step and the last one. On all ranks.

    All numbers are explained in docs/numbers.md.

    Args:
        peak: the most that a rank's device can do.
    """

    def __init__(self, train: TrainConfig, peak: Peak | None = None):
        self._train = train
        self._peak = peak or Peak(None, "nobody has said what the device can do")
        self._said_waiting = False

    def report(self, state: TrainingState, result: StepResult) -> None:
        """Report the step that is done."""
        with state.phases.waiting():
            total = state.ranks.sum(result.loss_sum)  # after which the device has done all of the step
        speed = state.throughput.read()
        values: dict[str, float | str | None] = {
            "loss": total.item() / result.tokens,
            "grad_norm": float(result.grad_norm),
            "param_norm": _parameter_norm(state),
            "lr": result.learning_rate,
            **{name: _short(value) for name, value in self._measured(state, speed).items()},
            "data_hash": state.data_hash,
        }
        state.hooks.log(state.step, values)
        share = speed.data_wait_s / speed.step_time_s
        if share > WAITING_TOO_LONG and speed.settled and not self._said_waiting:
            self._said_waiting = True
            state.hooks.message(
                f"step {state.step}: {share:.0%} of the time goes into waiting for data; "
                f"more than train.data_workers={self._train.data_workers} may help"
            )

    def _measured(self, state: TrainingState, speed: Speed) -> dict[str, float]:
        """Return the numbers that depend on the clock, or on the machine."""
        return {
            "tokens_per_s": speed.tokens_per_s,
            "samples_per_s": speed.samples_per_s,
            "tokens_per_s_per_gpu": speed.tokens_per_s / state.ranks.size,
            "step_time_s": speed.step_time_s,
            "data_wait_s": speed.data_wait_s,
            **self._utilisation(state, speed),
            **_memory(state),
            **_times(state, state.phases.read()),
        }

    def _utilisation(self, state: TrainingState, speed: Speed) -> dict[str, float]:
        """Return the operations per second of each rank, and their share of the most that its device can do."""
        if state.flops is None:
            return {}
        tokens, *pairs = speed.work_per_s
        dense, attended = (
            (state.flops.per_token * tokens + state.flops.per_pair * each) / 1e12 / state.ranks.size for each in pairs
        )
        values = {"tflops_per_gpu": dense}
        if self._peak.tflops is not None:
            values |= {"mfu": dense / self._peak.tflops, "mfu_attended": attended / self._peak.tflops}
        return values


def _parameter_norm(state: TrainingState) -> float:
    """Return the norm of the trained parameters. All ranks call it together."""
    if state.distributed_model.mesh is None:  # the same on all ranks
        return nn.utils.get_total_norm([parameter.detach() for parameter in state.parameters]).item()
    from slurmtrain.parallel.gradients import total_norm  # with DTensors, which take half a second to import

    tied = state.distributed_model.tied_parameters
    return total_norm(state.parameters, state.ranks.device_group, tied, state.phases.waiting).item()


def _short(value: float) -> float:
    """Return a measured number with as many digits as mean something, so that a long run's file stays small."""
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def _memory(state: TrainingState) -> dict[str, float]:
    """Return the most memory that any rank's GPU has had in use since the attempt began, in units of 2^30 bytes."""
    device = state.distributed_model.device
    if device.type != "cuda":
        return {}
    own = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    with state.phases.waiting():
        allocated, reserved = state.ranks.most([each / 2**30 for each in own])
    return {"memory_allocated_gb": allocated, "memory_reserved_gb": reserved}


def _times(state: TrainingState, times: PhaseTimes | None) -> dict[str, float]:
    """Return the seconds of each part per step, since the last time; none if nothing measures them."""
    if times is None:
        return {}
    seconds = {phase: seconds / times.steps for phase, seconds in times.seconds.items()}
    values: dict[str, float] = {}
    if state.phases.communication_known:
        values = {"communication_share": times.communication_share}
    else:  # what is known of it is a part of that in which it happens
        seconds[Phase.FORWARD_BACKWARD] += seconds.pop(Phase.COMMUNICATION)
    return {
        "time_total_s": times.total_s / times.steps,
        **{f"time_{phase}_s": value for phase, value in seconds.items()},
        **values,
    }


class RunReporter(RecordingHook):
    """Writes the metrics file and the progress line of a run, on rank 0.

    Args:
        metrics_file: the file to append the numbers of steps and evaluations to.
        heading: what is shown first.
    """

    def __init__(self, metrics_file: Path, heading: str = ""):
        self._metrics_file, self._heading = metrics_file, heading
        self._metrics: MetricsLog | None = None
        self._progress: ProgressLine

    def start(self, state: TrainingState) -> None:
        self._metrics = MetricsLog(self._metrics_file, state.first_step, _made_once(state))
        self._progress = ProgressLine(state.total_steps, state.first_step)
        if self._heading:
            self.message(self._heading)

    def rolled_back(self, state: TrainingState, from_step: int) -> None:
        if self._metrics is not None:
            self._metrics.rewind(state.step, _made_once(state))
            self._progress = ProgressLine(state.total_steps, state.step)

    def log(self, step: int, values: Mapping[str, float | str | None]) -> None:
        if self._metrics is not None:
            self._metrics.write(step, **values)
            shown = {name: value for name in SHOWN if isinstance(value := values.get(name), float)}
            self._progress.update(step, **shown)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.write(step, **values)

    def message(self, text: str) -> None:
        if self._metrics is not None:
            self._progress.message(text)

    def close(self, state: TrainingState) -> None:
        if self._metrics is not None:
            self._metrics.close()


def _made_once(state: TrainingState) -> Callable[[dict[str, Any]], bool]:
    """Return what tells the records that stay: one without a training loss is of an evaluation.

    Those after the last checkpoint are made again.
    """
    evaluated_at = state.evaluated_at
    return lambda record: "loss" in record or record["step"] <= evaluated_at


class ExternalLoggers(RecordingHook):
    """Keeps the threads of the loggers, on rank 0. They read metrics.jsonl: its writer comes before this hook."""

    def __init__(self, run_dir: RunDir, config: Config, attempt: int):
        self._run_dir, self._config, self._attempt = run_dir, config, attempt
        self._threads: list[LoggerThread] = []

    def start(self, state: TrainingState) -> None:
        # The workers of the loader are there: a fork while a thread imports W&B leaves the locks of its imports held.
        names, say = loggers_of(self._config), state.hooks.message
        self._threads = [follow(name, self._run_dir, self._config, self._attempt, say) for name in names]

    def rolled_back(self, state: TrainingState, from_step: int) -> None:
        for each in self._threads:
            each.rewind()

    def close(self, state: TrainingState) -> None:
        ending = Ending.FINISHED if state.finished else Ending.STOPPED if state.stopping else Ending.FAILED
        deadline = time.monotonic() + CLOSE_S[ending]
        for each in self._threads:  # all at the same time, and not for long
            each.close(ending, deadline)
        for each in self._threads:
            each.wait()
