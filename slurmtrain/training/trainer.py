"""The training loop: steps until done or told to stop.

It knows nothing of SLURM. A `StopCheck` decides whether to stop, the checkpointer where a checkpoint goes, and the
reporter what a person sees.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.interval import Interval, SaveSchedule, choose_last_save
from slurmtrain.checkpoint.pending_save import DRAIN_S, PendingSave, SaveResult
from slurmtrain.checkpoint.restorer import Restored
from slurmtrain.choices import RestoreOnly
from slurmtrain.config.schema import CheckpointConfig, OptimConfig, TrainConfig
from slurmtrain.data.loading import sample_digest
from slurmtrain.data.loading.loader import BatchLoader, Step
from slurmtrain.errors import CheckpointError, ConfigError
from slurmtrain.observe import Reporter, Throughput
from slurmtrain.parallel.ddp import warm_up_ddp_buckets, without_trace
from slurmtrain.parallel.parallelize import DistributedModel
from slurmtrain.training.evaluation import Evaluator, not_measured
from slurmtrain.training.forward_backward import ForwardBackward
from slurmtrain.training.nonfinite import DivergedError, NonfiniteSteps, all_finite
from slurmtrain.training.optim import (
    apply_settings,
    build_optimizer,
    learning_rate,
    set_learning_rate,
    settings_of,
)
from slurmtrain.training.stopping import StepDecision, StopCheck

WAITING_TOO_LONG = 0.1  # share of a step's time spent waiting for data


class EvaluationJobs(Protocol):
    """Evaluation of checkpoints by other jobs (eval.mode=job), so that training goes on."""

    def ask(self, step: int) -> None:
        """Have the checkpoint of this step evaluated once it is committed."""

    def close(self, *, finished: bool) -> None:
        """End with training: if all steps are done (`finished`), wait until every evaluation is submitted."""


@dataclass(frozen=True)
class TrainingRanks:
    """This rank and its process groups, as far as training needs to know them.

    Attributes:
        device_group: all ranks, for tensors on the model's device; None for a single rank.
        control_group: a gloo group of all ranks for small sums on the CPU; None for a single rank.
    """

    rank: int = 0
    device_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of `fit`.

    Attributes:
        finished: all steps are done; otherwise training was told to stop and has saved.
        step: steps done over all attempts.
        first_step: step at which this attempt began.
        saved: the checkpoint written last, if any.
        valid_loss: nats per token of the last evaluation of this attempt.
    """

    finished: bool
    step: int
    first_step: int
    saved: SaveResult | None
    valid_loss: float | None


@dataclass
class Counters:
    """The trainer's own part of the state.

    Attributes:
        data_hash: digest of all samples so far, see `data.loading.sample_digest`; None: not known.
    """

    step: int = 0
    evaluated_at: int = 0
    data_hash: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "evaluated_at": self.evaluated_at, "data_hash": self.data_hash}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.evaluated_at = state["step"], state["evaluated_at"]
        self.data_hash = state.get("data_hash")  # earlier versions did not have it, and half of a digest proves nothing


class StepSums(NamedTuple):
    """Sums over all ranks and micro batches of a step.

    Attributes:
        tokens: number of targets that are not ignored.
        digest: digest of the samples.
    """

    tokens: int
    digest: list[int]


