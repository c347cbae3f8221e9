"""Overrides as a person writes them, in the form that Hydra accepts."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence

from slurmtrain.config.compose import literal_override
from slurmtrain.config.folders import config_groups

OPEN = tuple(f"eval.{group}{end}" for group in ("sets", "metrics", "cluster", "parallel") for end in ".=")


def program_override(program: Sequence[str]) -> str:
    """Return the override that makes every rank of job=command run this program, word for word."""
    return literal_override("job.command", shlex.join(program))


def normalise(override: str) -> str:
    """Return an override in the form that Hydra accepts, so that a plus in front is optional.

    Both `cluster=a100x4` and `+cluster=a100x4` are accepted: conf/config.yaml lists the group, so Hydra wants no plus.
    Both are also accepted for additions to `eval`, whose sets, metrics and changes have names that nobody can know.
    """
    if override.startswith(OPEN):
        return f"++{override}"
    group = override.partition("=")[0].removeprefix("+")
    return override.removeprefix("+") if group in shipped_groups() else override


@functools.cache
def shipped_groups() -> frozenset[str]:
    """Return the names of the config groups."""
    return frozenset(config_groups())
