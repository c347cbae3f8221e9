"""The folders that are shipped with the package, those in which configs are searched, and the groups that they offer.

Shipped are `conf/` (Hydra configs) and `jobs/` (sbatch template, examples): inside the package in a wheel, beside it in a
clone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurmtrain.errors import ConfigError, UsageError

PACKAGE = Path(__file__).resolve().parents[1]
OWN_CLUSTERS = "conf/cluster"  # in the folder of the command


def shipped(name: str) -> Path:
    """Return the folder `name` ("conf" or "jobs") of this installation.

    Raises:
        ConfigError: this is the copy of the package in a run's snapshot, which has no configs.
    """
    folder = PACKAGE / name if (PACKAGE / name).is_dir() else PACKAGE.parent / name
    if name == "conf" and not folder.is_dir():
        raise ConfigError(
            f"there are no configs in {folder}: the slurmtrain of the current folder runs, which is the snapshot of a run",
            hint="change to another folder; `resume` and the other verbs find a run from anywhere",
        )
    return folder


def is_installed_copy() -> bool:
    """Return True for a wheel in site-packages, False for a clone or an editable install, whose code may change at any time."""
    return (PACKAGE / "conf").is_dir()


def search_folders(config_name: str = "config", config_dir: str | None = None) -> list[Path]:
    """Return the folders to search, in order, that of the primary config first.

    The last one is conf/ of the current folder if it describes clusters, as `probe` leaves it.

    Raises:
        UsageError: the folder of --config-dir does not exist.
        ConfigError: this is the copy of the package in a run's snapshot, which has no configs.
    """
    folders = [shipped("conf")]
    if config_dir is not None:
        own = Path(config_dir).expanduser().resolve()
        if not own.is_dir():
            raise UsageError(
                f"--config-dir {config_dir}: there is no such folder", hint="give a folder with yaml files"
            )
        # Hydra looks for the primary config in the first folder only.
        folders.insert(0 if (own / f"{config_name}.yaml").is_file() else 1, own)
    here = Path(OWN_CLUSTERS).resolve()
    if here.is_dir() and here.parent not in folders:
        folders.append(here.parent)
    return folders


def config_groups(folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Return the config groups and their options in these folders, or in the shipped one."""
    groups: dict[str, list[str]] = {}
    for root in folders or [shipped("conf")]:
        folders_of_groups = (path for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "_")))
        for folder in sorted(path for path in folders_of_groups if path.name != "hydra"):  # Hydra's own groups
            groups.setdefault(folder.name, []).extend(sorted(file.stem for file in folder.glob("*.yaml")))
    return groups
