"""From a config to a trainer: build data, checkpoints and reports for this rank around its model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.restore.restorer import FINGERPRINT
from slurmtrain.checkpoint.save.schedule import mean_time_between_failures
from slurmtrain.checkpoint.store.commit import Incarnation
from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.choices import EvalMode
from slurmtrain.config.parallel_dims import ParallelDims, parallel_dims_of
from slurmtrain.config.schema import Config, TrainConfig
from slurmtrain.data.loading.loader import BatchLoader
from slurmtrain.data.sources.config_check import check_vocabulary
from slurmtrain.data.sources.protocol import (
    MapDataset,
    SourceSpec,
    inspect_evaluation_set,
    inspect_source,
)
from slurmtrain.errors import ConfigError
from slurmtrain.observe.phases import CudaTimer, HostTimer, PhaseClock
from slurmtrain.observe.profiling import Profiling
from slurmtrain.parallel.parallelize import DistributedModel
from slurmtrain.planner.flops import ModelFlops
from slurmtrain.planner.hardware import FP32, TF32, Peak, peak_of
from slurmtrain.rank.attempt_context import AttemptContext, Timeline
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.evaluation_jobs import EvaluationJobs
from slurmtrain.rank.jobs.build_model import build, distribute_model, pretrained
from slurmtrain.rank.jobs.run_record import RunRecord
from slurmtrain.rank.seeds import seed_everything
from slurmtrain.runs import attempts
from slurmtrain.runs.reasons import Reason
from slurmtrain.system.redaction import redacted
from slurmtrain.training.agreement import StopAgreement, StopPlanner, TrainingRanks
from slurmtrain.training.evaluation import Evaluation, Evaluator, MetricSums
from slurmtrain.training.forward_backward import ForwardBackward, build_forward_backward
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.hooks.checkpointing import Checkpointing
from slurmtrain.training.hooks.reporting import ExternalLoggers, RunReporter, StepReports
from slurmtrain.training.hooks.stragglers import StragglerWatch
from slurmtrain.training.trainer import Trainer


def build_trainer(
    config: Config,
    distributed: DistributedContext,
    context: AttemptContext,
    stop_agreement: StopAgreement,
    timeline: Timeline,
    stop_watcher: StopPlanner | None = None,
    hooks: Sequence[TrainingHook] = (),
) -> Trainer:
    """Build everything that `fit` needs.

    Args:
        stop_watcher: rank 0's; None on the others.
        hooks: further ones, called like those of train.hooks and after them.

    Raises:
        ConfigError: model or data cannot be built from the config.
    """
    rank, dims = distributed.environment.rank, parallel_dims_of(config)
    timeline.begin("building the model and the data")
    distributed_model, parameters, vocabulary, flops = distribute_model(config, dims, distributed)
    phases = _phase_clock(config, distributed_model)
    seed_everything(config.train.seed, rank)
    source = _build_source(config, vocabulary)
    loader = _build_loader(config, dims, source, distributed)
    forward_backward = build_forward_backward(
        distributed_model, loader.accumulation_steps, loader.micro_batch_size, phases
    )
    evaluator = build_evaluator(config, distributed_model, forward_backward, source, distributed, stop_agreement)
    observe, run_dir, environment = config.observe, context.run_dir, distributed.environment
    by_jobs = config.eval.mode == EvalMode.JOB
    peak = _peak(config, distributed.device)
    record = jobs = None
    if rank == 0:
        jobs = EvaluationJobs(run_dir) if by_jobs else None
        record = RunRecord(context, timeline, jobs, utilisation=_utilisation(flops, peak))
    checkpointer = _build_checkpointer(config, distributed, context, source, record)
    timeline.mark("model and data")
    timeline.begin("looking for a checkpoint")

    profiles = Profiling(
        run_dir,
        RankGroup(distributed.control_group),
        observe.profile_ranks,
        on_gpu=distributed.device.type == "cuda",
        event=record.event if record is not None else lambda event, values: None,
    )
    used: list[TrainingHook] = []
    if record is not None:
        described = source.description or config.data["_target_"]
        heading = f"model: {parameters:,} parameters; {dims}; data: {described}"
        used += [record, RunReporter(run_dir.metrics_file, heading), ExternalLoggers(run_dir, config, context.number)]
    if observe.straggler_every and phases.measures and distributed.control_group is not None:
        used.append(StragglerWatch(observe.straggler_every, environment.node))
    baseline = None if source.unigram_entropy is None else ("byte-unigram entropy", source.unigram_entropy)
    evaluation = Evaluation(evaluator, config.checkpoint, by_jobs=by_jobs, jobs=jobs, baseline=baseline)
    used += [evaluation, *_configured_hooks(config), *hooks]
    # The last, so that it saves in the same step what any hook before it asks for, and what they have changed.
    mtbf_s = _mtbf_s(config, context)
    checkpointing = Checkpointing(
        checkpointer, config.checkpoint, mtbf_s=mtbf_s, planner=stop_watcher, pretrained=pretrained(config)
    )
    used.append(checkpointing)
    return Trainer(
        config.train,
        config.optim,
        distributed_model,
        loader,
        forward_backward,
        ranks=TrainingRanks(rank, distributed.device_group, distributed.control_group),
        stop_check=stop_agreement,
        checkpointing=checkpointing,
        reports=StepReports(config.train, peak),
        profiles=profiles,
        evaluation=evaluation,
        hooks=used,
        data_hash=source.fingerprint,
        phases=phases,
        flops=flops,
    )


def _build_source(config: Config, vocabulary: int | None) -> SourceSpec:
    """Build the data object, and check that a model of this vocabulary can train on it."""
    source = inspect_source(build("data", config.data))
    if source.train is None:
        raise ConfigError(
            f"data._target_={config.data['_target_']} has no attribute `train`",
            hint="the data object must have `train` and, optionally, `valid`: data sets with len() and [i]",
        )
    check_vocabulary(vocabulary, source.vocab_size)
    return source


def _build_loader(
    config: Config, dims: ParallelDims, source: SourceSpec, distributed: DistributedContext
) -> BatchLoader:
    """Build the loader of this rank's micro batches."""
    train, rank = config.train, distributed.environment.rank
    assert source.train is not None
    loader = BatchLoader(
        source.train,
        seed=train.seed,
        global_batch_size=train.global_batch_size,
        micro_batch_size=dims.micro_batch_size(train),
        dp_rank=dims.dp_rank(rank),
        dp_size=dims.dp,
        num_workers=train.data_workers,
        shuffle=train.shuffle,
        fixed_rows=dims.pp > 1 or config.parallel.compile,
    )
    _check_repetition(loader, train)
    return loader


