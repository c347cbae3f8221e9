"""Options that Hydra handles itself: --cfg, --info, --hydra-help and tab completion run Hydra's own main."""

from __future__ import annotations

import os
import sys
from typing import Any

from slurmtrain.cli.arguments import Arguments
from slurmtrain.config.compose import explaining, register_schema
from slurmtrain.config.folders import Primary, search_folders, search_path


def run_hydra(parsed: Arguments) -> int:
    """Pass the options and overrides to Hydra, without the verb and all else, and return the exit code.

    Raises:
        UsageError, ConfigError: as for `compose`.
    """
    if "query=bash" in parsed.overrides:
        from slurmtrain.cli.completion import complete

        complete(lambda: _show(parsed, _primary(parsed)))
        return 0
    primary = _primary(parsed)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    with explaining(parsed.overrides, primary):
        _show(parsed, primary)
    return 0


def _primary(parsed: Arguments) -> Primary:
    """Return the folders that a verb would search, too."""
    options = parsed.options
    name = options.get("--config-name", "config")
    return Primary(name, search_folders(name, options.get("--config-dir"), options.get("--config-path")))


def _show(parsed: Arguments, primary: Primary) -> None:
    """Let Hydra print the requested information and exit."""
    import hydra

    from slurmtrain.config.override_parser import for_hydra

    register_schema()
    first, *others = primary.folders
    overrides = [for_hydra(override) for override in parsed.overrides]
    # Nothing is run, so Hydra need not make a folder for its outputs. It is told the folders below: by itself, it takes
    # --config-path as relative to this file and then searches no other folder, and seeks the primary config only there.
    sys.argv = ["slurmtrain", *_without_folders(parsed.hydra), *overrides, *([search_path(others)] if others else [])]

    @hydra.main(config_path=str(first), config_name="config", version_base="1.3")
    def show(config: Any) -> None:
        """Never run: every option that comes here prints and exits."""

    show()


def _without_folders(words: list[str]) -> list[str]:
    """Return the words without --config-dir and --config-path and their values."""
    kept, rest = [], iter(words)
    for word in rest:
        if word in ("--config-dir", "-cd", "--config-path", "-cp"):
            next(rest, None)  # its value
        else:
            kept.append(word)
    return kept
