"""Data: where samples come from, in which order, and how they reach each rank.

Names are loaded on first use: preparing data and reading a manifest are done without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmtrain.data.batches import IGNORED_TARGET as IGNORED_TARGET
    from slurmtrain.data.batches import Batch as Batch
    from slurmtrain.data.loader import BatchLoader as BatchLoader
    from slurmtrain.data.loader import eval_batches as eval_batches
    from slurmtrain.data.mixture import Mixture as Mixture
    from slurmtrain.data.order import permute as permute
    from slurmtrain.data.order import sample_ids as sample_ids
    from slurmtrain.data.prepared import PreparedText as PreparedText
    from slurmtrain.data.samples import MapDataset as MapDataset
    from slurmtrain.data.text import ByteText as ByteText
    from slurmtrain.data.text import ByteWindows as ByteWindows
    from slurmtrain.data.text import StdlibText as StdlibText
    from slurmtrain.data.text import TextFiles as TextFiles

_HOMES = {
    "batches": ("Batch", "IGNORED_TARGET"),
    "loader": ("BatchLoader", "eval_batches"),
    "mixture": ("Mixture",),
    "order": ("permute", "sample_ids"),
    "prepared": ("PreparedText",),
    "samples": ("MapDataset",),
    "text": ("ByteText", "ByteWindows", "StdlibText", "TextFiles"),
}
_PUBLIC = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
