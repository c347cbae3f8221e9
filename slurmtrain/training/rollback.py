"""Going back, within the process, to a checkpoint from before a trouble.

Everything but the position in the data comes back. All samples since that checkpoint are left out, not only those of the steps
that went wrong. To train on the others once more would give the parameters that there are now, to the last bit: the updates of
the steps that went wrong were never made. And a loss that jumps is that of the parameters that the steps before have given.
The number of the step is that of the checkpoint, so that
the schedule and the number of updates are those of the config; the digest of the samples says which were seen.
"""

from __future__ import annotations

from slurmtrain.config.schema import TrainConfig
from slurmtrain.errors import DivergedError
from slurmtrain.training.state import TrainingState

HINT = (
    "the same steps would do the same again, so nothing is tried again: a smaller optim.lr, more optim.warmup_steps or "
    "optim.grad_clip=1 may help, or other data; `resume RUN optim.lr=...` goes on from the newest checkpoint, if there is one"
)


def roll_back(state: TrainingState, train: TrainConfig, why: str) -> None:
    """Go back to the newest checkpoint of a sound step, or to what the run has begun from. All ranks call it together.

    Args:
        why: what went wrong, one sentence.

    Raises:
        DivergedError: going back is not possible, or has not helped.
    """
    step, health = state.step, state.counters.health
    if health.sound_step is None or not state.hooks.roll_back(state, health.sound_step):
        raise DivergedError(f"{why}; there is no checkpoint from before it to go back to", hint=HINT)
    # Only now, so that a resume with another config begins where it was sound.
    if health.rollbacks >= train.max_rollbacks:
        many = f"going back {'once' if health.rollbacks == 1 else f'{health.rollbacks} times in a row'} has not helped"
        raise DivergedError(
            f"{why}; {many if health.rollbacks else 'it does not go back'} (train.max_rollbacks={train.max_rollbacks}); the "
            f"newest checkpoint is that of step {state.step}, from before it",
            hint=HINT,
        )
    state.counters.health.went_back(health, from_step=step, to_step=state.step)
    _check_samples_left(state, train, why)
    state.begin_at_checkpoint()
    state.hooks.rolled_back(state, step)
    state.hooks.message(
        f"{why}; so training went back from step {step} to step {state.step}, and leaves out the samples since"
    )
    state.throughput.start()


def _check_samples_left(state: TrainingState, train: TrainConfig, why: str) -> None:
    needed = state.loader.samples_consumed + (train.steps - state.step) * train.global_batch_size
    if not train.repeat and needed > state.loader.order.once:
        raise DivergedError(
            f"{why}; after going back to step {state.step} the samples left would not do for {train.steps} steps "
            "(train.repeat=false)",
            hint=HINT,
        )