def _build_checkpointer(
    config: Config,
    distributed: DistributedContext,
    context: AttemptContext,
    source: SourceSpec,
    record: RunRecord | None,
) -> Checkpointer:
    """Build the checkpointer of the run's directory. All ranks call it together."""
    keeping = config.checkpoint
    return Checkpointer(
        context.run_dir.checkpoints,
        group=distributed.checkpoint_group,
        incarnation=Incarnation(context.number, context.incarnation_label(distributed.environment)),
        run_id=context.run_dir.id,
        config=_bound(config, source),
        changed=context.run_dir.changed_keys(),
        keep=Keep(keeping.keep_last, keeping.keep_every, keeping.keep_best, keeping.best_metric, keeping.best_mode),
        max_failures=keeping.max_failures,
        mirror=f"{keeping.mirror.rstrip('/')}/{config.job.name}/{context.run_dir.id}" if keeping.mirror else None,
        local=keeping.local,
        on_ending=record.on_ending if record else lambda ending: None,
    )


def _phase_clock(config: Config, distributed_model: DistributedModel) -> PhaseClock:
    """Return what measures the parts of each step."""
    if not config.observe.phases:
        return PhaseClock(None)
    on_gpu, dims = distributed_model.device.type == "cuda", distributed_model.dims
    phases = PhaseClock(CudaTimer() if on_gpu else HostTimer())
    if distributed_model.mesh is not None:
        from slurmtrain.parallel.sharded import mark_waits  # as FSDP itself, only where it is used

        known = mark_waits(distributed_model.stages, phases.waiting, on_gpu=on_gpu)
        # What is exchanged within a layer or between stages is a part of the computation there.
        phases.communication_known = known and dims.tp == dims.cp == dims.pp == 1
    return phases


