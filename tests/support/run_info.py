"""What run.json says of a run, for tests that need one and care for a part of it only."""

from __future__ import annotations

from typing import Any


def run_info(**facts: object) -> dict[str, Any]:
    """The content of a run.json, with these facts."""
    return {
        "name": "train",
        "overrides": [],
        "backend": "slurm",
        "user": "somebody",
        "host": "elsewhere",
        "created": 1_700_000_000.0,
        "slurm_conf": None,
        "job_ids": [],
        **facts,
    }
