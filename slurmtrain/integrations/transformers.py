"""Hugging Face's Trainer under slurmtrain (extra `hf`): stopped at one step on all ranks, saved, requeued and resumed.

Trainer saves as it always does, and goes on from its newest checkpoint that is complete; one that a kill left torn is renamed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from slurmtrain.errors import ConfigError, EnvironmentMismatchError
from slurmtrain.integrations.reporting import ProgressReport
from slurmtrain.parallel.ddp import warm_up_ddp_buckets
from slurmtrain.rank.api import exit_for_requeue, init, session, should_stop
from slurmtrain.runs.program_checkpoints import cut, move_aside

log = logging.getLogger(__name__)

SHOWN_AS = {"learning_rate": "lr", "eval_loss": "valid_loss"}  # names of Trainer's log, and of metrics.jsonl


class SlurmtrainCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Stops all ranks of a Trainer after the same step when one of them is told to stop, and reports its progress.

    At a stop the Trainer saves, whatever its save_strategy; a due evaluation is left out, since it may take longer than
    the grace time. Then all ranks leave with exit code 75, and the job starts again: pass `resume_from(output_dir)` to
    `train`. Without `slurmtrain.init()` in the script, the callback calls it.

        trainer = Trainer(..., callbacks=[SlurmtrainCallback()])
        trainer.train(resume_from_checkpoint=resume_from(trainer.args.output_dir))
    """

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
        _warm_up_at_first_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stopping = should_stop()
        if self._stopping:
            control.should_save, control.should_evaluate, control.should_training_stop = True, False, True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._report is not None:
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


def _warm_up_at_first_step() -> None:
    """Let DDP reach its final buckets before the first step counts. Callbacks are not shown the model within DDP."""

    def warm_up(module: nn.Module, _: object) -> None:
        if torch.is_grad_enabled():
            hook.remove()
            warm_up_ddp_buckets(module)

    hook = register_module_forward_pre_hook(warm_up)


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


def resume_from(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint of Trainer's in `output_dir`, for `train(resume_from_checkpoint=...)`.

    All ranks call it, and get the same. Folders that a kill has left torn are renamed, with a message. None: there is no
    complete one, and training begins at step 0.
    """
    if session.distributed is None:
        init()
    distributed = session.initialised()[0]
    found = None
    if distributed.environment.rank == 0 and (found := newest_complete(Path(output_dir))) is not None:
        log.info("resuming from %s, the newest complete checkpoint", found)
    return distributed.broadcast_text(str(found or "")) or None


STATE_FILE = "trainer_state.json"  # Trainer writes it after everything else that a checkpoint needs
FOLDER = re.compile(r"checkpoint-(\d+)")
# What Trainer resumes from. Of other files nothing is known: a mark that somebody's callback leaves may well be empty.
NEEDED = (".safetensors", ".pt", ".pth", ".bin", "config.json", ".index.json")


def newest_complete(output_dir: Path) -> Path | None:
    """Return the newest complete checkpoint, and move newer ones that are torn aside."""
    folders = [path for path in output_dir.glob("checkpoint-*") if path.is_dir()]
    numbered = [(int(match.group(1)), path) for path in folders if (match := FOLDER.fullmatch(path.name))]
    for _, path in sorted(numbered, reverse=True):
        reason = torn(path)
        if reason is None:
            return path
        aside = move_aside(path, session.context.number if session.context is not None else 0)
        log.warning("%s is not complete and was renamed to %s: %s", path, aside.name, reason)
    return None


def torn(checkpoint: Path) -> str | None:
    """Return why a checkpoint of Trainer's is not complete, in one sentence; None: it is."""
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text())
        # Trainer of before transformers 4.41 has not written them.
        callback = (state.get("stateful_callbacks") or {}).get(SlurmtrainCallback.__name__)
        ranks = callback["attributes"]["world_size"] if callback else 0
    except FileNotFoundError:
        return f"it has no {STATE_FILE}, which Trainer writes last"
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"its {STATE_FILE} is not whole"
    missing = [rank for rank in range(ranks) if ranks > 1 and not (checkpoint / f"rng_state_{rank}.pth").exists()]
    if missing:
        return f"the random state of rank {missing[0]} is missing"
    for path in sorted(checkpoint.rglob("*")):
        reason = (cut(path) or _cut_weights(path)) if path.name.endswith(NEEDED) and path.is_file() else None
        if reason:
            return f"{path.relative_to(checkpoint)}: {reason}"
    return None


def _cut_weights(path: Path) -> str | None:
    """Return "it is cut" of a .safetensors file whose header does not agree with its size; None of any other file."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError:
            return "it is cut"
    return None
