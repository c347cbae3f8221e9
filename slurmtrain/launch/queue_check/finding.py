"""Something in a request that does not suit the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.errors import ConfigError


@dataclass(frozen=True)
class Finding:
    """Something in a request that does not suit the cluster.

    Attributes:
        field: of the config: "cluster.time_limit_min".
        message: one sentence with the value and what the cluster has.
        hint: what to write instead.
        fatal: SLURM would refuse the job, or never start it.
    """

    field: str
    message: str
    hint: str = ""
    fatal: bool = True


def raise_fatal(findings: Sequence[Finding]) -> list[str]:
    """Raise for the first finding that is fatal, and return the others as warnings.

    Raises:
        ConfigError: with all that is fatal in its hint.
    """
    fatal = [each for each in findings if each.fatal]
    if fatal:
        first, others = fatal[0], fatal[1:]
        further = "".join(f"; besides, {each.message}" + (f" ({each.hint})" if each.hint else "") for each in others)
        raise ConfigError(first.message + further, hint=first.hint or None)
    return [f"{each.message}; {each.hint}" if each.hint else each.message for each in findings]
