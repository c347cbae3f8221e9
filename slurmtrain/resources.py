"""The files that are shipped with the package: `conf/` (Hydra configs) and `jobs/` (sbatch template, examples).

In a wheel they are inside the package; in a clone they are its neighbours.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """Return the folder `name` ("conf" or "jobs") of this installation."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def is_installed_copy() -> bool:
    """Return True for a wheel in site-packages, False for a clone or an editable install, whose code may change at any time."""
    return (PACKAGE / "conf").is_dir()
