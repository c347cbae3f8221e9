"""Check the limits that the nodes are compared with before training."""

from __future__ import annotations

from slurmtrain.choices import PreflightMode
from slurmtrain.config.checks.values import at_least
from slurmtrain.config.schema import PreflightConfig
from slurmtrain.errors import ConfigError


def check_preflight(preflight: PreflightConfig) -> None:
    """Raise for a limit that no node, or every node, would pass."""
    if not preflight.clock_offset_s > 0:
        raise ConfigError(
            f"preflight.clock_offset_s={preflight.clock_offset_s} must be above 0",
            hint="in seconds, such as 5; preflight.ignore=[clock] ignores clocks",
        )
    at_least("preflight.min_free_gb", preflight.min_free_gb, 0)
    if not 0 < preflight.slow_share < 1:
        raise ConfigError(
            f"preflight.slow_share={preflight.slow_share} must be above 0, and below 1",
            hint="a share of the median, such as 0.7",
        )
    if preflight.exclude_slow and preflight.mode != PreflightMode.FULL:
        raise ConfigError(
            f"preflight.exclude_slow=true, but preflight.mode={preflight.mode} does not measure speed",
            hint="preflight=full, or preflight.exclude_slow=false",
        )
