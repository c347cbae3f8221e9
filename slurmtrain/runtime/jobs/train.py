"""From a config to a trainer: build model, data, checkpoints and reports for this rank."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.commit import Incarnation
from slurmtrain.checkpoint.compatibility import FINGERPRINT
from slurmtrain.checkpoint.interval import Interval, SaveSchedule, mean_time_between_failures
from slurmtrain.checkpoint.pending_save import SaveResult
from slurmtrain.checkpoint.restorer import Restored
from slurmtrain.checkpoint.retention import Keep
from slurmtrain.choices import EvalMode
from slurmtrain.config.parallel_dims import ParallelDims, parallel_dims_of
from slurmtrain.config.schema import Config, OptimConfig, ParallelConfig, TrainConfig
from slurmtrain.data.loading.loader import BatchLoader, RowLength
from slurmtrain.data.sources.config_check import check_vocabulary
from slurmtrain.data.sources.protocol import (
    MapDataset,
    SourceSpec,
    inspect_dataset,
    inspect_evaluation_set,
    inspect_source,
)
from slurmtrain.errors import CheckpointError, ConfigError, SlurmtrainError
from slurmtrain.observe import Reporter, SilentReporter
from slurmtrain.parallel.parallelize import DistributedModel, parallelize
from slurmtrain.runs import attempts
from slurmtrain.runs.events import Event
from slurmtrain.runs.outcome import Reason
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.runtime.attempt_context import AttemptContext, update_attempt
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.evaluation_jobs import EvaluationJobs, NoJobs
from slurmtrain.runtime.startup_times import Timeline
from slurmtrain.runtime.stop_watcher import StopWatcher
from slurmtrain.system.redaction import redacted
from slurmtrain.training.eval_metrics import MetricSums
from slurmtrain.training.evaluation import Evaluator
from slurmtrain.training.forward_backward import ForwardBackward, build_forward_backward
from slurmtrain.training.seeds import seed_everything
from slurmtrain.training.trainer import Trainer, TrainingRanks


def build_trainer(
    config: Config,
    distributed: DistributedContext,
    context: AttemptContext,
    stop: StopAgreement,
    timeline: Timeline,
    watch: StopWatcher | None = None,
) -> Trainer:
    """Build everything that `fit` needs.

    Args:
        watch: rank 0's; None on the others.

    Raises:
        ConfigError: model or data cannot be built from the config.
    """
    rank, dims = distributed.environment.rank, parallel_dims_of(config)
    train = config.train
    timeline.begin("building the model and the data")
    distributed_model, parameters, vocabulary = distribute_model(config, dims, distributed)
    seed_everything(train.seed, rank)
    source = inspect_source(build("data", config.data))
    if source.train is None:
        raise ConfigError(
            f"data._target_={config.data['_target_']} has no attribute `train`",
            hint="the data object has `train` and, if you like, `valid`: data sets with len() and [i]",
        )
    check_vocabulary(vocabulary, source.vocab_size)
    loader = BatchLoader(
        source.train,
        seed=train.seed,
        global_batch_size=train.global_batch_size,
        micro_batch_size=dims.micro_batch_size(train),
        dp_rank=dims.dp_rank(rank),
        dp_size=dims.dp,
        num_workers=train.data_workers,
        shuffle=train.shuffle,
        ahead=train.data_ahead,
        sorted_steps=train.length_sorted_steps,
        row_length=row_length_of(dims, config.parallel),
        device=distributed.device,
    )
    _check_repetition(loader, train)
    forward_backward = build_forward_backward(distributed_model, loader.accumulation_steps, loader.micro_batch_size)
    evaluator = build_evaluator(config, distributed_model, forward_backward, source, distributed, stop)
    jobs = EvaluationJobs(context.run_dir) if rank == 0 and config.eval.mode == EvalMode.JOB else None
    record = (
        _Record(config, context, source, f"{parameters:,} parameters; {dims}", timeline, jobs) if rank == 0 else None
    )
    keeping = config.checkpoint
    checkpointer = Checkpointer(
        context.run_dir.checkpoints,
        group=distributed.checkpoint_group,
        incarnation=Incarnation(context.number, context.incarnation_label(distributed.environment)),
        run_id=context.run_dir.id,
        config=_bound(config, source),
        changed=context.run_dir.changed_keys(),
        keep=Keep(keeping.keep_last, keeping.keep_every, keeping.keep_best, keeping.best_metric, keeping.best_mode),
        verify=keeping.verify,
        asynchronous=keeping.asynchronous,
        max_failures=keeping.max_failures,
        on_replica_drift=keeping.on_replica_drift,
        mirror=f"{keeping.mirror.rstrip('/')}/{config.job.name}/{context.run_dir.id}" if keeping.mirror else None,
        on_ending=record.on_ending if record else lambda ending: None,
    )
    timeline.mark("model and data")
    timeline.begin("looking for a checkpoint")
    return Trainer(
        train=train,
        optim=config.optim,
        checkpoint=config.checkpoint,
        distributed_model=distributed_model,
        loader=loader,
        forward_backward=forward_backward,
        evaluator=evaluator,
        jobs=jobs or (NoJobs() if config.eval.mode == EvalMode.JOB else None),
        baseline=None if source.unigram_entropy is None else ("byte-unigram entropy", source.unigram_entropy),
        ranks=TrainingRanks(rank, distributed.device_group, distributed.control_group),
        checkpointer=checkpointer,
        stop=stop,
        make_reporter=record.make_reporter if record else lambda step, evaluated_at: SilentReporter(),
        on_restore=record.on_restore if record else lambda restored: None,
        make_save_schedule=lambda step: _save_schedule(config, context, step),
        plan_stop=watch.plan_stop if watch is not None else lambda step_s, save_s: None,
        grace_left=watch.seconds_left if watch is not None else lambda: None,
        data_hash=source.fingerprint,
    )


def row_length_of(dims: ParallelDims, parallel: ParallelConfig) -> RowLength:
    """Return how long rows have to be when samples differ in length.

    Ranks have to share a row evenly, and for stages and compiled code all rows are alike.
    """
    return RowLength(multiple=dims.sequence_ranks(parallel), fixed=dims.pp > 1 or parallel.compile)


def _check_repetition(loader: BatchLoader, train: TrainConfig) -> None:
    samples, once = train.steps * train.global_batch_size, loader.order.once
    if not train.repeat and samples > once:
        raise ConfigError(
            f"train.steps={train.steps} of {train.global_batch_size} samples see one of them again after {once:,}",
            hint=f"train.steps={once // train.global_batch_size} see none twice; train.repeat=true lets them",
        )


def _bound(config: Config, source: SourceSpec) -> dict[str, Any]:
    """Return the config values that a checkpoint is bound to.

    With another model, order of samples or optimiser, its state is invalid.
    """
    train = config.train
    bound: dict[str, Any] = redacted(  # it is written beside the weights
        {
            "model": config.model,
            "data": config.data,
            "optim": _of_optimizer(config.optim),
            "train": {
                "seed": train.seed,
                "global_batch_size": train.global_batch_size,
                "steps": train.steps,
                **_order_of_samples(train, source),
            },
            FINGERPRINT: source.fingerprint,
        }
    )
    return bound


# Fields that every checkpoint is bound to. A field that was added later counts only if it differs from its default;
# otherwise an update of this package would separate a run from its checkpoints.
OPTIM_FIELDS = ("lr", "betas", "eps", "weight_decay", "warmup_steps", "min_lr_ratio", "grad_clip")


def _of_optimizer(optim: OptimConfig) -> dict[str, Any]:
    default = dataclasses.asdict(type(optim)())
    return {
        name: value
        for name, value in dataclasses.asdict(optim).items()
        if name in OPTIM_FIELDS or value != default.get(name)
    }


def _order_of_samples(train: TrainConfig, source: SourceSpec) -> dict[str, Any]:
    """Return the further settings that decide the order of samples.

    In another order some samples would come twice, and others never.
    """
    if not train.shuffle:
        return {"shuffle": False}
    return {} if inspect_dataset(source.train).lengths is None else {"length_sorted_steps": train.length_sorted_steps}


def _save_schedule(config: Config, context: AttemptContext, step: int) -> SaveSchedule:
    """Return the schedule of saves in this attempt; for `auto`, by how often this run has failed so far."""
    keeping = config.checkpoint
    mtbf_s = math.inf
    if keeping.auto:
        earlier = [attempt for attempt in attempts.all_attempts(context.run_dir) if attempt.number < context.number]
        failures = sum(attempt.reason in (Reason.CRASH, Reason.NODE_FAILURE) for attempt in earlier)
        seconds = sum(attempt.ended - attempt.started for attempt in earlier if attempt.ended and attempt.started)
        mtbf_s = (
            keeping.mtbf_hours * 3600
            if keeping.mtbf_hours is not None
            else mean_time_between_failures(config.cluster.nodes, observed_failures=failures, observed_s=seconds)
        )
    interval = Interval(keeping.every_steps, keeping.every_minutes, keeping.auto)
    return SaveSchedule(interval, now=time.monotonic(), step=step, mtbf_s=mtbf_s)


class _Record:
    """The record of the training that rank 0 writes and shows."""

    def __init__(
        self,
        config: Config,
        context: AttemptContext,
        source: SourceSpec,
        model: str,
        timeline: Timeline,
        jobs: EvaluationJobs | None,
    ):
        self._config, self._context, self._source, self._model = config, context, source, model
        self._timeline, self._jobs = timeline, jobs

    def make_reporter(self, first_step: int, evaluated_at: int) -> Reporter:
        self._timeline.mark("restore")
        seconds = self._timeline.seconds
        update_attempt(self._context, first_step=first_step, stepping=time.time(), start_up_s=seconds)
        self._context.run_dir.event(
            Event.TRAINING_STARTED, attempt=self._context.number, step=first_step, start_up_s=seconds
        )
        run_dir = self._context.run_dir
        reporter = Reporter(
            metrics_file=run_dir.metrics_file,
            tensorboard=run_dir.tensorboard if self._config.train.tensorboard else None,
            total_steps=self._config.train.steps,
            resume_step=first_step,
            evaluated_at=evaluated_at,
        )
        described = self._source.description or self._config.data["_target_"]
        reporter.message(f"model: {self._model}; data: {described}")
        return reporter

    def on_restore(self, restored: Restored | None) -> None:
        if restored is not None and restored.as_start:
            weights = {"weights_from": str(restored.path), "weights_of_step": restored.step}
            self._context.run_dir.event(Event.FRESH_START, attempt=self._context.number, step=0, **weights)
            return
        self._context.run_dir.event(
            Event.RESTORED if restored else Event.FRESH_START,
            attempt=self._context.number,
            step=restored.step if restored else 0,
            checkpoint=restored.path.name if restored else None,
            set_aside=list(restored.set_aside) if restored else [],
        )

    def on_ending(self, ending: SaveResult | CheckpointError) -> None:
        """Record the end of a save. Called by the thread that writes checkpoints."""
        if isinstance(ending, CheckpointError):
            self._context.run_dir.event(Event.CHECKPOINT_FAILED, attempt=self._context.number, error=ending.message)
            return
        self._context.run_dir.event(
            Event.CHECKPOINT,
            attempt=self._context.number,
            step=ending.step,
            seconds=round(ending.seconds, 3),
            stall_s=round(ending.stall_s, 3),
            size=ending.size,
        )
        if self._jobs is not None:
            self._jobs.committed(ending.step)


def distribute_model(
    config: Config, dims: ParallelDims, distributed: DistributedContext
) -> tuple[DistributedModel, int, int | None]:
    """Return the distributed model, the number of parameters of the whole model, and its vocabulary size, if it has one."""
    model = build_model(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    distributed_model = parallelize(
        model,
        config.parallel,
        dims,
        rank=distributed.environment.rank,
        device=distributed.device,
        group=distributed.device_group,
        fill=lambda held: fill(held, distributed.device, config.train.seed),
    )
    return distributed_model, parameters, getattr(model, "vocab_size", None)


def build_evaluator(
    config: Config,
    distributed_model: DistributedModel,
    forward_backward: ForwardBackward,
    source: SourceSpec,
    distributed: DistributedContext,
    stop: StopAgreement,
) -> Evaluator:
    """Build the evaluator.

    Raises:
        ConfigError: a set or a metric cannot be built from the config.
    """
    wanted = config.eval.metrics
    own = {name: build(f"eval.metrics.{name}", value) for name, value in wanted.items() if isinstance(value, dict)}
    measures = MetricSums(distributed_model, [name for name, value in wanted.items() if value is True], own)
    return Evaluator(
        distributed_model,
        forward_backward,
        _evaluation_sets(config, source),
        measures,
        control_group=distributed.control_group,
        stop=stop,
    )


def _evaluation_sets(config: Config, source: SourceSpec) -> dict[str, MapDataset]:
    """Return the data source's own evaluation sets, and those of eval.sets."""
    found = source.evaluation_sets
    for name, values in config.eval.sets.items():
        if name in found:
            raise ConfigError(f"eval.sets.{name}: the data source has a set of this name", hint="choose another name")
        built = build(f"eval.sets.{name}", values)
        check_vocabulary(config.model.get("vocab_size"), inspect_source(built).vocab_size)
        found[name] = inspect_evaluation_set(built, f"eval.sets.{name}")
    return found


def build_model(config: Config) -> nn.Module:
    """Build the model: on the meta device, without any memory, if it has a method `initialize(seed)`; else whole.

    Raises:
        ConfigError: it cannot be built from the config.
    """
    from hydra.utils import get_object

    try:
        late = hasattr(get_object(config.model["_target_"]), "initialize")
    except Exception:
        late = False  # `build` says what is wrong
    seed_everything(config.train.seed)
    with torch.device("meta") if late else nullcontext():
        model: nn.Module = build("model", config.model)
    return model


def fill(model: nn.Module, device: torch.device, seed: int) -> nn.Module:
    """Move the model to `device`; one on the meta device gets its values there, each rank its own part of them."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.to(device)
    model.to_empty(device=device)
    model.initialize(seed)  # type: ignore[operator]
    return model


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
