"""Check how the runs of a sweep share jobs, and how a search chooses and prunes them."""

from __future__ import annotations

from slurmtrain.config.checks.values import at_least
from slurmtrain.config.schema import SearchConfig, SweepConfig


def check_sweep(sweep: SweepConfig, search: SearchConfig) -> None:
    """Raise for packs, and for settings of a search, that are too small."""
    at_least("sweep.pack", sweep.pack, 1)
    for name, least in (("prune_after_steps", 0), ("startup_trials", 1), ("reduction_factor", 2)):
        at_least(f"search.{name}", getattr(search, name), least)
    at_least("search.max_failures_in_a_row", search.max_failures_in_a_row, 1)