class Trainer:
    """The training of one model on one data source with one optimiser, from the newest checkpoint to the last step.

    Args:
        distributed_model: the model on this rank; called with tokens [B, S], it returns logits [B, S, V].
        loader: this rank's micro batches.
        passes: runs micro batches through the model.
        evaluator: measures the held-out samples.
        jobs: has other jobs measure them in place of `evaluator`; None: `evaluator` measures them.
        baseline: (name, nats per token) of a simple model on the same text, shown beside every validation loss.
        checkpointer: saves and restores; None: nothing is saved (benchmarks).
        stop: asked once a step whether to stop.
        data_hash: name of the data, with which the digest of the samples begins.
        make_reporter: called with the step that the attempt starts from, and the last one that was evaluated.
        make_cadence: called with the step that the attempt starts from; returns what decides when a save is due. None:
            as `checkpoint` says, without `auto`.
        plan_stop: called with the longest step and the longest save so far, in seconds, whenever they were measured.
        grace_left: returns the seconds until this job is killed, after it was told to stop; None when unknown.
    """

    def __init__(
        self,
        *,
        train: TrainConfig,
        optim: OptimConfig,
        checkpoint: CheckpointConfig,
        distributed_model: DistributedModel,
        loader: BatchLoader,
        forward_backward: ForwardBackward,
        evaluator: Evaluator,
        jobs: EvaluationJobs | None = None,
        baseline: tuple[str, float] | None = None,
        ranks: TrainingRanks,
        checkpointer: Checkpointer | None,
        stop: StopCheck,
        make_reporter: Callable[[int, int], Reporter],
        on_restore: Callable[[Restored | None], None] = lambda restored: None,
        make_save_schedule: Callable[[int], SaveSchedule] | None = None,
        plan_stop: Callable[[float, float], None] = lambda step_s, save_s: None,
        grace_left: Callable[[], float | None] = lambda: None,
        data_hash: str = "",
    ):
        self._train, self._optim, self._checkpoint = train, optim, checkpoint
        self._distributed_model, self._model = distributed_model, distributed_model.model
        self._loader, self._forward_backward = loader, forward_backward
        self._evaluator, self._jobs = evaluator, jobs
        self._ranks, self._checkpointer, self._stop = ranks, checkpointer, stop
        self._baseline = baseline
        self._make_reporter, self._on_restore = make_reporter, on_restore
        interval = Interval(checkpoint.every_steps, checkpoint.every_minutes)
        self._make_save_schedule = make_save_schedule or (
            lambda step: SaveSchedule(interval, now=time.monotonic(), step=step)
        )
        self._plan_stop, self._grace_left = plan_stop, grace_left
        self._optimizer = build_optimizer(distributed_model.model, optim)
        self._counters = Counters(data_hash=data_hash)
        self._pending_save: PendingSave | None = None
        self._save_s: float | None = None  # the longest of this attempt
        self._step_s = 0.0
        self._said_waiting = False
        self._measured: dict[str, float] = {}  # metrics of the last evaluation of this attempt
        self._asked_at: int | None = None  # the step whose checkpoint was asked to be evaluated last
        self._parameters = [parameter for parameter in distributed_model.model.parameters() if parameter.requires_grad]
        self._nonfinite = NonfiniteSteps(train.max_nonfinite)
        self._begins_finite = all_finite(self._parameters)  # parameters that begin non-finite are meant to be so

    @property
    def step(self) -> int:
        """Steps done, by this attempt and those before it."""
        return self._counters.step

    def fit(self) -> Outcome:
        """Restore, then step until done or told to stop; save on the way and at the end."""
        if self._checkpoint.keep_best:
            self._evaluator.check_best_metric(self._checkpoint.best_metric)
        self._warm_up()
        self._restore()
        first_step = self._counters.step
        self._reporter = self._make_reporter(first_step, self._counters.evaluated_at)
        self._save_schedule = self._make_save_schedule(first_step)
        self._throughput = Throughput()
        # The objects that exist by now stay. A full garbage collection would visit all of them, for a tenth of a second
        # and more; each rank would do so at another time, and all others wait.
        gc.collect()
        gc.freeze()
        try:
            self._loader.start()  # before an evaluation opens files that the workers would then share
            if self._jobs is None:
                self._evaluator.prepare()
            # An evaluation that a stop cut short is repeated first.
            stopping = self._check_stop_now() or (self._evaluation_due() and self._evaluate())
            while not stopping and self._counters.step < self._train.steps:
                answer = self._train_step()
                if answer.give_up:  # decided after the step before this one
                    raise self._diverged()
                last = self._counters.step >= self._train.steps
                stopping = answer.stop and not last
                if not stopping and self._evaluation_due():
                    stopping = self._evaluate()
                if not stopping and (answer.save or self._asked_at == self._counters.step) and not last:
                    self._save()
                self._measure_saves()
            finished = not stopping and self._counters.step >= self._train.steps
            if finished and not self._is_finite():
                self._nonfinite.look()
                raise self._diverged()
            saved = self._save_last(stopping) if self._counters.step > first_step or finished else None
            if self._checkpointer is not None:
                self._checkpointer.close(None if finished else 0)
            if self._jobs is not None:
                self._jobs.close(finished=finished)
            return Outcome(finished, self._counters.step, first_step, saved, self._measured.get("valid_loss"))
        except BaseException:
            self._drain()
            raise
        finally:
            gc.unfreeze()
            self._reporter.close()
            self._loader.close()

    def _train_step(self) -> StepDecision:
        """Run one optimiser step over the global batch, and return what all ranks decide to do after it."""
        began = time.perf_counter()
        data = next(self._loader)
        data_wait_s = time.perf_counter() - began
        sums = self._begin_sums(data)
        rate = learning_rate(self._counters.step, total_steps=self._train.steps, config=self._optim)
        set_learning_rate(self._optimizer, rate)

        loss_sum = self._forward_backward.train(data.micro_batches, lambda: max(1, sums().tokens))
        tokens = max(1, sums().tokens)

        # Asked as late as possible, so that a signal in the middle of a step still stops after it, and answered while
        # the optimiser works.
        due = self._save_schedule.due(self._counters.step + 1, time.monotonic())
        self._stop.begin(save=due, give_up=self._look_at_last_step())
        norm = self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        answer = self._stop.finish()

        self._counters.step += 1
        self._nonfinite.note(self._counters.step, loss_sum, norm, tokens)
        if self._counters.data_hash is not None:
            self._counters.data_hash = sample_digest.chained(self._counters.data_hash, sums().digest)
        self._step_s = max(self._step_s, self._throughput.step(tokens, data_wait_s))
        if self._counters.step % self._train.log_every == 0 or self._counters.step == self._train.steps:
            total = self._sum_over_ranks(loss_sum)
            self._reporter.log(
                self._counters.step,
                loss=total.item() / tokens,
                grad_norm=float(norm),
                lr=rate,
                tokens_per_s=self._throughput.tokens_per_s,
                step_time_s=self._throughput.step_time_s,
                data_wait_s=self._throughput.data_wait_s,
                data_hash=self._counters.data_hash,
            )
            self._say_when_waiting_for_data()
        return answer

    def _say_when_waiting_for_data(self) -> None:
        share = self._throughput.data_wait_s / self._throughput.step_time_s
        if share > WAITING_TOO_LONG and self._throughput.full and not self._said_waiting:
            self._said_waiting = True
            self._reporter.message(
                f"step {self._counters.step}: {share:.0%} of the time goes into waiting for data; "
                f"more than train.data_workers={self._train.data_workers} may help"
            )

    def _look_at_last_step(self) -> bool:
        """Return whether too many steps in a row, the last one included, had no finite loss or gradient norm."""
        too_many = self._nonfinite.look()
        if self._nonfinite.in_a_row == 1:
            self._reporter.message(
                f"step {self._nonfinite.last}: loss or gradient norm are not finite"
                + (f"; {self._nonfinite.limit} such steps in a row end the run" if self._nonfinite.limit else "")
            )
        return too_many

    def _is_finite(self) -> bool:
        """Return whether the parameters are finite on all ranks, which call this together before they save."""
        finite = torch.tensor(int(not self._begins_finite or all_finite(self._parameters)))
        if self._ranks.control_group is not None:
            dist.all_reduce(finite, dist.ReduceOp.MIN, self._ranks.control_group)
        return bool(finite)

    def _diverged(self) -> DivergedError:
        """Return the error that ends the run. All ranks call it together."""
        steps = self._nonfinite
        loss = self._sum_over_ranks(torch.tensor(steps.loss)).item()
        numbers = f"the last one looked at, {steps.last}, has loss {loss:.4g} and gradient norm {steps.norm:.4g}"
        if 0 < steps.limit <= steps.in_a_row:
            many = f"in a row (train.max_nonfinite={steps.limit})"
            what = f"loss or gradient norm are not finite for {steps.in_a_row} steps {many}: from step {steps.first} on"
        else:
            what = f"the parameters are not finite after step {self._counters.step}"
        step = self._checkpointer.last_step if self._checkpointer is not None else None
        before = "there is no checkpoint" if step is None else f"the newest checkpoint, of step {step}, is from before"
        return DivergedError(
            f"{what}; {numbers}; {before}",
            hint="the same steps would do the same again, so nothing is tried again: a smaller optim.lr, more "
            "optim.warmup_steps or optim.grad_clip=1 may help, or other data",
        )

    def _clip(self) -> Tensor:
        """Scale the gradients so that their norm is at most `optim.grad_clip`, and return the norm before."""
        if self._distributed_model.mesh is None:  # the same on all ranks
            return nn.utils.clip_grad_norm_(self._parameters, self._optim.grad_clip or math.inf)
        from slurmtrain.parallel.gradients import clip_gradients  # with DTensors, which take half a second to import

        return clip_gradients(
            self._parameters, self._optim.grad_clip, self._ranks.device_group, self._distributed_model.tied_parameters
        )

    def _begin_sums(self, data: Step) -> Callable[[], StepSums]:
        """Add up tokens and digest of this step over all ranks, while the first forward pass runs.

        Returns:
            A function that waits for the sums.
        """
        speaks = self._distributed_model.counts_samples  # otherwise another rank has the same samples
        sums = torch.tensor([data.targets, *data.digest], dtype=torch.int64) * speaks
        work = None
        if self._ranks.control_group is not None:
            work = dist.all_reduce(sums, group=self._ranks.control_group, async_op=True)

        def wait() -> StepSums:
            nonlocal work
            if work is not None:
                work.wait()
                work = None
            tokens, *digest = sums.tolist()
            return StepSums(tokens, digest)

        return wait

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over all ranks, in float64 on the CPU."""
        total = value.double().cpu()
        if self._ranks.control_group is not None:
            dist.all_reduce(total, group=self._ranks.control_group)
        return total

    def _warm_up(self) -> None:
        """Run a backward pass and discard it, if the first one does what later ones do not.

        DistributedDataParallel regroups its buckets; a pipeline finds out the shapes, for which stages draw random
        numbers.
        """

        def backward(micro_batches: int) -> None:
            self._forward_backward.train([self._loader.example()] * micro_batches, count=lambda: 1)

        if self._distributed_model.dims.pp > 1:
            without_trace(self._model, lambda: backward(self._loader.accumulation_steps))
        warm_up_ddp_buckets(self._model, lambda: backward(1))

    def _evaluation_due(self) -> bool:
        step, every = self._counters.step, self._train.eval_every
        due = step == self._train.steps or (every > 0 and step % every == 0)
        return bool(self._evaluator.sets) and due and step > self._counters.evaluated_at

    def _evaluate(self) -> bool:
        """Measure every held-out sample, or have another job do it.

        Return True when a stop was requested before it was done.
        """
        step = self._counters.step
        if self._jobs is not None:
            self._counters.evaluated_at = self._asked_at = step
            self._jobs.ask(step)
            return False
        measured = self._evaluator.evaluate()
        if measured is None:
            return True
        keep = self._checkpoint
        if keep.keep_best and keep.best_metric not in measured:
            raise not_measured(keep.best_metric, measured)
        self._measured = measured
        self._counters.evaluated_at = step
        self._reporter.record(step, **measured)
        for name in self._evaluator.sets:
            what = "validation" if name == "valid" else name
            beside = f" ({self._baseline[0]}: {self._baseline[1]:.4f})" if self._baseline and name == "valid" else ""
            self._reporter.message(f"step {step}: {what} loss {measured[f'{name}_loss']:.4f} nats per token{beside}")
        self._throughput.start()
        return False

    def _check_stop_now(self) -> bool:
        self._stop.begin()
        return self._stop.finish().stop

    def _restore(self) -> None:
        restored = None
        if self._checkpointer is not None:
            settings = settings_of(self._optimizer)
            restored = self._checkpointer.restore(allow=self._checkpoint.allow, **self._state())
            if restored is None and self._checkpoint.restore_from:
                restored = self._begin_from(self._checkpointer, self._checkpoint.restore_from)
            # The config of this run decides the settings, the checkpoint only the learnt state.
            apply_settings(self._optimizer, settings)
        if self._distributed_model.compression is not None:
            self._distributed_model.compression.begin(self._counters.step)
        self._on_restore(restored)

    def _begin_from(self, checkpointer: Checkpointer, path: str) -> Restored | None:
        """Continue from another run's checkpoint, or start with its weights.

        Raises:
            ConfigError: that run has done all the steps that this run is to do.
        """
        allow = self._checkpoint.allow
        if self._checkpoint.restore_only == RestoreOnly.MODEL:
            return checkpointer.restore(path=path, allow=allow, as_start=True, model=self._model)
        restored = checkpointer.restore(path=path, allow=allow, **self._state())
        if self._counters.step >= self._train.steps:
            raise ConfigError(
                f"checkpoint.restore_from={path} is at step {self._counters.step} already, and "
                f"train.steps={self._train.steps}: there is nothing left to train",
                hint="begin anew with its weights: checkpoint.restore_only=model; to go on from its step: more train.steps",
            )
        return restored

    def _save(self) -> None:
        """Begin to save, and let training go on."""
        if self._checkpointer is None or self._checkpointer.last_step == self._counters.step:
            return
        if not self._is_finite():
            self._reporter.message(f"step {self._counters.step} is not saved: its parameters are not finite")
            self._save_schedule.saved(self._counters.step, time.monotonic(), None)
            return
        metrics = self._measured if self._counters.evaluated_at == self._counters.step else None
        saving = self._checkpointer.save(self._counters.step, metrics=metrics, **self._state())
        self._measure_saves()  # the one before is decided by now
        self._pending_save = saving
        self._save_schedule.saved(self._counters.step, time.monotonic(), None)
        self._throughput.start()

    def _measure_saves(self) -> None:
        """Note the duration of a save that has been committed meanwhile, which decides how early a last save has to begin."""
        if self._pending_save is not None and self._pending_save.done():
            if self._pending_save.error is None:
                saved = self._pending_save.result()
                self._save_schedule.measured(saved.stall_s)
                self._save_s = max(self._save_s or 0.0, saved.seconds)
                self._plan_stop(self._step_s, self._save_s)
            self._pending_save = None

    def _save_last(self, stopping: bool) -> SaveResult | None:
        """Save before the process ends, and wait for the commit.

        If a save is in flight, choose what is best for the time left.
        """
        checkpointer = self._checkpointer
        if checkpointer is None:
            return None
        if stopping:
            checkpointer.hurry()
        choice = self._choose_last_save() if stopping and self._is_finite() else "both"
        if choice == "in flight":
            try:
                return checkpointer.wait()
            except CheckpointError:  # the error has been reported
                choice = "both"
        if choice == "new":
            checkpointer.discard()
        self._save()
        return checkpointer.wait()

    def _drain(self) -> None:
        """Wait after an error for the save in flight, without which the next attempt would have to repeat more steps."""
        if self._checkpointer is not None:
            with suppress(CheckpointError):
                self._checkpointer.close(DRAIN_S)

    def _choose_last_save(self) -> str:
        """Return rank 0's choice on all ranks, since clocks and the state of the save differ between ranks."""
        assert self._checkpointer is not None
        choices = ("both", "new", "in flight")
        chosen = torch.zeros(1, dtype=torch.int64)
        if self._pending_save is not None and not self._pending_save.done() and self._ranks.rank == 0:
            running_s = time.monotonic() - self._pending_save.begun
            choice = choose_last_save(
                grace_s=self._grace_left(),
                in_flight_left_s=None if self._save_s is None else max(0.0, self._save_s - running_s),
                save_s=self._save_s,
                steps_behind=self._counters.step - self._pending_save.step,
            )
            chosen.fill_(choices.index(choice))
        if self._ranks.control_group is not None:
            dist.broadcast(chosen, group=self._ranks.control_group, group_src=0)
        return choices[int(chosen.item())]

    def _state(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "optimizer": self._optimizer,
            "loader": self._loader,
            "trainer": self._counters,
            "per_rank": {"compression": self._distributed_model.compression}
            if self._distributed_model.compression is not None
            else {},
        }