def _peak(config: Config, device: torch.device) -> Peak:
    """Return the most that this rank's device can do in the type that it computes in."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    dtype = str(config.parallel.param_dtype or FP32)
    if dtype == FP32 and torch.get_float32_matmul_precision() != "highest":
        dtype = TF32
    return peak_of(gpu, dtype, stated_tflops=config.cluster.peak_tflops)


def _utilisation(flops: ModelFlops | None, peak: Peak) -> dict[str, Any]:
    """Return what `mfu` is computed from, or why there is none, for the run's events."""
    return {
        "flops_per_token": None if flops is None else flops.per_token,
        "flops_per_pair": None if flops is None else flops.per_pair,
        "peak_tflops": peak.tflops,
        "why": peak.why
        if flops is not None
        else "the model does not say what a token takes: it has no `flops_per_token(seq_len)`",
    }


def _configured_hooks(config: Config) -> list[TrainingHook]:
    """Build the hooks of train.hooks.

    Raises:
        ConfigError: one cannot be built from the config, or is no TrainingHook.
    """
    hooks = []
    for index, values in enumerate(config.train.hooks):
        hook = build(f"train.hooks[{index}]", values)
        if not isinstance(hook, TrainingHook):
            raise ConfigError(
                f"train.hooks[{index}]._target_={values['_target_']} is not a hook",
                hint="derive it from slurmtrain.training.hooks.TrainingHook",
            )
        hooks.append(hook)
    return hooks


def _check_repetition(loader: BatchLoader, train: TrainConfig) -> None:
    samples, once = train.steps * train.global_batch_size, loader.order.once
    if not train.repeat and samples > once:
        raise ConfigError(
            f"train.steps={train.steps} of {train.global_batch_size} samples see one of them again after {once:,}",
            hint=f"train.steps={once // train.global_batch_size} repeat none; train.repeat=true allows it",
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
            "optim": msgspec.to_builtins(config.optim),
            "train": {
                "seed": train.seed,
                "global_batch_size": train.global_batch_size,
                "steps": train.steps,
                **({} if train.shuffle else {"shuffle": False}),  # some would come twice, and others never
            },
            FINGERPRINT: source.fingerprint,
            **({"lora": msgspec.to_builtins(config.lora)} if config.lora.r else {}),
        }
    )
    return bound


def _mtbf_s(config: Config, context: AttemptContext) -> float:
    """Return the mean seconds between failures for checkpoint.auto, by how often this run has failed so far."""
    keeping = config.checkpoint
    if not keeping.auto:
        return math.inf
    if keeping.mtbf_hours is not None:
        return keeping.mtbf_hours * 3600
    earlier = [attempt for attempt in attempts.all_attempts(context.run_dir) if attempt.number < context.number]
    failures = sum(attempt.reason in (Reason.CRASH, Reason.HANG, Reason.NODE_FAILURE) for attempt in earlier)
    seconds = sum(attempt.ended - attempt.started for attempt in earlier if attempt.ended and attempt.started)
    return mean_time_between_failures(
        config.cluster.node_range.most,
        observed_failures=failures,
        observed_s=seconds,
        per_node_day=config.cluster.failures_per_1000_node_days / 1000,
    )


def build_evaluator(
    config: Config,
    distributed_model: DistributedModel,
    forward_backward: ForwardBackward,
    source: SourceSpec,
    distributed: DistributedContext,
    stop_agreement: StopAgreement,
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
        stop_check=stop_agreement,
    )


def _evaluation_sets(config: Config, source: SourceSpec) -> dict[str, MapDataset]:
    """Return the data source's own evaluation set, and those of eval.sets."""
    found: dict[str, MapDataset] = {} if source.valid is None else {"valid": source.valid}
    for name, values in config.eval.sets.items():
        if name in found:
            raise ConfigError(f"eval.sets.{name}: the data source has a set of this name", hint="choose another name")
        built = build(f"eval.sets.{name}", values)
        check_vocabulary(config.model.get("vocab_size"), inspect_source(built).vocab_size)
        found[name] = inspect_evaluation_set(built, f"eval.sets.{name}")
    return found
