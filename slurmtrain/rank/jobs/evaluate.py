"""The program of every rank of an evaluation: measure the weights of one checkpoint on all sets, and publish the result."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import time
from pathlib import Path

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.format.directory import step_of
from slurmtrain.checkpoint.store import retention
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.data.sources.protocol import inspect_source
from slurmtrain.errors import ConfigError
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.rank.attempt_context import AttemptContext, Timeline, update_attempt
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.jobs.build_model import build, distribute_model
from slurmtrain.rank.jobs.train import build_evaluator
from slurmtrain.rank.seeds import seed_everything
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import write_json
from slurmtrain.system.records import append_line, read_json
from slurmtrain.training.agreement import StopAgreement
from slurmtrain.training.forward_backward import build_forward_backward

log = logging.getLogger(__name__)


def evaluate_checkpoint(
    config: Config,
    distributed: DistributedContext,
    context: AttemptContext,
    stop_agreement: StopAgreement,
    timeline: Timeline,
) -> bool:
    """Evaluate checkpoint.restore_from, and return False if a stop was requested before it was done.

    Raises:
        ConfigError: model, data or metrics cannot be built from the config, or there is nothing to measure.
        CheckpointError: the checkpoint does not exist, is damaged, or is of another model.
    """
    rank, run_dir = distributed.environment.rank, context.run_dir
    if distributed.broadcast_text("done" if rank == 0 and run_dir.result_file.exists() else "") == "":
        measured = _measure(config, distributed, context, stop_agreement, timeline)
        if measured is None:
            return False
        if rank == 0:
            write_json(run_dir.result_file, {"step": _step(config), "time": time.time(), "metrics": measured})
    if rank == 0:
        _publish(run_dir, config)
    return True


def _measure(
    config: Config,
    distributed: DistributedContext,
    context: AttemptContext,
    stop_agreement: StopAgreement,
    timeline: Timeline,
) -> dict[str, float] | None:
    dims = parallel_dims_of(config)
    distributed_model, *_ = distribute_model(config, dims, distributed)
    seed_everything(config.train.seed, distributed.environment.rank)
    source = inspect_source(build("data", config.data))
    forward_backward = build_forward_backward(
        distributed_model,
        dims.micro_batches(config.train),
        dims.micro_batch_size(config.train),
    )
    evaluator = build_evaluator(config, distributed_model, forward_backward, source, distributed, stop_agreement)
    if not evaluator.sets:
        raise ConfigError(
            "there is nothing to evaluate: the data has no validation set, and there are no eval.sets",
            hint="evaluate RUN eval.sets.NAME._target_=...; `prepare` makes one with prepare.valid_fraction=0.01",
        )
    evaluator.prepare()
    timeline.mark("model and data")
    # The settings of its training do not matter for the weights, and nothing is resumed, as the restore would say.
    logging.getLogger(Checkpointer.__module__).setLevel(logging.WARNING)
    checkpointer = Checkpointer(
        context.run_dir.checkpoints,
        group=distributed.checkpoint_group,
    )
    restored = checkpointer.restore(
        path=config.checkpoint.restore_from, allow=["config"], model=distributed_model.model
    )
    checkpointer.close()
    if restored is not None and distributed.environment.rank == 0:
        log.info("measuring the weights of %s", restored.path)
    timeline.mark("restore")
    if distributed.environment.rank == 0:
        update_attempt(context, first_step=_step(config), stepping=time.time(), start_up_s=timeline.seconds)
    return evaluator.evaluate()


def _publish(run_dir: RunDir, config: Config) -> None:
    """Write a line for the run and a point for TensorBoard, once over all attempts, and release the checkpoint."""
    run, result = run_dir.evaluated_run, read_json(run_dir.result_file)
    assert run is not None and result is not None
    name, step, measured = run_dir.path.name, result["step"], result["metrics"]
    this = {"evaluation": name, "time": round(result["time"], 3)}
    if not any(this.items() <= record.items() for record in read_metrics(run.evaluations_file)):
        line = json.dumps({"step": step, **measured, **this}) + "\n"
        append_line(run.evaluations_file, line)
        if config.train.tensorboard and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter  # takes a second

            with contextlib.suppress(OSError), SummaryWriter(str(run.tensorboard / "evaluations")) as curves:
                for metric, value in measured.items():
                    curves.add_scalar(metric, value, step)
    retention.release(run.checkpoints, step, name)
    for metric, value in measured.items():
        if metric.endswith("_loss"):
            print(f"step {step}: {metric.removesuffix('_loss')} loss {value:.4f} nats per token", flush=True)


def _step(config: Config) -> int:
    return step_of(Path(config.checkpoint.restore_from or ""))
