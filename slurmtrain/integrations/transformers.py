"""Hugging Face's Trainer under slurmtrain (extra `hf`): stopped at one step on all ranks, saved, requeued and resumed.

Two ways, of which each takes a line or two of somebody's script:

- `SlurmtrainCallback` and `resume_from`: Trainer saves as it always does, and goes on from its newest checkpoint that is
  complete.
- `CheckpointedTrainer` in place of `Trainer`: the checkpoints are slurmtrain's, asynchronous, committed, and written by
  all ranks together. `trainer.train()` goes on from the newest one by itself.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.format.manifest import read_manifest
from slurmtrain.checkpoint.state import RANDOM_STATE
from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.errors import ConfigError, EnvironmentMismatchError
from slurmtrain.integrations.reporting import ProgressReport
from slurmtrain.integrations.trainer_folders import STATE_FILE, newest_complete
from slurmtrain.parallel.ddp import warm_up_ddp_buckets
from slurmtrain.runtime.api import exit_for_requeue, init, session, should_stop
from slurmtrain.runtime.own_checkpointer import Checkpointer

log = logging.getLogger(__name__)

BEST_METRIC = "best_metric"  # in a checkpoint: Trainer's name for the metric of the best one so far
SHOWN_AS = {"learning_rate": "lr", "eval_loss": "valid_loss"}  # names of Trainer's log, and of metrics.jsonl


class SlurmtrainCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Stops all ranks of a Trainer after the same step when one of them is told to stop, and reports its progress.

    At a stop the Trainer saves, whatever its save_strategy; a due evaluation is left out, since it may take longer than
    the grace time. Then all ranks leave with exit code 75, and the job starts again: pass `resume_from(output_dir)` to
    `train`. Without `slurmtrain.init()` in the script, the callback calls it.

        trainer = Trainer(..., callbacks=[SlurmtrainCallback()])
        trainer.train(resume_from_checkpoint=resume_from(trainer.args.output_dir))
    """

    trainer_saves = True

    def __init__(self) -> None:
        self._stopping = False
        self._report: ProgressReport | None = None
        self.world_size = 0

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _join(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _join(args)
        self._stopping, self.world_size = False, args.world_size
        self._report = ProgressReport(state.global_step, state.max_steps)
        # A checkpoint from before the callback was added has no place for its state, which Trainer takes for granted.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if should_stop():  # told while model and data were being loaded: there is nothing to save yet
            exit_for_requeue()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stopping = should_stop()
        if self._stopping:
            control.should_save, control.should_evaluate, control.should_training_stop = True, False, True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._report is not None and self.trainer_saves:
            self._report.saved(state.global_step, Path(args.output_dir, f"checkpoint-{state.global_step}"))
        if self._stopping:
            exit_for_requeue()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if self._report is not None:
            self._report.log(state.global_step, **_numbers(logs or {}))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._report is not None:
            self._report.close()

    def state(self) -> dict[str, Any]:
        """Return what Trainer keeps in trainer_state.json: how many ranks have saved, by which a torn checkpoint is known."""
        return {"args": {}, "attributes": {"world_size": self.world_size}}


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of Trainer's log by the names of metrics.jsonl."""
    return {
        SHOWN_AS.get(name, name): float(value)
        for name, value in logs.items()
        if isinstance(value, int | float) and name not in ("step", "step_time_s")
    }


def _join(args: Any) -> None:
    """Join the run, unless the script has done so by `slurmtrain.init()`.

    Raises:
        ConfigError: Trainer is to handle the stop signals, too.
        EnvironmentMismatchError: the job has several ranks, and each has a Trainer that trains alone.
    """
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            "enable_jit_checkpoint=True lets each rank stop at a different step",
            hint="leave it out: all ranks stop together at the next step",
        )
    if session.distributed is None:
        init(device="cpu" if args.use_cpu else "auto")
    ranks = session.initialised()[0].environment.world_size
    if args.world_size != ranks:
        raise EnvironmentMismatchError(
            f"Trainer trains on {args.world_size} of the {ranks} ranks of this job",
            hint="on CPUs, TrainingArguments(use_cpu=True) makes them train together",
        )


# Checkpoints of Trainer's own.


