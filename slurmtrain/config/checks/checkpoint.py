"""Check when checkpoints are saved, which are kept, and where the first state comes from."""

from __future__ import annotations

import math
from pathlib import PurePosixPath

from slurmtrain.choices import JobKind
from slurmtrain.config.checks.values import at_least
from slurmtrain.config.families import HUGGING_FACE
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.our_decoder import is_our_decoder


def check_checkpoint(config: Config) -> None:
    """Raise for a period, a number of checkpoints or a folder that cannot be used."""
    at_least("checkpoint.every_steps", config.checkpoint.every_steps, 0)
    at_least(
        "checkpoint.keep_last",
        config.checkpoint.keep_last,
        2,
        why="one good checkpoint must be left while the next is checked",
    )
    for name in ("every_minutes", "keep_every", "keep_best", "max_failures", "local_every_steps", "export_every_steps"):
        at_least(f"checkpoint.{name}", getattr(config.checkpoint, name), 0)
    model = config.model.get("_target_")
    known = is_our_decoder(config.model) or model == HUGGING_FACE
    if config.checkpoint.export_every_steps and config.job.kind == JobKind.TRAIN and not known:
        raise ConfigError(
            f"checkpoint.export_every_steps={config.checkpoint.export_every_steps}: Hugging Face has no family for {model}",
            hint="`checkpoints RUN export FILE.safetensors` writes the weights of any model",
        )
    if config.checkpoint.local is not None and not PurePosixPath(config.checkpoint.local).is_absolute():
        raise ConfigError(
            f"checkpoint.local={config.checkpoint.local} is not an absolute path",
            hint="choose a node-local folder, as in checkpoint.local=/dev/shm",
        )
    if config.checkpoint.local_every_steps and config.checkpoint.local is None:
        raise ConfigError(
            f"checkpoint.local_every_steps={config.checkpoint.local_every_steps} needs a folder on the nodes to copy to",
            hint="checkpoint.local=/dev/shm, or a local disk's folder",
        )
    if config.checkpoint.restore_only is not None and config.checkpoint.restore_from is None:
        raise ConfigError(
            "checkpoint.restore_only=model, but there is no checkpoint to take the model from",
            hint="checkpoint.restore_from=PATH names one",
        )
    if not math.isfinite(config.checkpoint.every_minutes):
        raise ConfigError(
            f"checkpoint.every_minutes={config.checkpoint.every_minutes} is not a valid time", hint="0: not by time"
        )
    if config.checkpoint.mtbf_hours is not None and not config.checkpoint.mtbf_hours > 0:
        raise ConfigError(
            f"checkpoint.mtbf_hours={config.checkpoint.mtbf_hours} is not a valid time between failures",
            hint="give hours above 0, or null to go by the number of nodes",
        )
