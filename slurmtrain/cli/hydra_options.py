"""Options that Hydra handles itself: --cfg, --info, --hydra-help and tab completion run Hydra's own main."""

from __future__ import annotations

import sys
from typing import Any

from slurmtrain.cli.arguments import Arguments
from slurmtrain.config.compose import register_schema
from slurmtrain.config.folders import search_folders, search_path


def run_hydra(parsed: Arguments) -> int:
    """Pass the options and overrides to Hydra, without the verb and all else, and return the exit code."""
    if "query=bash" in parsed.overrides:
        from slurmtrain.cli.completion import complete

        complete(lambda: _show(parsed))
    else:
        _show(parsed)
    return 0


def _show(parsed: Arguments) -> None:
    """Let Hydra print the requested information and exit."""
    import hydra

    register_schema()
    options = parsed.options
    path = options.get("--config-path")
    # Hydra itself takes --config-path as relative to this file, and then searches no other folder.
    folders = search_folders(options.get("--config-name", "config"), None, path)
    searched = [search_path(folders[1:])] if len(folders) > 1 else []
    # Nothing is run, so Hydra need not make a folder for its outputs.
    sys.argv = ["slurmtrain", *_without_config_path(parsed.hydra), *parsed.overrides, *searched]

    @hydra.main(config_path=str(folders[0]), config_name="config", version_base="1.3")
    def show(config: Any) -> None:
        """Never run: every option that comes here prints and exits."""

    show()


def _without_config_path(words: list[str]) -> list[str]:
    kept, rest = [], iter(words)
    for word in rest:
        if word.partition("=")[0] in ("--config-path", "-cp"):
            next(rest, None)  # its value
        else:
            kept.append(word)
    return kept
