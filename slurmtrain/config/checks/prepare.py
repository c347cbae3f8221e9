"""Check what `prepare` reads and writes."""

from __future__ import annotations

import math

from slurmtrain.config.checks.values import at_least
from slurmtrain.config.schema import PrepareConfig
from slurmtrain.errors import ConfigError


def check_prepare(prepare: PrepareConfig) -> None:
    """Raise if the inputs or the output are missing, and for shares outside of 0 to 1."""
    if not prepare.inputs:
        raise ConfigError("prepare.inputs is empty", hint="prepare.inputs='[/data/raw/*.jsonl]'")
    if not prepare.output:
        raise ConfigError(
            "prepare.output is not set", hint="prepare.output=/data/tokens, a folder that will be created"
        )
    if not 0 < prepare.unit_mb < math.inf:
        raise ConfigError(f"prepare.unit_mb={prepare.unit_mb} must be above 0", hint="in MB, for example 128")
    if not 0 <= prepare.valid_fraction < 1:
        raise ConfigError(f"prepare.valid_fraction={prepare.valid_fraction} must be at least 0, and below 1")
    if not 0 <= prepare.max_bad_share <= 1:
        raise ConfigError(f"prepare.max_bad_share={prepare.max_bad_share} must lie between 0 and 1")
    at_least("prepare.workers", prepare.workers, 0)
    at_least("prepare.parts", prepare.parts, 1)
    if not 0 <= prepare.part < prepare.parts:
        raise ConfigError(
            f"prepare.part={prepare.part} with prepare.parts={prepare.parts}: parts are counted from 0",
            hint=f"-m 'prepare.part=range(0,{prepare.parts})'",
        )
