"""From a config to a trainer: model, data, checkpoints and reports, put together for this rank."""

from __future__ import annotations

import sys
import time
from typing import Any

from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer, Restored, Saved
from slurmtrain.checkpoint.commit import Incarnation
from slurmtrain.config.schema import Config
from slurmtrain.data import BatchLoader
from slurmtrain.errors import ConfigError, SlurmtrainError
from slurmtrain.observe import Reporter, SilentReporter
from slurmtrain.parallel.ddp import replicate
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.runtime.place import Place, update_attempt
from slurmtrain.runtime.timeline import Timeline
from slurmtrain.runtime.world import World
from slurmtrain.training.seeds import seed_everything
from slurmtrain.training.trainer import Ranks, Trainer


def build_trainer(config: Config, world: World, where: Place, stop: StopAgreement, timeline: Timeline) -> Trainer:
    """Everything that `fit` needs.

    Raises:
        ConfigError: model or data cannot be built from the config.
    """
    rank, world_size = world.environment.rank, world.environment.world_size
    train = config.train
    seed_everything(train.seed)
    model: nn.Module = build("model", config.model)
    model = replicate(model.to(world.device), world.device, world.group)
    seed_everything(train.seed, rank)
    source = build("data", config.data)
    loader = BatchLoader(
        source.train,
        seed=train.seed,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size or train.global_batch_size // world_size,
        dp_rank=rank,
        dp_size=world_size,
        num_workers=train.data_workers,
    )
    checkpointer = Checkpointer(
        where.run_dir.checkpoints,
        group=world.saving,
        incarnation=Incarnation(where.number, where.incarnation_label(world.environment)),
        run_id=where.run_dir.id,
        keep_last=config.checkpoint.keep_last,
        verify=config.checkpoint.verify,
    )
    timeline.mark("model and data")
    record = _Record(config, where, source, model, timeline) if rank == 0 else None
    return Trainer(
        train=train,
        optim=config.optim,
        checkpoint=config.checkpoint,
        model=model,
        loader=loader,
        valid=getattr(source, "valid", None),
        baseline=("byte-unigram entropy", source.unigram_entropy) if hasattr(source, "unigram_entropy") else None,
        ranks=Ranks(rank, world_size, world.device, world.control),
        checkpointer=checkpointer,
        stop=stop,
        make_reporter=record.make_reporter if record else lambda step, evaluated_at: SilentReporter(),
        on_restore=record.on_restore if record else lambda restored: None,
        on_save=record.on_save if record else lambda saved: None,
    )


class _Record:
    """What rank 0 writes down and shows about the training."""

    def __init__(self, config: Config, where: Place, source: Any, model: nn.Module, timeline: Timeline):
        self._config, self._where, self._source, self._model = config, where, source, model
        self._timeline = timeline

    def make_reporter(self, first_step: int, evaluated_at: int) -> Reporter:
        self._timeline.mark("restore")
        seconds = self._timeline.seconds
        update_attempt(self._where, first_step=first_step, stepping=time.time(), start_up_s=seconds)
        self._where.run_dir.event("training started", attempt=self._where.number, step=first_step, start_up_s=seconds)
        run_dir = self._where.run_dir
        reporter = Reporter(
            metrics_file=run_dir.metrics_file,
            tensorboard=run_dir.tensorboard if self._config.train.tensorboard else None,
            total_steps=self._config.train.steps,
            resume_step=first_step,
            evaluated_at=evaluated_at,
        )
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        described = getattr(self._source, "description", self._config.data["_target_"])
        reporter.message(f"model: {parameters:,} parameters; data: {described}")
        return reporter

    def on_restore(self, restored: Restored | None) -> None:
        self._where.run_dir.event(
            "restored" if restored else "fresh start",
            attempt=self._where.number,
            step=restored.step if restored else 0,
            checkpoint=restored.path.name if restored else None,
            set_aside=list(restored.set_aside) if restored else [],
        )

    def on_save(self, saved: Saved) -> None:
        self._where.run_dir.event(
            "checkpoint", attempt=self._where.number, step=saved.step, seconds=round(saved.seconds, 3)
        )


def build(group: str, values: dict[str, Any]) -> Any:
    """Instantiate a config group's `_target_`.

    Raises:
        ConfigError: it cannot be imported, or does not take these arguments.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(values, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, SlurmtrainError):
            raise cause from None
        if cause is not None and not isinstance(cause, (ImportError, TypeError, AttributeError)):
            raise cause from None  # the class itself failed: its own traceback says more
        first = str(error).strip().splitlines()[0]
        reason = f": {cause}" if cause is not None and str(cause) not in first else ""
        raise ConfigError(
            f"{group}._target_={values.get('_target_')}: {first}{reason}",
            hint=f"is it importable from {sys.path[0] or 'the working directory'}, and are its arguments spelled right?",
        ) from None
