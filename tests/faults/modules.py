"""All modules that enter rows."""

from __future__ import annotations


def load() -> None:
    from tests.faults import damage, disks, endings, frozen, hostile_runs, jobs, kills, workers  # noqa: F401