def resume_from(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint of Trainer's in `output_dir`, for `train(resume_from_checkpoint=...)`.

    All ranks call it, and get the same. Folders that a kill has left torn are moved aside, to `torn-checkpoint-<step>`,
    with a message. None: there is no complete one, and training begins at step 0.
    """
    if session.distributed is None:
        init()
    distributed = session.initialised()[0]
    found = None
    if distributed.environment.rank == 0 and (found := newest_complete(Path(output_dir))) is not None:
        log.info("resuming from %s, the newest complete checkpoint", found)
    return distributed.broadcast_text(str(found or "")) or None


# Checkpoints of slurmtrain's.


class _CheckpointerCallback(SlurmtrainCallback):
    """The callback of a `CheckpointedTrainer`, whose Checkpointer records what is saved."""

    trainer_saves = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:  # in the midst of an epoch, where Trainer would do one step more
            raise _NothingLeftError


class _OtherCheckpointError(Exception):
    """Another checkpoint was restored than the one whose Trainer state was read: that is damaged, or there is a newer one."""


class _NothingLeftError(Exception):
    """The restored training has done all its steps already."""


class _Text:
    """A text in a checkpoint, the same on all ranks.

    Attributes:
        text: what is saved, or was restored.
    """

    def __init__(self) -> None:
        self.text = ""

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text = state["text"]


class CheckpointedTrainer(Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer whose checkpoints are slurmtrain's: written in the background by all ranks, and committed.

    Model, optimiser, schedule, scaler, the Trainer's state and every rank's random state are saved whenever Trainer
    would save, and at a stop. `train` goes on from the newest sound checkpoint by itself; `resume_from_checkpoint` says
    only where the first start begins. save_steps, save_total_limit (at least 2 are kept) and load_best_model_at_end
    mean what they do otherwise. A folder that `from_pretrained` loads comes from `save_model`, as ever. Subclasses of
    Trainer take it first: `class Mine(CheckpointedTrainer, SFTTrainer)`.

    Args:
        checkpoint_dir: where the checkpoints lie; default: in the run directory, or in output_dir/checkpoints for a
            script that was not submitted. Each Trainer of a script needs one of its own.

    Raises:
        ConfigError: the Trainer's state is in DeepSpeed's hands; or `train` is called again when it has finished.
        EnvironmentMismatchError: the job has several ranks, and each has a Trainer that trains alone.
        CheckpointError: see `slurmtrain.Checkpointer`.
    """

    def __init__(self, *args: Any, checkpoint_dir: Path | str | None = None, **kwargs: Any) -> None:
        self._checkpoint_dir = checkpoint_dir
        self._checkpointer: Checkpointer | None = None
        self._state_text = _Text()
        self._folder: str | None = None  # stands for our checkpoint in Trainer's calls, while it is restored
        self._random_state: dict[str, Any] = {}
        self._warm = False  # DDP has its final buckets, and the first save its memory
        self._trained = False
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise ConfigError(
                "CheckpointedTrainer cannot save what DeepSpeed holds",
                hint="use Trainer with callbacks=[SlurmtrainCallback()]",
            )
        self.remove_callback(SlurmtrainCallback)
        self.add_callback(_CheckpointerCallback())
        _join(self.args)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as Trainer does, from the newest sound checkpoint of this run if there is one."""
        if self.hp_search_backend is not None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        if self._trained:
            raise ConfigError(
                "CheckpointedTrainer.train() has finished once already, and would continue from its last checkpoint",
                hint="create a CheckpointedTrainer with its own checkpoint_dir for each training",
            )
        checkpointer = self._checkpointer = self._checkpointer or self._make_checkpointer()
        self._state_text.text = self._newest_state(checkpointer)
        while True:
            self._warm = False
            try:
                if self._state_text.text:
                    output = self._resume(*args, **kwargs)
                else:
                    output = super().train(self._first_start(resume_from_checkpoint), *args, **kwargs)
            except _OtherCheckpointError:
                continue  # with the Trainer state of the checkpoint that was restored
            except _NothingLeftError:
                output = self._finish()
            checkpointer.wait()
            self._trained = True
            return output

    def _make_checkpointer(self) -> Checkpointer:
        limit, best = self.args.save_total_limit, self.args.metric_for_best_model is not None
        keep = Keep(
            last=max(2, limit) if limit else sys.maxsize,
            best=1 if best else 0,
            metric=BEST_METRIC,
            mode="max" if self.args.greater_is_better else "min",
        )
        directory = self._checkpoint_dir
        if directory is None and session.context is None:
            directory = Path(self.args.output_dir, "checkpoints")
        return Checkpointer(directory, keep=keep)

    def _newest_state(self, checkpointer: Checkpointer) -> str:
        """Return the Trainer's state in the newest checkpoint; nothing if there is none. Trainer asks for it first."""
        distributed = session.initialised()[0]
        text = ""
        for path in reversed(committed(checkpointer.directory)) if distributed.environment.rank == 0 else ():
            with suppress(CheckpointError):  # a damaged one is set aside when it is restored
                text = (read_manifest(path).state.get("trainer") or {}).get("text", "")
                break
        return distributed.broadcast_text(text)

    def _resume(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Let Trainer resume from a folder that has its state and nothing else; the rest is restored on the way."""
        with tempfile.TemporaryDirectory(prefix="slurmtrain-trainer-") as folder:
            Path(folder, STATE_FILE).write_text(self._state_text.text)
            self._folder = folder
            try:
                return super().train(folder, *args, **kwargs)
            finally:
                self._folder = None

    def _finish(self) -> TrainOutput:
        """End a training that had done all its steps already when it was restored."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.is_in_train = False
        return TrainOutput(self.state.global_step, 0.0, {})

    def _first_start(self, resume_from_checkpoint: str | bool | None) -> str | None:
        if resume_from_checkpoint is not True:
            return resume_from_checkpoint or None
        found: str | None = None
        with suppress(FileNotFoundError):
            found = get_last_checkpoint(self.args.output_dir)
        return found

    def _objects(self) -> dict[str, Any]:
        """Return what is saved and restored, beside the Trainer's state."""
        objects = {"model": self.model_wrapped, "optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        scaler = getattr(self.accelerator, "scaler", None)
        return objects if scaler is None else {**objects, "scaler": scaler}

    def _metric_name(self) -> str:
        name = str(self.args.metric_for_best_model or "loss")
        return name if name.startswith("eval_") else f"eval_{name}"

    # What Trainer calls.

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a micro batch, after its backward pass."""
        if not self._warm:
            self._warm = True
            if self._folder is not None and not self.args.auto_find_batch_size:  # which may begin again
                shutil.rmtree(self._folder, ignore_errors=True)  # has been read; the end of the process may leave it
            warm_up_ddp_buckets(model)
            if self._checkpointer is not None and not self._state_text.text:
                # Reserves memory for the first save, and refuses to start over what damage has cost.
                restored = self._checkpointer.restore(trainer=self._state_text, **self._objects())
                if restored is not None:  # it was not to be seen a moment ago, or is a copy on the nodes
                    raise _OtherCheckpointError
        return super().training_step(model, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        if self._checkpointer is None or trial is not None or self.hp_search_backend is not None:
            super()._save_checkpoint(model, trial, *args, **kwargs)
            return
        self.store_flos()
        step = self.state.global_step
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(self._checkpointer.directory / f"checkpoint_{step:07d}")
        states: dict[str, list[Any]] = {}
        for each in (*self.callback_handler.callbacks, self.control):
            if isinstance(each, ExportableState):
                states.setdefault(type(each).__name__, []).append(each.state())
        self.state.stateful_callbacks = {name: all_ if len(all_) > 1 else all_[0] for name, all_ in states.items()}
        # Ranks differ in how long an evaluation took and in who they are; rank 0's state counts.
        text = json.dumps(dataclasses.asdict(self.state), sort_keys=True)
        self._state_text.text = session.initialised()[0].broadcast_text(text)
        name = self._metric_name()
        found = [entry[name] for entry in self.state.log_history if entry["step"] == step and name in entry]
        metrics = {name: found[-1]} if found else {}
        if self.state.best_global_step == step and self.state.best_metric is not None:
            metrics[BEST_METRIC] = self.state.best_metric  # each is better than those before it, so that it stays
        self._checkpointer.save(step, metrics=metrics, trainer=self._state_text, **self._objects())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if resume_from_checkpoint != self._folder:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or checkpoint != self._folder:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self._checkpointer is not None
        expected = Path(checkpoint, STATE_FILE).read_text()  # what Trainer has read
        restored = self._checkpointer.restore(trainer=self._state_text, **self._objects())
        if restored is None:
            self._state_text.text = ""
        if self._state_text.text != expected:
            raise _OtherCheckpointError
        self._random_state = RANDOM_STATE.state_dict()

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        if self._folder is None or self.args.restore_callback_states_from_checkpoint:
            return
        # It is the same training, so that what callbacks have counted goes on (EarlyStoppingCallback). Trainer, if it is told
        # to, makes new callbacks of what was saved; these keep what the script gave them.
        saved = {
            name: list(each) if isinstance(each, list) else [each]
            for name, each in self.state.stateful_callbacks.items()
        }
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExportableState) and (states := saved.get(type(callback).__name__)):
                for name, value in states.pop(0).get("attributes", {}).items():
                    setattr(callback, name, value)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or checkpoint != self._folder:
            super()._load_rng_state(checkpoint)
            return
        RANDOM_STATE.load_state_dict(self._random_state)

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if self._checkpointer is None or best.parent != self._checkpointer.directory:
            super()._load_best_model()
            return
        self._checkpointer.wait()
        step = self.state.best_global_step
        # With `at_most` it is no beginning, and is not reported as one.
        self._checkpointer.restore(path=best, at_most=step, as_start=True, model=self.model_wrapped)
        if session.initialised()[0].environment.rank == 0:
            log.info("the model is the best one, of step %s: %s %s", step, self._metric_name(), self.state.best_metric)
