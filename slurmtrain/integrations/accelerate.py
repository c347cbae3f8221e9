"""Hugging Face's Accelerate under slurmtrain (extra `accelerate`): its save_state and load_state, through our Checkpointer.

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
checkpointer = AcceleratorCheckpointer(accelerator)
done = checkpointer.load_state()
for epoch in range(done // len(loader), epochs):
    loader.set_epoch(epoch)
    for batch in checkpointer.skip_first_batches(loader, done - epoch * len(loader)):
        ...                                     # your step
        done += 1
        checkpointer.save_at_stop(done)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.data import RandomSampler

from slurmtrain.checkpoint.save.job import PendingSave
from slurmtrain.checkpoint.state import RANDOM_STATE
from slurmtrain.errors import ConfigError, EnvironmentMismatchError
from slurmtrain.runtime.api import exit_for_requeue, init, session, should_stop
from slurmtrain.runtime.own_checkpointer import Checkpointer

log = logging.getLogger(__name__)


class AcceleratorCheckpointer:
    """The checkpoints of everything that an Accelerator has prepared or registered. Make it after `prepare`, on all ranks.

    Models, optimisers, schedulers, the scaler, stateful loaders, registered objects and every rank's random state are
    saved in the background by all ranks together, and committed.

    Args:
        directory: shared by all ranks; default: the run's, or ./checkpoints for a script that was not submitted.
        options: as for `slurmtrain.Checkpointer`, such as keep=slurmtrain.Keep(last=3).

    Raises:
        ConfigError: DeepSpeed or Megatron-LM holds the state.
        EnvironmentMismatchError: the job has several ranks, and each has an Accelerator of its own.
        CheckpointError: see `slurmtrain.Checkpointer`.
    """

    def __init__(self, accelerator: Accelerator, directory: Path | str | None = None, **options: Any):
        if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ConfigError(
                f"AcceleratorCheckpointer cannot save what {accelerator.distributed_type.value} holds",
                hint="save it with accelerator.save_state() when slurmtrain.should_stop() returns true",
            )
        if session.distributed is None:
            init(device="cpu" if accelerator.device.type == "cpu" else "auto")
        ranks = session.initialised()[0].environment.world_size
        if accelerator.num_processes != ranks:
            raise EnvironmentMismatchError(
                f"Accelerator has {accelerator.num_processes} of the {ranks} ranks of this job",
                hint="on CPUs, Accelerator(cpu=True) makes them train together",
            )
        self._accelerator = accelerator
        self._checkpointer = Checkpointer(directory, **options)
        self._random_state: dict[str, Any] | None = None
        self._place = _Place(accelerator)
        self._warned = False

    def load_state(self) -> int:
        """Restore the newest sound checkpoint, and return its step; 0: there is none. All ranks call it together."""
        restored = self._checkpointer.restore(per_rank=self._own_objects(), **self._objects())
        if restored is None:
            return 0
        self._random_state = RANDOM_STATE.state_dict()
        if any(_draws_another_order(loader) for loader in self._accelerator._dataloaders):
            log.warning(
                "the order of samples within an epoch is reshuffled after a restart: "
                "Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)) keeps it"
            )
        return restored.step

    def save_state(self, step: int, *, metrics: Mapping[str, float] | None = None) -> PendingSave:
        """Save the state after `step` steps. All ranks call it together; it returns when training may go on.

        Gradients are not saved: with gradient accumulation, call it when `accelerator.sync_gradients` is true.
        """
        if not self._accelerator.sync_gradients and not self._warned:
            self._warned = True
            log.warning(
                "step %d is saved between two steps of the optimiser: a restart from it loses the gradients that are "
                "accumulated; save when accelerator.sync_gradients is true",
                step,
            )
        return self._checkpointer.save(step, per_rank=self._own_objects(), metrics=metrics, **self._objects())

    def save_at_stop(self, step: int) -> None:
        """Save and leave, with exit code 75, if a rank was told to stop. Call it once a step, on every rank.

        While gradients are being accumulated it waits for the step of the optimiser that uses them.
        """
        if should_stop() and self._accelerator.sync_gradients:
            self.save_state(step)
            exit_for_requeue()

    def skip_first_batches(self, loader: Any, batches: int) -> Iterator[Any]:
        """Yield the batches of `loader` less the first ones: those that the epoch had before the checkpoint.

        As accelerator.skip_first_batches, after which the random state is the restored one: beginning an epoch and
        skipping draw random numbers, too.

        Args:
            batches: number to skip; none or less: a whole epoch.
        """
        if batches <= 0:
            yield from loader
            return
        knows_its_place = getattr(loader, "use_stateful_dataloader", False) and self._random_state is not None
        rest = loader if knows_its_place else self._accelerator.skip_first_batches(loader, batches)
        with self._place.read_by(rest, instead_of=loader):
            for number, batch in enumerate(iter(rest)):
                if number == 0 and self._random_state is not None:
                    RANDOM_STATE.load_state_dict(self._random_state)
                    self._random_state = None
                yield batch

    def _objects(self) -> dict[str, Any]:
        """Return what all ranks save together, by the names that accelerate gives their files."""
        accelerator = self._accelerator
        kinds: dict[str, list[Any]] = {
            "model": accelerator._models,
            "optimizer": [each.optimizer for each in accelerator._optimizers],
            "scheduler": accelerator._schedulers,
            "custom": accelerator._custom_objects,
        }
        objects: dict[str, Any] = {
            f"{kind}_{number}" if number else kind: each
            for kind, found in kinds.items()
            for number, each in enumerate(found)
        }
        if accelerator.scaler is not None:
            objects["scaler"] = accelerator.scaler
        return {**objects, "accumulation": self._place}

    def _own_objects(self) -> dict[str, Any]:
        """Return what each rank saves for itself: the loaders that know how far they are."""
        loaders = enumerate(self._accelerator._dataloaders)
        return {f"loader_{number}": each for number, each in loaders if getattr(each, "use_stateful_dataloader", False)}


class _Place:
    """Where a training is: the micro batches whose gradients are accumulated, and the epoch that each loader is in.

    A loader shuffles by the number of its epoch, which it counts itself, unless the script calls its set_epoch.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._readers: dict[int, Any] = {}  # by id of a loader: the one that yields the rest of its epoch

    def state_dict(self) -> dict[str, Any]:
        epochs = [self._epoch_of(loader) for loader in self._accelerator._dataloaders]
        return {"step": self._accelerator.step, "epochs": epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        for loader, epoch in zip(self._accelerator._dataloaders, state["epochs"], strict=False):
            loader.iteration = epoch

    @contextmanager
    def read_by(self, rest: Any, instead_of: Any) -> Iterator[None]:
        """Note which loader yields the rest of the epoch of another one, which is an epoch further when that is done."""
        self._readers[id(instead_of)] = rest
        try:
            yield
        finally:
            del self._readers[id(instead_of)]
        if rest is not instead_of:
            instead_of.iteration = rest.iteration

    def _epoch_of(self, loader: Any) -> int:
        """Return the number of the epoch of which a loader yields batches next."""
        reader = self._readers.get(id(loader), loader)
        in_its_last_batch = reader.end_of_dataloader and any(
            each is reader for each in self._accelerator.gradient_state.dataloader_references
        )
        return int(reader.iteration) + int(in_its_last_batch)


def _draws_another_order(loader: Any) -> bool:
    """Return whether a prepared loader shuffles by a generator whose state is not that of the epoch's beginning."""
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # a rank's share of it
    sampler = getattr(batches, "sampler", None)
    stateful = getattr(loader, "use_stateful_dataloader", False)
    return isinstance(sampler, RandomSampler) and not hasattr(sampler, "set_epoch") and not stateful
