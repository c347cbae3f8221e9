"""The names of the files of ranks, and of what each rank has for itself."""

from __future__ import annotations

OWN = "own/"  # begins the names of what each rank has for itself
OWN_STATE = "own.json"


def file_name(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"rank{rank:05d}.safetensors"
