"""The program of every rank of an evaluation: measure the weights of one checkpoint on all sets, and publish the result."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from slurmtrain.checkpoint import retention
from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.commit import step_of
from slurmtrain.config.layout import layout_of, micro_batch_size
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.observe import TensorBoardLog, read_metrics
from slurmtrain.records import append_line
from slurmtrain.rundir import RunDir, read_json, write_json
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.runtime.place import Place, update_attempt
from slurmtrain.runtime.timeline import Timeline
from slurmtrain.runtime.training_job import build, build_evaluator, lay_model
from slurmtrain.runtime.world import World
from slurmtrain.training.passes import passes_of
from slurmtrain.training.seeds import seed_everything


def evaluate_checkpoint(config: Config, world: World, where: Place, stop: StopAgreement, timeline: Timeline) -> bool:
    """Evaluate checkpoint.restore_from, and return False if a stop was requested before it was done.

    Raises:
        ConfigError: model, data or metrics cannot be built from the config, or there is nothing to measure.
        CheckpointError: the checkpoint does not exist, is damaged, or is of another model.
    """
    rank, run_dir = world.environment.rank, where.run_dir
    if world.tell("done" if rank == 0 and run_dir.result_file.exists() else "") == "":
        measured = _measure(config, world, where, stop, timeline)
        if measured is None:
            return False
        if rank == 0:
            write_json(run_dir.result_file, {"step": _step(config), "time": time.time(), "metrics": measured})
    if rank == 0:
        _publish(run_dir, config)
    return True


def _measure(
    config: Config, world: World, where: Place, stop: StopAgreement, timeline: Timeline
) -> dict[str, float] | None:
    layout = layout_of(config)
    laid, _, _ = lay_model(config, layout, world)
    seed_everything(config.train.seed, world.environment.rank)
    source = build("data", config.data)
    passes = passes_of(
        laid,
        config.train.global_batch_size // (micro_batch_size(config, layout) * layout.dp),
        micro_batch_size(config, layout),
    )
    evaluator = build_evaluator(config, laid, passes, source, world, stop)
    if not evaluator.sets:
        raise ConfigError(
            "there is nothing to evaluate: the data source has no `valid`", hint="eval.sets.NAME._target_=..."
        )
    evaluator.prepare()
    timeline.mark("model and data")
    # The settings of its training do not matter for the weights, and nothing is resumed.
    checkpointer = Checkpointer(
        where.run_dir.checkpoints, group=world.saving, verify=config.checkpoint.verify, say=lambda text: None
    )
    restored = checkpointer.restore(path=config.checkpoint.restore_from, allow=["config"], model=laid.model)
    checkpointer.close()
    if restored is not None and world.environment.rank == 0:
        print(f"slurmtrain: measuring the weights of {restored.path}", file=sys.stderr, flush=True)
    timeline.mark("restore")
    if world.environment.rank == 0:
        update_attempt(where, first_step=_step(config), stepping=time.time(), start_up_s=timeline.seconds)
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
        if config.train.tensorboard:
            curves = TensorBoardLog(run.tensorboard / "evaluations", None)
            curves.write(step, **measured)
            curves.close()
    retention.release(run.checkpoints, step, name)
    for metric, value in measured.items():
        if metric.endswith("_loss"):
            print(f"step {step}: {metric.removesuffix('_loss')} loss {value:.4f} nats per token", flush=True)


def _step(config: Config) -> int:
    return step_of(Path(config.checkpoint.restore_from or ""))
