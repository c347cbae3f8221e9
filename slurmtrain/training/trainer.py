"""The training loop: steps until done or told to stop.

It knows nothing of SLURM. A `StopAgreement` decides whether to stop. Checkpoints, profiles and the guard against numbers
that break are asked in each step; everything else, such as evaluation and reports, is a hook (`training/hooks/`).
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurmtrain.checkpoint.save.job import SaveResult
from slurmtrain.config.schema import OptimConfig, TrainConfig
from slurmtrain.data.loading import order
from slurmtrain.data.loading.batches import RowCounts
from slurmtrain.data.loading.loader import BatchLoader, Step
from slurmtrain.errors import DivergedError
from slurmtrain.observe.phases import Phase, PhaseClock
from slurmtrain.observe.profiling import Profiling
from slurmtrain.parallel.parallelize import DistributedModel
from slurmtrain.planner.flops import ModelFlops
from slurmtrain.planner.schedule import learning_rate
from slurmtrain.runs.reasons import Event
from slurmtrain.training.agreement import StopAgreement, TrainingRanks
from slurmtrain.training.evaluation import Evaluation
from slurmtrain.training.forward_backward import ForwardBackward, warm_up
from slurmtrain.training.hooks.base import StepResult, TrainingHook, TrainingHooks, TrainingState
from slurmtrain.training.hooks.checkpointing import Checkpointing
from slurmtrain.training.hooks.reporting import StepReports
from slurmtrain.training.optim import build_optimizer
from slurmtrain.training.step_numbers import HINT, NonfiniteGuard, NumbersReader, RunningBuffers

log = logging.getLogger(__name__)


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


Sums = tuple[int, RowCounts, list[int], list[int]]  # of a step over all ranks, see `Trainer._begin_sums`


class Trainer:
    """Trains one model on one data source with one optimiser, from the newest checkpoint to the last step.

    Args:
        train: steps and batches.
        optim: the optimiser and its learning rate.
        distributed_model: this rank's part of the model, whose `model` takes tokens [B, S] and returns logits [B, S, V].
        loader: this rank's micro batches.
        forward_backward: runs micro batches through the model.
        ranks: this rank, and its process groups.
        stop_check: asked once a step whether to stop.
        checkpointing, reports, profiles, evaluation: asked directly after each step. Evaluation and checkpointing are among
            the hooks, too.
        hooks: what happens besides the steps, in this order.
        data_hash: name of the data, with which the digest of the samples begins.
        phases: measures the parts of each step; None: nothing does.
        flops: operations of the model's training, where they are known.
    """

    def __init__(
        self,
        train: TrainConfig,
        optim: OptimConfig,
        distributed_model: DistributedModel,
        loader: BatchLoader,
        forward_backward: ForwardBackward,
        *,
        ranks: TrainingRanks,
        stop_check: StopAgreement,
        checkpointing: Checkpointing,
        reports: StepReports,
        profiles: Profiling,
        evaluation: Evaluation,
        hooks: Sequence[TrainingHook],
        data_hash: str = "",
        phases: PhaseClock | None = None,
        flops: ModelFlops | None = None,
    ):
        self._train, self._optim = train, optim
        self._distributed_model, self._loader, self._forward_backward = distributed_model, loader, forward_backward
        self._ranks, self._stop_check = ranks, stop_check
        self._checkpointing, self._reports, self._profiles = checkpointing, reports, profiles
        self._evaluation, self._guard = evaluation, NonfiniteGuard(train)
        self._optimizer = build_optimizer(distributed_model.model, optim)
        self._parameters = [parameter for parameter in distributed_model.model.parameters() if parameter.requires_grad]
        self.state = TrainingState(
            distributed_model=distributed_model,
            optimizer=self._optimizer,
            loader=loader,
            ranks=ranks,
            total_steps=train.steps,
            hooks=TrainingHooks(hooks),
            parameters=self._parameters,
            numbers=NumbersReader(ranks),
            data_hash=data_hash,
            phases=phases or PhaseClock(None),
            flops=flops,
        )
        # Changed by a step before its optimiser, and brought back if it skips the update.
        self._buffers = RunningBuffers(distributed_model.stages)

    @property
    def step(self) -> int:
        """Steps done, by this attempt and those before it."""
        return self.state.step

    def fit(self) -> Outcome:
        """Restore, then step until done or told to stop; the hooks save, evaluate and report on the way."""
        try:
            outcome = self._fit()
        except BaseException:
            # What fails in ending must not hide why training ends, which decides the exit code.
            with _logged_only(), ExitStack() as endings:  # the last one first, whatever one of them raises
                endings.callback(self._close)
                endings.callback(self._checkpointing.wait_for_save_in_flight)
            raise
        self._close()
        return outcome

    def _fit(self) -> Outcome:
        state, hooks = self.state, self.state.hooks
        warm_up(self._forward_backward, self._distributed_model, self._loader)
        self._checkpointing.load(state)
        state.numbers.restore(state.unread)
        state.first_step = state.step
        # The objects that exist by now stay. A full garbage collection would visit all of them, for a tenth of a second
        # and more; each rank would do so at another time, and all others wait.
        gc.collect()
        gc.freeze()
        self._loader.start()  # before a hook opens files that the workers would then share
        self._stop_check.begin()  # no checkpoint can be written at this moment
        state.stopping = self._stop_check.finish().stop
        state.throughput.start()
        hooks.start(state)
        state.phases.start()
        if self._is_due(self._train.eval_every):  # one that a stop has cut short; hooks hear of it, so all have started
            self._evaluation.evaluate(state)
        if state.health.due and not state.stopping:  # an earlier attempt was stopped before it could
            self._roll_back(state.health.due)
        state.throughput.start()
        state.phases.start()
        while not state.stopping and state.step < state.total_steps:
            self._train_step()
        self._guard.check_parameters(state)
        self._checkpointing.finish(state)
        state.finished = not state.stopping
        valid_loss = state.metrics.get("valid_loss")
        return Outcome(state.finished, state.step, state.first_step, state.saved, valid_loss)

    def _close(self) -> None:
        gc.unfreeze()
        self._profiles.abandon()
        try:
            self.state.hooks.close(self.state)
        finally:
            self._loader.close()

    def _train_step(self) -> None:
        """Run one optimiser step over the global batch, and what is done after it."""
        state, hooks, phases = self.state, self.state.hooks.of, self.state.phases
        profiles, steps_left = self._profiles, state.total_steps - state.step
        for hook in hooks["before_step"]:
            hook(state)
        began = time.perf_counter()
        phases.enter(Phase.DATA)
        data = next(self._loader)
        data_wait_s = time.perf_counter() - began
        phases.enter(Phase.FORWARD_BACKWARD)
        sums = self._begin_sums(data)
        self._buffers.begin_step()
        rate = learning_rate(state.step, total_steps=self._train.steps, config=self._optim)
        for group in self._optimizer.param_groups:
            group["lr"] = rate

        loss_sum = self._forward_backward.train(data.micro_batches, lambda: sums()[0])
        tokens, rows, digest, known = sums()
        phases.enter(Phase.OTHER)
        if (numbers := state.numbers.finish(known)) is not None:
            self._guard.look(state, numbers)

        # Asked as late as possible, so that a signal in the middle of a step still stops after it, and answered while
        # the optimiser works.
        why, schedule = state.health.due, self._checkpointing.schedule
        self._stop_check.begin(
            save=state.step + 1 >= schedule.step or time.monotonic() >= schedule.moment,
            roll_back=why is not None,
            profile=not profiles.left and steps_left > 1,
        )
        phases.enter(Phase.OPTIMIZER)
        norm = self._clip()
        phases.enter(Phase.OTHER)
        for hook in hooks["before_optimizer_step"]:
            hook(state, norm)
        phases.enter(Phase.OPTIMIZER)
        self._update(norm)
        phases.enter(Phase.COMMUNICATION)
        decision = self._stop_check.finish()
        phases.enter(Phase.OTHER)

        state.step += 1
        is_last = state.step >= state.total_steps
        state.data_hash = order.chained(state.data_hash, digest)
        samples = state.loader.samples_consumed - self._train.global_batch_size, state.loader.samples_consumed
        state.numbers.note(state.step, samples, loss_sum, norm, tokens)
        step_s = state.throughput.step(tokens, data_wait_s, samples=self._train.global_batch_size, work=rows)
        state.longest_step_s = max(state.longest_step_s, step_s)
        state.stopping = decision.stop and not is_last
        goes_back = decision.roll_back and not state.stopping
        state.save_requested = decision.save and not goes_back
        if is_last and not goes_back:
            goes_back, why = self._look_at_last_steps()
        phases.end_step()
        self._after_step(StepResult(loss_sum, norm, tokens, rate, decision))
        if goes_back:
            self._roll_back(why or "another rank wanted to go back to a checkpoint")
        if decision.profile and not state.stopping and not is_last:
            profiles.begin(state.step + 1, most=state.total_steps - state.step)

    def _after_step(self, result: StepResult) -> None:
        """Report the step, evaluate and save, each if it is due."""
        state, hooks = self.state, self.state.hooks
        if self._profiles.left and not state.stopping:  # what is done below is in no profile; a stop saves first
            self._end_step_of_profile()
        if not state.has_stepped:
            state.has_stepped = True
            hooks.event(Event.FIRST_STEP, {"step": state.step})
        if state.step == state.furthest:
            hooks.event(Event.CAUGHT_UP, {"step": state.step})
        if self._is_due(self._train.log_every):
            self._reports.report(state, result)
        if self._guard.error is not None:
            raise self._guard.error
        if self._is_due(self._train.eval_every):
            self._evaluation.evaluate(state)
        for hook in hooks.of["after_step"]:
            hook(state, result)
        if state.save_requested or self._checkpointing.pending_save is not None:
            self._checkpointing.save_if_due(state)

    def _is_due(self, every: int) -> bool:
        """Return whether something that is done every so many steps (0: never), and after the last one, is due now."""
        step = self.state.step
        return step >= self.state.total_steps or (every > 0 and step % every == 0)

    def _end_step_of_profile(self) -> None:
        state = self.state
        said = self._profiles.step()
        if said is not None:
            state.hooks.message(f"step {state.step}: {said}")
        if not self._profiles.left:  # what writing took is not a part of any step
            state.throughput.start()
            state.phases.take_steps()

    def _update(self, norm: Tensor) -> None:
        """Let the optimiser change the parameters, unless the numbers are not finite, which only the device knows so far.

        Parameters and optimiser then stay as they are, and the batch counts as seen.
        """
        # The norm tells of the loss, too, see `training/forward_backward.py`. As isfinite(), with fewer kernels: the
        # difference of other numbers is NaN. On a CPU it costs nothing to read it.
        skips = None if not norm.is_cuda and math.isfinite(norm.item()) else norm - norm != 0
        # torch's fused optimisers take this from gradient scalers: where it is 1, they leave everything as it is.
        self._optimizer.found_inf = None if skips is None else skips.float()  # type: ignore[attr-defined]
        self._optimizer.step()
        self._buffers.end_step(skips)
        self._optimizer.zero_grad(set_to_none=True)

    def _look_at_last_steps(self) -> tuple[bool, str | None]:
        """Look at the numbers of the last steps, which no later step would.

        Returns:
            Whether some rank wants to go back, and why, if this one does.
        """
        for numbers in self.state.numbers.take_all():
            self._guard.look(self.state, numbers)
        why = self.state.health.due
        return not self._ranks.all_true(why is None), why

    def _roll_back(self, why: str) -> None:
        """Go back, within the process, to the newest checkpoint of a sound step.

        All ranks call it together. Everything but the position in the data comes back. All samples since that checkpoint
        are left out, not only those of the steps that went wrong. To train on the others once more would give the
        parameters that there are now, to the last bit: the updates of the steps that went wrong were never made. And a loss
        that jumps is that of the parameters that the steps before have given. The number of the step is that of the
        checkpoint, so that the schedule and the number of updates are those of the config; the digest of the samples says
        which were seen.

        Args:
            why: what went wrong, one sentence.

        Raises:
            DivergedError: going back is not possible, or has not helped.
        """
        state, train = self.state, self._train
        step, health = state.step, state.health
        if health.sound_step is None or not self._checkpointing.roll_back(state, health.sound_step):
            raise DivergedError(f"{why}; there is no checkpoint from before it to go back to", hint=HINT)
        # Only now, so that a resume with another config begins where it was sound.
        if health.rollbacks >= train.max_rollbacks:
            times = "once" if health.rollbacks == 1 else f"{health.rollbacks} times in a row"
            many = f"going back {times} has not helped" if health.rollbacks else "it does not go back"
            raise DivergedError(
                f"{why}; {many} (train.max_rollbacks={train.max_rollbacks}); the newest checkpoint is that of step "
                f"{state.step}, from before it",
                hint=HINT,
            )
        state.health.went_back(health, from_step=step, to_step=state.step)
        needed = state.loader.samples_consumed + (train.steps - state.step) * train.global_batch_size
        if not train.repeat and needed > state.loader.order.once:
            raise DivergedError(
                f"{why}; after going back to step {state.step} the samples left would not do for {train.steps} steps "
                "(train.repeat=false)",
                hint=HINT,
            )
        state.numbers.restore(state.unread)
        state.furthest = max(state.furthest, step)
        state.hooks.rolled_back(state, step)
        state.hooks.message(
            f"{why}; so training went back from step {step} to step {state.step}, and leaves out the samples since"
        )
        state.throughput.start()

    def _clip(self) -> Tensor:
        """Scale the gradients so that their norm is at most `optim.grad_clip`, and return the norm before."""
        if self._distributed_model.mesh is None:  # the same on all ranks
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
            if self._optim.grad_clip:
                nn.utils.clip_grads_with_norm_(self._parameters, self._optim.grad_clip, norm)
            return norm
        from slurmtrain.parallel.gradients import clip_gradients  # with DTensors, which take half a second to import

        return clip_gradients(
            self._parameters,
            self._optim.grad_clip,
            self._ranks.device_group,
            self._distributed_model.tied_parameters,
            self.state.phases.waiting,
        )

    def _begin_sums(self, data: Step) -> Callable[[], Sums]:
        """Add up tokens and digest of this step over all ranks, while the first forward pass runs.

        Returns:
            A function that waits for the sums: the number of targets that are not ignored, at least 1; what the model
            computes on; the digest of the samples; and those of `NumbersReader.own_part`, of an earlier step.
        """
        counted = self._distributed_model.counts_samples  # otherwise another rank has the same samples
        own = self.state.numbers.own_part()
        counts = data.targets, *data.rows, *data.digest
        sums = torch.tensor([*(value * counted for value in counts), *own], dtype=torch.int64)
        work = None
        if self._ranks.control_group is not None:
            work = dist.all_reduce(sums, group=self._ranks.control_group, async_op=True)

        def wait() -> Sums:
            nonlocal work
            if work is not None:
                with self.state.phases.waiting():
                    work.wait()
                work = None
            tokens, *rest = sums.tolist()
            begin, end = len(data.rows), len(data.rows) + len(data.digest)
            return max(1, tokens), RowCounts(*rest[:begin]), rest[begin:end], rest[end:]

        return wait


@contextmanager
def _logged_only() -> Iterator[None]:
    """Log an error of the block instead of raising it."""
    try:
        yield
    except Exception as error:
        log.warning("after an error, training could not end cleanly: %s: %s", type(error).__name__, error)
