"""Data: where samples come from, in which order, and how they reach each rank.

Here are the classes that a config names by `_target_`, loaded on first use: preparing data and reading a manifest are done
without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmtrain.data.sources.mixture import Mixture as Mixture
    from slurmtrain.data.sources.prepared import PreparedText as PreparedText
    from slurmtrain.data.sources.text import StdlibText as StdlibText

_HOMES = {"Mixture": "mixture", "PreparedText": "prepared", "StdlibText": "text"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.sources.{_HOMES[name]}"), name)
