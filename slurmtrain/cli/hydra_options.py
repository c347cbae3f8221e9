"""What is Hydra's own business: --cfg, --info, --hydra-help and tab completion run Hydra's own main."""

from __future__ import annotations

import os
import sys
from typing import Any

from slurmtrain.cli.arguments import Arguments, normalise
from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.compose import register_schema
from slurmtrain.resources import shipped


def run_hydra(parsed: Arguments) -> int:
    """Hand the options and overrides to Hydra, verb and all else removed. Returns the exit code."""
    if "query=bash" in parsed.overrides:
        _prepare_completion()
    import hydra

    register_schema()
    # Nothing is run, so Hydra need not make a folder for its outputs.
    sys.argv = ["slurmtrain", *parsed.hydra, *parsed.overrides]

    @hydra.main(config_path=str(shipped("conf")), config_name="config", version_base="1.3")
    def show(config: Any) -> None:
        """Never reached: every option that comes here prints and leaves."""

    show()
    return 0


def _prepare_completion() -> None:
    """Offer verbs, and hide one that is there already: Hydra would take it for a broken override."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split(" ")
    last = words[-1]
    if last and "=" not in last:
        print(" ".join(name for name, verb in VERBS.items() if name.startswith(last) and not verb.hidden))
    kept = [words[0], *(normalise(word) for word in words[1:-1] if word not in VERBS), normalise(last)]
    os.environ["COMP_LINE"] = " ".join(kept)
